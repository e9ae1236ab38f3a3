"""The facts for checks: Kafka, the proxies over HTTP and the settings, each read once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from txbroker.cli.client import ApiConnection, ApiError
from txbroker.cli.doctor.outbox import OutboxFacts, RelayTargets, outbox_facts, version_problems
from txbroker.config.settings import Settings
from txbroker.contract.groups import GroupAnswer, GroupsBody, TestedBody
from txbroker.contract.service import Overview
from txbroker.databases.database import Database
from txbroker.door.consuming import TopicSpec
from txbroker.errors import NotPermitted
from txbroker.kafka.tools.examination import BrokerFacts, ClusterFacts, KafkaExamination
from txbroker.net.tls import ClientTls
from txbroker.relay.capture.setup import Step

T = TypeVar("T")

TIMEOUT_S = 5.0
"""Timeout of a call."""
_TEST_S = 3.0
"""Time for a test call in addition to the group's timeout."""
_ANSWER_BYTES_MAX = 64 << 20
_CALLS_MAX = 24
"""Calls in flight."""


class Unavailable(Exception):
    """The facts for a check cannot be read; the message has the reason."""


class NotAllowed(Unavailable):
    """The doctor's credential does not permit the call."""


class ProxyReply(Struct, frozen=True):
    """A proxy's answer, and the call's duration in seconds."""

    status: int
    body: bytes
    seconds: float = 0.0


class ReadyAnswer(Struct, frozen=True):
    """The answer of `/readyz`; see `txbroker.contract.service.Readiness`."""

    ready: bool
    partitions: dict[str, str] = {}
    problems: list[str] = []


class HttpProxies:
    """The proxies at their URLs. Methods raise `Unavailable` if no proxy answers.

    Args:
        urls: the named proxies.
        headers: for every call, such as the token.
        tls: authorities and client certificate; None: the system's authorities, no certificate.
        anonymous_tls: authorities for calls without credentials; None: the system's.
    """

    def __init__(
        self,
        urls: Sequence[str],
        headers: Mapping[str, str],
        tls: ClientTls | None = None,
        anonymous_tls: ClientTls | None = None,
    ) -> None:
        self._tls = tls or ClientTls()
        self._anonymous_tls = anonymous_tls or ClientTls()
        self.named: Sequence[str] = tuple(dict.fromkeys(url.rstrip("/") for url in urls))
        self._headers = headers
        # A dedicated pool: unreachable groups would block the few threads of a small machine.
        self._threads = ThreadPoolExecutor(_CALLS_MAX, thread_name_prefix="doctor")

    def close(self) -> None:
        """Make no further calls; calls in flight finish in the background."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ready(self, url: str) -> ReadyAnswer:
        reply = await self._ask(url, "GET", "/readyz")
        if reply.status not in (200, 503):
            raise Unavailable(
                f"{url} answered /readyz with {reply.status}: is it a txbroker proxy?"
            )
        return _decoded(url, reply, ReadyAnswer)

    async def overview(self) -> tuple[Overview, float]:
        """Return the overview of the first proxy that answers, and the call's duration in s."""
        reply, url = await self._first("GET", "/v1/overview")
        return _decoded(url, reply, Overview), reply.seconds

    async def metrics(self, url: str) -> str:
        """Return a proxy's metrics, in Prometheus' text format."""
        reply = await self._ask(url, "GET", "/metrics")
        if reply.status != 200:
            raise _refused(url, "/metrics", reply)
        return reply.body.decode(errors="replace")

    async def anonymous(self, url: str, path: str) -> int:
        """Return the status of a proxy's answer to a call without credentials."""
        return (await self._ask(url, "GET", path, anonymous=True)).status

    async def groups(self) -> list[GroupAnswer]:
        reply, url = await self._first("GET", "/v1/groups")
        return _decoded(url, reply, GroupsBody).groups

    async def test_group(self, group: str, timeout_s: float) -> TestedBody:
        """Make a proxy send a test call to a group's check URL."""
        path = f"/v1/groups/{quote(group, safe='')}/test"
        reply, url = await self._first("POST", path, b"{}", timeout_s + _TEST_S)
        return _decoded(url, reply, TestedBody)

    async def _first(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = TIMEOUT_S
    ) -> tuple[ProxyReply, str]:
        failure = Unavailable("no proxy is named: give one by --url")
        for url in self.named:
            try:
                reply = await self._ask(url, method, path, body, timeout_s)
            except Unavailable as error:
                failure = error
                continue
            if reply.status == 200:
                return reply, url
            failure = _refused(url, path, reply)
        raise failure

    async def _ask(
        self,
        url: str,
        method: str,
        path: str,
        body: bytes | None = None,
        timeout_s: float = TIMEOUT_S,
        *,
        anonymous: bool = False,
    ) -> ProxyReply:
        headers, tls = self._headers, self._tls
        if anonymous:
            headers, tls = {}, self._anonymous_tls

        def exchange() -> tuple[int, bytes]:
            with closing(ApiConnection(url, headers, tls, timeout_s)) as connection:
                return connection.exchange(method, path, body, _ANSWER_BYTES_MAX)

        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            status, raw = await loop.run_in_executor(self._threads, exchange)
        except (ApiError, ValueError) as error:
            reason = error.sentence if isinstance(error, ApiError) else str(error)
            raise Unavailable(reason) from None
        return ProxyReply(status, raw, loop.time() - began)


def _decoded(url: str, reply: ProxyReply, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except msgspec.MsgspecError as error:
        raise Unavailable(
            f"{url} sent an answer that this doctor cannot read ({error}): is it another version?"
        ) from None


def _refused(url: str, path: str, reply: ProxyReply) -> Unavailable:
    kind = Unavailable
    try:
        error = msgspec.json.decode(reply.body)["error"]
        why = f"{error['message']} ({error['code']})"
        if error["code"] == NotPermitted.code:
            kind = NotAllowed
    except (msgspec.MsgspecError, KeyError, TypeError):
        why = "is it a txbroker proxy, and of this version?"
    if reply.status == HTTPStatus.UNAUTHORIZED:
        why += "; give the doctor a token by --token-file"
    if kind is NotAllowed:
        why += "; the doctor needs a token of role viewer, and of role operator for test calls"
    return kind(f"{url} answered {path} with {reply.status}: {why}")


_PREFIX = "txbroker_"


class Samples:
    """The labels of the samples of one proxy, by metric."""

    def __init__(self, samples: Mapping[str, list[Mapping[str, str]]]) -> None:
        self._samples = samples

    def labels(self, name: str, label: str) -> set[str]:
        """Return the values of a label of a metric; `name` has no prefix."""
        samples = self._samples.get(_PREFIX + name, ())
        return {labels[label] for labels in samples if label in labels}


def read_samples(text: str) -> Samples:
    """Parse a page of metrics.

    Raises:
        Unavailable: the page is malformed.
    """
    samples: dict[str, list[Mapping[str, str]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample.labels)
    except (ValueError, IndexError, KeyError) as error:
        raise Unavailable(f"malformed metrics: {error}") from None
    return Samples(samples)


class Subject:
    """One installation at one moment; each fact is read once."""

    def __init__(
        self,
        settings: Settings,
        kafka: KafkaExamination,
        proxies: HttpProxies,
        now_s: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        relays: RelayTargets | None = None,
    ) -> None:
        self.settings = settings
        self.kafka = kafka
        self.proxies = proxies
        self.now_s = now_s
        self.pause = pause
        self._relays = relays or RelayTargets()
        self._asked: dict[str, asyncio.Task[Any]] = {}

    @property
    def own_topics(self) -> tuple[str, ...]:
        """The topics that every proxy needs."""
        return self.kafka.settings.own_topics

    async def cluster(self) -> ClusterFacts:
        """Return the brokers and the metadata of txbroker's topics."""
        names = self.own_topics + self.kafka.settings.audit_topics
        return await self._once("cluster", lambda: self.kafka.cluster(names))

    async def brokers(self) -> list[BrokerFacts]:
        return await self._once("brokers", self.kafka.brokers)

    async def groups(self) -> list[GroupAnswer]:
        return await self._once("groups", self.proxies.groups)

    async def found(self) -> dict[str, TopicSpec]:
        """Return txbroker's topics with their settings."""
        return await self._once("found", self.kafka.found)

    async def outbox(self) -> OutboxFacts:
        """Return the facts about the outbox of the named database."""
        database = self._database()
        return await self._once("outbox", lambda: outbox_facts(database))

    async def version_problems(self) -> list[str]:
        """Return which tables in the named database are of another version."""
        return await version_problems(self._database())

    def _database(self) -> Database:
        if self._relays.database is None:
            raise Unavailable("no database is named: give one by --database")
        return self._relays.database

    async def capture_steps(self) -> list[Step]:
        """Return what the named capture needs in its database."""
        capture = self._relays.capture
        if capture is None:
            raise Unavailable("no capture is named: give one by --capture")
        return await self._once("capture", capture.plan)

    async def positions_topic(self) -> tuple[str, TopicSpec | None]:
        """Return the topic of relays' positions, None where it does not exist."""
        name = f"{self.settings.topic_prefix}.relay"
        return name, (await self.kafka.specs((name,))).get(name)

    async def audit_news(self) -> dict[str, bytes]:
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
