"""What a relay asks of Kafka: records and the position that they end at, in one transaction."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Sequence

import msgspec
from msgspec import Struct

from txbroker.core.records import Record
from txbroker.errors import ConfigurationError

_CLAIM = b"/owner"


class _Claim(Struct, frozen=True):
    """The value of a claim, as JSON.

    Attributes:
        host, process: who claims, for operators.
        position: a position was stored with it, or before it.
    """

    host: str = ""
    process: int = 0
    position: bool = False


def claim_record(key: bytes, *, position: bool) -> Record:
    """Return the record of a claim.

    Args:
        key: of the writer's positions.
        position: whether there is a position.
    """
    claim = _Claim(socket.gethostname(), os.getpid(), position)
    return Record(key + _CLAIM, msgspec.json.encode(claim))


class PositionScan:
    """Finds the position of a writer; takes the records of the topic from its end to its beginning.

    A record proves its writer by the id of its producer, which Kafka gives to the user of a
    transactional id alone. Producers of the transactional id count. Kafka forgets an id that was
    not used for some days, and gives another one to the next claim; until that claim is stored, the
    newest position counts if the producer of the newest claim wrote it. A claim stores a position
    of another producer again, so that the newest claim and the newest position have one producer.

    Records of other writers are ignored as long as ours is there. If it is not, compaction, which
    keeps the newest record of each key, may have removed it.

    Args:
        transactional_id: of the writer.
        topic: of positions.
        key: of positions.
        producers: that Kafka has given to the transactional id.
    """

    def __init__(
        self, transactional_id: str, topic: str, key: bytes, producers: Collection[int]
    ) -> None:
        self._id = transactional_id
        self._topic = topic
        self._key = key
        self._producers = producers
        self._newest: dict[int, Record] = {}
        """The newest position of each producer; -1 for those that no relay writes."""
        self._claims: dict[int, Record] = {}
        """The newest claim of each producer."""

    def note(self, records: Sequence[Record]) -> bool:
        """Take records, in offset order, that are before those taken already; return whether the
        position is found, so that no earlier records are needed."""
        for record in reversed(records):
            producer = -1 if record.headers else record.producer
            if record.key == self._key:
                self._newest.setdefault(producer, record)
                if producer in self._producers:
                    return True
            elif record.key == self._key + _CLAIM and producer >= 0:
                self._claims.setdefault(producer, record)
        return False

    def position(self, *, take: bool) -> Record | None:
        """Return the position; None: there is none. Call it after the last `note`.

        Args:
            take: return the newest one of any writer where none is proved.

        Raises:
            ConfigurationError: it cannot be proved.
        """
        ours = [each for each in self._producers if each in self._newest or each in self._claims]
        if not ours:
            ours = list(self._claims)[:1]  # the newest
        if found := [self._newest[each] for each in ours if each in self._newest]:
            return max(found, key=_offset)
        newest = max(self._newest.values(), key=_offset, default=None)
        why = self._why_lost(newest, ours)
        if not why or take:
            return newest
        raise ConfigurationError(
            f"{self._topic} does not prove the position of {self._key.decode()}: {why}; compaction "
            "may have removed ours. Find out which client wrote there; then start once with "
            "take_position, which goes on from the newest record of any client"
        )

    def _why_lost(self, newest: Record | None, ours: Sequence[int]) -> str:
        if newest is not None:
            by = f"by producer {newest.producer}, which is none of {self._id}"
            if newest.producer < 0:
                by = "outside of a Kafka transaction"
            elif newest.headers:
                by = "with headers, which no relay writes"
            return f"the newest record with its key, at offset {newest.offset}, was written {by}"
        for claim in (self._claims[each] for each in ours if each in self._claims):
            if _read_claim(claim).position:
                return f"the claim at offset {claim.offset} follows one, and there is none"
        return ""

    def is_overwritten(self, found: Record, producer: int) -> bool:
        """Return whether a position has to be stored again.

        Args:
            producer: of the claim.
        """
        newest = max(self._newest.values(), key=_offset)
        return newest is not found or found.producer != producer


def _offset(record: Record) -> int:
    return record.offset


def _read_claim(record: Record) -> _Claim:
    try:
        return msgspec.json.decode(record.value or b"", type=_Claim)
    except msgspec.MsgspecError:
        return _Claim(position=True)
