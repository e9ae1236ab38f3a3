"""Facts about target topics, requested in advance instead of found out by a failed transaction."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial

from txbroker.core.records import Cause, Record
from txbroker.door.consuming import TopicSpec
from txbroker.door.owners import Evidence, Owner, own_by_name, owner_of, unknown_target
from txbroker.door.protocols import LogTruncated, TargetFacts, Targets
from txbroker.errors import InvariantBroken, KafkaUnavailable
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import Client, KafkaRefused, TopicFacts, is_retriable
from txbroker.kafka.client.reader import Reader, offsets_at
from txbroker.kafka.protocol.codes import Code, describe

_DEFAULT_MESSAGE_BYTES = 1048588
"""Kafka's default, for topics whose settings may not be read."""

_BATCH_BYTES_MAX = 4 << 20
"""Larger batches gain nothing, and brokers keep each whole in memory."""

_CAUSE_TTL_S = 1.0
"""Short, because the topic may be created any moment."""

_KNOWN_MAX = 1000
"""Cached topics, or prefixes, until expired ones are dropped: clients may name any topic."""

_RECORDS_BYTES = 1 << 20
_NUMBERS = itertools.count()
_BY_DEFAULT = -1
_ANY_PARTITION = -1


class KafkaTargets(Targets):
    """A `Targets` on a real Kafka."""

    def __init__(self, client: Client, admin: Admin) -> None:
        self._client = client
        self._admin = admin
        self._owners = OwnerSearch(client, admin)
        self._ttl_s = client.settings.facts_ttl_s
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, tuple[float, TargetFacts | Cause]] = {}
        self._in_flight: dict[tuple[str, bool], asyncio.Task[TargetFacts | Cause]] = {}
        # Kept after the facts expire, for promotion transactions in flight.
        self._bytes_max: dict[str, int] = {}

    def known(self, topic: str) -> TargetFacts | Cause | None:
        """Return cached facts, or the cached cause why there are none; None if not cached."""
        cached = self._known.get(topic)
        if cached is None:
            return None
        until, facts = cached
        if self._loop.time() >= until:
            del self._known[topic]
            return None
        return facts

    def batch_bytes_max(self, topic: str) -> int:
        """Return the maximum batch size of a topic, bytes; the default if unknown."""
        return min(self._bytes_max.get(topic, _DEFAULT_MESSAGE_BYTES), _BATCH_BYTES_MAX)

    async def examine(self, topic: str, *, create: bool = False) -> TargetFacts | Cause:
        """Request a topic's facts and cache them; with `create`, create a missing topic.

        Concurrent calls share one request: else every prepare in flight would send one when facts
        expire.
        """
        task = self._in_flight.get((topic, create))
        if task is None:
            task = asyncio.create_task(self._examine(topic, create=create))
            self._in_flight[topic, create] = task
            task.add_done_callback(partial(self._on_done, (topic, create)))
        return await asyncio.shield(task)

    def _on_done(self, key: tuple[str, bool], task: asyncio.Task[TargetFacts | Cause]) -> None:
        if self._in_flight.get(key) is task:
            del self._in_flight[key]
        if not task.cancelled():
            task.exception()  # mark as retrieved: all callers may have been cancelled

    async def _examine(self, topic: str, *, create: bool) -> TargetFacts | Cause:
        facts = await self._owners.refused(topic) or await self._ask(topic)
        if create and isinstance(facts, Cause) and facts.code == "unknown_topic":
            facts = await self._create(topic) or await self._ask(topic)
        if self._in_flight.get((topic, create)) is asyncio.current_task():
            self._remember(topic, facts)
        return facts

    def _remember(self, topic: str, facts: TargetFacts | Cause) -> None:
        if isinstance(facts, TargetFacts):
            self._bytes_max[topic] = facts.message_bytes_max
        ttl_s = min(self._ttl_s, _CAUSE_TTL_S) if isinstance(facts, Cause) else self._ttl_s
        now = self._loop.time()
        if len(self._known) >= _KNOWN_MAX:
            self._known = {name: known for name, known in self._known.items() if known[0] > now}
        self._known[topic] = (now + ttl_s, facts)

    async def _ask(self, topic: str) -> TargetFacts | Cause:
        metadata = (await self._admin.topics([topic])).get(topic)
        code = Code.UNKNOWN_TOPIC_OR_PARTITION if metadata is None else metadata.error
        if code == Code.LEADER_NOT_AVAILABLE:
            code = Code.NONE
        if metadata is None or code != Code.NONE:
            return _cause(topic, code)
        configs = (await self._admin.configs([topic])).get(topic, {})
        return _facts(metadata, configs)

    async def _create(self, topic: str) -> Cause | None:
        try:
            await self._admin.create([TopicSpec(topic, _BY_DEFAULT, _BY_DEFAULT, {})])
        except KafkaRefused as error:
            if is_retriable(error):
                raise
            return Cause("unknown_topic", str(error), topic, _ANY_PARTITION)
        return None

    def forget(self, topic: str) -> None:
        """Drop a topic from the cache, after an error that shows changed facts."""
        self._known.pop(topic, None)
        for create in (False, True):
            self._in_flight.pop((topic, create), None)  # may have been sent before the change

    async def records(
        self, topic: str, partition: int, *, start: int | None = None, since_ms: int = 0
    ) -> AsyncIterator[Sequence[Record]]:
        """Yield committed records; see `Targets.records`."""
        facts, client = await self._ask(topic), self._client
        if isinstance(facts, Cause):
            raise KafkaUnavailable(facts.message)
        if not 0 <= partition < facts.partitions:
            raise LogTruncated(f"topic {topic} has partitions 0 to {facts.partitions - 1}")
        # A dedicated channel each: reads of other searches must not wait for this one.
        channel = f"records/{next(_NUMBERS)}/"
        reader = Reader(client, topic, partition, channel, append_time=False)
        try:
            position, end = start, await reader.stable_end()
            if position is None:
                position = (await offsets_at(client, [(topic, partition)], since_ms, channel))[
                    topic, partition
                ]
            elif position >= end:
                raise LogTruncated(f"{reader.name} ends at offset {end}")
            while position < end:
                fetched = await reader.fetch(position, _RECORDS_BYTES, wait_ms=0)
                for records in fetched.pieces():
                    yield [record for record in records if record.offset < end]
                    await asyncio.sleep(0)
                if fetched.next_offset == position:
                    raise KafkaUnavailable(
                        f"{reader.name} returns nothing from {position} on: retry"
                    )
                position = fetched.next_offset
        finally:
            client.close_channels(channel)

    def note(self, cause: Cause) -> None:
        """Update the cache after a refusal: drop facts that did not predict it.

        A missing right to write shows in no facts, so the cause itself is cached.
        """
        if cause.code == "not_authorized":
            self._remember(cause.topic, cause)
        else:
            self.forget(cause.topic)


def _facts(metadata: TopicFacts, configs: dict[str, str]) -> TargetFacts:
    return TargetFacts(
        partitions=len(metadata.partitions),
        message_bytes_max=int(configs.get("max.message.bytes", _DEFAULT_MESSAGE_BYTES)),
        log_append_time=configs.get("message.timestamp.type") == "LogAppendTime",
        leaderless=frozenset(p for p, fact in metadata.partitions.items() if fact.leader < 0),
    )


def _cause(topic: str, code: int) -> Cause:
    if code == Code.UNKNOWN_TOPIC_OR_PARTITION:
        # The operator creates a target again that was deleted by mistake.
        sentence = f"topic {topic} does not exist: create it, or set create_target_topics"
        return Cause("unknown_topic", sentence, topic, _ANY_PARTITION)
    if code == Code.TOPIC_AUTHORIZATION_FAILED:
        sentence = f"not authorized for topic {topic}: grant this proxy Describe and Write on it"
        return Cause("not_authorized", sentence, topic, _ANY_PARTITION)
    if code == Code.INVALID_TOPIC:
        sentence = f"{topic!r} is no valid topic name: use letters, digits, dot, _ and -"
        return Cause("unknown_topic", sentence, topic, _ANY_PARTITION)
    raise KafkaUnavailable(f"topic {topic}: {describe(code)}")


# --- topics of owners ----------------------------------------------------------------------------

_FOUND_S, _NOT_FOUND_S = 600.0, 30.0
"""Cache lifetime of a positive and of a negative result."""
_READ_BYTES_MAX = 512 << 10
"""Maximum bytes read of each topic, plus one batch: a prepare waits for it."""
_FETCH_BYTES = 64 << 10
_READ_S = 2.0
_CHANNEL = "owners"


class OwnerSearch(Evidence):
    """Finds the installations, relays and groups of consumers on a Kafka: their topics are no
    targets. See `txbroker.door.owners`."""

    def __init__(self, client: Client, admin: Admin) -> None:
        self._client = client
        self._admin = admin
        self._known: dict[Owner, tuple[float, bool]] = {}

    async def target(self, topic: str, prefix: str) -> int | Cause:
        """Return a topic's number of partitions, see `ConsumingDoor.target`."""
        cause = own_by_name(topic, prefix) or await self.refused(topic)
        return cause or await self._admin.partition_count(topic) or unknown_target(topic)

    async def refused(self, topic: str) -> Cause | None:
        """Return why a topic is no target; None if it has no owner.

        Unreadable topics have none, because a name alone is no proof.

        Raises:
            KafkaUnavailable
        """
        return await owner_of(topic, self._exists)

    async def _exists(self, owner: Owner) -> bool:
        now = asyncio.get_running_loop().time()
        until, exists = self._known.get(owner, (0.0, False))
        if now < until:
            return exists
        try:
            async with asyncio.timeout(_READ_S):
                exists = await owner.exists(self)
        except TimeoutError:
            raise KafkaUnavailable(
                f"could not check within {_READ_S:g} s whether topics {owner.prefix}.* belong "
                f"{owner}: retry"
            ) from None
        if len(self._known) >= _KNOWN_MAX:
            self._known = {one: known for one, known in self._known.items() if known[0] > now}
        if len(self._known) < _KNOWN_MAX:
            self._known[owner] = (now + (_FOUND_S if exists else _NOT_FOUND_S), exists)
        return exists

    async def partitions(self, names: Collection[str]) -> dict[str, int]:
        """See `Evidence.partitions`."""
        facts = await self._admin.topics(list(names))
        return {name: len(topic.partitions) for name, topic in facts.items() if not topic.error}

    async def compacted(self, names: Sequence[str]) -> bool:
        """See `Evidence.compacted`."""
        configs = await self._admin.configs(list(names))
        return all("compact" in config.get("cleanup.policy", "") for config in configs.values())

    async def holds(
        self, topic: str, partitions: int, test: Callable[[Record], bool], newest: int = 0
    ) -> bool:
        """See `Evidence.holds`."""
        left = _READ_BYTES_MAX
        for number in range(partitions):
            reader = Reader(
                self._client, topic, number, _CHANNEL, append_time=False, producers=True
            )
            try:
                position, end = await reader.start(), await reader.stable_end()
                if newest:
                    position = max(position, end - newest)
                while position < end and left > 0:
                    fetched = await reader.fetch(position, _FETCH_BYTES)
                    for records in fetched.pieces():
                        if any(test(record) for record in records):
                            return True
                        await asyncio.sleep(0)
                    if fetched.next_offset == position:
                        break
                    position, left = fetched.next_offset, left - fetched.size_bytes
            except KafkaRefused as error:
                if error.code != Code.TOPIC_AUTHORIZATION_FAILED:
                    raise
                return False
            except (LogTruncated, InvariantBroken):
                pass  # truncated or corrupt: no proof
        return False
