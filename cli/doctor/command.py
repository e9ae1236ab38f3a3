"""`txbroker doctor`: is everything well, and if not, what to do."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from txbroker.cli.client import ApiClient, client_options, tls_of
from txbroker.cli.contexts import CredentialFiles, target_of
from txbroker.cli.doctor.bundle import known_secrets, pack
from txbroker.cli.doctor.checks import CHECKS
from txbroker.cli.doctor.proxies import HttpProxies
from txbroker.cli.doctor.report import as_json, as_prometheus, summary, table
from txbroker.cli.doctor.runner import DoctorReport, examine
from txbroker.cli.doctor.subject import Subject
from txbroker.cli.run import FAILED
from txbroker.cli.setting_options import TOPIC_SETTINGS, setting_options, settings_from
from txbroker.config.addresses import check_url, read_secret
from txbroker.config.settings import Settings
from txbroker.errors import ConfigurationError
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.tools.examination import KafkaExamination
from txbroker.net.tls import ClientTls

WAIT_S = 300.0
"""How long `--wait` waits unless told."""
_PAUSE_S = 1.0


@click.command("doctor", short_help="Find what is not well, and what to do about it.")
@setting_options(TOPIC_SETTINGS)
@click.option(
    "--proxy",
    "proxies",
    multiple=True,
    metavar="URL",
    envvar="TXBROKER_PROXY",
    help="A further proxy that must be there, beside --url and those that it tells of; it gets "
    "the same token. May be given several times. [env: TXBROKER_PROXY]",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    is_flag=False,
    flag_value=WAIT_S,
    metavar="[SECONDS]",
    envvar="TXBROKER_WAIT",
    help=f"Look again and again until nothing fails, at most so long; without SECONDS "
    f"{WAIT_S:g}. [env: TXBROKER_WAIT]",
)
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.tar.gz",
    envvar="TXBROKER_BUNDLE",
    help="Pack versions, settings, topics, metrics and what was found into this file for "
    "support: without secrets and without messages. [env: TXBROKER_BUNDLE]",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "prometheus"]),
    default="table",
    envvar="TXBROKER_DOCTOR_OUTPUT",
    help="How to show it; `prometheus` is for the node exporter's textfile collector. "
    "[env: TXBROKER_DOCTOR_OUTPUT; default: table]",
)
@client_options
def command(
    client: ApiClient,
    config: Path | None,
    proxies: tuple[str, ...],
    wait_s: float | None,
    bundle: Path | None,
    output: str,
    **options: Any,
) -> None:
    """Find what is not well with Kafka, topics, proxies, groups and transactions.

    Every check shows what it found and, where that is not well, what to do and where to read on.
    Nothing is changed. Kafka is asked with the same settings as a proxy's, the proxies by --url.

    Exit code 0: nothing fails, though there may be something to look at. 1: something fails.
    """
    settings = settings_from(config, options)
    for url in proxies:
        _checked(url)
    credentials = _credentials(settings)
    token = _token(credentials)
    nobody = credentials._replace(token_file=None, client_cert_file=None, client_key_file=None)
    tls = tls_of(credentials), tls_of(nobody)
    if bundle is not None and bundle.exists():
        raise click.UsageError(f"--bundle {bundle} is there already")
    report, packed = asyncio.run(
        _run(settings, [client.url, *proxies], token, tls, wait_s or 0.0, bundle)
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
    wait_s: float,
    bundle: Path | None,
) -> tuple[DoctorReport, list[str]]:
    deadline = time.monotonic() + wait_s
    headers = {"authorization": f"Bearer {token}"} if token else {}
    while True:
        async with KafkaExamination(_kafka(settings)) as kafka:
            proxies = HttpProxies(urls, headers, *tls)
            subject = Subject(settings, kafka, proxies)
            try:
                report = await examine(subject, CHECKS)
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
        click.echo(f"Waiting, for {left_s:.0f} s at most: {summary(report)}", err=True)
        await asyncio.sleep(min(_PAUSE_S, left_s))


def _kafka(settings: Settings) -> KafkaSettings:
    return structs.replace(KafkaSettings.from_configuration(settings), client_id="txbroker-doctor")


def _show(report: DoctorReport, output: str) -> None:
    if output == "json":
        click.echo(as_json(report))
    elif output == "prometheus":
        click.echo("\n".join(as_prometheus(report)))
    else:
        colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        click.echo("\n".join(table(report, colours=colours)))
    click.echo(summary(report), err=True)


def _credentials(settings: Settings) -> CredentialFiles:
    """Return the files by which the chosen proxy and we know one another.

    The settings' own are for the proxies of these settings, so never for those of a context.
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
    try:
        return "" if path is None else read_secret("token_file", path)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None


def _checked(url: str) -> None:
    try:
        check_url("--proxy", url)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None
