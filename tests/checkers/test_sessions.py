"""Check-backs down SDK sessions, and whom the finder chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.kit.fake_service import FakeStore
from txbroker.checkers.base import Answered, CheckCall, CheckResult, Unclear, Unreached
from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChannel, HttpChecks
from txbroker.checkers.leases import GroupFinder
from txbroker.checkers.sessions import SessionChannel, SessionRegistry
from txbroker.contract.frames import CheckAnswer, CheckQuestion
from txbroker.contract.policy import GroupPolicy
from txbroker.core.records import Decision, Message

Serve = Callable[..., Awaitable[Any]]


class Session:
    """A session whose socket is a list."""

    def __init__(self, instance: str, *, checks: bool = True) -> None:
        self.instance = instance
        self.checks = checks
        self.draining = False
        self.principal_name = self.address = self.client = ""
        self.open = True
        self.sent: list[CheckQuestion] = []

    def send_check(self, check: CheckQuestion) -> bool:
        if self.open:
            self.sent.append(check)
        return self.open


@pytest.fixture
def sessions() -> SessionRegistry:
    return SessionRegistry(open_checks_max=2)


def connect(sessions: SessionRegistry, *instances: str) -> list[Session]:
    connected = [Session(instance) for instance in instances]
    for session in connected:
        sessions.add("orders", session)
    return connected


def acquire(sessions: SessionRegistry, prefer: str = "") -> SessionChannel:
    channel = sessions.acquire("orders", prefer)
    assert channel is not None
    return channel


async def asked(
    sessions: SessionRegistry, session: Session, call: CheckCall, *answers: CheckAnswer | None
) -> CheckResult:
    """Ask `session`; each answer is given with the call's number, None ends the session."""
    channel = acquire(sessions, session.instance)
    task = channel.ask(call, 5.0)
    await asyncio.sleep(0)
    for answer in answers:
        if answer is None:
            sessions.remove("orders", session)
        else:
            number = session.sent[-1].call
            given = CheckAnswer(
                number, answer.decision, answer.ask_again_s, answer.messages, answer.detail
            )
            sessions.answer("orders", session, given)
    result = await task
    channel.release()
    return result


async def test_question_is_sent_at_once(sessions: SessionRegistry, call: CheckCall) -> None:
    (session,) = connect(sessions, "pod-1")
    channel = acquire(sessions)
    assert channel.endpoint == "session pod-1"
    asking = channel.ask(call, 5.0)
    (check,) = session.sent
    assert (check.id, check.group, check.attempt, check.attempts_max) == (call.id, "orders", 3, 15)
    assert (check.reason, check.prepared_at_ms) == (call.reason, call.prepared_at_ms)
    assert check.messages == call.messages
    asking.cancel()
    channel.release()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (CheckAnswer(0, Decision.ROLLBACK), Answered(Decision.ROLLBACK, detail="rollback")),
        (
            CheckAnswer(0, Decision.COMMIT, 5.0, (Message("t"),), "row 7"),
            Answered(Decision.COMMIT, None, (Message("t"),), "row 7"),
        ),
        (
            CheckAnswer(0, Decision.UNKNOWN, 10.0),
            Answered(Decision.UNKNOWN, 10.0, detail="not yet, again in 10 s"),
        ),
        (
            CheckAnswer(0, Decision.UNKNOWN, 1e12, None, "still running"),
            Answered(Decision.UNKNOWN, 3600.0, detail="still running"),
        ),
        (
            CheckAnswer(0, Decision.UNKNOWN, float("nan"), (Message("t"),)),
            Answered(Decision.UNKNOWN, 1.0, detail="not yet, again in 1 s"),
        ),
        (CheckAnswer(0, None), Unreached("the instance takes no questions now")),
        (CheckAnswer(0, None, detail="draining"), Unreached("draining")),
        (CheckAnswer(0, Decision.UNKNOWN, detail="a\nb\x1b[31m" + "x" * 500), None),
    ],
)
async def test_answers(
    sessions: SessionRegistry, call: CheckCall, answer: CheckAnswer, expected: CheckResult | None
) -> None:
    (session,) = connect(sessions, "pod-1")
    result = await asked(sessions, session, call, answer)
    if expected is None:
        assert len(result.detail) == 200
        assert result.detail.isprintable()
    else:
        assert result == expected


async def test_session_lost_after_question_is_unclear(
    sessions: SessionRegistry, call: CheckCall
) -> None:
    (session,) = connect(sessions, "pod-1")
    result = await asked(sessions, session, call, None)
    assert result == Unclear("the session ended before an answer")


async def test_session_lost_before_question_is_unreached(
    sessions: SessionRegistry, call: CheckCall
) -> None:
    closed, removed, broken = connect(sessions, "closed", "removed", "broken")
    channels = {name: acquire(sessions, name) for name in ("closed", "removed", "broken")}
    closed.open = False
    sessions.remove("orders", removed)
    broken.send_check = None  # type: ignore[assignment,method-assign]
    for channel in channels.values():
        result = await channel.ask(call, 5.0)
        assert result == Unreached("the session closed before the question was sent")
        channel.release()
    assert removed.sent == []


async def test_late_answer_is_unclear_and_ignored(
    sessions: SessionRegistry, call: CheckCall
) -> None:
    (session,) = connect(sessions, "pod-1")
    channel = acquire(sessions)
    assert await channel.ask(call, 0.01) == Unclear("no answer within 0.01 s")
    channel.release()
    late = CheckAnswer(session.sent[0].call, Decision.COMMIT)
    assert not sessions.answer("orders", session, late)


async def test_answers_are_matched_by_call_number_and_session(
    sessions: SessionRegistry, call: CheckCall
) -> None:
    one, two = connect(sessions, "pod-1", "pod-2")
    channels = [acquire(sessions, "pod-1"), acquire(sessions, "pod-2")]
    tasks = [channel.ask(call, 5.0) for channel in channels]
    await asyncio.sleep(0)
    numbers = one.sent[0].call, two.sent[0].call
    assert numbers[0] != numbers[1]
    # A session cannot answer for another, nor a stranger, nor twice.
    assert not sessions.answer("orders", one, CheckAnswer(numbers[1], Decision.COMMIT))
    assert not sessions.answer("orders", Session("x"), CheckAnswer(numbers[0], Decision.COMMIT))
    assert not sessions.answer("billing", one, CheckAnswer(numbers[0], Decision.COMMIT))
    assert sessions.answer("orders", two, CheckAnswer(numbers[1], Decision.ROLLBACK))
    assert not sessions.answer("orders", two, CheckAnswer(numbers[1], Decision.COMMIT))
    assert sessions.answer("orders", one, CheckAnswer(numbers[0], Decision.COMMIT))
    results = await asyncio.gather(*tasks)
    assert [result.decision for result in results if isinstance(result, Answered)] == [
        Decision.COMMIT,
        Decision.ROLLBACK,
    ]
    for channel in channels:
        channel.release()


def test_preferred_instance_comes_first_then_round_robin(sessions: SessionRegistry) -> None:
    connect(sessions, "pod-1", "pod-2", "pod-3")
    assert acquire(sessions, "pod-2").endpoint == "session pod-2"
    in_turn = [acquire(sessions, "gone").endpoint for _ in range(3)]
    assert sorted(in_turn) == ["session pod-1", "session pod-2", "session pod-3"]


def test_open_checks_per_session_are_limited(sessions: SessionRegistry) -> None:
    connect(sessions, "pod-1", "pod-2")
    held = [acquire(sessions, "pod-1"), acquire(sessions, "pod-1")]
    assert acquire(sessions, "pod-1").endpoint == "session pod-2"
    assert acquire(sessions, "pod-1").endpoint == "session pod-2"
    assert sessions.acquire("orders", "pod-1") is None
    held[0].release()
    held[0].release()
    assert acquire(sessions, "pod-1").endpoint == "session pod-1"
    assert sessions.acquire("orders", "pod-1") is None


def test_draining_session_is_not_asked(sessions: SessionRegistry) -> None:
    one, two = connect(sessions, "pod-1", "pod-2")
    one.draining = True
    assert acquire(sessions, "pod-1").endpoint == "session pod-2"
    two.draining = True
    assert sessions.acquire("orders", "") is None


@pytest.mark.rule(24)
def test_instance_without_function_is_asked_only_as_preparer(
    sessions: SessionRegistry,
) -> None:
    """It knows its own running blocks, but not others' transactions."""
    appeared: list[str] = []
    sessions.on_appeared(appeared.append)
    sessions.add("orders", Session("web", checks=False))
    assert appeared == []
    assert acquire(sessions, "web").endpoint == "session web"
    assert sessions.acquire("orders", "gone") is None
    assert sessions.acquire("orders", "web", avoid={"web"}) is None
    assert (sessions.instances(), sessions.askable("orders")) == ({}, 0)
    assert sessions.instances_without_function() == {"orders": ("web",)}
    connect(sessions, "worker")
    assert appeared == ["orders"]
    assert {acquire(sessions, prefer).endpoint for prefer in ("gone", "")} == {"session worker"}
    assert (sessions.instances(), sessions.askable("orders")) == ({"orders": ("worker",)}, 1)
    assert sessions.counts() == {"orders": 2}


def test_avoided_instances_are_skipped(sessions: SessionRegistry) -> None:
    connect(sessions, "pod-1", "pod-2")
    for _ in range(2):
        channel = sessions.acquire("orders", "pod-1", avoid={"pod-1"})
        assert channel is not None
        assert channel.instance == "pod-2"
    assert sessions.acquire("orders", "", avoid={"pod-1", "pod-2"}) is None


def test_returning_group_calls_its_listeners(sessions: SessionRegistry) -> None:
    appeared: list[str] = []
    sessions.on_appeared(appeared.append)
    one, two = connect(sessions, "pod-1", "pod-2")
    assert appeared == ["orders"]
    assert sessions.counts() == {"orders": 2}
    sessions.remove("orders", one)
    two.draining = True
    connect(sessions, "pod-3")
    assert appeared == ["orders", "orders"]
    sessions.remove("orders", two)
    sessions.remove("orders", two)
    assert sessions.counts() == {"orders": 1}


# --- the finder --------------------------------------------------------------------------------


@pytest.fixture
async def groups() -> Groups:
    groups = Groups(FakeStore())
    await groups.load()
    return groups


@pytest.fixture
def finder(sessions: SessionRegistry, groups: Groups, checks: HttpChecks) -> GroupFinder:
    return GroupFinder(sessions, groups, checks)


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def test_group_without_instance_and_url_is_unreached(finder: GroupFinder) -> None:
    assert await finder.acquire("orders", "") == Unreached(
        "no instance of group orders is connected and no check URL is registered", lasting=True
    )


async def test_group_with_only_draining_instances_is_unreached(
    finder: GroupFinder, sessions: SessionRegistry
) -> None:
    (session,) = connect(sessions, "pod-1")
    session.draining = True
    assert await finder.acquire("orders", "") == Unreached(
        "every connected instance of group orders is draining, has the maximum of open "
        "checks or no check function and no check URL is registered",
        lasting=True,
    )


async def test_malformed_policy_is_reported(finder: GroupFinder, groups: Groups) -> None:
    await groups._store.put("orders", b'{"v": 7}')
    assert await finder.acquire("orders", "") == Unreached(
        "no instance of group orders is connected and the stored policy is of version 7; "
        "this build knows 1",
        lasting=True,
    )


async def test_sessions_come_before_the_url(
    finder: GroupFinder, sessions: SessionRegistry, groups: Groups, serve: Serve
) -> None:
    server = await serve(silent)
    await groups.put("orders", GroupPolicy(check_url=server.url))
    channel = await finder.acquire("orders", "")
    assert isinstance(channel, HttpChannel)
    assert channel.endpoint == server.url
    channel.release()
    (session,) = connect(sessions, "pod-1")
    channel = await finder.acquire("orders", "")
    assert isinstance(channel, SessionChannel)
    channel.release()
    session.draining = True
    channel = await finder.acquire("orders", "")
    assert isinstance(channel, HttpChannel)
    channel.release()


async def test_session_without_function_does_not_hide_url(
    finder: GroupFinder, sessions: SessionRegistry, groups: Groups, serve: Serve
) -> None:
    server = await serve(silent)
    await groups.put("orders", GroupPolicy(check_url=server.url))
    sessions.add("orders", Session("web", checks=False))
    for prefer, avoid, endpoint in (
        ("", (), server.url),
        ("gone", (), server.url),
        ("web", (), "session web"),
        ("web", ("web",), server.url),
    ):
        channel = await finder.acquire("orders", prefer, avoid)
        assert not isinstance(channel, Unreached)
        assert channel.endpoint == endpoint
        channel.release()


async def test_missing_secret_is_unreached(
    finder: GroupFinder, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SECRET", raising=False)
    policy = GroupPolicy(check_url="http://127.0.0.1:1/", secret_ref="env:NO_SECRET")
    await groups.put("orders", policy)
    result = await finder.acquire("orders", "")
    assert isinstance(result, Unreached)
    assert "NO_SECRET is not set" in result.detail


async def test_secret_is_never_shown(
    finder: GroupFinder, groups: Groups, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await serve(silent)
    monkeypatch.setenv("ORDERS_SECRET", "hunter2")
    await groups.put("orders", GroupPolicy(server.url, "env:ORDERS_SECRET"))
    channel = await finder.acquire("orders", "")
    assert isinstance(channel, HttpChannel)
    shown = f"{channel!r} {channel.endpoint} {groups.list()!r} {finder!r}"
    assert "hunter2" not in shown
    channel.release()


def beside(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "check URL beside" in each.getMessage()]


@pytest.mark.usefixtures("finder")
async def test_check_url_beside_instances_is_logged(
    sessions: SessionRegistry,
    groups: Groups,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = "http://127.0.0.1:9/check?token=s3cret"
    await groups.put("orders", GroupPolicy(check_url=url))
    sessions.add("orders", Session("web", checks=False))
    assert beside(caplog) == []
    connect(sessions, "pod-1")
    (line,) = beside(caplog)
    assert "orders" in line
    assert "s3cret" not in line
    await groups.put("orders", GroupPolicy(check_url=url, secret_ref="env:X", signed_answers=True))
    assert len(beside(caplog)) == 1
    await groups.put("orders", GroupPolicy(check_url=url))
    assert len(beside(caplog)) == 2
