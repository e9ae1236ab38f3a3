"""ParkedCopies in the parked topic: read as a takeover needs them, without their messages."""

from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from txbroker.core.decoding import (
    HalfPart,
    KeptPart,
    Malformed,
    NewerVersion,
    decode_kept,
    join_parts,
)
from txbroker.core.records import ParkedCopy, Record, Skip, State
from txbroker.core.transaction import Transaction, bare
from txbroker.door.own_topics import ParkedScan
from txbroker.door.protocols import ForeignRecord, PartitionDoor
from txbroker.errors import InvariantBroken, KafkaUnavailable, NewerRecord
from txbroker.proxy.partition.clock import Yielder

PICKED_MAX = 200
"""Copies that are restored at a time, which bounds memory."""


class ParkedCopies(Struct, frozen=True):
    """The content of the parked topic.

    Attributes:
        whole: the copies, with bare messages and the offsets of their records.
        torn: ids of which some records are missing, which no proxy causes.
        foreign: number of records of other clients.
        set_aside: the newest of these.
    """

    whole: list[ParkedCopy]
    torn: frozenset[str]
    foreign: int = 0
    set_aside: tuple[ForeignRecord, ...] = ()

    def check(self, promoted: Iterable[Transaction]) -> None:
        """Raise if a transaction that counts as promoted, for want of a whole copy, has a torn one.

        Raises:
            InvariantBroken: the parked topic is damaged.
        """
        torn = [transaction.id for transaction in promoted if transaction.id in self.torn]
        if torn:
            raise InvariantBroken(
                f"the parked topic is damaged: {len(torn)} copies of committed transactions are "
                f"incomplete, such as that of {torn[0]}: it is unknown whether they were promoted"
            )


async def read_copies(door: PartitionDoor, skips: Sequence[Skip]) -> ParkedCopies:
    """Read the parked topic from its start; compaction bounds its size.

    Args:
        door: of the partition.
        skips: records that operators decided to pass over.

    Raises:
        NewerRecord: a newer version wrote the newest record of a copy.
        KafkaUnavailable: Kafka does not answer.
    """
    yielder = Yielder()
    scan = ParkedScan(door.partition, skips)
    parts: dict[str, dict[int, tuple[int, KeptPart]]] = {}
    async for records in door.parked():
        for record in records:
            part = scan.take(record)
            if part is None:
                continue
            if part.part is None:
                left = parts.get(part.id, {})
                left.pop(part.sequence, None)
                if not left:
                    parts.pop(part.id, None)
            else:
                part = structs.replace(part, part=_bare(part.part))
                parts.setdefault(part.id, {})[part.sequence] = (record.offset, part)
            await yielder.step()
    for record, why in scan.stops():
        raise NewerRecord(
            f"a record of the parked topic at offset {record.offset} was written by a newer "
            f"txbroker ({why}): upgrade this proxy. To pass it over see docs/operate/repair.md"
        )
    whole: list[ParkedCopy] = []
    torn = set()
    for id, records_of in parts.items():
        kept = _join(records_of)
        if kept is None:
            torn.add(id)
        else:
            whole.append(kept)
        await yielder.step()
    return ParkedCopies(whole, frozenset(torn), scan.foreign, tuple(scan.set_aside))


async def with_messages(door: PartitionDoor, copies: Sequence[ParkedCopy]) -> list[ParkedCopy]:
    """Read the messages of a few copies by the offsets of their records.

    Raises:
        KafkaUnavailable: Kafka does not answer, or a copy was moved or removed.
    """
    offsets = sorted({offset for copy in copies for offset in copy.at})
    records = {record.offset: record for record in await door.pick_parked(offsets)}
    return [_filled(copy, records) for copy in copies]


def batches(copies: Sequence[ParkedCopy]) -> Iterable[Sequence[ParkedCopy]]:
    """Yield a few copies at a time."""
    for first in range(0, len(copies), PICKED_MAX):
        yield copies[first : first + PICKED_MAX]


def _decode(record: Record) -> KeptPart | None:
    try:
        return decode_kept(record)
    except (NewerVersion, Malformed):
        return None


def _bare(part: HalfPart) -> HalfPart:
    return structs.replace(part, message=bare([part.message])[0])


def _join(parts: dict[int, tuple[int, KeptPart]]) -> ParkedCopy | None:
    """Return the copy of these records; None if some are missing."""
    _, first = parts.get(0, (-1, None))
    if first is None or first.part is None or first.facts is None:
        return None
    halves: list[HalfPart] = []
    at: list[int] = []
    for sequence in range(first.part.count):
        offset, part = parts.get(sequence, (-1, None))
        if part is None or part.part is None:
            return None
        halves.append(part.part)
        at.append(offset)
    facts = first.facts
    return ParkedCopy(
        join_parts(halves),
        facts.half,
        facts.at_ms,
        State(facts.state),
        facts.cause,
        facts.decided_ms,
        tuple(at),
    )


def _filled(copy: ParkedCopy, records: dict[int, Record]) -> ParkedCopy:
    messages = []
    for sequence, offset in enumerate(copy.at):
        record = records.get(offset)
        part = None if record is None else _decode(record)
        if (
            part is None
            or part.part is None
            or (part.id, part.sequence) != (copy.half.id, sequence)
        ):
            raise KafkaUnavailable(f"the copy of {copy.half.id} moved while it was read")
        messages.append(part.part.message)
    return structs.replace(copy, half=structs.replace(copy.half, messages=tuple(messages)))
