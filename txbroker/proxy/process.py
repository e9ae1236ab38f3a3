"""One proxy, put together: door, broker, checks and the listening server."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec import Struct

from txbroker.checkers.finder import GroupFinder
from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.runner import CheckRunner
from txbroker.checkers.sessions import SessionRegistry
from txbroker.config import Settings
from txbroker.door import Door
from txbroker.proxy.broker import Broker
from txbroker.proxy.http import make_app, serve
from txbroker.proxy.metrics import Metrics
from txbroker.proxy.observers import Observer


class Proxy(Struct, frozen=True):
    """A running proxy."""

    url: str
    broker: Broker
    groups: Groups
    sessions: SessionRegistry
    metrics: Metrics
    checks: CheckRunner


@asynccontextmanager
async def run_proxy(door: Door, settings: Settings) -> AsyncIterator[Proxy]:
    """Run a proxy on a door until the block is left.

    It listens before it joins the other proxies, so that they find it as soon as they hear of it.

    Raises:
        KafkaUnavailable: Kafka does not answer.
        ConfigurationError: the configuration, the address or Kafka's topics cannot work.
    """
    async with AsyncExitStack() as stack:
        stack.push_async_callback(door.close)
        await door.start()
        metrics = Metrics(settings.group_labels_max)
        groups = Groups(door.groups)
        sessions = SessionRegistry()
        checks = HttpChecks()
        stack.push_async_callback(checks.close)
        runner = CheckRunner(
            GroupFinder(sessions, groups, checks),
            metrics,
            parallel=lambda name: _parallel(groups, name),
            parallel_total_max=settings.checks_parallel_max,
        )
        stack.push_async_callback(runner.close)
        sessions.on_appeared(runner.wake)
        groups.on_change(runner.wake)
        await groups.load()
        observer = Observer(metrics, runner.unreachable, settings.half_retention_s)
        broker = Broker(door, settings, groups, runner, observer)
        observer.watch(broker)
        app = make_app(broker, groups, sessions, settings, metrics)
        broker.url = await stack.enter_async_context(serve(app, settings.listen))
        if settings.advertise:
            broker.url = settings.advertise
        stack.push_async_callback(broker.close)
        await broker.start()
        yield Proxy(broker.url, broker, groups, sessions, metrics, runner)


def _parallel(groups: Groups, name: str) -> int | None:
    policy = groups.get(name)
    return None if policy is None else policy.parallel
