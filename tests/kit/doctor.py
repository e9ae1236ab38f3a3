"""A fake installation for the doctor's tests: healthy, until a test changes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import structs

from txbroker.cli.doctor.findings import CheckLevel, DoctorResult
from txbroker.cli.doctor.outbox import RelayTargets
from txbroker.cli.doctor.report import CHECKS, DoctorReport, examine
from txbroker.cli.doctor.subject import (
    ReadyAnswer,
    Subject,
    Unavailable,
)
from txbroker.config.settings import Settings
from txbroker.contract.groups import GroupAnswer, TestedBody
from txbroker.contract.service import GroupOverview, Overview, PartitionOverview, ProxyOverview
from txbroker.door.consuming import TopicSpec
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.repair import StoppingRecord
from txbroker.kafka.door.topics import Plan, contradictions, own_plan, wanted_topics
from txbroker.kafka.tools.examination import (
    BrokerFacts,
    ClusterFacts,
    OpenTransaction,
    PartitionCopies,
    TopicSeen,
)

T = TypeVar("T")

NOW_S = 1_770_000_000.0
NOW_MS = round(NOW_S * 1000)
ONE, TWO = "https://one:8470", "https://two:8470"
ALL = frozenset({"Read", "Write", "Describe", "DescribeConfigs"})
PARTITIONS = 4
METRICS = """\
# HELP txbroker_promoted_total x
# TYPE txbroker_promoted_total counter
txbroker_promoted_total{topic="payments"} 3.0
txbroker_promoted_total{topic="other"} 3.0
"""


def settings(**given: Any) -> Settings:
    """Return the default settings with these changes."""
    return Settings(**{"partitions": PARTITIONS} | given)


class FakeKafka:
    """Three brokers on which txbroker's topics are as they should be."""

    def __init__(self) -> None:
        self.settings = KafkaSettings.from_configuration(settings())
        self.failure: Exception | None = None
        self.nodes = [BrokerFacts(n, f"kafka-{n}:9092", 17) for n in (1, 2, 3)]
        wanted = wanted_topics(self.settings, 3, None)
        self.topics = {
            topic.name: TopicSpec(topic.name, topic.partitions, 3, dict(topic.configs))
            for topic in wanted
        }
        self.seen = {
            name: TopicSeen(
                0,
                {n: PartitionCopies(n % 3 + 1, (1, 2, 3), (1, 2, 3)) for n in range(t.partitions)},
                ALL,
            )
            for name, t in self.topics.items()
        }
        for target in ("payments", "other"):
            self.seen[target] = TopicSeen(0, {0: PartitionCopies(1, (1,), (1,))}, ALL)
        self.group_code = self.id_code = 0
        # Partition n is led by broker n + 1.
        self.newest = {("txbroker.half", n): NOW_MS - ago for n, ago in enumerate((10, 60_000, -9))}
        self.later: dict[tuple[str, int], int] = {}
        self.open: list[OpenTransaction] = []
        self.foreign: list[StoppingRecord] = []
        self.news: dict[str, bytes] = {}
        self.asked: list[list[str]] = []

    async def cluster(self, topics: Iterable[str] = ()) -> ClusterFacts:
        self._fail()
        seen = {name: self.seen[name] for name in topics if name in self.seen}
        return ClusterFacts("c", 1, {one.node: one.address for one in self.nodes}, seen)

    async def brokers(self) -> list[BrokerFacts]:
        self._fail()
        return self.nodes

    async def transactional_id_error(self) -> int:
        self._fail()
        return self.id_code

    async def group_error(self) -> int:
        self._fail()
        return self.group_code

    async def found(self) -> dict[str, TopicSpec]:
        self._fail()
        return self.topics

    async def specs(self, names: tuple[str, ...]) -> dict[str, TopicSpec]:
        self._fail()
        return {name: self.topics[name] for name in names if name in self.topics}

    async def contradictions(self, found: Mapping[str, TopicSpec]) -> list[str]:
        self._fail()
        return contradictions(self.settings, found)

    async def plan(self, found: Mapping[str, TopicSpec]) -> Plan:
        self._fail()
        return own_plan(self.settings, len(self.nodes), found, None)

    async def set_aside(self) -> list[StoppingRecord]:
        self._fail()
        return self.foreign

    async def newest_appends(self, cluster: ClusterFacts) -> dict[tuple[str, int], int]:
        self._fail()
        found = dict(self.newest)
        self.newest |= self.later
        return found

    async def open_transactions(self, topics: Sequence[str]) -> list[OpenTransaction]:
        self._fail()
        self.asked.append(list(topics))
        return self.open

    async def audit_news(self) -> dict[str, bytes]:
        self._fail()
        return self.news

    def configure(self, topic: str, **changes: str) -> None:
        """Change settings of a topic (`_` for `.`)."""
        name = f"txbroker.{topic}"
        configs = dict(self.topics[name].configs)
        configs |= {key.replace("_", "."): value for key, value in changes.items()}
        self.topics[name] = structs.replace(self.topics[name], configs=configs)

    def copies(self, topic: str, partition: int, copies: PartitionCopies) -> None:
        self.seen[f"txbroker.{topic}"].partitions[partition] = copies

    def see(self, topic: str, **changes: Any) -> None:
        name = f"txbroker.{topic}"
        self.seen[name] = structs.replace(self.seen[name], **changes)

    def remove(self, topic: str) -> None:
        del self.topics[f"txbroker.{topic}"], self.seen[f"txbroker.{topic}"]

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


class FakeProxies:
    """Two proxies that share four half partitions, and two groups that can be asked."""

    def __init__(self) -> None:
        self.named: Sequence[str] = (ONE,)
        self.readiness: dict[str, ReadyAnswer | Exception] = {
            url: ReadyAnswer(True, {"0": "owned", "1": "elsewhere"}) for url in (ONE, TWO)
        }
        self.view: Overview | Exception = Overview(
            at_ms=NOW_MS,
            complete=True,
            proxies=(
                ProxyOverview(ONE, True, True, (), "1.0", (0, 1), NOW_MS),
                ProxyOverview(TWO, True, True, (), "1.0", (2, 3), NOW_MS),
            ),
            partitions=tuple(
                PartitionOverview(n, ONE if n < 2 else TWO, "owned", "", 5, 0, 0, 0, 3.0)
                for n in range(PARTITIONS)
            ),
            groups=(GroupOverview("orders", 20, 0, 3.0, 2), GroupOverview("web", 0, 0, None, 0)),
            groups_left_off=0,
            refused_topics={},
        )
        self.registered = [GroupAnswer(group="web", sessions=0, check_url="http://web/check")]
        self.tests: dict[str, TestedBody | Exception] = {
            "web": TestedBody(group="web", answered=True, endpoint="http://web/check", status=200)
        }
        self.pages: dict[str, str | Exception] = {ONE: METRICS, TWO: METRICS}
        self.times_s: dict[str, float] = {}
        self.open: set[tuple[str, str]] = set()

    async def ready(self, url: str) -> ReadyAnswer:
        return _or_raise(self.readiness[url])

    async def overview(self) -> tuple[Overview, float]:
        return _or_raise(self.view), 0.01

    async def metrics(self, url: str) -> str:
        return _or_raise(self.pages[url])

    async def anonymous(self, url: str, path: str) -> int:
        _or_raise(self.pages[url])
        return 200 if (url, path) in self.open else 401

    async def groups(self) -> list[GroupAnswer]:
        _or_raise(self.view)
        return self.registered

    async def test_group(self, group: str, timeout_s: float) -> TestedBody:
        self.times_s[group] = timeout_s
        return _or_raise(self.tests[group])

    @property
    def seen(self) -> Overview:
        """The overview, which a test may replace."""
        return _or_raise(self.view)

    def partition(self, number: int, /, **changes: Any) -> None:
        self._change("partitions", "partition", number, changes)

    def proxy(self, url: str, /, **changes: Any) -> None:
        self._change("proxies", "url", url, changes)

    def group(self, group: str, /, **changes: Any) -> None:
        self._change("groups", "group", group, changes)

    def _change(self, kind: str, key: str, value: object, changes: dict[str, Any]) -> None:
        """Change the part of the overview whose `key` has this value."""
        shown = tuple(
            structs.replace(one, **changes) if getattr(one, key) == value else one
            for one in getattr(self.seen, kind)
        )
        self.view = structs.replace(self.seen, **{kind: shown})

    def close(self) -> None:
        """There is nothing to close."""

    def gone(self) -> None:
        self.view = Unavailable(f"nothing listens at {ONE}")
        self.readiness = dict.fromkeys(self.readiness, self.view)
        self.pages = dict.fromkeys(self.pages, self.view)


def _or_raise(value: T | Exception) -> T:
    if isinstance(value, Exception):
        raise value
    return value


class World:
    """An installation, and the doctor that looks at it."""

    def __init__(self) -> None:
        self.kafka = FakeKafka()
        self.proxies = FakeProxies()
        self.settings = settings()

    def subject(self, relays: RelayTargets | None = None) -> Subject:
        async def at_once(_seconds: float) -> None:
            pass

        return Subject(
            self.settings,
            self.kafka,
            self.proxies,
            lambda: NOW_S,
            at_once,
            relays,
        )

    async def examine(self, **options: Any) -> DoctorReport:
        subject = self.subject()
        report = await examine(subject, CHECKS, **options)
        await subject.close()
        return report

    async def outcome(self, name: str) -> DoctorResult:
        """Run all checks, and return what became of one; no other may be broken by it."""
        report = await self.examine()
        assert not [one for one in report.outcomes if "broken" in one.found], report
        (found,) = [one for one in report.outcomes if one.name == name]
        return found

    async def seen(self, name: str) -> tuple[CheckLevel, tuple[str, ...]]:
        """Return level and details of one check's outcome."""
        found = await self.outcome(name)
        return found.level, found.details
