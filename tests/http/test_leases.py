"""Checks through another proxy: leases first, and certain versus unclear results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from tests.kit.http_answers import LOOPBACK
from tests.kit.http_api import Api, running_api
from txbroker.checkers.base import Answered, CheckCall, CheckResult, Unclear, Unreached
from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.leases import (
    GroupFinder,
    GroupsConnected,
    LeaseChannel,
    LeaseGranted,
    LeaseRequest,
    Leases,
    PeerIdentity,
    PeerSessions,
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
        self.principal_name = ""
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
            answer = CheckAnswer(
                check.call,
                self._answer.decision,
                self._answer.ask_again_s,
                self._answer.messages,
                self._answer.detail,
            )
            asyncio.get_running_loop().call_soon(self._sessions.answer, "orders", self, answer)
        return True

    def leave(self) -> None:
        self._sessions.remove("orders", self)


@pytest.fixture
async def elsewhere(api: Api) -> AsyncIterator[PeerSessions]:
    """The sessions known of the proxy at `api`."""
    known = PeerSessions(PeerIdentity(lambda: ME))
    yield known
    await known.close()


def connected(api: Api) -> GroupsConnected:
    """Return the sessions that the proxy at `api` reports."""
    return GroupsConnected(api.sessions.instances(), api.sessions.instances_without_function())


def look(api: Api, elsewhere: PeerSessions) -> None:
    elsewhere.saw(api.url, connected(api))


async def leased(api: Api, elsewhere: PeerSessions, prefer: str = "") -> LeaseChannel:
    look(api, elsewhere)
    channel = await elsewhere.acquire("orders", prefer)
    assert isinstance(channel, LeaseChannel), channel
    return channel


async def ask(channel: LeaseChannel, timeout_s: float = 5.0) -> CheckResult:
    try:
        return await channel.ask(CALL, timeout_s)
    finally:
        channel.release()


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
    ],
)
async def test_an_answer_comes_back_whole(
    api: Api, elsewhere: PeerSessions, answer: CheckAnswer, result: CheckResult
) -> None:
    session = Asked(api.sessions, "pod-1", answer)
    channel = await leased(api, elsewhere)
    assert channel.endpoint == f"session pod-1 at {api.url}"
    assert session.sent == []
    assert await ask(channel) == result
    (check,) = session.sent
    assert (check.id, check.group, check.attempt, check.attempts_max) == ("an-id", "orders", 2, 15)
    assert (check.reason, check.messages) == (CheckReason.DUE, FINAL)


@pytest.mark.rule(21)
async def test_question_is_sent_before_any_await(
    api: Api, elsewhere: PeerSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    Asked(api.sessions, "pod-1", CheckAnswer(0, Decision.COMMIT))
    channel = await leased(api, elsewhere)
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
    api: Api, elsewhere: PeerSessions, lose: Callable[[Asked, LeaseChannel], None]
) -> None:
    session = Asked(api.sessions, "pod-1")
    channel = await leased(api, elsewhere)
    lose(session, channel)
    assert isinstance(await ask(channel), Unreached)
    assert session.sent == []


async def test_lease_expires(elsewhere: PeerSessions) -> None:
    sessions = SessionRegistry(open_checks_max=1)
    leases = Leases(sessions, lease_s=0.05)
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
    leases = Leases(sessions)
    Asked(sessions, "pod-1", CheckAnswer(0, Decision.COMMIT))
    granted = leases.take(LeaseRequest("orders"))
    assert granted is not None
    assert isinstance(await leases.ask(granted.lease, CALL), Answered)
    assert await leases.ask(granted.lease, CALL) is None


async def test_leases_are_bounded() -> None:
    sessions = SessionRegistry()
    leases = Leases(sessions, leases_max=3)
    Asked(sessions, "pod-1")
    taken = [leases.take(LeaseRequest("orders")) for _ in range(5)]
    assert [each is not None for each in taken] == [True] * 3 + [False] * 2
    leases.close()
    assert leases.take(LeaseRequest("orders")) is not None
    leases.close()


async def test_wrong_peer_secret_reaches_no_session(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret there")
    (tmp_path / "secret").chmod(0o600)
    async with running_api(peer_secret_file=tmp_path / "secret") as api:
        Asked(api.sessions, "pod-1", CheckAnswer(0, Decision.COMMIT))
        for secret, kind in (("another", Unreached), ("the secret there", LeaseChannel)):
            known = PeerSessions(PeerIdentity(lambda: ME, lambda: secret))  # noqa: B023
            look(api, known)
            channel = await known.acquire("orders", "")
            assert isinstance(channel, kind)
            if isinstance(channel, LeaseChannel):
                assert isinstance(await ask(channel), Answered)


# --- unclear ----------------------------------------------------------------------------


async def test_session_that_ends_during_question_is_unclear(
    api: Api, elsewhere: PeerSessions
) -> None:
    session = Asked(api.sessions, "pod-1")
    asking = asyncio.ensure_future(ask(await leased(api, elsewhere)))
    await asyncio.wait_for(session.got.wait(), 5)
    session.leave()
    assert isinstance(await asking, Unclear)


async def test_no_answer_in_time_is_unclear(api: Api, elsewhere: PeerSessions) -> None:
    session = Asked(api.sessions, "pod-1")
    assert isinstance(await ask(await leased(api, elsewhere), 0.2), Unclear)
    assert len(session.sent) == 1
    session.leave()


@pytest.mark.rule(22)
async def test_proxy_that_dies_during_question_is_unclear() -> None:
    known = PeerSessions(PeerIdentity(lambda: ME))
    async with running_api() as api:
        session = Asked(api.sessions, "pod-1")
        relay, cut = await relayed(api.port)
        known.saw(relay, connected(api))
        channel = await known.acquire("orders", "")
        assert isinstance(channel, LeaseChannel)
        asking = asyncio.ensure_future(ask(channel))
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


async def test_gone_proxy_is_tried_once(api: Api, elsewhere: PeerSessions) -> None:
    Asked(api.sessions, "pod-1")
    elsewhere.saw("http://127.0.0.1:9", GroupsConnected({"orders": ("pod-9",)}))
    look(api, elsewhere)
    channel = await elsewhere.acquire("orders", "pod-9")
    assert isinstance(channel, LeaseChannel)
    channel.release()
    gone = await elsewhere.acquire("orders", "pod-9", only=True)
    assert gone == Unreached("no instance of group orders is connected to another proxy")


async def test_only_the_named_instance_is_leased(api: Api, elsewhere: PeerSessions) -> None:
    one, two = (Asked(api.sessions, name) for name in ("pod-1", "pod-2"))
    for prefer in ("pod-1", "pod-2", "pod-1"):
        channel = await leased(api, elsewhere, prefer)
        assert channel.endpoint == f"session {prefer} at {api.url}"
        channel.release()
    one.draining = True
    assert isinstance(await elsewhere.acquire("orders", "pod-1", only=True), Unreached)
    two.leave()


async def test_group_appears_once_until_gone(elsewhere: PeerSessions) -> None:
    appeared: list[str] = []
    elsewhere.on_appeared(appeared.append)
    elsewhere.saw("http://a", GroupsConnected({"orders": ("x",)}))
    elsewhere.saw("http://a", GroupsConnected({"orders": ("x", "y"), "other": ("z",)}))
    assert appeared == ["orders", "other"]
    elsewhere.saw("http://a", GroupsConnected({"other": ("z",)}))
    elsewhere.saw("http://a", GroupsConnected({"orders": ("x",)}))
    assert appeared == ["orders", "other", "orders"]
    elsewhere.forget("http://a")
    elsewhere.saw("http://a", GroupsConnected({"orders": ("x",)}))
    elsewhere.only(["http://b"])
    elsewhere.saw("http://a", GroupsConnected({"orders": ("x",)}))
    assert appeared == ["orders", "other", "orders", "orders", "orders"]


async def test_draining_instances_are_not_offered(api: Api) -> None:
    one = Asked(api.sessions, "pod-1")
    assert api.sessions.instances() == {"orders": ("pod-1",)}
    one.draining = True
    assert api.sessions.instances() == {}


async def test_finder_prefers_preparing_then_local_instances(
    api: Api, elsewhere: PeerSessions
) -> None:
    own = SessionRegistry()
    groups, checks = Groups(api.store), HttpChecks(guard=LOOPBACK)
    await groups.load()
    finder = GroupFinder(own, groups, checks, elsewhere)

    async def found(prefer: str) -> str:
        channel = await finder.acquire("orders", prefer)
        if isinstance(channel, Unreached):
            return "none"
        channel.release()
        return channel.endpoint if isinstance(channel, SessionChannel | LeaseChannel) else "url"

    far = Asked(api.sessions, "far")
    near = Asked(own, "near")
    look(api, elsewhere)
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


async def test_instance_that_refused_is_not_offered_again(
    api: Api, elsewhere: PeerSessions
) -> None:
    for name in ("pod-1", "pod-2"):
        Asked(api.sessions, name)
    look(api, elsewhere)
    for avoid, other in (("pod-1", "pod-2"), ("pod-2", "pod-1")):
        channel = await elsewhere.acquire("orders", "", avoid={avoid})
        assert isinstance(channel, LeaseChannel)
        assert channel.instance == other
        channel.release()
    assert isinstance(await elsewhere.acquire("orders", "", avoid={"pod-1", "pod-2"}), Unreached)
    # Nothing is forgotten of it.
    assert isinstance(await elsewhere.acquire("orders", ""), LeaseChannel)


async def test_instance_without_function_gets_own_checks_only(
    api: Api, elsewhere: PeerSessions
) -> None:
    appeared: list[str] = []
    elsewhere.on_appeared(appeared.append)
    Asked(api.sessions, "web", checks=False)
    look(api, elsewhere)
    assert appeared == []
    assert isinstance(await elsewhere.acquire("orders", "web"), Unreached)
    channel = await elsewhere.acquire("orders", "web", only=True)
    assert isinstance(channel, LeaseChannel)
    assert channel.instance == "web"
    channel.release()
    elsewhere.forget(api.url)
    assert isinstance(await elsewhere.acquire("orders", "web", only=True), Unreached)


async def test_unavailable_instance_hides_no_other(api: Api, elsewhere: PeerSessions) -> None:
    gone = Asked(api.sessions, "web", checks=False)
    Asked(api.sessions, "worker", CheckAnswer(0, Decision.COMMIT))
    look(api, elsewhere)
    gone.leave()
    assert isinstance(await elsewhere.acquire("orders", "web", only=True), Unreached)
    assert isinstance(await elsewhere.acquire("orders", "web", only=True), Unreached)
    channel = await elsewhere.acquire("orders", "web")
    assert isinstance(channel, LeaseChannel)
    assert channel.instance == "worker"
    channel.release()


def test_older_proxies_are_understood() -> None:
    granted = msgspec.msgpack.encode({"lease": "x", "endpoint": "session pod-1"})
    assert msgspec.msgpack.decode(granted, type=LeaseGranted).instance == ""
    connected = msgspec.msgpack.encode({"groups": {"orders": ["pod-1"]}})
    assert msgspec.msgpack.decode(connected, type=GroupsConnected).without_function == {}
