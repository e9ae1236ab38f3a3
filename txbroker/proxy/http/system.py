"""The calls on the proxy itself."""

import msgspec

from txbroker.proxy.http.bodies import HealthBody, OverviewBody, ReadyBody
from txbroker.proxy.http.operations import Call, Operation, Reply

_PAGE = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>txbroker</title></head>
<body><h1>txbroker</h1>
<p>Transactional messages for Apache Kafka.</p>
<ul>
<li><a href="/readyz">readyz</a>: can this proxy take calls?</li>
<li><a href="/v1/transactions">transactions</a></li>
<li><a href="/v1/groups">groups</a></li>
<li><a href="/metrics">metrics</a></li>
<li><a href="/v1/openapi.json">openapi.json</a>: the API</li>
</ul></body></html>
"""


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


async def page(call: Call) -> Reply:
    """Show where to go."""
    return Reply(200, _PAGE)


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
    ),
    Operation(
        "metrics",
        "GET",
        "/metrics",
        "Metrics for Prometheus",
        metrics,
        {200: None},
        media="text/plain",
    ),
    Operation("page", "GET", "/", "Where to go", page, {200: None}, media="text/html", open=True),
)  # fmt: skip
