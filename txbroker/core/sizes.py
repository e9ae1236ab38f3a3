"""How much room records take in a batch."""

from collections.abc import Iterable

from txbroker.core.headers import Encoded
from txbroker.core.records import Header, Message, Record

RECORD_OVERHEAD_BYTES = 96
"""More than a record costs in a batch beside its key, value and headers."""
HEADER_OVERHEAD_BYTES = 10
"""More than a header costs beside its name and value."""
BATCH_OVERHEAD_BYTES = 61
"""The header of a record batch."""


def bytes_in_batch(records: Iterable[Record | Message]) -> int:
    """Return an upper bound of what records take in a batch, or messages once promoted, bytes.

    Names of headers count as the UTF-8 in which they are written. What promoted records say of
    their installation is not in it.
    """
    size = 0
    for record in records:
        size += RECORD_OVERHEAD_BYTES + len(record.key or b"") + len(record.value or b"")
        headers = record.headers
        if isinstance(headers, Encoded):
            size += len(headers.data)
        elif headers:
            size += headers_bytes(headers)
    return size


def headers_bytes(headers: Iterable[Header]) -> int:
    """Return an upper bound of what headers take in a record, bytes."""
    size = 0
    for name, value in headers:
        name_bytes = len(name) if name.isascii() else len(name.encode())
        size += HEADER_OVERHEAD_BYTES + name_bytes + len(value or b"")
    return size
