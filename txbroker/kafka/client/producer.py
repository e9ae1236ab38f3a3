"""An idempotent producer with exact outcomes: stored, refused, fenced, or unknown.

It has neither tasks nor queues, so it needs no flush and no close: drop it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from txbroker.core.records import Partition
from txbroker.errors import KafkaUnavailable, TxbrokerError
from txbroker.kafka.client.client import (
    TRANSACTION,
    Client,
    KafkaRefused,
    NotSent,
    Unanswered,
    coordinator_moved,
    is_retriable,
)
from txbroker.kafka.client.shared_writes import SharedWrites
from txbroker.kafka.protocol.batch import Body, encode_batch
from txbroker.kafka.protocol.codes import FENCED, LEADER_MOVED, RETRIABLE, Code, describe
from txbroker.kafka.protocol.encoder import Request
from txbroker.kafka.protocol.schemas import (
    AddOffsetsToTxnV0,
    AddPartitionsToTxnV0,
    DescribeTransactionsV0,
    api_versions,
)
from txbroker.kafka.protocol.transactions import (
    NO_PRODUCER,
    TXN_V1,
    PartitionResult,
    ProducerIdentity,
    by_topic,
    negotiate,
)
from txbroker.net.timers import Backoff

_SEQUENCE_MASK = (1 << 31) - 1
TOPIC_CREATION_S = 0.3
"""All brokers know a new topic within this time. A deleted one must not delay other topics."""
_MARKERS_S = 0.02
"""Time to write the markers after EndTxn. Brokers wait as long before they ask the coordinator
again (`add.partitions.to.txn.retry.backoff.ms`)."""
_COMPLETION_S = 0.001
"""Time between the last visible marker and the coordinator's own record of it."""
_LATE_S = 60.0
"""A coordinator that executes a request later has lost its session, and is no coordinator."""
_MAYBE_STORED = (Code.REQUEST_TIMED_OUT, Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND)
"""In addition, a leader deposed while it waits for followers answers that it is no leader, though
its successor may have the batch."""
_REQUEST_BYTES_MAX = 32 << 20  # brokers take 100 MiB; smaller requests block others for less time


class StoredBatch(NamedTuple):
    """Where a batch was stored; -1 if the broker did not return it."""

    base_offset: int
    timestamp_ms: int


class BatchRefused(TxbrokerError):
    """A broker refused a batch; the batch was certainly not stored.

    Attributes:
        partition: topic and partition of the batch.
        code: the broker's error code.
        message: the broker's reason, "" if it gave none.
        records: which records of the batch are at fault, as far as known.
    """

    def __init__(
        self, partition: Partition, code: int, message: str | None, records: Sequence[int] = ()
    ) -> None:
        topic, number = partition
        super().__init__(f"{topic}-{number}: {message or describe(code)}")
        self.partition = partition
        self.code = code
        self.message = message or ""
        self.records = records


class BatchUnknown(TxbrokerError):
    """A batch may or may not have been stored.

    Attributes:
        partition: topic and partition of the batch, or of the first of several.
    """

    def __init__(self, partition: Partition, message: str) -> None:
        super().__init__(message)
        self.partition = partition


class ProducerFenced(TxbrokerError):
    """A newer producer has taken the transactional id."""


class Producer:
    """A producer: idempotent, and transactional if it has a transactional id.

    Takes one call at a time.

    Args:
        transactional_id: None for a producer without transactions.
        shared: combines its writes with those of other producers, outside of transactions.
    """

    def __init__(
        self,
        client: Client,
        channel: str,
        transactional_id: str | None = None,
        shared: SharedWrites | None = None,
    ) -> None:
        self._client = client
        self._settings = client.settings
        self._channel = channel
        # Any: what needs a coordinator is called only with an id.
        self._transactional_id: Any = transactional_id
        self._shared = shared if transactional_id is None else None
        self._protocol = TXN_V1
        self.id = -1
        """The producer id, -1 before `start`."""
        self.epoch = -1
        """The epoch of the open or next transaction, -1 before `start`."""
        self.transaction_timeout_s = self._settings.transaction_timeout_s
        """How long a transaction may take; after `start` perhaps less, as the brokers allow."""
        self._sequences: dict[Partition, int] = {}
        self._added: set[Partition] = set()
        self._begun = False
        """The coordinator may know of a transaction that has not ended."""
        self._ended_s = float("-inf")
        self._visible_s = float("-inf")
        self.late_until_s = float("-inf")
        """Until when Kafka may execute a `start` that was not answered, and so fence this."""
        self.vouching_leader: dict[Partition, int] = {}
        """The broker that vouched for a partition: only it may receive the next batch."""

    @property
    def protocol(self) -> int:
        """The negotiated version of the transaction protocol."""
        return self._protocol.number

    @property
    def retries_unanswered(self) -> bool:
        """Whether a request of a transaction that was not answered may be sent again: in version 1
        of the protocol it could arrive during a later transaction, and change that."""
        return self._protocol.retries_unanswered

    # --- start -------------------------------------------------------------------------------

    async def start(self, backoff: Backoff) -> None:
        """Get a producer id; fence earlier producers with the same transactional id.

        Raises:
            ProducerFenced: another producer started at the same time.
            KafkaUnavailable: no success before the deadline.
        """
        await self._init_producer_id(backoff, NO_PRODUCER)

    async def known_id(self, backoff: Backoff) -> int:
        """Return the producer id that Kafka has for the transactional id, before `start`; -1: none,
        or it has forgotten it.

        Raises:
            KafkaUnavailable: no success before the deadline.
        """
        request = DescribeTransactionsV0([self._transactional_id])
        while True:
            try:
                (state,) = (await self._ask_coordinator(request)).transaction_states
            except KafkaUnavailable as error:
                if not is_retriable(error) or not await backoff.pause():
                    raise
                continue
            code, producer_id = state[0], int(state[5])
            if code == Code.NONE:
                return producer_id
            if code == Code.TRANSACTIONAL_ID_NOT_FOUND:
                return -1
            if code in (Code.COORDINATOR_NOT_AVAILABLE, Code.NOT_COORDINATOR):
                self._client.forget_coordinator(TRANSACTION, self._transactional_id)
            if code not in RETRIABLE or not await backoff.pause():
                raise KafkaRefused(code, f"cannot describe the transaction: {describe(code)}")

    async def _init_producer_id(self, backoff: Backoff, current: ProducerIdentity) -> None:
        while True:
            timeout_ms = round(self.transaction_timeout_s * 1000)
            try:
                if current == NO_PRODUCER:
                    await self._negotiate()
                request = self._protocol.init_producer_id(
                    self._transactional_id, timeout_ms, current
                )
                answer = await self._ask_coordinator(request)
            except (KafkaUnavailable, asyncio.CancelledError) as error:
                # A late one that names an epoch which is over is refused.
                names_epoch = current != NO_PRODUCER and self._protocol.retries_unanswered
                if isinstance(error, Unanswered | asyncio.CancelledError) and not names_epoch:
                    self.late_until_s = asyncio.get_running_loop().time() + _LATE_S
                if isinstance(error, asyncio.CancelledError) or not is_retriable(error):
                    raise
                # A retry is safe even if unanswered: it only raises the epoch once more.
                if not await backoff.pause():
                    raise
                continue
            if answer.error_code in FENCED:
                raise ProducerFenced
            if answer.error_code == Code.NONE:
                self._adopt((answer.producer_id, answer.producer_epoch))
                return
            least_s = 2 * self._settings.request_timeout_s
            if answer.error_code == Code.INVALID_TRANSACTION_TIMEOUT:
                # The brokers' `transaction.max.timeout.ms`, which a client may not read, is lower.
                if self.transaction_timeout_s > least_s:
                    self.transaction_timeout_s = max(least_s, self.transaction_timeout_s / 2)
                    continue
                raise KafkaRefused(
                    answer.error_code,
                    f"the brokers allow no transaction of {self.transaction_timeout_s:g} s: raise "
                    "their transaction.max.timeout.ms",
                )
            if answer.error_code not in RETRIABLE or not await backoff.pause():
                raise KafkaRefused(
                    answer.error_code, f"cannot get a producer id: {describe(answer.error_code)}"
                )

    async def _negotiate(self) -> None:
        if self._transactional_id is None or self._settings.transactions == TXN_V1.number:
            return
        try:
            answer = await self._ask_coordinator(api_versions())
        except KafkaRefused as error:
            if error.code != Code.UNSUPPORTED_VERSION:
                raise
            self._protocol = TXN_V1  # Kafka before features existed
        else:
            self._protocol = negotiate(answer)

    async def _ask_coordinator(self, request: Any) -> Any:
        """Ask the transaction coordinator, or any broker without a transactional id."""
        if self._transactional_id is None:
            return await self._client.ask_any(request, self._channel)
        try:
            node = await self._client.coordinator(TRANSACTION, self._transactional_id)
            answer = await self._client.ask(node, request, f"{self._channel}/coordinator")
        except KafkaUnavailable as error:
            if coordinator_moved(error):
                self._client.forget_coordinator(TRANSACTION, self._transactional_id)
            raise
        code = getattr(answer, "error_code", None)
        if code in (Code.COORDINATOR_NOT_AVAILABLE, Code.NOT_COORDINATOR):
            self._client.forget_coordinator(TRANSACTION, self._transactional_id)
        return answer

    # --- produce -----------------------------------------------------------------------------

    async def produce(
        self, batches: Mapping[Partition, Body], backoff: Backoff
    ) -> dict[Partition, StoredBatch]:
        """Write one batch to each partition, concurrently; return where they were stored.

        Retries send the same bytes, which brokers deduplicate.

        Raises:
            BatchRefused: a batch was refused; others of the call may have been stored.
            BatchUnknown: no success before the deadline.
            NotSent: a partition's leader is not its `vouching_leader`.
            ProducerFenced
        """
        self._begun = True
        waiting = {partition: self._encode(partition, body) for partition, body in batches.items()}
        maybe_stored: set[Partition] = set()
        stored: dict[Partition, StoredBatch] = {}
        reason = ""
        creation_deadline_s = backoff.left_s - TOPIC_CREATION_S
        while waiting:
            for result in await self._send(waiting):
                partition, code, where, message, records = result
                if code in (Code.NONE, Code.DUPLICATE_SEQUENCE):
                    stored[partition] = where
                    del waiting[partition]
                    self.vouching_leader.pop(partition, None)
                    continue
                reason = message or describe(code)
                if code in FENCED and self._transactional_id is not None:
                    raise ProducerFenced
                if code == Code.UNKNOWN:
                    maybe_stored.add(partition)
                elif code not in RETRIABLE or (
                    # In version 1 AddPartitionsToTxn has already found the topic.
                    code == Code.UNKNOWN_TOPIC_OR_PARTITION
                    and not self._protocol.explicit_add_partitions
                    and backoff.left_s < creation_deadline_s
                ):
                    if partition in maybe_stored:
                        raise BatchUnknown(partition, f"{partition[0]}-{partition[1]}: {reason}")
                    raise BatchRefused(partition, code, message, records)
                elif code in _MAYBE_STORED or (
                    self._transactional_id is None and code in LEADER_MOVED
                ):
                    # Not in a transaction: it is aborted, whatever a deposed leader stored.
                    maybe_stored.add(partition)
            if waiting and not await backoff.pause():
                names = ", ".join(f"{topic}-{number}" for topic, number in waiting)
                raise BatchUnknown(next(iter(waiting)), f"{names}: {reason}")
        return stored

    def _encode(self, partition: Partition, body: Body) -> bytes:
        sequence = self._sequences.get(partition, 0)
        self._sequences[partition] = (sequence + body.count) & _SEQUENCE_MASK
        return encode_batch(
            body,
            producer_id=self.id,
            epoch=self.epoch,
            sequence=sequence,
            transactional=self._transactional_id is not None,
        )

    async def _send(self, batches: Mapping[Partition, bytes]) -> list[_Result]:
        by_leader: dict[int, list[Partition]] = {}
        results: list[_Result] = []
        for partition in batches:
            try:
                leader = await self._client.leader(*partition)
            except KafkaRefused as error:
                results.append(_Result(partition, error.code, _NOWHERE, None))
            except KafkaUnavailable as error:
                results.append(_Result(partition, Code.NETWORK_EXCEPTION, _NOWHERE, str(error)))
            else:
                self._check_vouching_leader(partition, leader)
                by_leader.setdefault(leader, []).append(partition)
        requests = [
            (leader, {partition: batches[partition] for partition in part})
            for leader, partitions in by_leader.items()
            for part in _by_request(partitions, batches)
        ]
        if len(requests) == 1:
            # The usual case, for which a task would be overhead.
            return results + await self._send_to(*requests[0])
        for answers in await asyncio.gather(*(self._send_to(*request) for request in requests)):
            results.extend(answers)
        return results

    def _check_vouching_leader(self, partition: Partition, leader: int) -> None:
        if self.vouching_leader.get(partition, leader) != leader:
            raise NotSent(
                "the leader of {}-{} has changed since it vouched for it".format(*partition)
            )

    async def _send_to(self, leader: int, batches: Mapping[Partition, bytes]) -> list[_Result]:
        try:
            answers = await self._write(leader, batches)
        except (NotSent, Unanswered) as error:
            code = Code.UNKNOWN if isinstance(error, Unanswered) else Code.NETWORK_EXCEPTION
            for partition in batches:
                self._client.forget_leader(*partition)
            return [_Result(partition, code, _NOWHERE, str(error)) for partition in batches]
        results = []
        for topic, number, result, base_offset, timestamp_ms, message, records in answers:
            if result in LEADER_MOVED:
                self._client.forget_leader(topic, number)
            where = StoredBatch(base_offset, timestamp_ms)
            results.append(_Result((topic, number), result, where, message, records))
        return results

    async def _write(
        self, leader: int, batches: Mapping[Partition, bytes]
    ) -> Iterable[PartitionResult]:
        if self._shared is not None and len(batches) == 1:
            ((partition, batch),) = batches.items()
            return [await self._shared.write(leader, partition, batch, self._channel)]
        topics = by_topic((topic, (number, batch)) for (topic, number), batch in batches.items())
        timeout_ms = round(self._settings.request_timeout_s * 1000)
        request = self._protocol.produce(self._transactional_id, timeout_ms, list(topics.items()))
        return self._protocol.parse_produce_response(
            await self._client.ask(leader, request, self._channel)
        )

    # --- transactions ------------------------------------------------------------------------

    async def add(self, partitions: Sequence[Partition], backoff: Backoff) -> None:
        """Add partitions to the transaction, beginning it with the first.

        In version 2 of the protocol brokers add them on `produce`. This adds them explicitly only
        if the coordinator could refuse a broker, which would then wait long before its retry: it
        takes one change at a time, and none while it writes the previous transaction's markers.

        Raises:
            BatchRefused: a partition cannot be added.
            NotSent: a partition's leader is not its `vouching_leader`.
            ProducerFenced
            Unanswered: this producer must not be used again. Not in version 2, where a late
                request carries an epoch that is over.
            KafkaUnavailable: no partition was added.
        """
        # Checked first: an abort writes markers to the true leader, whatever was produced where.
        for partition in [p for p in partitions if p in self.vouching_leader]:
            self._check_vouching_leader(partition, await self._client.leader(*partition))
        await self.replace_exhausted(backoff)
        if (
            not self._protocol.explicit_add_partitions
            and self._previous_completed
            and await self._have_one_leader(partitions)
        ):
            return
        new = [partition for partition in partitions if partition not in self._added]
        if not new:
            return
        topics = list(by_topic(new).items())
        request = AddPartitionsToTxnV0(self._transactional_id, self.id, self.epoch, topics)
        creation_deadline_s = backoff.left_s - TOPIC_CREATION_S
        while True:
            code, partition = await self._try_add(request, new[0])
            if code == Code.NONE:
                self._added.update(new)
                self._begun = True
                return
            if code in FENCED:
                raise ProducerFenced
            missing = code == Code.UNKNOWN_TOPIC_OR_PARTITION
            if missing and backoff.left_s < creation_deadline_s:
                raise BatchRefused(partition, code, None)
            if code in RETRIABLE and await backoff.pause():
                continue
            raise BatchRefused(partition, code, None)

    async def replace_exhausted(self, backoff: Backoff) -> None:
        """Take a new producer id, or epoch, for the next transaction if the epochs are used up.

        Raises:
            ProducerFenced
            KafkaUnavailable: this producer must not be used again.
        """
        while self.epoch >= self._protocol.epoch_limit:
            await self._init_producer_id(backoff, (self.id, self.epoch))

    async def add_group(self, group: str, backoff: Backoff) -> None:
        """Add a group's offsets to the transaction; send them with `offset_commit`.

        Raises:
            KafkaRefused: the group cannot be added.
            ProducerFenced
            Unanswered: this producer must not be used again.
        """
        self._begun = True
        if not self._protocol.explicit_add_partitions:
            return
        request = AddOffsetsToTxnV0(self._transactional_id, self.id, self.epoch, group)
        while True:
            try:
                code = (await self._ask_coordinator(request)).error_code
            except NotSent:
                code = Code.COORDINATOR_NOT_AVAILABLE
            if code == Code.NONE:
                return
            if code in FENCED:
                raise ProducerFenced
            if code not in RETRIABLE or not await backoff.pause():
                raise KafkaRefused(code, f"cannot add group {group}: {describe(code)}")

    def offset_commit(self, group: str, *fields: Any) -> Request:
        """Return the request that stores a group's offsets in the transaction; its coordinator
        takes it.

        Args:
            fields: generation, member id, instance id, and topics, as in `TxnOffsetCommitV3`.
        """
        producer = self.id, self.epoch
        return self._protocol.offset_commit(self._transactional_id, group, *producer, *fields)

    @property
    def _previous_completed(self) -> bool:
        """Whether the coordinator has presumably completed the previous transaction."""
        now_s = asyncio.get_running_loop().time()
        if self._visible_s > self._ended_s:
            return now_s - self._visible_s > _COMPLETION_S
        return now_s - self._ended_s > _MARKERS_S

    def note_visible(self) -> None:
        """Note that all its writes are visible: the markers are written."""
        self._visible_s = asyncio.get_running_loop().time()

    async def _have_one_leader(self, partitions: Sequence[Partition]) -> bool:
        """Return whether one broker leads all partitions, according to the cache."""
        try:
            leaders = {await self._client.leader(*partition) for partition in partitions}
        except KafkaUnavailable:
            return False
        return len(leaders) == 1

    async def _try_add(self, request: Any, first: Partition) -> tuple[int, Partition]:
        try:
            answer = await self._ask_coordinator(request)
        except NotSent:
            return Code.COORDINATOR_NOT_AVAILABLE, first
        except Unanswered:
            self._begun = True
            if not self._protocol.retries_unanswered:
                raise
            return Code.COORDINATOR_NOT_AVAILABLE, first
        except KafkaRefused as error:
            return error.code, first
        worst: tuple[int, Partition] = (Code.NONE, first)
        for topic, partitions in answer.errors:
            for number, code in partitions:
                if (
                    code in (Code.COORDINATOR_NOT_AVAILABLE, Code.NOT_COORDINATOR)
                    and self._transactional_id
                ):
                    self._client.forget_coordinator(TRANSACTION, self._transactional_id)
                if code not in (Code.NONE, Code.OPERATION_NOT_ATTEMPTED):
                    worst = (code, (topic, number))
        return worst

    async def end(self, *, commit: bool, backoff: Backoff) -> None:
        """Commit or abort the open transaction. None is open if its first partition was refused:
        then there is nothing to abort, and Kafka would refuse to.

        In version 1 of the protocol an unanswered request may be executed at any later time, even
        during this producer's next transaction, which it would end. In version 2 it carries the
        epoch of this transaction, so it is retried until answered.

        Raises:
            ProducerFenced
            Unanswered: this producer must not be used again.
            KafkaUnavailable: the transaction is still open, or unknown to the coordinator; this
                producer must not be used again.
        """
        if not self._begun and not commit:
            return
        request = self._protocol.end_txn(self._transactional_id, self.id, self.epoch, commit=commit)
        while True:
            try:
                answer = await self._ask_coordinator(request)
            except Unanswered:
                if not self._protocol.retries_unanswered or not await backoff.pause():
                    raise
                continue
            except KafkaUnavailable as error:
                if not is_retriable(error) or not await backoff.pause():
                    raise
                continue
            if answer.error_code == Code.NONE:
                self._ended_s = asyncio.get_running_loop().time()
                self._adopt(self._protocol.next_identity(answer))
                return
            if answer.error_code in FENCED:
                raise ProducerFenced
            if answer.error_code not in RETRIABLE or not await backoff.pause():
                raise KafkaRefused(answer.error_code)

    async def abort(self, backoff: Backoff) -> None:
        """Abort the open transaction, and take another epoch: brokers expect the sequences of
        refused batches again, and a marker of the abort that comes twice and late aborts what
        follows in the same epoch, but in version 2 since Kafka 4.2 (KIP-1228). If its first
        partition was refused there is none, and nothing is renewed: only the answer to an abort
        shows that no other producer has taken the transactional id.

        Raises:
            ProducerFenced
            KafkaUnavailable: this producer must not be used again.
        """
        if not self._begun:
            return
        await self.end(commit=False, backoff=backoff)
        await self._init_producer_id(backoff, (self.id, self.epoch))

    def _adopt(self, identity: ProducerIdentity | None) -> None:
        """No transaction is open. Use a new producer id or epoch, which begins new sequences."""
        self._added.clear()
        self._begun = False
        if identity is not None:
            self.id, self.epoch = identity
            self._sequences.clear()


class _Result(NamedTuple):
    partition: Partition
    code: int
    where: StoredBatch
    message: str | None
    records: Sequence[int] = ()


_NOWHERE = StoredBatch(-1, -1)


def _by_request(
    partitions: Sequence[Partition], batches: Mapping[Partition, bytes]
) -> list[list[Partition]]:
    """Split the partitions of one leader into requests of limited size."""
    requests: list[list[Partition]] = [[]]
    size = 0
    for partition in partitions:
        more = len(batches[partition])
        if requests[-1] and size + more > _REQUEST_BYTES_MAX:
            requests.append([])
            size = 0
        requests[-1].append(partition)
        size += more
    return requests
