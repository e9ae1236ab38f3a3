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

from txbroker.door import Membership
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client import Client, KafkaRefused
from txbroker.kafka.codes import Code
from txbroker.kafka.member import Joined, Member

_log = logging.getLogger("txbroker.kafka")

_BEATS_A_SESSION = 10
_PAUSE_S = 0.2
_LEAVE_TIMEOUT_S = 2.0
_HOPELESS = {
    Code.GROUP_AUTHORIZATION_FAILED: "may not be used by this proxy: grant it Read on the group",
    Code.INCONSISTENT_GROUP_PROTOCOL: "is used by consumers that are no proxies: set another",
    Code.INVALID_GROUP_ID: "is no name for a group: set another",
    Code.INVALID_SESSION_TIMEOUT: "may not have this session timeout: see the brokers' "
    "group.min.session.timeout.ms and group.max.session.timeout.ms",
}
"""What does not pass by itself, so that a start must not wait for it."""

_FORGOTTEN = frozenset({Code.UNKNOWN_MEMBER, Code.ILLEGAL_GENERATION})


class KafkaMembership(Membership):
    """A `txbroker.door.Membership` on a real Kafka."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._session_s = client.settings.session_timeout_s
        self._member: Member | None = None
        self._assigned: Callable[[frozenset[int]], None] = _ignore
        self._owned: frozenset[int] = frozenset()
        self._joined: Joined | None = None
        self._again = asyncio.Event()
        self._heard_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def expect(self, partitions: int) -> None:
        """Say how many partitions there are to share."""
        self._member = Member(self._client, partitions)

    async def join(self, assigned: Callable[[frozenset[int]], None]) -> None:
        """Join; returns when the first assignment is there.

        `assigned` gets the owned partitions after every change, from the event loop; it must
        return at once. During a rebalance we keep what we have until the new assignment is known.

        Raises:
            ConfigurationError: the group cannot be used.
        """
        self._assigned = assigned
        first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(first), name="txbroker membership")
        await first

    async def still_ours(self, partition: int) -> bool:
        """After a fresh heartbeat in the same generation, say whether `partition` is ours.

        After a no, `assigned` is called with what is ours from then on.

        Raises:
            KafkaUnavailable: the coordinator does not answer.
        """
        while True:
            joined = self._joined
            if joined is None or self._member is None:
                return False
            code = await self._member.heartbeat(joined.generation, "group/fresh")
            if self._joined is not joined:
                continue  # a new generation came meanwhile: ask in that one
            if code in (Code.NONE, Code.REBALANCE_IN_PROGRESS):
                return partition in joined.partitions
            self._lose("the coordinator does not know us any more")
            self._again.set()
            return False

    async def leave(self) -> None:
        """Leave the group, so that others take over at once."""
        await self.close()
        if self._member is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    await self._member.leave()

    async def close(self) -> None:
        """Fall silent without leaving: who comes back within the session keeps its partitions."""
        task, self._task = self._task, None
        self._joined = None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # --- the loop ----------------------------------------------------------------------------

    async def _run(self, first: asyncio.Future[None]) -> None:
        assert self._member is not None
        while True:
            try:
                await self._join_once(self._member)
                if not first.done():
                    first.set_result(None)
                await self._beat(self._member)
            except KafkaRefused as error:
                if not self._survives(error, first):
                    return
                await asyncio.sleep(_PAUSE_S)
            except KafkaUnavailable as error:
                if self._silent_s > self._session_s:
                    self._lose(str(error))
                await asyncio.sleep(_PAUSE_S)
            except Exception as error:
                self._lose(repr(error))
                if not first.done():
                    # Without this a waiting `join` would wait for ever.
                    first.set_exception(error)
                    return
                # A proxy that stopped here would stay alive without a partition, for ever.
                _log.exception("the membership failed, it is begun anew")
                await asyncio.sleep(self._session_s / _BEATS_A_SESSION)

    def _survives(self, error: KafkaRefused, first: asyncio.Future[None]) -> bool:
        """Say whether to join again after the coordinator's error."""
        assert self._member is not None
        if error.code == Code.FENCED_INSTANCE_ID:
            self._lose("another process has joined with our instance id")
            _log.error(
                "left the group: another process uses the instance id %s",
                self._client.settings.instance_id,
            )
            return False
        if error.code in _HOPELESS and not first.done():
            group = self._client.settings.group_id
            sentence = f"group {group} {_HOPELESS[Code(error.code)]}"
            first.set_exception(ConfigurationError(sentence))
            return False
        if error.code in _FORGOTTEN:
            self._member.forget()
            self._lose(str(error))
        return True

    async def _join_once(self, member: Member) -> None:
        self._again.clear()
        self._joined = await member.join(self._owned)
        self._heard_at = asyncio.get_running_loop().time()
        self._post(self._joined.partitions)

    async def _beat(self, member: Member) -> None:
        """Send heartbeats until there is a new generation to join.

        Raises:
            KafkaRefused: the coordinator does not know us any more.
            KafkaUnavailable: it was silent for a whole session.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._session_s / _BEATS_A_SESSION):
                    await self._again.wait()
            self._again.clear()
            if self._joined is None:
                return
            sent_at = asyncio.get_running_loop().time()
            try:
                code = await member.heartbeat(self._joined.generation, "group/heartbeat")
            except KafkaUnavailable:
                if self._silent_s > self._session_s:
                    raise
                continue
            if code == Code.REBALANCE_IN_PROGRESS:
                return
            if code != Code.NONE:
                raise KafkaRefused(code)
            self._heard_at = sent_at

    @property
    def _silent_s(self) -> float:
        return asyncio.get_running_loop().time() - self._heard_at

    def _lose(self, reason: str) -> None:
        self._joined = None
        if self._owned:
            _log.warning("lost all partitions: %s", reason)
        self._post(frozenset())

    def _post(self, partitions: frozenset[int]) -> None:
        if partitions != self._owned:
            self._owned = partitions
            self._assigned(partitions)


def _ignore(_partitions: frozenset[int]) -> None:
    pass
