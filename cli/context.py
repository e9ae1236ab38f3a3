"""`txbroker context`: the addresses of several installations, by name."""

import os
from pathlib import Path

import click

from txbroker.cli.contexts import (
    Context,
    Contexts,
    Given,
    Target,
    check_name,
    check_url,
    choose,
    complete_contexts,
)
from txbroker.cli.lazy import SuggestingGroup
from txbroker.cli.output import Column, Row, output_option, show_data, show_rows

COLUMNS = (
    Column("CURRENT", lambda row: "*" if row["current"] else " "),
    Column("NAME", lambda row: row["name"]),
    Column("URL", lambda row: row["url"]),
    Column("TOKEN FILE", lambda row: row["token_file"]),
)
CHOSEN = (
    Column("URL", lambda row: row["url"]),
    Column("TOKEN FILE", lambda row: row["token_file"]),
    Column("CONTEXT", lambda row: row["context"]),
    Column("BECAUSE OF", lambda row: row["source"]),
)


@click.group("context", cls=SuggestingGroup)
def command() -> None:
    """Name several installations, and say which one to call.

    A context is a proxy's address and the file that holds its token; the token itself is never
    stored. Contexts are in contexts.json in your own config folder, readable for nobody else.

    A command calls the first of these that is there: --url, --context, TXBROKER_URL,
    TXBROKER_CONTEXT, the context of `txbroker context use`, http://127.0.0.1:8470. The token goes
    with the address: a context's own; with a URL, --token-file or TXBROKER_TOKEN_FILE.
    --token-file on the command line wins over all.
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
        chosen, columns = _chosen(choose(Given(), _environment())), CHOSEN
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
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="The file that holds the proxy's token. Only its path is stored.",
)
@click.option("--use", is_flag=True, help="Call it from now on where nothing else is said.")
def set_command(name: str, url: str, token_file: Path | None, use: bool) -> None:
    """Make a context, or replace the one of that name."""
    contexts = Contexts()
    where = None if token_file is None else token_file.absolute()
    contexts.put(Context(check_name(name), check_url(url), where))
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


def _environment() -> Given:
    token_file = os.environ.get("TXBROKER_TOKEN_FILE")
    return Given(
        os.environ.get("TXBROKER_URL"),
        Path(token_file) if token_file else None,
        os.environ.get("TXBROKER_CONTEXT"),
    )


def _row(context: Context, current: str) -> Row:
    return {
        "name": context.name,
        "url": context.url,
        "token_file": None if context.token_file is None else str(context.token_file),
        "current": context.name == current,
    }


def _chosen(target: Target) -> Row:
    return {
        "url": target.url,
        "token_file": None if target.token_file is None else str(target.token_file),
        "context": target.context or None,
        "source": target.source,
    }
