"""What an examination asks of a Kafka. It only reads: nothing is created, written or changed."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiokafka.protocol.admin import ApiVersionRequest, DescribeGroupsRequest
from msgspec import Struct, structs

from txbroker.contract.audit import BATCH_KEY, STREAM_KEY
from txbroker.core.records import Record
from txbroker.door.own_topics import Layout, find_layout
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import Client, KafkaRefused, may_pass
from txbroker.kafka.client.offsets import READ_COMMITTED, READ_UNCOMMITTED, ends
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door import topics as own
from txbroker.kafka.protocol.codes import COORDINATOR_MOVED, Code
from txbroker.kafka.protocol.schemas import (
    NO_RIGHTS_TOLD,
    DescribeTransactionsRequest,
    ListTransactionsRequest,
    NewestRequest,
    ProducersRequest,
    RightsRequest,
)
from txbroker.kafka.tools.repair import Found, Repair
from txbroker.net.backoff import Backoff

_LANE = "examine"
_ANSWER_S = 3.0
"""A broker that is well answers an examination's questions in milliseconds."""
_COORDINATOR_S = 6.0
"""The first question about groups of all makes Kafka create a topic."""
_DENIED = frozenset(
    {
        Code.GROUP_AUTHORIZATION_FAILED,
        Code.CLUSTER_AUTHORIZATION_FAILED,
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_ENDED = frozenset({"Empty", "CompleteCommit", "CompleteAbort"})
"""States of a coordinator in which no transaction is under way, nor any marker."""
_AUDIT_KEYS = (BATCH_KEY, STREAM_KEY)
_FETCH = 1

# Numbers of Kafka's AclOperation; a set of rights is a number with their bits.
_OPERATIONS = {
    "Read": 3,
    "Write": 4,
    "Create": 5,
    "Alter": 7,
    "Describe": 8,
    "DescribeConfigs": 10,
    "AlterConfigs": 11,
}

Place = tuple[str, int]
"""A partition: its topic and number."""


class BrokerFacts(Struct, frozen=True):
    """A broker as it is seen from here.

    Attributes:
        address: where it says that clients find it.
        fetch_version: the newest way of fetching that it understands, by which releases are told
            apart; -1 where it did not answer.
        why: why it did not answer, "" where it did.
    """

    node: int
    address: str
    fetch_version: int = -1
    why: str = ""


class PartitionCopies(Struct, frozen=True):
    """Where the copies of a partition are, by broker; `leader` -1: there is none."""

    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    offline: tuple[int, ...] = ()


class TopicSeen(Struct, frozen=True):
    """A topic as whoever asks may see it.

    Attributes:
        error: the code of Kafka's protocol, 0 for none.
        rights: what the asker may do with it, by the names of ACLs; None where brokers do not say.
    """

    error: int
    partitions: dict[int, PartitionCopies]
    rights: frozenset[str] | None


class Cluster(Struct, frozen=True):
    """A Kafka, its brokers by number, and the topics that were asked for."""

    id: str
    controller: int
    addresses: dict[int, str]
    topics: dict[str, TopicSeen]


class OpenTransaction(Struct, frozen=True):
    """A Kafka transaction that keeps `read_committed` readers of a partition waiting.

    Attributes:
        hidden: how many offsets lie behind it.
        transactional_id: "" where no coordinator that may be asked knows the producer.
        started_ms: by the coordinator's clock, ms since 1970; None where none knows.
        last_write_ms: the timestamp of its newest record, which may be its writer's.
        first: the offset from which on it hides; -1 where the leader may not be asked.
        lost: whether its coordinator had called it ended before the leader still told of it: its
            end was lost, and nobody sends it any more.
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


class KafkaExamination:
    """Asks one Kafka how it is. Used as `async with`. Made inside a running event loop.

    Raises:
        ConfigurationError: the settings contradict themselves.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        settings.validate()
        self.settings = structs.replace(
            settings, request_timeout_s=_ANSWER_S, write_timeout_s=_ANSWER_S, retry_backoff_s=0.05
        )
        self._client = Client(self.settings)
        self._admin = Admin(self._client)

    async def __aenter__(self) -> KafkaExamination:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def cluster(self, topics: Iterable[str] = ()) -> Cluster:
        """Return who the brokers are, and what of topics is seen.

        Raises:
            KafkaUnavailable: no broker answers.
        """
        answer = await self._client.ask_any(RightsRequest(topics), _LANE)
        return Cluster(
            answer.cluster_id or "",
            answer.controller_id,
            {node: f"{host}:{port}" for node, host, port, _rack in answer.brokers},
            {name: _seen(error, parts, bits) for error, name, _, parts, bits in answer.topics},
        )

    async def brokers(self) -> list[BrokerFacts]:
        """Return how each broker is seen from here, asked at the address that it advertises.

        Raises:
            KafkaUnavailable: no broker answers.
        """
        cluster = await self.cluster()
        await self._client.refresh(())
        seen = (self._broker(node, address) for node, address in cluster.addresses.items())
        return list(await asyncio.gather(*seen))

    async def _broker(self, node: int, address: str) -> BrokerFacts:
        try:
            answer = await self._client.ask(node, ApiVersionRequest(), _LANE)
        except (KafkaUnavailable, ConfigurationError) as error:
            return BrokerFacts(node, address, why=str(error))
        newest = {key: version for key, _oldest, version in answer.api_versions}
        return BrokerFacts(node, address, newest.get(_FETCH, -1))

    async def group_error(self) -> int:
        """Return the error code of asking about the proxies' consumer group, 0 for none.

        Raises:
            KafkaUnavailable: its coordinator does not answer.
        """
        backoff = Backoff(_COORDINATOR_S, self.settings.retry_backoff_s)
        while True:
            try:
                return await self._group_error()
            except KafkaUnavailable as error:
                if isinstance(error, KafkaRefused) and error.code in _DENIED:
                    return error.code
                if not may_pass(error) or not await backoff.pause():
                    raise

    async def transactional_id_error(self) -> int:
        """Return the error code of asking about the proxies' transactional ids, 0 for none.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        name = f"{self.settings.half_topic}-0-a"
        backoff = Backoff(_COORDINATOR_S, self.settings.retry_backoff_s)
        while True:
            try:
                await self._client.transaction_coordinator(name)
            except KafkaUnavailable as error:
                if isinstance(error, KafkaRefused) and error.code in _DENIED:
                    return error.code
                if not may_pass(error) or not await backoff.pause():
                    raise
            else:
                return Code.NONE

    async def _group_error(self) -> int:
        group = self.settings.group_id
        node = await self._client.group_coordinator(group)
        answer = await self._client.ask(node, DescribeGroupsRequest([group]), _LANE)
        code: int = answer.groups[0][0]
        if code in COORDINATOR_MOVED:
            self._client.forget_group_coordinator(group)
            raise KafkaRefused(code)
        return code

    # --- topics ------------------------------------------------------------------------------

    async def found(self) -> dict[str, own.FoundTopic]:
        """Return those of txbroker's own topics that exist, with their settings.

        Raises:
            ConfigurationError: a topic may not be seen.
            KafkaUnavailable: Kafka does not answer.
        """
        return await own.find(self._admin, self.settings.own_topics + self.settings.audit_topics)

    async def contradictions(self, found: Mapping[str, own.FoundTopic]) -> list[str]:
        """Return, as sentences, why txbroker cannot work with its topics as they are.

        Raises:
            ConfigurationError, KafkaUnavailable
        """
        return own.contradictions(self.settings, found, await self._layout(found))

    async def plan(self, found: Mapping[str, own.FoundTopic]) -> own.Plan:
        """Return what `txbroker topics apply` would do.

        Raises:
            ConfigurationError, KafkaUnavailable
        """
        await self._client.refresh(())
        half = found.get(self.settings.half_topic)
        layout = await self._layout(found)
        return own.plan(own.wanted_topics(self.settings, self._client.brokers, half, layout), found)

    async def _layout(self, found: Mapping[str, own.FoundTopic]) -> Layout | None:
        if self.settings.groups_topic not in found:
            return None
        return find_layout(await self._records(self.settings.groups_topic))

    async def audit_news(self) -> dict[str, bytes]:
        """Return the newest record of each sort of audit, by its key.

        Raises:
            KafkaUnavailable: Kafka does not answer, or has no such topic.
        """
        newest: dict[str, bytes] = {}
        for record in await self._records(self.settings.audit_topic):
            key = (record.key or b"").decode(errors="replace")
            if key in _AUDIT_KEYS and record.value is not None:
                newest[key] = record.value
            elif key in _AUDIT_KEYS:
                newest.pop(key, None)
        return newest

    async def _records(self, topic: str) -> list[Record]:
        reader = Reader(self._client, topic, 0, f"{_LANE}/{topic}", append_time=False)
        records: list[Record] = []
        async for some in reader.read(await reader.start(), await reader.stable_end()):
            records += some
        return records

    async def set_aside(self) -> list[Found]:
        """Return the newest records that other clients wrote into txbroker's own topics and that
        stop nothing.

        Raises:
            ConfigurationError: there are no topics of an installation.
            KafkaUnavailable: Kafka does not answer.
        """
        repair = Repair(self._client, lambda _topic: self.settings.message_bytes_max)
        return await repair.set_aside()

    # --- clocks ------------------------------------------------------------------------------

    async def newest_appends(self, cluster: Cluster) -> dict[Place, int]:
        """Return the newest timestamp of each partition, ms since 1970.

        Where timestamps are the brokers', its leader's clock has certainly gone so far. Partitions
        that are empty or have no leader are missing.

        Raises:
            KafkaUnavailable: a leader does not answer.
        """
        newest: dict[Place, int] = {}
        for leader, topics in _by_leader(cluster).items():
            answer = await self._client.ask(leader, NewestRequest(topics), _LANE)
            for topic, partitions, _ in answer.topics:
                for number, code, at_ms, *_rest in partitions:
                    if code == Code.NONE and at_ms > 0:
                        newest[topic, number] = at_ms
        return newest

    # --- transactions that are open ----------------------------------------------------------

    async def open_transactions(self, topics: Sequence[str]) -> list[OpenTransaction]:
        """Return the transactions that hide the ends of these topics from consumers.

        Most of them are at work and gone a moment later: `started_ms` tells.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        cluster = await self.cluster(topics)
        await self._client.refresh(topics)
        places = [(name, p) for name, seen in cluster.topics.items() for p in seen.partitions]
        high = await ends(self._client, places, READ_UNCOMMITTED, _LANE)
        behind = await self._behind(high)
        found = await self._producers(cluster, behind)
        found = await self._named(cluster, found)
        found = await self._look_for_lost(cluster, behind, found)
        # What was ended meanwhile keeps nobody waiting.
        still = await self._behind({place: high[place] for place in behind})
        return [one for one in found if (one.topic, one.partition) in still]

    async def _behind(self, high: Mapping[Place, int]) -> dict[Place, int]:
        """Return those partitions whose stable end lies below what they held, and by how much."""
        stable = await ends(self._client, high, READ_COMMITTED, _LANE)
        return {
            place: high[place] - offset for place, offset in stable.items() if offset < high[place]
        }

    async def _producers(
        self, cluster: Cluster, behind: Mapping[Place, int]
    ) -> list[OpenTransaction]:
        found = []
        for leader, topics in _by_leader(cluster, frozenset(behind)).items():
            answer = await self._client.ask(leader, ProducersRequest(topics), _LANE)
            for topic, partitions, _ in answer.topics:
                for number, code, _message, producers, _ in partitions:
                    if code != Code.NONE:
                        found.append(OpenTransaction(topic, number, -1, behind[topic, number]))
                        continue
                    found += [
                        OpenTransaction(
                            topic,
                            number,
                            one[0],
                            behind[topic, number],
                            last_write_ms=one[3],
                            first=one[5],
                        )
                        for one in producers
                        if one[5] >= 0
                    ]
        return found

    async def _look_for_lost(
        self, cluster: Cluster, behind: Mapping[Place, int], found: Sequence[OpenTransaction]
    ) -> list[OpenTransaction]:
        """Mark those that are open still, though their coordinator said before that all that these
        producers had begun was ended: it says so only when every leader has been told."""
        if not any(one.state in _ENDED for one in found):
            return list(found)
        still = {_begun(one) for one in await self._producers(cluster, behind)}
        return [
            structs.replace(one, lost=one.state in _ENDED and _begun(one) in still) for one in found
        ]

    async def _named(
        self, cluster: Cluster, found: Sequence[OpenTransaction]
    ) -> list[OpenTransaction]:
        """Add what the coordinators know of the producers."""
        if not found:
            return []
        ids = {one.producer_id for one in found}
        told = await asyncio.gather(
            *(self._coordinated(node, ids) for node in cluster.addresses), return_exceptions=True
        )
        known = {
            producer: facts for some in told if isinstance(some, dict) for producer, facts in
            some.items()
        }  # fmt: skip
        return [_with(one, known.get(one.producer_id)) for one in found]

    async def _coordinated(self, node: int, producers: Iterable[int]) -> dict[int, tuple[Any, ...]]:
        """Return what a broker knows of the transactions of producers that it coordinates."""
        listed = await self._client.ask(node, ListTransactionsRequest(producers), _LANE)
        names = [name for name, *_ in listed.transaction_states]
        if not names:
            return {}
        answer = await self._client.ask(node, DescribeTransactionsRequest(names), _LANE)
        return {state[5]: state for state in answer.transaction_states if state[0] == Code.NONE}


def _seen(error: int, partitions: Sequence[tuple[Any, ...]], bits: int) -> TopicSeen:
    rights = None
    if bits != NO_RIGHTS_TOLD:
        rights = frozenset(name for name, bit in _OPERATIONS.items() if bits >> bit & 1)
    copies = {
        number: PartitionCopies(leader, tuple(replicas), tuple(in_sync), tuple(offline))
        for _error, number, leader, _epoch, replicas, in_sync, offline in partitions
    }
    return TopicSeen(error, copies, rights)


def _by_leader(
    cluster: Cluster, only: frozenset[Place] | None = None
) -> dict[int, dict[str, list[int]]]:
    led: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name, seen in cluster.topics.items():
        for number, copies in seen.partitions.items():
            if copies.leader >= 0 and (only is None or (name, number) in only):
                led[copies.leader][name].append(number)
    return led


def _begun(one: OpenTransaction) -> tuple[str, int, int, int]:
    return one.topic, one.partition, one.producer_id, one.first


def _with(one: OpenTransaction, state: tuple[Any, ...] | None) -> OpenTransaction:
    if state is None:
        return one
    started_ms = state[4] if state[4] >= 0 else None
    return structs.replace(one, transactional_id=state[1], state=state[2], started_ms=started_ms)
