"""`Consumer`: consumes Kafka topics in any mode.

A consumer is a source (a group, or all partitions), an order, a store of positions and a failure
policy; every mode is a combination of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import structlog

from txbroker.config.settings import load_kafka_access
from txbroker.consumer.claims import AllPartitions, PartitionReader
from txbroker.consumer.engine.loop import SWEEP_S, Engine
from txbroker.consumer.engine.stops import Suspension
from txbroker.consumer.engine.workers import Handler, HandlerOptions, Workers, iterate
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.settings import ConsumerOptions, ConsumerSettings
from txbroker.consumer.statistics import Statistics, collector, statistics
from txbroker.consumer.stores.chosen import Stores
from txbroker.door.consuming import ConsumingDoor, GroupMember, HasConsumingDoor, TopicIdentity
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.metrics import Collector
from txbroker.net.tasks import Background

log = structlog.wrap_logger(logging.getLogger(__name__))

_REFRESH_S = 5.0
"""Between looks for new topics and partitions."""
_INTERNAL = "__"


class Consumer:
    """Consumes topics: `async with Consumer(…) as consumer: await consumer.run(handler)`.

    It reads committed records only, and stores positions itself.

    Example:
        async with Consumer("kafka:9092", group="stock", topics=["orders"]) as consumer:
            await consumer.run(book)

    Args:
        kafka: bootstrap servers, `host:port`, several separated by commas; or a broker of
            `txbroker.testing`.
        options: see `ConsumerOptions`.

    Raises:
        ConfigurationError: the options contradict each other.
    """

    def __init__(self, kafka: str | HasConsumingDoor, **options: Unpack[ConsumerOptions]) -> None:
        try:
            self._settings = ConsumerSettings(**options)
        except TypeError as error:
            raise ConfigurationError(f"unknown option of Consumer: {error}") from None
        self._settings.validate()
        self._kafka = kafka
        self._stopped = False
        self._run_ended: asyncio.Event | None = None
        self._stack = contextlib.AsyncExitStack()
        self._readers: list[tuple[PartitionReader, GroupMember | AllPartitions]] = []
        self._door: ConsumingDoor
        self._started: Engine | None = None

    @property
    def _engine(self) -> Engine:
        if self._started is None:
            raise ConfigurationError("the consumer is not started: use `async with` or `start`")
        return self._started

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, create missing topics of the group, and join it; `async with` does it.

        Raises:
            ConfigurationError: something is missing or not permitted; names the next step.
            KafkaUnavailable: Kafka does not answer.
        """
        if self._started is not None:
            raise ConfigurationError("a consumer starts once: make another one")
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        settings = self._settings
        self._door = self._open_door()
        self._stack.push_async_callback(self._door.close)
        await self._door.start()
        self._started = Engine(
            settings.sequence,
            settings.policy(),
            settings.own_topics,
            settings.buffered_bytes_max,
            before=settings.at_most_once,
        )
        if self._stopped:
            self._engine.stop()
        self._stack.callback(self._started.lines.flush)
        self._stores = await Stores.open(settings, self._door, self._stack)
        topics = await self._check_topics()
        self._in_background(self._sweep())
        for number in range(settings.readers):
            await self._start_reader(number, topics)
        self._in_background(self._watch_topics())

    async def _sweep(self) -> None:
        """Look at leases, delays and due times."""
        while True:
            self._engine.sweep(asyncio.get_running_loop().time())
            await asyncio.sleep(SWEEP_S)

    def _open_door(self) -> ConsumingDoor:
        if not isinstance(self._kafka, str):
            return self._kafka.consuming_door()
        from txbroker.kafka.door.consuming import KafkaConsumingDoor

        access = load_kafka_access(self._kafka, self._settings.security)
        return KafkaConsumingDoor.from_access(access, "txbroker-consumer")

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        background = Background(self._engine.fail)
        background.start(work)
        self._stack.push_async_callback(background.end)

    async def _start_reader(self, number: int, topics: Mapping[str, TopicIdentity]) -> None:
        settings = self._settings
        reader = PartitionReader(self._engine, self._door, settings.reader_options(topics))
        source: GroupMember | AllPartitions
        member: GroupMember | None = None
        if settings.group is None:
            source = AllPartitions(reader)
        else:
            instance = settings.instance
            if instance is not None and settings.readers > 1:
                instance = f"{instance}-{number}"
            exact = settings.traits.exact and self._stores.in_group
            source = member = self._door.member(
                settings.group, instance, reader, exact=exact, **settings.timing
            )
        self._stack.push_async_callback(source.close)
        self._stack.push_async_callback(reader.close)
        reader.start(source, self._stores.of(member), self._stores.asides())
        self._readers.append((reader, source))
        source.subscribe(topics)
        await source.start()
        # What is written from now on is read, also if it begins at the end.
        await reader.claimed.wait()

    async def aclose(self) -> None:
        """Finish the messages in flight, store positions, and leave the group."""
        self.stop()
        try:
            if self._run_ended is not None:
                await self._run_ended.wait()
        finally:
            await self._stack.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    # --- topics ------------------------------------------------------------------------------

    async def _check_topics(self) -> dict[str, TopicIdentity]:
        """Create the group's topics and return all topics to read."""
        settings = self._settings
        needed = settings.needed_topics()
        try:
            have = await self._door.topics([spec.name for spec in needed])
            await self._door.create([spec for spec in needed if spec.name not in have])
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error}; {self._plan} shows the topics and rights that the group needs"
            ) from None
        for spec in needed:
            topic = have.get(spec.name)
            if topic is not None and topic.partitions < spec.partitions:
                raise ConfigurationError(
                    f"topic {spec.name} has {topic.partitions} partitions and needs "
                    f"{spec.partitions}: add some, as {self._plan} shows"
                )
        topics = await self._find_topics()
        missing = [name for name in settings.topics or () if name not in topics]
        if missing:
            raise ConfigurationError(
                f"topic {missing[0]} does not exist, or may not be described: create it or correct "
                "its name"
            )
        return topics

    @property
    def _plan(self) -> str:
        """The command that shows what the group needs."""
        prefix = self._settings.topic_prefix
        other = "" if prefix == "txbroker" else f" --topic-prefix {prefix}"
        return f"`txbroker topics plan --consumer {self._settings.group}{other}`"

    async def _find_topics(self) -> dict[str, TopicIdentity]:
        settings = self._settings
        if settings.pattern is None:
            topics = await self._door.topics(settings.topics)
        else:
            every = await self._door.topics(None)
            pattern, own = re.compile(settings.pattern), f"{settings.topic_prefix}."
            topics = {
                name: topic
                for name, topic in every.items()
                if pattern.fullmatch(name) and not name.startswith((own, _INTERNAL))
            }
        retry = settings.own_topics.retry
        if any(spec.name == retry for spec in settings.needed_topics()):
            topics |= await self._door.topics([retry])
        return topics

    async def _watch_topics(self) -> None:
        """Follow new topics, new partitions and recreated topics."""
        while True:
            await asyncio.sleep(_REFRESH_S)
            try:
                topics = await self._find_topics()
            except (KafkaUnavailable, ConfigurationError) as error:
                log.warning("topics not refreshed", error=safe_repr(error))
                continue
            for reader, source in self._readers:
                reader.check_topics(topics)
                source.subscribe(topics)

    # --- consuming ---------------------------------------------------------------------------

    async def run(
        self,
        handler: Handler,
        *,
        then: Sequence[Handler] = (),
        batch: int = 0,
        max_wait_s: float = 0.1,
    ) -> None:
        """Call `handler` with each message until `stop`.

        Args:
            handler: a coroutine function, called on the event loop, or a plain function, called in
                a thread. Takes a message; with `batch` a list of them. Exactly once it also takes
                the connection of its transaction (`InDatabase`), or what it sends by (`InKafka`).
                It raises `Later`, `Reject` or any other exception if it fails; of a batch it can
                report single messages by `message.failed(error)`. Exactly once a batch that fails
                is rolled back, and each message that failed is handled again in a list alone.
            then: later stages: handlers that are called one after another with the same message,
                after the result of the first one is stored. They take no second argument, and run
                at least once: a crash repeats those that had not ended.
            batch: messages in one call, at most; 0: one, and not as a list.
            max_wait_s: how long a batch waits to be full, seconds.

        Raises:
            ConfigurationError: a handler cannot be called with its arguments, or `then` or `batch`
                is of a wrong type.
            KafkaUnavailable, TxbrokerError: the consumer cannot continue.
        """
        if self._run_ended is not None:
            raise ConfigurationError("run is active already: use one Consumer for each handler")
        if type(batch) is not int or batch < 0:
            raise ConfigurationError(f"batch is {batch!r}: it is a whole number, or 0 for no batch")
        if not isinstance(then, list | tuple):
            raise ConfigurationError(f"then is {then!r}: it is a list of handlers")
        settings, engine = self._settings, self._engine
        options = HandlerOptions(
            count=settings.in_flight_max,
            timeout_s=settings.handler_timeout_s,
            batch=batch,
            max_wait_s=max_wait_s,
            before=settings.before,
            after=settings.after,
            then=tuple(then),
            results=self._stores.results,
        )
        workers = Workers(engine, handler, options)
        self._run_ended = ended = asyncio.Event()
        try:
            await workers.run(settings.drain_s)
        finally:
            self._run_ended = None
            ended.set()

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Yield messages until `stop`; call `done` or `failed` of each."""
        self._check_pulled()
        return self._messages()

    def _check_pulled(self) -> None:
        if self._settings.traits.exact:
            raise ConfigurationError(
                "exactly once the consumer begins and commits the transaction around a handler: "
                "use run(handler)"
            )

    async def _messages(self) -> AsyncIterator[ReceivedMessage]:
        settings = self._settings
        batches = iterate(self._engine, 1, 0, settings.in_flight_max)
        async with contextlib.aclosing(batches):
            async for messages in batches:
                yield messages[0]

    def batches(self, count: int, max_wait_s: float = 0.1) -> AsyncIterator[list[ReceivedMessage]]:
        """Yield lists of up to `count` messages until `stop`; call `done` or `failed` of each.

        Args:
            max_wait_s: how long to wait for more than one, seconds.
        """
        self._check_pulled()
        in_flight_max = max(count, self._settings.in_flight_max)
        return iterate(self._engine, count, max_wait_s, in_flight_max)

    def stop(self) -> None:
        """End `run` and iterations after the messages in flight. May be called from any thread."""
        self._stopped = True
        if self._started is not None:
            self._started.stop()

    def suspend(
        self, topic: str | None = None, partition: int | None = None, key: bytes | None = None
    ) -> None:
        """Hand out no message of a topic, partition or key (None: any), until `resume` with the
        same arguments. Messages in flight are finished.

        Raises:
            ConfigurationError: a key without order `key`.
        """
        if key is not None and self._settings.order != "key":
            raise ConfigurationError("a key can be suspended with order='key' only")
        self._engine.waiting.call(
            self._engine.partitions.suspensions.add, Suspension(topic, partition, key)
        )

    def resume(
        self, topic: str | None = None, partition: int | None = None, key: bytes | None = None
    ) -> None:
        """End a suspension."""
        engine, suspension = self._engine, Suspension(topic, partition, key)

        def resume() -> None:
            engine.partitions.suspensions.remove(suspension)
            engine.waiting.wake()

        engine.waiting.call(resume)

    # --- figures -----------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Return the figures of this consumer."""
        return statistics(self._engine)

    def collector(self) -> Collector:
        """Return its metrics for `prometheus_client.REGISTRY.register`."""
        return collector(self._settings.group or "", self._engine)
