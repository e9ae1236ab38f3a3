"""Checks through another proxy: leases first, and certain versus unclear results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from tests.kit.http_answers import LOOPBACK
from tests.kit.http_api import Api, running_api
from tests.kit.secret_files import secret_file
from txbroker.checkers.base import Answered, CheckCall, CheckResult, Unclear, Unreached
from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.leases import (
    GroupFinder,
    GroupsConnected,
    LeaseChannel,
    LeaseGranted,
    LeaseRequest,
    PeerIdentity,
    PeerSessions,
    SessionLeases,
)
from txbroker.checkers.sessions import SessionChannel, SessionRegistry
from txbroker.contract.frames import CheckAnswer, CheckQuestion
from txbroker.contract.policy import GroupPolicy
from txbroker.core.records import CheckReason, Decision, Message

ME = "http://proxy-b:8470"
FINAL = (Message("payments", b"\x00k", b"\xffv", (("h", None),)),)
CALL = CheckCall("an-id", "orders", 2, 15, CheckReason.DUE, 1_700_000_000_000, FINAL, 1, 2, 5.0)


class Asked:
    """A session with a preset answer, or none."""

    def __init__(
        self,
        sessions: SessionRegistry,
        instance: str,
        answer: CheckAnswer | None = None,
        *,
        checks: bool = True,
    ) -> None:
        self.instance = instance
        self.checks = checks
        self.draining = False
        self.principal_name = self.address = self.client = ""
        self.open = True
        self.sent: list[CheckQuestion] = []
        self.got = asyncio.Event()
        self._answer = answer
        self._sessions = sessions
        sessions.add("orders", self)

    def send_check(self, check: CheckQuestion) -> bool:
        if not self.open:
            return False
        self.sent.append(check)
        self.got.set()
        if self._answer is not None:
            answer = structs.replace(self._answer, call=check.call)
            asyncio.get_running_loop().call_soon(self._sessions.answer, "orders", self, answer)
        return True

    def leave(self) -> None:
        self._sessions.remove("orders", self)


class Elsewhere:
    """The sessions at the proxy at `api`, as another proxy knows them."""

    def __init__(self, api: Api, secret: Callable[[], str | None] = lambda: None) -> None:
        self.api = api
        self.known = PeerSessions(PeerIdentity(lambda: ME, secret))

    def session(
        self, name: str, answer: CheckAnswer | None = None, *, checks: bool = True
    ) -> Asked:
        return Asked(self.api.sessions, name, answer, checks=checks)

    def look(self, url: str = "") -> None:
        sessions = self.api.sessions
        connected = GroupsConnected(sessions.instances(), sessions.instances_without_function())
        self.known.saw(url or self.api.url, connected)

    def saw(self, groups: dict[str, tuple[str, ...]], url: str = "http://a") -> None:
        self.known.saw(url, GroupsConnected(groups))

    async def leased(self, prefer: str = "", **how: Any) -> LeaseChannel:
        channel = await self.known.acquire("orders", prefer, **how)
        assert isinstance(channel, LeaseChannel), channel
        return channel

    async def lease_of(self, prefer: str = "", **how: Any) -> str:
        """Lease a session and return it; return its instance."""
        channel = await self.leased(prefer, **how)
        channel.release()
        return channel.instance

    async def unreached(self, prefer: str = "", **how: Any) -> bool:
        return isinstance(await self.known.acquire("orders", prefer, **how), Unreached)


@pytest.fixture
async def elsewhere(api: Api) -> AsyncIterator[Elsewhere]:
    there = Elsewhere(api)
    yield there
    await there.known.close()


async def ask(channel: LeaseChannel, timeout_s: float = 5.0) -> CheckResult:
    try:
        return await channel.ask(CALL, timeout_s)
    finally:
        channel.release()


async def asked(
    elsewhere: Elsewhere, answer: CheckAnswer | None = None
) -> tuple[Asked, LeaseChannel]:
    """Return the only session, and a lease of it."""
    session = elsewhere.session("pod-1", answer)
    elsewhere.look()
    return session, await elsewhere.leased()


# --- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (
            CheckAnswer(0, Decision.COMMIT, None, FINAL, "paid"),
            Answered(Decision.COMMIT, None, FINAL, "paid"),
        ),
        (
            CheckAnswer(0, Decision.ROLLBACK, detail="no row"),
            Answered(Decision.ROLLBACK, None, None, "no row"),
        ),
        (
            CheckAnswer(0, Decision.UNKNOWN, 30.0),
            Answered(Decision.UNKNOWN, 30.0, None, "not yet, again in 30 s"),
        ),
        (CheckAnswer(0, None, detail="busy"), Unreached("busy")),
        (CheckAnswer(0, None, 5.0, detail="no database"), Unreached("no database", 5.0)),
    ],
)
async def test_an_answer_comes_back_whole(
    elsewhere: Elsewhere, answer: CheckAnswer, result: CheckResult
) -> None:
    session, channel = await asked(elsewhere, answer)
    assert channel.endpoint == f"session pod-1 at {elsewhere.api.url}"
    assert session.sent == []
    assert await ask(channel) == result
    (check,) = session.sent
    assert (check.id, check.group, check.attempt, check.attempts_max) == ("an-id", "orders", 2, 15)
    assert (check.reason, check.messages) == (CheckReason.DUE, FINAL)


@pytest.mark.rule(21)
async def test_question_is_sent_before_any_await(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, channel = await asked(elsewhere, CheckAnswer(0, Decision.COMMIT))
    sent: list[bytes] = []
    monkeypatch.setattr(channel._connection, "send", sent.append)
    asking = channel.ask(CALL, 5.0)
    asking.cancel()
    channel.release()
    assert sent[0].startswith(b"POST /internal/v1/leases/")


# --- certainly not asked ---------------------------------------------------------------------


def lease_is_lost(session: Asked, channel: LeaseChannel) -> None:
    channel._target = "/internal/v1/leases/0123/ask"


@pytest.mark.rule(22)
@pytest.mark.parametrize(
    "lose",
    [
        lambda session, channel: session.leave(),
        lambda session, channel: setattr(session, "open", False),
        lease_is_lost,
        lambda session, channel: channel._connection.close(abort=True),
    ],
    ids=["ended session", "closed socket", "lost lease", "closed connection"],
)
async def test_lost_lease_was_not_asked(
    elsewhere: Elsewhere, lose: Callable[[Asked, LeaseChannel], None]
) -> None:
    session, channel = await asked(elsewhere)
    lose(session, channel)
    assert isinstance(await ask(channel), Unreached)
    assert session.sent == []


async def test_lease_expires() -> None:
    sessions = SessionRegistry(open_checks_max=1)
    leases = SessionLeases(sessions, lease_s=0.05)
    session = Asked(sessions, "pod-1")
    granted = leases.take(LeaseRequest("orders"))
    assert granted is not None
    assert leases.take(LeaseRequest("orders")) is None
    while leases.held:
        await asyncio.sleep(0.01)
    assert await leases.ask(granted.lease, CALL) is None
    assert session.sent == []
    assert leases.take(LeaseRequest("orders")) is not None
    leases.close()


async def test_lease_is_valid_for_one_question() -> None:
    sessions = SessionRegistry()
    leases = SessionLeases(sessions)
    Asked(sessions, "pod-1", CheckAnswer(0, Decision.COMMIT))
    granted = leases.take(LeaseRequest("orders"))
    assert granted is not None
    assert isinstance(await leases.ask(granted.lease, CALL), Answered)
    assert await leases.ask(granted.lease, CALL) is None


async def test_leases_are_bounded() -> None:
    sessions = SessionRegistry()
    leases = SessionLeases(sessions, leases_max=3)
    Asked(sessions, "pod-1")
    taken = [leases.take(LeaseRequest("orders")) for _ in range(5)]
    assert [each is not None for each in taken] == [True] * 3 + [False] * 2
    leases.close()
    assert leases.take(LeaseRequest("orders")) is not None
    leases.close()


async def test_wrong_peer_secret_reaches_no_session(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "secret", "the secret there")
    async with running_api(peer_secret_file=file) as api:
        stranger, member = Elsewhere(api, lambda: "another"), Elsewhere(api, file.read_text)
        stranger.session("pod-1", CheckAnswer(0, Decision.COMMIT))
        for one in (stranger, member):
            one.look()
        assert await stranger.unreached()
        assert isinstance(await ask(await member.leased()), Answered)


# --- unclear ----------------------------------------------------------------------------


async def test_session_that_ends_during_question_is_unclear(elsewhere: Elsewhere) -> None:
    session, channel = await asked(elsewhere)
    asking = asyncio.ensure_future(ask(channel))
    await asyncio.wait_for(session.got.wait(), 5)
    session.leave()
    assert isinstance(await asking, Unclear)


async def test_no_answer_in_time_is_unclear(elsewhere: Elsewhere) -> None:
    session, channel = await asked(elsewhere)
    assert isinstance(await ask(channel, 0.2), Unclear)
    assert len(session.sent) == 1
    session.leave()


@pytest.mark.rule(22)
async def test_proxy_that_dies_during_question_is_unclear(elsewhere: Elsewhere) -> None:
    session = elsewhere.session("pod-1")
    relay, cut = await relayed(elsewhere.api.port)
    elsewhere.look(relay)
    asking = asyncio.ensure_future(ask(await elsewhere.leased()))
    await asyncio.wait_for(session.got.wait(), 5)
    cut()
    assert isinstance(await asking, Unclear)
    session.leave()


async def relayed(port: int) -> tuple[str, Callable[[], None]]:
    """Return a URL that leads to a local port, and what cuts all its connections for good."""
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        except ConnectionError:
            return

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, outer))
        await asyncio.gather(pump(reader, outer), pump(inner, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)

    def cut() -> None:
        server.close()
        for writer in writers:
            writer.transport.abort()

    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", cut


# --- whom ------------------------------------------------------------------------------------


async def test_gone_proxy_is_tried_once(elsewhere: Elsewhere) -> None:
    elsewhere.session("pod-1")
    elsewhere.saw({"orders": ("pod-9",)}, "http://127.0.0.1:9")
    elsewhere.look()
    assert await elsewhere.lease_of("pod-9") == "pod-1"
    gone = await elsewhere.known.acquire("orders", "pod-9", only=True)
    why = "no instance of group orders is connected to another proxy"
    assert gone == Unreached(why, lasting=True)


async def test_only_the_named_instance_is_leased(elsewhere: Elsewhere) -> None:
    one, two = (elsewhere.session(name) for name in ("pod-1", "pod-2"))
    elsewhere.look()
    for prefer in ("pod-1", "pod-2", "pod-1"):
        assert await elsewhere.lease_of(prefer) == prefer
    one.draining = True
    assert await elsewhere.unreached("pod-1", only=True)
    two.leave()


async def test_group_appears_once_until_gone(elsewhere: Elsewhere) -> None:
    appeared: list[str] = []
    elsewhere.known.on_appeared(appeared.append)
    elsewhere.saw({"orders": ("x",)})
    elsewhere.saw({"orders": ("x", "y"), "other": ("z",)})
    assert appeared == ["orders", "other"]
    elsewhere.saw({"other": ("z",)})
    elsewhere.saw({"orders": ("x",)})
    assert appeared == ["orders", "other", "orders"]
    elsewhere.known.forget("http://a")
    elsewhere.saw({"orders": ("x",)})
    elsewhere.known.only(["http://b"])
    elsewhere.saw({"orders": ("x",)})
    assert appeared == ["orders", "other", "orders", "orders", "orders"]


async def test_draining_instances_are_not_offered(api: Api) -> None:
    one = Asked(api.sessions, "pod-1")
    assert api.sessions.instances() == {"orders": ("pod-1",)}
    one.draining = True
    assert api.sessions.instances() == {}


async def test_finder_prefers_preparing_then_local_instances(elsewhere: Elsewhere) -> None:
    api, own = elsewhere.api, SessionRegistry()
    groups, checks = Groups(api.store), HttpChecks(guard=LOOPBACK)
    await groups.load()
    finder = GroupFinder(own, groups, checks, elsewhere.known)

    async def found(prefer: str) -> str:
        channel = await finder.acquire("orders", prefer)
        if isinstance(channel, Unreached):
            return "none"
        channel.release()
        return channel.endpoint if isinstance(channel, SessionChannel | LeaseChannel) else "url"

    far = elsewhere.session("far")
    near = Asked(own, "near")
    elsewhere.look()
    assert await found("far") == f"session far at {api.url}"
    assert await found("near") == "session near"
    assert await found("unknown") == await found("") == "session near"
    Asked(own, "far")
    assert await found("far") == "session far"
    near.leave()
    own = finder._sessions = SessionRegistry()
    assert await found("") == await found("unknown") == f"session far at {api.url}"
    await groups.put("orders", GroupPolicy(check_url=f"{api.url}/anything"))
    assert await found("") == f"session far at {api.url}"
    far.leave()
    assert await found("") == "url"
    await groups.remove("orders")
    assert await found("far") == "none"
    await checks.close()


@pytest.mark.rule(24)
async def test_finder_knows_whether_others_were_not_asked(elsewhere: Elsewhere) -> None:
    """An instance that was not asked comes next: here, at another proxy, at the check URL."""
    api, own = elsewhere.api, SessionRegistry(open_checks_max=1)
    groups, checks = Groups(api.store), HttpChecks(guard=LOOPBACK)
    await groups.load()
    finder = GroupFinder(own, groups, checks, elsewhere.known)
    Asked(own, "near")
    far = elsewhere.session("far")
    elsewhere.look()
    avoid: list[str] = []
    for instance in ("near", "far"):
        channel = await finder.acquire("orders", "near", avoid)
        assert not isinstance(channel, Unreached)
        assert channel.instance == instance
        channel.release()
        avoid.append(instance)
    none = await finder.acquire("orders", "near", avoid)
    assert isinstance(none, Unreached)
    assert none.lasting
    # Now each of them cannot be asked just now.
    near = finder.at_hand("orders", "near")
    far.leave()
    for known in (["near"], ["far"]):
        unreached = await finder.acquire("orders", "near", known)
        assert isinstance(unreached, Unreached)
        assert not unreached.lasting
    await groups.put("orders", GroupPolicy(check_url=f"{api.url}/anything"))
    for avoided, url in ((avoid, True), ([*avoid, ""], False)):
        found = await finder.acquire("orders", "near", avoided)
        assert isinstance(found, Unreached) is not url
        if not isinstance(found, Unreached):
            found.release()
    assert near is not None
    near.release()
    await checks.close()


async def test_instance_that_refused_is_not_offered_again(elsewhere: Elsewhere) -> None:
    for name in ("pod-1", "pod-2"):
        elsewhere.session(name)
    elsewhere.look()
    for avoid, other in (("pod-1", "pod-2"), ("pod-2", "pod-1")):
        assert await elsewhere.lease_of(avoid={avoid}) == other
    assert await elsewhere.unreached(avoid={"pod-1", "pod-2"})
    assert await elsewhere.leased()  # nothing of it is forgotten


async def test_instance_without_function_gets_own_checks_only(elsewhere: Elsewhere) -> None:
    appeared: list[str] = []
    elsewhere.known.on_appeared(appeared.append)
    elsewhere.session("web", checks=False)
    elsewhere.look()
    assert appeared == []
    assert await elsewhere.unreached("web")
    assert await elsewhere.lease_of("web", only=True) == "web"
    elsewhere.known.forget(elsewhere.api.url)
    assert await elsewhere.unreached("web", only=True)


async def test_unavailable_instance_hides_no_other(elsewhere: Elsewhere) -> None:
    gone = elsewhere.session("web", checks=False)
    elsewhere.session("worker", CheckAnswer(0, Decision.COMMIT))
    elsewhere.look()
    gone.leave()
    for _ in range(2):
        assert await elsewhere.unreached("web", only=True)
    assert await elsewhere.lease_of("web") == "worker"


def test_older_proxies_are_understood() -> None:
    granted = msgspec.msgpack.encode({"lease": "x", "endpoint": "session pod-1"})
    assert msgspec.msgpack.decode(granted, type=LeaseGranted).instance == ""
    connected = msgspec.msgpack.encode({"groups": {"orders": ["pod-1"]}})
    assert msgspec.msgpack.decode(connected, type=GroupsConnected).without_function == {}
