"""What operators see of one proxy: gauges, sources of the overview, audits and the last hour."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from txbroker.checkers.groups import Groups
from txbroker.checkers.runner import CheckRunner
from txbroker.checkers.sessions import SessionRegistry
from txbroker.contract.service import CheckReport, GroupChecks, PartitionState
from txbroker.diagnosis.table import problems_of
from txbroker.door.protocols import Door
from txbroker.proxy.cluster.broker import Broker
from txbroker.proxy.observe.counting import READ_S
from txbroker.proxy.observe.gauges import AuditMetrics, PartitionGauges, measure_loop
from txbroker.proxy.observe.history import Actions, HistorySources, ProxyHistory
from txbroker.proxy.observe.metrics import Metrics
from txbroker.proxy.observe.overview import GroupStatus, local_overview

_COUNTED = frozenset(
    {
        PartitionState.OWNED,
        PartitionState.SUSPENDED,
        PartitionState.ELSEWHERE,
        PartitionState.NONE,
    }
)
"""The states in which the transactions of a half partition are known here, or not this proxy's."""


class Observation:
    """What operators see of one proxy; `watch` is to be called with its broker.

    Args:
        files_not_read: returns by setting whether the content of its file cannot be used.

    Attributes:
        status: the sources of the overview, for the broker.
        history: the last hour.
    """

    def __init__(
        self,
        sessions: SessionRegistry,
        groups: Groups,
        runner: CheckRunner,
        metrics: Metrics,
        half_retention_s: float,
        files_not_read: Callable[[], Mapping[str, bool]],
    ) -> None:
        self._runner = runner
        self._metrics = metrics
        self._half_retention_s = half_retention_s
        self._audits = AuditMetrics(metrics)
        self._broker: Broker
        self._gauges: PartitionGauges
        self.history = ProxyHistory(
            HistorySources(
                url=lambda: self._broker.partitions.url,
                now_ms=lambda: self._broker.now_ms(),
                owners=lambda: self._broker.partitions.open().values(),
                half_partitions=lambda: len(self._broker.partitions.assigned()),
                is_whole=self._is_whole,
                checks=runner.outcomes.take,
                latencies=lambda: {
                    name: (latency.bounds, latency.counts[""])
                    for name, latency in metrics.latencies.items()
                },
                problems=self._problems,
                reports=self._reports,
                instances=sessions.described,
                actions=self._actions,
            )
        )
        self.status = GroupStatus(
            sessions.instances,
            runner.unreachable,
            runner.unreachable_for_s,
            files_not_read,
            checks=self._checks,
            check_urls=groups.with_url,
            audits=self._audits.overviews,
            retention=lambda: self._gauges.retention(),
            past=self.history,
        )

    def watch(self, broker: Broker, door: Door) -> None:
        """Begin to watch a broker, and the results of audits."""
        self._broker = broker
        self._gauges = PartitionGauges(broker, self._runner.unreachable, self._half_retention_s)
        self._metrics.watch(self._gauges.read)
        door.audit.follow(self._audits.changed)

    async def measure_loop(self) -> None:
        """Measure the lag of the event loop until it is cancelled."""
        await measure_loop(self._metrics)

    def _is_whole(self) -> bool:
        states = self._broker.readiness().partitions.values()
        return all(state.partition(":")[0] in _COUNTED for state in states)

    def _problems(self) -> Iterator[tuple[str, str]]:
        broker = self._broker
        owners = broker.partitions.open().values()
        url, readiness, now_ms = broker.partitions.url, broker.readiness(), broker.now_ms()
        return problems_of(local_overview(url, readiness, owners, self.status, now_ms))

    async def _actions(self) -> Actions:
        until_s = asyncio.get_running_loop().time() + READ_S
        for owner in self._broker.ledgers():
            await owner.read_actions(until_s)
        actions = self._broker.partitions.actions
        return actions.newest(), actions.since_ms()

    def _checks(self, now_ms: int) -> Mapping[str, GroupChecks]:
        return self._runner.outcomes.read(asyncio.get_running_loop().time(), now_ms)

    def _reports(self, group: str, now_ms: int) -> Sequence[CheckReport]:
        return self._runner.outcomes.reports(group, asyncio.get_running_loop().time(), now_ms)
