"""The pages that only show (overview, lists, one transaction, groups), and the login."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import web
from msgspec import structs

from txbroker.contract.policy import GroupPolicy
from txbroker.contract.service import (
    INSTANCES_SHOWN_MAX,
    GroupOverview,
    History,
    HistoryEvent,
    HistoryRequest,
    Overview,
    Rates,
    TransactionView,
)
from txbroker.core.lifecycle import SETTLED
from txbroker.core.records import State
from txbroker.errors import Unauthorized
from txbroker.principals import Role
from txbroker.proxy.console.actions import Action, allowed
from txbroker.proxy.console.charts import SPANS, Chart, charts_of, events_of
from txbroker.proxy.console.concerns import concerns_of
from txbroker.proxy.console.filters import PAGE_ROWS, AuditNote, convert, read_listing
from txbroker.proxy.console.formatting import age, link, with_query
from txbroker.proxy.console.site import HtmlPage, PageRequest, Redirect, Route
from txbroker.proxy.console.visitors import NAME_MAX
from txbroker.proxy.http.context import seen_by, within_groups
from txbroker.proxy.http.limits import check_group, plain_id
from txbroker.proxy.observe.actions import ACTIONS_MAX
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

GROUPS_FIRST = 8
"""Groups on the overview."""
GROUPS_SHOWN_MAX = 250
CHECKS_SHOWN_MAX = 20
EVENT_WORDS = {
    "start": "Proxy started",
    "takeover": "Took over",
    "handover": "Gave away",
    "problem": "Began:",
    "solved": "Over:",
}
ACTION_WORDS = {
    "commit": "Committed",
    "rollback": "Rolled back",
    "revive": "Revived",
    "check": "Had checked",
}
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
        # Of a half partition that Kafka does not answer for, nobody knows what happens now.
        rates=Rates(
            sum(rates.prepared_per_s for rates in current),
            sum(rates.decided_per_s for rates in current),
            sum(rates.promoted_per_s for rates in current),
        )
        if current
        else None,
        partial=overview.partial,
        as_of_ms=overview.as_of_ms,
    )


async def _overview(request: PageRequest) -> Overview:
    overview = await request.context.service.overview()
    groups = tuple(group for group in overview.groups if group.group in request.principal.groups)
    return structs.replace(overview, groups=groups)


@dataclass(frozen=True)
class Hour:
    """The last hour, or the part of it that the page shows.

    Attributes:
        span: the part, one of `spans`.
        words: the same in words.
        history: what it was made of.
    """

    span: str
    words: str
    charts: Sequence[Chart]
    events: Sequence[HistoryEvent]
    history: History
    spans: Sequence[str] = tuple(SPANS)
    kinds: Mapping[str, str] = field(default_factory=lambda: EVENT_WORDS)

    @property
    def complete(self) -> bool:
        """Whether all proxies answered."""
        return self.history.complete

    @property
    def has_medians(self) -> bool:
        """Whether a chart shows latencies."""
        return any(line.faint for chart in self.charts for line in chart.lines)


async def _hour(request: PageRequest, group: str = "") -> Hour:
    """Return the part of the last hour that was asked for; by default an hour, or five minutes if
    there are no more."""
    service, now_ms = request.context.service, request.context.service.now_ms()
    asked = request.query.get("span", "")
    span = asked if asked in SPANS else "1h"
    found = await service.history(HistoryRequest(group, SPANS[span]))
    if asked not in SPANS and not any(p.at_ms < now_ms - 300_000 for p in found.points):
        span = "5m"
        found = await service.history(HistoryRequest(group, SPANS[span]))
    begin_ms = now_ms - SPANS[span] * 1000
    seen = seen_by(found, request.principal)
    words = age(SPANS[span])
    return Hour(span, words, charts_of(seen, begin_ms, now_ms), events_of(seen, begin_ms), seen)


async def overview(request: PageRequest) -> HtmlPage | Redirect:
    """Show problems with their next steps, then the counts."""
    stats = await _overview(request)
    values = {
        "overview": stats,
        "sums": sums_of(stats),
        "concerns": concerns_of(stats),
        "actions": _actions(request),
        "hour": await _hour(request),
        "groups": stats.groups[:GROUPS_FIRST],
        "groups_more": max(0, len(stats.groups) - GROUPS_FIRST) + stats.groups_left_off,
    }
    return HtmlPage("overview.html", values)


async def transactions(request: PageRequest) -> HtmlPage | Redirect:
    """List transactions, or redirect to the one searched by id."""
    id = request.query.get("find", "").strip()
    if id:
        return Redirect(link(f"/transactions/{plain_id(id)}"))
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
        "actions": [a for a in _actions(request) if allowed(a, listing.filter.state)],
        "first": None if listing.cursor is None else with_query("/transactions", query),
        "next": None
        if page.next_cursor is None
        else with_query("/transactions", query, cursor=page.next_cursor),
    }
    return HtmlPage("transactions.html", values)


async def transaction(request: PageRequest) -> HtmlPage | Redirect:
    """Show one transaction; its message bodies on request."""
    id = plain_id(request.http.match_info["id"])
    bodies = request.principal.sees_bodies and request.query.get("bodies", "") in ("1", "true")
    view = await request.context.service.find(id, bodies=bodies)
    request.principal.check_own(view.group)
    values = {
        "view": view,
        "bodies": bodies,
        "sees_bodies": request.principal.sees_bodies,
        "actions": [action for action in _actions(request) if view.state in action.states],
        "next_check_s": _in_s(view, request.context.service.now_ms()),
        "done": request.query.get("done", "")[:20],
    }
    return HtmlPage("transaction.html", values)


def _actions(request: PageRequest) -> Iterable[Action]:
    return Action if request.principal.role is Role.OPERATOR else ()


def _registered(request: PageRequest) -> list[str]:
    return [name for name, _ in request.context.groups.list() if name in request.principal.groups]


def _in_s(view: TransactionView, now_ms: int) -> float | None:
    """Return the seconds until the next attempt, None without one."""
    if view.state is not State.PENDING or view.next_check_at_ms is None:
        return None
    return max(0, view.next_check_at_ms - now_ms) / 1000


@dataclass(frozen=True)
class GroupRow:
    """A group on the page of groups."""

    overview: GroupOverview
    policy: GroupPolicy | None
    problem: str | None


async def groups(request: PageRequest) -> HtmlPage | Redirect:
    """Show the producer groups: reachability and undecided transactions."""
    stats = await _overview(request)
    name = request.query.get("name", "").strip()
    rows = [row for row in _rows(request, stats) if name.lower() in row.overview.group.lower()]
    values = {
        "overview": stats,
        "rows": rows[:GROUPS_SHOWN_MAX],
        "more": max(0, len(rows) - GROUPS_SHOWN_MAX) + stats.groups_left_off,
        "name": name,
        "actions": _actions(request),
    }
    return HtmlPage("groups.html", values)


def _rows(request: PageRequest, stats: Overview) -> Iterator[GroupRow]:
    """Yield every known group, those that need attention first."""
    registered = {n: p for n, p in request.context.groups.list() if n in request.principal.groups}
    for group in stats.groups:
        policy = registered.pop(group.group, None)
        yield GroupRow(group, policy, request.context.groups.problem(group.group))
    for name, policy in registered.items():
        group = GroupOverview(name, check_url=bool(policy.check_url))
        yield GroupRow(group, policy, request.context.groups.problem(name))


async def group(request: PageRequest) -> HtmlPage | Redirect:
    """Show one producer group: whether it can be asked, what its checks brought, its policy."""
    name = request.query.get("name", "").strip()
    check_group(name)
    request.principal.check_group(name)
    stats = await _overview(request)
    row = next((row for row in _rows(request, stats) if row.overview.group == name), None)
    hour = await _hour(request, name)
    values = {
        "name": name,
        "overview": stats,
        "hour": hour,
        "checks": hour.history.checks[:CHECKS_SHOWN_MAX],
        "instances": hour.history.instances[:INSTANCES_SHOWN_MAX],
        "row": row or GroupRow(GroupOverview(name), None, None),
        "known": row is not None,
        "actions": _actions(request),
    }
    return HtmlPage("group.html", values)


async def audit(request: PageRequest) -> HtmlPage | Redirect:
    """Show what operators did: who, what, why and when."""
    found = await request.context.service.history(HistoryRequest(since_s=1, actions=True))
    since = sorted(found.actions_since_ms.items())
    values = {
        "history": seen_by(found, request.principal),
        "since_ms": max((at_ms for _, at_ms in since), default=None),
        "older": since if len({at_ms for _, at_ms in since}) > 1 else (),
        "most": ACTIONS_MAX,
        "words": ACTION_WORDS,
    }
    return HtmlPage("audit.html", values)


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
    Route("GET", "/groups", groups),
    Route("GET", "/group", group),
    Route("GET", "/audit", audit),
    Route("GET", "/login", show_login, open=True),
    Route("POST", "/login", do_login, open=True),
    Route("POST", "/logout", do_logout, open=True),
)
