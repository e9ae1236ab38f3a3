"""Runs `txbroker audit run`: one audit, or one of each of several installations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click
from msgspec import structs

from txbroker.cli.audit.run import check_server, names_of, output_folder, started, terms_of
from txbroker.cli.run import CommandFailed, usage_errors
from txbroker.config.settings import Settings
from txbroker.errors import TxbrokerError
from txbroker.spark.launch.failures import in_words
from txbroker.spark.session import BRIEF_MAX, SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.cli.audit.publish import AuditResult
    from txbroker.spark.business import BusinessTable
    from txbroker.spark.schema import Part, RunSummary, Thresholds
    from txbroker.spark.storage.folder import DataFolder

_PART_OPTIONS = ("from_ms", "to_ms", "topics", "groups")


class AuditRequest(NamedTuple):
    """A requested audit.

    Attributes:
        ages_ms: as `Terms` names them.
        mode, part, business, table_format: as in `spark.run.AuditSettings`.
        thresholds: the checks, and from which severity on the command fails.
        out: the folder of the tables; None: below the data folder.
        report: the file of the report.
    """

    ages_ms: dict[str, int]
    mode: Literal["full", "incremental", "part", "rejudged"]
    part: "Part"
    business: "BusinessTable | None"
    thresholds: "Thresholds"
    out: str | None
    table_format: str | None
    report: Path | None

    def of(self, settings: Settings, *, several: bool) -> "AuditRequest":
        """Return the request of one installation, with its folder of tables and its report."""
        out, report = output_folder(settings, self.out), self.report
        if several:
            out = f"{out.rstrip('/')}/{settings.topic_prefix}" if self.out else out
            report = report and report.with_stem(f"{report.stem}-{settings.topic_prefix}")
        return self._replace(out=out, report=report)


def mode_of(options: dict[str, Any]) -> tuple[Any, "Part"]:
    """Remove the options that choose transactions from `options`; return mode and part."""
    from txbroker.spark.schema import Part

    given = {name: options.pop(name) for name in _PART_OPTIONS}
    chosen = {name: value for name, value in given.items() if value}
    full, again = options.pop("full"), options.pop("rejudge")
    part = Part(**chosen)
    if part.from_ms >= part.to_ms:
        raise click.UsageError("the time span is empty: --from has to be before --to")
    modes = {"full": full, "rejudged": again, "part": chosen}
    wanted = [mode for mode, asked in modes.items() if asked]
    if len(wanted) > 1:
        raise click.UsageError(
            "--full, --rejudge, and --from, --to, --topics or --groups exclude one another"
        )
    return (wanted or ["incremental"])[0], part


def installations(settings: Settings, names: Sequence[str]) -> list[Settings]:
    """Return the settings of each installation, with a data folder below the common one.

    `names`: their `topic_prefix`; without any, the settings are those of the only installation.
    """
    if not names:
        return [settings]
    if "topic_prefix" in settings.model_fields_set:
        raise click.UsageError("--installations names the topic prefixes: leave --topic-prefix out")
    folder = settings.data_dir
    changed = [
        {"topic_prefix": name, "data_dir": f"{folder}/{name}"} for name in dict.fromkeys(names)
    ]
    with usage_errors():
        return [Settings(**(settings.model_dump(exclude_unset=True) | each)) for each in changed]


def run_all(
    each: Sequence[Settings], spark: SparkSettings, request: AuditRequest, *, several: bool
) -> Iterator["AuditResult"]:
    """Audit installations one after the other, and yield their results.

    An installation that cannot be audited does not keep the others from it: its error is raised
    after the others' results. `several`: each has a subfolder of `--out`, and a report, with its
    name.
    """
    from txbroker.spark.journal import Journal
    from txbroker.spark.storage.folder import data_folder

    failures: list[str] = []

    @contextmanager
    def noted(settings: Settings) -> Iterator[None]:
        try:
            yield
        except TxbrokerError as error:
            if not several:
                raise
            failures.append(f"installation {settings.topic_prefix}: {error}")

    with ExitStack() as stack:
        accepted: list[tuple[Settings, DataFolder, AuditRequest]] = []
        running, waiting = None, 0
        spark = structs.replace(spark, archives=True)
        requests = [request.of(settings, several=several) for settings in each]
        outs = [str(own.out) for own in requests]
        check_server(spark, *outs)
        stores = [one.data_dir for one in each if isinstance(one.data_dir, str)]
        if stores:
            running = stack.enter_context(started(spark, *stores, *outs))  # reaches URIs
        # All that can be refused before Spark starts.
        for settings, own in zip(each, requests, strict=True):
            with noted(settings):
                folder = data_folder(settings.data_dir, running and running[0])
                stack.enter_context(folder.alone())
                journal = Journal(folder.journal)
                last = journal.last()
                _check(settings, own, journal.series())
                waiting += _backlog(settings, request.mode, last)
                accepted.append((settings, folder, own))
        if accepted and running is None:
            brief = structs.replace(spark, brief=waiting < BRIEF_MAX)
            running = stack.enter_context(started(brief, *outs))
        for settings, folder, own in accepted:
            if several:
                _notice(f"Installation {settings.topic_prefix}:")
            assert running is not None
            session, bar = running
            with noted(settings), in_words(None):
                yield _run(session, bar.stage, settings, folder, own)
    if failures:
        raise CommandFailed("; ".join(failures))


def _check(settings: Settings, request: AuditRequest, series: str) -> None:
    from txbroker.spark.report.report import check_writable
    from txbroker.spark.tables.manifest import check_local

    if request.report is not None:
        check_writable(request.report)
    expected = None if request.mode == "full" else series
    prefix = names_of(settings).prefix
    check_local(str(request.out), prefix, request.table_format, expected)


def _backlog(settings: Settings, mode: str, last: "RunSummary | None") -> int:
    """Return how many half messages a run may have to read. `last`: the run before it."""
    from txbroker.spark.access import access_from

    if mode == "rejudged":
        return BRIEF_MAX  # it reads stored facts, and needs no Kafka
    now = access_from(settings).own_ends(names_of(settings).half)
    cut = None if last is None or mode != "incremental" else last.cut
    reached = () if cut is None else cut.half.ends
    return sum(now.ends) - sum(map(max, zip_longest(now.starts, reached, fillvalue=0)))


def _run(
    session: "SparkSession",
    on_stage: Callable[[str], None],
    settings: Settings,
    folder: "DataFolder",
    request: AuditRequest,
) -> "AuditResult":
    """Audit an installation, publish the result to its proxies, write the report.

    A failure after the audit itself is reported, and does not hide its result.
    """
    from txbroker.cli.audit.publish import AuditResult, publish_run, report_run
    from txbroker.spark.access import access_from
    from txbroker.spark.journal import Journal
    from txbroker.spark.run import AuditSettings, run_audit

    journal, out = Journal(folder.journal), str(request.out)
    audit = AuditSettings(
        out=out,
        data_dir=folder,
        names=names_of(settings),
        terms=terms_of(settings, request.ages_ms),
        mode=request.mode,
        part=request.part,
        business=request.business,
        table_format=request.table_format,
        checks=request.thresholds.checks,
    )
    summary = run_audit(session, access_from(settings), audit, on_stage, _notice)
    result = AuditResult(summary, request.thresholds, journal.acknowledged(summary.now_ms))
    try:
        unpublished = publish_run(session, settings, summary, journal, out)
        result = result._replace(unpublished=unpublished)
        if request.report is not None:
            on_stage("writing the report")
            report_run(session, request.report, summary, journal, settings, out)
    except Exception as error:
        # The run is in the journal, so it counts.
        reason = str(error) if isinstance(error, TxbrokerError) else repr(error)
        click.echo(f"The result stands, but a later step failed: {reason}", err=True)
    return result


def _notice(text: str) -> None:
    click.echo(text, err=True)
