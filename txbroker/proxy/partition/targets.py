"""Target topics: whether they accept a message, and which partition a message goes to."""

from collections.abc import AsyncIterator, Iterable, Sequence
from fnmatch import fnmatchcase

from msgspec import structs

from txbroker import tracing
from txbroker.batching import Sticky
from txbroker.core.encoding import BATCH_OVERHEAD_BYTES, bytes_in_batch
from txbroker.core.records import Cause, Message, Place, Record
from txbroker.core.routing import murmur2
from txbroker.core.transaction import places_of
from txbroker.door.owners import own_by_name
from txbroker.door.protocols import TargetFacts, Targets
from txbroker.errors import BadRequest, BadTarget, RequestError, TooLarge, UnknownTopic
from txbroker.tracing import carried_over

TIMESTAMP_AHEAD_MAX_MS = 3_600_000
"""Brokers reject records that are further ahead of their clock than this, by default."""
_TOPICS_MAX = 10_000
"""Topics for which the sticky partition of messages without a key is remembered."""


class PermittedTargets(Targets):
    """Refuses topics that may not be targets by their names, both at prepare and at promotion.

    Args:
        inner: asked about all other topics.
        prefix: of txbroker's own topics, where a message would be taken for our record.
        reserved: names and patterns that the operator reserved.
    """

    def __init__(self, inner: Targets, prefix: str, reserved: Sequence[str]) -> None:
        self._inner = inner
        self._prefix = prefix
        self._reserved = reserved

    def known(self, topic: str) -> TargetFacts | Cause | None:
        return self._refused(topic) or self._inner.known(topic)

    async def examine(self, topic: str, *, create: bool = False) -> TargetFacts | Cause:
        """Ask Kafka about a topic; see `txbroker.door.protocols.Targets`."""
        return self._refused(topic) or await self._inner.examine(topic, create=create)

    def forget(self, topic: str) -> None:
        self._inner.forget(topic)

    def records(
        self, topic: str, partition: int, *, start: int | None = None, since_ms: int = 0
    ) -> AsyncIterator[Sequence[Record]]:
        return self._inner.records(topic, partition, start=start, since_ms=since_ms)

    def _refused(self, topic: str) -> Cause | None:
        cause = own_by_name(topic, self._prefix)
        if cause is None and any(fnmatchcase(topic, pattern) for pattern in self._reserved):
            why = f"topic {topic} is reserved (reserved_topics): it is no target"
            return Cause("reserved", why, topic, -1)
        return cause


def takes(topic: str, partition: int | None, size: int, facts: TargetFacts | Cause) -> Cause | None:
    """Return None if a target accepts a message, else why not."""
    if isinstance(facts, Cause):
        return facts
    if partition is None or not 0 <= partition < facts.partitions:
        return Cause(
            "bad_partition",
            f"topic {topic} has partitions 0 to {facts.partitions - 1}, not {partition}: "
            "add partitions, or roll the transaction's business change back",
            topic,
            -1 if partition is None else partition,
        )
    size += BATCH_OVERHEAD_BYTES
    if size > facts.message_bytes_max:
        return Cause(
            "too_large",
            f"the message takes up to {size} bytes, topic {topic} takes "
            f"{facts.message_bytes_max}: raise the topic's max.message.bytes and revive",
            topic,
            partition,
        )
    if partition in facts.leaderless:
        return Cause(
            "no_leader",
            f"partition {partition} of topic {topic} has no leader: txbroker retries",
            topic,
            partition,
            passing=True,
        )
    return None


async def examine_all(
    targets: Targets, topics: Iterable[str], *, create: bool
) -> dict[str, TargetFacts | Cause]:
    """Return the facts of topics, asking Kafka about those not in the cache.

    With `create` Kafka is asked again about a missing topic."""
    result = {}
    for topic in topics:
        facts = targets.known(topic)
        if facts is None or (create and isinstance(facts, Cause) and facts.code == "unknown_topic"):
            facts = await targets.examine(topic, create=create)
        result[topic] = facts
    return result


class TargetPartitioner:
    """Chooses target partitions for messages that name none.

    Messages with a key are hashed as by Kafka's Java client. Those without a key go to a partition
    with a leader: the same one for a while, and for all of one transaction and topic.

    Args:
        overhead_bytes: size of the installation's header in each message.
    """

    def __init__(self, overhead_bytes: int = 0) -> None:
        self._overhead_bytes = overhead_bytes
        self._keyless: dict[str, Sticky[int]] = {}

    def place(
        self, messages: Sequence[Message], facts: dict[str, TargetFacts | Cause], now_ms: int
    ) -> tuple[tuple[Message, ...], tuple[Place, ...]]:
        """Return the messages with their target partitions, and their places."""
        placed = []
        shape: tuple[tuple[str, int | None, int], ...] = ()
        keyless: dict[str, int] = {}
        for message in messages:
            topic, partition = message.topic, message.partition
            known = facts[topic]
            if isinstance(known, Cause):
                raise _refusal(known)
            if partition is None:
                if message.key is not None:
                    partition = murmur2(message.key) % known.partitions
                elif topic in keyless:
                    partition = keyless[topic]
                else:
                    partition = keyless[topic] = self._any(topic, known)
                message = structs.replace(message, partition=partition)
            size = bytes_in_batch((message,))
            cause = takes(topic, partition, size + self._overhead_bytes, known)
            if cause is not None and not cause.passing:
                raise _refusal(cause)
            if message.timestamp_ms is not None:
                check_timestamps((message,), now_ms)
            placed.append(message)
            shape += ((topic, partition, size),)
        return tuple(placed), places_of(shape)

    def _any(self, topic: str, facts: TargetFacts) -> int:
        sticky = self._keyless.get(topic)
        if sticky is None:
            if len(self._keyless) >= _TOPICS_MAX:
                self._keyless.clear()
            sticky = self._keyless[topic] = Sticky()
        partitions = range(facts.partitions)
        if not facts.leaderless:
            return sticky.choose(partitions)
        led = [partition for partition in partitions if partition not in facts.leaderless]
        return sticky.choose(led or partitions)


def place_like(prepared: Sequence[Message], final: Sequence[Message]) -> tuple[Message, ...]:
    """Return final messages with the partitions and trace contexts of the prepared ones."""
    topics = [message.topic for message in prepared]
    if [message.topic for message in final] != topics:
        raise BadRequest(
            "final messages must have the topics of the prepared ones, in the same order: "
            + ", ".join(topics)
        )
    placed = tuple(
        Message(new.topic, new.key, new.value, new.headers, old.partition, new.timestamp_ms)
        for old, new in zip(prepared, final, strict=True)
    )
    return carried_over(prepared, placed) if tracing.is_on() else placed


async def accept_replacement(
    prepared: Sequence[Message],
    final: Sequence[Message],
    targets: Targets,
    now_ms: int,
    overhead_bytes: int = 0,
) -> tuple[Message, ...]:
    """Return the messages that replace the prepared ones, if their targets can accept them.

    Once committed they cannot be changed. Problems of the target itself may pass, so they are no
    reason to refuse.

    Raises:
        BadRequest: they have other topics than the prepared ones, or another number.
        TooLarge, BadTarget: a target will never accept its message.
        KafkaUnavailable: Kafka does not answer.
    """
    messages = place_like(prepared, final)
    topics = dict.fromkeys(message.topic for message in messages)
    facts = await examine_all(targets, topics, create=False)
    check_timestamps(messages, now_ms)
    for message in messages:
        size = bytes_in_batch((message,)) + overhead_bytes
        cause = takes(message.topic, message.partition, size, facts[message.topic])
        if cause is not None and cause.code == "too_large":
            raise TooLarge(cause.message)
    return messages


def check_timestamps(messages: Iterable[Message], now_ms: int) -> None:
    """Refuse timestamps that brokers would reject: over an hour ahead of their clock."""
    for message in messages:
        ahead_ms = (message.timestamp_ms or 0) - now_ms
        if ahead_ms > TIMESTAMP_AHEAD_MAX_MS:
            raise BadTarget(
                f"timestamp_ms is {ahead_ms // 1000} s ahead of Kafka's clock: at most one hour "
                "is allowed"
            )


def _refusal(cause: Cause) -> RequestError:
    if cause.code == "unknown_topic":
        return UnknownTopic(cause.message)
    if cause.code == "too_large":
        return TooLarge(cause.message)
    return BadTarget(cause.message)
