"""An action on many transactions: selection, preview, confirmation, execution and report."""

import queue
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import click
from msgspec import UNSET, Struct, UnsetType, structs

from txbroker.cli.client import PAUSES_S, RETRYABLE, ApiClient, ApiError, who
from txbroker.cli.options import conclude, confirm
from txbroker.cli.output import (
    TableColumn,
    clock,
    printable,
    progress,
    show_data,
    show_rows,
    since,
    table,
)
from txbroker.cli.run import CommandFailed
from txbroker.cli.tx.rows import COLUMNS
from txbroker.contract.groups import ErrorFields
from txbroker.contract.transactions import StandingBody, TransactionBody
from txbroker.core.routing import parse_id

PARALLEL = 8
"""Calls in flight: enough to fill an owner's batches, too few to crowd out producers."""


class BulkAction(NamedTuple):
    """An action on transactions.

    Attributes:
        verb: the name in the API and of the command.
        done: the past participle.
        states: the states in which it is allowed.
        default_count: how many of `states`, from the first, apply without --state.
        reached: the states in which nothing is left to do.
        in_order: oldest first in each half partition, because consumers see that order.
    """

    verb: str
    done: str
    states: tuple[str, ...]
    default_count: int
    reached: frozenset[str]
    in_order: bool = False

    @property
    def default_states(self) -> tuple[str, ...]:
        """The states that apply without --state."""
        return self.states[: self.default_count]


_DECIDED = frozenset({"committed", "promoted", "refused"})
COMMIT = BulkAction("commit", "committed", ("parked", "pending"), 1, _DECIDED, in_order=True)
ROLLBACK = BulkAction(
    "rollback", "rolled back", ("parked", "pending"), 1, frozenset({"rolled_back"})
)
CHECK = BulkAction("check", "checked", ("pending",), 1, _DECIDED | {"rolled_back"})
REVIVE = BulkAction(
    "revive",
    "revived",
    ("parked", "refused"),
    2,
    frozenset({"pending", "committed", "promoted", "rolled_back"}),
)


class BulkItem(NamedTuple):
    """A transaction to act on; `row` is None for an id from the command line."""

    id: str
    partition: int
    row: TransactionBody | None = None


class ItemResult(Struct, frozen=True):
    """A transaction's state and decision after the action, or its error."""

    id: str
    state: str | UnsetType = UNSET
    decision: str | UnsetType | None = UNSET
    error: ErrorFields | UnsetType = UNSET


def _failed(item: BulkItem, code: str, message: str) -> ItemResult:
    return ItemResult(item.id, error=ErrorFields(code=code, message=message))


class BulkExecutor:
    """Executes an action on many transactions in parallel.

    Once a half partition has had no owner for all retries, its other transactions are not tried;
    once no proxy answers, none are.
    """

    def __init__(self, client: ApiClient, action: BulkAction, body: dict[str, Any]) -> None:
        self._client = client
        self._action = action
        self._body = {"by": who(), **body}
        self._runs: queue.SimpleQueue[list[BulkItem]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[ItemResult | BaseException] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._stop_reason = ""
        self._unavailable: dict[int, str] = {}
        """Half partitions without an owner, with the error."""

    def execute(self, items: Sequence[BulkItem], report: Callable[[ItemResult], None]) -> None:
        """Execute the action, and call `report` with each result as it arrives.

        On Ctrl-C the calls in flight finish and are reported; the other transactions are not tried.
        """
        runs = self._split(items)
        for run in runs:
            self._runs.put(run)
        with self._interruptible() as interrupted:
            for _ in range(min(PARALLEL, len(runs))):
                threading.Thread(target=self._work, daemon=True).start()
            for _ in items:
                result = self._results.get()
                if isinstance(result, BaseException):
                    self._halt("stopped by an error")
                    raise result
                report(result)
        if interrupted.is_set():
            raise KeyboardInterrupt

    @contextmanager
    def _interruptible(self) -> Iterator[threading.Event]:
        """Let the first Ctrl-C stop further calls without losing results; the second one raises
        immediately."""
        interrupted = threading.Event()

        def on_signal(*_: object) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt
            interrupted.set()
            self._halt("stopped by Ctrl-C")

        previous = signal.signal(signal.SIGINT, on_signal)
        try:
            yield interrupted
        finally:
            signal.signal(signal.SIGINT, previous)

    def _split(self, items: Sequence[BulkItem]) -> list[list[BulkItem]]:
        """Return runs of transactions; a run is sequential, runs are independent."""
        if not self._action.in_order:
            return [[item] for item in items]
        runs: dict[int, list[BulkItem]] = {}
        for item in items:
            runs.setdefault(item.partition, []).append(item)
        # Without rows they stay in the order of the command line.
        return [
            sorted(run, key=lambda item: item.row.half_offset if item.row else -1)
            for run in runs.values()
        ]

    def _work(self) -> None:
        client = self._client.another()
        try:
            while True:
                for item in self._runs.get_nowait():
                    self._results.put(self._try_repeatedly(client, item))
        except queue.Empty:
            pass
        except BaseException as error:
            self._results.put(error)
        finally:
            client.close()

    def _halt(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        self._stop.set()

    def _try_repeatedly(self, client: ApiClient, item: BulkItem) -> ItemResult:
        failure: ItemResult | None = None
        for pause_s in (*PAUSES_S, None):
            if self._stop.is_set():
                reason = self._stop_reason
            else:
                reason = self._unavailable.get(item.partition, "")
            if reason:
                return failure or _failed(item, "not_tried", reason)
            try:
                return self._act(client, item)
            except ApiError as error:
                failure = _failed(item, error.code or "no_answer", error.sentence)
                if pause_s is None or not self._may_retry(error, item):
                    self._note_unavailable(error, item)
                    return failure
            self._stop.wait(pause_s)
        raise AssertionError

    def _act(self, client: ApiClient, item: BulkItem) -> ItemResult:
        if item.row is not None:
            now = client.read(TransactionBody, "transactions", item.id)
            if now.state in self._action.reached:
                return ItemResult(item.id, now.state, now.decision)
            if now.state != item.row.state:
                message = f"its state changed from {item.row.state} to {now.state}: not touched"
                return _failed(item, "moved_on", message)
        done = act(client, self._action, item, self._body)
        return ItemResult(item.id, done.state, done.decision)

    def _may_retry(self, error: ApiError, item: BulkItem) -> bool:
        """Return True if a retry can succeed, and does not repeat the action."""
        if error.code in RETRYABLE:
            return True
        # A decision is idempotent. For the other actions, `_act` checks a known state first.
        decides = self._action.verb in ("commit", "rollback")
        return not error.reached and not error.slow and (decides or item.row is not None)

    def _note_unavailable(self, error: ApiError, item: BulkItem) -> None:
        if not error.reached:
            self._halt(error.sentence)
        elif error.code in RETRYABLE:
            self._unavailable[item.partition] = error.sentence


SAMPLE = 10
TYPED_FROM = 11
"""From this number on the user types the number, which no accidental key press does."""
GROUPS_SHOWN = 5
ROWS_SHOWN = 20
_PROGRESS_FROM = 20
_IN_A_SENTENCE = {"rollback": "Roll back"}

SAMPLED = [one for one in COLUMNS if one.title in ("ID", "GROUP", "STATE", "AGE", "TOPICS")]
STANDING = (
    TableColumn("ID", keep=True),
    TableColumn("STATE", rank=1),
    TableColumn("DECISION"),
)
FAILED = (
    TableColumn("ID", keep=True),
    TableColumn("ERROR", lambda row: row.error.code, rank=1),
    TableColumn("WHY", lambda row: row.error.message, text=True),
)


# --- selection -------------------------------------------------------------------------------


def named(ids: Iterable[str]) -> list[BulkItem]:
    """Return the transactions of these ids, each once, in their order."""
    items = [_from_id(id) for id in ids]
    return list({item.id: item for item in items}.values())


def matching(
    client: ApiClient, action: BulkAction, state: str | None, limit: int | None, **query: Any
) -> list[BulkItem]:
    """Return the transactions that match a filter, oldest first, at most `limit`."""
    rows: list[TransactionBody] = []
    for listed_state in (state,) if state else action.default_states:
        for row in client.transactions(limit, state=listed_state, **query):
            # One message of each topic is shown; all of them would not fit into memory.
            topics = {message.topic: message for message in row.messages}
            rows.append(structs.replace(row, messages=[*topics.values()]))
    rows.sort(key=lambda row: (row.prepared_at_ms, row.half_offset, row.id))
    # A transaction that changes its state meanwhile can be on two lists.
    items = {row.id: BulkItem(row.id, row.partition, row) for row in rows}
    return list(items.values())[:limit]


def _from_id(text: str) -> BulkItem:
    """Return the transaction of an id in any case; the proxy refuses an invalid id."""
    id = text.upper() if text.isascii() else text
    try:
        return BulkItem(id, parse_id(id).partition)
    except ValueError:
        return BulkItem(text, -1)


# --- preview and confirmation ----------------------------------------------------------------


def preview(rows: Sequence[TransactionBody]) -> Iterator[str]:
    """Yield the lines that summarise the selected transactions."""
    oldest_ms = min(row.prepared_at_ms for row in rows)
    yield f"{len(rows):,} {'transaction' if len(rows) == 1 else 'transactions'}"
    yield f"  by group  {_counted(row.group for row in rows)}"
    yield f"  by state  {_counted(row.state for row in rows)}"
    yield f"  oldest    {since(oldest_ms)}, prepared {clock(oldest_ms)}"
    yield ""
    yield from table(rows[:SAMPLE], SAMPLED, sys.stderr).lines
    if len(rows) > SAMPLE:
        yield f"… and {len(rows) - SAMPLE:,} more"


def confirm_all(items: Sequence[BulkItem], action: BulkAction, where: str, yes: bool) -> None:
    """Ask for confirmation unless `yes`; for many transactions the user types their number."""
    if yes:
        return
    which = "this transaction" if len(items) == 1 else f"these {len(items):,} transactions"
    question = f"{_IN_A_SENTENCE.get(action.verb, action.verb.capitalize())} {which} at {where}?"
    if len(items) < TYPED_FROM:
        confirm(question, yes)
        return
    click.echo(question, err=True)
    typed = click.prompt(
        f"Type {len(items)} to go on, anything else to cancel",
        default="",
        show_default=False,
        err=True,
    )
    if typed.strip() != str(len(items)):
        raise CommandFailed("nothing was changed: you did not confirm")


def _counted(names: Iterable[str]) -> str:
    counts = Counter(names).most_common()
    shown = [f"{printable(name)} {count:,}" for name, count in counts[:GROUPS_SHOWN]]
    if len(counts) > GROUPS_SHOWN:
        left = counts[GROUPS_SHOWN:]
        shown.append(f"{len(left):,} more {sum(count for _, count in left):,}")
    return ", ".join(shown)


# --- execution and report --------------------------------------------------------------------


def act(
    client: ApiClient, action: BulkAction, item: BulkItem, body: dict[str, Any]
) -> StandingBody:
    """Execute the action on one transaction, and return its status."""
    done = client.change("POST", "transactions", item.id, action.verb, body=body)
    return client.as_struct(done, StandingBody)


def carry_out(
    client: ApiClient,
    action: BulkAction,
    items: Sequence[BulkItem],
    body: dict[str, Any],
    output: str,
) -> None:
    """Execute the action, report the results, and end the command by the number of successes.

    A transaction given alone by its id raises its own error; Ctrl-C ends after the report.
    """
    if len(items) == 1 and items[0].row is None:
        row = act(client, action, items[0], {"by": who(), **body})
        show_rows([row], STANDING, output, "")
        return
    by_id: dict[str, ItemResult] = {}
    try:
        with progress(hidden=len(items) < _PROGRESS_FROM) as show:

            def keep(result: ItemResult) -> None:
                by_id[result.id] = result
                show(len(by_id) / len(items), f"{len(by_id)}/{len(items)}")

            BulkExecutor(client, action, body).execute(items, keep)
    finally:
        results = [by_id[item.id] for item in items if item.id in by_id]
        _report(results, action, output, list_all=items[0].row is None)
    conclude(sum(not result.error for result in results), len(items), action.done)


def _report(
    results: Sequence[ItemResult], action: BulkAction, output: str, *, list_all: bool
) -> None:
    """Write results to stdout, all with `list_all`; in table formats write failures to stderr."""
    if output in ("json", "yaml"):
        show_data(results, output)
        return
    done = [result for result in results if not result.error]
    if list_all or len(done) <= ROWS_SHOWN:
        if done:
            show_rows(done, STANDING, output, "")
    else:
        states = _counted(result.state or "" for result in done)
        click.echo(f"{len(done):,} {action.done}, now {states}.", err=True)
    failed = [result for result in results if result.error]
    if not failed:
        return
    if len(failed) > ROWS_SHOWN:
        codes = _counted(result.error.code for result in failed if result.error)
        click.echo(f"{len(failed):,} failed: {codes}.", err=True)
    click.echo("\n".join(table(failed[:ROWS_SHOWN], FAILED, sys.stderr).lines), err=True)
    if len(failed) > ROWS_SHOWN:
        left = len(failed) - ROWS_SHOWN
        click.echo(f"… and {left:,} more; -o json lists all.", err=True)
