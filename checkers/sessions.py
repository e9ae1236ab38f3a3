"""Check-backs down the sessions of SDK instances, which need no endpoint of their own."""

import asyncio
import itertools
from collections.abc import Callable, Collection
from typing import Protocol

from txbroker import wire
from txbroker.checkers.base import (
    Answered,
    CheckCall,
    CheckResult,
    Unclear,
    Unreached,
    ask_again_within_bounds,
    shortened,
)
from txbroker.core.records import Decision

OPEN_CHECKS_MAX = 64
"""Checks that one instance has not answered yet; more would only wait in its queue."""


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

    def send_check(self, check: wire.Check) -> bool:
        """Hand the check to the socket now, without suspension; False where it is closed.

        Where it returns False or raises, certainly nothing was sent.
        """
        ...


class _Entry:
    """A session and the checks that it has not answered yet, by call number."""

    def __init__(self, session: CheckableSession) -> None:
        self.session = session
        self.open: dict[int, asyncio.Future[CheckResult]] = {}
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


class SessionRegistry:
    """The live sessions of all groups that are connected to this proxy."""

    def __init__(self, *, open_checks_max: int = OPEN_CHECKS_MAX) -> None:
        self._open_checks_max = open_checks_max
        self._groups: dict[str, list[_Entry]] = {}
        self._calls = itertools.count(1)
        self._turn = 0
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
        if first and entries[-1].checks:
            for listener in self._listeners:
                listener(group)

    def remove(self, group: str, session: CheckableSession) -> None:
        """Forget a session that ended: what it has not answered becomes unclear."""
        entries = self._groups.get(group, [])
        for entry in [entry for entry in entries if entry.session is session]:
            entry.lost = True
            entries.remove(entry)
            for answer in entry.open.values():
                if not answer.done():
                    answer.set_result(Unclear("the session ended before an answer"))
        if not entries:
            self._groups.pop(group, None)

    def answer(self, group: str, session: CheckableSession, answer: wire.CheckAnswer) -> bool:
        """Take an instance's answer; False where nothing (or nothing any more) waits for it."""
        for entry in self._groups.get(group, []):
            if entry.session is session:
                waiting = entry.open.get(answer.call)
                if waiting is None or waiting.done():
                    return False
                waiting.set_result(_result(answer))
                return True
        return False

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
        for entry in reversed(self._free(group)):
            if entry.session.instance == instance:
                return SessionChannel(entry, self._calls)
        return None

    def _free(self, group: str) -> list[_Entry]:
        return [
            entry
            for entry in self._groups.get(group, [])
            if entry.askable and entry.taken < self._open_checks_max
        ]

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
        free = [e for e in self._free(group) if e.checks and e.session.instance not in avoid]
        if not free:
            return None
        self._turn += 1
        return SessionChannel(free[self._turn % len(free)], self._calls)


class SessionChannel:
    """One session in hand."""

    def __init__(self, entry: _Entry, calls: "itertools.count[int]") -> None:
        self._entry = entry
        self._calls = calls
        self._released = False
        entry.taken += 1
        self.instance = entry.session.instance
        of = entry.session.principal_name
        self.endpoint = f"session {self.instance}{f' of {of}' if of else ''}"

    async def ask(self, call: CheckCall, timeout_s: float) -> CheckResult:
        """Ask the instance, once."""
        entry = self._entry
        number = next(self._calls)
        answer: asyncio.Future[CheckResult] = asyncio.get_running_loop().create_future()
        entry.open[number] = answer
        try:
            if entry.lost or not self._send(number, call):
                return Unreached("the session closed before the question was sent")
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return Unclear(f"no answer within {timeout_s:g} s")
        finally:
            entry.open.pop(number, None)

    def release(self) -> None:
        """Give the session back."""
        if not self._released:
            self._released = True
            self._entry.taken -= 1

    def _send(self, number: int, call: CheckCall) -> bool:
        check = wire.Check(
            call=number,
            id=call.id,
            group=call.group,
            attempt=call.attempt,
            attempts_max=call.attempts_max,
            reason=call.reason,
            prepared_at_ms=call.prepared_at_ms,
            messages=call.messages,
        )
        try:
            return self._entry.session.send_check(check)
        except Exception:
            # By its contract nothing was sent, whatever the socket's library raises.
            return False


def _result(answer: wire.CheckAnswer) -> CheckResult:
    decision = answer.decision
    if decision is None:
        return Unreached(shortened(answer.detail or "the instance takes no questions now"))
    again: float | None = None
    if decision is Decision.UNKNOWN and answer.ask_again_s is not None:
        again = ask_again_within_bounds(answer.ask_again_s)
    detail = answer.detail or (str(decision) if again is None else f"not yet, again in {again:g} s")
    messages = answer.messages if decision is Decision.COMMIT else None
    return Answered(decision, again, messages, shortened(detail))
