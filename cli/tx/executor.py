"""Executes an action on many transactions, a few calls at a time.

Only listed transactions are changed: one whose state has changed since is skipped, unless it has
already reached the action's result. So a command can be repeated until nothing is left.
"""

import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from txbroker.cli.client import ApiClient, ApiError, who
from txbroker.cli.output import Row
from txbroker.errors import request_errors

PARALLEL = 8
"""Calls in flight: enough to fill an owner's batches, too few to crowd out producers."""
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Pauses between retries; their sum outlasts the move of a partition from a stopping proxy."""
_RETRYABLE = frozenset(code for code, kind in request_errors().items() if kind.retryable)


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


class Item(NamedTuple):
    """A transaction to act on.

    `state` and later fields are unset for an id from the command line. `half_offset` orders the
    transactions of one half partition.
    """

    id: str
    partition: int
    state: str | None = None
    half_offset: int = -1
    group: str = ""
    prepared_at_ms: int = 0
    topics: str = ""


class ItemResult(NamedTuple):
    """A transaction's state and decision after the action, or its error."""

    id: str
    state: str = ""
    decision: str | None = None
    code: str = ""
    message: str = ""

    @property
    def row(self) -> Row:
        """The JSON object of this result."""
        if self.code:
            return {"id": self.id, "error": {"code": self.code, "message": self.message}}
        return {"id": self.id, "state": self.state, "decision": self.decision}


class BulkExecutor:
    """Executes an action on many transactions in parallel.

    Once a half partition has had no owner for all retries, its other transactions are not tried;
    once no proxy answers, none are.
    """

    def __init__(self, client: ApiClient, action: BulkAction, body: dict[str, Any]) -> None:
        self._client = client
        self._action = action
        self._body = {"by": who(), **body}
        self._runs: queue.SimpleQueue[list[Item]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[ItemResult | BaseException] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._stop_reason = ""
        self._unavailable: dict[int, str] = {}
        """Half partitions without an owner, with the error."""

    def execute(self, items: Sequence[Item], report: Callable[[ItemResult], None]) -> None:
        """Execute the action, and call `report` with each result as it arrives.

        On Ctrl-C the calls in flight finish, and the other transactions are not tried.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after all results were reported.
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

    def _split(self, items: Sequence[Item]) -> list[list[Item]]:
        """Return runs of transactions; a run is sequential, runs are independent."""
        if not self._action.in_order:
            return [[item] for item in items]
        runs: dict[int, list[Item]] = {}
        for item in items:
            runs.setdefault(item.partition, []).append(item)
        return [sorted(run, key=lambda item: item.half_offset) for run in runs.values()]

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

    def _try_repeatedly(self, client: ApiClient, item: Item) -> ItemResult:
        failure: ItemResult | None = None
        for pause_s in (*PAUSES_S, None):
            if self._stop.is_set():
                reason = self._stop_reason
            else:
                reason = self._unavailable.get(item.partition, "")
            if reason:
                return failure or ItemResult(item.id, code="not_tried", message=reason)
            try:
                return self._act(client, item)
            except ApiError as error:
                failure = ItemResult(
                    item.id, code=error.code or "no_answer", message=error.sentence
                )
                if pause_s is None or not self._may_retry(error, item):
                    self._note_unavailable(error, item)
                    return failure
            self._stop.wait(pause_s)
        raise AssertionError

    def _act(self, client: ApiClient, item: Item) -> ItemResult:
        if item.state is not None:
            now = client.get("transactions", item.id)
            if now["state"] in self._action.reached:
                return ItemResult(item.id, now["state"], now.get("decision"))
            if now["state"] != item.state:
                message = f"its state changed from {item.state} to {now['state']}: not touched"
                return ItemResult(item.id, code="moved_on", message=message)
        done = client.change("POST", "transactions", item.id, self._action.verb, body=self._body)
        return ItemResult(item.id, done["state"], done.get("decision"))

    def _may_retry(self, error: ApiError, item: Item) -> bool:
        """Return True if a retry can succeed, and does not repeat the action."""
        if error.code in _RETRYABLE:
            return True
        # A decision is idempotent. For the other actions, `_act` checks a known state first.
        decides = self._action.verb in ("commit", "rollback")
        return not error.reached and not error.slow and (decides or item.state is not None)

    def _note_unavailable(self, error: ApiError, item: Item) -> None:
        if not error.reached:
            self._halt(error.sentence)
        elif error.code in _RETRYABLE:
            self._unavailable[item.partition] = error.sentence
