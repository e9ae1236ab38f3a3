"""Calls over HTTP that come in together, carried out together.

One loop turn reads from many connections. What it brings for one group becomes runs, as the
operations of a session's frame do, so that one append holds as many of them as fit.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from txbroker.contract import DecideRequest, PrepareRequest, Run, Service, Standing
from txbroker.errors import RequestError
from txbroker.proxy.forwarding import CALLER

Request: TypeAlias = PrepareRequest | DecideRequest


class _Kind(NamedTuple):
    """Which calls go together: of one kind and group, and counted to one principal, as which they
    may be handed on to another proxy."""

    request: type[Request]
    group: str
    caller: str


class JointCalls:
    """Carries out prepares and decisions, those of one turn of the event loop together."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._waiting: dict[_Kind, tuple[list[Request], list[asyncio.Future[Standing]]]] = {}
        # The loop itself holds tasks weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    def carry_out(self, request: Request) -> "asyncio.Future[Standing]":
        """Begin a call in the next turn of the loop; return what becomes of it: a standing, or the
        `RequestError` or other exception that it ends with.
        """
        loop = asyncio.get_running_loop()
        kind = _Kind(type(request), request.group, CALLER.get())
        waiting = self._waiting.get(kind)
        if waiting is None:
            waiting = self._waiting[kind] = ([], [])
            loop.call_soon(self._begin, kind)  # keeps the context, so the caller
        answer: asyncio.Future[Standing] = loop.create_future()
        waiting[0].append(request)
        waiting[1].append(answer)
        return answer

    def _begin(self, kind: _Kind) -> None:
        requests, answers = self._waiting.pop(kind)
        try:
            runs = self._service.runs(requests)
        except Exception as error:
            _fail(answers, error)
            return
        loop = asyncio.get_running_loop()
        for run in runs:
            concerned = [answers[number] for number in run.numbers]
            task = loop.create_task(_carry_out(run, concerned))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _carry_out(run: Run, answers: "Sequence[asyncio.Future[Standing]]") -> None:
    try:
        for answer, found in zip(answers, await run.answers, strict=True):
            if answer.done():
                continue  # nobody waits any more
            if isinstance(found, RequestError):
                answer.set_exception(found)
            else:
                answer.set_result(found)
    except Exception as error:
        _fail(answers, error)
    finally:
        for answer in answers:
            answer.cancel()  # of those that have no answer: this was cancelled


def _fail(answers: "Sequence[asyncio.Future[Standing]]", error: Exception) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(error)
