"""Assembles one proxy: door, broker, checks and HTTP server."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from msgspec import Struct

from txbroker import __version__
from txbroker.checkers.group_secrets import GroupSecrets
from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks, HttpLimits
from txbroker.checkers.leases import GroupFinder, PeerIdentity, PeerSessions, SessionLeases
from txbroker.checkers.runner import CheckRunner, RunnerLimits
from txbroker.checkers.sessions import SessionRegistry
from txbroker.checkers.url_guard import UrlGuard
from txbroker.config.addresses import Address, parse_host_rules, parse_servers
from txbroker.config.settings import Settings
from txbroker.core.settled import ShareOf
from txbroker.door.protocols import Door
from txbroker.errors import KafkaUnavailable
from txbroker.net.timers import Backoff
from txbroker.net.tls import ClientTls, ServerTls, TlsFiles
from txbroker.principals import Directory, Role
from txbroker.proxy.cluster.broker import Broker
from txbroker.proxy.cluster.cluster import Cluster
from txbroker.proxy.cluster.partition_manager import PartitionManager
from txbroker.proxy.cluster.peers import Peers
from txbroker.proxy.cluster.watchers import PeerWatcher, ReadinessLog, Sampler
from txbroker.proxy.console import console_pages
from txbroker.proxy.http import make_admin_app, make_app, make_peer_app, serve
from txbroker.proxy.http.api import CONTEXT
from txbroker.proxy.http.guards import PeerGuard, load_principals
from txbroker.proxy.observation import Observation
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.metrics import Metrics

RECONNECT_S, RECONNECT_MAX_S = 0.1, 1.0
"""First and longest pause between attempts to reach Kafka at the start, seconds."""

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
    """Run a proxy on a door until the block ends.

    The proxy listens before it joins the others, so that they can call it at once.

    Args:
        wait_s: how long to wait for Kafka at the start, seconds.

    Raises:
        KafkaUnavailable: Kafka does not answer.
        ConfigurationError: the configuration, the address or Kafka's topics cannot be used.
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
        checks = make_checks(
            settings, lambda: (*listening, *_known_urls(broker.partitions)), door.brokers
        )
        stack.push_async_callback(checks.close)
        groups = Groups(door.groups, checks.unusable)
        await _reach_kafka(door, groups, settings, wait_s)
        sessions = SessionRegistry()
        peer_guard = PeerGuard(settings)
        identity = _identity(lambda: broker.partitions, peer_guard)
        elsewhere = PeerSessions(identity, peers_tls)
        stack.push_async_callback(elsewhere.close)
        finder = GroupFinder(sessions, groups, checks, elsewhere)
        runner = _check_runner(settings, finder, groups, metrics, share_of)
        stack.push_async_callback(runner.close)
        for appeared in (sessions.on_appeared, elsewhere.on_appeared, groups.on_change):
            appeared(runner.wake)
        broker = Broker(door, settings, groups, runner, metrics, principals)
        peers = Peers(identity, tls=peers_tls)
        stack.push_async_callback(peers.close)
        cluster = Cluster(broker, peers)
        leases = SessionLeases(sessions)
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
        observation = Observation(
            broker,
            sessions,
            groups,
            runner,
            metrics,
            settings.half_retention_s,
            app[CONTEXT].unusable_files,
        )
        observation.watch(door)
        admin_url = await _listen(stack, app, settings, tls, broker.partitions, listening)
        await _join(stack, broker, peers, elsewhere, observation)
        url = broker.partitions.url
        yield Proxy(url, admin_url, broker, cluster, groups, sessions, metrics, runner)


def _share_of(principals: Callable[[], Directory]) -> ShareOf:
    """Return a function from a group to its share, by the principals at the time of the call."""
    return lambda group: principals().share_of(group)


def _identity(partitions: Callable[[], PartitionManager], guard: PeerGuard) -> PeerIdentity:
    return PeerIdentity(
        lambda: partitions().url, guard.secret, lambda url: partitions().peer_url(url)
    )


def _check_runner(
    settings: Settings, finder: GroupFinder, groups: Groups, metrics: Metrics, share_of: ShareOf
) -> CheckRunner:
    def parallel(name: str) -> int | None:
        policy = groups.policies.get(name)
        return None if policy is None else policy.parallel

    limits = RunnerLimits(parallel_total_max=settings.checks_parallel_max)
    return CheckRunner(finder, metrics, parallel=parallel, limits=limits, share_of=share_of)


async def _join(
    stack: AsyncExitStack,
    broker: Broker,
    peers: Peers,
    elsewhere: PeerSessions,
    observation: Observation,
) -> None:
    """Join the other proxies, and watch them and this one until the stack ends."""
    stack.callback(asyncio.create_task(observation.measure_loop()).cancel)
    readiness = ReadinessLog(broker.readiness)
    broker.on_owners(readiness.look)
    partitions = broker.partitions
    watcher = PeerWatcher(
        peers,
        elsewhere,
        lambda: [url for url in partitions.proxies() if url and url != partitions.url],
    )
    broker.on_owners(watcher.changed)
    stack.push_async_callback(broker.close)
    stack.callback(log.info, "stopping")
    await broker.start()
    for started in (watcher, readiness, Sampler(observation.past.sample)):
        started.start()
        stack.push_async_callback(started.close)


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
        role = Role.PRODUCER if settings.admin_listen else Role.OPERATOR
        log.info("one token for all", role=role, groups="*")
    for old, new in settings.renamed.items():
        log.warning("setting renamed", setting=old, by=new, value=getattr(settings, new))
    for name in settings.open_kafka_secrets():
        log.warning("secret file open to others", setting=name, path=str(getattr(settings, name)))


async def _reach_kafka(door: Door, groups: Groups, settings: Settings, wait_s: float) -> None:
    """Start the door and read the groups; retry for `wait_s` seconds while Kafka is unavailable.

    Raises:
        KafkaUnavailable: Kafka did not answer in this time, or refuses.
        ConfigurationError: waiting does not help.
    """
    began, waiting = time.monotonic(), False
    backoff = Backoff(wait_s, RECONNECT_S, RECONNECT_MAX_S)
    while True:
        try:
            await door.start()
            await groups.load()
            break
        except KafkaUnavailable as error:
            if error.lasting or wait_s == 0:
                raise
            if backoff.left_s > 0 and not waiting:
                waiting = True
                log.warning(
                    "waiting for kafka", kafka=settings.kafka, seconds=wait_s, why=str(error)
                )
            if not await backoff.pause():
                raise KafkaUnavailable(
                    f"{error}. Waited {wait_s:g} s (wait_for_kafka_s) for Kafka at {settings.kafka}"
                ) from None
    if waiting:
        log.info("kafka answers", seconds=round(time.monotonic() - began, 1))


async def _listen(
    stack: AsyncExitStack,
    app: web.Application,
    settings: Settings,
    tls: ServerTls | None,
    partitions: PartitionManager,
    listening: list[str],
) -> str:
    """Listen until the stack ends, and set the URLs of the partition manager.

    Args:
        listening: receives every URL that the proxy listens at or advertises.

    Returns:
        The URL of the admin address, "" where there is none.
    """
    url = await stack.enter_async_context(serve(app, settings.listen, tls))
    partitions.url = settings.advertise or url
    listening += [url, partitions.url]
    log.info("listening", url=url, advertise=partitions.url)
    if settings.peer_listen:
        peers = serve(make_peer_app(app), settings.peer_listen, tls, public=False)
        peer_url = await stack.enter_async_context(peers)
        partitions.own_peer_url = settings.peer_advertise or peer_url
        listening += [peer_url, partitions.own_peer_url]
    if not settings.admin_listen:
        return ""
    admin = serve(make_admin_app(app), settings.admin_listen, tls, public=False)
    admin_url = await stack.enter_async_context(admin)
    partitions.own_admin_url = _callable(admin_url, partitions.url)
    listening += [admin_url, partitions.own_admin_url]
    return admin_url


def _known_urls(partitions: PartitionManager) -> Iterator[str]:
    """Yield every URL at which the proxies of the group take calls of any kind."""
    for url in partitions.proxies():
        yield from {url, partitions.peer_url(url), partitions.admin_url(url)}


def _callable(admin_url: str, url: str) -> str:
    """Return the admin address as other proxies call it; a wildcard address becomes the host name
    of `url`."""
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
    return ServerTls(files, _log_files)


def _peers_tls(settings: Settings) -> ClientTls:
    """Return the TLS settings of calls to other proxies.

    A proxy shows one certificate as server and as client, so an authority that is trusted for
    clients is trusted for proxies too.
    """
    files = TlsFiles(
        settings.peers_ca_file or settings.tls_client_ca_file,
        settings.tls_cert_file,
        settings.tls_key_file,
        ("peers_ca_file", "tls_cert_file", "tls_key_file"),
        guarded=True,
    )
    return ClientTls(files, _log_files)


def _log_files(files: str, why: str) -> None:
    if why:
        log.warning("tls files not taken", files=files, why=why)
    else:
        log.info("tls files read again", files=files)


def make_checks(
    settings: Settings,
    urls: Callable[[], Iterable[str]],
    brokers: Callable[[], Iterable[tuple[str, int]]] = tuple,
) -> HttpChecks:
    """Return the caller of check URLs.

    Args:
        urls: returns the URLs of this proxy and the others, which no check URL may lead to.
        brokers: returns host and port of each Kafka broker, in addition to `settings.kafka`.
    """
    kafka = parse_servers(settings.kafka)

    def own() -> Iterable[Address]:
        members = (Address(*broker) for broker in brokers())
        return (*kafka, *members, *map(_address, filter(None, urls())))

    values = (getattr(settings, name) for name in type(settings).model_fields)
    files = [value for value in values if isinstance(value, Path)]
    guard = UrlGuard(
        allow=parse_host_rules("check_url_allow", settings.check_url_allow),
        deny=parse_host_rules("check_url_deny", settings.check_url_deny, private=True),
        loopback=settings.loopback_only,
    )
    return HttpChecks(
        guard=guard,
        own=own,
        secrets=GroupSecrets(settings.secrets_dir, settings.secret_env_allow, files),
        limits=HttpLimits(messages_max=settings.messages_per_transaction_max),
    )


@lru_cache(maxsize=256)
def _address(url: str) -> Address:
    parts = urlsplit(url)
    return Address(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
