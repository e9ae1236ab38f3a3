"""Check-backs over the sessions of SDK instances, which then need no HTTP endpoint."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from txbroker.checkers import base
from txbroker.checkers.base import Answered, CheckCall, CheckResult, Unclear, Unreached
from txbroker.contract import frames as wire
from txbroker.contract.service import INSTANCES_SHOWN_MAX, InstanceOverview
from txbroker.core.records import Decision, bounded_later_s
from txbroker.net.timers import Deadlines

OPEN_CHECKS_MAX = 64
"""Open checks of one instance; more would only wait in its queue."""
TIMEOUTS_MAX = 64
"""Distinct timeouts whose timers are kept while no check is open."""

_Answer: TypeAlias = asyncio.Future[CheckResult]


class CheckableSession(Protocol):
    """A live session. Compared by identity."""

    @property
    def instance(self) -> str:
        """The name of the SDK process within its group."""

    @property
    def principal_name(self) -> str:
        """The principal of its credential, "" if none is required."""

    @property
    def address(self) -> str:
        """From where it is connected."""

    @property
    def client(self) -> str:
        """The library that the process names, "" if it names none."""

    @property
    def checks(self) -> bool:
        """False if the process has no check function: it knows only its own blocks."""

    @property
    def draining(self) -> bool:
        """True if the process is about to end and takes no more checks."""

    def send_check(self, check: wire.CheckQuestion) -> bool:
        """Hand the check to the socket now, without suspension; False if it is closed.

        If it returns False or raises, certainly nothing was sent.
        """


class _Entry:
    """A session and its open checks, by call number."""

    def __init__(self, session: CheckableSession) -> None:
        self.session = session
        self.open: dict[int, _Question] = {}
        self.taken = 0
        self.lost = False

    @property
    def askable(self) -> bool:
        """True if it takes questions, at least about transactions that it prepared."""
        return not self.lost and not self.session.draining

    @property
    def checks(self) -> bool:
        """True if it takes questions about any transaction of its group."""
        return self.askable and self.session.checks


@dataclass(slots=True, eq=False)
class _Question:
    """An open check of a session."""

    entry: _Entry
    number: int
    answer: _Answer
    deadlines: "Deadlines[_Question]"

    def end(self, result: CheckResult) -> None:
        """Set the result."""
        del self.entry.open[self.number]
        self.deadlines.end(self)
        if not self.answer.done():
            self.answer.set_result(result)


class _Questions:
    """Numbers the questions to all sessions and ends those without an answer in time, with one
    timer per timeout."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._deadlines: dict[float, Deadlines[_Question]] = {}

    def send(self, entry: _Entry, call: CheckCall, timeout_s: float) -> _Answer | None:
        """Send a question; None if it was certainly not sent."""
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
            # By the contract of `send_check` nothing was sent.
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
            # The rest of a timeout, after another instance was asked first, hardly ever recurs.
            self._deadlines = {s: waits for s, waits in self._deadlines.items() if len(waits)}
        late = Unclear(f"no answer within {timeout_s:g} s")
        waits = Deadlines[_Question](timeout_s, lambda question: question.end(late))
        self._deadlines[timeout_s] = waits
        return waits


class SessionRegistry:
    """The live sessions of all groups that are connected to this proxy."""

    def __init__(self, *, open_checks_max: int = OPEN_CHECKS_MAX) -> None:
        self._open_checks_max = open_checks_max
        self._groups: dict[str, list[_Entry]] = {}
        self._by_session: dict[tuple[str, CheckableSession], _Entry] = {}
        self._questions = _Questions()
        self._next: Counter[str] = Counter()
        self._listeners: list[Callable[[str], None]] = []

    def on_appeared(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with a group's name when its first askable session has appeared."""
        self._listeners.append(listener)

    def add(self, group: str, session: CheckableSession) -> None:
        """Register a session, after its `Hello` was welcomed."""
        entries = self._groups.setdefault(group, [])
        first = not any(entry.checks for entry in entries)
        entries.append(_Entry(session))
        self._by_session[group, session] = entries[-1]
        if first and entries[-1].checks:
            for listener in self._listeners:
                listener(group)

    def remove(self, group: str, session: CheckableSession) -> None:
        """Remove a session that ended: its open checks become unclear."""
        entry = self._by_session.pop((group, session), None)
        if entry is None:
            return
        entry.lost = True
        for question in tuple(entry.open.values()):
            question.end(Unclear("the session ended before an answer"))
        entries = self._groups[group]
        entries.remove(entry)
        if not entries:
            del self._groups[group]
            self._next.pop(group, None)

    def answer(self, group: str, session: CheckableSession, answer: wire.CheckAnswer) -> bool:
        """Take an instance's answer; False if nothing waits for it (any more)."""
        entry = self._by_session.get((group, session))
        question = None if entry is None else entry.open.get(answer.call)
        if question is None:
            return False
        question.end(_result(answer, lasting=not session.checks))
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

    def described(self, group: str) -> list[InstanceOverview]:
        """Return the sessions of a group, some of them if there are very many."""
        sessions = [entry.session for entry in self._groups.get(group, ())]
        return [
            InstanceOverview(one.instance, one.address, one.client, one.checks)
            for one in sessions[:INSTANCES_SHOWN_MAX]
        ]

    def instances_without_function(self) -> dict[str, tuple[str, ...]]:
        """Return the instances that can be asked only about transactions that they prepared."""
        return self._named(lambda entry: entry.askable and not entry.checks)

    def _named(self, which: Callable[[_Entry], bool]) -> dict[str, tuple[str, ...]]:
        named = {
            group: tuple(dict.fromkeys(e.session.instance for e in entries if which(e)))
            for group, entries in self._groups.items()
        }
        return {group: names for group, names in named.items() if names}

    def acquire_instance(self, group: str, instance: str) -> "SessionChannel | None":
        """Return a channel to this instance; None if it cannot be asked here."""
        for entry in reversed(self._groups.get(group, [])):
            if entry.session.instance == instance and entry.askable and self._has_room(entry):
                return SessionChannel(entry, self._questions)
        return None

    def has(self, group: str, avoid: Collection[str]) -> bool:
        """Return True if another instance than these takes questions, now or with fewer open."""
        return any(
            entry.checks and entry.session.instance not in avoid
            for entry in self._groups.get(group, ())
        )

    def _has_room(self, entry: _Entry) -> bool:
        return entry.taken < self._open_checks_max

    def acquire(
        self, group: str, prefer: str, avoid: Collection[str] = ()
    ) -> "SessionChannel | None":
        """Return a channel to instance `prefer` if it can be asked, else to the next instance by
        round robin; None if there is none.

        An instance without a check function is returned only as the preferred one: it knows
        whether its own block still runs. Draining instances and those with the maximum of open
        checks are skipped.

        Args:
            avoid: instances that are not to be asked, preferred or not.
        """
        if prefer and prefer not in avoid:
            preferred = self.acquire_instance(group, prefer)
            if preferred is not None:
                return preferred
        entries = self._groups.get(group, [])
        for _ in entries:
            self._next[group] = index = (self._next[group] + 1) % len(entries)
            entry = entries[index]
            if entry.checks and entry.session.instance not in avoid and self._has_room(entry):
                return SessionChannel(entry, self._questions)
        return None


class SessionChannel:
    """An acquired session."""

    def __init__(self, entry: _Entry, questions: _Questions) -> None:
        self._entry = entry
        self._questions = questions
        self._released = False
        entry.taken += 1
        self.instance = entry.session.instance
        principal = entry.session.principal_name
        self.endpoint = f"session {self.instance}{f' of {principal}' if principal else ''}"

    def ask(self, call: CheckCall, timeout_s: float) -> _Answer:
        entry = self._entry
        answer = None if entry.lost else self._questions.send(entry, call, timeout_s)
        return answer or base.already(Unreached("the session closed before the question was sent"))

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._entry.taken -= 1


def _result(answer: wire.CheckAnswer, *, lasting: bool) -> CheckResult:
    decision = answer.decision
    again: float | None = None
    if decision is None:
        detail = base.shortened(answer.detail or "the instance takes no questions now")
        if answer.ask_again_s is not None:
            again = bounded_later_s(answer.ask_again_s)
        return Unreached(detail, again, lasting)
    if decision is Decision.UNKNOWN and answer.ask_again_s is not None:
        again = bounded_later_s(answer.ask_again_s)
    detail = answer.detail or (str(decision) if again is None else f"not yet, again in {again:g} s")
    messages = answer.messages if decision is Decision.COMMIT else None
    return Answered(decision, again, messages, base.shortened(detail))
