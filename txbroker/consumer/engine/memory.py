"""Bounds the memory of messages."""

from __future__ import annotations

from typing import Protocol

from txbroker.core.consuming.partition import PartitionState
from txbroker.core.records import Partition
from txbroker.errors import TxbrokerError

_FETCH_BYTES_MIN, _FETCH_BYTES_MAX = 16 << 10, 1 << 20


class MemoryTooSmall(TxbrokerError):
    """A record is larger than the memory for messages."""


class Flow(Protocol):
    """The fetching of a partition."""

    def pause(self, partition: Partition) -> None: ...

    def resume(self, partition: Partition) -> None: ...


class Memory:
    """Bounds the memory of messages: a partition that has its share pauses, others continue.

    Attributes:
        bytes_max: of all partitions.
        share: the bytes of one partition.
        paused: partitions that are not fetched.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.paused: set[PartitionState] = set()
        self.share: float = bytes_max
        self._flows: dict[PartitionState, Flow] = {}

    def begin(self, partition: PartitionState, flow: Flow) -> None:
        """Bound a partition, too."""
        self._flows[partition] = flow
        self._divide()

    def end(self, partition: PartitionState) -> None:
        """A partition has gone."""
        self.paused.discard(partition)
        self._flows.pop(partition, None)
        self._divide()

    def _divide(self) -> None:
        self.share = self.bytes_max / max(1, len(self._flows))

    @property
    def fetch_bytes(self) -> int:
        """How much of a partition to fetch at once, so that it keeps to its share."""
        return round(min(_FETCH_BYTES_MAX, max(_FETCH_BYTES_MIN, self.share)))

    def take(self, partition: PartitionState, largest: int) -> None:
        """Pause a partition if it has its share.

        Args:
            largest: size of the largest message that arrived, bytes.

        Raises:
            MemoryTooSmall
        """
        if partition.log.bytes >= self.share and partition not in self.paused:
            self.paused.add(partition)
            self._flows[partition].pause(partition.place)
        if largest > self.bytes_max:
            topic, number = partition.place
            raise MemoryTooSmall(
                f"{topic}-{number} has a record of {largest} bytes, and buffered_bytes_max is "
                f"{self.bytes_max}: raise it"
            )

    def free(self, partition: PartitionState) -> None:
        """Continue with a paused partition that has half of its share."""
        if partition in self.paused and partition.log.bytes < self.share / 2:
            self.paused.discard(partition)
            self._flows[partition].resume(partition.place)
