"""Reading of txbroker's own topics, shared by all implementations of the door.

The checkpoint topic holds claims, checkpoints and snapshots of one half partition. The groups topic
holds, besides the groups, one record with the number of half partitions.
"""

import contextlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import msgspec
from msgspec import Struct, structs

from txbroker.core.decoding import (
    KeptPart,
    Malformed,
    NewerVersion,
    decode_checkpoint,
    decode_kept,
    decode_skip,
    is_content,
    passed_over,
)
from txbroker.core.encoding import CLAIM_KEY, ID_HEADER, PROGRESS_KEY, SKIPS
from txbroker.core.records import Checkpoint, Claim, Record, Skip
from txbroker.core.routing import parse_id
from txbroker.core.snapshot import CLOSING_KEYS, closing_key, find_whole
from txbroker.door.protocols import Claimed, ForeignRecord
from txbroker.door.writing import Fenced
from txbroker.errors import ConfigurationError, InvariantBroken, NewerRecord

LAYOUT_KEY = b"\tlayout"
"""The key of the layout in the groups topic; with a control character, which no group has."""

_LAYOUT_VERSION = 1
CHECKPOINT = "checkpoint"
_PER_HALF = ("half", "op", CHECKPOINT)
OUTSIDE = "it was written outside of a Kafka transaction"
OTHER_PRODUCER = "its producer is none of the partition's owners"
SHOWN_MAX = 10
"""Records of other clients that are shown of each kind; the rest is counted."""
_LOSES_NEWEST = (
    "its checkpoint: everything promoted since the previous checkpoint is promoted again"
)
_LOSES_PROGRESS = (
    "the last checkpoint: everything promoted since the newest snapshot, or without one since the "
    "start of the logs, is promoted again"
)


class Stop(Struct, frozen=True):
    """A record that stops its partition at the next claim.

    Attributes:
        log: `half`, `op`, `checkpoint` or `parked`.
        code: `newer`, `unreadable`, or `progress_lost`.
        why: as a sentence.
        loses: what is lost by skipping it.
    """

    log: str
    record: Record
    code: str
    why: str
    loses: str


class CheckpointScan:
    """The valid records of a checkpoint partition, read in offset order.

    Claims and checkpoints are written in Kafka transactions, by producers of the installation. A
    record with their keys outside of a transaction, or an unreadable one by a producer that wrote
    neither, is another client's: it is ignored and counted. A record that a newer version may have
    written, or an unreadable one of our producers, stops the partition, unless an operator has
    decided to skip it.

    Kafka gives the id of a producer to the user of its transactional id alone, and none a second
    time. So once each of the current producers has written, or is named by a claim of one of them,
    every record of another producer is another client's.

    Args:
        name: of the partition, for messages.
        producers: ids that Kafka has for the transactional ids of the partition; none if it has
            forgotten one.
    """

    def __init__(self, name: str, producers: Collection[int] = ()) -> None:
        self._name = name
        self._current = frozenset(producers)
        self._unseen = set(producers)
        """Current producers that may have followed others since the last record."""
        self._ours: set[int] = set()
        """Producers that have written claims or checkpoints."""
        self._newest: dict[bytes | None, Record] = {}
        self._values: dict[bytes, Claim | Checkpoint] = {}
        self._doubtful: dict[bytes, list[_Doubtful]] = {CLAIM_KEY: [], PROGRESS_KEY: []}
        self._outside = {key: _Outside() for key in self._doubtful}
        self._removed = _Outside()
        """Tombstones of keys whose records proxies only replace."""
        self._skips: dict[bytes, Skip] = {}
        self._next = 0
        self._whole = True
        """Whether no record is missing: compaction has removed none."""

    def note(self, records: Sequence[Record]) -> None:
        """Add records, in offset order."""
        for record in records:
            self._whole = self._whole and record.offset - record.skipped == self._next
            self._next = record.offset + 1
            if record.key in self._doubtful:
                self._note_ours(record.key, record)
            elif record.key is not None and record.key.startswith(SKIPS):
                self._note_skip(record.key, record)
            elif record.value is None and record.key in CLOSING_KEYS:
                # Proxies replace a snapshot and never remove it.
                self._removed.note(ForeignRecord(record, "no proxy removes it"), copy=False)
            else:
                self._newest[record.key] = record

    def _note_skip(self, key: bytes, record: Record) -> None:
        if record.value is None:
            self._skips.pop(key, None)  # revoked
        with contextlib.suppress(Malformed):
            self._skips[key] = decode_skip(record)

    def _note_ours(self, key: bytes, record: Record) -> None:
        value, newer, why = None, False, OUTSIDE
        try:
            value = decode_checkpoint(record)
        except (NewerVersion, Malformed) as error:
            newer, why = isinstance(error, NewerVersion), str(error)
        if record.producer < 0:
            self._outside[key].note(ForeignRecord(record, OUTSIDE), copy=value is not None)
        elif self._current and not self._unseen and record.producer not in self._current:
            self._outside[key].note(ForeignRecord(record, OTHER_PRODUCER), copy=False)
        elif value is None:
            found = _Doubtful(structs.replace(record, skipped=0), newer, why)
            self._doubtful[key].append(found)
        else:
            self._newest[key], self._values[key] = record, value
            self._doubtful[key].clear()
            self._ours.add(record.producer)
            if record.producer in self._current:
                named = value.producers if isinstance(value, Claim) else ()
                self._unseen.difference_update((record.producer, *named))

    @property
    def foreign(self) -> int:
        """The number of ignored records of other clients with our keys."""
        counts = (one.count + len(self._unread(key)) for key, one in self._outside.items())
        return self._removed.count + sum(counts)

    def set_aside(self) -> list[ForeignRecord]:
        """Return the newest ignored records, a few of each key, in offset order."""
        found = [*self._removed.newest]
        for key, outside in self._outside.items():
            found += (*outside.newest, *self._unread(key)[-SHOWN_MAX:])
        return sorted(found, key=lambda each: each.record.offset)

    def _unread(self, key: bytes) -> list[ForeignRecord]:
        """Return unreadable records that other clients wrote in Kafka transactions."""
        foreign = filter(self._is, self._doubtful[key])
        return [ForeignRecord(each.record, each.why) for each in foreign]

    def _is(self, found: "_Doubtful") -> bool:
        """Return whether another client wrote a record."""
        return not found.newer and found.record.producer not in self._ours

    def skips(self) -> tuple[Skip, ...]:
        """Return operators' decisions to skip records."""
        return tuple(self._skips.values())

    def stops(self) -> list[Stop]:
        """Return the records that stop the partition, the newest first, after the last `note`."""
        skips = self.skips()
        left = [each for each in reversed(self._doubtful[PROGRESS_KEY]) if not self._is(each)]
        found = [self._stop(each) for each in left]
        standing = [each for each in found if not passed_over(skips, CHECKPOINT, each.record)]
        if standing or PROGRESS_KEY in self._values or len(found) > len(standing):
            return standing
        lost = self._lost()
        if not lost or any(passed_over(skips, CHECKPOINT, each.record) for each in lost):
            return []
        return lost[-1:]

    def _lost(self) -> list[Stop]:
        """Return the records that show that our checkpoints are lost."""
        outside = self._outside[PROGRESS_KEY]
        if self._whole:
            # There was never one, and a copy can only come from another topic.
            what = "a copy of a checkpoint: the topic was restored, or a client wrote it"
            return [self._lost_by(outside.copy.record, what)] if outside.copy else []
        # Compaction keeps the newest record of a key, also another client's, and drops tombstones.
        newest = self._newest
        closings = [
            newest[closing_key(each.slot)]
            for each in find_whole(self.snapshots())
            if each.closing.progress
        ]
        what = "a snapshot with a checkpoint, but there is no checkpoint any more"
        found = [self._lost_by(each, what) for each in closings]
        what = (
            "another client's record with the key of the checkpoint, and compaction may have "
            "removed ours"
        )
        others = [*outside.newest, *self._unread(PROGRESS_KEY)]
        return found + [self._lost_by(each.record, what) for each in others]

    def _lost_by(self, record: Record, what: str) -> Stop:
        why = f"{self._at(record)} is {what}: what was promoted is unknown"
        record = structs.replace(record, skipped=0)
        return Stop(CHECKPOINT, record, "progress_lost", why, _LOSES_PROGRESS)

    def _stop(self, found: "_Doubtful") -> Stop:
        loses = _LOSES_NEWEST if PROGRESS_KEY in self._values else _LOSES_PROGRESS
        at, code = self._at(found.record), "newer" if found.newer else "unreadable"
        why = f"{at} was written by one of our producers: {found.why}"
        if found.newer:
            why = f"{at}: {found.why}: upgrade this proxy"
        return Stop(CHECKPOINT, found.record, code, why, loses)

    def _at(self, record: Record) -> str:
        return f"{self._name} at offset {record.offset}"

    def claimed(self, claim: Claim) -> Claimed:
        """Return the result of `claim`; call it after the last `note`.

        Raises:
            Fenced: the newest claim is another one.
            NewerRecord: a newer version wrote the newest checkpoint.
            InvariantBroken: the checkpoint is unreadable or lost.
        """
        last = self._last_claim()
        if last != claim.claim:
            raise Fenced(f"another owner has claimed {self._name}: the newest claim is {last}")
        for stop in self.stops():
            text = f"{stop.why}. To skip the record see docs/operate/repair.md"
            raise NewerRecord(text) if stop.code == "newer" else InvariantBroken(text)
        progress = self._values.get(PROGRESS_KEY)
        return Claimed(
            self._newest[CLAIM_KEY].timestamp_ms,
            progress if isinstance(progress, Checkpoint) else None,
            self.snapshots(),
            self.skips(),
            self.foreign,
            self.set_aside(),
        )

    def snapshots(self) -> list[Record]:
        """Return the newest record of each key other than claims' and checkpoints'."""
        found = [
            record
            for key, record in self._newest.items()
            if key not in (CLAIM_KEY, PROGRESS_KEY) and record.value is not None
        ]
        return sorted(found, key=lambda record: record.offset)

    def _last_claim(self) -> str:
        if any(each.newer for each in self._doubtful[CLAIM_KEY]):
            return "one of a newer version"  # not ours, which is readable
        last = self._values.get(CLAIM_KEY)
        return last.claim if isinstance(last, Claim) else "none"


class _Doubtful(Struct, frozen=True):
    """An unreadable record of a Kafka transaction with one of our keys, and why."""

    record: Record
    newer: bool
    why: str


class _Outside:
    """Records with one of our keys that another client certainly wrote."""

    def __init__(self) -> None:
        self.count = 0
        self.newest: deque[ForeignRecord] = deque(maxlen=SHOWN_MAX)
        self.copy: ForeignRecord | None = None
        """The newest that is a valid claim or checkpoint."""

    def note(self, found: ForeignRecord, *, copy: bool) -> None:
        self.count += 1
        self.newest.append(found)
        if copy:
            self.copy = found


class ParkedScan:
    """The valid records of a parked partition, read in offset order.

    Copies are written in Kafka transactions. Records outside of one are another client's and
    ignored; but a tombstone removes what a newer version may have written with its key.

    Args:
        partition: the half partition.
        skips: operators' decisions to skip records.
        bodies: also keep the values of records that stop the partition.
    """

    def __init__(self, partition: int, skips: Sequence[Skip] = (), *, bodies: bool = False) -> None:
        self._partition = partition
        self._skips = skips
        self._bodies = bodies
        self._newer: dict[bytes | None, tuple[Record, str]] = {}
        self.foreign = 0
        self.set_aside: deque[ForeignRecord] = deque(maxlen=SHOWN_MAX)

    def take(self, record: Record) -> KeptPart | None:
        """Return the contents of a record; None if it is ignored."""
        try:
            part = decode_kept(record)
        except NewerVersion as error:
            why = foreign_why("parked", record, self._partition)
            if why:
                self._set_aside(record, why)
            elif not passed_over(self._skips, "parked", record):
                kept = record if self._bodies else structs.replace(record, value=None)
                self._newer[record.key] = (kept, str(error))
            return None
        except Malformed as error:
            self._set_aside(record, str(error))
            return None
        if record.value is None or record.producer >= 0:
            self._newer.pop(record.key, None)
        if record.producer < 0:
            self._set_aside(record, OUTSIDE)
            return None
        return part

    def _set_aside(self, record: Record, why: str) -> None:
        self.foreign += 1
        self.set_aside.append(ForeignRecord(record, why))

    def stops(self) -> list[tuple[Record, str]]:
        """Return the records that stop the partition, after the last `take`, and how each shows a
        newer version."""
        return list(self._newer.values())


def foreign_why(log: str, record: Record, partition: int) -> str:
    """Return the evidence that another client wrote a record of a seemingly newer version.

    All versions write copies in Kafka transactions, half messages and markers outside of them, and
    the transaction's id in the same place.

    Args:
        log: `half`, `op` or `parked`.
        record: with its transactional producer.
        partition: the half partition.

    Returns:
        "" if a newer version may have written it.
    """
    if log == "parked" and record.producer < 0:
        return OUTSIDE
    if log != "parked" and record.producer >= 0:
        return "it was written inside of a Kafka transaction"
    id: bytes | None
    if log == "half" or (log == "op" and is_content(record)):
        id = next((value for name, value in record.headers if name == ID_HEADER), None)
    else:
        id = (record.key or b"").partition(b"/")[0] if log == "parked" else record.key
    try:
        parts = parse_id((id or b"").decode())
    except ValueError:
        return "it names no transaction"
    if parts.partition != partition:
        return f"it names a transaction of partition {parts.partition}"
    return ""


class Layout(Struct, frozen=True):
    """The layout of an installation at its first start.

    Attributes:
        v: the version of this record.
        partitions: half partitions. Ids and order keys depend on their number.
    """

    v: int
    partitions: int


def encode_layout(partitions: int) -> Record:
    """Return the record with the number of half partitions."""
    return Record(LAYOUT_KEY, msgspec.json.encode(Layout(_LAYOUT_VERSION, partitions)))


def find_layout(records: Sequence[Record]) -> Layout | None:
    """Return the newest valid layout among records of the groups topic; None without any. An
    unreadable one is another client's; raise ConfigurationError if there is no older one."""
    unread: tuple[int, Exception] | None = None
    for record in reversed(records):
        if record.key == LAYOUT_KEY and record.value is not None:
            try:
                return msgspec.json.decode(record.value, type=Layout)
            except (msgspec.MsgspecError, RecursionError) as error:
                unread = unread or (record.offset, error)
    if unread is not None:
        raise ConfigurationError(
            f"the layout in the groups topic at offset {unread[0]} is unreadable: {unread[1]}"
        )
    return None


def half_partitions(prefix: str, partitions: Mapping[str, int]) -> int:
    """Return an installation's half partitions by the partition counts of the topics that exist; 0
    if these do not match."""
    half, op, checkpoint = (partitions.get(f"{prefix}.{name}", 0) for name in _PER_HALF)
    groups = partitions.get(f"{prefix}.groups", 0)
    return half if half == op == checkpoint and groups else 0


def is_layout(record: Record, partitions: int = 0) -> bool:
    """Return whether a record is the layout of an installation with this number of half partitions;
    0 for any number."""
    try:
        layout = find_layout([record])
    except ConfigurationError:
        return False
    return layout is not None and partitions in (0, layout.partitions)


def is_owners(record: Record) -> bool:
    """Return whether only owners of an installation write such a record to its checkpoint topic."""
    try:
        decode_checkpoint(record)
    except NewerVersion:
        return True
    except Malformed:
        return False
    return True


def partition_problems(
    half: str, partitions: Mapping[str, int], layout: Layout | None
) -> list[str]:
    """Return problems of the numbers of partitions, as sentences.

    Args:
        half: the name of the half topic.
        partitions: of the four topics that have as many as there are half partitions.
        layout: None at the first start.
    """
    has = partitions[half]
    if layout is not None and layout.partitions != has:
        return [
            f"{half} has {has} partitions, but this installation was made with "
            f"{layout.partitions}: ids and order keys are bound to that number, with another one "
            "transactions would not be found and order would be lost. Proxies that run go on with "
            f"{layout.partitions}, but none starts; as Kafka cannot remove partitions, let "
            "open transactions settle and start again with another topic_prefix"
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
        "Kafka cannot remove partitions: let open transactions settle and start again with another "
        "topic_prefix"
    )
