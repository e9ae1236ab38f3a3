"""Whether a target topic takes a message, which partition a message goes to, and what is kept away
from targets for a while."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct, structs

from txbroker.batching import Sticky
from txbroker.core.encoding import BATCH_OVERHEAD_BYTES, bytes_in_batch
from txbroker.core.ledger import Ledger
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import Cause, Message, Place, State
from txbroker.core.routing import murmur2
from txbroker.core.schedule import Schedule
from txbroker.core.transaction import Transaction, places_of
from txbroker.door.protocols import NotVisible, TargetFacts, Targets
from txbroker.errors import BadTarget, InvariantBroken, RequestError, TooLarge, UnknownTopic
from txbroker.proxy.partition.body_cache import refused_as_lost

TIMESTAMP_AHEAD_MAX_MS = 3_600_000
"""Brokers refuse records that are further ahead of their clock than this, by default."""
KAFKA_TOPICS = frozenset(
    {"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"}
)
"""What Kafka keeps for itself."""
_TOPICS_MAX = 10_000
"""Topics of which it is remembered where the last message without a key went."""


class PermittedTargets(Targets):
    """A `Targets` that knows by their names alone which topics are no targets, when a
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
        """Ask Kafka about a topic; see `txbroker.door.protocols.Targets`.

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


def takes(topic: str, partition: int | None, size: int, facts: TargetFacts | Cause) -> Cause | None:
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


class TargetPartitioner:
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


RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0
"""Deferred and refused transactions are tried again after the first pause, then after twice the
last one, up to the longest."""


NOT_VISIBLE = "not_visible"
"""The code of the cause of a transaction whose turn is committed, and that readers do not see."""


def note_invisible(transactions: Iterable[Transaction], error: NotVisible) -> None:
    """Say of the transactions of a committed turn why readers do not see them yet: whoever looks
    for what to abort must not take them for ones that will be promoted again."""
    for transaction in transactions:
        if transaction.state is not State.COMMITTED:
            continue  # what a refused one was refused for counts until it is visible
        places = {(place.topic, place.partition) for place in transaction.places}
        topic, number = next((p for p in error.partitions if p in places), error.partitions[0])
        transaction.cause = Cause(
            NOT_VISIBLE,
            f"its turn is committed, but readers do not come past it in {topic}-{number}, where a "
            "transaction is open; if that is this turn, an abort would lose its messages: see "
            "docs/operate/lost-end.md",
            topic,
            number,
            passing=True,
        )


class _Retry(Struct, frozen=True):
    """When to try again, and how long to wait after that."""

    at_s: float
    pause_s: float


class _Avoided(Struct, frozen=True):
    """A target partition that could not be written, though its facts look well."""

    cause: Cause
    retry: _Retry


class Trouble:
    """What one half partition's turns have to do without for the moment.

    Args:
        ledger: tells which transactions are ready, and which are refused; only read.
        limits: how much goes into a turn while nothing spoils it.
        monotonic_s: a clock that never goes back, seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        limits: PromotionLimits,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._limits = limits
        self._monotonic_s = monotonic_s
        self._avoided: dict[tuple[str, int | None], _Avoided] = {}
        self._deferred_retry: _Retry | None = None
        self._retries = Schedule()
        self._retry_pauses_s: dict[str, float] = {}
        self._suspects: frozenset[str] = frozenset()
        self._suspects_limit = 0
        self._refused_alone: set[str] = set()
        self._tried: dict[str, Cause] = {}
        self._given_up: set[str] = set()

    def wait_s(self) -> float | None:
        """Return how long until something is to be tried again, seconds; None: nothing is."""
        times_s = [] if self._deferred_retry is None else [self._deferred_retry.at_s]
        retry_ms = self._retries.next_ms()
        if retry_ms is not None:
            times_s.append(retry_ms / 1000)
        return max(0.0, min(times_s) - self._monotonic_s()) if times_s else None

    def promoted(self, transactions: Iterable[Transaction]) -> None:
        """Forget what was known against these, and places whose last pause ended long ago."""
        ids = [transaction.half.id for transaction in transactions]
        self._refused_alone.difference_update(ids)
        self._given_up.difference_update(ids)
        for id in self._retry_pauses_s.keys() & ids:
            del self._retry_pauses_s[id]
        long_ago_s = self._monotonic_s() - RETRY_MAX_S
        self._avoided = {
            place: avoided
            for place, avoided in self._avoided.items()
            if avoided.retry.at_s > long_ago_s
        }

    # --- target partitions, and what is deferred because of them -------------------------------

    def avoid(self, cause: Cause) -> None:
        """Keep off the target partition that a cause names; each time for longer."""
        place = (cause.topic, cause.partition)
        known = self._avoided.get(place)
        self._avoided[place] = _Avoided(cause, self._later(known.retry if known else None))

    def avoided(self, topic: str, partition: int | None) -> Cause | None:
        """Return why a target partition is kept off now; None if it is not."""
        known = self._avoided.get((topic, partition))
        if known is not None and known.retry.at_s > self._monotonic_s():
            return known.cause
        return None

    def note_deferred(self, *, waiting: bool) -> None:
        """Come back later for what is deferred, after a pause that grows while any `waiting` is."""
        if not waiting:
            self._deferred_retry = None
        elif self._deferred_retry is None or self._deferred_retry.at_s <= self._monotonic_s():
            self._deferred_retry = self._later(self._deferred_retry)

    def _later(self, retry: _Retry | None) -> _Retry:
        """Return when to try again: after the first pause, then after twice the last one."""
        pause_s = RETRY_FIRST_S if retry is None else min(retry.pause_s * 2, RETRY_MAX_S)
        return _Retry(self._monotonic_s() + pause_s, pause_s)

    # --- refused transactions ------------------------------------------------------------------

    @property
    def tried(self) -> Mapping[str, Cause]:
        """Why a broker refused a transaction, by id, where only trying could tell.

        Such a one is tried again when an operator says so, and not before.
        """
        return self._tried

    def retry_later(self, id: str) -> None:
        """Put a refused transaction to its next time, unless only an operator can tell when."""
        if id not in self._tried and id not in self._given_up:
            pause_s = self._retry_pauses_s.get(id, RETRY_FIRST_S)
            self._retries.set(id, self._monotonic_ms() + round(pause_s * 1000))
            self._retry_pauses_s[id] = min(pause_s * 2, RETRY_MAX_S)

    def retry_all(self) -> None:
        """After recovery: whatever is refused is tried again, each after the first pause."""
        for id, transaction in self._ledger.index.refused.items():
            if refused_as_lost(transaction):
                self.give_up(id)
            elif id not in self._retry_pauses_s:
                self.retry_later(id)

    def give_up(self, id: str) -> None:
        """Its messages are gone: trying again by itself would find the same."""
        self._given_up.add(id)

    def retry_now(self, id: str) -> None:
        """Try a refused transaction again now, whatever was found out about it before."""
        self._tried.pop(id, None)
        self._refused_alone.discard(id)
        self._given_up.discard(id)
        if id in self._ledger.index.refused:
            self._retry_pauses_s.pop(id, None)
            self._retries.set(id, self._monotonic_ms())

    def take_due(self, in_flight: Collection[str]) -> list[Transaction]:
        """Return the refused transactions whose time has come, and put each to its next time.

        Args:
            in_flight: ids whose fate a turn on its way decides; they are not returned.
        """
        due = []
        for id in list(self._retries.pop_due(self._monotonic_ms())):
            transaction = self._ledger.index.refused.get(id)
            if transaction is None:
                self._retry_pauses_s.pop(id, None)
                continue
            self.retry_later(id)
            if id not in in_flight and id not in self._tried:
                due.append(transaction)
        return due

    def _monotonic_ms(self) -> int:
        return int(self._monotonic_s() * 1000)

    # --- turns that a record spoiled -----------------------------------------------------------

    def isolate(self, transactions: Sequence[Transaction], cause: Cause) -> None:
        """A record spoiled its turn: try again in halves, until one transaction fails alone.

        Args:
            transactions: what the turn was to promote.
            cause: why which target partition did not take it.

        Raises:
            InvariantBroken: it was a record of our own.
        """
        ours = not any(m.topic == cause.topic for t in transactions for m in t.messages)
        if ours and not cause.passing:
            # No transaction is to blame, and none could be set aside: that is written there too.
            raise InvariantBroken(f"a turn cannot be written: {cause.message}")
        if cause.passing:
            self.avoid(cause)
        elif len(transactions) == 1:
            id = transactions[0].id
            if id in self._refused_alone:
                self._tried[id] = cause
            # Once more first: examined anew, the target may show what is wrong, and then the
            # transaction is tried again by itself when that has passed.
            self._refused_alone.add(id)
        else:
            self._suspects = frozenset(transaction.id for transaction in transactions)
            self._suspects_limit = max(1, len(transactions) // 2)

    def limits(self, retried: Iterable[Transaction]) -> PromotionLimits:
        """Return smaller limits while a turn would hold a transaction that may spoil it.

        Args:
            retried: the refused transactions that the turn may hold beside all that are ready.
        """
        if not self._suspects:
            return self._limits
        self._suspects = frozenset([id for id in self._suspects if self._may_be_tried(id)])
        again = {transaction.id for transaction in retried}
        if not any(id in self._ledger.index.ready or id in again for id in self._suspects):
            return self._limits
        return PromotionLimits(
            self._suspects_limit, self._limits.bytes_max, self._limits.deferred_max
        )

    def _may_be_tried(self, id: str) -> bool:
        return id in self._ledger.index.ready or (
            id in self._ledger.index.refused and id not in self._tried
        )
