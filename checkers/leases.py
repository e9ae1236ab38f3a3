"""Check-backs through another proxy: lease a session there, then ask it.

No instance of the group may be connected to a transaction's owner while one is to another proxy.
The owner then takes a *lease* there, which holds one session for a short while, and only then
writes the attempt's marker. The question goes out on the connection that brought the lease. So it
is always known whether the question can have arrived: without the connection, the lease or the
session it cannot (`Unreached`); if the connection breaks it may have (`Unclear`).
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

import msgspec
import structlog
from msgspec import Struct

from txbroker.checkers import base
from txbroker.checkers.base import Answered, Channel, CheckCall, CheckResult, Unclear, Unreached
from txbroker.checkers.connections import (
    CheckConnection,
    ConnectionEnded,
    Exchange,
    Headers,
    HostResolver,
    NoAnswer,
    NoConnection,
    connect,
)
from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.sessions import SessionChannel, SessionRegistry
from txbroker.contract.frames import FRAME_BYTES_MAX
from txbroker.contract.policy import without_query
from txbroker.core.records import Decision, Message
from txbroker.net.tls import ClientTls

log = structlog.wrap_logger(logging.getLogger(__name__))

LEASE_S = 10.0
"""How long a session is held without a question, seconds. A marker takes milliseconds; a longer
time only blocks the session of an owner that died."""
LEASES_MAX = 1024
"""Leases at a time: as many as one proxy has calls in flight."""
TAKE_S = 2.0
"""Maximum time to connect to another proxy and take a lease there, seconds."""
TRIES_MAX = 3
"""Proxies that are tried for one check, so that the search takes seconds."""
PATH = "/internal/v1/leases"
CONTENT_TYPE = "application/msgpack"
PROXY_HEADER = "txb-proxy"
"""Names the calling proxy by its URL."""
PEER_HEADER = "txb-peer-secret"
"""The secret of `peer_secret_file`, by which proxies recognize each other."""
GONE = 404
"""Status: there is no such lease (any more); no instance was asked."""
NOBODY = 409
"""Status: no instance of the group can be asked here."""
_NOT_TAKEN = frozenset({400, 401, 403, GONE, 405, 408, NOBODY, 413, 415, 429, 503})
"""With these another proxy answers that it did not handle the question."""


# --- on the wire: msgpack maps, so that builds of different age understand each other ----------


class LeaseRequest(Struct, frozen=True):
    """Lease a session of `group`: that of instance `prefer` if it can be asked.

    `only`: no other instance. `avoid`: none of these instances.
    """

    group: str
    prefer: str = ""
    only: bool = False
    avoid: tuple[str, ...] = ()


class LeaseGranted(Struct, frozen=True):
    """A session is leased, of the SDK's `instance`; "" from a proxy that cannot avoid any."""

    lease: str
    endpoint: str = ""
    instance: str = ""


class AskAnswer(Struct, frozen=True):
    """The result of a question; `outcome` is `answered`, `unreached` or `unclear`."""

    outcome: str
    decision: Decision | None = None
    ask_again_s: float | None = None
    messages: tuple[Message, ...] | None = None
    detail: str = ""
    lasting: bool = False


class GroupsConnected(Struct, frozen=True):
    """The groups that can be asked at a proxy, with their instances.

    `without_function`: further instances, which can be asked only about transactions that they
    prepared.
    """

    groups: dict[str, tuple[str, ...]] = {}
    without_function: dict[str, tuple[str, ...]] = {}


def to_answer(result: CheckResult) -> AskAnswer:
    """Return a result in its wire form."""
    if isinstance(result, Answered):
        return AskAnswer(
            "answered", result.decision, result.ask_again_s, result.messages, result.detail
        )
    if isinstance(result, Unreached):
        return AskAnswer(
            "unreached", None, result.ask_again_s, detail=result.detail, lasting=result.lasting
        )
    return AskAnswer("unclear", detail=result.detail)


def from_answer(answer: AskAnswer) -> CheckResult:
    """Return the result of a wire form; an outcome of a newer build is unclear."""
    detail = base.shortened(answer.detail)
    if answer.outcome == "answered" and answer.decision is not None:
        return Answered(answer.decision, answer.ask_again_s, answer.messages, detail)
    if answer.outcome == "unreached":
        return Unreached(detail, answer.ask_again_s, answer.lasting)
    return Unclear(detail)


encode = msgspec.msgpack.Encoder().encode
_decode_granted = msgspec.msgpack.Decoder(LeaseGranted).decode
_decode_answer = msgspec.msgpack.Decoder(AskAnswer).decode


# --- the proxy with the session ---------------------------------------------------------------


class PeerIdentity:
    """How this proxy identifies itself to others, and where it calls them.

    Args:
        own_url: returns this proxy's URL, which other proxies know it by.
        secret: returns the secret of the installation, or None.
        peer_url: returns where the proxy at a URL takes calls of other proxies.
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
        """Return the headers of each call to a proxy at `url`. If this proxy has TLS, the secret is
        not sent to one without: that one is not of the installation."""
        own_url = self._own_url()
        headers = [("content-type", CONTENT_TYPE), (PROXY_HEADER, own_url)]
        secret = self._secret()
        exposed = own_url.startswith("https:") and not url.startswith("https:")
        return headers if secret is None or exposed else [*headers, (PEER_HEADER, secret)]


class SessionLeases:
    """The sessions of this proxy that other proxies have leased."""

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
        """Lease a session; None if no instance of the group can be asked."""
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
        """Ask the session of a lease, once; None if there is no such lease (any more)."""
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
        for lease in list(self._held):
            self._give_back(lease)

    @property
    def held(self) -> int:
        """How many sessions are leased and not asked yet."""
        return len(self._held)

    def _give_back(self, lease: str) -> None:
        channel, timer = self._held.pop(lease)
        timer.cancel()
        channel.release()


# --- the proxy that asks ----------------------------------------------------------------------


class PeerSessions:
    """Knows which groups can be asked at which other proxies, and takes leases there.

    Args:
        tls: trusted authorities and own certificate; None: the system's authorities, no
            certificate.
    """

    def __init__(self, identity: PeerIdentity, tls: ClientTls | None = None) -> None:
        self._identity = identity
        self._names = HostResolver()
        self._tls = tls or ClientTls()
        self._seen: dict[str, dict[str, tuple[str, ...]]] = {}
        self._without_function: dict[str, dict[str, tuple[str, ...]]] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._round_robin = 0

    def on_appeared(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with a group's name when it becomes askable at another proxy."""
        self._listeners.append(listener)

    def saw(self, url: str, connected: GroupsConnected) -> None:
        """Remember the groups that the proxy at `url` can ask."""
        before = self._seen.get(url, {})
        self._seen[url] = dict(connected.groups)
        self._without_function[url] = dict(connected.without_function)
        for group in connected.groups.keys() - before.keys():
            for listener in self._listeners:
                listener(group)

    def forget(self, url: str) -> None:
        """Forget the sessions of an unresponsive proxy."""
        self._seen.pop(url, None)
        self._without_function.pop(url, None)

    def only(self, urls: Collection[str]) -> None:
        """Forget every proxy but these."""
        for url in self._seen.keys() - set(urls):
            self.forget(url)

    async def close(self) -> None:
        await self._names.close()

    async def acquire(
        self, group: str, prefer: str, *, only: bool = False, avoid: Collection[str] = ()
    ) -> "LeaseChannel | Unreached":
        """Return a channel through another proxy, or why there is none.

        Args:
            only: accept no other instance than `prefer`.
            avoid: accept none of these instances.
        """
        why = f"no instance of group {group} is connected to another proxy"
        request = LeaseRequest(group, prefer, only, tuple(avoid))
        candidates = self._candidates(request)
        for url in candidates:
            try:
                async with asyncio.timeout(TAKE_S):
                    return await self._take(url, request)
            except TimeoutError:
                why = f"the proxy at {url} does not answer within {TAKE_S:g} s"
            except (NoConnection, ConnectionEnded, NoAnswer) as error:
                why = f"the proxy at {url}: {error}"
            # The cached view of that proxy is out of date; its next answer renews it.
            self._drop_cached(url, request)
        return Unreached(base.shortened(why), lasting=not candidates)

    def has(self, group: str, instance: str) -> bool:
        """Return True if another proxy is known to have this instance."""
        return any(self._has(url, group, instance) for url in self._seen)

    def _candidates(self, request: LeaseRequest) -> list[str]:
        group, prefer = request.group, request.prefer
        if request.only:
            return [url for url in self._seen if self._has(url, group, prefer)][:TRIES_MAX]
        urls = [
            url
            for url, groups in self._seen.items()
            if not set(groups.get(group, ())).issubset(request.avoid)
        ]
        preferred = [url for url in urls if prefer in self._seen[url][group]]
        others = [url for url in urls if url not in preferred]
        if others:
            self._round_robin += 1
            start = self._round_robin % len(others)
            others = others[start:] + others[:start]
        return (preferred + others)[:TRIES_MAX]

    def _drop_cached(self, url: str, request: LeaseRequest) -> None:
        """Forget the requested instance at that proxy, or all instances of the group."""
        for known in (self._seen.get(url, {}), self._without_function.get(url, {})):
            left = [name for name in known.pop(request.group, ()) if name != request.prefer]
            if request.only and left:
                known[request.group] = tuple(left)

    def _has(self, url: str, group: str, instance: str) -> bool:
        """Return True if this instance can be asked there about transactions that it prepared."""
        without = self._without_function[url].get(group, ())
        return instance in self._seen[url].get(group, ()) or instance in without

    async def _take(self, url: str, request: LeaseRequest) -> "LeaseChannel":
        """Connect and take a lease.

        Raises:
            CannotConnect, NotSent, NoAnswer: there is no lease.
        """
        parts = urlsplit(self._identity.peer_url(url))
        tls = self._tls.context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        connection = await connect(self._names, parts.hostname or "", port, tls, TAKE_S)
        try:
            headers = self._headers(parts.netloc, self._identity.peer_url(url))
            exchange = Exchange(connection, FRAME_BYTES_MAX)
            exchange.send(PATH, headers, encode(request))
            status = (await exchange.head()).status_code
            body = await exchange.body()
            if status == NOBODY:
                raise NoAnswer("no instance of the group can be asked there now")
            if status != 200 or not exchange.reusable:
                raise NoAnswer(f"it answered {status}")
            granted = _decode_granted(body)
        except msgspec.MsgspecError:
            connection.close(abort=True)
            raise NoAnswer("its answer is malformed") from None
        except BaseException:
            connection.close(abort=True)
            raise
        target = f"{PATH}/{granted.lease}/ask"
        endpoint = f"{granted.endpoint} at {url}"
        return LeaseChannel(connection, target, headers, endpoint, granted.instance)

    def _headers(self, host: str, url: str) -> Headers:
        return [("host", host), *self._identity.headers(url)]


class LeaseChannel:
    """A leased session of another proxy, on the connection that brought the lease."""

    def __init__(
        self,
        connection: CheckConnection,
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
            exchange = Exchange(self._connection, FRAME_BYTES_MAX)
            exchange.send(self._target, self._headers, encode(call))
        except ConnectionEnded as error:
            return base.already(Unreached(str(error)))
        return asyncio.get_running_loop().create_task(self._result(exchange, timeout_s))

    async def _result(self, exchange: Exchange, timeout_s: float) -> CheckResult:
        try:
            async with asyncio.timeout(timeout_s):
                status = (await exchange.head()).status_code
                body = await exchange.body()
        except NoAnswer as error:
            return Unclear(base.shortened(f"the other proxy: {error}"))
        except TimeoutError:
            return Unclear(f"no answer within {timeout_s:g} s")
        if status in _NOT_TAKEN:
            return Unreached(f"the other proxy did not ask: it answered {status}")
        if status != 200:
            return Unclear(f"the other proxy answered {status}")
        try:
            return from_answer(_decode_answer(body))
        except msgspec.MsgspecError:
            return Unclear("the other proxy's answer is malformed")

    def release(self) -> None:
        """Close the connection; an unused lease expires."""
        self._connection.close(abort=True)


# --- whom to ask: a session here or at another proxy, or the check URL --------------------------


class GroupFinder:
    """Finds an instance of a group to ask: on this proxy, on another one, or at the check URL.

    The order: the instance that prepared the transaction, on any proxy; another instance on this
    proxy, as that saves a hop; one on another proxy; the check URL. An instance without a check
    function is asked only about transactions that it prepared.
    """

    def __init__(
        self,
        sessions: SessionRegistry,
        groups: Groups,
        http: HttpChecks,
        peers: PeerSessions | None = None,
    ) -> None:
        self._sessions = sessions
        self._groups = groups
        self._http = http
        self._peers = peers
        for appeared in (sessions.on_appeared, groups.on_change):
            appeared(self._warn_of_both)

    def _warn_of_both(self, group: str) -> None:
        """Log that a group has a check URL beside instances with a check function.

        The URL decides for instances that died, so it must find out the truth as they do. Signed
        answers come from the group's service: there is no warning.
        """
        policy = self._groups.policies.get(group)
        connected = self._sessions.askable(group)
        if policy is None or policy.check_url is None or policy.signed_answers or not connected:
            return
        log.warning(
            "check URL beside instances",
            group=group,
            url=without_query(policy.check_url),
            why="it decides for instances that died: remove the URL if it is not the same service, "
            "or register it with signed_answers",
        )

    def at_hand(self, group: str, prefer: str) -> Channel | None:
        """Return a channel to a session on this proxy; None if another proxy's comes first."""
        peers = self._peers
        session = self._sessions.acquire_instance(group, prefer) if prefer else None
        if session is not None or (prefer and peers is not None and peers.has(group, prefer)):
            return session
        return self._sessions.acquire(group, "")

    async def acquire(
        self, group: str, prefer: str, avoid: Collection[str] = ()
    ) -> Channel | Unreached:
        """Return a channel to a session, else to the check URL, else why there is none."""
        found = await self._session(group, prefer, avoid)
        policy = self._groups.policies.get(group)
        if not isinstance(found, Unreached):
            return found
        if policy is None or policy.check_url is None or "" in avoid:
            return Unreached(self._why_unreached(group), lasting=found.lasting)
        return await self._http.acquire_for(group, policy)

    async def _session(
        self, group: str, prefer: str, avoid: Collection[str]
    ) -> Channel | Unreached:
        """Return a channel to a session, or an `Unreached` that is lasting if there is none."""
        peers, known = self._peers, False
        if prefer and prefer not in avoid:
            session = self._sessions.acquire_instance(group, prefer)
            if session is not None:
                return session
            if peers is not None:
                lease = await peers.acquire(group, prefer, only=True)
                if not isinstance(lease, Unreached):
                    return lease
                known = not lease.lasting
        session = self._sessions.acquire(group, prefer, avoid)
        if session is not None:
            return session
        if peers is not None:
            lease = await peers.acquire(group, prefer, avoid=avoid)
            if not isinstance(lease, Unreached):
                return lease
            known = known or not lease.lasting
        return Unreached("", lasting=not (known or self._sessions.has(group, avoid)))

    def _why_unreached(self, group: str) -> str:
        why = f"no instance of group {group} is connected"
        if group in self._sessions.counts():
            why = (
                f"every connected instance of group {group} is draining, has the maximum of open "
                "checks or no check function"
            )
        problem = self._groups.problem(group)
        return f"{why} and {problem or 'no check URL is registered'}"
