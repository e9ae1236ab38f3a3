"""Examine a Kafka cluster for `txbroker doctor`. Read-only: creates, writes and changes nothing."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct, structs

from txbroker.contract.audit import BATCH_KEY, STREAM_KEY
from txbroker.core.records import Partition, Record
from txbroker.door.consuming import TopicSpec
from txbroker.door.own_topics import Layout, find_layout
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import (
    GROUP,
    TRANSACTION,
    ClientOwner,
    KafkaRefused,
    address_text,
    is_retriable,
)
from txbroker.kafka.client.reader import READ_COMMITTED, READ_UNCOMMITTED, Reader, end_offsets
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door import topics as own
from txbroker.kafka.door.repair import Repair, StoppingRecord
from txbroker.kafka.protocol.codes import COORDINATOR_MOVED, Code
from txbroker.kafka.protocol.schemas import (
    RIGHTS_NOT_REQUESTED,
    DescribeGroupsV4,
    DescribeTransactionsV0,
    ListOffsetsV7,
    ListTransactionsV0,
    api_versions,
    describe_producers,
    metadata,
)
from txbroker.net.timers import Backoff

_CHANNEL = "examine"
_ANSWER_S = 3.0
"""A healthy broker answers these requests in milliseconds."""
_COORDINATOR_S = 6.0
"""The first request about groups makes Kafka create an internal topic."""
_DENIED = frozenset(
    {
        Code.GROUP_AUTHORIZATION_FAILED,
        Code.CLUSTER_AUTHORIZATION_FAILED,
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_ENDED = frozenset({"Empty", "CompleteCommit", "CompleteAbort"})
"""Coordinator states in which neither a transaction nor its markers are in progress."""
_AUDIT_KEYS = (BATCH_KEY, STREAM_KEY)
_FETCH = 1

# Numbers of Kafka's AclOperation. Rights are a bit field of them.
_OPERATIONS = {
    "Read": 3,
    "Write": 4,
    "Create": 5,
    "Alter": 7,
    "Describe": 8,
    "DescribeConfigs": 10,
    "AlterConfigs": 11,
}


class BrokerFacts(Struct, frozen=True):
    """A broker as reached from this machine at its advertised listener.

    Attributes:
        fetch_version: newest supported version of Fetch, which identifies the release; -1 without
            an answer.
        why: why it did not answer, else "".
    """

    node: int
    address: str
    fetch_version: int = -1
    why: str = ""


class PartitionCopies(Struct, frozen=True):
    """The replicas of a partition, by broker id; `leader` is -1 if there is none."""

    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    offline: tuple[int, ...] = ()


class TopicSeen(Struct, frozen=True):
    """A topic as the caller may see it; `rights` are ACL operations, None if not returned."""

    error: int
    partitions: dict[int, PartitionCopies]
    rights: frozenset[str] | None


class ClusterFacts(Struct, frozen=True):
    """A Kafka cluster: its id, controller, broker addresses by id, and requested topics."""

    id: str
    controller: int
    addresses: dict[int, str]
    topics: dict[str, TopicSeen]


class OpenTransaction(Struct, frozen=True):
    """A Kafka transaction that blocks `read_committed` readers of a partition.

    Attributes:
        producer_id: -1 if the leader may not be asked.
        hidden: number of offsets that it hides.
        transactional_id: "" if no coordinator returned it.
        state: the coordinator's state of it.
        started_ms: by the coordinator's clock, ms since 1970; None if unknown.
        last_write_ms: timestamp of its newest record, which may be the writer's.
        first: its first offset; -1 if the leader may not be asked.
        lost: whether its end marker was lost: its coordinator had completed it before the leader
            still reported it as open.
    """

    topic: str
    partition: int
    producer_id: int
    hidden: int
    transactional_id: str = ""
    state: str = ""
    started_ms: int | None = None
    last_write_ms: int | None = None
    first: int = -1
    lost: bool = False


class KafkaExamination(ClientOwner):
    """Examines one Kafka cluster."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = structs.replace(
            settings, request_timeout_s=_ANSWER_S, write_timeout_s=_ANSWER_S, retry_backoff_s=0.05
        )
        super().__init__(self.settings)
        self._admin = Admin(self._client)

    async def cluster(self, topics: Iterable[str] = ()) -> ClusterFacts:
        """Return the brokers, and metadata of topics."""
        answer = await self._client.ask_any(metadata(topics, rights=True), _CHANNEL)
        return ClusterFacts(
            answer.cluster_id or "",
            answer.controller_id,
            {node: address_text(host, port) for node, host, port, _rack in answer.brokers},
            {
                name: _topic_seen(error, partitions, bits)
                for error, name, _id, _internal, partitions, bits in answer.topics
            },
        )

    async def brokers(self) -> list[BrokerFacts]:
        """Return each broker as reached at its advertised listener."""
        cluster = await self.cluster()
        await self._client.refresh(())
        requests = (self._broker(node, address) for node, address in cluster.addresses.items())
        return list(await asyncio.gather(*requests))

    async def _broker(self, node: int, address: str) -> BrokerFacts:
        try:
            answer = await self._client.ask(node, api_versions(), _CHANNEL)
        except (KafkaUnavailable, ConfigurationError) as error:
            return BrokerFacts(node, address, why=str(error))
        newest = {key: version for key, _oldest, version in answer.api_versions}
        return BrokerFacts(node, address, newest.get(_FETCH, -1))

    async def group_error(self) -> int:
        """Return the error code of describing the proxies' consumer group, 0 for none."""
        return await self._error_of(self._group_error)

    async def transactional_id_error(self) -> int:
        """Return the error code of looking up the proxies' transactional ids, 0 for none."""
        name = f"{self.settings.half_topic}-0-a"
        return await self._error_of(partial(self._client.coordinator, TRANSACTION, name))

    async def _error_of(self, request: Callable[[], Awaitable[int | None]]) -> int:
        """Retry a request; return 0, or its error code where it is not authorized."""
        backoff = Backoff(_COORDINATOR_S, self.settings.retry_backoff_s)
        while True:
            try:
                await request()
            except KafkaUnavailable as error:
                if isinstance(error, KafkaRefused) and error.code in _DENIED:
                    return error.code
                if not is_retriable(error) or not await backoff.pause():
                    raise
            else:
                return Code.NONE

    async def _group_error(self) -> int:
        group = self.settings.group_id
        node = await self._client.coordinator(GROUP, group)
        answer = await self._client.ask(node, DescribeGroupsV4([group]), _CHANNEL)
        code: int = answer.groups[0][0]
        if code in COORDINATOR_MOVED:
            self._client.forget_coordinator(GROUP, group)
            raise KafkaRefused(code)
        return code

    # --- topics ------------------------------------------------------------------------------

    async def found(self) -> dict[str, TopicSpec]:
        """Return those of txbroker's own topics that exist, with their settings.

        Raises:
            ConfigurationError: no right to describe a topic.
        """
        return await self.specs(self.settings.own_topics + self.settings.audit_topics)

    async def specs(self, names: tuple[str, ...]) -> dict[str, TopicSpec]:
        """Return those of the named topics that exist, with their settings; see `found`."""
        return await own.find(self._admin, names)

    async def contradictions(self, found: Mapping[str, TopicSpec]) -> list[str]:
        """Return, as sentences, why txbroker cannot work with its topics."""
        return own.contradictions(self.settings, found, await self._layout(found))

    async def plan(self, found: Mapping[str, TopicSpec]) -> own.Plan:
        """Return the changes that `txbroker topics apply` would make."""
        await self._client.refresh(())
        layout = await self._layout(found)
        return own.own_plan(self.settings, len(self._client.brokers), found, layout)

    async def _layout(self, found: Mapping[str, TopicSpec]) -> Layout | None:
        if self.settings.groups_topic not in found:
            return None
        return find_layout(await self._records(self.settings.groups_topic))

    async def audit_news(self) -> dict[str, bytes]:
        """Return the newest record of each kind of audit, by its key."""
        newest: dict[str, bytes] = {}
        for record in await self._records(self.settings.audit_topic):
            key = (record.key or b"").decode(errors="replace")
            if key in _AUDIT_KEYS and record.value is not None:
                newest[key] = record.value
            elif key in _AUDIT_KEYS:
                newest.pop(key, None)
        return newest

    async def _records(self, topic: str) -> list[Record]:
        reader = Reader(self._client, topic, 0, f"{_CHANNEL}/{topic}", append_time=False)
        return await reader.read_kept(0, await reader.stable_end())

    async def set_aside(self) -> list[StoppingRecord]:
        """Return the newest records of other clients in txbroker's own topics that stop no
        partition.

        Raises:
            ConfigurationError: the installation has no topics.
        """
        repair = Repair(self._client, lambda _topic: self.settings.message_bytes_max)
        return await repair.set_aside()

    # --- clocks ------------------------------------------------------------------------------

    async def newest_appends(self, cluster: ClusterFacts) -> dict[Partition, int]:
        """Return the newest timestamp of each partition, ms since 1970.

        With LogAppendTime the leader's clock has reached it. Partitions that are empty or have no
        leader are missing.
        """
        newest: dict[Partition, int] = {}
        for leader, topics in _by_leader(cluster).items():
            asked = [(name, [(number,) for number in numbers]) for name, numbers in topics.items()]
            answer = await self._client.ask(leader, ListOffsetsV7(asked), _CHANNEL)
            for topic, partitions in answer.topics:
                for number, code, at_ms, *_rest in partitions:
                    if code == Code.NONE and at_ms > 0:
                        newest[topic, number] = at_ms
        return newest

    # --- open transactions -------------------------------------------------------------------

    async def open_transactions(self, topics: Sequence[str]) -> list[OpenTransaction]:
        """Return the transactions that hide the ends of these topics from consumers.

        Most are in progress and end a moment later; see `started_ms`.
        """
        cluster = await self.cluster(topics)
        await self._client.refresh(topics)
        partitions = [(name, p) for name, topic in cluster.topics.items() for p in topic.partitions]
        high = await end_offsets(self._client, partitions, READ_UNCOMMITTED, _CHANNEL)
        hidden = await self._hidden(high)
        transactions = await self._producers(cluster, hidden)
        transactions = await self._add_coordinator_state(cluster, transactions)
        transactions = await self._mark_lost(cluster, hidden, transactions)
        # Some have ended meanwhile.
        still = await self._hidden({partition: high[partition] for partition in hidden})
        return [one for one in transactions if (one.topic, one.partition) in still]

    async def _hidden(self, high: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return the number of hidden offsets of each partition that has any."""
        stable = await end_offsets(self._client, high, READ_COMMITTED, _CHANNEL)
        return {p: high[p] - offset for p, offset in stable.items() if offset < high[p]}

    async def _producers(
        self, cluster: ClusterFacts, hidden: Mapping[Partition, int]
    ) -> list[OpenTransaction]:
        transactions = []
        for leader, topics in _by_leader(cluster, frozenset(hidden)).items():
            answer = await self._client.ask(leader, describe_producers(topics), _CHANNEL)
            for topic, partitions in answer.topics:
                for number, code, _message, producers in partitions:
                    count = hidden[topic, number]
                    if code != Code.NONE:
                        transactions.append(OpenTransaction(topic, number, -1, count))
                        continue
                    transactions += [
                        OpenTransaction(topic, number, id, count, last_write_ms=at_ms, first=first)
                        for id, _epoch, _sequence, at_ms, _coordinator_epoch, first in producers
                        if first >= 0
                    ]
        return transactions

    async def _mark_lost(
        self,
        cluster: ClusterFacts,
        hidden: Mapping[Partition, int],
        transactions: Sequence[OpenTransaction],
    ) -> list[OpenTransaction]:
        """Mark transactions that are still open after their coordinator completed them.

        It completes a transaction only after it has sent the marker to every leader.
        """
        if not any(one.state in _ENDED for one in transactions):
            return list(transactions)
        still = {_identity(one) for one in await self._producers(cluster, hidden)}
        return [
            structs.replace(one, lost=one.state in _ENDED and _identity(one) in still)
            for one in transactions
        ]

    async def _add_coordinator_state(
        self, cluster: ClusterFacts, transactions: Sequence[OpenTransaction]
    ) -> list[OpenTransaction]:
        if not transactions:
            return []
        ids = {one.producer_id for one in transactions}
        answers = await asyncio.gather(
            *(self._find_coordinated(node, ids) for node in cluster.addresses),
            return_exceptions=True,
        )
        states: dict[int, tuple[Any, ...]] = {}
        for answer in answers:
            if isinstance(answer, dict):
                states |= answer
        return [_with_state(one, states.get(one.producer_id)) for one in transactions]

    async def _find_coordinated(
        self, node: int, producers: Iterable[int]
    ) -> dict[int, tuple[Any, ...]]:
        """Return the transactions of producers that a broker coordinates, by producer id."""
        listed = await self._client.ask(node, ListTransactionsV0([], list(producers)), _CHANNEL)
        names = [name for name, *_ in listed.transaction_states]
        if not names:
            return {}
        answer = await self._client.ask(node, DescribeTransactionsV0(names), _CHANNEL)
        return {state[5]: state for state in answer.transaction_states if state[0] == Code.NONE}


def _topic_seen(error: int, partitions: Sequence[tuple[Any, ...]], bits: int) -> TopicSeen:
    rights = None
    if bits != RIGHTS_NOT_REQUESTED:
        rights = frozenset(name for name, bit in _OPERATIONS.items() if bits >> bit & 1)
    copies = {
        number: PartitionCopies(leader, tuple(replicas), tuple(in_sync), tuple(offline))
        for _error, number, leader, _epoch, replicas, in_sync, offline in partitions
    }
    return TopicSeen(error, copies, rights)


def _by_leader(
    cluster: ClusterFacts, only: frozenset[Partition] | None = None
) -> dict[int, dict[str, list[int]]]:
    led: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name, topic in cluster.topics.items():
        for number, copies in topic.partitions.items():
            if copies.leader >= 0 and (only is None or (name, number) in only):
                led[copies.leader][name].append(number)
    return led


def _identity(one: OpenTransaction) -> tuple[str, int, int, int]:
    return one.topic, one.partition, one.producer_id, one.first


def _with_state(one: OpenTransaction, state: tuple[Any, ...] | None) -> OpenTransaction:
    if state is None:
        return one
    started_ms = state[4] if state[4] >= 0 else None
    return structs.replace(one, transactional_id=state[1], state=state[2], started_ms=started_ms)
