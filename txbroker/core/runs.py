"""Runs: what several operations write to one log in one batch, with what it says.

A *row* is what one operation writes: records that stay together in a batch, and the values that
were encoded in them, so that the ledger need not decode what this proxy has just encoded. A *run*
is a sequence of rows. `Ledger.apply_halves` and `Ledger.apply_markers` apply runs; their law is
that a run comes to what its records come to, read back and applied one by one.
"""

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct

from txbroker.core.codec import encode_contents, encode_half, encode_marker
from txbroker.core.records import Half, Marker, Message, Record
from txbroker.core.sizes import bytes_in_batch
from txbroker.core.transaction import Place, fingerprint


class HalfRow(Struct, frozen=True, gc=False):
    """A half message and its records.

    Attributes:
        size: an upper bound of what the records take in a batch, bytes.
        fingerprint: of its messages and group.
        places: where its messages go.
    """

    records: tuple[Record, ...]
    size: int
    half: Half
    fingerprint: bytes
    places: tuple[Place, ...]


class MarkerRow(Struct, frozen=True, gc=False):
    """A marker and its records.

    Attributes:
        size: an upper bound of what the records take in a batch, bytes.
        contents: the messages that replace the prepared ones, where it brings any.
    """

    records: tuple[Record, ...]
    size: int
    marker: Marker
    contents: tuple[Message, ...] | None = None


Row: TypeAlias = HalfRow | MarkerRow


def half_row(half: Half, version: int, where: tuple[Place, ...]) -> HalfRow:
    """Return what preparing a transaction writes.

    Args:
        version: of the records.
        where: where its messages go, as `txbroker.core.transaction.places` has it.

    Raises:
        ValueError: a number is one that cannot be read back.
    """
    records = encode_half(half, version)
    return HalfRow(
        records,
        bytes_in_batch(records),
        half,
        fingerprint(half.messages, half.group),
        where,
    )


def marker_row(
    marker: Marker, half: Half | None = None, contents: Sequence[Message] | None = None
) -> MarkerRow:
    """Return what a marker writes.

    Args:
        half: the half message, where its messages are replaced.
        contents: what replaces them, as many as `marker` announces.
    """
    records: tuple[Record, ...] = (encode_marker(marker),)
    replaced = None
    if half is not None and contents is not None:
        replaced = tuple(contents)
        records += encode_contents(half, replaced, marker.v)
    return MarkerRow(records, bytes_in_batch(records), marker, replaced)
