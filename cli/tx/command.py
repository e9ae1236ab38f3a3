"""`txbroker tx`: show transactions and resolve them."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import click

from txbroker.cli.client import ApiClient, ApiError, client_options, for_all
from txbroker.cli.completion import complete_ids, group_option, topic_option
from txbroker.cli.main import SuggestingGroup
from txbroker.cli.options import (
    limit_option,
    reason_option,
    require_terminal,
    with_options,
    yes_option,
)
from txbroker.cli.output import object_output_option, output_option, show_rows
from txbroker.cli.tx.bulk import (
    CHECK,
    COMMIT,
    REVIVE,
    ROLLBACK,
    STANDING,
    BulkAction,
    BulkItem,
    carry_out,
    confirm_all,
    matching,
    named,
    preview,
)
from txbroker.cli.tx.find import LIMIT, find_command, show_stories, trace_command
from txbroker.cli.tx.rows import COLUMNS, STATES, story
from txbroker.cli.watching import watch_option, watch_rows
from txbroker.contract.service import Overview
from txbroker.contract.transactions import TransactionBody

_STATES_OF: dict[str, tuple[str | None, ...]] = {
    "settled": ("promoted", "rolled_back"),
    "all": (None, "promoted", "rolled_back"),
}
"""The lists of the API, whose default None is all unsettled transactions."""
_NEWEST_FIRST = ("promoted", "rolled_back", "settled", "all")
_COUNTED = ("settled", "pending", "parked", "refused", "committed")
"""The counts of an overview, unsettled ones from the second on."""
STORIES_MAX = 5
"""Up to this number, transactions are shown in full before a change; more are summarised."""


@click.group("tx", cls=SuggestingGroup)
def command() -> None:
    """Show transactions and resolve them.

    \b
    pending      stored, undecided, invisible; its group is checked in time
    committed    decided, about to become visible
    promoted     visible in all its target topics; settled
    rolled_back  never visible; settled
    parked       undecided after the last attempt: kept whole until you commit, roll
                 back or revive it, and never guessed
    refused      committed, but a target topic does not accept it: repair the topic;
                 the proxy retries automatically, or immediately after a revive

    The first decision counts, from any source; later ones get an error. Transactions that need an
    operator: `txbroker tx list --state parked` and `--state refused`; `tx show ID` has the cause.
    """


def _filters(state: Any, subject: str, group_note: str = "") -> tuple[Any, ...]:
    return (
        state,
        group_option(f"{subject} of this producer group.{group_note}"),
        topic_option(f"{subject} with a message for this topic."),
        click.option(
            "--older-than-s",
            type=click.FloatRange(min=0),
            metavar="SECONDS",
            help=f"{subject} prepared longer ago.",
        ),
    )


@command.command("list")
@with_options(
    *_filters(
        click.option(
            "--state",
            type=click.Choice((*STATES, *_STATES_OF)),
            help="Only transactions in this state; settled ones are promoted or rolled back. "
            "[default: all but settled ones]",
        ),
        "Only transactions",
    )
)
@limit_option("Maximum number.", LIMIT)
@click.option("--all", "everything", is_flag=True, help="Without a maximum number.")
@watch_option
@output_option
@client_options
def list_command(
    client: ApiClient, output: str, limit: int, everything: bool, watch: float | None, **query: Any
) -> None:
    """List transactions: settled ones newest first, else the oldest first.

    Without --state: all unsettled ones, so none that are promoted or rolled back. Settled ones are
    listed as long as the proxies remember them.
    """
    if watch is not None:
        watch_rows(
            lambda: _listed(client, None if everything else limit, **query),
            COLUMNS,
            output,
            watch,
            lambda row: (row.id, row.state, row.round, row.attempts),
        )
    rows = _listed(client, None if everything else limit + 1, **query)
    more = not everything and len(rows) > limit
    shown = rows[:limit] if more else rows
    show_rows(shown, COLUMNS, output, "There are no such transactions.")
    for remark in _left_out(
        client, len(shown), more=more, to_people=output in ("table", "wide"), **query
    ):
        click.echo(remark, err=True)


def _listed(
    client: ApiClient, limit: int | None, state: str | None, **query: Any
) -> list[TransactionBody]:
    newest = state in _NEWEST_FIRST
    lists = [
        client.transactions(limit, state=part, newest="true" if newest else None, **query)
        for part in _STATES_OF.get(state or "", (state,))
    ]
    rows = heapq.merge(*lists, key=lambda row: (row.prepared_at_ms, row.id), reverse=newest)
    # One that settles meanwhile can be on two lists.
    return list(islice({row.id: row for row in rows}.values(), limit))


def _left_out(
    client: ApiClient, shown: int, *, more: bool, to_people: bool, state: str | None, **query: Any
) -> Iterator[str]:
    """Yield which transactions a list leaves out, why, and how to see them.

    Args:
        to_people: name them although no limit was met, with their number.
    """
    counts: Counter[str] = Counter()
    if to_people and all(value is None for value in query.values()):
        with suppress(ApiError):  # not every credential may ask
            rows = client.read(Overview, "overview").partitions
            known = {name: [getattr(row, name) for row in rows] for name in _COUNTED}
            if None not in chain(*known.values()):
                counts.update({name: sum(each) for name, each in known.items()})
    if more:
        names = {None: _COUNTED[1:], "settled": _COUNTED[:1], "all": _COUNTED}.get(state, (state,))
        total = sum(counts[name] for name in names if name)
        of = f" of {total:,}" if total > shown else ""
        order = "newest" if state in _NEWEST_FIRST else "oldest"
        yield f"Only the {order} {shown:,}{of} are listed; --limit N or --all lists more."
    if to_people and state is None:
        settled = f"{counts['settled']:,} settled" if counts else "Settled"
        yield f"{settled} ones, promoted or rolled back, are not listed: --state settled or all."
    if to_people and state in _NEWEST_FIRST:
        yield (
            "Settled ones that the proxies do not remember are not listed: `txbroker tx find` "
            "reads them from the topics."
        )


@command.command("show")
@click.argument(
    "ids", nargs=-1, required=True, metavar="ID...", shell_complete=complete_ids(STATES[:1])
)
@click.option("--bodies", is_flag=True, help="Show keys, values and headers too.")
@object_output_option
@client_options
def show_command(client: ApiClient, output: str, ids: tuple[str, ...], bodies: bool) -> None:
    """Show transactions in full."""
    show_stories(client, ids, output, bodies="true" if bodies else None)


def _resolving(action: BulkAction, *extra: Any) -> Callable[[Callable[..., None]], click.Command]:
    default = " or ".join(action.default_states)
    note = ""
    if action.verb in ("commit", "rollback"):
        note = " With IDs: act for this group, and touch no other group's transaction."

    def decorate(function: Callable[..., None]) -> click.Command:
        options: Callable[[Callable[..., None]], Callable[..., None]] = with_options(
            click.argument(
                "ids", nargs=-1, metavar="[ID]...", shell_complete=complete_ids(action.states)
            ),
            *_filters(
                click.option(
                    "--state",
                    type=click.Choice(action.states),
                    help=f"Transactions in this state. [default: {default}]",
                ),
                "Transactions",
                note,
            ),
            limit_option("Maximum number, the oldest ones."),
            *extra,
            reason_option(),
            yes_option,
            object_output_option,
            client_options,
        )
        return command.command(action.verb)(options(function))

    return decorate


@_resolving(
    COMMIT,
    click.option("--wait", is_flag=True, help="Return only when consumers can see the messages."),
)
def commit_command(client: ApiClient, wait: bool, **options: Any) -> None:
    """Commit transactions: their messages become visible.

    Select by ID, or by --state, --group, --topic and --older-than-s, which all have to match.
    Without IDs and --state, only parked ones are selected. The command shows the selection first
    and commits exactly that: oldest first in each half partition. A transaction whose state has
    changed meanwhile is not touched. The command can be repeated.
    """
    _act(client, COMMIT, {"wait": "promoted" if wait else None}, **options)


@_resolving(ROLLBACK)
def rollback_command(client: ApiClient, **options: Any) -> None:
    """Roll transactions back: their messages are never visible.

    Select by ID, or by --state, --group, --topic and --older-than-s, which all have to match.
    Without IDs and --state, only parked ones are selected. The command shows the selection first
    and rolls back exactly that. A transaction whose state has changed meanwhile is not touched.
    The command can be repeated.
    """
    _act(client, ROLLBACK, {}, **options)


@_resolving(CHECK)
def check_command(client: ApiClient, **options: Any) -> None:
    """Check pending transactions with their groups now; this counts as an attempt.

    Select by ID, or by --state pending, --group, --topic and --older-than-s, which all have to
    match. The last attempt of a round always waits for its time.
    """
    _act(client, CHECK, {}, **options)


@_resolving(REVIVE)
def revive_command(client: ApiClient, **options: Any) -> None:
    """Check parked transactions in a new round; retry refused ones.

    Select by ID, or by --state, --group, --topic and --older-than-s, which all have to match.
    """
    _act(client, REVIVE, {}, **options)


def _act(
    client: ApiClient,
    action: BulkAction,
    body: dict[str, Any],
    *,
    ids: tuple[str, ...],
    reason: str | None,
    yes: bool,
    output: str,
    limit: int | None,
    **query: Any,
) -> None:
    body["reason"] = reason
    if ids:
        body["group"] = query.pop("group") if action.verb in ("commit", "rollback") else None
        if limit is not None or any(value is not None for value in query.values()):
            raise click.UsageError("give IDs or filters such as --group, not both")
    elif all(value is None for value in query.values()):
        raise click.UsageError(
            f"select transactions: IDs, or filters such as --state {action.default_states[0]} "
            "--group NAME"
        )
    require_terminal(yes)
    items = named(ids) if ids else matching(client, action, limit=limit, **query)
    if not items:
        show_rows([], STANDING, output, "There are no such transactions.")
        return
    if not yes:
        _show_before(client, items)
        confirm_all(items, action, str(client), yes)
    carry_out(client, action, items, body, output)


def _show_before(client: ApiClient, items: Sequence[BulkItem]) -> None:
    rows = [item.row for item in items if item.row is not None]
    if not rows:
        ids = [item.id for item in items]
        rows = for_all(ids, lambda id: client.read(TransactionBody, "transactions", id))
        if len(rows) <= STORIES_MAX:
            for row in rows:
                click.echo("\n".join([*story(row), ""]), err=True)
            return
    click.echo("\n".join((*preview(rows), "")), err=True)


command.add_command(find_command)
command.add_command(trace_command)
