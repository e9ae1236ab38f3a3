"""The operations on the proxy itself."""

import msgspec

from txbroker.proxy.http.bodies import HealthBody, OverviewBody, ReadyBody
from txbroker.proxy.http.operations import READERS, ApiCall, ApiReply, Operation

_OVERVIEW_FIELDS = tuple(field.name for field in msgspec.structs.fields(OverviewBody))


async def health(call: ApiCall) -> ApiReply:
    """Confirm that the process is alive."""
    return ApiReply(200, HealthBody(status="alive"))


async def ready(call: ApiCall) -> ApiReply:
    """Return whether the proxy takes calls, with the problems if not."""
    readiness = call.context.service.readiness()
    body = ReadyBody(
        ready=readiness.ready,
        partitions={str(number): state for number, state in readiness.partitions.items()},
        problems=list(readiness.problems),
    )
    return ApiReply(200 if readiness.ready else 503, body)


async def overview(call: ApiCall) -> ApiReply:
    """Return owners, counts, rates and groups of all proxies."""
    overview = await call.context.service.overview()
    fields = {name: getattr(overview, name) for name in _OVERVIEW_FIELDS}
    fields["groups"] = tuple(g for g in overview.groups if g.group in call.principal.groups)
    return ApiReply(200, OverviewBody(**fields))


async def metrics(call: ApiCall) -> ApiReply:
    """Return the metrics in Prometheus' text format."""
    return ApiReply(200, call.context.metrics.text())


OPERATIONS = (
    Operation("health", "GET", "/healthz", "Liveness", health, {200: HealthBody}, open=True),
    Operation(
        "ready",
        "GET",
        "/readyz",
        "Readiness: the proxy takes calls and has read the log of all its half partitions",
        ready,
        {200: ReadyBody, 503: ReadyBody},
        open=True,
    ),
    Operation(
        "overview",
        "GET",
        "/v1/overview",
        "Proxies, half partitions, groups, and rates over the last ten seconds",
        overview,
        {200: OverviewBody},
        roles=READERS,
        admin=True,
    ),
    Operation(
        "metrics",
        "GET",
        "/metrics",
        "Metrics for Prometheus",
        metrics,
        {200: None},
        media="text/plain",
        roles=READERS,
        admin=True,
    ),
)
