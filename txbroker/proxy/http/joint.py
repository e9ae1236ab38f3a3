"""Calls over HTTP that come in together, carried out together.

One loop turn reads from many connections. What it brings for one group becomes runs, as the
operations of a session's frame do, so that one append holds as many of them as fit.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from txbroker.contract.service import DecideRequest, PrepareRequest, Run, Service, TransactionStatus
from txbroker.errors import RequestError
from txbroker.proxy.cluster.forwarding import CALLER

Request: TypeAlias = PrepareRequest | DecideRequest
T = TypeVar("T")


class _Kind(NamedTuple):
    """Which calls go together: of one kind and group, and counted to one principal, as which they
    may be handed on to another proxy."""

    request: type[Request]
    group: str
    caller: str


class _Waiting(NamedTuple):
    """A call: what it is answered with, and how that is made of a standing."""

    answer: "asyncio.Future[Any]"
    made_of: Callable[[TransactionStatus], Any]


class CallBatcher:
    """Carries out prepares and decisions, those of one turn of the event loop together."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._waiting: dict[_Kind, tuple[list[Request], list[_Waiting]]] = {}
        # The loop itself holds tasks weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    def carry_out(
        self, request: Request, made_of: Callable[[TransactionStatus], T]
    ) -> "asyncio.Future[T]":
        """Begin a call in the next turn of the loop; return what becomes of it: what `made_of`
        makes of its standing, or the `RequestError` or other exception that it ends with.
        """
        loop = asyncio.get_running_loop()
        kind = _Kind(type(request), request.group, CALLER.get())
        found = self._waiting.get(kind)
        if found is None:
            found = self._waiting[kind] = ([], [])
            loop.call_soon(self._begin, kind)  # keeps the context, so the caller
        answer: asyncio.Future[T] = loop.create_future()
        requests, waiting = found
        requests.append(request)
        waiting.append(_Waiting(answer, made_of))
        return answer

    def _begin(self, kind: _Kind) -> None:
        requests, waiting = self._waiting.pop(kind)
        try:
            runs = self._service.runs(requests)
        except Exception as error:
            _fail(waiting, error)
            return
        loop = asyncio.get_running_loop()
        for run in runs:
            concerned = [waiting[number] for number in run.numbers]
            task = loop.create_task(_carry_out(run, concerned))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _carry_out(run: Run, waiting: Sequence[_Waiting]) -> None:
    try:
        for (answer, made_of), found in zip(waiting, await run.answers, strict=True):
            if answer.done():
                continue  # nobody waits any more
            if isinstance(found, RequestError):
                answer.set_exception(found)
            else:
                answer.set_result(made_of(found))
    except Exception as error:
        _fail(waiting, error)
    finally:
        for answer, _ in waiting:
            answer.cancel()  # of those that have no answer: this was cancelled


def _fail(waiting: Sequence[_Waiting], error: Exception) -> None:
    for answer, _ in waiting:
        if not answer.done():
            answer.set_exception(error)
