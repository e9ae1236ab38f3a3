"""Connections to the brokers, and who leads and coordinates what.

The client library brings the handshake and the encoding of rare requests. Everything that decides
about retries is here and in the callers, because the library's own producer hides answers that
never came, and its stop can hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from aiokafka.conn import CloseReason
from aiokafka.errors import IncompatibleBrokerVersion, KafkaError
from aiokafka.protocol.api import Request
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.metadata import MetadataRequest
from msgspec import Struct

from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.connection import is_refusal, open_connection, why_not
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.protocol.codes import COORDINATOR_MOVED, RETRIABLE, Code, describe
from txbroker.kafka.protocol.packed import PackedRequest

_IDLE_MS = 9 * 60 * 1000  # a minute less than brokers allow, so that they never close first
_GROUP, _TRANSACTION = 0, 1
_LOST = (OSError, KafkaError, TimeoutError)
"""Whatever a connection says where there will be no answer."""


class Answer(Protocol):
    """What a connection uses of the future of an answer."""

    def done(self) -> bool:
        """Whether there is an answer, or never will be."""
        ...

    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        ...

    def set_result(self, result: Any) -> None:
        """Take the answer."""
        ...

    def set_exception(self, exception: Exception) -> None:
        """Take why there is none."""
        ...

    def exception(self) -> BaseException | None:
        """Return why there is none."""
        ...


class Connection(Protocol):
    """What we use of the client library's connection."""

    def connected(self) -> bool:
        """Whether the peer has not closed it."""
        ...

    def send(
        self, request: Request[Any] | PackedRequest, answer: Answer | None = None
    ) -> Awaitable[Any]:
        """Send a request; the awaitable, or `answer` in its place, brings its answer."""
        ...

    def close(self, reason: CloseReason | None = None) -> Awaitable[None]:
        """Close it; the awaitable ends when the socket is closed."""
        ...


Opener = Callable[..., Awaitable[Connection]]
"""Opens a connection: `open_connection`, or what tests put in its place."""


class NotSent(KafkaUnavailable):
    """No broker could be reached; the request certainly did not leave."""


class LoginRefused(NotSent):
    """A broker was reached and refuses the login, or TLS with it does not come about."""

    lasting = True


class Unanswered(KafkaUnavailable):
    """The broker did not answer; the request may yet be carried out."""


class KafkaRefused(KafkaUnavailable):
    """The broker answered with an error.

    Attributes:
        code: the error code of Kafka's protocol.
    """

    def __init__(self, code: int, message: str | None = None) -> None:
        super().__init__(message or f"Kafka answered: {describe(code)}")
        self.code = code
        self.lasting = code not in RETRIABLE


class PartitionFacts(Struct, frozen=True):
    """A partition as its metadata show it; `leader` -1 means that it has none."""

    leader: int
    replicas: int
    in_sync: int


class TopicFacts(Struct, frozen=True):
    """A topic as its metadata show it; `error` other than 0 means that there are none."""

    error: int
    partitions: dict[int, PartitionFacts]


class Client:
    """Connections to one Kafka. A lane is a connection of its own for requests in order."""

    def __init__(self, settings: KafkaSettings, opener: Opener = open_connection) -> None:
        self.settings = settings
        self._login = settings.login()
        self._told: dict[str, Any] = {}
        self._open = opener
        self._brokers: dict[int, tuple[str, int]] = {}
        self._controller = -1
        self._connections: dict[tuple[int, str], Connection] = {}
        self._locks: dict[tuple[int, str], asyncio.Lock] = {}
        self._failed: dict[tuple[int, str], tuple[float, str]] = {}
        self._silent: set[int] = set()
        """Those that did not answer, or could not be reached, when they were asked last."""
        self._leaders: dict[tuple[str, int], int] = {}
        self._replicas: dict[tuple[str, int], tuple[int, ...]] = {}
        self._coordinators: dict[tuple[int, str], int] = {}
        self._closed = False
        self.unreadable: set[str] = set()
        """Topics of which it is logged that another client writes what does not decode."""

    # --- asking ------------------------------------------------------------------------------

    async def ask(
        self,
        node: int,
        request: Request[Any] | PackedRequest,
        lane: str,
        timeout_s: float | None = None,
    ) -> Any:
        """Send a request to broker `node` and return its answer.

        `timeout_s` is fixed by the first request of a lane.

        Raises:
            NotSent, Unanswered
            KafkaRefused: the broker does not know this request in a version that we do.
        """
        connection = await self._connection(node, lane, timeout_s)
        with _sending(node):
            answer = connection.send(request)
        try:
            answered = await answer
        except _LOST as error:
            raise self._unanswered(node, lane, connection, error) from None
        self._silent.discard(node)
        return answered

    def post(
        self,
        node: int,
        request: PackedRequest,
        lane: str,
        hear: Callable[[Any], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Send a request over a connection that is there (`connect`), for many who wait.

        Args:
            node: the broker.
            request: is sent at once.
            lane: the connection.
            hear: gets the answer, in the very round of the event loop in which it arrives.
            fail: gets `Unanswered` where there is none.

        Raises:
            NotSent
            KafkaRefused: the broker does not know this request in a version that we do.
        """
        connection = self._connections.get((node, lane))
        if connection is None or not connection.connected():
            raise NotSent(f"broker {node}: the connection has just broken")

        def heard(answer: Any) -> None:
            self._silent.discard(node)
            hear(answer)

        def lost(error: Exception) -> None:
            fail(self._unanswered(node, lane, connection, error))

        with _sending(node):
            connection.send(request, _Posted(heard, lost))

    def _unanswered(
        self, node: int, lane: str, connection: Connection, error: Exception
    ) -> Unanswered:
        """Drop a connection without an answer; return what to raise."""
        self._silent.add(node)
        # What may still be on its way must not answer a later request.
        self._drop(node, lane, connection)
        # What broke the connection, where it is known: an answer that does not read, for one.
        why = error.__cause__ or error
        return Unanswered(f"broker {node} did not answer ({why!r})")

    async def ask_any(
        self, request: Request[Any], lane: str, timeout_s: float | None = None
    ) -> Any:
        """Send a request that any broker answers, to the first that does; `timeout_s`, for each of
        them, as of `ask`.

        Raises:
            KafkaUnavailable: none answers.
        """
        if not self._brokers:
            await self.refresh(())
        last: KafkaUnavailable = NotSent("no broker is known")
        for node in self._any_order():
            try:
                return await self.ask(node, request, lane, timeout_s)
            except (NotSent, Unanswered) as error:
                last = error
        # Brokers that came back elsewhere are found through the bootstrap servers next time.
        await self.refresh(())
        raise last

    def _any_order(self) -> list[int]:
        """Return all brokers as they are to be asked for what any of them knows: at random, those
        last that were silent, as a question to one that hangs takes the whole request timeout."""
        return sorted(self._brokers, key=lambda node: (node in self._silent, random.random()))

    def connected(self, node: int, lane: str) -> bool:
        """Say whether there is a connection to broker `node`."""
        connection = self._connections.get((node, lane))
        return connection is not None and connection.connected()

    async def connect(self, node: int, lane: str) -> None:
        """Have a connection to broker `node` ready; at once where there is one.

        Raises:
            NotSent
        """
        await self._connection(node, lane, None)

    async def _connection(self, node: int, lane: str, timeout_s: float | None) -> Connection:
        key = (node, lane)
        connection = self._connections.get(key)
        if connection is not None and connection.connected():
            return connection
        asked_at = asyncio.get_running_loop().time()
        async with self._locks.setdefault(key, asyncio.Lock()):
            connection = self._connections.get(key)
            if connection is not None and connection.connected():
                return connection
            failed_at, why = self._failed.get(key, (-1.0, ""))
            if failed_at >= asked_at:
                # Whoever waited for an attempt that failed has failed with it: one attempt after
                # the other would keep the last of many waiting for minutes, heartbeats too.
                raise NotSent(why)
            try:
                connection = await self._connect_to(node, timeout_s)
            except KafkaUnavailable as error:
                self._failed[key] = (asyncio.get_running_loop().time(), str(error))
                self._silent.add(node)
                raise
            self._connections[key] = connection
            return connection

    async def _connect_to(self, node: int, timeout_s: float | None) -> Connection:
        address = self._brokers.get(node)
        if address is None:
            await self.refresh(())
            address = self._brokers.get(node)
        if address is None:
            raise NotSent(f"broker {node} is not known")
        connection = await self._connect(*address, timeout_s)
        if self._closed:
            connection.close(reason=CloseReason.SHUTDOWN)
            raise NotSent("the door to Kafka is closed")
        return connection

    async def _connect(self, host: str, port: int, timeout_s: float | None = None) -> Connection:
        if self._closed:
            raise NotSent("the door to Kafka is closed")
        try:
            login = self._told = self._login.arguments()
        except ConfigurationError as error:
            # It held when we started; what was changed since may be mended while we wait.
            raise NotSent(f"no connection to Kafka at {host}:{port}: {error}") from None
        try:
            return await self._open(
                host,
                port,
                client_id=self.settings.client_id,
                request_timeout_ms=round((timeout_s or self.settings.request_timeout_s) * 1000),
                max_idle_ms=_IDLE_MS,
                **login,
            )
        except (OSError, KafkaError, TimeoutError) as error:
            why = why_not(error, host, login)
            kind = LoginRefused if is_refusal(error) else NotSent
            raise kind(f"no connection to Kafka at {host}:{port}{why}") from None

    def _drop(self, node: int, lane: str, connection: Connection) -> None:
        if self._connections.get((node, lane)) is connection:
            del self._connections[node, lane]
        connection.close(reason=CloseReason.CONNECTION_BROKEN)

    def close_channels(self, prefix: str) -> None:
        """Close every connection of the lanes that begin with `prefix`."""
        for (node, lane), connection in list(self._connections.items()):
            if lane.startswith(prefix):
                self._drop(node, lane, connection)
        self._failed = {k: v for k, v in self._failed.items() if not k[1].startswith(prefix)}
        self._locks = {
            key: lock
            for key, lock in self._locks.items()
            if lock.locked() or not key[1].startswith(prefix)
        }

    async def close(self) -> None:
        """Close all connections; what still waits for an answer gets `Unanswered`."""
        self._closed = True
        closing = [connection.close() for connection in self._connections.values()]
        self._connections.clear()
        if closing:
            # A transport waits for a peer that does not read; nobody has to wait for that.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.gather(*closing, return_exceptions=True)

    # --- metadata ----------------------------------------------------------------------------

    async def refresh(self, topics: Iterable[str]) -> dict[str, TopicFacts]:
        """Read metadata of topics, never creating one, and remember who leads.

        Raises:
            KafkaUnavailable: no broker answers.
        """
        names = list(topics)
        answer = await self._ask_metadata(MetadataRequest(names, allow_auto_topic_creation=False))
        self._brokers = {node: (host, port) for node, host, port, *_ in answer.brokers}
        self._controller = answer.controller_id
        found = {}
        for error, topic, _internal, partitions in answer.topics:
            facts = TopicFacts(
                error,
                {
                    p: PartitionFacts(leader, len(replicas), len(isr))
                    for _error, p, leader, replicas, isr, *_ in partitions
                },
            )
            found[topic] = facts
            for partition, fact in facts.partitions.items():
                self._leaders[topic, partition] = fact.leader
        return found

    async def _ask_metadata(self, request: MetadataRequest) -> Any:
        last: KafkaUnavailable = NotSent("no bootstrap server is set")
        for node in self._any_order():
            try:
                return await self.ask(node, request, "metadata")
            except (NotSent, Unanswered) as error:
                last = error
        for server in self.settings.bootstrap_servers:
            host, _, port = server.rpartition(":")
            try:
                connection = await self._connect(host, int(port))
            except NotSent as error:
                last = error
                continue
            try:
                return await connection.send(request)
            except (OSError, KafkaError, TimeoutError) as error:
                why = why_not(error, host, self._told)
                last = Unanswered(f"{server} did not answer{why}")
            finally:
                connection.close(reason=CloseReason.SHUTDOWN)
        raise last

    @property
    def brokers(self) -> int:
        """How many brokers the last metadata named."""
        return len(self._brokers)

    @property
    def addresses(self) -> Sequence[tuple[str, int]]:
        """Host and port of each broker that the last metadata named."""
        return list(self._brokers.values())

    @property
    def controller(self) -> int:
        """The broker that takes changes of topics."""
        return self._controller

    async def leader(self, topic: str, partition: int) -> int:
        """Return the broker that leads a partition.

        Raises:
            KafkaRefused: the partition is unknown, or has no leader.
            KafkaUnavailable: no broker answers.
        """
        leader = self._leaders.get((topic, partition), -1)
        if leader >= 0:
            return leader
        facts = (await self.refresh([topic])).get(topic)
        if facts is None or facts.error not in (Code.NONE, Code.LEADER_NOT_AVAILABLE):
            raise KafkaRefused(facts.error if facts else Code.UNKNOWN_TOPIC_OR_PARTITION)
        if partition not in facts.partitions:
            raise KafkaRefused(Code.UNKNOWN_TOPIC_OR_PARTITION)
        leader = facts.partitions[partition].leader
        if leader < 0:
            raise KafkaRefused(Code.LEADER_NOT_AVAILABLE)
        return leader

    def known_leader(self, topic: str, partition: int) -> int:
        """Return the broker that led a partition when last heard of, -1 where none is known."""
        return self._leaders.get((topic, partition), -1)

    def remember_leader(
        self, topic: str, partition: int, leader: int, replicas: tuple[int, ...]
    ) -> None:
        """Send to this broker what is for the leader of a partition; these are its replicas."""
        self._leaders[topic, partition] = leader
        self._replicas[topic, partition] = replicas

    def known_replicas(self, topic: str, partition: int) -> tuple[int, ...]:
        """Return the replicas of a partition when a leader was last remembered, () before."""
        return self._replicas.get((topic, partition), ())

    def forget_leader(self, topic: str, partition: int) -> None:
        """Look again for the leader of a partition before the next request to it."""
        self._leaders.pop((topic, partition), None)

    # --- coordinators ------------------------------------------------------------------------

    async def transaction_coordinator(self, transactional_id: str) -> int:
        """Return the broker that coordinates a transactional id.

        Raises:
            KafkaUnavailable: unknown at the moment, or no right to it.
        """
        return await self._coordinator(_TRANSACTION, transactional_id)

    async def group_coordinator(self, group_id: str) -> int:
        """Return the broker that coordinates a consumer group.

        Raises:
            KafkaUnavailable: unknown at the moment, or no right to it.
        """
        return await self._coordinator(_GROUP, group_id)

    async def _coordinator(self, kind: int, key: str) -> int:
        known = self._coordinators.get((kind, key))
        if known is not None:
            return known
        answer = await self.ask_any(FindCoordinatorRequest(key, kind), "metadata")
        if answer.error_code:
            raise KafkaRefused(answer.error_code)
        node: int = answer.coordinator_id
        if node not in self._brokers:
            await self.refresh(())
        self._coordinators[kind, key] = node
        return node

    def forget_transaction_coordinator(self, transactional_id: str) -> None:
        """Look again for the coordinator before the next request to it."""
        self._coordinators.pop((_TRANSACTION, transactional_id), None)

    def forget_group_coordinator(self, group_id: str) -> None:
        """Look again for the coordinator before the next request to it."""
        self._coordinators.pop((_GROUP, group_id), None)


class _Posted:
    """Takes an answer as a future does, and hands it on without a round of the event loop."""

    def __init__(self, heard: Callable[[Any], None], lost: Callable[[Exception], None]) -> None:
        self._heard = heard
        self._lost = lost
        self._done = False

    def done(self) -> bool:
        """Whether there is an answer, or never will be."""
        return self._done

    def cancelled(self) -> bool:
        """Say no: who has sent it wants to hear."""
        return False

    def set_result(self, result: Any) -> None:
        """Hand the answer on."""
        self._done = True
        self._heard(result)

    def set_exception(self, exception: Exception) -> None:
        """Say that there is none; later, as the connection is being closed perhaps."""
        self._done = True
        asyncio.get_running_loop().call_soon(self._lost, exception)

    def exception(self) -> None:
        """Return nothing: it was handed on."""


@contextlib.contextmanager
def _sending(node: int) -> Iterator[None]:
    """Say in our words why a request did not leave."""
    try:
        yield
    except IncompatibleBrokerVersion as error:
        raise ConfigurationError(f"this Kafka is too old: {error}") from None
    except NotImplementedError:
        # The library's word for a broker that does not speak any version of it that we do.
        raise KafkaRefused(Code.UNSUPPORTED_VERSION) from None
    except (OSError, KafkaError) as error:
        raise NotSent(f"broker {node}: {error}") from None


def may_pass(error: KafkaUnavailable) -> bool:
    """Say whether the same request can succeed a little later."""
    return not isinstance(error, KafkaRefused) or error.code in RETRIABLE


def coordinator_moved(error: KafkaUnavailable) -> bool:
    """Say whether the coordinator has to be looked up again."""
    return not isinstance(error, KafkaRefused) or error.code in COORDINATOR_MOVED
