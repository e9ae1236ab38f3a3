"""`txbroker context`: the addresses of several installations, by name."""

import os
from pathlib import Path

import click

from txbroker.cli.contexts import (
    Context,
    Contexts,
    CredentialFiles,
    ProxyOptions,
    ProxyTarget,
    check_name,
    check_url,
    choose,
    complete_contexts,
)
from txbroker.cli.lazy import SuggestingGroup
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
    """Name several installations, and say which one to call.

    A context is a proxy's address and the files that go along: its token, the authority of its
    certificate, your own certificate. Only their paths are stored. Contexts are in contexts.json
    in your own config folder, readable for nobody else.

    A command calls the first of these that is there: --url, --context, TXBROKER_URL,
    TXBROKER_CONTEXT, the context of `txbroker context use`, http://127.0.0.1:8470. The files go
    with the address: a context's own; with a URL, --token-file or TXBROKER_TOKEN_FILE and so on.
    What stands on the command line wins over all.
    """


@command.command("list")
@output_option
def list_command(output: str) -> None:
    """List contexts."""
    contexts = Contexts()
    rows = [_row(contexts.get(name), contexts.current) for name in contexts.names()]
    show_rows(rows, COLUMNS, output, "There is no context; `txbroker context set` makes one.")


@command.command("show")
@click.argument("name", required=False, shell_complete=complete_contexts)
@output_option
def show_command(name: str | None, output: str) -> None:
    """Show a context; without NAME, which proxy is called, and why that one."""
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
    """Call this installation where nothing else is said."""
    contexts = Contexts()
    contexts.use(name)
    contexts.save()
    click.echo(f"Commands call {contexts.get(name).url} now.", err=True)


@command.command("set")
@click.argument("name", shell_complete=complete_contexts)
@click.option("--url", required=True, metavar="URL", help="Where a proxy is.")
@click.option(
    "--token-file",
    type=_FILE,
    metavar="FILE",
    help="The file that holds the proxy's token. Only its path is stored.",
)
@click.option(
    "--ca-file",
    type=_FILE,
    metavar="FILE",
    help="Certificates of the authorities that may sign the proxy's (PEM).",
)
@click.option(
    "--client-cert-file",
    type=_FILE,
    metavar="FILE",
    help="The certificate to show where the proxy asks for one (PEM).",
)
@click.option(
    "--client-key-file",
    type=_FILE,
    metavar="FILE",
    help="Its private key (PEM), unless it is in the same file.",
)
@click.option("--use", is_flag=True, help="Call it from now on where nothing else is said.")
def set_command(name: str, url: str, use: bool, **files: Path | None) -> None:
    """Make a context, or replace the one of that name."""
    contexts = Contexts()
    papers = CredentialFiles(**{field: path and path.absolute() for field, path in files.items()})
    if papers.client_key_file is not None and papers.client_cert_file is None:
        raise click.UsageError("--client-key-file needs --client-cert-file")
    contexts.put(Context(check_name(name), check_url(url), papers))
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
    """Forget contexts."""
    contexts = Contexts()
    for name in dict.fromkeys(names):
        if name == contexts.current:
            click.echo(f"{name} was the current context; there is none now.", err=True)
        contexts.remove(name)
    contexts.save()


def _environment() -> ProxyOptions:
    found = {name: os.environ.get(f"TXBROKER_{name.upper()}") for name in CredentialFiles._fields}
    papers = CredentialFiles(**{name: Path(path) if path else None for name, path in found.items()})
    return ProxyOptions(os.environ.get("TXBROKER_URL"), os.environ.get("TXBROKER_CONTEXT"), papers)


def _row(context: Context, current: str) -> Row:
    return {
        "name": context.name,
        "url": context.url,
        **_files(context.papers),
        "current": context.name == current,
    }


def _chosen(target: ProxyTarget) -> Row:
    return {
        "url": target.url,
        **_files(target.papers),
        "context": target.context or None,
        "source": target.source,
    }


def _files(papers: CredentialFiles) -> Row:
    named = papers.named()
    return {name: named.get(name) for name in CredentialFiles._fields}
