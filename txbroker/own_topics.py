"""What txbroker's own topics say of themselves, read in one way behind every door.

The checkpoint topic: claims, progress and snapshots of one half partition. The groups topic: beside
the groups, one record with the number of half partitions, for which ids and order keys were made.
"""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from txbroker.core.codec import (
    CLAIM_KEY,
    PROGRESS_KEY,
    Malformed,
    NewerVersion,
    decode_checkpoint,
)
from txbroker.core.records import Claim, Progress, Record
from txbroker.door import Claimed, Fenced
from txbroker.errors import ConfigurationError, InvariantBroken, NewerRecord

LAYOUT_KEY = b"\tlayout"
"""The key of the layout in the groups topic: no group's name, as it has a control character."""

_LAYOUT_VERSION = 1


class CheckpointScan:
    """The newest record of each key of a checkpoint partition, as records are read in order.

    Thousands of progress records may lie there before they are compacted: only the newest one is
    decoded.

    Args:
        name: the partition as people write it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._newest: dict[bytes | None, Record] = {}

    def note(self, records: Sequence[Record]) -> None:
        """Take records, those of a lower offset first."""
        newest = self._newest
        for record in records:
            newest[record.key] = record

    def claimed(self, claim: Claim) -> Claimed:
        """Return what `claim` has found, all records noted.

        Raises:
            Fenced: the newest claim is another one.
            NewerRecord: a newer version wrote the newest progress.
            InvariantBroken: one of the two does not read.
        """
        last = self._last_claim()
        if last != claim.claim:
            raise Fenced(f"ours is not the newest claim of {self._name}, but {last}")
        progress = self._decode(PROGRESS_KEY)
        snapshots = [
            record
            for key, record in self._newest.items()
            if key not in (CLAIM_KEY, PROGRESS_KEY) and record.value is not None
        ]
        snapshots.sort(key=lambda record: record.offset)
        timestamp_ms = self._newest[CLAIM_KEY].timestamp_ms
        return Claimed(
            timestamp_ms, progress if isinstance(progress, Progress) else None, snapshots
        )

    def _last_claim(self) -> str:
        try:
            last = self._decode(CLAIM_KEY)
        except NewerRecord:
            return "one of a newer version"  # so it is not ours, which we can read
        return last.claim if last is not None else "none"

    def _decode(self, key: bytes) -> Claim | Progress | None:
        record = self._newest.get(key)
        if record is None:
            return None
        try:
            return decode_checkpoint(record)
        except NewerVersion as error:
            raise NewerRecord(f"{self._name} at offset {record.offset}: {error}") from None
        except Malformed as error:
            raise InvariantBroken(f"{self._name} at offset {record.offset}: {error}") from None


class Layout(Struct, frozen=True):
    """How an installation was laid out when it first started.

    Attributes:
        v: the version of this record.
        partitions: half partitions. Ids and order keys are bound to their number for ever.
    """

    v: int
    partitions: int


def encode_layout(partitions: int) -> Record:
    """Return the record that remembers the number of half partitions."""
    return Record(LAYOUT_KEY, msgspec.json.encode(Layout(_LAYOUT_VERSION, partitions)))


def find_layout(records: Sequence[Record]) -> Layout | None:
    """Return the layout among records of the groups topic, the newest one first asked.

    Raises:
        ConfigurationError: it does not read.
    """
    for record in reversed(records):
        if record.key == LAYOUT_KEY and record.value is not None:
            try:
                return msgspec.json.decode(record.value, type=Layout)
            except msgspec.MsgspecError as error:
                raise ConfigurationError(
                    f"the layout in the groups topic at offset {record.offset} does not read: "
                    f"{error}"
                ) from None
    return None


def partition_problems(
    half: str, partitions: Mapping[str, int], layout: Layout | None
) -> list[str]:
    """Return, as sentences, what is wrong with the number of partitions.

    Args:
        half: the name of the half topic.
        partitions: of the four topics that have as many as there are half partitions.
        layout: as it was remembered; None where nothing was yet.
    """
    has = partitions[half]
    if layout is not None and layout.partitions != has:
        return [
            f"{half} has {has} partitions, but this installation was made with "
            f"{layout.partitions}: ids and order keys are bound to that number, with another one "
            "transactions would not be found and order would be lost. Proxies that run go on with "
            f"{layout.partitions}, but none starts; as Kafka takes no partition away, let what is "
            "open be settled and begin anew under another topic_prefix"
        ]
    return [
        f"{name} has {count} partitions, but {half} has {has}: what belongs to one transaction is "
        f"in partitions of the same number. {_remedy(name, count, has)}"
        for name, count in partitions.items()
        if count != has
    ]


def _remedy(name: str, count: int, wanted: int) -> str:
    if count < wanted:
        return f"Add some: kafka-topics.sh --alter --topic {name} --partitions {wanted}"
    return (
        "Kafka takes no partition away: let what is open be settled and begin anew under another "
        "topic_prefix"
    )
