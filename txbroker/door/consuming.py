"""What a consumer needs of Kafka, as small protocols.

`txbroker.kafka` implements them on a real Kafka, `txbroker.testing` in memory; one contract suite
runs on both. Every method that asks Kafka raises `KafkaUnavailable` if it does not answer;
`lasting` is True where waiting does not help.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Cause, Partition, Record
from txbroker.door.writing import Copy, PositionRecord, Writer
from txbroker.errors import KafkaUnavailable

EARLIEST, LATEST = -2, -1
"""Where a partition begins, and its last stable offset: times for `ConsumingDoor.offsets`."""


class StoreUnavailable(KafkaUnavailable):
    """A store of positions, outside of Kafka, does not answer or refuses; the consumer tries
    again."""


class OffsetMissing(KafkaUnavailable):
    """A fetch was for an offset that the partition does not hold: it was deleted, or the log is
    another one. Fetching of the partition has ended."""

    lasting = True


class FetchingEnded(KafkaUnavailable):
    """An unexpected error in this process ended a fetch: the fetcher must not be used any more."""

    lasting = True


class TopicIdentity(NamedTuple):
    """A topic's id, which changes when it is created again, and its number of partitions."""

    id: bytes
    partitions: int


class TopicSpec(Struct, frozen=True):
    """A topic, required or existing.

    To create, `partitions` or `replication` -1 is the cluster's default. Of an existing topic
    `configs` is empty if they may not be read.
    """

    name: str
    partitions: int
    replication: int
    configs: Mapping[str, str]


class MemberListener(Protocol):
    """Receives what happens to a group member. Called on the event loop; must not block."""

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """A new generation began with these partitions assigned to this member.

        Partitions that it owns (`GroupMember.owned`) and that are missing here were revoked: finish
        with them, take them out of `owned` and call `rejoin`. No member gets them before. Those
        that are new are not owned by any other live member."""

    def lost(self, why: str) -> None:
        """The member is out of the group, its partitions may be reassigned; `owned` is empty.

        It joins again on its own as a new member, and `assigned` follows."""


class GroupMember(Protocol):
    """One member of a consumer group.

    Attributes:
        owned: the partitions in use, as the group's leader learns them when this member joins. The
            caller adds assigned partitions and removes released ones.
        deadline_s: the lease: event loop time (`loop.time()`) of the newest confirmed heartbeat,
            plus the lease's length. After it, start nothing and commit nothing.
    """

    owned: set[Partition]

    @property
    def deadline_s(self) -> float: ...

    async def start(self) -> None:
        """Join the group; return after the first assignment.

        Raises:
            ConfigurationError: the group cannot be used, as a sentence with the next step.
        """

    def subscribe(self, topics: Collection[str]) -> None:
        """Subscribe to these topics. If they changed, or their number of partitions did, rejoin."""

    def rejoin(self) -> None:
        """Begin a new generation, which distributes `owned`."""

    async def close(self) -> None:
        """Leave the group, and end. A static member (with an instance id) does not leave, so that
        it keeps its partitions if it is started again within the session."""

    async def load(self, partitions: Collection[Partition]) -> dict[Partition, StoredOffset]:
        """Return the group's committed offsets, without partitions that have none. Waits until no
        Kafka transaction with offsets is open (`require_stable`)."""

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> None:
        """Store offsets with this member's generation; copies and offsets are stored together, in
        one Kafka transaction, or not at all. Calls may overlap.

        Raises:
            Fenced: this member's generation has ended, or another process uses its instance id.
            Refused
            KafkaUnavailable: the result is unknown. It is known before the next `load` returns.
        """


class Deliver(Protocol):
    def __call__(
        self, partition: Partition, records: Sequence[Record], next_offset: int, end: int
    ) -> None:
        """Take committed records of one partition, in offset order.

        Args:
            records: may be empty.
            next_offset: every offset below it is in `records` or in earlier ones, or holds none.
            end: the partition's last stable offset, as far as known.
        """


class Fetcher(Protocol):
    """Fetches partitions continuously and concurrently, `read_committed`, and delivers records in
    pieces that take a few milliseconds.

    A paused partition delivers at most records that are fetched already. Brokers that fail are
    retried with back-off; each failure is reported.

    Attributes:
        partition_bytes: what a request fetches of one partition at most, unless a batch is larger.
    """

    partition_bytes: int

    def add(self, partition: Partition, offset: int) -> None:
        """Fetch a partition from `offset` on."""

    def remove(self, partition: Partition) -> None:
        """Stop fetching a partition; nothing of it is delivered after this call."""

    def pause(self, partition: Partition) -> None: ...

    def resume(self, partition: Partition) -> None: ...

    async def close(self) -> None: ...


class FetchFailed(Protocol):
    def __call__(self, partition: Partition, error: KafkaUnavailable) -> None:
        """A partition cannot be fetched. With `OffsetMissing` fetching of it has ended; otherwise
        it is retried."""


class GroupDescription(NamedTuple):
    """A group, as its coordinator describes it.

    Attributes:
        state: Kafka's word, such as `Stable`, `PreparingRebalance`, `Empty` or `Dead` (unknown).
        members: name (instance id, or member id), host, and partitions of each.
    """

    state: str
    members: tuple[tuple[str, str, frozenset[Partition]], ...]


class ConsumingDoor(Protocol):
    """A connection to Kafka for one consumer or relay, or for an operator."""

    async def start(self) -> None:
        """Connect.

        Raises:
            ConfigurationError: names or credentials are wrong.
        """

    async def close(self) -> None: ...

    async def topics(self, names: Collection[str] | None = None) -> dict[str, TopicIdentity]:
        """Return the facts of topics that exist and may be read; None: of all topics."""

    async def target(self, topic: str, prefix: str) -> int | Cause:
        """Return a topic's number of partitions, to write messages to it; or why it is no target:
        it does not exist, may not be described, or is an own topic (see `door.owners`).

        Args:
            prefix: of txbroker's own topics, whose names alone show it.
        """

    async def offsets(
        self, partitions: Collection[Partition], time_ms: int
    ) -> dict[Partition, int]:
        """Return the first offset with this timestamp or a later one, `EARLIEST` or `LATEST`.
        Without such a record, the last stable offset."""

    async def settled_end(self, partition: Partition) -> int:
        """Wait until `read` shows all committed records that were written before this call; return
        the end of these. An open transaction hides committed records after its first one."""

    async def create(self, topics: Collection[TopicSpec]) -> None:
        """Create topics that do not exist.

        Raises:
            ConfigurationError: Kafka refuses; the message holds its reason.
        """

    def member(
        self,
        group: str,
        instance: str | None,
        listener: MemberListener,
        *,
        exact: bool = False,
        **timing: Any,
    ) -> GroupMember:
        """Return a member that has not started.

        Args:
            instance: a static member's instance id, unique in the group; None: a dynamic member.
            exact: offsets are committed in Kafka transactions alone: a commit that arrives late
                moves no offset back.
            timing: `session_s`, `heartbeat_s`, `lease_s`.
        """

    def fetcher(self, deliver: Deliver, failed: FetchFailed) -> Fetcher: ...

    async def read(self, partition: Partition, start: int, end: int) -> list[Record]:
        """Return the committed records from offset `start` (or where the log begins, if that is
        later) up to, not including, `end`."""

    async def append(self, topic: str, partition: int, records: Sequence[Record]) -> None:
        """Append records outside of a transaction."""

    async def store(self, group: str, copies: Sequence[Copy]) -> None:
        """Append records to topics of a group in one Kafka transaction: all or none.

        Raises:
            Refused
            KafkaUnavailable: the result is unknown. An open transaction ends by its timeout.
        """

    def writer(
        self, transactional_id: str, position: PositionRecord, *, take: bool = False
    ) -> Writer:
        """Return a writer, which has to be claimed.

        Args:
            take: where no position is proved, take the newest record of any client.
        """

    async def groups(self) -> list[str]:
        """Return the names of all consumer groups."""

    async def describe(self, group: str) -> GroupDescription: ...

    async def committed(self, group: str) -> dict[Partition, StoredOffset]:
        """Return all committed offsets of a group."""


class HasConsumingDoor(Protocol):
    """A Kafka that is no address, such as `txbroker.testing.InMemoryBroker`."""

    def consuming_door(self) -> ConsumingDoor:
        """Return a door for one consumer or relay."""
