"""What txbroker's own topics say of themselves, read in one way behind every door.

The checkpoint topic: claims, progress and snapshots of one half partition. The groups topic: beside
the groups, one record with the number of half partitions, for which ids and order keys were made.
"""

import contextlib
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct, structs

from txbroker.core.codec import (
    CLAIM_KEY,
    OWN_TOPICS,
    PROGRESS_KEY,
    SKIPS,
    Malformed,
    NewerVersion,
    decode_checkpoint,
    decode_skip,
    passed_over,
)
from txbroker.core.records import Cause, Claim, Progress, Record, Skip
from txbroker.core.snapshot import CLOSING_KEYS
from txbroker.door import Claimed, Fenced
from txbroker.errors import ConfigurationError, InvariantBroken, NewerRecord

LAYOUT_KEY = b"\tlayout"
"""The key of the layout in the groups topic: no group's name, as it has a control character."""

_LAYOUT_VERSION = 1
_ENDS = tuple(f".{name}" for name in OWN_TOPICS)
CHECKPOINT = "checkpoint"
_LOSES_NEWEST = (
    "what it says of promotion: what was promoted since the progress before it is promoted again"
)
_LOSES_PROGRESS = (
    "no progress is left: all that was promoted since the newest snapshot, or since the begin of "
    "the logs without one, is promoted again"
)


class Stop(Struct, frozen=True):
    """A record that stops its partition at the next claim.

    Attributes:
        log: `half`, `op` or `checkpoint`.
        code: `newer`, `unreadable`, or `progress_lost`.
        why: in a sentence.
        loses: what passing it over loses, in a sentence.
    """

    log: str
    record: Record
    code: str
    why: str
    loses: str


class CheckpointScan:
    """What counts in a checkpoint partition, as records are read in order.

    Claims and progress are written in Kafka transactions, by producers of the installation. What
    lies under their keys without one, or was written by a producer that has written neither and
    does not read, is another client's: it is set aside and counted. What a newer version may have
    written, or one of our producers and does not read, stops the partition, unless an operator
    has decided to pass it over.

    Args:
        name: the partition as people write it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ours: set[int] = set()
        """Producers that have written claims or progress."""
        self._newest: dict[bytes | None, Record] = {}
        self._values: dict[bytes, Claim | Progress] = {}
        self._doubtful: dict[bytes, list[_Doubtful]] = {CLAIM_KEY: [], PROGRESS_KEY: []}
        self._foreign: list[_Doubtful] = []
        self._skips: dict[bytes, Skip] = {}
        self._next = 0
        self._whole = True
        """Whether all records are there that were ever written: compaction has taken none."""

    def note(self, records: Sequence[Record]) -> None:
        """Take records, those of a lower offset first."""
        for record in records:
            self._whole = self._whole and record.offset - record.skipped == self._next
            self._next = record.offset + 1
            if record.key in self._doubtful:
                self._note_ours(record.key, record)
            elif record.key is not None and record.key.startswith(SKIPS):
                with contextlib.suppress(Malformed):
                    self._skips[record.key] = decode_skip(record)
            elif record.value is None and record.key in CLOSING_KEYS:
                # A snapshot is only ever replaced.
                self._set_aside(_Doubtful(record, newer=False, why="nobody of ours removes it"))
            else:
                self._newest[record.key] = record

    def _note_ours(self, key: bytes, record: Record) -> None:
        try:
            value = decode_checkpoint(record)
        except (NewerVersion, Malformed) as error:
            newer = isinstance(error, NewerVersion)
            found = _Doubtful(structs.replace(record, skipped=0), newer, str(error))
            if record.producer < 0:
                self._set_aside(found)
            else:
                self._doubtful[key].append(found)
            return
        self._newest[key], self._values[key] = record, value
        self._doubtful[key].clear()
        if record.producer >= 0:
            self._ours.add(record.producer)

    def _set_aside(self, found: "_Doubtful") -> None:
        # Of many only the newest is ever shown; the others are counted.
        if self._foreign and self._foreign[-1].record.key == found.record.key:
            found = structs.replace(found, count=self._foreign.pop().count + 1)
        self._foreign.append(found)

    @property
    def foreign(self) -> int:
        """How many records are set aside that others wrote under our keys."""
        unread = [each for key in self._doubtful for each in self._doubtful[key] if self._is(each)]
        return len(unread) + sum(each.count for each in self._foreign)

    def _is(self, found: "_Doubtful") -> bool:
        """Say whether another client wrote a record."""
        return not found.newer and found.record.producer not in self._ours

    def skips(self) -> tuple[Skip, ...]:
        """Return what operators have decided to pass over."""
        return tuple(self._skips.values())

    def stops(self) -> list[Stop]:
        """Return what stops the partition, all records noted, the newest first."""
        skips = self.skips()
        left = [each for each in reversed(self._doubtful[PROGRESS_KEY]) if not self._is(each)]
        found = [self._stop(each) for each in left]
        standing = [each for each in found if not passed_over(skips, CHECKPOINT, each.record)]
        if standing or PROGRESS_KEY in self._values or self._whole or len(found) > len(standing):
            return standing
        # Nothing is left of ours. Compaction keeps the newest record of a key, whoever wrote it.
        unknown = [
            each
            for each in (*self._foreign, *self._doubtful[PROGRESS_KEY])
            if each.record.key == PROGRESS_KEY
        ]
        if not unknown or any(passed_over(skips, CHECKPOINT, each.record) for each in unknown):
            return []
        why = (
            f"{self._at(unknown[-1])} is another client's record under the key of the progress, "
            "and compaction may have removed ours for it: nobody can tell what was promoted"
        )
        return [Stop(CHECKPOINT, unknown[-1].record, "progress_lost", why, _LOSES_PROGRESS)]

    def _stop(self, found: "_Doubtful") -> Stop:
        loses = _LOSES_NEWEST if PROGRESS_KEY in self._values else _LOSES_PROGRESS
        if found.newer:
            why = f"{self._at(found)}: {found.why}: upgrade this proxy"
            return Stop(CHECKPOINT, found.record, "newer", why, loses)
        why = f"{self._at(found)} was written by one of our producers: {found.why}"
        return Stop(CHECKPOINT, found.record, "unreadable", why, loses)

    def _at(self, found: "_Doubtful") -> str:
        return f"{self._name} at offset {found.record.offset}"

    def claimed(self, claim: Claim) -> Claimed:
        """Return what `claim` has found, all records noted.

        Raises:
            Fenced: the newest claim is another one.
            NewerRecord: a newer version wrote the newest progress.
            InvariantBroken: the progress does not read, or is lost.
        """
        last = self._last_claim()
        if last != claim.claim:
            raise Fenced(f"ours is not the newest claim of {self._name}, but {last}")
        for stop in self.stops():
            text = f"{stop.why}. To pass the record over see docs/operate/repair.md"
            raise NewerRecord(text) if stop.code == "newer" else InvariantBroken(text)
        timestamp_ms = self._newest[CLAIM_KEY].timestamp_ms
        progress = self._values.get(PROGRESS_KEY)
        if not isinstance(progress, Progress):
            progress = None
        return Claimed(timestamp_ms, progress, self.snapshots(), self.skips(), self.foreign)

    def snapshots(self) -> list[Record]:
        """Return the newest record under each key that is neither a claim's nor progress's."""
        found = [
            record
            for key, record in self._newest.items()
            if key not in (CLAIM_KEY, PROGRESS_KEY) and record.value is not None
        ]
        return sorted(found, key=lambda record: record.offset)

    def _last_claim(self) -> str:
        if any(each.newer for each in self._doubtful[CLAIM_KEY]):
            return "one of a newer version"  # so it is not ours, which we can read
        last = self._values.get(CLAIM_KEY)
        return last.claim if isinstance(last, Claim) else "none"


class _Doubtful(Struct, frozen=True):
    """A record under one of our keys that does not read, and why; with how many before it."""

    record: Record
    newer: bool
    why: str
    count: int = 1


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

    One that does not read is another client's, and passed over where an older one is left.

    Raises:
        ConfigurationError: none reads.
    """
    unread: tuple[int, Exception] | None = None
    for record in reversed(records):
        if record.key == LAYOUT_KEY and record.value is not None:
            try:
                return msgspec.json.decode(record.value, type=Layout)
            except (msgspec.MsgspecError, RecursionError) as error:
                unread = unread or (record.offset, error)
    if unread is not None:
        raise ConfigurationError(
            f"the layout in the groups topic at offset {unread[0]} does not read: {unread[1]}"
        )
    return None


def installation_of(topic: str) -> str:
    """Return the prefix of the installation whose own topic this would be by its name, "" where
    it is nobody's."""
    return next((topic[: -len(end)] for end in _ENDS if topic.endswith(end)), "")


def is_layout(record: Record) -> bool:
    """Say whether only an installation writes such a record into its groups topic."""
    try:
        return find_layout([record]) is not None
    except ConfigurationError:
        return False


def is_owners(record: Record) -> bool:
    """Say whether only an installation's owners write such a record into its checkpoint topic."""
    try:
        decode_checkpoint(record)
    except NewerVersion:
        return True
    except Malformed:
        return False
    return True


def belongs_to(topic: str, prefix: str) -> Cause:
    """Return why a topic of an installation is no target."""
    why = f"topic {topic} belongs to the txbroker installation {prefix!r}: it is no target"
    return Cause("reserved", why, topic, -1)


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
