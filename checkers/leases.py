"""Check-backs through another proxy: a session there is taken in hand first, then asked.

A transaction's owner may have nobody of the group connected while another proxy has. The owner
takes a *lease* there, which holds one session for a short while, and only then writes the
attempt's marker; the question goes out on the very connection that brought the lease. So it is
always known whether the question can have arrived: without the connection, the lease or the
session it cannot (`Unreached`), with a connection that breaks under it nobody knows (`Unclear`).
"""

import asyncio
import secrets
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

import h11
import msgspec
from msgspec import Struct

from txbroker.checkers.base import (
    Answered,
    CheckCall,
    CheckResult,
    Unclear,
    Unreached,
    already,
    shortened,
)
from txbroker.checkers.connections import CannotConnect, Connection, HostResolver, connect
from txbroker.checkers.exchange import Headers, NoAnswer, NotSent, post, receive, send
from txbroker.checkers.sessions import SessionChannel, SessionRegistry
from txbroker.contract.frames import FRAME_BYTES_MAX
from txbroker.core.records import Decision, Message
from txbroker.net.tls import ClientTls

LEASE_S = 10.0
"""A session is held for so long without a question, seconds. A marker takes milliseconds; a
longer time only keeps the session of an owner that died from others."""
LEASES_MAX = 1024
"""Leases at a time. As many as one proxy makes calls; each holds a place of a session."""
TAKE_S = 2.0
"""Connecting to another proxy and taking a session in hand there may take so long, seconds."""
TRIES_MAX = 3
"""Proxies that are tried for one check, so that finding somebody stays a matter of seconds."""
PATH = "/internal/v1/leases"
CONTENT_TYPE = "application/msgpack"
PROXY_HEADER = "txb-proxy"
"""Names the calling proxy by its URL."""
PEER_HEADER = "txb-peer-secret"
"""Holds the secret of `peer_secret_file`, by which proxies recognize each other."""
GONE = 404
"""The status that says: there is no such lease (any more), nobody was asked."""
NOBODY = 409
"""The status that says: nobody of the group can be asked here."""
_NOT_TAKEN = frozenset({400, 401, 403, GONE, 405, 408, NOBODY, 413, 415, 429, 503})
"""With these another proxy says that it did not even look at the question."""


# --- what travels: maps in msgpack, so that builds of different age understand each other ------


class LeaseRequest(Struct, frozen=True):
    """Take a session of `group` in hand: that of instance `prefer` if it can be asked.

    `only`: no other instance will do. `avoid`: none of these will.
    """

    group: str
    prefer: str = ""
    only: bool = False
    avoid: tuple[str, ...] = ()


class LeaseGranted(Struct, frozen=True):
    """A session is in hand, of the SDK's `instance`; "" from a proxy that cannot avoid any."""

    lease: str
    endpoint: str = ""
    instance: str = ""


class AskAnswer(Struct, frozen=True):
    """What came of a question: `answered`, `unreached` or `unclear`."""

    outcome: str
    decision: Decision | None = None
    ask_again_s: float | None = None
    messages: tuple[Message, ...] | None = None
    detail: str = ""


class GroupsConnected(Struct, frozen=True):
    """The groups that can be asked at a proxy, with their instances.

    `without_function`: further instances, which know only of what they prepared themselves.
    """

    groups: dict[str, tuple[str, ...]] = {}
    without_function: dict[str, tuple[str, ...]] = {}


def to_answer(result: CheckResult) -> AskAnswer:
    """Return a result as it travels."""
    if isinstance(result, Answered):
        return AskAnswer(
            "answered", result.decision, result.ask_again_s, result.messages, result.detail
        )
    kind = "unreached" if isinstance(result, Unreached) else "unclear"
    return AskAnswer(kind, detail=result.detail)


def from_answer(answer: AskAnswer) -> CheckResult:
    """Return the result that travelled; what a newer build may mean else is unclear."""
    detail = shortened(answer.detail)
    if answer.outcome == "answered" and answer.decision is not None:
        return Answered(answer.decision, answer.ask_again_s, answer.messages, detail)
    return Unreached(detail) if answer.outcome == "unreached" else Unclear(detail)


encode = msgspec.msgpack.Encoder().encode
_decode_granted = msgspec.msgpack.Decoder(LeaseGranted).decode
_decode_answer = msgspec.msgpack.Decoder(AskAnswer).decode


# --- the side that has the session ------------------------------------------------------------


class PeerIdentity:
    """How this proxy calls others: by which name and proof, and where.

    Args:
        own_url: this proxy's URL, which other proxies know it by.
        secret: returns the secret of the installation, None where there is none.
        peer_url: returns where the proxy at a URL takes other proxies' calls.
    """

    def __init__(
        self,
        own_url: Callable[[], str],
        secret: Callable[[], str | None] = lambda: None,
        peer_url: Callable[[str], str] = lambda url: url,
    ) -> None:
        self._own_url = own_url
        self._secret = secret
        self.peer_url = peer_url

    def headers(self, url: str) -> list[tuple[str, str]]:
        """Return what each call to a proxy at `url` carries. The secret goes to none without TLS
        where this one has it: such a proxy is none of the installation."""
        own_url = self._own_url()
        headers = [("content-type", CONTENT_TYPE), (PROXY_HEADER, own_url)]
        secret = self._secret()
        readable = own_url.startswith("https:") and not url.startswith("https:")
        return headers if secret is None or readable else [*headers, (PEER_HEADER, secret)]


class Leases:
    """The sessions of this proxy that other proxies have in hand."""

    def __init__(
        self,
        sessions: SessionRegistry,
        *,
        lease_s: float = LEASE_S,
        leases_max: int = LEASES_MAX,
    ) -> None:
        self._sessions = sessions
        self._lease_s = lease_s
        self._leases_max = leases_max
        self._held: dict[str, tuple[SessionChannel, asyncio.TimerHandle]] = {}

    def take(self, request: LeaseRequest) -> LeaseGranted | None:
        """Take a session in hand; None where nobody of the group can be asked."""
        if len(self._held) >= self._leases_max:
            return None
        if request.only:
            channel = self._sessions.acquire_instance(request.group, request.prefer)
        else:
            channel = self._sessions.acquire(request.group, request.prefer, request.avoid)
        if channel is None:
            return None
        lease = secrets.token_hex(16)
        timer = asyncio.get_running_loop().call_later(self._lease_s, self._give_back, lease)
        self._held[lease] = (channel, timer)
        return LeaseGranted(lease, channel.endpoint, channel.instance)

    async def ask(self, lease: str, call: CheckCall) -> CheckResult | None:
        """Ask the session of a lease, once; None where there is no such lease (any more)."""
        held = self._held.pop(lease, None)
        if held is None:
            return None
        channel, timer = held
        timer.cancel()
        try:
            return await channel.ask(call, call.timeout_s)
        finally:
            channel.release()

    def close(self) -> None:
        """Give all sessions back."""
        for lease in list(self._held):
            self._give_back(lease)

    @property
    def held(self) -> int:
        """How many sessions are in other proxies' hands and not asked yet."""
        return len(self._held)

    def _give_back(self, lease: str) -> None:
        channel, timer = self._held.pop(lease)
        timer.cancel()
        channel.release()


# --- the side that asks -----------------------------------------------------------------------


class PeerSessions:
    """Which groups can be asked at which other proxies, and the way to take a session there.

    Args:
        identity: how this proxy calls others.
        tls: whom to trust, and what to show; None: the system's authorities, and nothing.
    """

    def __init__(
        self,
        identity: PeerIdentity,
        tls: ClientTls | None = None,
    ) -> None:
        self._identity = identity
        self._names = HostResolver()
        self._tls = tls or ClientTls()
        self._seen: dict[str, dict[str, tuple[str, ...]]] = {}
        self._without_function: dict[str, dict[str, tuple[str, ...]]] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._turn = 0

    def on_appeared(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with a group's name when it can be asked at another proxy, where it
        could not before."""
        self._listeners.append(listener)

    def saw(self, url: str, connected: GroupsConnected) -> None:
        """Remember whom the proxy at `url` says it can ask."""
        before = self._seen.get(url, {})
        self._seen[url] = dict(connected.groups)
        self._without_function[url] = dict(connected.without_function)
        for group in connected.groups.keys() - before.keys():
            for listener in self._listeners:
                listener(group)

    def forget(self, url: str) -> None:
        """Forget the sessions of a proxy that does not answer."""
        self._seen.pop(url, None)
        self._without_function.pop(url, None)

    def only(self, urls: Collection[str]) -> None:
        """Forget every proxy but these."""
        for url in self._seen.keys() - set(urls):
            self.forget(url)

    async def close(self) -> None:
        """Wait for no look-up of a name any more."""
        await self._names.close()

    async def acquire(
        self, group: str, prefer: str, *, only: bool = False, avoid: Collection[str] = ()
    ) -> "LeaseChannel | Unreached":
        """Return a channel through another proxy, or why there is none.

        Args:
            only: no other instance than `prefer` will do.
            avoid: none of these instances will.
        """
        why = f"nobody of group {group} is connected to another proxy"
        request = LeaseRequest(group, prefer, only, tuple(avoid))
        for url in self._candidates(request):
            try:
                async with asyncio.timeout(TAKE_S):
                    return await self._take(url, request)
            except TimeoutError:
                why = f"the proxy at {url} does not answer within {TAKE_S:g} s"
            except (CannotConnect, NotSent, NoAnswer) as error:
                why = f"the proxy at {url}: {error}"
            # What was known of it is not so any more; the next look at it tells.
            self._not_there(url, request)
        return Unreached(shortened(why))

    def has(self, group: str, instance: str) -> bool:
        """Say whether another proxy has this very instance, as far as is known."""
        return any(self._has(url, group, instance) for url in self._seen)

    def _candidates(self, request: LeaseRequest) -> list[str]:
        group, prefer = request.group, request.prefer
        if request.only:
            return [url for url in self._seen if self._has(url, group, prefer)][:TRIES_MAX]
        there = [
            url
            for url, groups in self._seen.items()
            if not set(groups.get(group, ())).issubset(request.avoid)
        ]
        preferred = [url for url in there if prefer in self._seen[url][group]]
        others = [url for url in there if url not in preferred]
        if others:
            self._turn += 1
            start = self._turn % len(others)
            others = others[start:] + others[:start]
        return (preferred + others)[:TRIES_MAX]

    def _not_there(self, url: str, request: LeaseRequest) -> None:
        """Forget the instance that was wanted there, or everybody of the group."""
        for known in (self._seen.get(url, {}), self._without_function.get(url, {})):
            left = [name for name in known.pop(request.group, ()) if name != request.prefer]
            if request.only and left:
                known[request.group] = tuple(left)

    def _has(self, url: str, group: str, instance: str) -> bool:
        """Say whether this very instance can be asked there about what it prepared."""
        without = self._without_function[url].get(group, ())
        return instance in self._seen[url].get(group, ()) or instance in without

    async def _take(self, url: str, request: LeaseRequest) -> "LeaseChannel":
        """Connect, and take a session in hand.

        Raises:
            CannotConnect, NotSent, NoAnswer: there is none; nothing is in hand.
        """
        parts = urlsplit(self._identity.peer_url(url))
        tls = self._tls.context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        connection = await connect(self._names, parts.hostname or "", port, tls, TAKE_S)
        try:
            headers = self._headers(parts.netloc, self._identity.peer_url(url))
            answer = await post(connection, PATH, headers, encode(request), FRAME_BYTES_MAX)
            if answer.status == NOBODY:
                raise NoAnswer("nobody of the group can be asked there now")
            if answer.status != 200 or not answer.keep:
                raise NoAnswer(f"it answered {answer.status}")
            granted = _decode_granted(answer.body)
        except msgspec.MsgspecError:
            connection.close(abort=True)
            raise NoAnswer("its answer does not read") from None
        except BaseException:
            connection.close(abort=True)
            raise
        target = f"{PATH}/{granted.lease}/ask"
        endpoint = f"{granted.endpoint} at {url}"
        return LeaseChannel(connection, target, headers, endpoint, granted.instance)

    def _headers(self, host: str, url: str) -> Headers:
        return [("host", host), *self._identity.headers(url)]


class LeaseChannel:
    """A session of another proxy in hand, on the connection that brought it."""

    def __init__(
        self,
        connection: Connection,
        target: str,
        headers: Headers,
        endpoint: str,
        instance: str,
    ) -> None:
        self._connection = connection
        self._target = target
        self._headers = headers
        self.endpoint = endpoint
        self.instance = instance

    def ask(self, call: CheckCall, timeout_s: float) -> "asyncio.Future[CheckResult]":
        """Ask, once; see `Channel.ask`."""
        try:
            state = send(self._connection, self._target, self._headers, encode(call))
        except NotSent as error:
            return already(Unreached(str(error)))
        return asyncio.get_running_loop().create_task(self._result(state, timeout_s))

    async def _result(self, state: h11.Connection, timeout_s: float) -> CheckResult:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await receive(self._connection, state, FRAME_BYTES_MAX)
        except NoAnswer as error:
            return Unclear(shortened(f"the other proxy: {error}"))
        except TimeoutError:
            return Unclear(f"no answer within {timeout_s:g} s")
        if answer.status in _NOT_TAKEN:
            return Unreached(f"the other proxy did not ask: it answered {answer.status}")
        if answer.status != 200:
            return Unclear(f"the other proxy answered {answer.status}")
        try:
            return from_answer(_decode_answer(answer.body))
        except msgspec.MsgspecError:
            return Unclear("the other proxy's answer does not read")

    def release(self) -> None:
        """Close the connection; a lease that was not used ends by itself."""
        self._connection.close(abort=True)
