"""How much room records take in a batch."""

from collections.abc import Iterable

from txbroker.core.records import Header, Message, Record

RECORD_OVERHEAD_BYTES = 96
"""More than a record costs in a batch beside its key, value and headers."""
BATCH_OVERHEAD_BYTES = 61
"""The header of a record batch."""


def bytes_in_batch(record: Record | Message) -> int:
    """Return an upper bound of a record's size in a batch, or of a message's once promoted, bytes.

    Names of headers count as the UTF-8 in which they are written. What a promoted record says of
    its installation is not in it.
    """
    size = RECORD_OVERHEAD_BYTES + len(record.key or b"") + len(record.value or b"")
    return size + headers_bytes(record.headers) if record.headers else size


def headers_bytes(headers: Iterable[Header]) -> int:
    """Return an upper bound of what headers take in a record, bytes."""
    size = 0
    for name, value in headers:
        name_bytes = len(name) if name.isascii() else len(name.encode())
        size += 10 + name_bytes + len(value or b"")
    return size
