"""What all API calls of one proxy share, and the batcher of calls that arrive together."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from msgspec import structs

from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.sessions import SessionRegistry
from txbroker.config.settings import Settings
from txbroker.contract.service import (
    DecideRequest,
    History,
    ListRequest,
    PrepareRequest,
    Run,
    SearchRequest,
    Service,
    TransactionStatus,
)
from txbroker.errors import RequestError
from txbroker.principals import Directory, Principal
from txbroker.proxy.cluster.forwarding import CALLER
from txbroker.proxy.http.guards import ReloadedFile
from txbroker.proxy.http.limits import RequestLimits
from txbroker.proxy.observe.metrics import Metrics

Batched: TypeAlias = PrepareRequest | DecideRequest
T = TypeVar("T")


class _BatchKey(NamedTuple):
    """Calls with equal keys form one batch. `caller`: the principal to charge, also by another
    proxy to which the batch may be forwarded."""

    kind: type[Batched]
    group: str
    caller: str


class _PendingCall(NamedTuple):
    """A call of a batch. `convert` makes its result from the transaction's status."""

    result: "asyncio.Future[Any]"
    convert: Callable[[TransactionStatus], Any]


class CallBatcher:
    """Runs the prepares and decisions that arrive in one iteration of the event loop together.

    One iteration reads from many connections. Its calls for one group become runs, as the
    operations of a session's frame do, so that one append holds as many of them as fit.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._batches: dict[_BatchKey, tuple[list[Batched], list[_PendingCall]]] = {}
        # The loop itself holds tasks weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self, request: Batched, convert: Callable[[TransactionStatus], T]
    ) -> "asyncio.Future[T]":
        """Run a call in the next iteration; return the future of its converted status, or of the
        `RequestError` or other exception it failed with."""
        loop = asyncio.get_running_loop()
        key = _BatchKey(type(request), request.group, CALLER.get())
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = ([], [])
            loop.call_soon(self._start, key)  # keeps the context, so the caller
        result: asyncio.Future[T] = loop.create_future()
        requests, pending = batch
        requests.append(request)
        pending.append(_PendingCall(result, convert))
        return result

    def _start(self, key: _BatchKey) -> None:
        requests, pending = self._batches.pop(key)
        try:
            runs = self._service.runs(requests)
        except Exception as error:
            _fail(pending, error)
            return
        loop = asyncio.get_running_loop()
        for run in runs:
            task = loop.create_task(_finish(run, [pending[number] for number in run.numbers]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _finish(run: Run, pending: Sequence[_PendingCall]) -> None:
    try:
        for (result, convert), answer in zip(pending, await run.answers, strict=True):
            if result.done():
                continue  # its client has gone
            if isinstance(answer, RequestError):
                result.set_exception(answer)
            else:
                result.set_result(convert(answer))
    except Exception as error:
        _fail(pending, error)
    finally:
        for result, _ in pending:
            result.cancel()  # only those without a result: this task was cancelled


def _fail(pending: Sequence[_PendingCall], error: Exception) -> None:
    for result, _ in pending:
        if not result.done():
            result.set_exception(error)


@dataclass
class ApiContext:
    """What all API calls of one proxy share.

    Attributes:
        checks: calls check URLs.
        principals: returns the current principals.
        limits: shared by all contexts of a proxy, as are the fields below but `batcher`.
        registering: groups being registered, once per call.
        files: credential files, reloaded when they change.
        url: this proxy's own URL; with port 0 set once it listens.
    """

    service: Service
    groups: Groups
    sessions: SessionRegistry
    settings: Settings
    metrics: Metrics
    checks: HttpChecks
    principals: Callable[[], Directory]
    limits: RequestLimits = field(init=False)
    batcher: CallBatcher = field(init=False)
    registering: list[str] = field(init=False, default_factory=list)
    files: list[ReloadedFile[Any]] = field(init=False, default_factory=list)
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.limits = RequestLimits(self.settings)
        self.batcher = CallBatcher(self.service)
        self.url = self.settings.advertise_url

    def unusable_files(self) -> dict[str, bool]:
        """Map each setting of a credential file to whether the file's current content fails."""
        unusable: dict[str, bool] = {}
        for file in self.files:
            unusable[file.name] = unusable.get(file.name, False) or file.unusable
        return unusable


def seen_by(history: History, principal: Principal) -> History:
    """Return a history without the events and actions of other groups than the principal's."""
    if principal.groups.everything:
        return history
    groups = principal.groups
    return structs.replace(
        history,
        events=tuple(e for e in history.events if not e.group or e.group in groups),
        actions=tuple(action for action in history.actions if action.group in groups),
    )


Scoped = TypeVar("Scoped", ListRequest, SearchRequest)


def within_groups(request: Scoped, principal: Principal) -> Scoped:
    """Return a request of a list or a search restricted to the principal's groups."""
    if principal.groups.everything:
        return request
    return structs.replace(
        request, groups_allowed=principal.groups.allow, groups_denied=principal.groups.deny
    )
