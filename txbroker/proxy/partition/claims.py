"""Claims: how an owner makes sure that no other one writes, first and after a lost turn."""

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable

from txbroker.core.records import Claim, State
from txbroker.door import Claimed, Fenced, Hanging, PartitionDoor
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import hit
from txbroker.proxy.logging import get_logger
from txbroker.proxy.partition.appender import Appender
from txbroker.proxy.partition.context import PartitionContext
from txbroker.proxy.partition.parked_copies import read_copies
from txbroker.proxy.partition.recovery import claim_first
from txbroker.proxy.partition.snapshots import SnapshotWriter

CLAIM_PAUSE_S = 0.2
CLAIM_PAUSE_MAX_S = 2.0
"""Pauses between claims are random and grow to this."""

log = get_logger(__name__)


class Claims:
    """Claims one half partition: a `txbroker.proxy.partition.promoter.Claimer`.

    Args:
        context: what all parts of the partition share.
        door: where claims are written.
        identity: this proxy's name and URL, for the claim record.
        still_ours: says, after a fresh heartbeat, whether the partition is still this proxy's.
        logs: the appenders of half and operation topic, to read what other owners wrote.
        snapshots: the one that is being written is given up before the ledger is reconciled.

    Attributes:
        hanging: whether a transaction that nobody ends has hidden the progress at the last try.
    """

    def __init__(
        self,
        context: PartitionContext,
        door: PartitionDoor,
        identity: tuple[str, str],
        still_ours: Callable[[], Awaitable[bool]],
        logs: tuple[Appender, Appender],
        snapshots: SnapshotWriter,
    ) -> None:
        self.hanging = False
        self._context = context
        self._door = door
        self._identity = identity
        self._still_ours = still_ours
        self._half, self._op = logs
        self._snapshots = snapshots

    async def first(self) -> Claimed:
        """Claim a partition that is to be recovered; return what the claim has found.

        Raises:
            Fenced: the partition is another proxy's by now.
            LogTruncated: the checkpoint topic is not what it was.
            KafkaUnavailable: Kafka does not answer.
        """
        pause_s = CLAIM_PAUSE_S
        while True:
            try:
                return await claim_first(self._door, self._new())
            except Fenced:
                pause_s = await self._pause(pause_s)

    def _new(self) -> Claim:
        """Return the next claim, which is the present one from now on."""
        self._context.claim.id = uuid.uuid4().hex
        name, url = self._identity
        return Claim(self._context.record_version(), self._context.claim.id, name, url)

    async def _pause(self, pause_s: float) -> float:
        """Pause before another claim, unless the partition has moved; return the next pause.

        Raises:
            Fenced: it has.
        """
        await asyncio.sleep(pause_s * random.random())
        await self._check_ours()
        return min(pause_s * 2, CLAIM_PAUSE_MAX_S)

    async def _check_ours(self) -> None:
        """Ask the group, for as long as it does not answer, whether the partition is ours.

        Raises:
            Fenced: it is not.
        """
        partition = self._context.partition
        pause_s = CLAIM_PAUSE_S
        while True:
            await self._context.gate.wait()
            try:
                ours = await self._still_ours()
            except KafkaUnavailable as error:
                # Also while the group is being rebalanced.
                log.warning("not known whose", partition=partition, why=str(error))
                await asyncio.sleep(pause_s * (0.5 + random.random()))
                pause_s = min(pause_s * 2, CLAIM_PAUSE_MAX_S)
            else:
                if not ours:
                    raise Fenced(f"partition {partition} has another owner")
                return

    async def reclaim(self, unseen: frozenset[str]) -> None:
        """Claim again after a lost turn, and take over what turned out to be committed.

        Args:
            unseen: what is known to be committed already, and will be visible.

        Raises:
            Fenced: the partition has another owner.
        """
        context, pause_s = self._context, CLAIM_PAUSE_S
        while True:
            try:
                await self._check_ours()
                hit("reclaim.asked")
                claimed = await self._door.claim(self._new())
                hit("reclaim.claimed")
                # Another owner may have come and gone: what it appended and promoted is done by
                # this progress, and would be promoted again if it were read later.
                await self._op.catch_up()
                await self._half.catch_up()
                kept = await read_copies(self._door, claimed.skips)
                break
            except KafkaUnavailable as error:
                log.warning("claim failed", partition=context.partition, why=str(error))
                if isinstance(error, Hanging):
                    self.hanging = True
                context.events.kafka_failed("claim")
                await asyncio.sleep(pause_s * random.random())
                pause_s = min(pause_s * 2, CLAIM_PAUSE_MAX_S)
            except Fenced:
                pause_s = await self._pause(pause_s)
        self.hanging = False
        # One that is being captured would see only a part of what changes now.
        self._snapshots.abandon()
        done = context.ledger.reconcile(claimed.progress, kept.whole, unseen)
        kept.check(done)
        context.claim.reclaims += 1
        hit("reclaim.done")
        log.info("claimed again", partition=context.partition, committed_meanwhile=len(done))
        if done:
            context.promoted(done)
        # The lost turns may have refused some.
        waited_for = [context.ledger.transactions.get(id) for id in context.visible]
        context.visible.release([t for t in waited_for if t and t.state is not State.COMMITTED])
