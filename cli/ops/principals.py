"""`txbroker principals`: manage a principals file, which holds who may call a proxy."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from txbroker.cli.main import SuggestingGroup
from txbroker.cli.options import FILE, env_option
from txbroker.cli.output import Row, TableColumn, output_option, replacing, show_rows
from txbroker.cli.run import CommandFailed
from txbroker.errors import ConfigurationError
from txbroker.principals import Role, digest_of, format_principal, make_token, read_principals

F = TypeVar("F", bound=Callable[..., Any])

_PATTERNS = ("groups", "deny_groups", "topics", "deny_topics")
COLUMNS = (
    TableColumn("NAME", keep=True),
    TableColumn("ROLE"),
    TableColumn("GROUPS", text=True),
    TableColumn("TOPICS", text=True),
    TableColumn("CREDENTIAL"),
    TableColumn("EXPIRES"),
)
file_option = env_option(
    "--principals-file",
    "The proxies' principals file.",
    param="path",
    type=FILE,
    required=True,
    metavar="FILE",
)


@click.group("principals", cls=SuggestingGroup)
def command() -> None:
    """Manage who may call a proxy, in which role, for which groups and topics.

    Proxies reload their principals file when it changes. To revoke a principal's access, remove its
    table from the file.
    """


def _patterns_option(name: str, text: str) -> Callable[[F], F]:
    return click.option(
        f"--{name.replace('_', '-').removesuffix('s')}",
        name,
        multiple=True,
        metavar="PATTERN",
        help=f"{text} `*` and `?` are wildcards. Repeatable.",
    )


@command.command("add")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    default=Role.PRODUCER.value,
    show_default=True,
    help="Role of the principal.",
)
@_patterns_option("groups", "A producer group it may act for.")
@_patterns_option("deny_groups", "A producer group it may not act for; overrides --group.")
@_patterns_option("topics", "A topic it may write.")
@_patterns_option("deny_topics", "A topic it may not write; overrides --topic.")
@click.option(
    "--certificate",
    "certificates",
    multiple=True,
    metavar="NAME",
    help="Identify it by this name in its client certificate, and create no token. Repeatable.",
)
@click.option("--expires", type=click.DateTime(), help="Time (UTC) when its credential expires.")
@file_option
def add_command(
    name: str,
    role: str,
    path: Path,
    certificates: tuple[str, ...],
    expires: datetime | None,
    **patterns: tuple[str, ...],
) -> None:
    """Add a principal, and print its token once; the file holds only its hash."""
    token = None if certificates else make_token()
    table = format_principal(
        name,
        Role(role),
        digest=None if token is None else digest_of(token),
        certificates=certificates,
        patterns={field: patterns[field] for field in _PATTERNS},
        expires=expires,
    )
    path = path.resolve()  # so that a link is not replaced by a file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(path.parent):
            _add(path, name, table)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}") from None
    if token is not None:
        click.echo(token)
        click.echo(f"added {name} to {path}; its token is not shown again", err=True)
    else:
        click.echo(f"added {name} to {path}", err=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock that commands take to change a file in this folder."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _add(path: Path, name: str, table: str) -> None:
    if path.exists():
        if read_principals(path).by_name(name, expired=True) is not None:
            raise CommandFailed(f"principal {name} is already in {path}: remove its table first")
        table = f"{path.read_text(encoding='utf-8').rstrip()}\n\n{table}"
    _replace(path, table)


def _replace(path: Path, content: str) -> None:
    """Replace the file atomically, if the new content is valid."""
    with replacing(path, content) as new:
        if path.exists():
            status = path.stat()
            new.chmod(status.st_mode & 0o777)
            os.chown(new, status.st_uid, status.st_gid)
        try:
            read_principals(new)
        except ConfigurationError as error:
            raise ConfigurationError(str(error).replace(str(new), str(path))) from None


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
