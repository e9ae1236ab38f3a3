"""Which half partitions are ours: a loop that joins, beats, and joins again.

It only posts what changed. Recovery of a partition takes seconds and must never stand between a
heartbeat and the next: members that recovered inside the assignment lost it again and again.
There is no consumer: one that is not polled leaves the group and still believes that it owns.

Safety does not rest on this: whoever claims a partition fences the owner before.
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

log = structlog.wrap_logger(logging.getLogger(__name__))

_BEATS_A_SESSION = 10
_BEAT_MAX_S = 0.3  # how late the others hear that one has left
_PAUSE_S, _PAUSE_MAX_S = 0.2, 1.0
_ANSWER_S = 1.0  # what a heartbeat gets after a pause of ours that was longer than the session
_HOPELESS = {
    Code.GROUP_AUTHORIZATION_FAILED: "may not be used by this proxy: grant it Read on the group",
    Code.INCONSISTENT_GROUP_PROTOCOL: "is used by consumers that are no proxies: set another",
    Code.INVALID_GROUP_ID: "is no name for a group: set another",
    Code.INVALID_SESSION_TIMEOUT: "may not have a session_timeout_s of {session_s:g}: the brokers "
    "allow what lies between their group.min.session.timeout.ms and group.max.session.timeout.ms",
    Code.GROUP_MAX_SIZE_REACHED: "has no room for another proxy: raise the brokers' group.max.size",
}
"""What does not pass by itself, so that a start must not wait for it."""

FORGOTTEN = "the group's coordinator does not know us any more"
SILENT = "the group's coordinator has been silent for a whole session"
_LOST = {Code.FENCED_INSTANCE_ID: TAKEN, Code.UNKNOWN_MEMBER: FORGOTTEN}
"""Answers that say that nothing is ours. Behind an old generation is not among them: a member
that did not hear of the new one has its place, and joining tells what is in it."""

_LEFT_BEHIND = frozenset({Code.ILLEGAL_GENERATION, Code.REBALANCE_IN_PROGRESS})


class KafkaMembership(Membership):
    """A `txbroker.door.protocols.Membership` on a real Kafka."""

    def __init__(self, client: Client) -> None:
        self.record_version = RECORD_VERSION
        """The newest record version that we understand, as the others are told."""
        self._client = client
        self._session_s = client.settings.session_timeout_s
        self._beat_s = min(self._session_s / _BEATS_A_SESSION, _BEAT_MAX_S)
        self._partitions = 0
        self._member: Member | None = None
        self._assigned: Callable[[Assignment], None] = _ignore
        self._lost: Callable[[str], None] = _ignore
        self._joined: Joined | None = None
        self._why = ""
        self._replaced_by: Holder | None = None
        self._asked = False
        self._beat_now = asyncio.Event()
        self._news = asyncio.Event()
        self._heard_at = 0.0
        self._pause_s = _PAUSE_S
        self._task: asyncio.Task[None] | None = None

    def expect(self, partitions: int) -> None:
        """Say how many partitions there are to share."""
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
        """Join as the proxy at `url`; return when the first assignment is there.

        See `Membership`. While another process has our instance id we stay out and
        ask again and again: it keeps what it has, and once it has gone we are in.

        Raises:
            ConfigurationError: the group cannot be used.
        """
        await self.close()
        self._assigned, self._lost = assigned, lost
        self._why, self._replaced_by, self._asked, self._pause_s = "", None, False, _PAUSE_S
        self._heard_at = asyncio.get_running_loop().time()
        name = self._client.settings.instance_id
        me = SelfMetadata(name, url, self.record_version, peer_url, admin_url)
        self._member = Member(self._client, self._partitions, me)
        first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(self._member, first), name="txbroker membership")
        await first

    async def still_ours(self, partition: int) -> bool:
        """After a fresh heartbeat in the same generation, say whether `partition` is ours.

        After a no, `assigned` or `lost` tells what is ours from then on.

        Raises:
            KafkaUnavailable: no answer, or a join that does not end; it may still be ours.
        """
        try:
            async with asyncio.timeout(self._session_s):
                return await self._ask_whether_ours(partition)
        except TimeoutError:
            raise KafkaUnavailable("the proxies' group does not settle") from None

    async def _ask_whether_ours(self, partition: int) -> bool:
        while True:
            joined, news = self._joined, self._news
            if joined is None or self._member is None:
                return False
            code = await self._member.heartbeat(joined.generation, "group/fresh")
            if self._joined is not joined:
                continue  # a new generation came meanwhile: ask in that one
            if code in (Code.NONE, Code.REBALANCE_IN_PROGRESS):
                return partition in joined.assignment.mine
            if code in _LOST:
                self._lose(_LOST[Code(code)])
                self._beat_now.set()
                return False
            if code != Code.ILLEGAL_GENERATION:
                raise KafkaRefused(code)
            # The new generation has begun, and what is ours in it is on its way.
            self._beat_now.set()
            await news.wait()

    def in_touch(self) -> bool:
        """Say whether the coordinator's last word is younger than a session."""
        return self._joined is not None and self._silent_s <= self._session_s

    async def leave(self) -> None:
        """Leave the group, so that others take over at once. `join` works again."""
        await self.close()
        member, self._member = self._member, None
        if member is not None:
            await member.leave()

    async def close(self) -> None:
        """Fall silent without leaving: who comes back within the session keeps its partitions."""
        task, self._task = self._task, None
        self._joined = None
        self._tell()
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
                    await self._beat(member)
            except KafkaRefused as error:
                if not self._survives(member, error, first):
                    return
                if error.code == Code.FENCED_INSTANCE_ID:
                    await self._name_replacer(member)
                await self._pause()
            except KafkaUnavailable as error:
                self._lose_if_silent(str(error))
                await self._pause()
            except Exception as error:
                self._lose(safe_repr(error))
                if not first.done():
                    # Without this a waiting `join` would wait for ever.
                    first.set_exception(error)
                    return
                # A proxy that stopped here would stay alive without a partition, for ever.
                log.error("membership failed", error=safe_repr(error), where=raised_at(error))
                await self._pause()

    def _survives(self, member: Member, error: KafkaRefused, first: asyncio.Future[None]) -> bool:
        """Say whether to join again after the coordinator's error."""
        if error.code in _HOPELESS and not first.done():
            settings = self._client.settings
            why = _HOPELESS[Code(error.code)].format(session_s=self._session_s)
            first.set_exception(ConfigurationError(f"group {settings.group_id} {why}"))
            return False
        if error.code == Code.UNKNOWN_MEMBER:
            # Behind `TAKEN` this says that the other process has gone.
            member.forget()
            self._pause_s = _PAUSE_S
        if error.code in _LOST:
            self._lose(_LOST[Code(error.code)])
        elif error.code in _LEFT_BEHIND:
            self._heard_at = asyncio.get_running_loop().time()
        else:
            self._lose_if_silent(str(error))
        return True

    async def _name_replacer(self, member: Member) -> None:
        """Tell who has our instance id, as soon as the group says it."""
        with contextlib.suppress(KafkaUnavailable):
            holder = await member.holder()
            if holder is not None and holder != self._replaced_by:
                self._replaced_by = holder
                why = replaced_by(self._instance, *holder)
                log.error("replaced", instance=self._instance, by=holder.url, host=holder.host)
                self._lost(why)

    async def _join_once(self, member: Member) -> bool:
        """Join and post what is ours; say whether the others have to be told of us in another
        generation. That is wanted once: a leader that cannot tell them would be asked for ever."""
        self._beat_now.clear()
        joined = await member.join()
        self._heard_at = asyncio.get_running_loop().time()
        self._pause_s = _PAUSE_S
        self._joined, self._why, self._replaced_by = joined, "", None
        self._tell()
        self._assigned(joined.assignment)
        again = joined.outdated and not self._asked
        self._asked = joined.outdated
        if again:
            member.request_rebalance()
        return again

    async def _beat(self, member: Member) -> None:
        """Send heartbeats until there is a new generation to join.

        Raises:
            KafkaRefused: the coordinator does not know us any more, or we are left behind.
            KafkaUnavailable: it was silent for a whole session.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat_s):
                    await self._beat_now.wait()
            self._beat_now.clear()
            if self._joined is None:
                return
            sent_at = asyncio.get_running_loop().time()
            try:
                # However long it takes to find out that a broker is silent: after a session the
                # others have what was ours.
                async with asyncio.timeout(max(_ANSWER_S, self._session_s - self._silent_s)):
                    code = await member.heartbeat(self._joined.generation, "group/heartbeat")
            except TimeoutError:
                self._lose(SILENT)
                raise KafkaUnavailable(SILENT) from None
            except KafkaUnavailable:
                if self._silent_s > self._session_s:
                    raise
                continue
            if code in _LEFT_BEHIND:
                return
            if code != Code.NONE:
                raise KafkaRefused(code, describe(code))
            self._heard_at = sent_at

    async def _pause(self) -> None:
        """Wait before the next try, longer each time."""
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 2, _PAUSE_MAX_S)

    @property
    def _silent_s(self) -> float:
        return asyncio.get_running_loop().time() - self._heard_at

    def _lose_if_silent(self, reason: str) -> None:
        if self._silent_s > self._session_s:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        """Post that we are out of touch, once until we are in again; the instance id that is
        taken is told in any case, because somebody has to act on it."""
        self._joined = None
        self._tell()
        if not self._why or (reason == TAKEN and self._why != TAKEN):
            self._why = reason
            log.warning("out of the group", instance=self._instance, why=reason)
            self._lost(reason)

    @property
    def _instance(self) -> str:
        return self._client.settings.instance_id

    def _tell(self) -> None:
        """Wake those who wait for what is ours now."""
        news, self._news = self._news, asyncio.Event()
        news.set()


def _ignore(_news: object) -> None:
    pass
