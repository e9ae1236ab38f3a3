"""`txbroker principals`: who may call a proxy, kept in a principals file."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from txbroker.cli.lazy import SuggestingGroup
from txbroker.cli.output import Row, TableColumn, output_option, show_rows
from txbroker.cli.run import CommandFailed
from txbroker.errors import ConfigurationError
from txbroker.principals import (
    Role,
    digest_of,
    format_principal,
    make_token,
    read_principals,
)

F = TypeVar("F", bound=Callable[..., Any])

_PATTERNS = ("groups", "deny_groups", "topics", "deny_topics")
COLUMNS = (
    TableColumn("NAME", lambda row: row["name"]),
    TableColumn("ROLE", lambda row: row["role"]),
    TableColumn("GROUPS", lambda row: row["groups"]),
    TableColumn("TOPICS", lambda row: row["topics"]),
    TableColumn("CREDENTIAL", lambda row: row["credential"]),
    TableColumn("EXPIRES", lambda row: row["expires"]),
)
file_option = click.option(
    "--principals-file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    envvar="TXBROKER_PRINCIPALS_FILE",
    help="The proxies' principals file. [env: TXBROKER_PRINCIPALS_FILE]",
)


@click.group("principals", cls=SuggestingGroup)
def command() -> None:
    """Say who may call a proxy, in which role, for which groups and topics.

    Proxies read their principals file again when it changes. To take a principal's access away,
    remove its table from the file.
    """


def _patterns_option(name: str, text: str) -> Callable[[F], F]:
    return click.option(
        f"--{name.replace('_', '-').removesuffix('s')}",
        name,
        multiple=True,
        metavar="PATTERN",
        help=f"{text} `*` and `?` are wildcards; may be given several times.",
    )


@command.command("add")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    default=Role.PRODUCER.value,
    show_default=True,
    help="What the principal may do.",
)
@_patterns_option("groups", "A producer group it may act for.")
@_patterns_option("deny_groups", "A producer group it may not act for, whatever --group says.")
@_patterns_option("topics", "A topic it may write.")
@_patterns_option("deny_topics", "A topic it may not write, whatever --topic says.")
@click.option(
    "--certificate",
    "certificates",
    multiple=True,
    metavar="NAME",
    help="Identify it by this name in its client certificate, and make no token.",
)
@click.option(
    "--expires", type=click.DateTime(), help="From then on (UTC) its credential is refused."
)
@file_option
def add_command(
    name: str,
    role: str,
    path: Path,
    certificates: tuple[str, ...],
    expires: datetime | None,
    **patterns: tuple[str, ...],
) -> None:
    """Add a principal, and print its token: it is shown this once, the file holds its hash."""
    token = None if certificates else make_token()
    table = format_principal(
        name,
        Role(role),
        digest=None if token is None else digest_of(token),
        certificates=certificates,
        patterns={field: patterns[field] for field in _PATTERNS},
        expires=expires,
    )
    path = path.resolve()  # a link stays one
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(path.parent):
            _add(path, name, table)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}") from None
    if token is not None:
        click.echo(token)
        click.echo(f"added {name} to {path}; its token is shown only here", err=True)
    else:
        click.echo(f"added {name} to {path}", err=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other commands from changing a file in this folder meanwhile."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _add(path: Path, name: str, table: str) -> None:
    """Add a principal's table to a file.

    Raises:
        CommandFailed: the principal is there.
        ConfigurationError: the file cannot be used, or not with this principal.
        OSError: it cannot be written.
    """
    if path.exists():
        if read_principals(path).by_name(name, expired=True) is not None:
            raise CommandFailed(f"principal {name} is in {path} already: remove its table first")
        table = f"{path.read_text(encoding='utf-8').rstrip()}\n\n{table}"
    _replace(path, table)


def _replace(path: Path, content: str) -> None:
    """Replace the file as a whole, if the new one can be used.

    Raises:
        ConfigurationError: it cannot.
        OSError: it cannot be written.
    """
    made, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    new = Path(name)
    try:
        with os.fdopen(made, "w", encoding="utf-8") as file:
            file.write(content)
        if path.exists():
            status = path.stat()
            new.chmod(status.st_mode & 0o777)
            os.chown(new, status.st_uid, status.st_gid)
        try:
            read_principals(new)
        except ConfigurationError as error:
            raise ConfigurationError(str(error).replace(str(new), str(path))) from None
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@command.command("list")
@output_option
@file_option
def list_command(path: Path, output: str) -> None:
    """List the principals of a file."""
    rows: list[Row] = [
        {
            "name": principal.name,
            "role": str(principal.role),
            "groups": str(principal.groups),
            "topics": str(principal.topics),
            "credential": "token" if principal.digests else ", ".join(principal.certificates),
            "expires": None if principal.expires_s is None else _time(principal.expires_s),
        }
        for principal in read_principals(path)
    ]
    show_rows(rows, COLUMNS, output, "There is no principal.")


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().isoformat(timespec="seconds")
