"""What applying a record to the ledger did."""

from enum import StrEnum

from msgspec import Struct

from txbroker.core.records import Marker, Message
from txbroker.core.transaction import Transaction


class Effect(StrEnum):
    """What applying a record did."""

    APPLIED = "applied"
    REPEATED = "repeated"
    """The same again: it changed nothing, and what stands is what was meant."""
    CONFLICT = "conflict"
    """The contrary of what stands: it changed nothing."""
    ILLEGAL = "illegal"
    """A step that the state does not allow: it changed nothing."""
    VOID = "void"
    """Not a valid record, by the record alone: it changed nothing."""
    EXPIRED = "expired"
    """A half message too far from its id's time: it changed nothing."""
    WAITING = "waiting"
    """A marker before its half message: it is applied if that comes."""
    PARTIAL = "partial"
    """More records of the same transaction follow in this batch."""
    NEWER = "newer"
    """Written by a newer version of txbroker: only that can tell."""


class ApplyResult(Struct, frozen=True):
    """What applying one record did, and to which transaction."""

    effect: Effect
    transaction: Transaction | None = None
    why: str = ""


class MarkerEntry(Struct, frozen=True):
    """A marker as it was read, with the messages that replace the prepared ones."""

    marker: Marker
    offset: int
    at_ms: int
    """The log clock, by which checks are judged."""
    stamp_ms: int
    """The append time itself, which brokers do not find in the future even if their clock was."""
    contents: tuple[Message, ...] | None = None
