"""`txbroker groups`: show producer groups and register them."""

from typing import Any

import click

from txbroker.cli.client import ApiClient, ApiError, client_options, for_all
from txbroker.cli.completion import complete_groups
from txbroker.cli.main import SuggestingGroup
from txbroker.cli.options import conclude, confirm, require_terminal, yes_option
from txbroker.cli.output import Row, TableColumn, output_option, show_one, show_rows
from txbroker.cli.watching import watch_option, watch_rows
from txbroker.contract.groups import GroupAnswer, GroupsBody, TestedBody


def _times(row: GroupAnswer) -> str:
    times = (row.check_after_s, row.check_interval_s, row.attempts_max, row.timeout_s)
    return "/".join("-" if value is None else f"{value:g}" for value in times)


COLUMNS = (
    TableColumn("GROUP", keep=True),
    TableColumn("CHECK URL"),
    TableColumn("SECRET", lambda row: row.secret_ref),
    TableColumn("CONNECTED", lambda row: row.sessions, rank=1),
    TableColumn("AFTER/INTERVAL/ATTEMPTS/TIMEOUT", _times, wide=True),
    TableColumn("PARALLEL", wide=True),
    TableColumn("ANSWER BYTES", lambda row: row.answer_bytes_max, wide=True),
    TableColumn("SIGNED ANSWERS", lambda row: row.signed_answers, wide=True),
)


TESTED = (
    TableColumn("GROUP", keep=True),
    TableColumn("RESULT", lambda row: "answered" if row.answered else "fails", rank=0),
    TableColumn("ANSWER", lambda row: row.answer or row.status, rank=1),
    TableColumn("TOOK", lambda row: f"{row.took_ms:,.1f} ms"),
    TableColumn("SIGNATURE", lambda row: row.signature or "no secret"),
    TableColumn("ENDPOINT", rank=3),
    TableColumn("WHY", rank=1, text=True),
)


@click.group("groups", cls=SuggestingGroup)
def command() -> None:
    """Show producer groups and register them.

    Registration is necessary only for checks over HTTP, or for a check policy of the group.
    """


@command.command("list")
@watch_option
@output_option
@client_options
def list_command(client: ApiClient, output: str, watch: float | None) -> None:
    """List registered groups."""

    def look() -> list[GroupAnswer]:
        return client.read(GroupsBody, "groups").groups

    if watch is not None:
        watch_rows(look, COLUMNS, output, watch, lambda row: row)
    show_rows(look(), COLUMNS, output, "No group is registered.")


@command.command("show")
@click.argument("name", shell_complete=complete_groups)
@output_option
@client_options
def show_command(client: ApiClient, output: str, name: str) -> None:
    """Show the registration of a group."""
    show_one(client.read(GroupAnswer, "groups", name), COLUMNS, output)


@command.command("register")
@click.argument("name", shell_complete=complete_groups)
@click.option("--check-url", metavar="URL", help="The URL that receives check-backs.")
@click.option(
    "--secret-ref",
    metavar="REF",
    help="The secret that signs them, at the proxy: env:NAME or file:SECRETS_DIR/GROUP.",
)
@click.option("--check-after-s", type=float, metavar="SECONDS", help="Time until the first check.")
@click.option("--check-interval-s", type=float, metavar="SECONDS", help="Time between two checks.")
@click.option("--attempts-max", type=int, metavar="N", help="Attempts before parking.")
@click.option("--timeout-s", type=float, metavar="SECONDS", help="Timeout of a check.")
@click.option("--parallel", type=int, metavar="N", help="Maximum number of checks in flight.")
@click.option("--answer-bytes-max", type=int, metavar="BYTES", help="The largest answer.")
@click.option(
    "--signed-answers",
    is_flag=True,
    default=None,
    help="Accept answers of the check URL only if they are signed with the secret.",
)
@yes_option
@output_option
@client_options
def register_command(client: ApiClient, output: str, name: str, yes: bool, **policy: Any) -> None:
    """Register a group, or replace its registration.

    Options that are left out follow the proxy's configuration.
    """
    require_terminal(yes)
    if not yes:
        fields = {key: value for key, value in policy.items() if value is not None}
        click.echo(f"now:  {_described(_registered(client, name))}", err=True)
        click.echo(f"then: {_described(fields)}", err=True)
        confirm(f"Register {name} at {client}?", yes)
    answer = client.change("PUT", "groups", name, body=policy)
    show_one(client.as_struct(answer, GroupAnswer), COLUMNS, output)


@command.command("test")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_groups)
@output_option
@client_options
def test_command(client: ApiClient, output: str, names: tuple[str, ...]) -> None:
    """Ask groups as a check does, and show their answers.

    The proxy makes a signed test call to the check URL or, without one, asks a connected instance
    about a transaction that does not exist. No transaction changes, and no attempt is used up. A
    check function with a barrier notes in its database that this id can never commit.
    """

    def test(name: str) -> TestedBody:
        return client.as_struct(client.change("POST", "groups", name, "test", body={}), TestedBody)

    rows = for_all(names, test)
    show_rows(rows, TESTED, output, "")
    conclude(sum(row.answered for row in rows), len(names), "answered as they should")


@command.command("remove")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_groups)
@yes_option
@client_options
def remove_command(client: ApiClient, names: tuple[str, ...], yes: bool) -> None:
    """Remove the registration of groups; their transactions stay."""
    require_terminal(yes)
    if not yes:
        for name in names:
            click.echo(f"{name}: {_described(_registered(client, name))}", err=True)
        confirm(f"Remove {', '.join(names)} at {client}?", yes)
    done = for_all(names, lambda name: dict(client.change("DELETE", "groups", name)))
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
    return ", ".join(shown) or "registered, with the proxy's defaults"
