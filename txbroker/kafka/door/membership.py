"""The assignment of half partitions: a loop that joins the group, sends heartbeats, and rejoins.

It only reports changes. Recovery takes seconds and must not delay heartbeats: members that
recovered within the assignment lost it repeatedly. It uses no consumer: one that is not polled
leaves the group and still believes that it owns its partitions.

Safety does not depend on this: a claim fences the previous owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import structlog

from txbroker.core.records import RECORD_VERSION
from txbroker.door.protocols import TAKEN, Assignment, Membership, replaced_by
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused
from txbroker.kafka.client.member import Holder, Joined, Member
from txbroker.kafka.protocol.codes import Code, describe
from txbroker.kafka.protocol.generation import SelfMetadata
from txbroker.net.timers import grown_pause_s

log = structlog.wrap_logger(logging.getLogger(__name__))

_HEARTBEATS_PER_SESSION = 10
_HEARTBEAT_MAX_S = 0.3  # delay until the others notice that a member has left
_PAUSE_S, _PAUSE_MAX_S = 0.2, 1.0
_ANSWER_MIN_S = 1.0  # of a heartbeat after this process paused for longer than the session
_PERMANENT = {
    Code.GROUP_AUTHORIZATION_FAILED: "may not be used by this proxy: grant it Read on the group",
    Code.INCONSISTENT_GROUP_PROTOCOL: "is used by other consumers: set another topic_prefix",
    Code.INVALID_GROUP_ID: "is no valid group id: set another topic_prefix",
    Code.INVALID_SESSION_TIMEOUT: "cannot use a session_timeout_s of {session_s:g}: set it between "
    "the brokers' group.min.session.timeout.ms and group.max.session.timeout.ms",
    Code.GROUP_MAX_SIZE_REACHED: "has no room for another proxy: raise the brokers' group.max.size",
}
"""Errors that a retry does not cure, so that the start fails."""

UNKNOWN_TO_COORDINATOR = "the group coordinator does not know this member any more"
COORDINATOR_UNRESPONSIVE = "the group coordinator has not answered for a whole session"
_LOST = {Code.FENCED_INSTANCE_ID: TAKEN, Code.UNKNOWN_MEMBER: UNKNOWN_TO_COORDINATOR}
"""Errors that end the assignment. An old generation does not: the member keeps its place, and joins
the new one."""

_OLD_GENERATION = frozenset({Code.ILLEGAL_GENERATION, Code.REBALANCE_IN_PROGRESS})


class KafkaMembership(Membership):
    """A `Membership` on a real Kafka."""

    def __init__(self, client: Client) -> None:
        self.record_version = RECORD_VERSION
        """The newest supported record version, for the metadata."""
        self._client = client
        self._session_s = client.settings.session_timeout_s
        self._heartbeat_s = min(self._session_s / _HEARTBEATS_PER_SESSION, _HEARTBEAT_MAX_S)
        self._partitions = 0
        self._member: Member | None = None
        self._assigned: Callable[[Assignment], None] = _ignore
        self._lost: Callable[[str], None] = _ignore
        self._joined: Joined | None = None
        self._why = ""
        self._replaced_by: Holder | None = None
        self._requested = False
        self._rejoin_now = asyncio.Event()
        self._news = asyncio.Event()
        self._answered_at = 0.0
        self._failures = 0
        self._task: asyncio.Task[None] | None = None

    def expect(self, partitions: int) -> None:
        """Set the number of partitions to assign."""
        self._partitions = partitions

    async def join(
        self,
        url: str,
        assigned: Callable[[Assignment], None],
        lost: Callable[[str], None],
        *,
        peer_url: str = "",
        admin_url: str = "",
    ) -> None:
        """Join as the proxy at `url`; return after the first assignment. See `Membership`.

        While another process uses the instance id this one retries, and joins once it has gone.
        """
        await self.close()
        self._assigned, self._lost = assigned, lost
        self._why, self._replaced_by, self._requested, self._failures = "", None, False, 0
        self._answered_at = asyncio.get_running_loop().time()
        name = self._client.settings.instance_id
        me = SelfMetadata(name, url, self.record_version, peer_url, admin_url)
        self._member = Member(self._client, self._partitions, me)
        first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(self._member, first), name="txbroker membership")
        await first

    async def still_ours(self, partition: int) -> bool:
        """Send a heartbeat in the current generation; return whether `partition` is assigned.

        After False, `assigned` or `lost` reports the new assignment.
        """
        try:
            async with asyncio.timeout(self._session_s):
                return await self._verify_assigned(partition)
        except TimeoutError:
            raise KafkaUnavailable(
                "the rebalance of the proxies' group does not end: retry"
            ) from None

    async def _verify_assigned(self, partition: int) -> bool:
        while True:
            joined, news = self._joined, self._news
            if joined is None or self._member is None:
                return False
            code = await self._member.heartbeat(joined.generation, "group/fresh")
            if self._joined is not joined:
                continue  # a new generation began meanwhile: verify in that one
            if code in (Code.NONE, Code.REBALANCE_IN_PROGRESS):
                return partition in joined.assignment.mine
            if code in _LOST:
                self._lose(_LOST[Code(code)])
                self._rejoin_now.set()
                return False
            if code != Code.ILLEGAL_GENERATION:
                raise KafkaRefused(code)
            # A new generation has begun: wait for its assignment.
            self._rejoin_now.set()
            await news.wait()

    def in_touch(self) -> bool:
        """Return whether the coordinator has answered within the session timeout."""
        return self._joined is not None and self._unanswered_s <= self._session_s

    async def leave(self) -> None:
        """Leave the group, so that others take over now. `join` works again."""
        await self.close()
        member, self._member = self._member, None
        if member is not None:
            await member.leave()

    async def close(self) -> None:
        """Stop without leaving: a member that rejoins within the session keeps its partitions."""
        task, self._task = self._task, None
        self._joined = None
        self._notify()
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._member is not None:
            self._member.cancel_join()

    # --- the loop ----------------------------------------------------------------------------

    async def _run(self, member: Member, first: asyncio.Future[None]) -> None:
        while True:
            try:
                again = await self._join_once(member)
                if not first.done():
                    first.set_result(None)
                if not again:
                    await self._heartbeats(member)
            except KafkaRefused as error:
                if not self._survives(member, error, first):
                    return
                if error.code == Code.FENCED_INSTANCE_ID:
                    await self._name_replacer(member)
                await self._pause()
            except KafkaUnavailable as error:
                self._lose_if_unanswered(str(error))
                await self._pause()
            except Exception as error:
                self._lose(safe_repr(error))
                if not first.done():
                    # Otherwise `join` would wait without end.
                    first.set_exception(error)
                    return
                # A proxy that stopped here would run without partitions until restarted.
                log.error("membership failed", error=safe_repr(error), where=raised_at(error))
                await self._pause()

    def _survives(self, member: Member, error: KafkaRefused, first: asyncio.Future[None]) -> bool:
        """Handle the coordinator's error; return whether to rejoin."""
        if error.code in _PERMANENT and not first.done():
            settings = self._client.settings
            why = _PERMANENT[Code(error.code)].format(session_s=self._session_s)
            first.set_exception(ConfigurationError(f"group {settings.group_id} {why}"))
            return False
        if error.code == Code.UNKNOWN_MEMBER:
            # After `TAKEN` this means that the other process has gone.
            member.forget()
            self._failures = 0
        if error.code in _LOST:
            self._lose(_LOST[Code(error.code)])
        elif error.code in _OLD_GENERATION:
            self._answered_at = asyncio.get_running_loop().time()
        else:
            self._lose_if_unanswered(str(error))
        return True

    async def _name_replacer(self, member: Member) -> None:
        """Report the process that uses our instance id, once it is known."""
        with contextlib.suppress(KafkaUnavailable):
            holder = await member.holder()
            if holder is not None and holder != self._replaced_by:
                self._replaced_by = holder
                why = replaced_by(self._instance, *holder)
                log.error("replaced", instance=self._instance, by=holder.url, host=holder.host)
                self._lost(why)

    async def _join_once(self, member: Member) -> bool:
        """Join and report the assignment; return whether to rejoin, so as to update our metadata.

        Only once: with a leader that does not distribute metadata it would never end.
        """
        self._rejoin_now.clear()
        joined = await member.join()
        self._answered_at = asyncio.get_running_loop().time()
        self._failures = 0
        self._joined, self._why, self._replaced_by = joined, "", None
        self._notify()
        self._assigned(joined.assignment)
        again = joined.outdated and not self._requested
        self._requested = joined.outdated
        if again:
            member.request_rebalance()
        return again

    async def _heartbeats(self, member: Member) -> None:
        """Send heartbeats until a new generation begins."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._rejoin_now.wait()
            self._rejoin_now.clear()
            if self._joined is None:
                return
            sent_at = asyncio.get_running_loop().time()
            try:
                # Whatever the request timeout: after the session the partitions are reassigned.
                async with asyncio.timeout(
                    max(_ANSWER_MIN_S, self._session_s - self._unanswered_s)
                ):
                    code = await member.heartbeat(self._joined.generation, "group/heartbeat")
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
            self._answered_at = sent_at

    async def _pause(self) -> None:
        """Sleep before the next attempt, longer each time."""
        self._failures += 1
        await asyncio.sleep(grown_pause_s(self._failures, _PAUSE_S, _PAUSE_MAX_S))

    @property
    def _unanswered_s(self) -> float:
        return asyncio.get_running_loop().time() - self._answered_at

    def _lose_if_unanswered(self, reason: str) -> None:
        if self._unanswered_s > self._session_s:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        """Report that the assignment is lost, once until the next join.

        `TAKEN` is reported in any case, because an operator must act.
        """
        self._joined = None
        self._notify()
        if not self._why or (reason == TAKEN and self._why != TAKEN):
            self._why = reason
            log.warning("out of the group", instance=self._instance, why=reason)
            self._lost(reason)

    @property
    def _instance(self) -> str:
        return self._client.settings.instance_id

    def _notify(self) -> None:
        """Wake callers that wait for a new assignment."""
        news, self._news = self._news, asyncio.Event()
        news.set()


def _ignore(_news: object) -> None:
    pass
