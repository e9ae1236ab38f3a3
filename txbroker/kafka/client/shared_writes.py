"""Batches of several partitions in one request.

A request costs the proxy and a broker the same whatever is in it, and under load every half
partition appends to two logs all the time. What is ready in one round of the event loop for
partitions of one broker leaves in one request; while as many of these are under way as pay, what
comes waits a moment for company. With nobody else about, a batch leaves at once.

A broker answers a request when its slowest partition is done. So a partition that was slow or in
trouble writes over a connection of its own until one of its writes was quick again, and holds
nobody back meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct

from txbroker.errors import TxbrokerError
from txbroker.kafka.client.client import Client, NotSent, Unanswered
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.packed import ProduceResponse
from txbroker.kafka.protocol.transactions import TXN_V1, Partition, PartitionResult

AT_ONCE = 2
"""Requests under way to one broker from which on batches wait for company."""
WAIT_MAX_S = 0.02
"""So long a batch waits for company at most, seconds: then one more request is under way."""
REQUEST_BYTES_MAX = 1 << 20
"""Bytes of batches in one shared request. A larger batch goes alone: it is worth a request."""
SLOW_S = 1.0
"""A partition whose write took longer, seconds, writes alone the next time."""

_CLOSED = "the door to Kafka is closed"


class _Batch(Struct, eq=False):
    """What is to be written to one partition, and who waits for the answer."""

    partition: Partition
    encoded: bytes
    answer: asyncio.Future[PartitionResult]


class _Request(Struct, eq=False):
    """Batches that leave together."""

    node: int
    lane: str
    batches: Sequence[_Batch]
    over: Callable[[], None] = lambda: None
    """Told when it is known what became of it."""


class _Broker:
    """What waits for one broker, in order, and the connections that are busy."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.waiting: dict[_Batch, None] = {}
        self.lanes: set[int] = set()
        self.beginning = False
        """Whether a request begins in the next round of the loop."""
        self.alarm: asyncio.TimerHandle | None = None


class SharedWrites:
    """Writes batches of idempotent producers without a transactional id: those of several
    partitions in one request. One for each client. Each partition writes one batch at a time.

    Args:
        client: whose connections are used.
        at_once: requests under way to one broker from which on batches wait.
        wait_max_s: how long one waits at most, seconds.
    """

    def __init__(
        self, client: Client, at_once: int = AT_ONCE, wait_max_s: float = WAIT_MAX_S
    ) -> None:
        self._client = client
        self._at_once = at_once
        self._wait_max_s = wait_max_s
        self._brokers: dict[int, _Broker] = {}
        self._apart: set[Partition] = set()
        self._under_way: set[_Request] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._closed = False

    async def write(
        self, leader: int, partition: Partition, encoded: bytes, own_lane: str
    ) -> PartitionResult:
        """Write one batch and return what the broker says of it.

        Whoever gives up takes the batch along, if it is not on its way yet.

        Args:
            leader: the broker that leads the partition.
            partition: topic and number.
            encoded: the batch.
            own_lane: the connection over which the partition writes when it writes alone.

        Raises:
            NotSent, Unanswered: about the whole request, as from `Client.ask`.
            KafkaRefused: the broker does not know this request in a version that we do.
        """
        if self._closed:
            raise NotSent(_CLOSED)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        alone = partition in self._apart or len(encoded) > REQUEST_BYTES_MAX
        # Until it is known that this one came through, and in good time.
        self._apart.add(partition)
        try:
            batch = _Batch(partition, encoded, loop.create_future())
            writing = self._write(leader, batch, own_lane if alone else "")
            del batch  # or the error of a failed write would be a cycle, with its bytes
            answered = await writing
        except NotSent:
            # It has not slowed anybody; connections that are up may take it.
            self._apart.discard(partition)
            raise
        if answered.code == Code.NONE and loop.time() - began_s < SLOW_S:
            self._apart.discard(partition)
        return answered

    async def close(self) -> None:
        """Give up what waits and what is under way."""
        self._closed = True
        for request in self._under_way:
            _fail(request.batches, Unanswered(_CLOSED))
        self._under_way.clear()
        tasks = list(self._connecting)
        for task in tasks:
            task.cancel()
        for broker in self._brokers.values():
            _quiet(broker)
            _fail(broker.waiting, NotSent(_CLOSED))
            broker.waiting.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, leader: int, batch: _Batch, own_lane: str) -> PartitionResult:
        """Write one batch: over a lane of its own, or "" with what others write."""
        broker = self._brokers.get(leader)
        if broker is None:
            broker = self._brokers[leader] = _Broker(leader)
        try:
            if own_lane:
                await self._client.connect(leader, own_lane)
                self._leave(_Request(leader, own_lane, [batch]))
            else:
                broker.waiting[batch] = None
                self._go_on(broker)
            return await batch.answer
        finally:
            broker.waiting.pop(batch, None)
            if batch.answer.done() and not batch.answer.cancelled():
                batch.answer.exception()  # looked at, also where a cancellation came between
            # Its error holds this frame: without this each failed write is a cycle, with its bytes.
            del batch

    # --- requests ----------------------------------------------------------------------------

    def _go_on(self, broker: _Broker) -> None:
        """Let a request take what waits, now or in a moment."""
        if not broker.waiting or broker.beginning:
            return
        if len(broker.lanes) < self._at_once:
            self._begin(broker)
        elif broker.alarm is None:
            loop = asyncio.get_running_loop()
            broker.alarm = loop.call_later(self._wait_max_s, self._waited, broker)

    def _waited(self, broker: _Broker) -> None:
        """Those under way do not come through: wait no longer for them."""
        broker.alarm = None
        if broker.waiting and not broker.beginning:
            self._begin(broker)

    def _begin(self, broker: _Broker) -> None:
        _quiet(broker)
        broker.beginning = True
        number = next(n for n in itertools.count() if n not in broker.lanes)
        broker.lanes.add(number)
        # What is ready in this round of the loop goes along.
        asyncio.get_running_loop().call_soon(self._send, broker, number)

    def _send(self, broker: _Broker, number: int) -> None:
        """Write what waits in one request, once there is a connection."""
        broker.beginning = False
        lane = f"shared/{number}"
        if self._closed or self._client.connected(broker.node, lane):
            self._send_over(broker, number, lane)
        else:
            task = asyncio.create_task(self._connect(broker, number, lane), name="txbroker connect")
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, broker: _Broker, number: int, lane: str) -> None:
        """Have a connection, so that what comes before that goes along and what is given up does
        not. Without one all that waits has failed."""
        try:
            await self._client.connect(broker.node, lane)
        except Exception as error:
            waiting = list(broker.waiting)
            broker.waiting.clear()
            _fail_all(waiting, error)
        self._send_over(broker, number, lane)

    def _send_over(self, broker: _Broker, number: int, lane: str) -> None:
        """Write what waits over a connection that is there."""
        batches = _take(broker)
        request = _Request(broker.node, lane, batches, lambda: self._over(broker, number))
        try:
            if batches:
                self._leave(request)
        except Exception as error:
            self._fail(request, error)
        else:
            if batches:
                self._go_on(broker)
            else:
                self._over(broker, number)

    def _over(self, broker: _Broker, number: int) -> None:
        """A request is over: let others take what waits."""
        broker.lanes.discard(number)
        self._go_on(broker)

    def _leave(self, request: _Request) -> None:
        """Write batches in one request; the answers go to those that wait.

        Raises:
            NotSent
            KafkaRefused: the broker does not know this request in a version that we do.
        """
        batches = request.batches
        topics: dict[str, list[tuple[int, bytes]]] = {}
        for batch in batches:
            topic, number = batch.partition
            topics.setdefault(topic, []).append((number, batch.encoded))
        timeout_s = self._client.settings.request_timeout_s
        if len(batches) > 1:
            # The broker answers by then, so that the others hear of theirs.
            timeout_s = min(timeout_s, SLOW_S)
        self._client.post(
            request.node,
            TXN_V1.write(None, round(timeout_s * 1000), list(topics.items())),
            request.lane,
            lambda answer: self._hear(request, answer),
            lambda error: self._fail(request, error),
        )
        self._under_way.add(request)

    def _hear(self, request: _Request, answer: ProduceResponse) -> None:
        try:
            told = {
                (each.topic, each.partition): each for each in TXN_V1.parse_produce_response(answer)
            }
        except Exception as error:
            self._fail(request, error)
            return
        self._under_way.discard(request)
        _answer(request.batches, told)
        request.over()

    def _fail(self, request: _Request, error: Exception) -> None:
        self._under_way.discard(request)
        # Whatever it is: whoever waits must hear of it.
        _fail_all(request.batches, error)
        request.over()


def _take(broker: _Broker) -> list[_Batch]:
    """Take what fits one request out of what waits; of each partition one batch, the oldest.

    Who has waited longest always goes along.
    """
    batches: dict[Partition, _Batch] = {}
    size = 0
    for batch in broker.waiting:
        if batch.answer.done():
            continue  # given up in this very round
        if batches and size + len(batch.encoded) > REQUEST_BYTES_MAX:
            continue  # a small one behind it, such as a decision, does not wait for it
        if batch.partition not in batches:
            batches[batch.partition] = batch
            size += len(batch.encoded)
    for batch in batches.values():
        del broker.waiting[batch]
    return list(batches.values())


def _quiet(broker: _Broker) -> None:
    if broker.alarm is not None:
        broker.alarm.cancel()
        broker.alarm = None


def _said(answers: Mapping[Partition, PartitionResult], partition: Partition) -> PartitionResult:
    """Return what a broker says of a partition.

    Raises:
        Unanswered: nothing.
    """
    said = answers.get(partition)
    if said is None:
        raise Unanswered(f"the broker says nothing of {partition[0]}-{partition[1]}")
    return said


def _answer(batches: Collection[_Batch], answers: Mapping[Partition, PartitionResult]) -> None:
    for batch in batches:
        try:
            said = _said(answers, batch.partition)
        except Unanswered as error:
            _fail([batch], error)
        else:
            if not batch.answer.done():
                batch.answer.set_result(said)


def _fail_all(batches: Sequence[_Batch], error: Exception) -> None:
    """Fail the batches of a request. A surprise stops the partition that hears of it; one does."""
    if isinstance(error, TxbrokerError):
        _fail(batches, error)
        return
    waiting = [batch for batch in batches if not batch.answer.done()]
    _fail(waiting[:1], error)
    _fail(waiting[1:], Unanswered(f"a write of several partitions failed: {error!r}"))


def _fail(batches: Collection[_Batch], error: Exception) -> None:
    if isinstance(error, TxbrokerError):
        # Without the frames in which it was raised: these hold the batches, so each failed request
        # would be a cycle, with its bytes. Of a surprise they tell where it came up.
        error = error.with_traceback(None)
    for batch in batches:
        if not batch.answer.done():
            batch.answer.set_exception(error)
