"""Calls to the other proxies, by URL: each call is sent once."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from txbroker.checkers.leases import CONTENT_TYPE, GroupsConnected, PeerIdentity
from txbroker.contract.frames import CODE_HEADER
from txbroker.contract.service import (
    DecideRequest,
    History,
    HistoryRequest,
    ListRequest,
    Overview,
    PrepareRequest,
    SearchPage,
    SearchRequest,
    TransactionPage,
    TransactionStatus,
    TransactionView,
)
from txbroker.errors import OwnerUnavailable
from txbroker.net.tls import ClientTls, tls_trouble
from txbroker.proxy.cluster.forwarding import (
    CALLER,
    CALLER_HEADER,
    OVERVIEW_PATH,
    PREFIX,
    SESSIONS_PATH,
    ById,
    CallFailure,
    encode,
    raised,
)
from txbroker.proxy.observe.logging import printable

T = TypeVar("T")

CONNECT_S = 3.0
"""Timeout of a connection to another proxy, seconds."""
CALL_S = 30.0
"""Timeout of a call, seconds: a little longer than Kafka may take."""
WAIT_S = 600.0
"""Timeout of a commit that waits until consumers can see it, seconds: as long as a target
partition may have no leader. If the proxy dies meanwhile the group notices and ends the call."""
LOOK_S = 2.0
"""Timeout of a poll of another proxy's sessions or overview, seconds."""
ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""The largest answer: a page of 1,000 transactions, or one transaction with its bodies."""
IDLE_S = 15.0
"""How long an idle connection is kept, seconds: a fifth of the server's limit, so that a call
rarely meets a connection that the server closes."""


class Unsent(OwnerUnavailable):
    """The owner's proxy refuses connections: certainly nothing was sent."""


class Peers:
    """Calls other proxies. Needs a running event loop."""

    def __init__(
        self,
        identity: PeerIdentity,
        *,
        tls: ClientTls | None = None,
        call_s: float = CALL_S,
        wait_s: float = WAIT_S,
    ) -> None:
        self._identity = identity
        self._tls = tls or ClientTls()
        self._call_s = call_s
        self._wait_s = wait_s
        # No limit of connections: each forwarded call belongs to an incoming one, and incoming
        # calls are limited.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._open: dict[str, set[asyncio.Timeout]] = {}

    async def close(self) -> None:
        """Close all connections; calls in flight fail."""
        await self._http.close()

    def only(self, urls: Collection[str]) -> None:
        """Cancel calls to all other proxies: they left the group, and another proxy takes over."""
        now = asyncio.get_running_loop().time()
        for url in self._open.keys() - set(urls):
            for deadline in self._open[url]:
                if not deadline.expired():
                    deadline.reschedule(now)

    # --- calls -------------------------------------------------------------------------------

    async def prepare(self, url: str, request: PrepareRequest) -> TransactionStatus:
        """Prepare at the proxy at `url`; as `Service.prepare`.

        Raises:
            Unsent: certainly nothing was sent.
            OwnerUnavailable: no answer; its details hold the request's id, if it has one.
        """
        return await self._post(url, "prepare", request, TransactionStatus, request.id)

    async def decide(self, url: str, request: DecideRequest) -> TransactionStatus:
        limit_s = self._wait_s if request.wait else self._call_s
        return await self._post(url, "decide", request, TransactionStatus, request.id, limit_s)

    async def check(
        self, url: str, id: str, *, by: str, reason: str, group: str
    ) -> TransactionStatus:
        return await self._post(
            url, "check", ById(id, by, reason, group=group), TransactionStatus, id
        )

    async def revive(self, url: str, id: str, *, by: str, reason: str) -> TransactionStatus:
        return await self._post(url, "revive", ById(id, by, reason), TransactionStatus, id)

    async def find(self, url: str, request: ById) -> TransactionView:
        return await self._post(url, "find", request, TransactionView, request.id)

    async def search(self, url: str, request: SearchRequest) -> SearchPage:
        return await self._post(url, "search", request, SearchPage, None)

    async def list(self, url: str, request: ListRequest) -> TransactionPage:
        return await self._post(url, "list", request, TransactionPage, None)

    async def history(self, url: str, request: HistoryRequest) -> History:
        return await self._post(url, "history", request, History, None, LOOK_S)

    async def sessions(self, url: str) -> GroupsConnected:
        return await self._look(url, SESSIONS_PATH, GroupsConnected)

    async def overview(self, url: str) -> Overview:
        return await self._look(url, OVERVIEW_PATH, Overview)

    # --- transport ---------------------------------------------------------------------------

    async def _look(self, url: str, path: str, kind: type[T]) -> T:
        async with self._talk(url, LOOK_S, None):
            answer = self._http.get(
                self._identity.peer_url(url) + path,
                headers=self._identity.headers(self._identity.peer_url(url)),
                allow_redirects=False,
                ssl=self._tls_of(url),
            )
            async with answer as response:
                return await _read(url, response, kind)

    async def _post(
        self,
        url: str,
        name: str,
        request: object,
        kind: type[T],
        id: str | None,
        limit_s: float | None = None,
    ) -> T:
        body = encode(request)
        headers = self._identity.headers(self._identity.peer_url(url))
        if caller := CALLER.get():
            headers.append((CALLER_HEADER, quote(caller)))
        async with self._talk(url, limit_s or self._call_s, id):
            answer = self._http.post(
                f"{self._identity.peer_url(url)}{PREFIX}/{name}",
                data=body,
                headers=headers,
                allow_redirects=False,
                ssl=self._tls_of(url),
            )
            async with answer as response:
                return await _read(url, response, kind)

    @asynccontextmanager
    async def _talk(self, url: str, limit_s: float, id: str | None) -> AsyncIterator[None]:
        """Limit the time of a call, and translate its errors."""
        calls = self._open.setdefault(url, set())
        try:
            async with asyncio.timeout(limit_s) as deadline:
                calls.add(deadline)
                try:
                    yield
                finally:
                    calls.discard(deadline)
                    if not calls:
                        self._open.pop(url, None)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            why = tls_trouble(error, "peers_ca_file") or error
            raise Unsent(f"cannot connect to the proxy at {url}: {why}", id=id) from None
        except TimeoutError:
            raise OwnerUnavailable(
                f"the proxy at {url} did not answer in time, or left the group: retry", id=id
            ) from None
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            # UnicodeError: a host name with a label that is too long for DNS.
            why = tls_trouble(error, "peers_ca_file") or str(error) or type(error).__name__
            raise OwnerUnavailable(
                f"the connection to the proxy at {url} broke: {why}", id=id
            ) from None
        except OwnerUnavailable as error:
            if id is not None:
                error.details.setdefault("id", id)
            raise

    def _tls_of(self, url: str) -> ssl.SSLContext | bool:
        # Read at each call, so that a renewed certificate takes effect.
        return self._tls.context() if url.startswith("https:") else True


async def _read(url: str, response: aiohttp.ClientResponse, kind: type[T]) -> T:
    """Return the answer of another proxy, or raise the error that it answered."""
    status = response.status
    raw = bytearray()
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > ANSWER_BYTES_MAX:
            raise OwnerUnavailable(
                f"the answer of the proxy at {url} exceeds {ANSWER_BYTES_MAX} bytes"
            )
    if response.content_type != CONTENT_TYPE:
        # In plain text: the guard refuses, or the call is unknown.
        code = printable(response.headers.get(CODE_HEADER, ""))
        refusal = f"{status} {code}".rstrip()
        remedy = "check peer_secret_file and peer_names of both"
        if status == 404:
            remedy = "it runs another version: retry when both run the same"
        raise OwnerUnavailable(
            f"the proxy at {url} refuses this call: it answered {refusal}; {remedy}"
        )
    try:
        if status == 200:
            return msgspec.msgpack.decode(raw, type=kind)
        failure = msgspec.msgpack.decode(raw, type=CallFailure)
    except msgspec.MsgspecError as error:
        raise OwnerUnavailable(f"cannot decode the answer of the proxy at {url}: {error}") from None
    raise raised(failure)
