"""`txbroker context`: named addresses of installations."""

import os
from pathlib import Path

import click

from txbroker.cli.contexts import (
    FILE_HELP,
    Context,
    Contexts,
    CredentialFiles,
    ProxyOptions,
    ProxyTarget,
    check_name,
    check_url,
    choose,
    complete_contexts,
    proxy_options,
)
from txbroker.cli.lazy import SuggestingGroup
from txbroker.cli.options import with_options
from txbroker.cli.output import Row, TableColumn, output_option, show_data, show_rows

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_TLS = (
    TableColumn("CA FILE", lambda row: row["ca_file"], wide=True),
    TableColumn("CLIENT CERT FILE", lambda row: row["client_cert_file"], wide=True),
    TableColumn("CLIENT KEY FILE", lambda row: row["client_key_file"], wide=True),
)
COLUMNS = (
    TableColumn("CURRENT", lambda row: "*" if row["current"] else " "),
    TableColumn("NAME", lambda row: row["name"]),
    TableColumn("URL", lambda row: row["url"]),
    TableColumn("TOKEN FILE", lambda row: row["token_file"]),
    *_TLS,
)
CHOSEN = (
    TableColumn("URL", lambda row: row["url"]),
    TableColumn("TOKEN FILE", lambda row: row["token_file"]),
    *_TLS,
    TableColumn("CONTEXT", lambda row: row["context"]),
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
    if output in ("json", "yaml"):
        show_data(chosen, output)
    else:
        show_rows([chosen], columns, output, "")


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
