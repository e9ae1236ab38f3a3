"""What checks may ask: Kafka, the proxies and the settings. What several want is asked once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from txbroker.cli.doctor.proxies import ProxySide, RegisteredGroup, Unavailable
from txbroker.cli.doctor.samples import Samples, read_samples
from txbroker.config.settings import Settings
from txbroker.contract.service import Overview
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.repair import Found
from txbroker.kafka.door.topics import FoundTopic, Plan
from txbroker.kafka.tools.examination import BrokerFacts, Cluster, OpenTransaction

T = TypeVar("T")

__all__ = ["KafkaSide", "Subject", "Thresholds", "Unavailable"]


class KafkaSide(Protocol):
    """What checks may ask of Kafka: `KafkaExamination`, or a fake."""

    @property
    def settings(self) -> KafkaSettings:
        """How Kafka is reached, and what the topics are called."""
        ...

    async def cluster(self, topics: Iterable[str] = ()) -> Cluster:
        """Return the brokers, and topics as they are seen."""
        ...

    async def brokers(self) -> list[BrokerFacts]:
        """Return each broker as it is seen from here."""
        ...

    async def group_error(self) -> int:
        """Return the error code of asking about the proxies' group."""
        ...

    async def transactional_id_error(self) -> int:
        """Return the error code of asking about the proxies' transactional ids."""
        ...

    async def found(self) -> dict[str, FoundTopic]:
        """Return txbroker's own topics with their settings."""
        ...

    async def contradictions(self, found: Mapping[str, FoundTopic]) -> list[str]:
        """Return why txbroker cannot work with its topics."""
        ...

    async def plan(self, found: Mapping[str, FoundTopic]) -> Plan:
        """Return what `txbroker topics apply` would do."""
        ...

    async def set_aside(self) -> list[Found]:
        """Return what other clients wrote into txbroker's own topics."""
        ...

    async def newest_appends(self, cluster: Cluster) -> dict[tuple[str, int], int]:
        """Return the newest timestamp of each partition."""
        ...

    async def open_transactions(self, topics: Sequence[str]) -> list[OpenTransaction]:
        """Return what hides the ends of topics."""
        ...

    async def audit_news(self) -> dict[str, bytes]:
        """Return the newest records of the audits."""
        ...


class Thresholds(Struct, frozen=True):
    """From where on something is not well. The alerts have the same.

    Attributes:
        clocks_s: how far clocks may be apart.
        pending_windows: how many times the check window an undecided transaction may be old.
        promotion_s: how long a commit may wait to be visible.
        transaction_s: how long a Kafka transaction may be open; longer than any turn of a proxy.
        headroom_share: how much of half's retention has to be left for what is not copied.
        audit_s: how old the newest audit may be.
    """

    clocks_s: float = 1.0
    pending_windows: float = 2.0
    promotion_s: float = 60.0
    transaction_s: float = 60.0
    headroom_share: float = 0.4
    audit_s: float = 2 * 86400.0


class Subject:
    """One installation, at one moment: what was asked for once is not asked for again."""

    def __init__(
        self,
        settings: Settings,
        kafka: KafkaSide,
        proxies: ProxySide,
        limits: Thresholds | None = None,
        now_s: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.settings = settings
        self.kafka = kafka
        self.proxies = proxies
        self.limits = limits or Thresholds()
        self.now_s = now_s
        self.pause = pause
        self._asked: dict[str, asyncio.Task[Any]] = {}

    @property
    def own_topics(self) -> tuple[str, ...]:
        """The names of the topics without which no proxy works."""
        return self.kafka.settings.own_topics

    async def cluster(self) -> Cluster:
        """Return the brokers, and all of txbroker's topics as they are seen."""
        names = self.own_topics + self.kafka.settings.audit_topics
        return await self._once("cluster", lambda: self.kafka.cluster(names))

    async def brokers(self) -> list[BrokerFacts]:
        """Return each broker as it is seen from here."""
        return await self._once("brokers", self.kafka.brokers)

    async def groups(self) -> list[RegisteredGroup]:
        """Return the registered groups."""
        return await self._once("groups", self.proxies.groups)

    async def found(self) -> dict[str, FoundTopic]:
        """Return txbroker's topics with their settings."""
        return await self._once("found", self.kafka.found)

    async def audit_news(self) -> dict[str, bytes]:
        """Return the newest records of the audits."""
        return await self._once("audit", self.kafka.audit_news)

    async def overview(self) -> Overview:
        """Return how all stands, as the proxies say."""
        return (await self.timed_overview())[0]

    async def timed_overview(self) -> tuple[Overview, float, float]:
        """Return how all stands, how long it took to hear of it, and our time then, seconds."""
        return await self._once("overview", self._overview)

    async def _overview(self) -> tuple[Overview, float, float]:
        overview, took_s = await self.proxies.overview()
        return overview, took_s, self.now_s()

    async def metrics(self) -> dict[str, Samples | Unavailable]:
        """Return the metrics of every proxy that is known, or why there are none, by its URL.

        Raises:
            Unavailable: of no proxy at all.
        """
        return await self._once("metrics", self._metrics)

    async def _metrics(self) -> dict[str, Samples | Unavailable]:
        urls = await self.urls()
        read = dict(zip(urls, await asyncio.gather(*map(self._samples, urls)), strict=True))
        failed = [one for one in read.values() if isinstance(one, Unavailable)]
        if len(failed) == len(read):
            raise failed[0] if failed else Unavailable("no proxy is known")
        return read

    async def urls(self) -> list[str]:
        """Return where all proxies that are known take operators' calls: those named, and those
        they tell of."""
        try:
            proxies = (await self.overview()).proxies
            told = [proxy.admin_url or proxy.url for proxy in proxies if proxy.reached]
        except Unavailable:
            told = []
        # One proxy may be known under two URLs; what it says of itself counts once.
        return list(dict.fromkeys(told or self.proxies.named))

    async def _samples(self, url: str) -> Samples | Unavailable:
        try:
            return read_samples(await self.proxies.metrics(url))
        except Unavailable as error:
            return error

    async def _once(self, name: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what `ask` brings, asking once for all who want it."""
        task = self._asked.get(name)
        if task is None:
            task = self._asked[name] = asyncio.ensure_future(ask())
        # Whoever has no more time must not take it from the others.
        result: T = await asyncio.shield(task)
        return result

    async def close(self) -> None:
        """Let go of what nobody waits for any more."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
