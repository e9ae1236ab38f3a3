"""The pages that only show (overview, lists, one transaction), and the login."""

from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp import web
from msgspec import structs

from txbroker.contract.service import Overview, Rates, TransactionView
from txbroker.core.lifecycle import SETTLED
from txbroker.core.records import State
from txbroker.errors import Unauthorized
from txbroker.proxy.admission import plain_id
from txbroker.proxy.console.concerns import concerns_of
from txbroker.proxy.console.facts import actions_of, hour_of, overview_of
from txbroker.proxy.console.filters import PAGE_ROWS, AuditNote, convert, read_listing
from txbroker.proxy.console.formatting import link
from txbroker.proxy.console.site import HtmlPage, PageRequest, Redirect, Route
from txbroker.proxy.console.visitors import NAME_MAX
from txbroker.proxy.http.context import within_groups
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

UNDECIDED = (State.PENDING, State.PARKED)
CONCERNS_MAX = 20
"""Problems on the overview; the rest is counted."""
GROUPS_FIRST = 8
"""Groups on the overview."""
OWN_OFFERED_MAX = 200
"""Registered groups offered by the filter."""


@dataclass(frozen=True)
class Sums:
    """The counts summed over all half partitions; None where no half partition's is known.

    Attributes:
        partial: some are unknown, so that the others are lower bounds.
        as_of_ms: the time of the oldest that are not current; None if all are.
    """

    pending: int | None
    parked: int | None
    refused: int | None
    committed: int | None
    oldest_s: float | None
    rates: Rates | None
    partial: bool
    as_of_ms: int | None


def sums_of(overview: Overview) -> Sums:
    """Sum the known counts of the half partitions."""
    parts = overview.partitions
    ages = [p.oldest_pending_age_s for p in parts if p.oldest_pending_age_s is not None]
    current = [p.rates for p in parts if p.pending is not None and p.as_of_ms is None]

    def known(counts: Iterable[int | None]) -> int | None:
        given = [count for count in counts if count is not None]
        return sum(given) if given else None

    return Sums(
        pending=known(p.pending for p in parts),
        parked=known(p.parked for p in parts),
        refused=known(p.refused for p in parts),
        committed=known(p.committed for p in parts),
        oldest_s=max(ages, default=None),
        # The present of a half partition that Kafka does not answer for is unknown.
        rates=Rates(*map(sum, zip(*map(structs.astuple, current), strict=True)))
        if current
        else None,
        partial=overview.partial,
        as_of_ms=overview.as_of_ms,
    )


async def overview(request: PageRequest) -> HtmlPage | Redirect:
    """Show problems with their next steps, then the counts."""
    stats = await overview_of(request)
    values = {
        "overview": stats,
        "sums": sums_of(stats),
        "concerns": concerns_of(stats),
        "concerns_max": CONCERNS_MAX,
        "actions": actions_of(request),
        "hour": await hour_of(request),
        "groups": stats.groups[:GROUPS_FIRST],
        "groups_more": max(0, len(stats.groups) - GROUPS_FIRST) + stats.groups_left_off,
    }
    return HtmlPage("overview.html", values)


async def transactions(request: PageRequest) -> HtmlPage | Redirect:
    """List transactions."""
    listing = read_listing({name: v for name, v in request.query.items() if name != "id"})
    listed = listing.filter.request(limit=listing.limit, cursor=listing.cursor)
    page = await request.context.service.list(within_groups(listed, request.principal))
    query = {**listing.filter.query()}
    if listing.limit != PAGE_ROWS:
        query["limit"] = str(listing.limit)
    values = {
        "listing": listing,
        "views": [view for view in page.transactions if view.group in request.principal.groups],
        "query": query,
        "states": list(State),
        "settled": listing.filter.state in SETTLED,
        "offered": _registered(request)[:OWN_OFFERED_MAX],
        "actions": [a for a in actions_of(request) if listing.filter.state in (None, *a.states)],
        "first": None if listing.cursor is None else link("/transactions", **query),
        "next": None
        if page.next_cursor is None
        else link("/transactions", **query, cursor=page.next_cursor),
    }
    return HtmlPage("transactions.html", values)


async def transaction(request: PageRequest) -> HtmlPage | Redirect:
    """Show one transaction; its message bodies on request."""
    id = plain_id(request.http.match_info["id"])
    bodies = request.principal.sees_bodies and request.query.get("bodies", "") in ("1", "true")
    trace = request.query.get("trace", "") in ("1", "true")
    view = await request.context.service.find(id, bodies=bodies, brief=trace)
    request.principal.check_own(view.group)
    if trace:
        view = await request.context.service.find(id, bodies=bodies, trace=True)
    stats = await overview_of(request) if view.state in UNDECIDED else None
    groups = () if stats is None else stats.groups
    values = {
        "view": view,
        "group": next((group for group in groups if group.group == view.group), None),
        "bodies": bodies,
        "trace": trace,
        "sees_bodies": request.principal.sees_bodies,
        "actions": [action for action in actions_of(request) if view.state in action.states],
        "next_check_s": _in_s(view, request.context.service.now_ms()),
        "done": request.query.get("done", "")[:20],
    }
    return HtmlPage("transaction.html", values)


def _registered(request: PageRequest) -> list[str]:
    return [name for name, _ in request.context.groups.list() if name in request.principal.groups]


def _in_s(view: TransactionView, now_ms: int) -> float | None:
    """Return the seconds until the next attempt, None without one."""
    if view.state != State.PENDING or view.next_check_at_ms is None:
        return None
    return max(0, view.next_check_at_ms - now_ms) / 1000


# --- login -----------------------------------------------------------------------------------


async def show_login(request: PageRequest) -> HtmlPage | Redirect:
    """Show the login form; redirect a visitor who is logged in or needs no login."""
    onward = _local(request.query.get("next", "/"))
    if request.visitor.admitted:
        return Redirect(onward)
    return _form(onward, request.visitor.name)


async def do_login(request: PageRequest) -> HtmlPage | Redirect:
    """Log in."""
    onward = _local(request.form.get("next", "/"))
    name = convert({"by": request.form.get("name", "").strip()}, AuditNote).by[:NAME_MAX]
    principal = request.cookies.principal_of(request.form.get("token", "").strip())
    if principal is None:
        log.warning("console login refused", name=name, remote=request.http.remote or "")
        return _form(onward, name, "This token is not valid at this proxy.")
    if not principal.shared:
        name = principal.name  # the credential names its owner: ignore the claimed name
    log.info("console login", by=principal.name, name=name, remote=request.http.remote or "")

    def log_in(response: web.Response) -> None:
        request.cookies.log_in(response, principal, name, secure=request.secure)

    return Redirect(onward, log_in)


def _form(onward: str, name: str, problem: str = "") -> HtmlPage:
    values = {"next": onward, "name": name, "problem": problem}
    return HtmlPage("login.html", values, Unauthorized.status if problem else 200)


async def do_logout(request: PageRequest) -> HtmlPage | Redirect:
    """Log out."""
    return Redirect("/login", request.cookies.log_out)


def _local(path: str) -> str:
    """Return a local path, so that a login link cannot redirect to another site."""
    plain = path.startswith("/") and not path.startswith("//")
    return path if plain and path.isprintable() and "\\" not in path else "/"


ROUTES = (
    Route("GET", "/", overview),
    Route("GET", "/transactions", transactions),
    Route("GET", "/transactions/{id}", transaction),
    Route("GET", "/login", show_login, open=True),
    Route("POST", "/login", do_login, open=True),
    Route("POST", "/logout", do_logout, open=True),
)
