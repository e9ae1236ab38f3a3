"""Builds the caller of check URLs from the settings of a proxy."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from txbroker.checkers.group_secrets import GroupSecrets
from txbroker.checkers.http import HttpChecks, HttpLimits
from txbroker.checkers.url_guard import UrlGuard
from txbroker.config.addresses import Address, parse_address, parse_host_rules
from txbroker.config.settings import Settings


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
    kafka = [parse_address(server.strip()) for server in settings.kafka.split(",")]

    def own() -> Iterable[Address]:
        members = (Address(*broker) for broker in brokers())
        return (*kafka, *members, *map(_address, filter(None, urls())))

    guard = UrlGuard(
        allow=parse_host_rules("check_url_allow", settings.check_url_allow),
        deny=parse_host_rules("check_url_deny", settings.check_url_deny, private=True),
        loopback=settings.loopback_only,
    )
    return HttpChecks(
        guard=guard,
        own=own,
        secrets=_secrets(settings),
        limits=HttpLimits(messages_max=settings.messages_per_transaction_max),
    )


def _secrets(settings: Settings) -> GroupSecrets:
    values = (getattr(settings, name) for name in type(settings).model_fields)
    own = [value for value in values if isinstance(value, Path)]
    return GroupSecrets(settings.secrets_dir, settings.secret_env_allow, own)


@lru_cache(maxsize=256)
def _address(url: str) -> Address:
    parts = urlsplit(url)
    return Address(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
