"""One proxy, put together: door, broker, checks and the listening server."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

from aiohttp import web
from msgspec import Struct

from txbroker import __version__
from txbroker.checkers.finder import GroupFinder
from txbroker.checkers.groups import Groups
from txbroker.checkers.leases import Leases, PeerIdentity, PeerSessions
from txbroker.checkers.runner import CheckRunner, RunnerLimits
from txbroker.checkers.sessions import SessionRegistry
from txbroker.config.addresses import Address
from txbroker.config.settings import Settings
from txbroker.core.index import ShareOf
from txbroker.door.protocols import Door
from txbroker.errors import KafkaUnavailable
from txbroker.net.tls import ClientTls, ServerTls, TlsFiles
from txbroker.principals import Directory, Role
from txbroker.proxy.cluster.broker import Broker
from txbroker.proxy.cluster.check_urls import make_checks
from txbroker.proxy.cluster.cluster import Cluster
from txbroker.proxy.cluster.peer_watcher import PeerWatcher
from txbroker.proxy.cluster.peers import Peers
from txbroker.proxy.console import console_pages
from txbroker.proxy.http import make_admin_app, make_app, make_peer_app, serve
from txbroker.proxy.http.api import CONTEXT
from txbroker.proxy.http.guards import PeerGuard, load_principals
from txbroker.proxy.observe.audit_metrics import AuditMetrics
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.metrics import Metrics
from txbroker.proxy.observe.overview import GroupStatus
from txbroker.proxy.observe.partition_gauges import PartitionGauges
from txbroker.proxy.observe.readiness import ReadinessLog

RECONNECT_S, RECONNECT_MAX_S = 0.1, 1.0
"""Pauses between attempts to reach Kafka at the start, the first and the longest, seconds."""

log = get_logger(__name__)


class Proxy(Struct, frozen=True):
    """A running proxy."""

    url: str
    admin_url: str
    broker: Broker
    cluster: Cluster
    groups: Groups
    sessions: SessionRegistry
    metrics: Metrics
    checks: CheckRunner


@asynccontextmanager
async def run_proxy(door: Door, settings: Settings, *, wait_s: float = 0.0) -> AsyncIterator[Proxy]:
    """Run a proxy on a door until the block is left.

    It listens before it joins the other proxies, so that they find it as soon as they hear of it.
    A Kafka that does not answer is waited for, `wait_s` seconds.

    Raises:
        KafkaUnavailable: Kafka does not answer.
        ConfigurationError: the configuration, the address or Kafka's topics cannot work.
    """
    tls, peers_tls = _server_tls(settings), _peers_tls(settings)
    async with AsyncExitStack() as stack:
        stack.callback(log.info, "stopped")
        _log_start(settings)
        stack.push_async_callback(door.close)
        principals = load_principals(settings)
        share_of = _share_of(principals)
        metrics = Metrics(settings.group_labels_max, share_of=share_of)
        listening: list[str] = []
        checks = make_checks(settings, lambda: (*listening, *_known(broker)), door.brokers)
        stack.push_async_callback(checks.close)
        groups = Groups(door.groups, checks.unusable)
        await _reach_kafka(door, groups, settings, wait_s)
        sessions = SessionRegistry()
        peer_guard = PeerGuard(settings)
        identity = _identity(lambda: broker, peer_guard)
        elsewhere = PeerSessions(identity, peers_tls)
        stack.push_async_callback(elsewhere.close)
        runner = CheckRunner(
            GroupFinder(sessions, groups, checks, elsewhere),
            metrics,
            parallel=lambda name: _parallel(groups, name),
            limits=RunnerLimits(parallel_total_max=settings.checks_parallel_max),
            share_of=share_of,
        )
        stack.push_async_callback(runner.close)
        for appeared in (sessions.on_appeared, elsewhere.on_appeared, groups.on_change):
            appeared(runner.wake)
        around = GroupStatus(
            sessions.instances,
            runner.unreachable,
            runner.unreachable_for_s,
            lambda: app[CONTEXT].files_not_read(),
        )
        broker = Broker(door, settings, groups, runner, metrics, around, principals)
        held = PartitionGauges(broker, runner.unreachable, settings.half_retention_s)
        metrics.watch(held.read)
        door.audit.follow(AuditMetrics(metrics).changed)
        peers = Peers(identity, tls=peers_tls)
        stack.push_async_callback(peers.close)
        cluster = Cluster(broker, peers)
        leases = Leases(sessions)
        stack.callback(leases.close)
        app = make_app(
            cluster,
            groups,
            sessions,
            settings,
            metrics,
            checks=checks,
            local=broker,
            leases=leases,
            peers=peer_guard,
            principals=principals,
            pages=console_pages,
        )
        admin_url = await _listen(stack, app, settings, tls, broker, listening)
        await _join(stack, broker, peers, elsewhere)
        yield Proxy(broker.url, admin_url, broker, cluster, groups, sessions, metrics, runner)


def _share_of(principals: Callable[[], Directory]) -> ShareOf:
    """Return what says whose a group is by the principals as they are when it is called."""
    return lambda group: principals().share_of(group)


async def _join(
    stack: AsyncExitStack, broker: Broker, peers: Peers, elsewhere: PeerSessions
) -> None:
    """Join the other proxies, and follow until the stack ends how they and this one stand.

    Raises:
        ConfigurationError: the group cannot be used, or not by this proxy.
    """
    readiness = ReadinessLog(broker.readiness)
    broker.on_owners(readiness.look)
    roster = PeerWatcher(peers, elsewhere, lambda: _others(broker))
    broker.on_owners(roster.changed)
    stack.push_async_callback(broker.close)
    stack.callback(log.info, "stopping")
    await broker.start()
    roster.start()
    stack.push_async_callback(roster.close)
    stack.push_async_callback(readiness.close)
    readiness.start()


def _log_start(settings: Settings) -> None:
    log.info(
        "starting",
        version=__version__,
        instance=settings.instance,
        kafka=settings.kafka,
        topic_prefix=settings.topic_prefix,
        listen=settings.listen,
    )
    if settings.token_file is not None:
        log.info("one token for all", role=_shared_role(settings), groups="*")
    for old, new in settings.renamed.items():
        log.warning("setting renamed", setting=old, by=new, value=getattr(settings, new))
    for name in settings.open_kafka_secrets():
        log.warning("secret file open to others", setting=name, path=str(getattr(settings, name)))


def _shared_role(settings: Settings) -> Role:
    """Return what the token of `token_file` allows at `listen`."""
    return Role.PRODUCER if settings.admin_listen else Role.OPERATOR


async def _reach_kafka(door: Door, groups: Groups, settings: Settings, wait_s: float) -> None:
    """Start the door and read the groups, again and again while Kafka does not answer, for
    `wait_s` seconds.

    Raises:
        KafkaUnavailable: Kafka has not answered in this time, or refuses.
        ConfigurationError: waiting does not help.
    """
    began = time.monotonic()
    waiting, pause_s = False, RECONNECT_S
    while True:
        try:
            await door.start()
            await groups.load()
            break
        except KafkaUnavailable as error:
            left_s = began + wait_s - time.monotonic()
            if error.lasting or wait_s == 0:
                raise
            if left_s <= 0:
                raise KafkaUnavailable(
                    f"{error}. Waited {wait_s:g} s (wait_for_kafka_s) for Kafka at {settings.kafka}"
                ) from None
            if not waiting:
                waiting = True
                log.warning(
                    "waiting for kafka", kafka=settings.kafka, seconds=wait_s, why=str(error)
                )
        # Up to twice as long at random: many proxies that start together do not come at once.
        await asyncio.sleep(min(pause_s * (1 + random.random()), left_s))
        pause_s = min(pause_s * 2, RECONNECT_MAX_S)
    if waiting:
        log.info("kafka answers", seconds=round(time.monotonic() - began, 1))


async def _listen(
    stack: AsyncExitStack,
    app: web.Application,
    settings: Settings,
    tls: ServerTls | None,
    broker: Broker,
    listening: list[str],
) -> str:
    """Listen until the stack ends, and tell the broker its URLs; return that of the admin address,
    "" where there is none. What it listens at, and is known at, is added to `listening`."""
    url = await stack.enter_async_context(serve(app, settings.listen, tls))
    broker.url = settings.advertise or url
    listening += [url, broker.url]
    log.info("listening", url=url, advertise=broker.url)
    if settings.peer_listen:
        peers = serve(make_peer_app(app), settings.peer_listen, tls, public=False)
        peer_url = await stack.enter_async_context(peers)
        broker.called_by_peers_at(settings.peer_advertise or peer_url)
        listening += [peer_url, settings.peer_advertise or peer_url]
    if not settings.admin_listen:
        return ""
    admin = serve(make_admin_app(app), settings.admin_listen, tls, public=False)
    admin_url = await stack.enter_async_context(admin)
    callable_url = _callable(admin_url, broker.url)
    broker.called_by_operators_at(callable_url)
    listening += [admin_url, callable_url]
    return admin_url


def _identity(broker: Callable[[], Broker], guard: PeerGuard) -> PeerIdentity:
    return PeerIdentity(lambda: broker().url, guard.secret, lambda url: broker().peer_url(url))


def _known(broker: Broker) -> Iterator[str]:
    """Yield the URLs at which the proxies of the group take calls, proxies' and operators' too."""
    for url in broker.proxies():
        yield from {url, broker.peer_url(url), broker.admin_url(url)}


def _others(broker: Broker) -> list[str]:
    return [url for url in broker.proxies() if url and url != broker.url]


def _callable(admin_url: str, url: str) -> str:
    """Return the admin address as others may call it: where it is every address of the machine,
    by the host name of `url`."""
    parts = urlsplit(admin_url)
    address = Address(parts.hostname or "", parts.port or 0)
    if address.wildcard:
        address = address._replace(host=urlsplit(url).hostname or "")
    return address.url_of(secure=parts.scheme == "https")


def _server_tls(settings: Settings) -> ServerTls | None:
    if settings.tls_cert_file is None:
        return None
    files = TlsFiles(
        settings.tls_client_ca_file,
        settings.tls_cert_file,
        settings.tls_key_file,
        ("tls_client_ca_file", "tls_cert_file", "tls_key_file"),
        guarded=True,
    )
    return ServerTls(files, _tell_files)


def _peers_tls(settings: Settings) -> ClientTls:
    """Return what this proxy trusts and shows when it calls others.

    Each shows the same certificate as server and as client, so whoever may sign clients' may sign
    that of another proxy, too.
    """
    files = TlsFiles(
        settings.peers_ca_file or settings.tls_client_ca_file,
        settings.tls_cert_file,
        settings.tls_key_file,
        ("peers_ca_file", "tls_cert_file", "tls_key_file"),
        guarded=True,
    )
    return ClientTls(files, _tell_files)


def _tell_files(files: str, why: str) -> None:
    if why:
        log.warning("tls files not taken", files=files, why=why)
    else:
        log.info("tls files read again", files=files)


def _parallel(groups: Groups, name: str) -> int | None:
    policy = groups.policies.get(name)
    return None if policy is None else policy.parallel
