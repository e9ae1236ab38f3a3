"""The calls between proxies: paths, bodies and errors; and how lists of several owners merge.

Bodies are the contract's structs as msgpack maps with named fields. A reader ignores unknown
fields and takes the default of missing ones, so builds of different age understand each other.
"""

import secrets
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from txbroker.contract.service import (
    PrepareRequest,
    SearchRequest,
    TransactionPage,
    TransactionView,
)
from txbroker.core.routing import dedup_randomness, make_id, parse_id
from txbroker.errors import BadRequest, RequestError, request_errors
from txbroker.proxy.partition.scan import Cursor, Layer
from txbroker.proxy.partition.scan import decode_cursor as decode_place

PREFIX = "/internal/v1"
SESSIONS_PATH = f"{PREFIX}/sessions"
OVERVIEW_PATH = f"{PREFIX}/overview"
CALLER_HEADER = "txb-caller"
"""The principal on whose behalf a proxy forwards a call, percent-encoded."""
CALLER: ContextVar[str] = ContextVar("caller", default="")
"""The principal whose share of the proxy this call uses, "" for none."""

encode = msgspec.msgpack.Encoder().encode


class ById(Struct, frozen=True):
    """A check, revive or find of one transaction."""

    id: str
    by: str = ""
    reason: str = ""
    bodies: bool = False
    group: str = ""
    trace: bool = False
    brief: bool = False


class CallFailure(Struct, frozen=True):
    """The error of a call, as in the HTTP API."""

    code: str
    message: str = ""
    details: dict[str, Any] = {}


def failed(error: RequestError) -> CallFailure:
    return CallFailure(error.code, str(error), error.details)


def raised(failure: CallFailure) -> RequestError:
    """Return the error of a wire form; a code of a newer build becomes a plain `RequestError`."""
    kind = request_errors().get(failure.code, RequestError)
    error = kind(failure.message or None)
    error.details.update(failure.details)
    return error


def new_id(request: PrepareRequest, partition: int, now_ms: int) -> str:
    """Return an id for a transaction without one, derived from its dedup key if it has one."""
    if request.dedup_key is None:
        randomness = secrets.randbits(64)
    else:
        randomness = dedup_randomness(request.group, request.dedup_key)
    return make_id(partition, now_ms, randomness)


# --- searches ---------------------------------------------------------------------------------


class SearchPlace(NamedTuple):
    """Where a search is: at step `number` of its steps, each a layer of a half partition that can
    hold a match, and at the cursor in it."""

    steps: list[tuple[Layer, int]]
    number: int
    cursor: Cursor

    def after(self, following: Cursor | None) -> tuple[str | None, float]:
        """Return the cursor of the next page, None on the last one, and the part of the topics
        that is done."""
        number = self.number
        if following is None:
            number, following = number + 1, Cursor()
        if number == len(self.steps):
            return None, 1.0
        topics = [layer for layer, _ in self.steps].index(Layer.HALF)
        done = max(0.0, number - topics + following.done) / (len(self.steps) - topics)
        return f"{number}:{following.encode()}", done


def search_place(request: SearchRequest, partitions: int) -> SearchPlace | None:
    """Return where a search is; None if no half partition can hold such a transaction."""
    chosen = request.partitions(partitions)
    # The operation topics last: few commits replace messages.
    layers = list(Layer) if request.needs_messages else [Layer.MEMORY, Layer.HALF]
    steps = [(layer, partition) for layer in layers for partition in chosen]
    number, _, cursor = (request.cursor or "0:").partition(":")
    if not number.isdecimal() or len(number) > 5 or int(number) >= max(1, len(steps)):
        cursor, number = "?", "0"  # refused below
    place = SearchPlace(steps, int(number), decode_place(cursor))
    return place if steps else None


# --- lists ------------------------------------------------------------------------------------


def encode_cursor(view: TransactionView) -> str:
    """Return the cursor that continues a list after this transaction, the last of its page."""
    return f"{view.prepared_at_ms}.{view.id}"


_FIRST, _LAST = (-1, ""), (sys.maxsize, "~")
"""Before and after every transaction in the order of lists."""


def decode_cursor(cursor: str | None, *, newest: bool = False) -> tuple[int, str]:
    """Return the time and id after which a list continues."""
    if cursor is None:
        return _LAST if newest else _FIRST
    at_ms, _, id = cursor.partition(".")
    try:
        parse_id(id)
        return (int(at_ms), id)
    except ValueError:
        raise BadRequest(
            "cursor is invalid: pass next_cursor of the last page unchanged, or leave it out"
        ) from None


def merge(pages: Sequence[TransactionPage], limit: int, *, newest: bool = False) -> TransactionPage:
    """Return one page of several owners' pages, each sorted by time and id.

    What follows an incomplete page is unknown, so the merged page ends where that one does.
    """
    cursors = [decode_cursor(page.next_cursor) for page in pages if page.next_cursor is not None]
    known_to = (max if newest else min)(cursors, default=None)
    views = [view for page in pages for view in page.transactions]
    views.sort(key=_key, reverse=newest)
    complete = [
        view
        for view in views
        if known_to is None or (_key(view) >= known_to if newest else _key(view) <= known_to)
    ]
    shown = complete[:limit]
    if len(shown) < len(complete):
        return TransactionPage(tuple(shown), encode_cursor(shown[-1]))
    if known_to is None:
        return TransactionPage(tuple(shown))
    at_ms, id = known_to
    return TransactionPage(tuple(shown), f"{at_ms}.{id}")


def _key(view: TransactionView) -> tuple[int, str]:
    return (view.prepared_at_ms, view.id)
