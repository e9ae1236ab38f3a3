"""`txbroker doctor`: diagnose an installation."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from txbroker.cli.client import ApiClient, client_options, tls_of
from txbroker.cli.contexts import CredentialFiles, target_of
from txbroker.cli.doctor.bundle import known_secrets, pack
from txbroker.cli.doctor.report import (
    DoctorReport,
    DoctorScope,
    as_json,
    as_prometheus,
    examine,
    scope_of,
    summary,
    table,
)
from txbroker.cli.doctor.subject import HttpProxies, Subject, Unavailable
from txbroker.cli.options import FILE, SectionedCommand, env_option
from txbroker.cli.output import has_colours
from txbroker.cli.run import FAILED, usage_errors
from txbroker.cli.setting_options import TOPIC_SETTINGS, setting_options, settings_from
from txbroker.config.addresses import check_url, read_secret
from txbroker.config.settings import Settings
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.tools.examination import KafkaExamination
from txbroker.net.tls import ClientTls

WAIT_S = 300.0
"""Default of `--wait`."""
_PAUSE_S = 1.0


@click.command(
    "doctor",
    cls=SectionedCommand,
    short_help="Diagnose an installation; name a remedy per problem.",
)
@setting_options(TOPIC_SETTINGS)
@env_option(
    "--proxy",
    "Another proxy that must be running, besides --url and its peers; it gets the same token. "
    "Repeatable.",
    param="proxies",
    multiple=True,
    metavar="URL",
)
@click.option(
    "--database",
    metavar="URL",
    help="Check the outbox in this database and its relays; without --url or --proxy only them and "
    "Kafka.",
)
@click.option(
    "--capture",
    type=FILE,
    metavar="FILE",
    help="Check the database of this capture in the same way.",
)
@env_option(
    "--wait",
    f"Repeat until nothing fails, at most for this time; without SECONDS {WAIT_S:g}.",
    param="wait_s",
    type=click.FloatRange(min=0),
    is_flag=False,
    flag_value=WAIT_S,
    metavar="[SECONDS]",
)
@env_option(
    "--bundle",
    "Pack versions, settings, topics, metrics and the results into this file for support, without "
    "secrets and messages.",
    type=FILE,
    metavar="FILE.tar.gz",
)
@env_option(
    "--output",
    "Output format; `prometheus` is for the node exporter's textfile collector.",
    "-o",
    prefix="DOCTOR_",
    type=click.Choice(["table", "json", "prometheus"]),
    default="table",
)
@client_options
def command(
    client: ApiClient,
    config: Path | None,
    proxies: tuple[str, ...],
    database: str | None,
    capture: Path | None,
    wait_s: float | None,
    bundle: Path | None,
    output: str,
    **options: Any,
) -> None:
    """Diagnose Kafka, topics, proxies, groups, transactions and relays.

    Every check shows its finding and, for a problem, a remedy and a page with more information.
    Changes nothing. Reads Kafka with a proxy's settings, and the proxies by --url. Without --kafka
    it takes Kafka's address from the proxies.

    Exit code 0: nothing fails, there may be warnings. 1: a check fails or is unknown.
    """
    settings = settings_from(config, options)
    with usage_errors():
        for url in proxies:
            check_url("--proxy", url)
        named = proxies or target_of(click.get_current_context()).source != "default"
        scope = scope_of(database, capture, proxies=bool(named))
    credentials = _credentials(settings)
    token = _token(credentials)
    anonymous = credentials._replace(token_file=None, client_cert_file=None, client_key_file=None)
    tls = tls_of(credentials), tls_of(anonymous)
    if bundle is not None and bundle.exists():
        raise click.UsageError(f"--bundle {bundle} exists already: name another file")
    report, packed = asyncio.run(
        _run(settings, [client.url, *proxies], token, tls, scope, wait_s or 0.0, bundle)
    )
    _show(report, output)
    if packed:
        click.echo(f"Packed into {bundle}: {', '.join(packed)}.", err=True)
    if not report.healthy:
        click.get_current_context().exit(FAILED)


async def _run(
    settings: Settings,
    urls: Sequence[str],
    token: str,
    tls: tuple[ClientTls, ClientTls],
    scope: DoctorScope,
    wait_s: float,
    bundle: Path | None,
) -> tuple[DoctorReport, list[str]]:
    deadline = time.monotonic() + wait_s
    headers = {"authorization": f"Bearer {token}"} if token else {}
    while True:
        proxies = HttpProxies(urls, headers, *tls)
        settings = await _with_kafka(settings, proxies)
        async with KafkaExamination(_kafka(settings)) as kafka:
            subject = Subject(settings, kafka, proxies, relays=scope.relays)
            try:
                report = await examine(subject, scope.checks)
                left_s = deadline - time.monotonic()
                if report.healthy or left_s <= 0:
                    packed: list[str] = []
                    if bundle is not None:
                        secrets = known_secrets(settings, token)
                        packed = await pack(bundle, subject, report, secrets)
                    return report, packed
            finally:
                await subject.close()
                proxies.close()
        click.echo(f"Waiting for at most {left_s:.0f} s: {summary(report)}", err=True)
        await asyncio.sleep(min(_PAUSE_S, left_s))


async def _with_kafka(settings: Settings, proxies: HttpProxies) -> Settings:
    """Return settings with the proxies' address of Kafka, unless one is given."""
    if "kafka" not in settings.model_fields_set:
        with suppress(Unavailable):
            overview, _ = await proxies.overview()
            if overview.kafka:
                return settings.model_copy(update={"kafka": overview.kafka})
    return settings


def _kafka(settings: Settings) -> KafkaSettings:
    return structs.replace(KafkaSettings.from_configuration(settings), client_id="txbroker-doctor")


def _show(report: DoctorReport, output: str) -> None:
    if output == "json":
        click.echo(as_json(report))
    elif output == "prometheus":
        click.echo("\n".join(as_prometheus(report)))
    else:
        click.echo("\n".join(table(report, colours=has_colours(sys.stdout))))
    click.echo(summary(report), err=True)


def _credentials(settings: Settings) -> CredentialFiles:
    """Return the credentials for the chosen proxy.

    Those of the settings are for the settings' proxies, so never for a context's.
    """
    target = target_of(click.get_current_context())
    if target.context:
        return target.credentials
    own = CredentialFiles(
        settings.admin_token_file or settings.token_file,
        settings.peers_ca_file or settings.tls_client_ca_file,
        settings.tls_cert_file,
        settings.tls_key_file,
    )
    return target.credentials.before(own)


def _token(credentials: CredentialFiles) -> str:
    path = credentials.token_file
    with usage_errors():
        return "" if path is None else read_secret("token_file", path)
