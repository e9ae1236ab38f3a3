"""Connections to brokers, and a cache of partition leaders and coordinators.

Retries are decided here and in the callers: the client library's producer hides requests that were
never answered, and its stop can hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Self

from aiokafka.errors import IncompatibleBrokerVersion, KafkaError
from msgspec import Struct

from txbroker.config.addresses import Address, parse_address
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.connection import (
    BrokerConnection,
    is_refusal,
    open_connection,
    why_not,
)
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.protocol.codes import COORDINATOR_MOVED, RETRIABLE, Code, describe
from txbroker.kafka.protocol.encoder import Request
from txbroker.kafka.protocol.schemas import FindCoordinatorV1, MetadataV5

GROUP, TRANSACTION = 0, 1
"""Kinds of coordinators."""
_LOST = (OSError, KafkaError, TimeoutError)
"""Errors of a connection that mean that no answer will come."""


Opener = Callable[..., Awaitable[BrokerConnection]]
"""Opens a connection: `open_connection`, or a substitute in tests."""


def address_text(host: str, port: int) -> str:
    """Return `host:port`, or `[::1]:port`."""
    return str(Address(host, port))


class NotSent(KafkaUnavailable):
    """No broker could be reached; the request was certainly not sent."""


class LoginRefused(NotSent):
    """A broker was reached and refused the login, or the TLS handshake failed."""

    lasting = True


class Unanswered(KafkaUnavailable):
    """The broker did not answer; it may still execute the request."""


class KafkaRefused(KafkaUnavailable):
    """The broker answered with an error; `code` is Kafka's error code."""

    def __init__(self, code: int, message: str | None = None) -> None:
        super().__init__(message or f"Kafka answered: {describe(code)}")
        self.code = code
        self.lasting = code not in RETRIABLE


class PartitionFacts(Struct, frozen=True):
    """A partition according to the metadata; `leader` is -1 if it has none."""

    leader: int
    replicas: int
    in_sync: int


class TopicFacts(Struct, frozen=True):
    """A topic according to the metadata; they are empty if `error` is not 0."""

    error: int
    partitions: dict[int, PartitionFacts]


class Client:
    """Connections to one Kafka cluster.

    A channel is a dedicated connection to a broker, by name; its requests keep their order.
    """

    def __init__(self, settings: KafkaSettings, opener: Opener = open_connection) -> None:
        self.settings = settings
        self._login = settings.login()
        self._arguments: dict[str, Any] = {}
        self._open = opener
        self.brokers: dict[int, tuple[str, int]] = {}
        """Host and port of each broker in the last metadata."""
        self.controller = -1
        """The controller in the last metadata, which creates topics."""
        self._connections: dict[tuple[int, str], BrokerConnection] = {}
        self._attempts: dict[tuple[int, str], asyncio.Future[str]] = {}
        """Attempts to connect that are in progress; the result is why one failed, or empty."""
        self._unresponsive: set[int] = set()
        """Brokers that were unreachable, or did not answer, on the last request."""
        self._leaders: dict[tuple[str, int], int] = {}
        self._replicas: dict[tuple[str, int], tuple[int, ...]] = {}
        self._coordinators: dict[tuple[int, str], int] = {}
        self._closed = False
        self.unreadable: set[str] = set()
        """Topics for which batches that do not decode have been logged."""

    # --- requests ----------------------------------------------------------------------------

    async def ask(
        self,
        node: int,
        request: Request,
        channel: str,
        timeout_s: float | None = None,
    ) -> Any:
        """Send a request to broker `node` and return its answer.

        Args:
            timeout_s: seconds until it counts as unanswered. The channel's first request sets it.

        Raises:
            NotSent, Unanswered
            KafkaRefused: the broker does not support this version of the request.
        """
        connection = await self._connection(node, channel, timeout_s)
        with _sending(node):
            answer = connection.send(request)
        try:
            result = await answer
        except _LOST as error:
            raise self._give_up(node, channel, connection, error) from None
        self._unresponsive.discard(node)
        return result

    def post(
        self,
        node: int,
        request: Request,
        channel: str,
        on_answer: Callable[[Any], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Send a request at once, over a channel that is open (`connect`).

        Args:
            on_answer: called in the event loop's iteration in which the answer arrives.
            on_error: called with `Unanswered`.

        Raises:
            KafkaRefused: the broker does not support this version of the request.
        """
        connection = self._connections.get((node, channel))
        if connection is None or not connection.connected():
            raise NotSent(f"broker {node}: the connection is closed")

        def answered(answer: Any) -> None:
            self._unresponsive.discard(node)
            on_answer(answer)

        def lost(error: Exception) -> None:
            on_error(self._give_up(node, channel, connection, error))

        with _sending(node):
            connection.send(request, _Callbacks(answered, lost))

    def _give_up(
        self, node: int, channel: str, connection: BrokerConnection, error: Exception
    ) -> Unanswered:
        """Close a connection that did not answer; return the error to raise."""
        self._unresponsive.add(node)
        # A late answer must not be taken for that of a later request.
        self._drop(node, channel, connection)
        # The cause may be more specific, such as an answer that does not decode.
        why = error.__cause__ or error
        return Unanswered(f"broker {node} did not answer ({why!r})")

    async def ask_any(self, request: Request, channel: str, timeout_s: float | None = None) -> Any:
        """Send a request to one broker after another until one answers; see `ask`."""
        if not self.brokers:
            await self.refresh(())
        try:
            return await self._ask_in_turn(request, channel, timeout_s)
        except (NotSent, Unanswered):
            # Brokers may have new addresses; refresh falls back to the bootstrap servers.
            await self.refresh(())
            raise

    async def _ask_in_turn(
        self, request: Request, channel: str, timeout_s: float | None = None
    ) -> Any:
        """Ask one broker after another: in random order, unresponsive ones last, because each costs
        a full request timeout."""
        last: KafkaUnavailable = NotSent("no broker is known")
        for node in sorted(self.brokers, key=lambda n: (n in self._unresponsive, random.random())):
            try:
                return await self.ask(node, request, channel, timeout_s)
            except (NotSent, Unanswered) as error:
                last = error
        raise last

    def connected(self, node: int, channel: str) -> bool:
        """Return whether a channel to broker `node` is open."""
        connection = self._connections.get((node, channel))
        return connection is not None and connection.connected()

    async def connect(self, node: int, channel: str) -> None:
        """Open a channel to broker `node` unless it is open."""
        await self._connection(node, channel, None)

    async def _connection(
        self, node: int, channel: str, timeout_s: float | None
    ) -> BrokerConnection:
        key = (node, channel)
        while True:
            connection = self._connections.get(key)
            if connection is not None and connection.connected():
                return connection
            attempt = self._attempts.get(key)
            if attempt is None:
                break
            # Callers that waited for a failed attempt fail with it. If each tried again, the last
            # one would wait for minutes, and so would heartbeats. A cancelled attempt has not
            # failed: the first of its waiters makes the next one.
            why = await asyncio.shield(attempt)
            if why:
                raise NotSent(why)
        why = ""
        attempt = self._attempts[key] = asyncio.get_running_loop().create_future()
        try:
            connection = self._connections[key] = await self._connect_to(node, timeout_s)
        except KafkaUnavailable as error:
            why = str(error)
            self._unresponsive.add(node)
            raise
        finally:
            # Here and not in `close_channels`: some channels are used once.
            del self._attempts[key]
            attempt.set_result(why)
        return connection

    async def _connect_to(self, node: int, timeout_s: float | None) -> BrokerConnection:
        address = self.brokers.get(node)
        if address is None:
            await self.refresh(())
            address = self.brokers.get(node)
        if address is None:
            raise NotSent(f"broker {node} is not in the metadata")
        connection = await self._connect(*address, timeout_s)
        if self._closed:
            connection.close()
            raise NotSent("the Kafka client is closed")
        return connection

    async def _connect(
        self, host: str, port: int, timeout_s: float | None = None
    ) -> BrokerConnection:
        if self._closed:
            raise NotSent("the Kafka client is closed")
        try:
            arguments = self._arguments = self._login.arguments()
        except ConfigurationError as error:
            # It was valid at the start: a file has changed since, and may be corrected.
            raise NotSent(f"no connection to Kafka at {Address(host, port)}: {error}") from None
        try:
            return await self._open(
                host,
                port,
                client_id=self.settings.client_id,
                request_timeout_s=timeout_s or self.settings.request_timeout_s,
                **arguments,
            )
        except (OSError, KafkaError, TimeoutError) as error:
            why = why_not(error, host, arguments)
            kind = LoginRefused if is_refusal(error) else NotSent
            raise kind(f"no connection to Kafka at {Address(host, port)}{why}") from None

    def _drop(self, node: int, channel: str, connection: BrokerConnection) -> None:
        if self._connections.get((node, channel)) is connection:
            del self._connections[node, channel]
        connection.close()

    def close_channels(self, prefix: str) -> None:
        """Close all channels whose names begin with `prefix`."""
        for (node, channel), connection in list(self._connections.items()):
            if channel.startswith(prefix):
                self._drop(node, channel, connection)

    async def close(self) -> None:
        """Close all connections; requests in flight fail with `Unanswered`."""
        self._closed = True
        closing = [connection.close() for connection in self._connections.values()]
        self._connections.clear()
        if closing:
            # A transport waits for a peer that does not read; the caller must not.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.gather(*closing, return_exceptions=True)

    # --- metadata ----------------------------------------------------------------------------

    async def refresh(self, topics: Iterable[str]) -> dict[str, TopicFacts]:
        """Return metadata of topics, creating none, and cache the partitions' leaders."""
        names = list(topics)
        answer = await self._ask_metadata(MetadataV5(names, False))
        self.brokers = {node: (host, port) for node, host, port, *_ in answer.brokers}
        self.controller = answer.controller_id
        topics_found = {}
        for error, topic, _internal, partitions in answer.topics:
            facts = TopicFacts(
                error,
                {
                    p: PartitionFacts(leader, len(replicas), len(isr))
                    for _error, p, leader, replicas, isr, *_ in partitions
                },
            )
            topics_found[topic] = facts
            for partition, fact in facts.partitions.items():
                self._leaders[topic, partition] = fact.leader
        return topics_found

    async def _ask_metadata(self, request: MetadataV5) -> Any:
        try:
            return await self._ask_in_turn(request, "metadata")
        except (NotSent, Unanswered) as error:
            last: KafkaUnavailable = error
        for server in self.settings.bootstrap_servers:
            host, port = parse_address(server)
            try:
                connection = await self._connect(host, port)
            except NotSent as error:
                last = error
                continue
            try:
                return await connection.send(request)
            except (OSError, KafkaError, TimeoutError) as error:
                why = why_not(error, host, self._arguments)
                last = Unanswered(f"{server} did not answer{why}")
            finally:
                connection.close()
        raise last

    async def leader(self, topic: str, partition: int) -> int:
        """Return the broker that leads a partition.

        Raises:
            KafkaRefused: the partition is unknown, or has no leader.
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
        """Return the cached leader of a partition, -1 if there is none."""
        return self._leaders.get((topic, partition), -1)

    def remember_leader(
        self, topic: str, partition: int, leader: int, replicas: tuple[int, ...]
    ) -> None:
        """Cache the leader and the replicas of a partition."""
        self._leaders[topic, partition] = leader
        self._replicas[topic, partition] = replicas

    def known_replicas(self, topic: str, partition: int) -> tuple[int, ...]:
        """Return the replicas cached by `remember_leader`, or ()."""
        return self._replicas.get((topic, partition), ())

    def forget_leader(self, topic: str, partition: int) -> None:
        """Drop a partition's leader from the cache."""
        self._leaders.pop((topic, partition), None)

    # --- coordinators ------------------------------------------------------------------------

    async def coordinator(self, kind: int, key: str) -> int:
        """Return the broker that coordinates a `GROUP` or the transactional id of a `TRANSACTION`.

        Raises:
            KafkaUnavailable: none at the moment, or not authorized.
        """
        known = self._coordinators.get((kind, key))
        if known is not None:
            return known
        answer = await self.ask_any(FindCoordinatorV1(key, kind), "metadata")
        if answer.error_code:
            raise KafkaRefused(answer.error_code)
        node: int = answer.coordinator_id
        if node not in self.brokers:
            await self.refresh(())
        self._coordinators[kind, key] = node
        return node

    def forget_coordinator(self, kind: int, key: str) -> None:
        """Drop a coordinator from the cache."""
        self._coordinators.pop((kind, key), None)


class ClientOwner:
    """Has a separate client. Used as `async with`, in a running event loop.

    Raises:
        ConfigurationError: the settings contradict each other.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        settings.validate()
        self._client = Client(settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()


class _Callbacks:
    """Stands in for an answer's future: calls back without an extra loop iteration."""

    def __init__(
        self, on_answer: Callable[[Any], None], on_error: Callable[[Exception], None]
    ) -> None:
        self._on_answer = on_answer
        self._on_error = on_error
        self._done = False

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return False

    def set_result(self, result: Any) -> None:
        self._done = True
        self._on_answer(result)

    def set_exception(self, exception: Exception) -> None:
        """Pass the error on in the next iteration: the connection may be closing right now."""
        self._done = True
        asyncio.get_running_loop().call_soon(self._on_error, exception)

    def exception(self) -> None:
        """Return None, though the error was passed on: nothing is left to retrieve."""


@contextlib.contextmanager
def _sending(node: int) -> Iterator[None]:
    try:
        yield
    except IncompatibleBrokerVersion as error:
        raise ConfigurationError(f"this Kafka version is too old: {error}") from None
    except NotImplementedError:
        raise KafkaRefused(Code.UNSUPPORTED_VERSION) from None
    except (OSError, KafkaError) as error:
        raise NotSent(f"broker {node}: {error}") from None


def is_retriable(error: KafkaUnavailable) -> bool:
    """Return whether the same request may succeed on a retry."""
    return not isinstance(error, KafkaRefused) or error.code in RETRIABLE


def coordinator_moved(error: KafkaUnavailable) -> bool:
    """Return whether the coordinator must be looked up again."""
    return not isinstance(error, KafkaRefused) or error.code in COORDINATOR_MOVED
