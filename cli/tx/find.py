"""`txbroker tx find` and `tx trace`: which transaction was it, and what happened to it."""

from collections.abc import Sequence
from typing import Any

import click

from txbroker.cli.client import ApiClient, ApiError, client_options, for_all
from txbroker.cli.completion import complete_ids, group_option, topic_option
from txbroker.cli.options import MOMENT, conclude, limit_option, with_options
from txbroker.cli.output import (
    RowStream,
    object_output_option,
    output_option,
    progress,
    show_data,
    show_rows,
)
from txbroker.cli.tx.rows import COLUMNS, STATES, story
from txbroker.contract.transactions import SearchBody, TransactionBody

LIMIT = 100
_ID_CHARS = 26


@click.command("find")
@click.argument("what", required=False, metavar="[ID|TOPIC/PARTITION@OFFSET]")
@with_options(
    topic_option("Its target."),
    click.option("--key", metavar="TEXT", help="The key of one of its messages."),
    click.option("--key-base64", metavar="BASE64", help="The same, any bytes."),
    click.option("--header", metavar="NAME=VALUE", help="A header of the same message."),
    click.option("--dedup-key", metavar="TEXT", help="The producer's dedup key."),
    click.option("--order-key", metavar="TEXT", help="The producer's order key."),
    group_option("Its group."),
    click.option("--since", type=MOMENT, metavar="TIME", help="Prepared since then."),
    click.option("--until", type=MOMENT, metavar="TIME", help="Prepared before."),
)
@limit_option("Stop after this number.", LIMIT)
@output_option
@client_options
def find_command(
    client: ApiClient, output: str, limit: int, what: str | None, **terms: Any
) -> None:
    """Find transactions, also those settled long ago.

    By an id or its first characters, by any record of theirs, by the key of a message (--topic
    orders --key 4711), or by the other options, which all have to match. The proxies look in
    memory, then read their topics, newest first; --since and --until bound that.
    Ctrl-C stops, and shows the matches so far. A TIME is an age such as 2h, or a date and time such
    as 2026-01-31T18:00, UTC.
    """
    query = {
        {"since": "from_ms", "until": "to_ms"}.get(name, name): value
        for name, value in terms.items()
        if value is not None
    }
    if what is not None and "@" in what:
        query["record"] = what
    elif what is not None:
        if len(what) > _ID_CHARS:
            raise click.UsageError(f"an id has {_ID_CHARS} characters, {what[:40]!r}… has more")
        if len(what) == _ID_CHARS and not query:
            show_rows([client.read(TransactionBody, "transactions", what)], COLUMNS, output, "")
            return
        query["id"] = what
    if not query:
        raise click.UsageError("name what to find: an id, a record, or options such as --key")
    rows: dict[str, TransactionBody] = {}
    done, records, unread, full, stopped = 0.0, 0, 0, False, False
    failure: ApiError | None = None
    streams, shown = output not in ("json", "yaml"), RowStream(COLUMNS, output)
    try:
        with progress() as show:
            for page in client.pages(SearchBody, "search", **query):
                fresh = [row for row in page.transactions if row.id not in rows]
                full = len(rows) + len(fresh) + bool(page.next_cursor) > limit
                fresh = fresh[: limit - len(rows)]
                if fresh and streams:
                    show(None)
                    shown.write(fresh)
                rows |= {row.id: row for row in fresh}
                done, records, unread = (
                    page.done,
                    records + page.records,
                    unread + (page.unread or 0),
                )
                show(done, f"{records:,} records, {len(rows):,} found")
                if full:
                    break
    except KeyboardInterrupt:
        stopped = True
    except ApiError as error:
        if not rows:
            raise
        failure = error
    where = f"{records:,} records" if done == 1 else f"{records:,} records, {done:.0%} of all"
    if not rows or not streams:
        show_rows(list(rows.values()), COLUMNS, output, f"Nothing was found in {where}.")
    if unread:
        why = "their records were deleted, or reading took too long"
        click.echo(f"{unread:,} more may match and cannot be shown: {why}.", err=True)
    if failure is not None:
        click.echo(f"The search ended after {where}.", err=True)
        raise failure
    if full or stopped:
        why = "You stopped" if stopped else f"It stopped at {len(rows):,}"
        click.echo(f"{why} after {where}: bound it by --since, or raise --limit.", err=True)


@click.command("trace")
@click.argument(
    "ids", nargs=-1, required=True, metavar="ID...", shell_complete=complete_ids(STATES)
)
@object_output_option
@client_options
def trace_command(client: ApiClient, output: str, ids: tuple[str, ...]) -> None:
    """Show the whole life of transactions, with the place of every record.

    The proxy reads markers and messages back from the topics, for up to 20 s. A place
    TOPIC/PARTITION@OFFSET can be given to `txbroker tx find`.
    """
    show_stories(client, ids, output, trace="true")


def show_stories(client: ApiClient, ids: Sequence[str], output: str, **query: str | None) -> None:
    """Show transactions in full, as the API returns them with this query."""
    rows = for_all(ids, lambda id: client.read(TransactionBody, "transactions", id, **query))
    if output in ("json", "yaml"):
        show_data(rows[0] if len(ids) == 1 and rows else rows, output)
    elif rows:
        click.echo("\n\n".join("\n".join(story(row)) for row in rows))
    conclude(len(rows), len(ids), "shown")
