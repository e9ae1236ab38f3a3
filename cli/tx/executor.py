"""Carrying out one thing on many transactions, a few calls at a time.

What is done is what was shown: a transaction that has moved on since is left alone and told of,
unless it got there by itself. So the same can be done again until nothing is left.
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
"""Calls under way at a time: enough to fill the batches of an owner, too few to crowd out
producers."""
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)
"""What comes back when asked later is asked again after these: longer than a partition takes to
move from a proxy that stops."""
_WAITING_HELPS = frozenset(code for code, kind in request_errors().items() if kind.retryable)


class BulkAction(NamedTuple):
    """What is done to transactions.

    Attributes:
        verb: of the API, and of the command.
        done: the same in the past.
        states: in which it can be done; the first ones stand where no state is asked for.
        unasked: how many of `states` those are.
        reached: states in which there is nothing left to do.
        in_order: oldest first in each half partition, because consumers see it in that order.
    """

    verb: str
    done: str
    states: tuple[str, ...]
    unasked: int
    reached: frozenset[str]
    in_order: bool = False

    @property
    def default_states(self) -> tuple[str, ...]:
        """The states of those that are meant where none is named."""
        return self.states[: self.unasked]


COMMIT = BulkAction(
    "commit",
    "committed",
    ("parked", "pending"),
    1,
    frozenset({"committed", "promoted", "refused"}),
    in_order=True,
)
ROLLBACK = BulkAction(
    "rollback", "rolled back", ("parked", "pending"), 1, frozenset({"rolled_back"})
)
CHECK = BulkAction(
    "check",
    "checked",
    ("pending",),
    1,
    frozenset({"committed", "promoted", "refused", "rolled_back"}),
)
REVIVE = BulkAction(
    "revive",
    "revived",
    ("parked", "refused"),
    2,
    frozenset({"pending", "committed", "promoted", "rolled_back"}),
)


class Item(NamedTuple):
    """A transaction that something is to be done to.

    `state` is None where an id was given without anything known of it; then so is the rest.
    `half_offset` tells which of a half partition's came first, also within a millisecond.
    """

    id: str
    partition: int
    state: str | None = None
    half_offset: int = -1
    group: str = ""
    prepared_at_ms: int = 0
    topics: str = ""


class ItemResult(NamedTuple):
    """What became of one: its state and decision, or why not."""

    id: str
    state: str = ""
    decision: str | None = None
    code: str = ""
    message: str = ""

    @property
    def row(self) -> Row:
        """What JSON shows of it."""
        if self.code:
            return {"id": self.id, "error": {"code": self.code, "message": self.message}}
        return {"id": self.id, "state": self.state, "decision": self.decision}


class BulkExecutor:
    """Carries out an action on many transactions, a few at a time.

    Where a half partition has no owner, or no proxy answers at all, for longer than waiting is
    sensible, what is left of it is not tried.
    """

    def __init__(self, client: ApiClient, action: BulkAction, body: dict[str, Any]) -> None:
        self._client = client
        self._action = action
        self._body = {"by": who(), **body}
        self._runs: queue.SimpleQueue[list[Item]] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[ItemResult | BaseException] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._stopped_by = ""
        self._away: dict[int, str] = {}

    def work(self, items: Sequence[Item], each: Callable[[ItemResult], None]) -> None:
        """Carry it out; `each` is told of every outcome as it comes.

        Ctrl-C lets the calls under way end, and leaves the others untried.

        Raises:
            KeyboardInterrupt: after every outcome was told.
        """
        runs = self._split(items)
        for run in runs:
            self._runs.put(run)
        with self._interruptible() as interrupted:
            for _ in range(min(PARALLEL, len(runs))):
                threading.Thread(target=self._worker, daemon=True).start()
            for _ in items:
                outcome = self._outcomes.get()
                if isinstance(outcome, BaseException):
                    self._halt("stopped by an error")
                    raise outcome
                each(outcome)
        if interrupted.is_set():
            raise KeyboardInterrupt

    @contextmanager
    def _interruptible(self) -> Iterator[threading.Event]:
        """Take Ctrl-C as a wish to stop, so that no outcome is lost; a second one is obeyed at
        once."""
        interrupted = threading.Event()

        def on_signal(*_: object) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt
            interrupted.set()
            self._halt("stopped by Ctrl-C")

        before = signal.signal(signal.SIGINT, on_signal)
        try:
            yield interrupted
        finally:
            signal.signal(signal.SIGINT, before)

    def _split(self, items: Sequence[Item]) -> list[list[Item]]:
        """Return what is done one after another; one such run knows nothing of the other."""
        if not self._action.in_order:
            return [[item] for item in items]
        runs: dict[int, list[Item]] = {}
        for item in items:
            runs.setdefault(item.partition, []).append(item)
        return [sorted(run, key=lambda item: item.half_offset) for run in runs.values()]

    def _worker(self) -> None:
        client = self._client.another()
        try:
            while True:
                for item in self._runs.get_nowait():
                    self._outcomes.put(self._carry_out(client, item))
        except queue.Empty:
            pass
        except BaseException as error:
            self._outcomes.put(error)
        finally:
            client.close()

    def _halt(self, why: str) -> None:
        self._stopped_by = self._stopped_by or why
        self._stop.set()

    def _carry_out(self, client: ApiClient, item: Item) -> ItemResult:
        failed: ItemResult | None = None
        for pause_s in (*PAUSES_S, None):
            why = self._stopped_by if self._stop.is_set() else self._away.get(item.partition, "")
            if why:
                return failed or ItemResult(item.id, code="not_tried", message=why)
            try:
                return self._act(client, item)
            except ApiError as error:
                failed = ItemResult(item.id, code=error.code or "no_answer", message=error.sentence)
                if pause_s is None or not self._may_repeat(error, item):
                    self._remember(error, item)
                    return failed
            self._stop.wait(pause_s)
        raise AssertionError

    def _act(self, client: ApiClient, item: Item) -> ItemResult:
        if item.state is not None:
            now = client.get("transactions", item.id)
            if now["state"] in self._action.reached:
                return ItemResult(item.id, now["state"], now.get("decision"))
            if now["state"] != item.state:
                message = f"it was {item.state} and is {now['state']} now: left alone"
                return ItemResult(item.id, code="moved_on", message=message)
        done = client.change("POST", "transactions", item.id, self._action.verb, body=self._body)
        return ItemResult(item.id, done["state"], done.get("decision"))

    def _may_repeat(self, error: ApiError, item: Item) -> bool:
        """Say whether the same again can succeed, and does nothing a second time."""
        if error.code in _WAITING_HELPS:
            return True
        # A decision counts once. The others are looked at before they are sent again.
        decides = self._action.verb in ("commit", "rollback")
        return not error.reached and not error.slow and (decides or item.state is not None)

    def _remember(self, error: ApiError, item: Item) -> None:
        if not error.reached:
            self._halt(error.sentence)
        elif error.code in _WAITING_HELPS:
            self._away[item.partition] = error.sentence
