"""Read-only calls of the proxies over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct

from txbroker.cli.client import ApiConnection, ApiError
from txbroker.contract.service import Overview
from txbroker.errors import NotPermitted
from txbroker.net.tls import ClientTls

T = TypeVar("T")

TIMEOUT_S = 5.0
"""Timeout of a call."""
_TEST_S = 3.0
"""Time for a test call in addition to the group's timeout."""
_ANSWER_BYTES_MAX = 64 << 20
_CALLS_MAX = 24
"""Calls in flight."""


class Unavailable(Exception):
    """The facts for a check cannot be read; the message has the reason."""


class NotAllowed(Unavailable):
    """The doctor's credential does not permit the call."""


class ProxyReply(Struct, frozen=True):
    """A proxy's answer, and the call's duration in seconds."""

    status: int
    body: bytes
    seconds: float = 0.0


class ReadyAnswer(Struct, frozen=True):
    """The answer of `/readyz`; see `txbroker.contract.service.Readiness`."""

    ready: bool
    partitions: dict[str, str] = {}
    problems: list[str] = []


class RegisteredGroup(Struct, frozen=True):
    """The fields of a registered group that checks read."""

    group: str
    sessions: int = 0
    check_url: str | None = None
    check_after_s: float | None = None
    check_interval_s: float | None = None
    attempts_max: int | None = None
    timeout_s: float | None = None
    problem: str | None = None
    """Why proxies cannot use the registration."""


class TestCall(Struct, frozen=True):
    """The result of a test call to a group's check URL.

    Attributes:
        status: of the answer; None: no answer.
        why: the error, "" for a status 2xx.
    """

    __test__ = False

    group: str
    answered: bool
    endpoint: str = ""
    status: int | None = None
    why: str = ""


class HttpProxies:
    """The proxies at their URLs. Methods raise `Unavailable` if no proxy answers.

    Args:
        urls: the named proxies.
        headers: for every call, such as the token.
        tls: authorities and client certificate; None: the system's authorities, no certificate.
        anonymous_tls: authorities for calls without credentials; None: the system's.
    """

    def __init__(
        self,
        urls: Sequence[str],
        headers: Mapping[str, str],
        tls: ClientTls | None = None,
        anonymous_tls: ClientTls | None = None,
    ) -> None:
        self._tls = tls or ClientTls()
        self._anonymous_tls = anonymous_tls or ClientTls()
        self.named: Sequence[str] = tuple(dict.fromkeys(url.rstrip("/") for url in urls))
        self._headers = headers
        # A dedicated pool: unreachable groups would block the few threads of a small machine.
        self._threads = ThreadPoolExecutor(_CALLS_MAX, thread_name_prefix="doctor")

    def close(self) -> None:
        """Make no further calls; calls in flight finish in the background."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ready(self, url: str) -> ReadyAnswer:
        """Return a proxy's readiness."""
        reply = await self._ask(url, "GET", "/readyz")
        if reply.status not in (200, 503):
            raise Unavailable(
                f"{url} answered /readyz with {reply.status}: is it a txbroker proxy?"
            )
        return _decoded(url, reply, ReadyAnswer)

    async def overview(self) -> tuple[Overview, float]:
        """Return the overview of the first proxy that answers, and the call's duration in s."""
        reply, url = await self._first("GET", "/v1/overview")
        return _decoded(url, reply, Overview), reply.seconds

    async def metrics(self, url: str) -> str:
        """Return a proxy's metrics, in Prometheus' text format."""
        reply = await self._ask(url, "GET", "/metrics")
        if reply.status != 200:
            raise _refused(url, "/metrics", reply)
        return reply.body.decode(errors="replace")

    async def anonymous(self, url: str, path: str) -> int:
        """Return the status of a proxy's answer to a call without credentials."""
        return (await self._ask(url, "GET", path, anonymous=True)).status

    async def groups(self) -> list[RegisteredGroup]:
        """Return the registered groups."""
        reply, url = await self._first("GET", "/v1/groups")
        return _decoded(url, reply, _Groups).groups

    async def test_group(self, group: str, timeout_s: float) -> TestCall:
        """Make a proxy send a test call to a group's check URL."""
        path = f"/v1/groups/{quote(group, safe='')}/test"
        reply, url = await self._first("POST", path, b"{}", timeout_s + _TEST_S)
        return _decoded(url, reply, TestCall)

    async def _first(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = TIMEOUT_S
    ) -> tuple[ProxyReply, str]:
        """Return the first named proxy's answer with status 200."""
        failure = Unavailable("no proxy is named: give one by --url")
        for url in self.named:
            try:
                reply = await self._ask(url, method, path, body, timeout_s)
            except Unavailable as error:
                failure = error
                continue
            if reply.status == 200:
                return reply, url
            failure = _refused(url, path, reply)
        raise failure

    async def _ask(
        self,
        url: str,
        method: str,
        path: str,
        body: bytes | None = None,
        timeout_s: float = TIMEOUT_S,
        *,
        anonymous: bool = False,
    ) -> ProxyReply:
        headers, tls = self._headers, self._tls
        if anonymous:
            headers, tls = {}, self._anonymous_tls

        def exchange() -> tuple[int, bytes]:
            with closing(ApiConnection(url, headers, tls, timeout_s)) as connection:
                return connection.exchange(method, path, body, _ANSWER_BYTES_MAX)

        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            status, raw = await loop.run_in_executor(self._threads, exchange)
        except (ApiError, ValueError) as error:
            reason = error.sentence if isinstance(error, ApiError) else str(error)
            raise Unavailable(reason) from None
        return ProxyReply(status, raw, loop.time() - began)


class _Groups(Struct):
    groups: list[RegisteredGroup]


def _decoded(url: str, reply: ProxyReply, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except msgspec.MsgspecError as error:
        raise Unavailable(
            f"{url} sent an answer that this doctor cannot read ({error}): is it another version?"
        ) from None


def _refused(url: str, path: str, reply: ProxyReply) -> Unavailable:
    kind = Unavailable
    try:
        error = msgspec.json.decode(reply.body)["error"]
        why = f"{error['message']} ({error['code']})"
        if error["code"] == NotPermitted.code:
            kind = NotAllowed
    except (msgspec.MsgspecError, KeyError, TypeError):
        why = "is it a txbroker proxy, and of this version?"
    if reply.status == HTTPStatus.UNAUTHORIZED:
        why += "; give the doctor a token by --token-file"
    if kind is NotAllowed:
        why += "; the doctor needs a token of role viewer, and of role operator for test calls"
    return kind(f"{url} answered {path} with {reply.status}: {why}")
