"""Contexts: named addresses of installations, in the user's config folder.

A command calls the first proxy of this list that is set. A token belongs to its address, so that it
is never sent to another installation's proxy:

1. `--url`, with `--token-file` or TXBROKER_TOKEN_FILE
2. `--context`
3. TXBROKER_URL, with TXBROKER_TOKEN_FILE
4. TXBROKER_CONTEXT
5. the context of `txbroker context use`
6. http://127.0.0.1:8470, with TXBROKER_TOKEN_FILE

`--token-file`, `--ca-file` and `--client-cert-file` on the command line override all others.
Certificates belong to their address as a token does.
"""

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click

from txbroker.cli.main import SuggestingGroup
from txbroker.cli.options import with_options
from txbroker.cli.output import Row, TableColumn, output_option, replacing, show_one, show_rows

DEFAULT_URL = "http://127.0.0.1:8470"
NAME_CHARS_MAX = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARS_MAX - 1}}}")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FILE_BYTES_MAX = 1 << 20


class CredentialFiles(NamedTuple):
    """The files that authenticate proxy and caller to one another.

    Attributes:
        token_file: the proxy's token.
        ca_file: authorities that may sign the proxy's certificate; None: the system's.
        client_cert_file: the caller's certificate.
        client_key_file: its private key; None: in the same file.
    """

    token_file: Path | None = None
    ca_file: Path | None = None
    client_cert_file: Path | None = None
    client_key_file: Path | None = None

    def before(self, others: "CredentialFiles") -> "CredentialFiles":
        """Return these files, completed by others; a key stays with its certificate."""
        pair = self if self.client_cert_file or self.client_key_file else others
        return CredentialFiles(
            self.token_file or others.token_file,
            self.ca_file or others.ca_file,
            pair.client_cert_file,
            pair.client_key_file,
        )

    def named(self) -> dict[str, str]:
        """Return the files that are set, by name."""
        return {name: str(path) for name, path in self._asdict().items() if path is not None}


NO_CREDENTIALS = CredentialFiles()
FILE_HELP = {
    "token_file": "The file that holds the proxy's token.",
    "ca_file": "Authorities that may sign the proxy's certificate (PEM); default: those "
    "that the system trusts.",
    "client_cert_file": "The client certificate, where the proxy requires one (PEM).",
    "client_key_file": "Its private key (PEM), unless it is in the same file.",
}
"""What the options of these files do, by field."""


class Context(NamedTuple):
    """One installation: a proxy's address and credentials."""

    name: str
    url: str
    credentials: CredentialFiles = NO_CREDENTIALS


class ProxyOptions(NamedTuple):
    """How one source, command line or environment, chooses the proxy."""

    url: str | None = None
    context: str | None = None
    credentials: CredentialFiles = NO_CREDENTIALS


class ProxyTarget(NamedTuple):
    """The proxy that a command calls, and the option or variable that chose it."""

    url: str
    credentials: CredentialFiles
    source: str
    context: str = ""

    def __str__(self) -> str:
        return f"{self.url} (context {self.context})" if self.context else self.url


class Contexts:
    """The contexts in the user's file."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or Path(click.get_app_dir("txbroker")) / "contexts.json"
        self.current, self._by_name = _load(self.path)

    def names(self) -> list[str]:
        """Return the names of all contexts, sorted."""
        return sorted(self._by_name)

    def get(self, name: str) -> Context:
        """Return a context."""
        context = self._by_name.get(name)
        if context is None:
            known = ", ".join(self.names())
            hint = f"there are {known}" if known else "make one with `txbroker context set`"
            raise click.UsageError(f"there is no context {name!r}: {hint}")
        return context

    def put(self, context: Context) -> None:
        """Add a context, or replace the one of that name."""
        self._by_name[context.name] = context

    def use(self, name: str) -> None:
        """Make a context the current one."""
        self.current = self.get(name).name

    def remove(self, name: str) -> None:
        """Remove a context."""
        del self._by_name[self.get(name).name]
        if self.current == name:
            self.current = ""

    def save(self) -> None:
        """Replace the file atomically; only its owner may read it."""
        contexts: dict[str, dict[str, str]] = {}
        for name in self.names():
            context = self._by_name[name]
            contexts[name] = {"url": context.url, **context.credentials.named()}
        text = json.dumps({"current": self.current, "contexts": contexts}, indent=2) + "\n"
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self.path, text):
                pass
        except (OSError, UnicodeEncodeError) as error:
            reason = getattr(error, "strerror", None) or "the path is not UTF-8"
            raise click.ClickException(f"{self.path} cannot be written: {reason}") from None


def check_name(name: str) -> str:
    """Return a valid name of a context."""
    if not _NAME.fullmatch(name):
        raise click.UsageError(
            f"{name!r} is no name of a context: use up to {NAME_CHARS_MAX} letters, digits, "
            "'.', '_' and '-', beginning with a letter or digit"
        )
    return name


def check_url(url: str) -> str:
    """Return a proxy's URL without a slash at its end."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise click.UsageError(f"--url {url!r} is no URL: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise click.UsageError(
            "--url holds a name or password: give the token's file by --token-file"
        )
    whole = host and not parts.query and not parts.fragment and url.isprintable()
    if parts.scheme not in ("http", "https") or not whole:
        raise click.UsageError(f"--url {url!r} is no URL like {DEFAULT_URL}")
    return url.rstrip("/")


def choose(typed: ProxyOptions, environ: ProxyOptions, path: Path | None = None) -> ProxyTarget:
    """Return the proxy to call, by the command line and the environment."""
    credentials = typed.credentials.before(environ.credentials)
    if typed.url and typed.context:
        raise click.UsageError("--url and --context exclude each other: give one of them")
    if typed.url:
        return ProxyTarget(typed.url, credentials, "--url")
    if typed.context:
        return _named(Contexts(path), typed.context, "--context", typed)
    if environ.url:
        return ProxyTarget(environ.url, credentials, "TXBROKER_URL")
    contexts = Contexts(path)
    if environ.context:
        return _named(contexts, environ.context, "TXBROKER_CONTEXT", typed)
    if contexts.current:
        return _named(contexts, contexts.current, "txbroker context use", typed)
    return ProxyTarget(DEFAULT_URL, credentials, "default")


def target_of(context: click.Context) -> ProxyTarget:
    """Return the proxy that a command with `client_options` calls."""
    typed: dict[str, Any] = {}
    environ: dict[str, Any] = {}
    for name in ("url", "context", *CredentialFiles._fields):
        source = context.get_parameter_source(name)
        is_typed = source is click.core.ParameterSource.COMMANDLINE
        (typed if is_typed else environ)[name] = context.params.get(name)
    return choose(proxy_options(typed), proxy_options(environ))


def proxy_options(values: Mapping[str, Any]) -> ProxyOptions:
    """Return the options of one source, from its values by name."""
    credentials = CredentialFiles(**{name: values.get(name) for name in CredentialFiles._fields})
    return ProxyOptions(values.get("url"), values.get("context"), credentials)


def complete_contexts(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the contexts that begin with `incomplete`, for a shell."""
    try:
        return [name for name in Contexts().names() if name.startswith(incomplete)]
    except click.ClickException:
        return []


def _named(contexts: Contexts, name: str, source: str, typed: ProxyOptions) -> ProxyTarget:
    context = contexts.get(name)
    return ProxyTarget(context.url, typed.credentials.before(context.credentials), source, name)


def _load(path: Path) -> tuple[str, dict[str, Context]]:
    try:
        with path.open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS_WRITE:
                raise click.UsageError(
                    f"other users may write to {path}, and could send your token elsewhere: "
                    f"check its content, then `chmod 600 {path}`"
                )
            return _decode(json.loads(file.read(_FILE_BYTES_MAX)))
    except (FileNotFoundError, NotADirectoryError):
        return "", {}
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise click.UsageError(
            f"{path} is not as `txbroker context` writes it: repair or remove it"
        ) from None


def _decode(data: Mapping[str, Any]) -> tuple[str, dict[str, Context]]:
    contexts = {}
    for name, fields in data["contexts"].items():
        url = fields["url"]
        named = {
            field: fields[field]
            for field in CredentialFiles._fields
            if fields.get(field) is not None
        }
        texts = [name, url, *named.values()]
        if not all(isinstance(text, str) for text in texts) or not _NAME.fullmatch(name):
            raise TypeError(name)
        credentials = CredentialFiles(**{field: Path(path) for field, path in named.items()})
        contexts[name] = Context(name, url, credentials)
    current = data.get("current", "")
    if not isinstance(current, str) or (current and current not in contexts):
        raise KeyError(current)
    return current, contexts


_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_TLS = (
    TableColumn("CA FILE", wide=True),
    TableColumn("CLIENT CERT FILE", wide=True),
    TableColumn("CLIENT KEY FILE", wide=True),
)
COLUMNS = (
    TableColumn("CURRENT", lambda row: "*" if row["current"] else " ", rank=1),
    TableColumn("NAME", keep=True),
    TableColumn("URL", keep=True),
    TableColumn("TOKEN FILE"),
    *_TLS,
)
CHOSEN = (
    TableColumn("URL", keep=True),
    TableColumn("TOKEN FILE"),
    *_TLS,
    TableColumn("CONTEXT"),
    TableColumn("BECAUSE OF", lambda row: row["source"]),
)


@click.group("context", cls=SuggestingGroup)
def command() -> None:
    """Name installations, and choose the one to call.

    A context is a proxy's address and its credentials: the files of the token, of the authority
    that signs the proxy's certificate, and of your own certificate. Only their paths are stored,
    in contexts.json in your config folder, which only you can read.

    A command calls the first of these that is set: --url, --context, TXBROKER_URL,
    TXBROKER_CONTEXT, the context of `txbroker context use`, http://127.0.0.1:8470. Credentials
    belong to the address: a context has its own; a URL takes --token-file or TXBROKER_TOKEN_FILE
    and so on. Options on the command line override all others.
    """


@command.command("list")
@output_option
def list_command(output: str) -> None:
    """List contexts."""
    contexts = Contexts()
    rows = [_row(contexts.get(name), contexts.current) for name in contexts.names()]
    show_rows(rows, COLUMNS, output, "There is no context; `txbroker context set` creates one.")


@command.command("show")
@click.argument("name", required=False, shell_complete=complete_contexts)
@output_option
def show_command(name: str | None, output: str) -> None:
    """Show a context; without NAME, the proxy that commands call, and its source."""
    if name is None:
        chosen, columns = _chosen(choose(ProxyOptions(), _environment())), CHOSEN
    else:
        contexts = Contexts()
        chosen, columns = _row(contexts.get(name), contexts.current), COLUMNS
    show_one(chosen, columns, output)


@command.command("use")
@click.argument("name", shell_complete=complete_contexts)
def use_command(name: str) -> None:
    """Make a context the current one."""
    contexts = Contexts()
    contexts.use(name)
    contexts.save()
    click.echo(f"Commands now call {contexts.get(name).url}.", err=True)


@command.command("set")
@click.argument("name", shell_complete=complete_contexts)
@click.option("--url", required=True, metavar="URL", help="Address of a proxy.")
@with_options(
    *(
        click.option(f"--{name.replace('_', '-')}", type=_FILE, metavar="FILE", help=text)
        for name, text in FILE_HELP.items()
    )
)
@click.option("--use", is_flag=True, help="Make it the current context.")
def set_command(name: str, url: str, use: bool, **files: Path | None) -> None:
    """Create a context, or replace the one of that name."""
    contexts = Contexts()
    absolute = {field: path and path.absolute() for field, path in files.items()}
    credentials = CredentialFiles(**absolute)
    if credentials.client_key_file is not None and credentials.client_cert_file is None:
        raise click.UsageError("--client-key-file needs --client-cert-file")
    contexts.put(Context(check_name(name), check_url(url), credentials))
    if use:
        contexts.use(name)
    contexts.save()
    if contexts.current != name:
        click.echo(f"`txbroker context use {name}` makes it the current one.", err=True)


@command.command("remove")
@click.argument(
    "names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_contexts
)
def remove_command(names: tuple[str, ...]) -> None:
    """Remove contexts."""
    contexts = Contexts()
    for name in dict.fromkeys(names):
        if name == contexts.current:
            click.echo(f"{name} was the current context; now there is none.", err=True)
        contexts.remove(name)
    contexts.save()


def _environment() -> ProxyOptions:
    values = {
        name: os.environ.get(f"TXBROKER_{name.upper()}")
        for name in ("url", "context", *CredentialFiles._fields)
    }
    files = {name: Path(path) for name in CredentialFiles._fields if (path := values[name])}
    return proxy_options({"url": values["url"], "context": values["context"], **files})


def _row(context: Context, current: str) -> Row:
    return {
        "name": context.name,
        "url": context.url,
        **_files(context.credentials),
        "current": context.name == current,
    }


def _chosen(target: ProxyTarget) -> Row:
    return {
        "url": target.url,
        **_files(target.credentials),
        "context": target.context or None,
        "source": target.source,
    }


def _files(credentials: CredentialFiles) -> Row:
    named = credentials.named()
    return {name: named.get(name) for name in CredentialFiles._fields}
