"""How proxies hand calls on to one another, and merge lists.

Bodies are the contract's structs as msgpack maps. Fields travel by name; a reader leaves out those
it does not know and takes the default of those that are missing, so builds of different age
understand each other.
"""

import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import msgspec
from msgspec import Struct

from txbroker.contract.service import PrepareRequest, TransactionPage, TransactionView
from txbroker.core.routing import dedup_randomness, make_id, parse_id
from txbroker.errors import BadRequest, RequestError, request_errors

PREFIX = "/internal/v1"
SESSIONS_PATH = f"{PREFIX}/sessions"
OVERVIEW_PATH = f"{PREFIX}/overview"
CALLER_HEADER = "txb-caller"
"""Names the principal for which a proxy hands a call on, percent-encoded."""
CALLER: ContextVar[str] = ContextVar("caller", default="")
"""The principal that the use of a proxy by this call is counted to, "" for none."""

encode = msgspec.msgpack.Encoder().encode


class ById(Struct, frozen=True):
    """A check, revive or find of one transaction."""

    id: str
    by: str = ""
    reason: str = ""
    bodies: bool = False
    group: str = ""


class Failed(Struct, frozen=True):
    """A call was not carried out; as in the HTTP API."""

    code: str
    message: str = ""
    details: dict[str, Any] = {}


def failed(error: RequestError) -> Failed:
    """Return an error as it travels."""
    return Failed(error.code, str(error), error.details)


def raised(failure: Failed) -> RequestError:
    """Return the error that travelled. One that a newer build has brought is a plain failure."""
    kind = request_errors().get(failure.code, RequestError)
    error = kind(failure.message or None)
    error.details.update(failure.details)
    return error


def new_id(request: PrepareRequest, partition: int, now_ms: int) -> str:
    """Return an id for a transaction that came without one."""
    if request.dedup_key is None:
        randomness = secrets.randbits(64)
    else:
        randomness = dedup_randomness(request.group, request.dedup_key)
    return make_id(partition, now_ms, randomness)


# --- lists ------------------------------------------------------------------------------------


def encode_cursor(view: TransactionView) -> str:
    """Return the cursor behind this transaction, which is the last one of a page."""
    return f"{view.prepared_at_ms}.{view.id}"


def decode_cursor(cursor: str | None) -> tuple[int, str]:
    """Return the time and id behind which a list goes on.

    Raises:
        BadRequest: a list has never given such a cursor.
    """
    if cursor is None:
        return (-1, "")
    at_ms, _, id = cursor.partition(".")
    try:
        parse_id(id)
        return (int(at_ms), id)
    except ValueError:
        raise BadRequest("the cursor is not one that a list has given") from None


def merge(pages: Sequence[TransactionPage], limit: int) -> TransactionPage:
    """Return one page of several owners' pages, each sorted by time and id.

    A page that goes on says nothing of what lies behind its end, so the merged one ends there too.
    """
    known_to = min(
        (decode_cursor(page.next_cursor) for page in pages if page.next_cursor is not None),
        default=None,
    )
    views = sorted((view for page in pages for view in page.transactions), key=_key)
    sure = [view for view in views if known_to is None or _key(view) <= known_to]
    found = sure[:limit]
    if len(found) < len(sure):
        return TransactionPage(tuple(found), encode_cursor(found[-1]))
    if known_to is None:
        return TransactionPage(tuple(found))
    at_ms, id = known_to
    return TransactionPage(tuple(found), f"{at_ms}.{id}")


def _key(view: TransactionView) -> tuple[int, str]:
    return (view.prepared_at_ms, view.id)
