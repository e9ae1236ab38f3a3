"""The store that a consumer's options name, in use."""

from __future__ import annotations

import contextlib

from txbroker.consumer.asides.table import DeadLetterTopic, NoDeadLetterTopic, TableAsides
from txbroker.consumer.asides.topic import TopicAsides
from txbroker.consumer.claims import MakeAsides
from txbroker.consumer.engine.workers import ResultStore
from txbroker.consumer.rounds import Store
from txbroker.consumer.settings import ConsumerSettings
from txbroker.consumer.stores.database import InDatabase, OpenDatabase
from txbroker.consumer.stores.files import InFile
from txbroker.consumer.stores.kafka import InKafka, KafkaResults
from txbroker.consumer.stores.mirror import Mirrored
from txbroker.consumer.stores.own import OwnPositions
from txbroker.door.consuming import ConsumingDoor, GroupMember
from txbroker.errors import ConfigurationError


class Stores:
    """The store of each reader.

    Attributes:
        results: stores the results of handlers; None: positions are stored later.
    """

    def __init__(self, settings: ConsumerSettings, door: ConsumingDoor) -> None:
        self._settings = settings
        self._door = door
        self._shared: Store | None = None
        self._database: OpenDatabase | None = None
        self._dead_letters: DeadLetterTopic | None = None
        self.results: ResultStore | None = None

    @classmethod
    async def open(
        cls,
        settings: ConsumerSettings,
        door: ConsumingDoor,
        stack: contextlib.AsyncExitStack,
    ) -> Stores:
        """Open the store; it is closed with `stack`.

        Raises:
            ConfigurationError: it cannot be used, see `InDatabase.open` and `InFile.open`.
        """
        stores, store, group = cls(settings, door), settings.store, settings.group or ""
        if isinstance(store, InFile):
            store.open()
            stack.callback(store.close)
            stores._shared = store
        elif isinstance(store, InDatabase):
            opened = await store.open(group, settings.own_topics, settings.session_s)
            stack.push_async_callback(opened.close)
            stores._shared = stores._database = opened
            stores.results = opened.results
            if store.dead_letter_topic is not None:
                dead_letters = DeadLetterTopic(store.dead_letter_topic, door, settings.topic_prefix)
                try:
                    await dead_letters.partitions()
                except NoDeadLetterTopic as error:
                    raise ConfigurationError(str(error)) from None
                stores._dead_letters = dead_letters
        elif isinstance(store, InKafka):
            stores.results = results = KafkaResults(
                door, settings.topic_prefix, settings.in_flight_max
            )
            stack.push_async_callback(results.close)
        elif store is not None:
            stores._shared = OwnPositions(store, door, group)
        return stores

    @property
    def in_group(self) -> bool:
        """Whether positions are the group's offsets."""
        return self._shared is None

    def of(self, member: GroupMember | None) -> Store:
        """Return the store of a reader.

        Args:
            member: of the group; None without one.
        """
        if self._shared is None:
            assert member is not None
            return member
        return self._shared if member is None else Mirrored(self._shared, member)

    def asides(self) -> MakeAsides | None:
        """Return what makes the failed messages of a reader; None: nothing is set aside."""
        door, topic = self._door, self._settings.own_topics.aside
        database, dead_letters = self._database, self._dead_letters
        if database is not None:
            return lambda engine, rounds, _fetcher: TableAsides(
                engine, rounds, database, door, dead_letters
            )
        if all(spec.name != topic for spec in self._settings.needed_topics()):
            return None
        return lambda engine, rounds, fetcher: TopicAsides(engine, rounds, door, fetcher, topic)
