"""The facts for checks: Kafka, the proxies and the settings, each read once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from txbroker.cli.doctor.proxies import HttpProxies, RegisteredGroup, Unavailable
from txbroker.config.settings import Settings
from txbroker.contract.service import Overview
from txbroker.kafka.client.admin import TopicSpec
from txbroker.kafka.tools.examination import BrokerFacts, Cluster, KafkaExamination

T = TypeVar("T")

__all__ = ["Samples", "Subject", "Thresholds", "Unavailable"]


_PREFIX = "txbroker_"


class Samples:
    """The samples of one proxy, by metric."""

    def __init__(self, samples: Mapping[str, list[tuple[Mapping[str, str], float]]]) -> None:
        self._samples = samples

    def values(self, name: str) -> list[float]:
        """Return the values of a metric with any labels; `name` has no prefix."""
        return [value for _labels, value in self._samples.get(_PREFIX + name, ())]

    def labels(self, name: str, label: str) -> set[str]:
        """Return the values of a label of a metric."""
        samples = self._samples.get(_PREFIX + name, ())
        return {labels[label] for labels, _value in samples if label in labels}


def read_samples(text: str) -> Samples:
    """Parse a page of metrics.

    Raises:
        Unavailable: the page is malformed.
    """
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, IndexError, KeyError) as error:
        raise Unavailable(f"malformed metrics: {error}") from None
    return Samples(samples)


class Thresholds(Struct, frozen=True):
    """Limits beyond which a check fails or warns. The alerts use the same.

    Attributes:
        clocks_s: difference between clocks.
        pending_windows: age of an undecided transaction, in check windows.
        promotion_s: time from a commit until the messages are visible.
        transaction_s: duration of a Kafka transaction; longer than any promotion transaction.
        headroom_share: share of half's retention left for messages without a copy.
        audit_s: age of the newest audit.
    """

    clocks_s: float = 1.0
    pending_windows: float = 2.0
    promotion_s: float = 60.0
    transaction_s: float = 60.0
    headroom_share: float = 0.4
    audit_s: float = 2 * 86400.0


class Subject:
    """One installation at one moment; each fact is read once."""

    def __init__(
        self,
        settings: Settings,
        kafka: KafkaExamination,
        proxies: HttpProxies,
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
        """The topics that every proxy needs."""
        return self.kafka.settings.own_topics

    async def cluster(self) -> Cluster:
        """Return the brokers and the metadata of txbroker's topics."""
        names = self.own_topics + self.kafka.settings.audit_topics
        return await self._once("cluster", lambda: self.kafka.cluster(names))

    async def brokers(self) -> list[BrokerFacts]:
        """Return the facts of each broker."""
        return await self._once("brokers", self.kafka.brokers)

    async def groups(self) -> list[RegisteredGroup]:
        """Return the registered groups."""
        return await self._once("groups", self.proxies.groups)

    async def found(self) -> dict[str, TopicSpec]:
        """Return txbroker's topics with their settings."""
        return await self._once("found", self.kafka.found)

    async def audit_news(self) -> dict[str, bytes]:
        """Return the newest records of audits."""
        return await self._once("audit", self.kafka.audit_news)

    async def overview(self) -> Overview:
        """Return the proxies' overview."""
        return (await self.timed_overview())[0]

    async def timed_overview(self) -> tuple[Overview, float, float]:
        """Return the overview, the call's duration, and our time at its end, in seconds."""
        return await self._once("overview", self._overview)

    async def _overview(self) -> tuple[Overview, float, float]:
        overview, took_s = await self.proxies.overview()
        return overview, took_s, self.now_s()

    async def metrics(self) -> dict[str, Samples | Unavailable]:
        """Return the metrics of every known proxy, or the error, by URL.

        Raises:
            Unavailable: no proxy returned metrics.
        """
        return await self._once("metrics", self._metrics)

    async def _metrics(self) -> dict[str, Samples | Unavailable]:
        urls = await self.urls()
        by_url = dict(zip(urls, await asyncio.gather(*map(self._samples, urls)), strict=True))
        failed = [result for result in by_url.values() if isinstance(result, Unavailable)]
        if len(failed) == len(by_url):
            raise failed[0] if failed else Unavailable("no proxy is known")
        return by_url

    async def urls(self) -> list[str]:
        """Return the URLs for operators' calls of all known proxies: named ones and their peers."""
        try:
            proxies = (await self.overview()).proxies
            reported = [proxy.admin_url or proxy.url for proxy in proxies if proxy.reached]
        except Unavailable:
            reported = []
        # A proxy may be named by another URL than it reports; count it once.
        return list(dict.fromkeys(reported or self.proxies.named))

    async def _samples(self, url: str) -> Samples | Unavailable:
        try:
            return read_samples(await self.proxies.metrics(url))
        except Unavailable as error:
            return error

    async def _once(self, name: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `ask`, called once for all checks."""
        task = self._asked.get(name)
        if task is None:
            task = self._asked[name] = asyncio.ensure_future(ask())
        # A check that times out must not cancel the query for others.
        result: T = await asyncio.shield(task)
        return result

    async def close(self) -> None:
        """Cancel the queries in flight."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
