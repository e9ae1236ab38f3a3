"""Facts that several pages ask the service for: the overview, and the last hour."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import structs

from txbroker.contract.service import History, HistoryEvent, HistoryRequest, Overview
from txbroker.principals import Role
from txbroker.proxy.console.actions import Action
from txbroker.proxy.console.charts import SPANS, Chart, charts_of, events_of
from txbroker.proxy.console.site import PageRequest
from txbroker.proxy.http.context import seen_by


async def overview_of(request: PageRequest) -> Overview:
    """Return the overview with the groups that the visitor may see."""
    overview = await request.context.service.overview()
    groups = tuple(group for group in overview.groups if group.group in request.principal.groups)
    return structs.replace(overview, groups=groups)


def actions_of(request: PageRequest) -> Iterable[Action]:
    """Return the actions that the visitor may do."""
    return Action if request.principal.role is Role.OPERATOR else ()


class Hour(NamedTuple):
    """The last hour, or the part of it that the page shows: one of `SPANS`."""

    span: str
    charts: Sequence[Chart]
    events: Sequence[HistoryEvent]
    history: History


async def hour_of(request: PageRequest, group: str = "") -> Hour:
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
    return Hour(span, charts_of(seen, begin_ms, now_ms), events_of(seen, begin_ms), seen)
