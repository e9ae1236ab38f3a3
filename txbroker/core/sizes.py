"""How much room records take in a batch."""

from txbroker.core.records import Message, Record

RECORD_OVERHEAD_BYTES = 96
"""More than a record costs in a batch beside its key, value and headers."""
BATCH_OVERHEAD_BYTES = 61
"""The header of a record batch."""


def bytes_in_batch(record: Record | Message) -> int:
    """Return an upper bound of a record's size in a batch, or of a message's once promoted, bytes.

    Names of headers count as the UTF-8 in which they are written.
    """
    size = RECORD_OVERHEAD_BYTES + len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        name_bytes = len(name) if name.isascii() else len(name.encode())
        size += 10 + name_bytes + len(value or b"")
    return size
