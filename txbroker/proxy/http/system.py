"""The calls on the proxy itself."""

import msgspec

from txbroker.proxy.http.bodies import HealthBody, OverviewBody, ReadyBody
from txbroker.proxy.http.operations import WHO_LOOKS, ApiCall, ApiReply, Operation

_OVERVIEW_FIELDS = tuple(field.name for field in msgspec.structs.fields(OverviewBody))


async def health(call: ApiCall) -> ApiReply:
    """Say that the process is alive."""
    return ApiReply(200, HealthBody(status="alive"))


async def ready(call: ApiCall) -> ApiReply:
    """Say whether calls can be taken, and if not, why."""
    found = call.shell.service.readiness()
    body = ReadyBody(
        ready=found.ready,
        partitions={str(number): doing for number, doing in found.partitions.items()},
        problems=list(found.problems),
    )
    return ApiReply(200 if found.ready else 503, body)


async def overview(call: ApiCall) -> ApiReply:
    """Tell how all stands: owners, counts, rates, groups."""
    found = await call.shell.service.overview()
    fields = {name: getattr(found, name) for name in _OVERVIEW_FIELDS}
    fields["groups"] = tuple(g for g in found.groups if g.group in call.principal.groups)
    return ApiReply(200, OverviewBody(**fields))


async def metrics(call: ApiCall) -> ApiReply:
    """Show the metrics in Prometheus' text format."""
    return ApiReply(200, call.shell.metrics.text())


OPERATIONS = (
    Operation(
        "health", "GET", "/healthz", "Alive?", health, {200: HealthBody}, open=True,
    ),
    Operation(
        "ready",
        "GET",
        "/readyz",
        "Can it take calls, caught up on what it owns?",
        ready,
        {200: ReadyBody, 503: ReadyBody},
        open=True,
    ),
    Operation(
        "overview",
        "GET",
        "/v1/overview",
        "How all stands: proxies, half partitions, groups, rates over the last ten seconds",
        overview,
        {200: OverviewBody},
        roles=WHO_LOOKS,
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
        roles=WHO_LOOKS,
        admin=True,
    ),
)  # fmt: skip
