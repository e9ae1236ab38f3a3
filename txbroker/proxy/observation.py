"""What operators see of one proxy: gauges, sources of the overview, audits and the last hour."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from txbroker.checkers.groups import Groups
from txbroker.checkers.runner import CheckRunner
from txbroker.checkers.sessions import SessionRegistry
from txbroker.contract.service import AuditOverview, CheckReport, GroupChecks, InstanceOverview
from txbroker.diagnosis.table import problems_of
from txbroker.door.protocols import Door
from txbroker.proxy.cluster.broker import Broker
from txbroker.proxy.observe.counting import READ_S
from txbroker.proxy.observe.gauges import AuditMetrics, PartitionGauges, measure_loop
from txbroker.proxy.observe.history import ProxyHistory
from txbroker.proxy.observe.metrics import Metrics
from txbroker.proxy.observe.observed import Actions, Observed
from txbroker.proxy.observe.overview import local_overview


class Observation(Observed):
    """One proxy, as operators see it.

    Args:
        files_not_read: returns by setting whether the content of its file cannot be used.
    """

    broker: Broker
    past: ProxyHistory

    def __init__(
        self,
        broker: Broker,
        sessions: SessionRegistry,
        groups: Groups,
        runner: CheckRunner,
        metrics: Metrics,
        half_retention_s: float,
        files_not_read: Callable[[], Mapping[str, bool]],
    ) -> None:
        self.broker = broker
        self._sessions = sessions
        self._groups = groups
        self._runner = runner
        self._metrics = metrics
        self._files_not_read = files_not_read
        self._gauges = PartitionGauges(self, half_retention_s)
        self._audits = AuditMetrics(metrics)
        self.past = ProxyHistory(self)

    def watch(self, door: Door) -> None:
        """Begin to watch the broker, and the results of audits."""
        self.broker.observed = self
        self._metrics.watch(self._gauges.read)
        door.audit.follow(self._audits.changed)

    async def measure_loop(self) -> None:
        """Measure the lag of the event loop until it is cancelled."""
        await measure_loop(self._metrics)

    def connected(self) -> Mapping[str, Sequence[str]]:
        return self._sessions.instances()

    def instances(self, group: str) -> Sequence[InstanceOverview]:
        return self._sessions.described(group)

    def unreachable(self) -> Mapping[str, str]:
        return self._runner.unreachable()

    def unreachable_for_s(self) -> Mapping[str, float]:
        return self._runner.unreachable_for_s()

    def check_urls(self) -> Collection[str]:
        return self._groups.with_url()

    def checks(self, now_ms: int) -> Mapping[str, GroupChecks]:
        return self._runner.outcomes.read(asyncio.get_running_loop().time(), now_ms)

    def take_checks(self) -> Mapping[str, Sequence[int]]:
        return self._runner.outcomes.take()

    def reports(self, group: str, now_ms: int) -> Sequence[CheckReport]:
        return self._runner.outcomes.reports(group, asyncio.get_running_loop().time(), now_ms)

    def files_not_read(self) -> Mapping[str, bool]:
        return self._files_not_read()

    def audits(self) -> Sequence[AuditOverview]:
        return self._audits.overviews()

    def retention(self) -> tuple[float, float | None]:
        return self._gauges.retention()

    def latencies(self) -> Mapping[str, tuple[Sequence[float], Sequence[int]]]:
        return {
            name: (latency.bounds, latency.counts[""])
            for name, latency in self._metrics.latencies.items()
        }

    def problems(self) -> Iterator[tuple[str, str]]:
        return problems_of(local_overview(self))

    async def actions(self) -> Actions:
        until_s = asyncio.get_running_loop().time() + READ_S
        for owner in self.broker.ledgers():
            await owner.read_actions(until_s)
        actions = self.broker.partitions.actions
        return actions.newest(), actions.since_ms()
