"""One batch audit from start to end.
A full run reads everything that the topics still hold. An incremental run continues the last one:
it takes over the open transactions and looks up older facts where it needs them. Both come to the
same verdicts. A run counts once its entry is in the journal, which is written last.

A data folder admits one audit at a time. Before a run writes anything it stores a note of its
folders, so that the next run removes them if this one dies.
"""

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct, structs
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from txbroker.errors import ConfigurationError
from txbroker.spark.access import AuditKafka
from txbroker.spark.business import FINDINGS, BusinessTable, compare
from txbroker.spark.facts.extract import Extract, extract
from txbroker.spark.facts.history import (
    CarriedState,
    Chain,
    EarlierFacts,
    PastRun,
    RemainingRuns,
    TableCount,
    counted,
    keys_in_window,
    left_of,
    read_carried,
    times_of,
    write_carried,
)
from txbroker.spark.folders import (
    Folders,
    current_verdicts,
    read_verdicts,
    remove,
    runs_in,
    write_verdicts,
)
from txbroker.spark.journal import JOURNAL_FILE, Journal
from txbroker.spark.judge.group import release, verdicts
from txbroker.spark.judge.horizon import (
    SavedHorizon,
    gaps_between,
    horizon_of,
    parked_from_ms,
    with_gaps,
    without_removed,
)
from txbroker.spark.judge.rows import Horizon, JudgeTerms, kept_from_ms
from txbroker.spark.report.summary import (
    add_up,
    business_examples,
    committed_to_missing,
    missing_topics,
    summary_of,
)
from txbroker.spark.schema import Facts, RunSummary, SnapshotBounds, Terms, TopicNames
from txbroker.spark.session import spread

_DAY_MS = 86_400_000


class AuditSettings(Struct, frozen=True):
    """Topics, terms and output of an audit.

    Attributes:
        out: folder of Parquet files: a path, or a URI that Hadoop knows.
        data_dir: local folder of the journal.
        names: the installation's topics.
        terms: the terms of the judgement; `now_ms` 0: by the brokers' clocks.
        mode: `incremental` continues the last run, if there is one.
        business: rows to compare with.
    """

    out: str
    data_dir: Path
    names: TopicNames
    terms: Terms = Terms(0)
    mode: Literal["full", "incremental"] = "incremental"
    business: BusinessTable | None = None

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.data_dir / JOURNAL_FILE


def run_audit(
    spark: SparkSession,
    access: AuditKafka,
    settings: AuditSettings,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> RunSummary:
    """Audit an installation once and return the summary, which is in the journal then.

    Args:
        access: the Kafka cluster that Spark reads.
        settings: the topics, the terms and the output.
        on_stage: called with a description of each stage.

    Raises:
        ConfigurationError: something is missing or does not fit; the message names the next step.
        AuditError: the topics cannot be read, or the last run cannot be continued.
    """
    with alone(settings.data_dir):
        journal = Journal(settings.journal)
        died = tidy_up(spark, settings.data_dir, journal)
        if died:
            on_stage(f"removed the incomplete output of run {died}")
        try:
            summary = _Audit(spark, access, settings, on_stage, journal).run()
        except BaseException:
            with contextlib.suppress(Exception):  # the next run tries again
                tidy_up(spark, settings.data_dir, journal)
            raise
        try:
            tidy_up(spark, settings.data_dir, journal)
        except ConfigurationError as error:
            # The run counts nevertheless; the next one removes the files.
            on_stage(f"obsolete files could not be removed; the next run tries again: {error}")
        return summary


class _Judging(NamedTuple):
    """Input of a run's verdicts."""

    facts: Facts
    horizon: Horizon
    context: DataFrame | None
    """Transactions that others are compared with; this run does not judge them."""
    removed_ms: int | None = None
    """Facts of earlier runs with ids up to this time may have been deleted."""


class _Audit:
    def __init__(
        self,
        spark: SparkSession,
        access: AuditKafka,
        settings: AuditSettings,
        on_stage: Callable[[str], None],
        journal: Journal,
    ) -> None:
        self._spark, self._access, self._settings = spark, access, settings
        self._on_stage, self._journal = on_stage, journal
        self._folders = Folders(settings.out)
        self._cached: list[DataFrame] = []

    def run(self) -> RunSummary:
        began_s = time.monotonic()
        last = self._journal.last()
        started_ms = round(time.time() * 1000)
        if last is not None:
            started_ms = max(started_ms, last.started_ms + 1)  # names sort in order of the runs
        self._run = run_name(started_ms)
        before = None
        if last is not None and self._settings.mode == "incremental":
            before = read_carried(self._spark, self._folders, last.run)
            check_goes_on(before.chain, self._settings.names)
            check_window(last.terms, self._settings.terms)
        self._last_cut = None if last is None else last.cut
        # Ages follow the brokers' clocks, not this machine's; only the run's name does not.
        now_ms = self._settings.terms.now_ms or self._access.now_ms(self._settings.names)
        self._terms = structs.replace(self._settings.terms, now_ms=now_ms)
        stale = self._stale(last)
        note_down(self._settings.data_dir, RunNote(self._run, self._settings.out, stale))
        try:
            summary = self._audit(before)
        finally:
            for table in self._cached:
                table.unpersist()
        took_s = time.monotonic() - began_s
        summary = structs.replace(summary, started_ms=started_ms, took_s=took_s, terms=self._terms)
        self._journal.add(summary)
        return summary

    def _stale(self, last: RunSummary | None) -> tuple[str, ...]:
        if last is None:
            return ()
        stale = (self._folders.carry(last.run),)
        if self._settings.mode == "incremental":
            return stale
        try:
            chain = read_carried(self._spark, self._folders, last.run).chain
        except ConfigurationError:
            return ()  # it is in another output folder
        return stale + tuple(self._folders.facts(run.run) for run in chain.runs)

    def _audit(self, before: CarriedState | None) -> RunSummary:
        self._on_stage("reading the topics")
        staged = extract(
            self._spark,
            self._access,
            self._settings.names,
            self._terms,
            self._folders.facts(self._run),
            None if before is None else before.chain.cut,
            None if before is None else before.keys,
            self._last_cut,
        )
        read = counted(staged.facts)
        rows = sum(table.rows for table in read.values())
        if before is not None:
            rows += len(read) * before.chain.carried
        with spread(self._spark, rows):
            return self._look(staged, read, before)

    def _look(
        self, staged: Extract, read: Mapping[str, TableCount], before: CarriedState | None
    ) -> RunSummary:
        """Judge the facts, and write the verdicts and the state for the next run."""
        judging = self._to_judge(staged, before)
        self._on_stage("judging")
        times = times_of(read, staged.cut.half_clock_ms, self._terms)
        days = 1 if times is None else (times.last_ms - times.first_ms) // _DAY_MS + 1
        self._judge(staged.cut, judging, days)
        written = read_verdicts(self._spark, self._settings.out, (self._run,))
        self._on_stage("summing up")
        tally = add_up(written, self._terms.now_ms)
        self._on_stage("writing the state for the next run")
        runs = () if before is None else before.chain.runs
        first_ms, last_ms = times or (None, None)
        this = PastRun(self._run, first_ms, last_ms, staged.cut.op.ends)
        horizon = SavedHorizon.of(judging.horizon, self._terms.now_ms)
        keyed = bool(read["half"].keyed) or (before is not None and before.chain.keys)
        chain = Chain(
            self._settings.names, staged.cut, horizon, (*runs, this), tally.carried, keyed
        )
        known = None if before is None else before.keys
        window_ms = self._terms.dedup_window_ms
        keys = keys_in_window(staged.facts.half, known, chain.cut.half_clock_ms, window_ms)
        write_carried(self._spark, self._folders, self._run, chain, judging.facts, written, keys)
        mode = "full" if before is None else "incremental"
        summary = summary_of(self._run, mode, staged, read, tally)
        return self._compared(self._with_missing(summary, chain), chain)

    def _to_judge(self, staged: Extract, before: CarriedState | None) -> _Judging:
        """Add the facts of earlier runs that are judged along with the new ones."""
        if before is None:
            return _Judging(staged.facts, horizon_of(staged.facts, staged.cut), None)
        new, cut = staged.facts, staged.cut
        self._on_stage("looking up earlier runs")
        left = left_of(before.chain.runs, self._there(self._folders.facts))
        history = EarlierFacts(self._spark, self._folders, left.runs)
        horizon = before.chain.horizon.read()
        gaps = gaps_between(before.chain.cut, cut)
        if gaps:
            # Markers that this run has not read are older than all that it has read.
            decided_ms = max(before.chain.cut.op_clock_ms, default=-1)
            horizon = with_gaps(horizon, horizon_of(new, cut, decided_ms), gaps)
        last_ms = max((*before.chain.cut.op_clock_ms, *before.chain.cut.half_clock_ms), default=0)
        horizon = horizon._replace(parked_from_ms=parked_from_ms(new.parked, cut, last_ms))
        old, judged = before.facts, before.ids
        strangers = history.strangers(new, before.ids)
        if strangers is not None:
            strangers = self._kept(strangers)
            judged = judged.union(strangers.select("id"))
            known = history.facts(strangers)
            old = old if known is None else old | Facts(*map(self._kept, known))
        near = history.neighbours(old, new | old)
        if near is None:
            return _Judging(new | old, horizon, None, left.removed_ms)
        near = self._kept(near.join(judged, "id", "left_anti"))
        known = history.facts(near)
        facts = new | old if known is None else new | old | known
        return _Judging(facts, horizon, near, left.removed_ms)

    def _there(self, folder: Callable[[str], str]) -> frozenset[str]:
        return runs_in(self._spark, folder(self._run))

    def _kept(
        self, table: DataFrame, where: StorageLevel = StorageLevel.MEMORY_AND_DISK_DESER
    ) -> DataFrame:
        """Cache a table until the end of the run, in memory by default."""
        self._cached.append(table.persist(where))
        return table

    def _judge(self, cut: SnapshotBounds, judging: _Judging, days: int) -> None:
        partitions = len(cut.half.ends)
        horizon = without_removed(judging.horizon, judging.removed_ms, partitions)
        # For this run only: such a transaction may have ended by the next one.
        horizon = horizon._replace(
            open=_open(cut),
            hidden=_hidden(cut),
            kept_from_ms=_kept_from_ms(cut),
            unread=frozenset(target.topic for target in cut.targets if target.unread),
        )
        try:
            terms = JudgeTerms(**structs.asdict(self._terms))
            rows = verdicts(self._spark, judging.facts, terms, horizon)
            if judging.context is not None:
                rows = rows.join(judging.context.select("id"), "id", "left_anti")
            write_verdicts(rows, self._folders, self._run, days)
        finally:
            release(self._spark)

    def _with_missing(self, summary: RunSummary, chain: Chain) -> RunSummary:
        if not missing_topics(chain.cut):
            return summary
        missing = committed_to_missing(self._current_verdicts(chain)[0], chain.cut, self._terms)
        if not missing.transactions:
            return summary
        return structs.replace(
            summary,
            drift={**summary.drift, "target_missing": missing.transactions},
            missing_targets=missing.topics,
            examples=(*summary.examples, *missing.examples),
        )

    def _current_verdicts(self, chain: Chain) -> tuple[DataFrame, RemainingRuns]:
        """Return the valid verdict of each transaction of the chain, and the runs that remain."""
        left = left_of(chain.runs, self._there(self._folders.verdicts))
        runs = [run.run for run in left.runs]
        return current_verdicts(self._spark, self._settings.out, runs), left

    def _compared(self, summary: RunSummary, chain: Chain) -> RunSummary:
        business = self._settings.business
        if business is None:
            return summary
        self._on_stage("comparing with the business")
        current, left = self._current_verdicts(chain)
        findings, counts = compare(
            self._spark,
            current,
            business,
            self._terms,
            keep=self._kept,
            known_from_ms=max(*chain.horizon.half_begin_ms.values(), left.removed_ms or 0, 0),
            half_partitions=len(chain.cut.half.ends),
        )
        findings.write.parquet(self._folders.business(self._run))
        drift = {kind: counts[kind] for kind in FINDINGS if counts.get(kind)}
        written = self._spark.read.schema("id string, kind string").parquet(
            self._folders.business(self._run)
        )
        return structs.replace(
            summary,
            drift={**summary.drift, **drift},
            business=counts,
            examples=(*summary.examples, *business_examples(written, drift)),
        )


# --- checks before a run --------------------------------------------------------------------


def run_name(started_ms: int) -> str:
    """Return a unique, time-sortable run name."""
    started = datetime.fromtimestamp(started_ms / 1000, UTC)
    return f"{started:%Y%m%dT%H%M%S}{started_ms % 1000:03d}Z-{secrets.token_hex(2)}"


def check_goes_on(chain: Chain, names: TopicNames) -> None:
    """Check that the last run audited the same installation."""
    for was, now in ((chain.names.half, names.half), (chain.names.op, names.op)):
        if was != now:
            raise ConfigurationError(
                f"the last run with this data folder audited {was}, not {now}: name a separate "
                "--data-dir for each installation"
            )


def _kept_from_ms(cut: SnapshotBounds) -> dict[str, int]:
    return {
        target.topic: kept_from_ms(cut.asked_ms, target.kept_ms)
        for target in cut.targets
        if target.kept_ms
    }


def _open(cut: SnapshotBounds) -> frozenset[tuple[str, int]]:
    return frozenset((target.topic, p) for target in cut.targets for p in target.open)


def _hidden(cut: SnapshotBounds) -> frozenset[tuple[str, int]]:
    """Return those that one transaction has held open during the whole run."""
    return frozenset((topic, p) for topic, p in _open(cut) if f"{topic}-{p}" in cut.held)


def check_window(was: Terms | None, now: Terms) -> None:
    """Check that the last run judged by the same dedup window."""
    if was is not None and was.dedup_window_ms != now.dedup_window_ms:
        raise ConfigurationError(
            f"the last run judged by a dedup window of {was.dedup_window_ms / 1000:g} s, not "
            f"{now.dedup_window_ms / 1000:g} s: dedup_window_s must be that of the proxies; if "
            "theirs was changed, run a full audit (--full)"
        )


# --- what a run ends with ----------------------------------------------------------------------


_LOCK, _NOTE = "audit.lock", "audit.running"


class RunNote(Struct, frozen=True):
    """The name and output folder of a run, and folders to remove once it is in the journal."""

    run: str
    out: str
    stale: tuple[str, ...] = ()


@contextlib.contextmanager
def alone(data_dir: Path) -> Iterator[None]:
    """Lock a data folder during the block; refuse one that another audit holds."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(data_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigurationError(f"the data folder {data_dir} cannot be used: {error}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            by = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigurationError(
                f"another audit (process {by}) is running on {data_dir}: wait for its end, or "
                "name another --data-dir"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)  # releases the lock, as the death of this process would


def note_down(data_dir: Path, note: RunNote) -> None:
    """Store the folders that a run will write or remove, in place of any earlier note."""
    path = data_dir / _NOTE
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(note))
    fresh.replace(path)


def tidy_up(spark: SparkSession, data_dir: Path, journal: Journal) -> str:
    """Finish the cleanup of the last run; return its name if it died, else an empty text.
    A run that is not in the journal loses its folders; one that is loses the folders it made
    obsolete."""
    path = data_dir / _NOTE
    try:
        note = msgspec.json.decode(path.read_bytes(), type=RunNote)
    except FileNotFoundError:
        return ""
    except msgspec.MsgspecError:
        path.unlink()  # it died before it wrote anything
        return ""
    counts = journal.get(note.run) is not None
    for folder in note.stale if counts else Folders(note.out).all_of(note.run):
        remove(spark, folder)
    path.unlink()
    return "" if counts else note.run
