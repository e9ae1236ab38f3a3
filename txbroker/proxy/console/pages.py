"""The pages that show: how all stands, lists, one transaction, groups."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msgspec import structs

from txbroker.contract.policy import GroupPolicy
from txbroker.contract.service import GroupOverview, Overview, Rates, TransactionView
from txbroker.core.lifecycle import SETTLED
from txbroker.core.records import State
from txbroker.principals import Role
from txbroker.proxy.console.actions import Action, allowed
from txbroker.proxy.console.concerns import concerns_of
from txbroker.proxy.console.filters import PAGE_ROWS, read_listing
from txbroker.proxy.console.formatting import link, with_query
from txbroker.proxy.console.site import HtmlPage, PageRequest, Redirect, Route
from txbroker.proxy.http.context import plain_id, within_groups

GROUPS_FIRST = 8
"""Groups that the overview shows."""
GROUPS_SHOWN_MAX = 250
OWN_OFFERED_MAX = 200
"""Names of registered groups that the filter offers."""


@dataclass(frozen=True)
class Sums:
    """The counts of all half partitions together."""

    pending: int
    parked: int
    refused: int
    committed: int
    oldest_s: float | None
    rates: Rates


def sums_of(found: Overview) -> Sums:
    """Add up what is known of the half partitions."""
    parts = found.partitions
    ages = [p.oldest_pending_age_s for p in parts if p.oldest_pending_age_s is not None]
    return Sums(
        pending=sum(p.pending or 0 for p in parts),
        parked=sum(p.parked or 0 for p in parts),
        refused=sum(p.refused or 0 for p in parts),
        committed=sum(p.committed or 0 for p in parts),
        oldest_s=max(ages, default=None),
        rates=Rates(
            sum(p.rates.prepared_per_s for p in parts),
            sum(p.rates.decided_per_s for p in parts),
            sum(p.rates.promoted_per_s for p in parts),
        ),
    )


async def _overview(ask: PageRequest) -> Overview:
    """Return how all stands, of groups only the principal's."""
    found = await ask.shell.service.overview()
    groups = tuple(group for group in found.groups if group.group in ask.principal.groups)
    return structs.replace(found, groups=groups)


async def overview(ask: PageRequest) -> HtmlPage | Redirect:
    """Show whether something is wrong, where, and what to do; then how all stands."""
    found = await _overview(ask)
    values = {
        "found": found,
        "sums": sums_of(found),
        "concerns": concerns_of(found),
        "actions": _actions(ask),
        "groups": found.groups[:GROUPS_FIRST],
        "groups_more": max(0, len(found.groups) - GROUPS_FIRST) + found.groups_left_off,
    }
    return HtmlPage("overview.html", values)


async def transactions(ask: PageRequest) -> HtmlPage | Redirect:
    """List transactions, or go to the one whose id was looked for."""
    wanted = ask.query.get("find", "").strip()
    if wanted:
        return Redirect(link(f"/transactions/{plain_id(wanted)}"))
    listing = read_listing({name: v for name, v in ask.query.items() if name != "id"})
    request = listing.filter.request(limit=listing.limit, cursor=listing.cursor)
    found = await ask.shell.service.list(within_groups(request, ask.principal))
    query = {**listing.filter.query()}
    if listing.limit != PAGE_ROWS:
        query["limit"] = str(listing.limit)
    values = {
        "listing": listing,
        "views": [view for view in found.transactions if view.group in ask.principal.groups],
        "query": query,
        "states": list(State),
        "settled": listing.filter.state in SETTLED,
        "offered": _registered(ask)[:OWN_OFFERED_MAX],
        "actions": [a for a in _actions(ask) if allowed(a, listing.filter.state)],
        "first": None if listing.cursor is None else with_query("/transactions", query),
        "next": None
        if found.next_cursor is None
        else with_query("/transactions", query, cursor=found.next_cursor),
    }
    return HtmlPage("transactions.html", values)


async def transaction(ask: PageRequest) -> HtmlPage | Redirect:
    """Show all that is known of one transaction; its bodies where they are asked for."""
    id = plain_id(ask.request.match_info["id"])
    bodies = ask.principal.sees_bodies and ask.query.get("bodies", "") in ("1", "true")
    view = await ask.shell.service.find(id, bodies=bodies)
    ask.principal.check_own(view.group)
    values = {
        "view": view,
        "bodies": bodies,
        "sees_bodies": ask.principal.sees_bodies,
        "actions": [action for action in _actions(ask) if view.state in action.states],
        "next_check_s": _in_s(view, ask.shell.service.now_ms()),
        "done": ask.query.get("done", "")[:20],
    }
    return HtmlPage("transaction.html", values)


def _actions(ask: PageRequest) -> Iterable[Action]:
    """Return what the principal may do to transactions."""
    return Action if ask.principal.role is Role.OPERATOR else ()


def _registered(ask: PageRequest) -> list[str]:
    return [name for name, _ in ask.shell.groups.list() if name in ask.principal.groups]


def _in_s(view: TransactionView, now_ms: int) -> float | None:
    """Return in how many seconds the next attempt is due, None where none is."""
    if view.state is not State.PENDING or view.next_check_at_ms is None:
        return None
    return max(0, view.next_check_at_ms - now_ms) / 1000


@dataclass(frozen=True)
class GroupRow:
    """What the page of groups shows of one."""

    found: GroupOverview
    policy: GroupPolicy | None
    problem: str | None

    @property
    def reach(self) -> str:
        """How the group can be asked: `away`, `session`, `url` or `nobody`."""
        if self.found.unreachable_since_ms is not None:
            return "away"
        if self.found.sessions:
            return "session"
        if self.policy is not None and self.policy.check_url:
            return "url"
        return "nobody"


async def groups(ask: PageRequest) -> HtmlPage | Redirect:
    """Show the producer groups: whether they can be asked, and what they left undecided."""
    found = await _overview(ask)
    wanted = ask.query.get("name", "").strip()
    rows = [row for row in _rows(ask, found) if wanted.lower() in row.found.group.lower()]
    values = {
        "found": found,
        "rows": rows[:GROUPS_SHOWN_MAX],
        "more": max(0, len(rows) - GROUPS_SHOWN_MAX) + found.groups_left_off,
        "wanted": wanted,
        "actions": _actions(ask),
    }
    return HtmlPage("groups.html", values)


def _rows(ask: PageRequest, found: Overview) -> Iterator[GroupRow]:
    """Yield every group that is known of: those that need somebody first."""
    registered = {n: p for n, p in ask.shell.groups.list() if n in ask.principal.groups}
    for group in found.groups:
        policy = registered.pop(group.group, None)
        yield GroupRow(group, policy, ask.shell.groups.problem(group.group))
    for name, policy in registered.items():
        yield GroupRow(GroupOverview(name), policy, ask.shell.groups.problem(name))


ROUTES = (
    Route("GET", "/", overview),
    Route("GET", "/transactions", transactions),
    Route("GET", "/transactions/{id}", transaction),
    Route("GET", "/groups", groups),
)
