"""`txbroker groups`: look at producer groups and register them."""

from typing import Any

import click

from txbroker.cli.asking import conclude, confirm, each, require_asking, yes_option
from txbroker.cli.client import ApiClient, ApiError, client_options
from txbroker.cli.completion import complete_groups
from txbroker.cli.lazy import SuggestingGroup
from txbroker.cli.output import Row, TableColumn, output_option, show_data, show_rows
from txbroker.cli.watching import watch_option, watch_rows


def _times(row: Row) -> str:
    names = ("check_after_s", "check_interval_s", "attempts_max", "timeout_s")
    return "/".join("-" if row.get(name) is None else f"{row[name]:g}" for name in names)


COLUMNS = (
    TableColumn("GROUP", lambda row: row["group"]),
    TableColumn("CHECK URL", lambda row: row.get("check_url")),
    TableColumn("SECRET", lambda row: row.get("secret_ref")),
    TableColumn("CONNECTED", lambda row: row["sessions"]),
    TableColumn("AFTER/INTERVAL/ATTEMPTS/TIMEOUT", _times, wide=True),
    TableColumn("PARALLEL", lambda row: row.get("parallel"), wide=True),
    TableColumn("ANSWER BYTES", lambda row: row.get("answer_bytes_max"), wide=True),
)


@click.group("groups", cls=SuggestingGroup)
def command() -> None:
    """Look at producer groups and register them.

    A group needs to be registered only to be checked over HTTP, or to have checks of its own.
    """


@command.command("list")
@watch_option
@output_option
@client_options
def list_command(client: ApiClient, output: str, watch: float | None) -> None:
    """List registered groups."""

    def look() -> list[Row]:
        return list(client.get("groups")["groups"])

    if watch is not None:
        watch_rows(look, COLUMNS, output, watch, lambda row: tuple(row.items()))
    show_rows(look(), COLUMNS, output, "No group is registered.")


@command.command("show")
@click.argument("name", shell_complete=complete_groups)
@output_option
@client_options
def show_command(client: ApiClient, output: str, name: str) -> None:
    """Tell what is registered of a group."""
    found = client.get("groups", name)
    if output in ("json", "yaml"):
        show_data(found, output)
    else:
        show_rows([found], COLUMNS, output, "")


@command.command("register")
@click.argument("name", shell_complete=complete_groups)
@click.option("--check-url", metavar="URL", help="Where check-backs are posted.")
@click.option(
    "--secret-ref",
    metavar="REF",
    help="Where the proxy finds the secret that signs them: env:NAME or file:SECRETS_DIR/GROUP.",
)
@click.option("--check-after-s", type=float, metavar="SECONDS", help="Until the first check.")
@click.option("--check-interval-s", type=float, metavar="SECONDS", help="Between two checks.")
@click.option("--attempts-max", type=int, metavar="N", help="Until a transaction is parked.")
@click.option("--timeout-s", type=float, metavar="SECONDS", help="For the answer to a check.")
@click.option("--parallel", type=int, metavar="N", help="Checks under way at a time.")
@click.option("--answer-bytes-max", type=int, metavar="BYTES", help="The largest answer.")
@yes_option
@output_option
@client_options
def register_command(client: ApiClient, output: str, name: str, yes: bool, **policy: Any) -> None:
    """Register a group, or replace what is registered of it.

    What is left out follows the proxy's configuration.
    """
    require_asking(yes)
    if not yes:
        wanted = {key: value for key, value in policy.items() if value is not None}
        click.echo(f"now:  {_described(_registered(client, name))}", err=True)
        click.echo(f"then: {_described(wanted)}", err=True)
        confirm(f"Register {name} at {client}?", yes)
    found = client.change("PUT", "groups", name, body=policy)
    if output in ("json", "yaml"):
        show_data(found, output)
    else:
        show_rows([found], COLUMNS, output, "")


@command.command("remove")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_groups)
@yes_option
@client_options
def remove_command(client: ApiClient, names: tuple[str, ...], yes: bool) -> None:
    """Remove what is registered of groups; their transactions stay."""
    require_asking(yes)
    if not yes:
        for name in names:
            click.echo(f"{name}: {_described(_registered(client, name))}", err=True)
        confirm(f"Remove {', '.join(names)} at {client}?", yes)
    done = each(names, lambda name: dict(client.change("DELETE", "groups", name)))
    for row in done:
        click.echo(row["group"])
    conclude(len(done), len(names), "removed")


def _registered(client: ApiClient, name: str) -> Row | None:
    try:
        return dict(client.get("groups", name))
    except ApiError as error:
        if error.code == "unknown_group":
            return None
        raise


def _described(policy: Row | None) -> str:
    if policy is None:
        return "not registered"
    shown = [f"{key} {value}" for key, value in policy.items() if key not in ("group", "sessions")]
    return ", ".join(shown) or "registered, all by the proxy's configuration"
