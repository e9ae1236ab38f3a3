"""The other proxies, by URL: calls are handed on to them, once, and their answers come back."""

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
    ListRequest,
    Overview,
    PrepareRequest,
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
    Failed,
    encode,
    raised,
)
from txbroker.proxy.observe.logging import printable

T = TypeVar("T")

CONNECT_S = 3.0
"""Connecting to another proxy may take so long, seconds."""
CALL_S = 30.0
"""An answer of another proxy may take so long, seconds: a little longer than Kafka may take."""
WAIT_S = 600.0
"""The same for a commit that waits until consumers can see it: as long as a target partition may
have no leader. A proxy that dies meanwhile is noticed by the group, and ends the call."""
LOOK_S = 2.0
"""The same for a look at another proxy's sessions or at how it stands, seconds."""
ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""The largest answer: a page of 1,000 transactions, or one transaction with its bodies."""
IDLE_S = 15.0
"""How long an idle connection is kept, seconds: a fifth of what the server allows, so that hardly
ever a call meets a connection that is just being closed."""


class Unsent(OwnerUnavailable):
    """The proxy that owns the transaction's partition cannot be connected to: nothing was sent."""


class Peers:
    """Calls other proxies. Needs a running event loop.

    Args:
        identity: how this proxy calls others.
        tls: whom to trust, and what to show; None: the system's authorities, and nothing.
        call_s: how long an answer may take, seconds.
        wait_s: the same for a commit that waits until consumers can see it.
    """

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
        # No limit of connections: each call is held by one that came in, and those are bounded.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._open: dict[str, set[asyncio.Timeout]] = {}

    async def close(self) -> None:
        """Let go of all connections; calls under way fail."""
        await self._http.close()

    def only(self, urls: Collection[str]) -> None:
        """End the calls to every proxy but these: it has left, and somebody else takes over."""
        now = asyncio.get_running_loop().time()
        for url in self._open.keys() - set(urls):
            for deadline in self._open[url]:
                if not deadline.expired():
                    deadline.reschedule(now)

    # --- what a proxy can be asked -----------------------------------------------------------

    async def prepare(self, url: str, request: PrepareRequest) -> TransactionStatus:
        """Prepare at the proxy at `url`; as `Service.prepare`.

        Raises:
            Unsent: certainly nothing was sent.
            OwnerUnavailable: no answer; with the id in its details where the request has one.
        """
        return await self._post(url, "prepare", request, TransactionStatus, request.id)

    async def decide(self, url: str, request: DecideRequest) -> TransactionStatus:
        """Decide at the proxy at `url`; as `Service.decide`."""
        limit_s = self._wait_s if request.wait else self._call_s
        return await self._post(url, "decide", request, TransactionStatus, request.id, limit_s)

    async def check(
        self, url: str, id: str, *, by: str, reason: str, group: str
    ) -> TransactionStatus:
        """Check at the proxy at `url`; as `Service.check`."""
        return await self._post(
            url, "check", ById(id, by, reason, group=group), TransactionStatus, id
        )

    async def revive(self, url: str, id: str, *, by: str, reason: str) -> TransactionStatus:
        """Revive at the proxy at `url`; as `Service.revive`."""
        return await self._post(url, "revive", ById(id, by, reason), TransactionStatus, id)

    async def find(self, url: str, id: str, *, bodies: bool) -> TransactionView:
        """Find at the proxy at `url`; as `Service.find`."""
        return await self._post(url, "find", ById(id, bodies=bodies), TransactionView, id)

    async def list(self, url: str, request: ListRequest) -> TransactionPage:
        """List at the proxy at `url`; as `Service.list`."""
        return await self._post(url, "list", request, TransactionPage, None)

    async def sessions(self, url: str) -> GroupsConnected:
        """Return the groups that can be asked at the proxy at `url`, with their instances.

        Raises:
            OwnerUnavailable: it does not answer.
        """
        return await self._look(url, SESSIONS_PATH, GroupsConnected)

    async def overview(self, url: str) -> Overview:
        """Return how the part of the proxy at `url` stands.

        Raises:
            OwnerUnavailable: it does not answer.
        """
        return await self._look(url, OVERVIEW_PATH, Overview)

    # --- how ---------------------------------------------------------------------------------

    async def _look(self, url: str, path: str, kind: type[T]) -> T:
        async with self._talk(url, LOOK_S, None):
            answer = self._http.get(
                self._identity.peer_url(url) + path,
                headers=self._identity.headers(self._identity.peer_url(url)),
                allow_redirects=False,
                ssl=self._secured(url),
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
                ssl=self._secured(url),
            )
            async with answer as response:
                return await _read(url, response, kind)

    @asynccontextmanager
    async def _talk(self, url: str, limit_s: float, id: str | None) -> AsyncIterator[None]:
        """Bound a call, and say in one way that it was not answered.

        Raises:
            Unsent, OwnerUnavailable: with the id.
        """
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
            raise Unsent(f"the proxy at {url} cannot be connected to: {why}", id=id) from None
        except TimeoutError:
            raise OwnerUnavailable(
                f"the proxy at {url} did not answer in time, or has left", id=id
            ) from None
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            # UnicodeError: a name that no resolver is asked for, as a label of it is too long.
            why = tls_trouble(error, "peers_ca_file") or str(error) or type(error).__name__
            raise OwnerUnavailable(
                f"the talk to the proxy at {url} broke off: {why}", id=id
            ) from None
        except OwnerUnavailable as error:
            if id is not None:
                error.details.setdefault("id", id)
            raise

    def _secured(self, url: str) -> ssl.SSLContext | bool:
        # Asked for at each call, so that a renewed certificate is shown from then on.
        return self._tls.context() if url.startswith("https:") else True


async def _read(url: str, response: aiohttp.ClientResponse, kind: type[T]) -> T:
    """Return the answer of another proxy.

    Raises:
        RequestError: what it answered.
        OwnerUnavailable: that was no answer of a proxy to another one.
    """
    status = response.status
    raw = bytearray()
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > ANSWER_BYTES_MAX:
            raise OwnerUnavailable(f"the proxy at {url} answers too much")
    if response.content_type != CONTENT_TYPE:
        # The guard's refusals are for people: another peer secret, a name that is not allowed.
        code = printable(response.headers.get(CODE_HEADER, ""))
        raise OwnerUnavailable(
            f"the proxy at {url} does not take our calls: it answered {status} {code}".rstrip()
        )
    try:
        if status == 200:
            return msgspec.msgpack.decode(raw, type=kind)
        failure = msgspec.msgpack.decode(raw, type=Failed)
    except msgspec.MsgspecError as error:
        raise OwnerUnavailable(f"the answer of the proxy at {url} does not read: {error}") from None
    raise raised(failure)
