"""The calls on the proxy itself."""

import msgspec

from txbroker.proxy.http.bodies import HealthBody, OverviewBody, ReadyBody
from txbroker.proxy.http.operations import Call, Operation, Reply

_OVERVIEW_FIELDS = tuple(field.name for field in msgspec.structs.fields(OverviewBody))


async def health(call: Call) -> Reply:
    """Say that the process is alive."""
    return Reply(200, HealthBody(status="alive"))


async def ready(call: Call) -> Reply:
    """Say whether calls can be taken, and if not, why."""
    found = call.shell.service.readiness()
    body = ReadyBody(
        ready=found.ready,
        partitions={str(number): doing for number, doing in found.partitions.items()},
        problems=list(found.problems),
    )
    return Reply(200 if found.ready else 503, body)


async def overview(call: Call) -> Reply:
    """Tell how all stands: owners, counts, rates, groups."""
    found = await call.shell.service.overview()
    return Reply(200, OverviewBody(**{name: getattr(found, name) for name in _OVERVIEW_FIELDS}))


async def metrics(call: Call) -> Reply:
    """Show the metrics in Prometheus' text format."""
    return Reply(200, call.shell.metrics.text())


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
        admin=True,
    ),
)  # fmt: skip
