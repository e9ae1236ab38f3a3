"""Whether a target topic takes a message, and which partition a message goes to."""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from msgspec import structs

from txbroker.core.placement import murmur2
from txbroker.core.promotion import Verdict
from txbroker.core.records import Cause, Message
from txbroker.core.sizes import BATCH_OVERHEAD_BYTES, bytes_in_batch
from txbroker.core.transaction import Place, places_of
from txbroker.door import TargetFacts, Targets
from txbroker.errors import BadTarget, RequestError, TooLarge, UnknownTopic
from txbroker.sticky import Sticky

TIMESTAMP_AHEAD_MAX_MS = 3_600_000
"""Brokers refuse records that are further ahead of their clock than this, by default."""
KAFKA_TOPICS = frozenset(
    {"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"}
)
"""What Kafka keeps for itself."""
_TOPICS_MAX = 10_000
"""Topics of which it is remembered where the last message without a key went."""


class FreeTargets(Targets):
    """A `txbroker.door.Targets` that knows by their names alone which topics are no targets, when a
    transaction is prepared and when it is promoted.

    Args:
        inner: asked about all others.
        own: the names of our own topics, where a client's message would be taken for our record.
        reserved: names and patterns that an operator has reserved.
    """

    def __init__(self, inner: Targets, own: Collection[str], reserved: Sequence[str]) -> None:
        self._inner = inner
        self._own = own
        self._reserved = reserved

    def known(self, topic: str) -> TargetFacts | Cause | None:
        """Return facts from the cache, or why there are none, or None where it must be asked."""
        return self._refused(topic) or self._inner.known(topic)

    async def examine(self, topic: str, *, create: bool = False) -> TargetFacts | Cause:
        """Ask Kafka about a topic; see `txbroker.door.Targets`.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        return self._refused(topic) or await self._inner.examine(topic, create=create)

    def forget(self, topic: str) -> None:
        """Drop a topic from the cache."""
        self._inner.forget(topic)

    def _refused(self, topic: str) -> Cause | None:
        if topic in KAFKA_TOPICS:
            why = "is Kafka's own"
        elif topic in self._own:
            why = "is txbroker's own"
        elif any(fnmatchcase(topic, pattern) for pattern in self._reserved):
            why = "is reserved (reserved_topics)"
        else:
            return None
        return Cause("reserved", f"topic {topic} {why}: it is no target", topic, -1)


def takes(topic: str, partition: int | None, size: int, facts: TargetFacts | Cause) -> Verdict:
    """Say whether a target with these facts takes a message that is not at hand, or why not.

    Args:
        topic, partition: where the message goes.
        size: an upper bound of its size in a batch, bytes.
        facts: what is known of the topic.
    """
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
            f"partition {partition} of topic {topic} has no leader: it is tried again",
            topic,
            partition,
            passing=True,
        )
    return None


async def examine_all(
    targets: Targets, topics: Iterable[str], *, create: bool
) -> dict[str, TargetFacts | Cause]:
    """Return what is known of the topics, asking Kafka about those not in the cache.

    A missing topic is asked about again where it may be created.

    Raises:
        KafkaUnavailable: Kafka does not answer.
    """
    found = {}
    for topic in topics:
        facts = targets.known(topic)
        if facts is None or (create and isinstance(facts, Cause) and facts.code == "unknown_topic"):
            facts = await targets.examine(topic, create=create)
        found[topic] = facts
    return found


class Placing:
    """Chooses the target partitions of messages that come without one: by their keys as Kafka's
    Java client does; without a key any that has a leader, the same one for a while, and for all
    of one transaction that go to a topic.

    Args:
        beside: bytes that the installation's header takes in each message.
    """

    def __init__(self, beside: int = 0) -> None:
        self._beside = beside
        self._keyless: dict[str, Sticky[int]] = {}

    def place(
        self, messages: Sequence[Message], facts: dict[str, TargetFacts | Cause], now_ms: int
    ) -> tuple[tuple[Message, ...], tuple[Place, ...]]:
        """Return the messages with their target partitions fixed, and where they go.

        Raises:
            UnknownTopic, TooLarge, BadTarget: a target would not take its message.
        """
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
            cause = takes(topic, partition, size + self._beside, known)
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
        everywhere = range(facts.partitions)
        if not facts.leaderless:
            return sticky.choose(everywhere)
        led = [partition for partition in everywhere if partition not in facts.leaderless]
        return sticky.choose(led or everywhere)


async def examine_final(
    targets: Targets, messages: Sequence[Message], now_ms: int, beside: int = 0
) -> None:
    """Refuse final messages that their caller can still change; once committed they stand.

    Whatever is wrong with a target itself can pass, so a commit is not refused for that.

    Args:
        messages: with the partitions of the prepared ones.
        beside: bytes that the installation's header takes in each.

    Raises:
        TooLarge, BadTarget: a target would never take its message.
        KafkaUnavailable: Kafka does not answer.
    """
    facts = await examine_all(
        targets, dict.fromkeys(message.topic for message in messages), create=False
    )
    check_timestamps(messages, now_ms)
    for message in messages:
        size = bytes_in_batch((message,)) + beside
        cause = takes(message.topic, message.partition, size, facts[message.topic])
        if cause is not None and cause.code == "too_large":
            raise TooLarge(cause.message)


def check_timestamps(messages: Iterable[Message], now_ms: int) -> None:
    """Refuse timestamps that brokers would refuse.

    Raises:
        BadTarget: one is over an hour ahead of the brokers' clock.
    """
    for message in messages:
        ahead_ms = (message.timestamp_ms or 0) - now_ms
        if ahead_ms > TIMESTAMP_AHEAD_MAX_MS:
            raise BadTarget(
                f"timestamp_ms is {ahead_ms // 1000} s ahead of Kafka's clock; an hour is allowed"
            )


def _refusal(cause: Cause) -> RequestError:
    if cause.code == "unknown_topic":
        return UnknownTopic(cause.message)
    if cause.code == "too_large":
        return TooLarge(cause.message)
    return BadTarget(cause.message)
