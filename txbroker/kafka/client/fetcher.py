"""Fetch many partitions continuously, `read_committed`, and deliver their records in pieces.

Each broker has a few lanes: connections with at most one request in flight. Partitions that wait
for no answer are requested at once over a free lane. So a partition that was added or resumed never
waits for the long poll of the others, and the next fetch is in flight while an answer is decoded.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

import structlog
from msgspec import Struct

from txbroker.core.records import Partition
from txbroker.door.consuming import Deliver, Fetcher, FetchFailed, FetchingEnded, OffsetMissing
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import ConfigurationError, InvariantBroken, KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused
from txbroker.kafka.client.leaders import confirm_leader
from txbroker.kafka.client.reader import READ_COMMITTED
from txbroker.kafka.protocol.batch import decode_batch
from txbroker.kafka.protocol.codes import LEADER_MOVED, Code, describe
from txbroker.kafka.protocol.fetched import Fetched
from txbroker.kafka.protocol.schemas import FetchV11
from txbroker.kafka.protocol.transactions import by_topic
from txbroker.net.timers import grown_pause_s

_REQUEST_BYTES = 8 << 20
_PARTITION_BYTES = 1 << 20
_WAIT_MS = 500
_LAST_LANE_WAIT_MS = 50
"""The last free lane is free again soon: no partition waits longer for one."""
_LANES = 4
"""Two under load; more only if partitions are resumed one by one while the others are idle."""
_ANSWER_S = 15.0
"""Maximum time for an answer with megabytes over a slow link."""
_INFLATED_BYTES_MAX = 128 << 20
"""Limit of one compressed batch. Producers limit batches by their compressed size."""
_PAUSE_S, _PAUSE_MAX_S = 0.05, 1.0
_LASTING_PAUSE_S = 10.0
"""Pauses between retries; the last one where waiting does not help."""

log = structlog.wrap_logger(logging.getLogger(__name__))

_NUMBERS = itertools.count()
_decode = partial(decode_batch, inflated_bytes_max=_INFLATED_BYTES_MAX)


class BatchUnreadable(KafkaUnavailable):
    """A batch does not decode. The partition stops there: no record is skipped silently."""

    lasting = True


class _Feed(Struct, eq=False):
    """One partition from one `add` on: answers to an earlier one have another feed.

    Attributes:
        position: the offset of the next fetch.
        busy: a request, its answer or a retry is outstanding.
        held: an answer that arrived while the partition was paused.
        reported: next offset and end of the last delivery.
        failures: in a row.
    """

    partition: Partition
    position: int
    broker: _BrokerFeeds | None = None
    paused: bool = False
    busy: bool = True
    held: Fetched | None = None
    reported: tuple[int, int] = (-1, -1)
    failures: int = 0


class _BrokerFeeds(Struct, eq=False):
    """The partitions that a broker leads, the longest unserved first, and its lanes."""

    node: int
    feeds: dict[Partition, _Feed]
    free: list[int]
    turn: asyncio.Lock
    """Answers are decoded one after another, in the order of arrival."""
    scheduled: bool = False


class KafkaFetcher(Fetcher):
    """A `Fetcher` on a real Kafka. Created in a running event loop."""

    def __init__(self, client: Client, deliver: Deliver, failed: FetchFailed) -> None:
        self.partition_bytes = _PARTITION_BYTES
        self._client = client
        self._deliver = deliver
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._channel = f"fetch{next(_NUMBERS)}/"
        self._feeds: dict[Partition, _Feed] = {}
        self._brokers: dict[int, _BrokerFeeds] = {}
        self._homeless: list[_Feed] = []
        """Feeds whose leader must be looked up."""
        self._placing = False
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the caller's side -------------------------------------------------------------------

    def add(self, partition: Partition, offset: int) -> None:
        """Fetch a partition from `offset` on. An earlier `add` of it ends."""
        self.remove(partition)
        self._feeds[partition] = feed = _Feed(partition, offset)
        self._place([feed])

    def remove(self, partition: Partition) -> None:
        """Stop fetching a partition; nothing of it is delivered after this call."""
        feed = self._feeds.pop(partition, None)
        if feed is not None:
            _leave(feed)

    def pause(self, partition: Partition) -> None:
        """Deliver no more than is fetched already."""
        feed = self._feeds.get(partition)
        if feed is not None:
            feed.paused = True

    def resume(self, partition: Partition) -> None:
        """Continue a paused partition, at once."""
        feed = self._feeds.get(partition)
        if feed is None or not feed.paused:
            return
        feed.paused = False
        if feed.held is not None and feed.broker is not None:
            fetched, feed.held = feed.held, None
            self._spawn(self._take(feed.broker, [(feed, fetched)]))
        elif feed.broker is not None:
            self._schedule(feed.broker)

    async def close(self) -> None:
        """End all requests; nothing is delivered after this call."""
        for partition in list(self._feeds):
            self.remove(partition)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._client.close_channels(self._channel)

    # --- leaders -----------------------------------------------------------------------------

    def _place(self, feeds: Iterable[_Feed]) -> None:
        """Look up leaders, one request for all that come in this iteration of the event loop."""
        self._homeless += feeds
        if not self._placing:
            self._placing = True
            self._spawn(self._find_leaders())

    async def _find_leaders(self) -> None:
        try:
            while self._homeless:
                feeds = [feed for feed in self._homeless if self._is_current(feed)]
                self._homeless = []
                try:
                    codes = await self._refresh(feeds)
                except KafkaUnavailable as error:
                    self._retry(feeds, error)
                    continue
                for feed in feeds:
                    self._settle(feed, codes)
        finally:
            self._placing = False

    async def _refresh(self, feeds: list[_Feed]) -> dict[str, int]:
        """Refresh the unknown leaders; return the topics' error codes."""
        unknown = {
            feed.partition[0] for feed in feeds if self._client.known_leader(*feed.partition) < 0
        }
        if not unknown:
            return {}
        facts = await self._client.refresh(sorted(unknown))
        missing = dict.fromkeys(unknown, int(Code.UNKNOWN_TOPIC_OR_PARTITION))
        return missing | {topic: found.error for topic, found in facts.items()}

    def _settle(self, feed: _Feed, codes: dict[str, int]) -> None:
        if not self._is_current(feed):
            return
        leader = self._client.known_leader(*feed.partition)
        if leader < 0:
            code = codes.get(feed.partition[0], Code.NONE) or Code.LEADER_NOT_AVAILABLE
            self._retry([feed], _refusal(feed.partition, code))
            return
        broker = self._brokers.get(leader)
        if broker is None:
            broker = _BrokerFeeds(leader, {}, list(range(_LANES)), asyncio.Lock())
            self._brokers[leader] = broker
        broker.feeds[feed.partition] = feed
        feed.broker, feed.busy = broker, False
        self._schedule(broker)

    # --- requests ----------------------------------------------------------------------------

    def _schedule(self, broker: _BrokerFeeds) -> None:
        """Send ready partitions at the end of this iteration of the event loop, in one request."""
        if not broker.scheduled:
            broker.scheduled = True
            self._loop.call_soon(self._send, broker)

    def _send(self, broker: _BrokerFeeds) -> None:
        broker.scheduled = False
        feeds = [feed for feed in broker.feeds.values() if not (feed.busy or feed.paused)]
        if not feeds or not broker.free:
            return  # a lane that becomes free schedules again
        lane = min(broker.free)
        broker.free.remove(lane)
        for feed in feeds:
            feed.busy = True
        self._spawn(self._fetch(broker, lane, feeds))

    async def _fetch(self, broker: _BrokerFeeds, lane: int, feeds: list[_Feed]) -> None:
        """Send one request, and deliver the answer."""
        wait_ms = _WAIT_MS if broker.free else _LAST_LANE_WAIT_MS
        entries = (
            (f.partition[0], (f.partition[1], f.position, self.partition_bytes)) for f in feeds
        )
        topics = list(by_topic(entries).items())
        request = FetchV11(wait_ms, 1, _REQUEST_BYTES, READ_COMMITTED, topics)
        channel = f"{self._channel}{lane}"
        try:
            answer = await self._client.ask(broker.node, request, channel, _ANSWER_S)
            if code := answer.error_code:
                raise KafkaRefused(code)
        except (KafkaUnavailable, ConfigurationError) as error:
            self._lost(feeds, error)
            return
        finally:
            broker.free.append(lane)
            self._schedule(broker)
        await self._take(broker, self._read(broker, feeds, answer))

    def _lost(self, feeds: list[_Feed], error: KafkaUnavailable | ConfigurationError) -> None:
        if not isinstance(error, KafkaUnavailable):
            error = KafkaUnavailable(str(error))
        feeds = [feed for feed in feeds if self._is_current(feed)]
        for feed in feeds:
            self._client.forget_leader(*feed.partition)
        self._retry(feeds, error)

    # --- answers -----------------------------------------------------------------------------

    def _read(
        self, broker: _BrokerFeeds, feeds: list[_Feed], answer: Any
    ) -> list[tuple[_Feed, Fetched]]:
        """Return what to deliver now; hold answers of paused partitions, retry refused ones."""
        asked = {feed.partition: feed for feed in feeds}
        found: list[tuple[_Feed, Fetched]] = []
        for topic, partitions in answer.topics:
            for fields in partitions:
                feed = asked.pop((topic, fields[0]), None)
                if feed is None or not self._is_current(feed):
                    continue
                if fields[1] != Code.NONE:
                    self._refused(broker, feed, fields[1])
                    continue
                try:
                    fetched = _answer_of(feed, fields)
                except InvariantBroken as error:
                    self._retry([feed], BatchUnreadable(str(error)))
                    continue
                feed.failures = 0
                if feed.paused and fetched.size_bytes:
                    feed.held = fetched
                else:
                    found.append((feed, fetched))
        # Brokers answer for all partitions; one without an answer must not wait for ever.
        self._retry(asked.values(), KafkaUnavailable(f"broker {broker.node} left it out"))
        return found

    def _refused(self, broker: _BrokerFeeds, feed: _Feed, code: int) -> None:
        if code == Code.OFFSET_OUT_OF_RANGE:
            self._spawn(self._check_missing(broker, feed))
            return
        if code in LEADER_MOVED:
            self._client.forget_leader(*feed.partition)
        self._retry([feed], _refusal(feed.partition, code))

    async def _check_missing(self, broker: _BrokerFeeds, feed: _Feed) -> None:
        """End fetching, unless a broker that does not lead (any more) misses the offset."""
        topic, number = feed.partition
        try:
            leader = await confirm_leader(self._client, topic, number)
        except KafkaUnavailable as error:
            self._retry([feed], error)
            return
        if leader != broker.node:
            self._retry([feed], _refusal(feed.partition, Code.NOT_LEADER))
        elif self._is_current(feed):
            self.remove(feed.partition)
            what = f"{topic}-{number} has no offset {feed.position} (any more)"
            self._failed(feed.partition, OffsetMissing(what))

    async def _take(self, broker: _BrokerFeeds, found: list[tuple[_Feed, Fetched]]) -> None:
        """Deliver answers, while the next request is in flight."""
        if not found:
            return
        async with broker.turn:
            for feed, fetched in found:
                feed.position, feed.busy = fetched.next_offset, False
                # It may have been removed and added since: then another feed has its place.
                if fetched.size_bytes and broker.feeds.get(feed.partition) is feed:
                    del broker.feeds[feed.partition]
                    broker.feeds[feed.partition] = feed  # the others come first next time
            self._schedule(broker)
            for feed, fetched in found:
                await self._hand_over(feed, fetched)

    async def _hand_over(self, feed: _Feed, fetched: Fetched) -> None:
        position = fetched.seen
        try:
            for records in fetched.pieces():
                if not self._is_current(feed):
                    return
                now = (fetched.seen, fetched.stable_end)
                if records or now != feed.reported:
                    feed.reported = now
                    self._deliver(feed.partition, records, *now)
                    position = now[0]
                    # Decoding and handling take milliseconds: let other tasks run.
                    await asyncio.sleep(0)
        except Exception as raised:
            # Whatever it is, records that were not delivered must not be skipped.
            error: KafkaUnavailable = BatchUnreadable(str(raised))
            if not isinstance(raised, BatchUnreadable | InvariantBroken):
                topic, number = feed.partition
                error = FetchingEnded(f"{topic}-{number}: delivery from {position} on: {raised!r}")
            if self._is_current(feed):
                _leave(feed)
                # The next request is in flight: its answer must find no feed.
                again = _Feed(feed.partition, position, paused=feed.paused, reported=feed.reported)
                self._feeds[feed.partition] = again
                self._retry([again], error)

    # --- retries -----------------------------------------------------------------------------

    def _retry(self, feeds: Iterable[_Feed], error: KafkaUnavailable) -> None:
        """Report a failure, and look up the leaders again after a pause."""
        feeds = [feed for feed in feeds if self._is_current(feed)]
        for feed in feeds:
            _leave(feed)
            feed.busy = True
            feed.failures += 1
            self._failed(feed.partition, error)
        if feeds:
            pause_s = grown_pause_s(max(f.failures for f in feeds), _PAUSE_S, _PAUSE_MAX_S)
            self._spawn(self._place_later(feeds, _LASTING_PAUSE_S if error.lasting else pause_s))

    async def _place_later(self, feeds: list[_Feed], pause_s: float) -> None:
        await asyncio.sleep(pause_s * (0.5 + random.random()))
        self._place(feeds)

    def _is_current(self, feed: _Feed) -> bool:
        return self._feeds.get(feed.partition) is feed

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="fetch")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # Its partitions would wait for ever; which ones they are is unknown.
            log.error("fetching failed", error=safe_repr(error), where=raised_at(error))
            for partition in list(self._feeds):
                self._failed(partition, FetchingEnded(f"fetching ended: {safe_repr(error)}"))


def _leave(feed: _Feed) -> None:
    """Take a feed from its broker."""
    broker, feed.broker = feed.broker, None
    if broker is not None and broker.feeds.get(feed.partition) is feed:
        del broker.feeds[feed.partition]


def _answer_of(feed: _Feed, fields: tuple[Any, ...]) -> Fetched:
    name = "{}-{}".format(*feed.partition)
    stop = partial(_stop, name)
    return Fetched(name, feed.position, fields, append_time=False, unreadable=stop, decode=_decode)


def _stop(name: str, offset: int, reason: str) -> None:
    raise BatchUnreadable(f"{name}: the batch at offset {offset} does not decode: {reason}")


def _refusal(partition: Partition, code: int) -> KafkaRefused:
    topic, number = partition
    return KafkaRefused(code, f"{topic}-{number}: Kafka answered: {describe(code)}")
