"""An idempotent producer that says what it knows: stored, refused, fenced, or unknown.

It holds no task and no queue, so there is nothing to stop and nothing to flush: a producer that
is not wanted any more is simply dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aiokafka.protocol.transaction import AddPartitionsToTxnRequest

from txbroker.errors import KafkaUnavailable, TxbrokerError
from txbroker.kafka.client.client import (
    Client,
    KafkaRefused,
    NotSent,
    Unanswered,
    coordinator_moved,
    may_pass,
)
from txbroker.kafka.client.shared_writes import SharedWrites
from txbroker.kafka.protocol.batch import Body, encode_batch
from txbroker.kafka.protocol.codes import FENCED, LEADER_MOVED, RETRIABLE, Code, describe
from txbroker.kafka.protocol.schemas import FeaturesRequest
from txbroker.kafka.protocol.transactions import (
    NO_PRODUCER,
    TXN_V1,
    Partition,
    PartitionResult,
    ProducerIdentity,
    negotiate,
)
from txbroker.net.backoff import Backoff

_SEQUENCE_MASK = (1 << 31) - 1
# A topic made just now is known everywhere within this; one that was deleted never is, and what
# is for other topics must not wait for it.
_MISSING_S = 0.3
_SETTLED_S = 0.02
"""Behind an end for so long its markers may be on their way. So long brokers wait, too, before they
ask the coordinator again (`add.partitions.to.txn.retry.backoff.ms`)."""
_SEEN_S = 0.001
"""Behind readers for so long the coordinator may still note that all markers are written."""
_STORED_PERHAPS = (Code.REQUEST_TIMED_OUT, Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND)
"""Besides these, a leader that is deposed while it waits for its followers says that it leads no
more, and its batch may be with the next one."""
_REQUEST_BYTES_MAX = 32 << 20  # brokers take 100 MiB; less keeps one request from being long


class Stored(NamedTuple):
    """Where a batch was stored; -1 where the broker did not say."""

    base_offset: int
    timestamp_ms: int


class BatchRefused(TxbrokerError):
    """A broker refused a batch; it was certainly not stored.

    Attributes:
        partition: topic and partition of the batch.
        code: the broker's error code.
    """

    def __init__(self, partition: Partition, code: int, message: str | None) -> None:
        topic, number = partition
        super().__init__(f"{topic}-{number}: {message or describe(code)}")
        self.partition = partition
        self.code = code


class BatchUnknown(TxbrokerError):
    """A batch may or may not have been stored.

    Attributes:
        partition: topic and partition of the batch, of the first one if there are several.
    """

    def __init__(self, partition: Partition, message: str) -> None:
        super().__init__(message)
        self.partition = partition


class ProducerFenced(TxbrokerError):
    """A newer producer has taken the transactional id."""


class Producer:
    """One producer id: idempotent, and transactional where it has a transactional id.

    Calls come one at a time; `lane` names its connections. With `shared`, what it writes to one
    partition outside of transactions goes along with what others write.
    """

    def __init__(
        self,
        client: Client,
        lane: str,
        transactional_id: str | None = None,
        shared: SharedWrites | None = None,
    ) -> None:
        self._client = client
        self._settings = client.settings
        self._lane = lane
        # Any, because the library's types do not know that Kafka takes null.
        self._id: Any = transactional_id
        self._shared = shared if transactional_id is None else None
        self._protocol = TXN_V1
        self._producer_id = -1
        self._epoch = -1
        self._sequences: dict[Partition, int] = {}
        self._added: set[Partition] = set()
        self._ended_s = float("-inf")
        self._seen_s = float("-inf")
        self.vouching_leader: dict[Partition, int] = {}
        """The broker that told of a partition what holds only if it takes the next batch there."""

    @property
    def started(self) -> bool:
        """Whether it has a producer id."""
        return self._producer_id >= 0

    @property
    def id(self) -> int:
        """Its producer id, -1 before it has one."""
        return self._producer_id

    @property
    def epoch(self) -> int:
        """The epoch of its open or next transaction, -1 before it has one."""
        return self._epoch

    @property
    def protocol(self) -> int:
        """The version of Kafka's transaction protocol that it speaks."""
        return self._protocol.number

    # --- beginning ---------------------------------------------------------------------------

    async def start(self, backoff: Backoff) -> None:
        """Get a producer id; with a transactional id, fence every earlier producer with it.

        Raises:
            ProducerFenced: another producer began at the same time.
            KafkaUnavailable: no answer, or none that helps, until backoff is over.
        """
        await self._begin(backoff, NO_PRODUCER)

    async def _begin(self, backoff: Backoff, current: ProducerIdentity) -> None:
        timeout_ms = round(self._settings.transaction_timeout_s * 1000)
        while True:
            try:
                if current == NO_PRODUCER:
                    await self._choose()
                request = self._protocol.begin(self._id, timeout_ms, current)
                answer = await self._ask_coordinator(request)
            except KafkaUnavailable as error:
                # Asking again after silence is safe: it only raises the epoch once more.
                if not may_pass(error) or not await backoff.pause():
                    raise
                continue
            if answer.error_code in FENCED:
                raise ProducerFenced
            if answer.error_code == Code.NONE:
                self._go_on((answer.producer_id, answer.producer_epoch))
                return
            if answer.error_code not in RETRIABLE or not await backoff.pause():
                raise KafkaRefused(
                    answer.error_code, f"no producer id: {describe(answer.error_code)}"
                )

    async def _choose(self) -> None:
        """Learn which version of the transaction protocol this Kafka takes now."""
        if self._id is None or self._settings.transactions == TXN_V1.number:
            return
        try:
            answer = await self._ask_coordinator(FeaturesRequest())
        except KafkaRefused as error:
            if error.code != Code.UNSUPPORTED_VERSION:
                raise
            self._protocol = TXN_V1  # so old that it has no features
        else:
            self._protocol = negotiate(answer)

    async def _ask_coordinator(self, request: Any) -> Any:
        """Ask the transaction coordinator; without a transactional id, any broker."""
        if self._id is None:
            return await self._client.ask_any(request, self._lane)
        try:
            node = await self._client.transaction_coordinator(self._id)
            answer = await self._client.ask(node, request, f"{self._lane}/coordinator")
        except KafkaUnavailable as error:
            if coordinator_moved(error):
                self._client.forget_transaction_coordinator(self._id)
            raise
        code = getattr(answer, "error_code", None)
        if code in (Code.COORDINATOR_NOT_AVAILABLE, Code.NOT_COORDINATOR):
            self._client.forget_transaction_coordinator(self._id)
        return answer

    # --- writing -----------------------------------------------------------------------------

    async def produce(
        self, batches: Mapping[Partition, Body], backoff: Backoff
    ) -> dict[Partition, Stored]:
        """Write one batch to each partition, all at once; return where they went.

        The same bytes are sent again after an error that can pass; brokers recognise them.

        Raises:
            BatchRefused: a batch was refused; others of the same call may have been stored.
            BatchUnknown: backoff is over.
            NotSent: another broker leads a partition than that in `vouching_leader`.
            ProducerFenced
        """
        waiting = {partition: self._encode(partition, body) for partition, body in batches.items()}
        unsure: set[Partition] = set()
        stored: dict[Partition, Stored] = {}
        reason = ""
        missing_until_s = backoff.left_s - _MISSING_S
        while waiting:
            for result in await self._send(waiting):
                partition, code, where, message = result
                if code in (Code.NONE, Code.DUPLICATE_SEQUENCE):
                    stored[partition] = where
                    del waiting[partition]
                    self.vouching_leader.pop(partition, None)
                    continue
                reason = message or describe(code)
                if code in FENCED and self._id is not None:
                    raise ProducerFenced
                if code == Code.UNKNOWN:
                    unsure.add(partition)
                elif code not in RETRIABLE or (
                    # Where partitions are put into the transaction beforehand, that says so.
                    code == Code.UNKNOWN_TOPIC_OR_PARTITION
                    and not self._protocol.explicit_add_partitions
                    and backoff.left_s < missing_until_s
                ):
                    if partition in unsure:
                        raise BatchUnknown(partition, f"{partition[0]}-{partition[1]}: {reason}")
                    raise BatchRefused(partition, code, message)
                elif code in _STORED_PERHAPS or (self._id is None and code in LEADER_MOVED):
                    # A turn that is refused is aborted, whatever a deposed leader has stored.
                    unsure.add(partition)
            if waiting and not await backoff.pause():
                names = ", ".join(f"{topic}-{number}" for topic, number in waiting)
                raise BatchUnknown(next(iter(waiting)), f"{names}: {reason}")
        return stored

    def _encode(self, partition: Partition, body: Body) -> bytes:
        sequence = self._sequences.get(partition, 0)
        self._sequences[partition] = (sequence + body.count) & _SEQUENCE_MASK
        return encode_batch(
            body,
            producer_id=self._producer_id,
            epoch=self._epoch,
            sequence=sequence,
            transactional=self._id is not None,
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
            # As every append: no task has to be made for it.
            return results + await self._send_to(*requests[0])
        for answers in await asyncio.gather(*(self._send_to(*request) for request in requests)):
            results.extend(answers)
        return results

    def _check_vouching_leader(self, partition: Partition, leader: int) -> None:
        if self.vouching_leader.get(partition, leader) != leader:
            raise NotSent(f"{partition[0]}-{partition[1]} is led by another broker now")

    async def _send_to(self, leader: int, batches: Mapping[Partition, bytes]) -> list[_Result]:
        try:
            answers = await self._write(leader, batches)
        except (NotSent, Unanswered) as error:
            code = Code.UNKNOWN if isinstance(error, Unanswered) else Code.NETWORK_EXCEPTION
            for partition in batches:
                self._client.forget_leader(*partition)
            return [_Result(partition, code, _NOWHERE, str(error)) for partition in batches]
        results = []
        for each in answers:
            if each.code in LEADER_MOVED:
                self._client.forget_leader(each.topic, each.partition)
            where = Stored(each.base_offset, each.timestamp_ms)
            results.append(_Result((each.topic, each.partition), each.code, where, each.message))
        return results

    async def _write(
        self, leader: int, batches: Mapping[Partition, bytes]
    ) -> Iterable[PartitionResult]:
        if self._shared is not None and len(batches) == 1:
            ((partition, batch),) = batches.items()
            return [await self._shared.write(leader, partition, batch, self._lane)]
        topics: dict[str, list[tuple[int, bytes]]] = {}
        for (topic, number), batch in batches.items():
            topics.setdefault(topic, []).append((number, batch))
        timeout_ms = round(self._settings.request_timeout_s * 1000)
        request = self._protocol.write(self._id, timeout_ms, list(topics.items()))
        return self._protocol.parse_produce_response(
            await self._client.ask(leader, request, self._lane)
        )

    # --- transactions ------------------------------------------------------------------------

    async def add(self, partitions: Sequence[Partition], backoff: Backoff) -> None:
        """Put partitions into the open transaction, beginning it with the first.

        Under the second version of the protocol `produce` does it, through the brokers, unless the
        coordinator may turn one of them away: they wait long before they ask again. It takes one
        change at a time, so that several brokers are in each other's way, and none while it still
        writes the markers of the transaction before.

        Raises:
            BatchRefused: a partition cannot be added.
            NotSent: another broker leads a partition than that in `vouching_leader`.
            ProducerFenced
            Unanswered: the coordinator's answer never came; this producer must not be used again.
                Not under the second version: what is late names an epoch that is over.
            KafkaUnavailable: nothing was added.
        """
        # An abort of what is in the transaction reaches the true leader, whatever was written.
        for partition in [each for each in partitions if each in self.vouching_leader]:
            self._check_vouching_leader(partition, await self._client.leader(*partition))
        while self._epoch >= self._protocol.epoch_limit:
            await self._begin(backoff, (self._producer_id, self._epoch))
        if (
            not self._protocol.explicit_add_partitions
            and self._settled
            and await self._led_by_one(partitions)
        ):
            return
        new = [partition for partition in partitions if partition not in self._added]
        topics: dict[str, list[int]] = {}
        for topic, number in new:
            topics.setdefault(topic, []).append(number)
        if not topics:
            return
        request = AddPartitionsToTxnRequest(
            self._id, self._producer_id, self._epoch, list(topics.items())
        )
        missing_until_s = backoff.left_s - _MISSING_S
        while True:
            code, partition = await self._add_once(request, new[0])
            if code == Code.NONE:
                self._added.update(new)
                return
            if code in FENCED:
                raise ProducerFenced
            missing = code == Code.UNKNOWN_TOPIC_OR_PARTITION
            if missing and backoff.left_s < missing_until_s:
                raise BatchRefused(partition, code, None)
            if code in RETRIABLE and await backoff.pause():
                continue
            raise BatchRefused(partition, code, None)

    @property
    def _settled(self) -> bool:
        """Whether the transaction before is over for the coordinator, as far as one can tell."""
        now_s = asyncio.get_running_loop().time()
        if self._seen_s > self._ended_s:
            return now_s - self._seen_s > _SEEN_S
        return now_s - self._ended_s > _SETTLED_S

    def seen(self) -> None:
        """Readers have come past all that it has written: the markers are there."""
        self._seen_s = asyncio.get_running_loop().time()

    async def _led_by_one(self, partitions: Sequence[Partition]) -> bool:
        """Say whether one broker leads them all, as far as is known; False where one has none."""
        try:
            leaders = {await self._client.leader(*partition) for partition in partitions}
        except KafkaUnavailable:
            return False
        return len(leaders) == 1

    async def _add_once(self, request: Any, first: Partition) -> tuple[int, Partition]:
        try:
            answer = await self._ask_coordinator(request)
        except NotSent:
            return Code.COORDINATOR_NOT_AVAILABLE, first
        except Unanswered:
            if not self._protocol.retries_unanswered:
                raise
            return Code.COORDINATOR_NOT_AVAILABLE, first
        except KafkaRefused as error:
            return error.code, first
        worst: tuple[int, Partition] = (Code.NONE, first)
        for topic, partitions in answer.errors:
            for number, code in partitions:
                if code in (Code.COORDINATOR_NOT_AVAILABLE, Code.NOT_COORDINATOR) and self._id:
                    self._client.forget_transaction_coordinator(self._id)
                if code not in (Code.NONE, Code.OPERATION_NOT_ATTEMPTED):
                    worst = (code, (topic, number))
        return worst

    async def end(self, *, commit: bool, backoff: Backoff) -> None:
        """Commit or abort the open transaction.

        Only an answer counts. Without one, under the first version of the protocol, the request
        may be carried out at any later time, even in the middle of this producer's next
        transaction, which it would then end. Under the second it names the epoch of this
        transaction alone, so it is asked for again until there is an answer.

        Raises:
            ProducerFenced
            Unanswered: this producer must not be used again.
            KafkaUnavailable: the transaction is still open, or the coordinator says that it is
                not; this producer must not be used again.
        """
        request = self._protocol.end(self._id, self._producer_id, self._epoch, commit=commit)
        while True:
            try:
                answer = await self._ask_coordinator(request)
            except Unanswered:
                if not self._protocol.retries_unanswered or not await backoff.pause():
                    raise
                continue
            except KafkaUnavailable as error:
                if not may_pass(error) or not await backoff.pause():
                    raise
                continue
            if answer.error_code == Code.NONE:
                self._added.clear()
                self._ended_s = asyncio.get_running_loop().time()
                self._go_on(self._protocol.next(answer))
                return
            if answer.error_code in FENCED:
                raise ProducerFenced
            if answer.error_code not in RETRIABLE or not await backoff.pause():
                raise KafkaRefused(answer.error_code)

    def _go_on(self, next_one: ProducerIdentity | None) -> None:
        """Take the producer id and epoch of the next transaction; sequences begin anew."""
        if next_one is not None:
            self._producer_id, self._epoch = next_one
            self._sequences.clear()


class _Result(NamedTuple):
    partition: Partition
    code: int
    where: Stored
    message: str | None


_NOWHERE = Stored(-1, -1)


def _by_request(
    partitions: Sequence[Partition], batches: Mapping[Partition, bytes]
) -> list[list[Partition]]:
    """Share partitions of one leader out to requests that are not too large."""
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
