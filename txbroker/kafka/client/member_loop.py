"""A loop that keeps a member in its group: it joins, sends heartbeats, and rejoins.

It only reports changes. What the caller does about them takes seconds and must not delay
heartbeats: members that recovered within the assignment lost it repeatedly.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

import structlog

from txbroker.door.protocols import TAKEN
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.client import KafkaRefused
from txbroker.kafka.client.member import InstanceHolder, Joined, Member
from txbroker.kafka.protocol.codes import Code, describe
from txbroker.net.timers import grown_pause_s

log = structlog.wrap_logger(logging.getLogger(__name__))

_PAUSE_S, _PAUSE_MAX_S = 0.2, 1.0
_ANSWER_MIN_S = 1.0  # of a heartbeat after this process paused for longer than the session
_HEARTBEAT_CHANNEL = "group/heartbeat"
_FRESH_CHANNEL = "group/fresh"

UNKNOWN_TO_COORDINATOR = "the group coordinator does not know this member any more"
COORDINATOR_UNRESPONSIVE = "the group coordinator has not answered for a whole session"
_LOST = {Code.FENCED_INSTANCE_ID: TAKEN, Code.UNKNOWN_MEMBER: UNKNOWN_TO_COORDINATOR}
"""Errors that end the assignment. An old generation does not: the member keeps its place, and joins
the new one."""

_OLD_GENERATION = frozenset({Code.ILLEGAL_GENERATION, Code.REBALANCE_IN_PROGRESS})
_CONFIRMED = frozenset({Code.NONE, Code.REBALANCE_IN_PROGRESS})
"""Answers of a heartbeat by which no newer generation exists."""

A = TypeVar("A")
_A_contra = TypeVar("_A_contra", contravariant=True)
_FOLLOWING_S, _FOLLOWING_BEAT_S = 12.0, 0.3
"""After a generation began, another one often follows, in which partitions that were released are
assigned. Members learn of it by heartbeats: no member handles these partitions until then."""


class Hearer(Protocol[_A_contra]):
    """Receives what happens to a member."""

    def assigned(self, assignment: _A_contra) -> None:
        """A generation began."""

    def lost(self, why: str) -> None:
        """The member is out of the group, and tries to join again."""

    def replaced_by(self, holder: InstanceHolder) -> str:
        """Return the reason of a loss, for an instance id that another process uses."""


class MemberLoop(Generic[A]):
    """Keeps one member in its group.

    Args:
        heartbeat_s: seconds between heartbeats.
        permanent: by error code: why a group cannot be used, and the next step. `start` fails.
    """

    def __init__(
        self,
        member: Member[A],
        heartbeat_s: float,
        permanent: Mapping[Code, str],
        hearer: Hearer[A],
    ) -> None:
        self.joined: Joined[A] | None = None
        """The newest generation; None before the first one, and while the member is lost."""
        self.answered_at = 0.0
        """Event loop time when the newest heartbeat or join that the coordinator confirmed was
        sent."""
        self._joined_at = 0.0
        self._member = member
        self._session_s = member.session_s
        self._heartbeat_s = heartbeat_s
        self._permanent = permanent
        self._hearer = hearer
        self._why = ""
        self._replaced_by: InstanceHolder | None = None
        self._requested = False
        self._rejoin = False
        self._wake = asyncio.Event()
        self._news = asyncio.Event()
        self._failures = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Join; return after the first assignment.

        While another process uses the instance id it retries, and joins once that has gone.

        Raises:
            ConfigurationError: the group cannot be used.
        """
        loop = asyncio.get_running_loop()
        self.answered_at = loop.time()
        first = loop.create_future()
        self._task = asyncio.create_task(self._run(first), name="txbroker membership")
        await first

    async def close(self) -> None:
        """Stop without leaving."""
        task, self._task = self._task, None
        self.joined = None
        self._notify()
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._member.cancel_join()

    def rejoin(self) -> None:
        """Begin a new generation, after the join in progress if there is one."""
        self._member.request_rebalance()
        self._rejoin = True
        self._wake.set()

    def in_touch(self) -> bool:
        """Return whether the coordinator has answered within the session timeout."""
        return self.joined is not None and self._unanswered_s <= self._session_s

    async def confirm(self) -> Joined[A] | None:
        """Send a heartbeat in the current generation; return the generation if it is the newest.

        Waits for the assignment of one that has begun. After None, the assignment is lost.

        Raises:
            KafkaUnavailable
        """
        while True:
            joined, news = self.joined, self._news
            if joined is None:
                return None
            code = await self._member.heartbeat(joined.generation, _FRESH_CHANNEL)
            if self.joined is not joined:
                continue  # a new generation began meanwhile: verify in that one
            if code in _CONFIRMED:
                return joined
            if code in _LOST:
                self._lose(_LOST[Code(code)])
                self._wake.set()
                return None
            if code != Code.ILLEGAL_GENERATION:
                raise KafkaRefused(code)
            # A new generation has begun: wait for its assignment.
            self._wake.set()
            await news.wait()

    # --- the loop ----------------------------------------------------------------------------

    async def _run(self, first: asyncio.Future[None]) -> None:
        while True:
            try:
                await self._join()
                if not first.done():
                    first.set_result(None)
                await self._heartbeats()
            except KafkaRefused as error:
                if not self._survives(error, first):
                    return
                if error.code == Code.FENCED_INSTANCE_ID:
                    await self._name_replacer()
                await self._pause()
            except KafkaUnavailable as error:
                self._lose_if_unanswered(str(error))
                await self._pause()
            except Exception as error:
                self._lose(safe_repr(error))
                if not first.done():
                    # Otherwise `start` would wait without end.
                    first.set_exception(error)
                    return
                # A process that stopped here would run without partitions until restarted.
                log.error("membership failed", error=safe_repr(error), where=raised_at(error))
                await self._pause()

    def _survives(self, error: KafkaRefused, first: asyncio.Future[None]) -> bool:
        """Handle the coordinator's error; return whether to rejoin."""
        if error.code in self._permanent and not first.done():
            first.set_exception(ConfigurationError(self._permanent[Code(error.code)]))
            return False
        if error.code == Code.UNKNOWN_MEMBER:
            # After `TAKEN` this means that the other process has gone.
            self._member.forget()
            self._failures = 0
        if error.code in _LOST:
            self._lose(_LOST[Code(error.code)])
        else:
            self._lose_if_unanswered(str(error))
        return True

    async def _name_replacer(self) -> None:
        """Report the process that uses our instance id, once it is known."""
        with contextlib.suppress(KafkaUnavailable):
            holder = await self._member.holder()
            if holder is not None and holder != self._replaced_by:
                self._replaced_by = holder
                log.error("replaced", instance=self._name, by=holder.address, host=holder.host)
                self._hearer.lost(self._hearer.replaced_by(holder))

    async def _join(self) -> None:
        """Join and report the assignment."""
        if self.joined is not None:
            # Others may have been assigned our partitions, which we would report as owned.
            self._lose_if_unanswered(COORDINATOR_UNRESPONSIVE)
        self._rejoin = False
        self._wake.clear()
        # The other members may take a session to join.
        beating = asyncio.create_task(self._beat_while_joining())
        try:
            joined = await self._member.join()
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        self.answered_at = max(self.answered_at, joined.sent_at)
        self._failures = 0
        self._joined_at = asyncio.get_running_loop().time()
        self.joined, self._why, self._replaced_by = joined, "", None
        self._notify()
        self._hearer.assigned(joined.assignment)
        # Only once: with a leader that does not distribute metadata it would never end.
        if joined.outdated and not self._requested:
            self.rejoin()
        self._requested = joined.outdated

    async def _beat_while_joining(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._heartbeat_s - self._unanswered_s))
            if self._member.generation >= 0:
                try:
                    await self._beat(self._member.generation)
                except KafkaUnavailable as error:
                    self._lose_if_unanswered(str(error))
            await asyncio.sleep(self._heartbeat_s)

    async def _heartbeats(self) -> None:
        """Send heartbeats until a new generation begins."""
        while not self._rejoin:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self._wake.wait()
            self._wake.clear()
            if self.joined is None or self._rejoin:
                return
            try:
                # Whatever the request timeout: after the session the partitions are reassigned.
                async with asyncio.timeout(
                    max(_ANSWER_MIN_S, self._session_s - self._unanswered_s)
                ):
                    code = await self._beat(self.joined.generation)
            except TimeoutError:
                self._lose(COORDINATOR_UNRESPONSIVE)
                raise KafkaUnavailable(COORDINATOR_UNRESPONSIVE) from None
            except KafkaUnavailable:
                if self._unanswered_s > self._session_s:
                    raise
                continue
            if code in _OLD_GENERATION:
                return
            if code != Code.NONE:
                raise KafkaRefused(code, describe(code))

    @property
    def _pause_s(self) -> float:
        """Seconds until the next heartbeat."""
        soon = asyncio.get_running_loop().time() - self._joined_at < _FOLLOWING_S
        return min(self._heartbeat_s, _FOLLOWING_BEAT_S) if soon else self._heartbeat_s

    async def _beat(self, generation: int) -> int:
        sent_at = asyncio.get_running_loop().time()
        code = await self._member.heartbeat(generation, _HEARTBEAT_CHANNEL)
        if code in _CONFIRMED:
            self.answered_at = max(self.answered_at, sent_at)
        return code

    async def _pause(self) -> None:
        """Sleep before the next attempt, longer each time."""
        self._failures += 1
        await asyncio.sleep(grown_pause_s(self._failures, _PAUSE_S, _PAUSE_MAX_S))

    @property
    def _unanswered_s(self) -> float:
        return asyncio.get_running_loop().time() - self.answered_at

    def _lose_if_unanswered(self, reason: str) -> None:
        if self._unanswered_s > self._session_s:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        """Report that the assignment is lost, once until the next join.

        `TAKEN` is reported in any case, because an operator must act.
        """
        self.joined = None
        self._notify()
        if not self._why or (reason == TAKEN and self._why != TAKEN):
            self._why = reason
            log.warning("out of the group", instance=self._name, why=reason)
            self._hearer.lost(reason)

    @property
    def _name(self) -> str:
        identity = self._member.identity
        return identity.instance or identity.member_id

    def _notify(self) -> None:
        """Wake callers that wait for a new assignment."""
        news, self._news = self._news, asyncio.Event()
        news.set()
