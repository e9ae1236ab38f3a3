"""Combine batches of several partitions into one Produce request.

A request costs proxy and broker the same whatever its size, and under load every half partition
appends to two logs continuously. Batches for one broker that are ready in one iteration of the
event loop share a request. While enough requests are in flight, new batches wait a moment to be
combined; otherwise they are sent at once.

A broker answers when the slowest partition of a request is done. So a partition whose write was
slow or failed uses a dedicated connection until one of its writes is fast again, and delays no
others."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct

from txbroker.core.records import Partition
from txbroker.errors import TxbrokerError
from txbroker.kafka.client.client import Client, NotSent, Unanswered
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.transactions import TXN_V1, PartitionResult, by_topic

AT_ONCE = 2
"""Requests in flight to one broker from which on batches wait to be combined."""
WAIT_MAX_S = 0.02
"""Maximum wait of a batch; then one more request is sent."""
REQUEST_BYTES_MAX = 1 << 20
"""Maximum bytes of batches in a shared request. A larger batch is sent alone."""
SLOW_S = 1.0
"""A partition whose write took longer writes alone the next time."""

_CLOSED = "the Kafka client is closed"


class _Batch(Struct, eq=False):
    """A batch for one partition, and the future of its result."""

    partition: Partition
    encoded: bytes
    answer: asyncio.Future[PartitionResult]


class _WriteRequest(Struct, eq=False):
    """Batches sent together."""

    node: int
    channel: str
    batches: Sequence[_Batch]
    on_done: Callable[[], None] = lambda: None
    """Called once the outcome is known."""


class _BrokerQueue:
    """Batches that wait for one broker, in order, and its channels in use."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.waiting: dict[_Batch, None] = {}
        self.channels: set[int] = set()
        self.scheduled = False
        """Whether a request is sent in the next iteration of the event loop."""
        self.timer: asyncio.TimerHandle | None = None


class SharedWrites:
    """Sends the batches of producers without a transactional id, combined. One per client.

    Each partition writes one batch at a time.

    Args:
        at_once: requests in flight to one broker from which on batches wait.
        wait_max_s: maximum wait of a batch.
    """

    def __init__(
        self, client: Client, at_once: int = AT_ONCE, wait_max_s: float = WAIT_MAX_S
    ) -> None:
        self._client = client
        self._at_once = at_once
        self._wait_max_s = wait_max_s
        self._brokers: dict[int, _BrokerQueue] = {}
        self._isolated: set[Partition] = set()
        self._in_flight: set[_WriteRequest] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._closed = False

    async def write(
        self, leader: int, partition: Partition, encoded: bytes, own_channel: str
    ) -> PartitionResult:
        """Write one batch and return its result. Cancelling withdraws a batch that is not sent yet.

        Args:
            own_channel: the partition's channel for writing alone.

        Raises:
            NotSent, Unanswered: the request as a whole, as for `Client.ask`.
            KafkaRefused: the broker does not support this version of the request.
        """
        if self._closed:
            raise NotSent(_CLOSED)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        alone = partition in self._isolated or len(encoded) > REQUEST_BYTES_MAX
        # Until this write has succeeded, and fast.
        self._isolated.add(partition)
        try:
            batch = _Batch(partition, encoded, loop.create_future())
            writing = self._write(leader, batch, own_channel if alone else "")
            del batch  # else the error of a failed write is in a reference cycle with its bytes
            result = await writing
        except NotSent:
            # It delayed no others; an open connection may send it next time.
            self._isolated.discard(partition)
            raise
        if result.code == Code.NONE and loop.time() - began_s < SLOW_S:
            self._isolated.discard(partition)
        return result

    async def close(self) -> None:
        """Fail all batches that wait or are in flight."""
        self._closed = True
        for request in self._in_flight:
            _fail(request.batches, Unanswered(_CLOSED))
        self._in_flight.clear()
        tasks = list(self._connecting)
        for task in tasks:
            task.cancel()
        for broker in self._brokers.values():
            _cancel_timer(broker)
            _fail(broker.waiting, NotSent(_CLOSED))
            broker.waiting.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, leader: int, batch: _Batch, own_channel: str) -> PartitionResult:
        """Write one batch over `own_channel`, or combined with others if it is ""."""
        broker = self._brokers.get(leader)
        if broker is None:
            broker = self._brokers[leader] = _BrokerQueue(leader)
        try:
            if own_channel:
                await self._client.connect(leader, own_channel)
                self._send(_WriteRequest(leader, own_channel, [batch]))
            else:
                broker.waiting[batch] = None
                self._schedule(broker)
            return await batch.answer
        finally:
            broker.waiting.pop(batch, None)
            if batch.answer.done() and not batch.answer.cancelled():
                batch.answer.exception()  # mark as retrieved, even after a cancellation
            # The error holds this frame: else each failed write is a cycle with its bytes.
            del batch

    # --- requests ----------------------------------------------------------------------------

    def _schedule(self, broker: _BrokerQueue) -> None:
        """Send waiting batches in the next iteration, or after the maximum wait."""
        if not broker.waiting or broker.scheduled:
            return
        if len(broker.channels) < self._at_once:
            self._send_soon(broker)
        elif broker.timer is None:
            loop = asyncio.get_running_loop()
            broker.timer = loop.call_later(self._wait_max_s, self._on_timer, broker)

    def _on_timer(self, broker: _BrokerQueue) -> None:
        """Send one more request: those in flight take too long."""
        broker.timer = None
        if broker.waiting and not broker.scheduled:
            self._send_soon(broker)

    def _send_soon(self, broker: _BrokerQueue) -> None:
        _cancel_timer(broker)
        broker.scheduled = True
        number = next(n for n in itertools.count() if n not in broker.channels)
        broker.channels.add(number)
        # In the next iteration, so as to combine all batches of this one.
        asyncio.get_running_loop().call_soon(self._send_next, broker, number)

    def _send_next(self, broker: _BrokerQueue, number: int) -> None:
        """Send waiting batches in one request, over an open connection."""
        broker.scheduled = False
        channel = f"shared/{number}"
        if self._closed or self._client.connected(broker.node, channel):
            self._send_over(broker, number, channel)
        else:
            task = asyncio.create_task(
                self._connect(broker, number, channel), name="txbroker connect"
            )
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, broker: _BrokerQueue, number: int, channel: str) -> None:
        """Open a connection, then send the batches that wait by then; without one fail them."""
        try:
            await self._client.connect(broker.node, channel)
        except Exception as error:
            waiting = list(broker.waiting)
            broker.waiting.clear()
            _fail_all(waiting, error)
        self._send_over(broker, number, channel)

    def _send_over(self, broker: _BrokerQueue, number: int, channel: str) -> None:
        """Send waiting batches over an open connection."""
        batches = _take(broker)
        request = _WriteRequest(
            broker.node, channel, batches, lambda: self._release(broker, number)
        )
        try:
            if batches:
                self._send(request)
        except Exception as error:
            self._fail(request, error)
        else:
            if batches:
                self._schedule(broker)
            else:
                self._release(broker, number)

    def _release(self, broker: _BrokerQueue, number: int) -> None:
        """Free the channel of a request that is done."""
        broker.channels.discard(number)
        self._schedule(broker)

    def _send(self, request: _WriteRequest) -> None:
        """Send batches in one request; its answer resolves their futures."""
        batches = request.batches
        topics = by_topic((b.partition[0], (b.partition[1], b.encoded)) for b in batches)
        timeout_s = self._client.settings.request_timeout_s
        if len(batches) > 1:
            # The broker answers by then, so that a slow partition delays no others.
            timeout_s = min(timeout_s, SLOW_S)
        self._client.post(
            request.node,
            TXN_V1.produce(None, round(timeout_s * 1000), list(topics.items())),
            request.channel,
            lambda answer: self._take_answer(request, answer),
            lambda error: self._fail(request, error),
        )
        self._in_flight.add(request)

    def _take_answer(self, request: _WriteRequest, answer: Any) -> None:
        try:
            results = {
                (result.topic, result.partition): result
                for result in TXN_V1.parse_produce_response(answer)
            }
        except Exception as error:
            self._fail(request, error)
            return
        self._in_flight.discard(request)
        _resolve(request.batches, results)
        request.on_done()

    def _fail(self, request: _WriteRequest, error: Exception) -> None:
        self._in_flight.discard(request)
        _fail_all(request.batches, error)
        request.on_done()


def _take(broker: _BrokerQueue) -> list[_Batch]:
    """Remove the batches of the next request from those that wait; the oldest is always included.

    At most one batch of a partition, its oldest.
    """
    batches: dict[Partition, _Batch] = {}
    size = 0
    for batch in broker.waiting:
        if batch.answer.done():
            continue  # cancelled in this iteration
        if batches and size + len(batch.encoded) > REQUEST_BYTES_MAX:
            continue  # smaller ones after it, such as decisions, do not wait for it
        if batch.partition not in batches:
            batches[batch.partition] = batch
            size += len(batch.encoded)
    for batch in batches.values():
        del broker.waiting[batch]
    return list(batches.values())


def _cancel_timer(broker: _BrokerQueue) -> None:
    if broker.timer is not None:
        broker.timer.cancel()
        broker.timer = None


def _result_of(
    results: Mapping[Partition, PartitionResult], partition: Partition
) -> PartitionResult:
    """Return the result of a partition."""
    result = results.get(partition)
    if result is None:
        raise Unanswered(f"the broker returned no result for {partition[0]}-{partition[1]}")
    return result


def _resolve(batches: Collection[_Batch], results: Mapping[Partition, PartitionResult]) -> None:
    for batch in batches:
        try:
            result = _result_of(results, batch.partition)
        except Unanswered as error:
            _fail([batch], error)
        else:
            if not batch.answer.done():
                batch.answer.set_result(result)


def _fail_all(batches: Sequence[_Batch], error: Exception) -> None:
    """Fail the batches of a request.

    An unexpected error stops the partition that receives it, so only one does.
    """
    if isinstance(error, TxbrokerError):
        _fail(batches, error)
        return
    waiting = [batch for batch in batches if not batch.answer.done()]
    _fail(waiting[:1], error)
    _fail(waiting[1:], Unanswered(f"a write of several partitions failed: {error!r}"))


def _fail(batches: Collection[_Batch], error: Exception) -> None:
    if isinstance(error, TxbrokerError):
        # Without its frames: they hold the batches, so each failed request would be a cycle with
        # its bytes. An unexpected error keeps them for diagnosis.
        error = error.with_traceback(None)
    for batch in batches:
        if not batch.answer.done():
            batch.answer.set_exception(error)
