"""The search: by id, record, key, header or time, for a few seconds at a time."""

import re
import time

from msgspec import structs

from txbroker.contract.service import SearchPage, TransactionView
from txbroker.core.routing import ALPHABET, LENGTH
from txbroker.core.terms import parse_place
from txbroker.errors import NotFound
from txbroker.proxy.console.filters import PAGE_ROWS, convert, read_age_s
from txbroker.proxy.console.formatting import link
from txbroker.proxy.console.site import HtmlPage, PageRequest, Redirect, Route
from txbroker.proxy.http.bodies import SearchQuery
from txbroker.proxy.http.transactions import searched

PAGE_S, EMPTY_PAGE_S = 1.0, 4.0
"""Time that one page searches, and one that has found nothing, seconds."""
_TERMS = ("id", "group", "topic", "key", "order_key", "dedup_key", "header")
_ID_START = re.compile(f"0[{ALPHABET}]{{5,{LENGTH - 1}}}", re.IGNORECASE)
"""Nearly every id begins so, and no order number of a shop that counts from 1."""


async def find(request: PageRequest) -> HtmlPage | Redirect:
    """Search transactions, or redirect to the only one that a text can mean."""
    fields = {name: text.strip() for name, text in request.query.items() if text.strip()}
    text = fields.pop("find", "")
    if len(text) == LENGTH and _ID_START.fullmatch(text):
        return Redirect(link(f"/transactions/{text.upper()}"))
    if parse_place(text):
        page = await _search(request, {"record": text}, None)
        if not page.transactions:
            raise NotFound(f"the transaction of {text} is of none of your groups")
        return Redirect(link(f"/transactions/{page.transactions[0].id}"))
    if text:
        return Redirect(link("/find", **{"id" if _ID_START.fullmatch(text) else "key": text}))
    cursor = fields.pop("cursor", None)
    query = {name: fields[name] for name in _TERMS if name in fields}
    newer = fields.get("newer", "")
    found, seconds = None, 0.0
    if query or newer:
        found, seconds = await _pages(request, query, newer, cursor)
    following = found and found.next_cursor
    values = {
        "fields": fields,
        "found": found,
        "seconds": seconds,
        "later": cursor is not None,
        "next": following and link("/find", **query, newer=newer, cursor=following),
    }
    return HtmlPage("find.html", values)


async def _pages(
    request: PageRequest, query: dict[str, str], newer: str, cursor: str | None
) -> tuple[SearchPage, float]:
    """Return the pages of a search until one has found something as one, and the seconds taken."""
    terms: dict[str, object] = {**query}
    if newer:
        now_ms = request.context.service.now_ms()
        terms["from_ms"] = max(0, now_ms - round(1000 * read_age_s(newer, "newer")))
    views: dict[str, TransactionView] = {}
    began_s, records, unread = time.monotonic(), 0, 0
    while True:
        page = await _search(request, terms, cursor)
        views |= {view.id: view for view in page.transactions}
        cursor, records, unread = page.next_cursor, records + page.records, unread + page.unread
        seconds = time.monotonic() - began_s
        full = len(views) >= PAGE_ROWS or seconds > (PAGE_S if views else EMPTY_PAGE_S)
        if cursor is None or full:
            found = tuple(views.values())
            return structs.replace(
                page, transactions=found, records=records, unread=unread
            ), seconds


async def _search(request: PageRequest, terms: dict[str, object], cursor: str | None) -> SearchPage:
    given = terms if cursor is None else {**terms, "cursor": cursor}
    return await searched(request.context.service, convert(given, SearchQuery), request.principal)


ROUTES = (Route("GET", "/find", find),)
