"""A group's committed offsets, stored with a member's generation, alone or together with copies.

Copies and offsets are one Kafka transaction (KIP-447). Without the generation, as common clients
commit, a member that was replaced while it was stopped would move the offset back.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from txbroker.door.consuming import StoredOffset
from txbroker.door.writing import Copy, Fenced, Partition, Refused, Unknown
from txbroker.errors import InvariantBroken, KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.kafka.client.acls import consumers_transactional_id
from txbroker.kafka.client.client import Client, KafkaRefused
from txbroker.kafka.client.groups import ask_group, error_codes, stored_offsets
from txbroker.kafka.client.producer import BatchRefused, BatchUnknown, Producer, ProducerFenced
from txbroker.kafka.protocol.codes import (
    MEMBER_FENCED,
    RECORDS_REFUSED,
    RETRIABLE,
    TOPIC_REFUSED,
    TRANSACTION_BROKEN,
    Code,
    describe,
)
from txbroker.kafka.protocol.copies import Batch, Batches, RefusedBatch, cause_of
from txbroker.kafka.protocol.packed import PackedRequest
from txbroker.kafka.protocol.schemas import OffsetCommitV7, OffsetFetchV7
from txbroker.kafka.protocol.transactions import by_topic
from txbroker.net.timers import Backoff

_CHANNEL = "group/copies"
_NO_EPOCH = -1
_PAUSE_S = 0.002
"""Between attempts while the transaction before is completed, which takes some milliseconds."""
_CLOSE_S = 2.0
_AGAIN = RETRIABLE | {Code.REBALANCE_IN_PROGRESS}
"""A member between joining and its assignment may not commit yet."""
_UNSTABLE_MAX_S = 60.0
"""Longer than a transaction stays open whose producer has died."""
_UNSTABLE_PAUSE_S = 0.05


class Identity(Protocol):
    """Who commits. Read for every attempt: it changes with each generation.

    Attributes:
        instance: the instance id; None for a dynamic member.
    """

    generation: int
    member_id: str
    instance: str | None


class GroupOffsets:
    """Loads and commits a group's offsets.

    Args:
        identity: of the member that commits.
    """

    def __init__(self, client: Client, group: str, identity: Identity) -> None:
        self._client = client
        self._settings = client.settings
        self._group = group
        self._identity = identity
        self._transactional_id = consumers_transactional_id(group) + secrets.token_hex(8)
        self._producer: Producer | None = None
        self._unsettled = False
        """A transaction may still be open, or be completed."""
        self._limits: dict[str, int] = {}
        """Sizes of batches by topic, see `Batches`."""
        self._turn = asyncio.Lock()
        """Of the producer: another one would abort the transaction in flight."""

    # --- load --------------------------------------------------------------------------------

    async def load(self, partitions: Collection[Partition]) -> dict[Partition, StoredOffset]:
        """Return committed offsets, without partitions that have none; see `GroupMember.load`.

        Raises:
            KafkaUnavailable: no answer, or a transaction with offsets stays open.
        """
        await self._settle()
        if not partitions:
            return {}
        request = OffsetFetchV7(self._group, list(by_topic(partitions).items()), True)
        unstable = Backoff(_UNSTABLE_MAX_S, _UNSTABLE_PAUSE_S)
        while True:
            answer = await ask_group(self._client, self._group, request, self._backoff())
            codes = error_codes(answer)
            if not codes:
                return stored_offsets(answer)
            code = min(codes)
            why = f"cannot load the offsets of group {self._group}: {describe(code)}"
            if Code.UNSTABLE_OFFSET_COMMIT not in codes:
                raise KafkaRefused(code, why)
            if not await unstable.pause():
                raise KafkaUnavailable(why)

    # --- commit ------------------------------------------------------------------------------

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> None:
        """Store offsets, and copies with them or not at all; see `GroupMember.commit`.

        Raises:
            Fenced, Refused
            KafkaUnavailable: the result is unknown. It is known before the next `load` returns.
        """
        if copies:
            async with self._turn:
                await self._commit_with(offsets, copies)
            return
        topics = _encoded(offsets)

        def make(*member: Any) -> PackedRequest:
            return OffsetCommitV7(self._group, *member, topics)

        await self._store(make, self._backoff())

    async def _commit_with(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy]
    ) -> None:
        batches = Batches(self._limits)
        while True:
            refused = await self._try_commit(offsets, batches.rounds(copies))
            if refused is None:
                return
            # Otherwise with smaller batches, until a batch holds nothing but refused copies.
            if found := batches.refused(refused, copies):
                raise Refused(found, cause_of(refused.why))

    async def _try_commit(
        self, offsets: Mapping[Partition, StoredOffset], rounds: Sequence[Mapping[Partition, Batch]]
    ) -> RefusedBatch | None:
        """Commit, or abort and return a refused batch."""
        backoff = Backoff(self._settings.write_timeout_s, _PAUSE_S)
        # Reused only after success: a broker expects the sequence of a refused batch again, and
        # after other errors, or a cancelled call, the transaction may be open.
        producer, self._producer = self._producer, None
        self._unsettled = True
        try:
            producer = producer or await self._start_producer(backoff)
            try:
                refused = await self._write(producer, offsets, rounds, backoff)
            except Fenced:
                await self._abort(producer)
                raise
            if refused is not None:
                await self._abort(producer)
                return refused
            failpoint("consumer.ending")
            await producer.end(commit=True, backoff=backoff)
        except (BatchUnknown, ProducerFenced) as error:
            raise Unknown(
                f"the commit of group {self._group} with copies is unknown: {error}"
            ) from None
        self._keep(producer)
        return None

    async def _abort(self, producer: Producer) -> None:
        # If this fails, the next producer aborts it.
        with contextlib.suppress(KafkaUnavailable, ProducerFenced):
            await producer.end(commit=False, backoff=self._backoff())
            self._unsettled = False

    async def _write(
        self,
        producer: Producer,
        offsets: Mapping[Partition, StoredOffset],
        rounds: Sequence[Mapping[Partition, Batch]],
        backoff: Backoff,
    ) -> RefusedBatch | None:
        """Write copies and offsets; return a batch that was refused.

        Raises:
            KafkaRefused: not because of the copies.
            BatchUnknown, ProducerFenced, Fenced
        """
        refused = await write_rounds(producer, rounds, backoff, f"group {self._group}")
        if refused is not None:
            return refused
        failpoint("consumer.copied")
        if not offsets:
            return None
        await producer.add_group(self._group, backoff)
        topics = _encoded(offsets)

        def make(*member: Any) -> PackedRequest:
            return producer.offset_commit(self._group, *member, topics)

        await self._store(make, backoff)
        return None

    async def close(self) -> None:
        """End a transaction whose result is unknown: the next owner waits for its offsets.

        Otherwise it ends when it times out.
        """
        if self._unsettled:
            with contextlib.suppress(KafkaUnavailable, TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._settle()

    async def _settle(self) -> None:
        """End the transaction whose result is unknown."""
        async with self._turn:
            if self._unsettled:
                self._keep(await self._start_producer(self._backoff()))

    def _keep(self, producer: Producer) -> None:
        self._producer, self._unsettled = producer, False

    async def _start_producer(self, backoff: Backoff) -> Producer:
        """Start a producer, which aborts or completes the transaction of the one before."""
        producer = Producer(self._client, _CHANNEL, self._transactional_id)
        try:
            await producer.start(backoff)
        except ProducerFenced as error:
            raise KafkaUnavailable(str(error)) from None
        return producer

    # --- requests ----------------------------------------------------------------------------

    async def _store(self, make: Callable[..., PackedRequest], backoff: Backoff) -> None:
        """Send offsets with the member's generation until they are stored.

        Args:
            make: makes the request of generation, member id and instance id.
        """
        while True:
            me = self._identity
            generation, member_id = me.generation, me.member_id
            request = make(generation, member_id, me.instance)
            answer = await ask_group(self._client, self._group, request, backoff)
            codes = error_codes(answer)
            if not codes:
                return
            code = min(codes)
            fenced = codes & MEMBER_FENCED
            if fenced:
                raise Fenced(
                    f"group {self._group} refused the commit of member {member_id!r}, generation "
                    f"{generation}: {describe(min(fenced))}"
                )
            if code == Code.OFFSET_METADATA_TOO_LARGE:
                raise InvariantBroken(
                    f"group {self._group}: the metadata of an offset is too large"
                )
            why = f"cannot commit offsets of group {self._group}: {describe(code)}"
            if codes & TRANSACTION_BROKEN:
                raise KafkaUnavailable(why)
            if not codes <= _AGAIN:
                raise KafkaRefused(code, why)
            if not await backoff.pause():
                raise KafkaUnavailable(why)

    def _backoff(self) -> Backoff:
        return Backoff(self._settings.write_timeout_s, self._settings.retry_backoff_s)


def _encoded(offsets: Mapping[Partition, StoredOffset]) -> list[tuple[str, list[Any]]]:
    entries = (
        (topic, (number, stored.offset, _NO_EPOCH, stored.metadata))
        for (topic, number), stored in offsets.items()
    )
    return list(by_topic(entries).items())


async def write_rounds(
    producer: Producer,
    rounds: Sequence[Mapping[Partition, Batch]],
    backoff: Backoff,
    writer: str,
) -> RefusedBatch | None:
    """Write batches in the open transaction of a producer; return one that was refused.

    Args:
        rounds: each writes at most one batch to a partition.
        writer: its name, for messages.

    Raises:
        KafkaRefused: not because of the records.
        BatchUnknown, ProducerFenced
    """
    for batches in rounds:
        try:
            await producer.add(list(batches), backoff)
            await producer.produce({at: one.body for at, one in batches.items()}, backoff)
        except BatchRefused as error:
            if error.code in TRANSACTION_BROKEN:
                raise Unknown(f"the transaction of {writer} ended: {error}") from None
            if error.code not in TOPIC_REFUSED | RECORDS_REFUSED:
                raise KafkaRefused(error.code, f"{writer} cannot write: {error}") from None
            return RefusedBatch(batches[error.partition], error)
    return None
