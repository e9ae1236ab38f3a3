"""The proxies as an examination sees them: over HTTP, and nothing that changes anything."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct

from txbroker.contract.service import Overview
from txbroker.errors import NotPermitted
from txbroker.net.tls import ClientTls, tls_trouble

T = TypeVar("T")

TIMEOUT_S = 5.0
"""For one answer of a proxy that was asked directly."""
_TEST_S = 3.0
"""What a test call takes beside its group's own time."""
_ANSWER_BYTES_MAX = 64 << 20
_CALLS_MAX = 24
"""Calls under way at a time."""


class Unavailable(Exception):
    """What was to be looked at does not show itself; the message says why."""


class NotAllowed(Unavailable):
    """The credential of this doctor does not allow the call."""


class ProxyReply(Struct, frozen=True):
    """An answer of a proxy. `seconds`: how long it took."""

    status: int
    body: bytes
    seconds: float = 0.0


class ReadyAnswer(Struct, frozen=True):
    """What `/readyz` says; see `txbroker.contract.service.Readiness`."""

    ready: bool
    partitions: dict[str, str] = {}
    problems: list[str] = []


class RegisteredGroup(Struct, frozen=True):
    """A registered group, as far as an examination looks at it."""

    group: str
    sessions: int = 0
    check_url: str | None = None
    check_after_s: float | None = None
    check_interval_s: float | None = None
    attempts_max: int | None = None
    timeout_s: float | None = None
    problem: str | None = None
    """Why proxies cannot use what is registered."""


class TestCall(Struct, frozen=True):
    """What became of a test call to a group's check URL.

    Attributes:
        status: of the answer; None where there was none.
        why: what was wrong, "" where the call was answered with 2xx.
    """

    __test__ = False

    group: str
    answered: bool
    endpoint: str = ""
    status: int | None = None
    why: str = ""


class ProxySide(Protocol):
    """What checks may ask of proxies. Every method raises `Unavailable` where nobody answers."""

    @property
    def named(self) -> Sequence[str]:
        """The URLs that the caller named."""
        ...

    async def ready(self, url: str) -> ReadyAnswer:
        """Ask one proxy whether it can take calls."""
        ...

    async def overview(self) -> tuple[Overview, float]:
        """Return how all stands as the first proxy that answers sees it, and how long, seconds,
        it took to say so."""
        ...

    async def metrics(self, url: str) -> str:
        """Return one proxy's metrics, in Prometheus' text format."""
        ...

    async def anonymous(self, url: str, path: str) -> int:
        """Return the status with which one proxy answers a call without any credential."""
        ...

    async def groups(self) -> list[RegisteredGroup]:
        """Return the registered groups."""
        ...

    async def test_group(self, group: str, timeout_s: float) -> TestCall:
        """Have a test call sent to a group's check URL."""
        ...


class HttpProxies:
    """Proxies at their URLs.

    Args:
        urls: those to begin with.
        headers: what every call carries, such as the token.
        tls: whom to trust, and what to show; None: the system's authorities, and nothing.
        anonymous_tls: whom to trust when nothing is to be shown; None: the system's authorities.
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
        self.named = tuple(dict.fromkeys(url.rstrip("/") for url in urls))
        self._headers = {"accept": "application/json", **headers}
        # Threads of our own: on a small machine the loop's few would all wait for dead groups.
        self._threads = ThreadPoolExecutor(_CALLS_MAX, thread_name_prefix="doctor")

    def close(self) -> None:
        """Make no further calls; those under way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ready(self, url: str) -> ReadyAnswer:
        """Ask one proxy whether it can take calls; see `ProxySide`."""
        reply = await self._ask(url, "GET", "/readyz")
        if reply.status not in (200, 503):
            raise Unavailable(
                f"{url} answered /readyz with {reply.status}: is it a txbroker proxy?"
            )
        return _decoded(url, reply, ReadyAnswer)

    async def overview(self) -> tuple[Overview, float]:
        """Return how all stands; see `ProxySide`."""
        reply, url = await self._first("GET", "/v1/overview")
        return _decoded(url, reply, Overview), reply.seconds

    async def metrics(self, url: str) -> str:
        """Return one proxy's metrics; see `ProxySide`."""
        reply = await self._ask(url, "GET", "/metrics")
        if reply.status != 200:
            raise _refused(url, "/metrics", reply)
        return reply.body.decode(errors="replace")

    async def anonymous(self, url: str, path: str) -> int:
        """Call without any credential; see `ProxySide`."""
        return (await self._ask(url, "GET", path, anonymous=True)).status

    async def groups(self) -> list[RegisteredGroup]:
        """Return the registered groups; see `ProxySide`."""
        reply, url = await self._first("GET", "/v1/groups")
        return _decoded(url, reply, _Groups).groups

    async def test_group(self, group: str, timeout_s: float) -> TestCall:
        """Have a test call sent; see `ProxySide`."""
        path = f"/v1/groups/{quote(group, safe='')}/test"
        reply, url = await self._first("POST", path, b"{}", timeout_s + _TEST_S)
        return _decoded(url, reply, TestCall)

    async def _first(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = TIMEOUT_S
    ) -> tuple[ProxyReply, str]:
        """Return the answer of the first of the named proxies that carries the call out."""
        why = Unavailable("no proxy is named")
        for url in self.named:
            try:
                reply = await self._ask(url, method, path, body, timeout_s)
            except Unavailable as error:
                why = error
                continue
            if reply.status == 200:
                return reply, url
            why = _refused(url, path, reply)
        raise why

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
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            status, raw = await loop.run_in_executor(
                self._threads, self._exchange, url, method, path, body, timeout_s, anonymous
            )
        except TimeoutError:
            raise Unavailable(f"{url} has not answered within {timeout_s:g} s") from None
        except ConnectionRefusedError:
            raise Unavailable(f"nothing listens at {url}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            what = tls_trouble(error, "--ca-file") or getattr(error, "strerror", None) or str(error)
            what = what or type(error).__name__
            raise Unavailable(f"no answer from {url}: {what}") from None
        return ProxyReply(status, raw, loop.time() - began)

    def _exchange(
        self,
        url: str,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        anonymous: bool,
    ) -> tuple[int, bytes]:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            tls = self._anonymous_tls if anonymous else self._tls
            connection = http.client.HTTPSConnection(
                host, port, timeout=timeout_s, context=tls.context()
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        headers = {} if anonymous else dict(self._headers)
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(_ANSWER_BYTES_MAX)
        finally:
            connection.close()


class _Groups(Struct):
    groups: list[RegisteredGroup]


def _decoded(url: str, reply: ProxyReply, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except msgspec.MsgspecError as error:
        raise Unavailable(
            f"{url} answered with what this doctor does not read ({error}): is it of another "
            "version?"
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
    if reply.status == http.HTTPStatus.UNAUTHORIZED:
        why += "; give the doctor its token with --token-file"
    if kind is NotAllowed:
        why += "; the doctor needs a token of the role viewer, and operator for test calls"
    return kind(f"{url} answered {path} with {reply.status}: {why}")
