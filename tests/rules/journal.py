"""Everything that reached a Kafka in memory, in order, so that a test can stop at any moment."""

from __future__ import annotations

from typing import NamedTuple

from tests.rules.rules_world import OwnersTime, World
from txbroker.core.records import Record
from txbroker.core.snapshot import is_snapshot
from txbroker.testing.memory import KafkaTransaction, MemoryPartition


class Written(NamedTuple):
    """A record was appended."""

    topic: str
    number: int
    record: Record
    transaction: KafkaTransaction | None


class Ended(NamedTuple):
    """A Kafka transaction was ended."""

    transaction: KafkaTransaction
    committed: bool


class Journal:
    """What happens on the Kafka of a world, from now on.

    Args:
        world: started, and nothing has happened there.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.lines: list[Written | Ended] = []
        for name, topic in world.kafka.topics.items():
            for number, partition in enumerate(topic.partitions):
                self._watch(name, number, partition)
        end = world.kafka.end

        def ended(transaction: KafkaTransaction, *, committed: bool) -> None:
            if transaction.open:
                self.lines.append(Ended(transaction, committed))
            end(transaction, committed=committed)

        world.kafka.end = ended  # type: ignore[method-assign]

    def _watch(self, name: str, number: int, partition: MemoryPartition) -> None:
        def note(record: Record) -> None:
            _, transaction = partition._entries[-1]
            self.lines.append(Written(name, number, record, transaction))

        partition.follow(note)

    def moments(self) -> list[int]:
        """Return after how many lines one of txbroker's own logs has changed."""
        return [
            count
            for count, line in enumerate(self.lines, 1)
            if isinstance(line, Ended) or line.topic.startswith("txbroker.")
        ]

    def checkpoint_cuts(self) -> list[int]:
        """Return after how many lines the checkpoint topic has one more record."""
        return [
            count
            for count, line in enumerate(self.lines, 1)
            if isinstance(line, Written) and line.topic == "txbroker.checkpoint"
        ]

    async def world_at(
        self, owners_time: OwnersTime, count: int, *, logs_to: int | None = None, snapshots: bool
    ) -> World:
        """Return a world of its own in which only the first `count` lines have happened.

        Args:
            owners_time: the owners' clock.
            count: lines; what was not ended by then is aborted by the next claim.
            logs_to: lines of half and operation topic, where more of those have happened.
            snapshots: whether snapshots are there.
        """
        made = World(owners_time)
        made.clock = made.kafka.clock = self.world.clock
        await made.start()
        for topic in made.kafka.topics.values():
            for partition in topic.partitions:
                partition._entries.clear()
        done = {line.transaction for line in self.lines[:count] if _committed(line)}
        for at, line in enumerate(self.lines[: logs_to or count]):
            if isinstance(line, Ended):
                continue
            if at >= count and line.topic not in ("txbroker.half", "txbroker.op"):
                continue
            if not snapshots and is_snapshot(line.record.key):
                continue
            made.kafka.topics[line.topic].partitions[line.number]._entries.append(
                (line.record, _ended(line.transaction, done))
            )
        return made


def _committed(line: Written | Ended) -> bool:
    return isinstance(line, Ended) and line.committed


def _ended(
    transaction: KafkaTransaction | None, done: set[KafkaTransaction | None]
) -> KafkaTransaction | None:
    if transaction is None:
        return None
    ended = KafkaTransaction(transaction.producer)
    ended.open, ended.committed = False, transaction in done
    return ended
