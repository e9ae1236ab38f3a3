"""`txbroker send`: a whole transaction from the command line."""

import base64
import sys
from pathlib import Path
from typing import Any, BinaryIO

import click

from txbroker.cli.client import ApiClient, ApiError, client_options
from txbroker.cli.options import SectionedCommand
from txbroker.cli.output import object_output_option, show_data
from txbroker.cli.run import PartlyDone
from txbroker.contract.transactions import StandingBody


@click.command("send", cls=SectionedCommand)
@click.argument("topic")
@click.argument("values", nargs=-1, metavar="[VALUE]...")
@click.option("--group", default="cli", show_default=True, help="The producer group.")
@click.option("--key", metavar="TEXT", help="The key of each message.")
@click.option("-H", "--header", multiple=True, metavar="NAME=TEXT", help="A header of each.")
@click.option("--partition", type=click.IntRange(min=0), metavar="N", help="The partition of each.")
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(allow_dash=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Send this file's bytes as a value; - is stdin.",
)
@click.option("--lines", is_flag=True, help="Each line of the files is a value.")
@click.option("--tombstone", is_flag=True, help="Send a message without value.")
@click.option("--order-key", metavar="TEXT", help="Commits of one key stay in order.")
@click.option("--dedup-key", metavar="TEXT", help="The same key again sends nothing.")
@click.option("--check-after-s", type=float, metavar="SECONDS", help="Time until the first check.")
@click.option(
    "--decision",
    type=click.Choice(["commit", "rollback", "none"]),
    default="commit",
    show_default=True,
    help="The decision; none leaves the transaction pending.",
)
@click.option("--wait", is_flag=True, help="Return only when consumers can see the messages.")
@object_output_option
@client_options
def command(
    client: ApiClient,
    output: str,
    topic: str,
    values: tuple[str, ...],
    files: tuple[Path, ...],
    lines: bool,
    tombstone: bool,
    decision: str,
    wait: bool,
    **options: Any,
) -> None:
    """Send messages to TOPIC as one transaction.

    Prints the transaction's id. Without a VALUE and --file the value is read from stdin.
    """
    contents: list[dict[str, Any]] = [{"value": value} for value in values]
    if tombstone:
        contents.append({"value": None})
    if not files and not contents:
        files = (Path("-"),)
    for file in files:
        contents.extend(_from_file(file, lines))
    if not contents:
        raise click.UsageError("there is no value to send")
    messages = _messages(topic, contents, options)
    fields = {name: options[name] for name in ("group", "order_key", "dedup_key", "check_after_s")}
    body = {**fields, "messages": messages}
    status = client.as_struct(client.change("POST", "transactions", body=body), StandingBody)
    if decision != "none":
        status = _decide(client, status.id, decision, options["group"], wait)
    if output in ("json", "yaml"):
        show_data(status, output)
    else:
        click.echo(status.id)
        click.echo(f"{len(messages)} for {topic}: {status.state}", err=True)


def _decide(client: ApiClient, id: str, decision: str, group: str, wait: bool) -> StandingBody:
    body = {"group": group}
    if wait and decision == "commit":
        body["wait"] = "promoted"
    try:
        answer = client.change("POST", "transactions", id, decision, body=body)
        return client.as_struct(answer, StandingBody)
    except ApiError as error:
        click.echo(id)
        raise PartlyDone(
            f"the transaction is prepared, but its {decision} may have failed: "
            f"{error.format_message()}. Repeat it with `txbroker tx {decision} {id}`"
        ) from None


def _messages(
    topic: str, contents: list[dict[str, Any]], options: dict[str, Any]
) -> list[dict[str, Any]]:
    shared: dict[str, Any] = {"topic": topic}
    if options["key"] is not None:
        shared["key"] = options["key"]
    if options["partition"] is not None:
        shared["partition"] = options["partition"]
    if options["header"]:
        shared["headers"] = [_header(text) for text in options["header"]]
    return [{**shared, **content} for content in contents]


def _header(text: str) -> list[str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"--header {text!r}: expected NAME=TEXT")
    return [name, value]


def _from_file(path: Path, lines: bool) -> list[dict[str, Any]]:
    try:
        raw = _stdin().read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise click.UsageError(f"--file {path}: {error.strerror}") from None
    if lines:
        return [_content(line) for line in raw.splitlines()]
    return [_content(raw)]


def _stdin() -> BinaryIO:
    if sys.stdin.isatty():
        click.echo("Type the value and end it with Ctrl-D.", err=True)
    return sys.stdin.buffer


def _content(raw: bytes) -> dict[str, Any]:
    try:
        return {"value": raw.decode()}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(raw).decode()}
