"""Check-backs down the sessions of SDK instances, which need no endpoint of their own."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection
from typing import Protocol, TypeAlias

from txbroker.checkers.base import (
    Answered,
    CheckCall,
    CheckResult,
    Unclear,
    Unreached,
    already,
    shortened,
)
from txbroker.contract import frames as wire
from txbroker.core.records import Decision, bounded_later_s
from txbroker.net.deadlines import Deadlines

OPEN_CHECKS_MAX = 64
"""Checks that one instance has not answered yet; more would only wait in its queue."""
TIMEOUTS_MAX = 64
"""Lengths of time to answer whose timers are kept while nobody is asked."""

_Answer: TypeAlias = asyncio.Future[CheckResult]


class CheckableSession(Protocol):
    """A live session that can be asked. Compared by identity."""

    @property
    def instance(self) -> str:
        """The name of the SDK process among its group's."""
        ...

    @property
    def principal_name(self) -> str:
        """Whose credential it came with, "" where none was asked for."""
        ...

    @property
    def checks(self) -> bool:
        """False where the process has no check function: it only knows of its own blocks."""
        ...

    @property
    def draining(self) -> bool:
        """True where the process goes away soon and wants no more checks."""
        ...

    def send_check(self, check: wire.CheckQuestion) -> bool:
        """Hand the check to the socket now, without suspension; False where it is closed.

        Where it returns False or raises, certainly nothing was sent.
        """
        ...


class _Entry:
    """A session and the checks that it has not answered yet, by call number."""

    def __init__(self, session: CheckableSession) -> None:
        self.session = session
        self.open: dict[int, _Question] = {}
        self.taken = 0
        self.lost = False

    @property
    def askable(self) -> bool:
        """It takes questions, be it only about what it prepared itself."""
        return not self.lost and not self.session.draining

    @property
    def checks(self) -> bool:
        """It takes questions about any transaction of its group."""
        return self.askable and self.session.checks


class _Question:
    """A check that a session was sent and has not answered yet."""

    __slots__ = ("answer", "deadlines", "entry", "number")

    def __init__(
        self, entry: _Entry, number: int, answer: _Answer, deadlines: "Deadlines[_Question]"
    ) -> None:
        self.entry = entry
        self.number = number
        self.answer = answer
        self.deadlines = deadlines

    def over(self, result: CheckResult) -> None:
        """It is known what came of it, or that nothing will."""
        del self.entry.open[self.number]
        self.deadlines.end(self)
        if not self.answer.done():
            self.answer.set_result(result)


class _Questions:
    """Numbers the questions to all sessions, and ends those that are not answered in time: by one
    timer for all that have equally long."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._deadlines: dict[float, Deadlines[_Question]] = {}

    def send(self, entry: _Entry, call: CheckCall, timeout_s: float) -> _Answer | None:
        """Send a question; None where it was certainly not sent."""
        number = next(self._numbers)
        check = wire.CheckQuestion(
            number,
            call.id,
            call.group,
            call.attempt,
            call.attempts_max,
            call.reason,
            call.prepared_at_ms,
            call.messages,
        )
        try:
            if not entry.session.send_check(check):
                return None
        except Exception:
            # By its contract nothing was sent, whatever the socket's library raises.
            return None
        deadlines = self._deadlines.get(timeout_s)
        if deadlines is None:
            deadlines = self._within(timeout_s)
        answer: _Answer = asyncio.get_running_loop().create_future()
        question = entry.open[number] = _Question(entry, number, answer, deadlines)
        deadlines.begin(question)
        return answer

    def _within(self, timeout_s: float) -> Deadlines[_Question]:
        if len(self._deadlines) >= TIMEOUTS_MAX:
            # What remains of the time of a question that went to others first is no length again.
            self._deadlines = {s: waits for s, waits in self._deadlines.items() if len(waits)}
        late = Unclear(f"no answer within {timeout_s:g} s")
        waits = Deadlines[_Question](timeout_s, lambda question: question.over(late))
        self._deadlines[timeout_s] = waits
        return waits


class SessionRegistry:
    """The live sessions of all groups that are connected to this proxy."""

    def __init__(self, *, open_checks_max: int = OPEN_CHECKS_MAX) -> None:
        self._open_checks_max = open_checks_max
        self._groups: dict[str, list[_Entry]] = {}
        self._by_session: dict[tuple[str, CheckableSession], _Entry] = {}
        self._questions = _Questions()
        self._turns: Counter[str] = Counter()
        self._listeners: list[Callable[[str], None]] = []

    def on_appeared(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with a group's name when it can be asked again: its first session
        that has a check function and is not draining has come."""
        self._listeners.append(listener)

    def add(self, group: str, session: CheckableSession) -> None:
        """Register a session, once its `Hello` was welcomed."""
        entries = self._groups.setdefault(group, [])
        first = not any(entry.checks for entry in entries)
        entries.append(_Entry(session))
        self._by_session[group, session] = entries[-1]
        if first and entries[-1].checks:
            for listener in self._listeners:
                listener(group)

    def remove(self, group: str, session: CheckableSession) -> None:
        """Forget a session that ended: what it has not answered becomes unclear."""
        entry = self._by_session.pop((group, session), None)
        if entry is None:
            return
        entry.lost = True
        for question in tuple(entry.open.values()):
            question.over(Unclear("the session ended before an answer"))
        entries = self._groups[group]
        entries.remove(entry)
        if not entries:
            del self._groups[group]
            self._turns.pop(group, None)

    def answer(self, group: str, session: CheckableSession, answer: wire.CheckAnswer) -> bool:
        """Take an instance's answer; False where nothing (or nothing any more) waits for it."""
        entry = self._by_session.get((group, session))
        question = None if entry is None else entry.open.get(answer.call)
        if question is None:
            return False
        question.over(_result(answer))
        return True

    def counts(self) -> dict[str, int]:
        """Return how many sessions each connected group has."""
        return {group: len(entries) for group, entries in self._groups.items()}

    def askable(self, group: str) -> int:
        """Return how many sessions of a group can be asked about any of its transactions."""
        return sum(entry.checks for entry in self._groups.get(group, ()))

    def instances(self) -> dict[str, tuple[str, ...]]:
        """Return the instances of each group that can be asked about any of its transactions."""
        return self._named(lambda entry: entry.checks)

    def instances_without_function(self) -> dict[str, tuple[str, ...]]:
        """Return those that can be asked only about what they prepared themselves."""
        return self._named(lambda entry: entry.askable and not entry.checks)

    def _named(self, which: Callable[[_Entry], bool]) -> dict[str, tuple[str, ...]]:
        found = {
            group: tuple(dict.fromkeys(e.session.instance for e in entries if which(e)))
            for group, entries in self._groups.items()
        }
        return {group: names for group, names in found.items() if names}

    def acquire_instance(self, group: str, instance: str) -> "SessionChannel | None":
        """Return a channel to this very instance, None where it cannot be asked here."""
        for entry in reversed(self._groups.get(group, [])):
            if entry.session.instance == instance and entry.askable and self._has_room(entry):
                return SessionChannel(entry, self._questions)
        return None

    def _has_room(self, entry: _Entry) -> bool:
        return entry.taken < self._open_checks_max

    def acquire(
        self, group: str, prefer: str, avoid: Collection[str] = ()
    ) -> "SessionChannel | None":
        """Return a channel to instance `prefer` if it can be asked, else to the next one in turn.

        An instance without a check function has no turn: it is asked where it is the preferred
        one, as it knows whether its own block still runs.

        Args:
            avoid: instances that are not to be asked, preferred or not.

        None where nobody else of the group is connected or every instance is draining, has its
        fill of open checks or no check function.
        """
        if prefer and prefer not in avoid:
            preferred = self.acquire_instance(group, prefer)
            if preferred is not None:
                return preferred
        entries = self._groups.get(group, [])
        for _ in entries:
            self._turns[group] = turn = (self._turns[group] + 1) % len(entries)
            entry = entries[turn]
            if entry.checks and entry.session.instance not in avoid and self._has_room(entry):
                return SessionChannel(entry, self._questions)
        return None


class SessionChannel:
    """One session in hand."""

    def __init__(self, entry: _Entry, questions: _Questions) -> None:
        self._entry = entry
        self._questions = questions
        self._released = False
        entry.taken += 1
        self.instance = entry.session.instance
        of = entry.session.principal_name
        self.endpoint = f"session {self.instance}{f' of {of}' if of else ''}"

    def ask(self, call: CheckCall, timeout_s: float) -> _Answer:
        """Ask the instance, once."""
        entry = self._entry
        answer = None if entry.lost else self._questions.send(entry, call, timeout_s)
        return answer or already(Unreached("the session closed before the question was sent"))

    def release(self) -> None:
        """Give the session back."""
        if not self._released:
            self._released = True
            self._entry.taken -= 1


def _result(answer: wire.CheckAnswer) -> CheckResult:
    decision = answer.decision
    if decision is None:
        return Unreached(shortened(answer.detail or "the instance takes no questions now"))
    again: float | None = None
    if decision is Decision.UNKNOWN and answer.ask_again_s is not None:
        again = bounded_later_s(answer.ask_again_s)
    detail = answer.detail or (str(decision) if again is None else f"not yet, again in {again:g} s")
    messages = answer.messages if decision is Decision.COMMIT else None
    return Answered(decision, again, messages, shortened(detail))
