"""The options of a consumer, validated as a whole before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeAlias, TypedDict

from msgspec import Struct

from txbroker.consumer.claims import Hook, ReaderOptions
from txbroker.consumer.engine.workers import After, Before
from txbroker.consumer.positions import StartOptions
from txbroker.consumer.rounds import CommitPolicy, StoreTraits
from txbroker.consumer.stores.database import InDatabase
from txbroker.consumer.stores.files import InFile
from txbroker.consumer.stores.kafka import InKafka
from txbroker.consumer.stores.own import OWN_TRAITS, PositionStore
from txbroker.core.consuming.copies import (
    ASIDE_PARTITIONS,
    DEAD_PARTITIONS,
    GROUP_NAME_MAX,
    RETRY_PARTITIONS,
    GroupTopics,
)
from txbroker.core.consuming.failure import FailurePolicy, OnFailure, make_policy
from txbroker.core.consuming.queues import Order
from txbroker.core.records import Partition
from txbroker.door.consuming import EARLIEST, LATEST, TopicIdentity, TopicSpec
from txbroker.errors import ConfigurationError

Mode = Literal["at-least-once", "at-most-once", "exactly-once"]
OrderName = Literal["none", "partition", "key"]
Start = Literal["earliest", "latest"] | datetime | Mapping[Partition, int]

_MODES = ("at-least-once", "at-most-once", "exactly-once")
AnyStore: TypeAlias = InFile | InDatabase | InKafka | PositionStore
GROUP_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{GROUP_NAME_MAX}}}")
TRANSACTION_S, TRANSACTION_MESSAGES = 0.1, 1000
UNHANDLED = 10
"""At most once: messages of a partition whose position is stored at once. A crash loses twice as
many, so the default is small."""
DONE_ROWS = 10_000
"""Messages that are done in a database, after which a round deletes their rows: rarely, as a round
and the handlers' transactions wait for each other."""
_RECORD_BYTES = 16 << 20
_DAY_MS = 24 * 60 * 60 * 1000
_RETRY_DAYS = 30


class ConsumerOptions(TypedDict, total=False):
    """The keyword arguments of `Consumer`."""

    group: str | None
    """The consumer group. None: without a group each instance reads all partitions, and keeps its
    positions in `store`."""
    topics: Sequence[str] | None
    """Names of topics."""
    pattern: str | None
    """Instead of `topics`: a regular expression that matches whole names of topics."""
    mode: Mode
    """`at-least-once` (default) stores the position after the handler, `at-most-once` before it,
    `exactly-once` in one transaction with its result, in `store`."""
    order: OrderName
    """What keeps its order: `partition` (default), `key`, or `none`."""
    in_flight_max: int
    """Calls of the handler at the same time, at most; 64 by default."""
    local_attempts_max: int
    """Calls of the handler before `on_failure` applies; 3 by default."""
    on_failure: Literal["retry", "wait", "skip", "aside"] | None
    """What follows after that. `retry` (order `none`, its default): 16 growing delays, then the
    dead-letter topic. `wait` (default with an order): attempts go on, with growing pauses. `skip`:
    the dead-letter topic. `aside`: the message and all later ones of its key are kept until an
    operator releases them."""
    retry_interval_s: float | None
    """Between local attempts, 0.01 to 30 seconds; by default 0.1 without order, else 1. `wait`
    doubles it after them, up to 60."""
    commit: CommitPolicy
    """When positions are stored. `max_batch` is 1,000 messages by default; at most once 10, as a
    crash loses up to twice as many of each partition; in a database, where results hold positions,
    10,000."""
    store: AnyStore | None
    """Where positions are kept. `InDatabase(…)` and `InKafka()`: with the results of the handler,
    exactly once. `InFile(…)`: without a group. A `PositionStore`: your own."""
    readers: int
    """Members of the group in this process; 1 by default."""
    instance: str | None
    """A name that is unique in the group and stable over restarts (static membership): a consumer
    that restarts within the session keeps its partitions."""
    start: Start
    """Where to begin without a stored position: `earliest` (default with a group), `latest`
    (default without), a `datetime`, or offsets by `(topic, partition)`. Partitions that are added
    to a topic later are read from their beginning."""
    on_gap: Literal["stop", "skip", "continue"]
    """Unread records were deleted, or the topic has another id than the stored position: `stop`
    (default) with an error; `skip` and count them, and read another topic from its beginning;
    `continue`: the same, but in another topic, such as a mirror, at the stored offset."""
    drain_s: float
    """How long messages in flight may take when a partition is revoked or the consumer stops; 10 s
    by default."""
    handler_timeout_s: float | None
    """A call of a coroutine handler that takes longer is cancelled and fails; None: no limit."""
    buffered_bytes_max: int
    """Memory for messages, bytes; 64 MiB by default."""
    session_s: float
    """A member without heartbeats for this time is replaced; 60 s by default."""
    lease_s: float
    """Without a confirmed heartbeat for this time the consumer stops working; 30 s by default."""
    heartbeat_s: float
    """Between heartbeats; 3 s by default."""
    on_assign: Hook | None
    """Coroutine function called with assigned partitions; may return offsets to begin at."""
    on_revoke: Hook | None
    """Coroutine function called with partitions that are released or lost."""
    before: Before | None
    """Called with each message before its handler."""
    after: After | None
    """Called with each message and the error, or None, after its handler; with an error, too, where
    the result could not be stored and the message is handled again."""
    topic_prefix: str
    """Of the group's own topics; `txbroker` by default."""
    security: Mapping[str, Any] | None
    """Settings of the connection to Kafka, named as the proxy's: `kafka_security_protocol` and so
    on. They come before the environment (`TXBROKER_KAFKA_SECURITY_PROTOCOL`)."""


class ConsumerSettings(Struct, frozen=True, kw_only=True):
    """The options with their defaults; see `ConsumerOptions`."""

    group: str | None = None
    topics: Sequence[str] | None = None
    pattern: str | None = None
    mode: str = "at-least-once"
    order: str = "partition"
    in_flight_max: int = 64
    local_attempts_max: int = 3
    on_failure: str | None = None
    retry_interval_s: float | None = None
    commit: CommitPolicy | None = None
    store: AnyStore | None = None
    readers: int = 1
    instance: str | None = None
    start: Start | None = None
    on_gap: str = "stop"
    drain_s: float = 10.0
    handler_timeout_s: float | None = None
    buffered_bytes_max: int = 64 << 20
    session_s: float = 60.0
    lease_s: float = 30.0
    heartbeat_s: float = 3.0
    on_assign: Hook | None = None
    on_revoke: Hook | None = None
    before: Before | None = None
    after: After | None = None
    topic_prefix: str = "txbroker"
    security: Mapping[str, Any] | None = None

    @property
    def at_most_once(self) -> bool:
        return self.mode == "at-most-once"

    @property
    def traits(self) -> StoreTraits:
        """Of the store."""
        if isinstance(self.store, InDatabase | InKafka):
            return self.store.traits
        return OWN_TRAITS if self._own_store is not None else StoreTraits()

    @property
    def _own_store(self) -> PositionStore | None:
        known = InFile | InDatabase | InKafka | None
        return None if isinstance(self.store, known) else self.store

    @property
    def sequence(self) -> Order:
        """`order` as a value of the rules."""
        return Order(self.order)

    @property
    def own_topics(self) -> GroupTopics:
        """The names of the group's topics; those of the file's `failed` table without a group."""
        return GroupTopics.of(self.topic_prefix, self.group or "file")

    @property
    def timing(self) -> dict[str, float]:
        """Of group members."""
        return {
            "session_s": self.session_s,
            "heartbeat_s": self.heartbeat_s,
            "lease_s": self.lease_s,
        }

    def policy(self) -> FailurePolicy:
        """Return the failure policy.

        Raises:
            ConfigurationError: the options contradict each other.
        """
        on_failure = self.on_failure
        if self.group is None and not self.at_most_once:
            if on_failure not in (None, "wait", "skip"):
                raise ConfigurationError(
                    f"on_failure={on_failure!r} needs a group's topics: without a group use 'skip' "
                    "(failed messages are kept in the file) or 'wait'"
                )
            on_failure = on_failure or "skip"
        return make_policy(
            self.sequence,
            on_failure,
            self.local_attempts_max,
            self.retry_interval_s,
            drop=self.at_most_once,
        )

    def start_time(self) -> int:
        """Return `start` as a time, see `ConsumingDoor.offsets`."""
        if isinstance(self.start, datetime):
            return round(self.start.timestamp() * 1000)
        if self.start is None:
            return LATEST if self.group is None else EARLIEST
        return LATEST if self.start == "latest" else EARLIEST

    def start_offsets(self) -> Mapping[Partition, int]:
        """Return `start` as offsets, none if it is a time."""
        return self.start if isinstance(self.start, Mapping) else {}

    def needed_topics(self) -> list[TopicSpec]:
        """Return the group's own topics that the policy uses."""
        policy = self.policy()
        if policy.on_failure is None or self.group is None or isinstance(self.store, InDatabase):
            return []
        return group_topics(
            self.topic_prefix, self.group, aside=policy.on_failure is OnFailure.ASIDE
        )

    def reader_options(self, topics: Mapping[str, TopicIdentity]) -> ReaderOptions:
        """Return how readers treat partitions of `topics`, which exist at the start."""
        needed = {spec.name for spec in self.needed_topics()}
        own = self.own_topics
        return ReaderOptions(
            start=StartOptions(
                time=self.start_time(),
                offsets=self.start_offsets(),
                on_gap=self.on_gap,
                first_counts={name: topic.partitions for name, topic in topics.items()},
            ),
            drain_s=self.drain_s,
            retry_topic=own.retry if own.retry in needed else "",
            commit=self._commit_policy(),
            traits=self.traits,
            before=self.at_most_once,
            on_assign=self.on_assign,
            on_revoke=self.on_revoke,
        )

    def _commit_policy(self) -> CommitPolicy:
        if isinstance(self.store, InDatabase):
            return self.commit or CommitPolicy(max_batch=DONE_ROWS)
        if self.at_most_once:
            return self.commit or CommitPolicy(max_batch=UNHANDLED)
        commit = self.commit or CommitPolicy()
        if not isinstance(self.store, InKafka):
            return commit
        interval_s = min(commit.max_interval_s, TRANSACTION_S)
        return CommitPolicy(min(commit.max_batch, TRANSACTION_MESSAGES), interval_s)

    def validate(self) -> None:
        """Check all options.

        Raises:
            ConfigurationError: names the options and the next step.
        """
        _check_types(self)
        _check_source(self)
        _check_choices(self)
        _check_numbers(self)
        self._commit_policy().validate()
        self.policy()


def group_topics(prefix: str, group: str, *, aside: bool) -> list[TopicSpec]:
    """Return the topics that a group of consumers needs.

    Args:
        aside: with the topic of set-aside messages.
    """
    names = GroupTopics.of(prefix, group)
    configs = {"cleanup.policy": "delete", "max.message.bytes": str(_RECORD_BYTES)}
    kept = {**configs, "retention.ms": "-1"}
    retried = {**configs, "retention.ms": str(_RETRY_DAYS * _DAY_MS)}
    topics = [
        TopicSpec(names.retry, RETRY_PARTITIONS, -1, retried),
        TopicSpec(names.dead, DEAD_PARTITIONS, -1, kept),
    ]
    return [*topics, TopicSpec(names.aside, ASIDE_PARTITIONS, -1, kept)] if aside else topics


def _check_types(given: ConsumerSettings) -> None:
    if not isinstance(given.group, str | None):
        raise ConfigurationError(f"group is {given.group!r}: it is a name, as text")
    if not isinstance(given.pattern, str | None):
        raise ConfigurationError(
            f"pattern is {given.pattern!r}: it is a regular expression, as text"
        )
    if not isinstance(given.commit, CommitPolicy | None):
        raise ConfigurationError(
            f"commit is {given.commit!r}: write commit=CommitPolicy(max_batch=…, max_interval_s=…)"
        )
    if given.store is not None and not isinstance(
        given.store, InFile | InDatabase | InKafka | PositionStore
    ):
        raise ConfigurationError(
            f"store is {given.store!r}: give InDatabase(…), InKafka(), InFile(…), or an object "
            "with the methods load and save, see PositionStore"
        )
    for name in ("on_assign", "on_revoke", "before", "after"):
        function = getattr(given, name)
        if function is not None and not callable(function):
            raise ConfigurationError(
                f"{name} is {function!r}, which cannot be called: pass a function"
            )
    for place, offset in given.start_offsets().items():
        match place, offset:
            case (str(), int()), int() if offset >= 0:
                continue
        raise ConfigurationError(
            f"start has {place!r}: {offset!r}; it is an offset by (topic, partition), as "
            "{('orders', 0): 17}"
        )


def _check_source(given: ConsumerSettings) -> None:
    if isinstance(given.topics, str):
        raise ConfigurationError(f"topics is a list of names: write topics=[{given.topics!r}]")
    if bool(given.topics) == (given.pattern is not None):
        raise ConfigurationError("give either topics or pattern: the topics to consume")
    if given.pattern is not None:
        try:
            re.compile(given.pattern)
        except re.error as error:
            raise ConfigurationError(f"pattern {given.pattern!r}: {error}") from None
    if given.group is None:
        if not isinstance(given.store, InFile):
            raise ConfigurationError(
                "without a group positions need a store: give group, or store=InFile(path)"
            )
        if given.instance is not None or given.readers != 1:
            raise ConfigurationError("instance and readers need a group: give group")
    elif isinstance(given.store, InFile):
        raise ConfigurationError(
            f"group {given.group!r} keeps its positions in Kafka: leave store out, or leave group "
            "out to read all partitions in every instance"
        )
    elif not GROUP_NAME.fullmatch(given.group):
        raise ConfigurationError(
            f"group {given.group[:60]!r} makes no topic names, as {given.topic_prefix}.dead.GROUP: "
            f"use 1 to {GROUP_NAME_MAX} letters, digits, dots, dashes and underscores"
        )


def _check_choices(given: ConsumerSettings) -> None:
    exact = isinstance(given.store, InDatabase | InKafka)
    if given.mode == "exactly-once" and not exact:
        raise ConfigurationError(
            "mode 'exactly-once' needs a store that keeps a result and its position in one "
            "transaction: give store=InDatabase(…) or store=InKafka(); or use 'at-least-once' and "
            "make the handler repeatable by message.id"
        )
    if exact and given.mode != "exactly-once":
        raise ConfigurationError(
            f"store {type(given.store).__name__} is for mode 'exactly-once', not {given.mode!r}: "
            "give mode='exactly-once', or leave store out"
        )
    for name, value, choices in (
        ("mode", given.mode, _MODES),
        ("order", given.order, tuple(Order)),
        ("on_gap", given.on_gap, ("stop", "skip", "continue")),
    ):
        if value not in choices:
            raise ConfigurationError(f"{name} {value!r} is not one of {', '.join(choices)}")
    start = given.start
    if not (start in (None, "earliest", "latest") or isinstance(start, datetime | Mapping)):
        raise ConfigurationError(
            f"start {start!r} is not 'earliest', 'latest', a datetime or offsets by "
            "(topic, partition)"
        )


def _check_numbers(given: ConsumerSettings) -> None:
    for name, kind, least in (
        ("in_flight_max", int, 1),
        ("local_attempts_max", int, 1),
        ("readers", int, 1),
        ("buffered_bytes_max", int, 1 << 16),
        ("drain_s", float, 0),
        ("heartbeat_s", float, 0.05),
        ("lease_s", float, 0),
        ("session_s", float, 0),
        ("retry_interval_s", float, 0),
        ("handler_timeout_s", float, 0.01),
    ):
        value = getattr(given, name)
        if value is None and name in ("retry_interval_s", "handler_timeout_s"):
            continue
        kinds = (int,) if kind is int else (int, float)
        if not isinstance(value, kinds) or not least <= value < float("inf"):
            word = "a whole number" if kind is int else "a number"
            raise ConfigurationError(f"{name} is {value!r}: it is {word}, at least {least}")
    if not given.heartbeat_s < given.lease_s < given.session_s:
        raise ConfigurationError(
            f"heartbeat_s {given.heartbeat_s:g}, lease_s {given.lease_s:g} and session_s "
            f"{given.session_s:g} must rise: the lease ends before another consumer takes over"
        )
