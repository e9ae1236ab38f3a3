"""One batch audit from start to end.
A full run reads everything that the topics still hold. An incremental run continues the last one:
it takes over the open transactions and looks up older facts where it needs them. A run of a part
reads only the records that its transactions depend on; another one judges stored facts again. All
of them come to the same verdicts.

A run writes facts, verdicts, and staged rows of the tables; nothing of that counts before its entry
is in the journal. Then the rows are applied to the tables. The next run completes one that died in
between, and removes one that died before.
"""

import contextlib
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from txbroker.errors import ConfigurationError, TxbrokerError
from txbroker.spark.access import AuditKafka
from txbroker.spark.business import BusinessTable, compare
from txbroker.spark.commit import RunNote, commit, note_down, settled, tidy_up
from txbroker.spark.facts.history import (
    CarriedState,
    expired,
    gather,
    leave_state,
    read_carried,
    read_chain,
    secret_for,
    stored,
)
from txbroker.spark.folders import Folders, runs_in
from txbroker.spark.journal import Journal
from txbroker.spark.judge.scope import (
    Scope,
    judge_scope,
    scope_of,
    scope_of_part,
    scope_of_stored,
    targets_to_look_up,
)
from txbroker.spark.report.summary import (
    add_up,
    committed_to_missing,
    missing_topics,
    summary_of,
    with_topics_and_business,
)
from txbroker.spark.schema import (
    Check,
    Extract,
    Part,
    RunSummary,
    SnapshotBounds,
    Terms,
    TopicNames,
)
from txbroker.spark.session import cost_from_now, spread
from txbroker.spark.storage.folder import DataFolder, KeptFile, data_folder
from txbroker.spark.tables.current import (
    counting_rows,
    current_verdicts,
    earlier_rows,
    rows_of_topics,
)
from txbroker.spark.tables.judged import JudgedRun
from txbroker.spark.tables.store import TableStore, open_store


class AuditSettings(Struct, frozen=True):
    """Topics, terms and output of an audit.

    Attributes:
        out: folder of the tables and of facts: a path, or a URI that Hadoop knows.
        data_dir: the folder of the journal, local or opened by the caller.
        names: the installation's topics.
        terms: the terms of the judgement; `now_ms` 0: by the brokers' clocks.
        mode: `incremental` continues the last run, if there is one. `part` judges some transactions
            only, `rejudged` those of all runs since the last full one again, by their facts; later
            runs continue neither.
        part: the transactions that are judged in mode `part`.
        business: rows to compare with.
        checks: limits to compare the run with.
        table_format: of the tables; None: that of those in `out`, else Parquet.
    """

    out: str
    data_dir: Path | DataFolder
    names: TopicNames
    terms: Terms = Terms(0)
    mode: Literal["full", "incremental", "part", "rejudged"] = "incremental"
    part: Part = Part()
    business: BusinessTable | None = None
    checks: tuple[Check, ...] = ()
    table_format: str | None = None

    @property
    def folder(self) -> DataFolder:
        """The folder of the journal."""
        return data_folder(self.data_dir)

    @property
    def journal(self) -> KeptFile:
        """The journal's file."""
        return self.folder.journal


def run_audit(
    spark: SparkSession,
    access: AuditKafka,
    settings: AuditSettings,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_notice: Callable[[str], None] = lambda notice: None,
) -> RunSummary:
    """Audit an installation once and return the summary, which is in the journal then.

    The caller holds the data folder's lock, `DataFolder.alone`.

    Args:
        access: the Kafka cluster that Spark reads.
        settings: the topics, the terms and the output.
        on_stage: called with a description of each stage.
        on_notice: called with sentences for the user.

    Raises:
        ConfigurationError: something is missing or does not fit; the message names the next step.
        AuditError: the topics cannot be read, or the last run cannot be continued.
    """
    journal = Journal(settings.journal)
    died = tidy_up(spark, settings.folder, journal)
    if died:
        on_notice(f"Removed the incomplete output of run {died}.")
    audit = _Audit(spark, access, settings, journal, on_stage, on_notice)
    try:
        summary = audit.run()
    except BaseException:
        with contextlib.suppress(Exception):  # the next run tries again
            tidy_up(spark, settings.folder, journal)
        raise
    try:
        tidy_up(spark, settings.folder, journal)
    except TxbrokerError as error:
        on_notice(f"The tables are not up to date; the next run tries again: {error}")
    return summary


class _Audit:
    def __init__(
        self,
        spark: SparkSession,
        access: AuditKafka,
        settings: AuditSettings,
        journal: Journal,
        on_stage: Callable[[str], None],
        on_notice: Callable[[str], None],
    ) -> None:
        self._spark, self._access, self._settings = spark, access, settings
        self._journal, self._on_stage, self._on_notice = journal, on_stage, on_notice
        self._folders = Folders(settings.out)
        self._cached: list[DataFrame] = []
        self._cost = cost_from_now(spark)

    def run(self) -> RunSummary:
        self._began_s = time.monotonic()
        settings = self._settings
        self._store = self._opened()
        self._last, newest = self._journal.last(), self._journal.newest()
        self._started_ms = round(time.time() * 1000)
        if newest is not None:
            # Names sort in order of the runs.
            self._started_ms = max(self._started_ms, newest.started_ms + 1)
        # A part changes what the next run finds in the tables, and a full run may find others.
        continues = settings.mode == "incremental" and self._last == newest
        self._known = self._last if continues else None
        self._run = run_name(self._started_ms)
        if settings.mode == "rejudged" and newest is not None and newest.mode == "part":
            raise ConfigurationError(
                "the newest run judged a part, which the stored facts do not hold: run "
                "`txbroker audit run` before --rejudge"
            )
        before = self._before()
        self._secret = secret_for(settings.folder, before)
        # Ages follow the brokers' clocks, not this machine's; only the run's name does not.
        now_ms = settings.terms.now_ms or self._now_ms()
        self._terms = structs.replace(settings.terms, now_ms=now_ms)
        self._check_clock()
        stale = (self._folders.verdicts(self._run), *self._stale(before))
        note_down(settings.folder, RunNote(self._run, settings.out, stale))
        try:
            return self._audit(before)
        finally:
            for table in self._cached:
                table.unpersist()

    def _opened(self) -> TableStore:
        settings = self._settings
        series = self._journal.series()
        expected = None if settings.mode == "full" else series
        store = open_store(
            self._spark, settings.out, settings.names.prefix, settings.table_format, expected
        )
        store.belong_to(series)
        return store

    def _before(self) -> CarriedState | None:
        """Return the state that this run continues, or judges again; None: it reads the topics from
        their beginnings."""
        last, again = self._last, self._settings.mode == "rejudged"
        if self._settings.mode in ("full", "part"):
            return None
        before = None
        if last is not None:
            names = self._settings.names
            before = read_carried(self._spark, self._folders, last.run, names)
        if again and before is None:
            raise ConfigurationError(
                "there is no run whose facts can be judged again: run `txbroker audit run` first"
            )
        if last is None:
            return None
        if before is None:
            self._on_notice(
                "An earlier version of txbroker wrote the state that the last run left: this run "
                "reads all topics from their beginnings."
            )
            return None
        check_window(last.terms, self._settings.terms)
        return before

    def _now_ms(self) -> int:
        if self._settings.mode == "rejudged" and self._last is not None and self._last.terms:
            return self._last.terms.now_ms  # the facts show the topics as they were then
        return self._access.now_ms(self._settings.names)

    def _check_clock(self) -> None:
        """Report brokers' clocks that went back since the last run."""
        was = self._last.terms if self._last is not None else None
        if was is not None and was.now_ms > self._terms.now_ms:
            back_s = (was.now_ms - self._terms.now_ms) / 1000
            self._on_notice(
                f"The brokers' clocks are {back_s:g} s earlier than at the last run: this run "
                "finds late, lost and overdue transactions that much later. Check these clocks."
            )

    def _stale(self, before: CarriedState | None) -> tuple[str, ...]:
        """Return the folders that nothing needs once this run counts."""
        if not self._continues:
            return (self._folders.facts(self._run),)
        if self._store.series not in (None, self._journal.series()):
            # It takes the tables over, and the folders of all that no later run continues.
            kinds = (self._folders.facts, self._folders.carry, self._folders.verdicts)
            return tuple(kind(run) for kind in kinds for run in runs_in(self._spark, kind("")))
        if self._last is None:
            return ()
        last = self._last.run
        if before is not None:
            runs = expired(before.chain.runs, self._store.expired_ms)
        else:
            chain = read_chain(self._spark, self._folders, last)
            if chain is None:
                return ()  # it is in another output folder
            runs = chain.runs
        there = runs_in(self._spark, self._folders.facts(""))
        facts = (self._folders.facts(run.run) for run in runs if run.run in there)
        return (self._folders.carry(last), *facts)

    @property
    def _continues(self) -> bool:
        """Whether the next run continues this one."""
        return self._settings.mode in ("full", "incremental")

    def _audit(self, before: CarriedState | None) -> RunSummary:
        """Read the topics, judge, and write verdicts, tables and the state for the next run."""
        settings = self._settings
        self._on_stage("reading the topics")
        if settings.mode == "rejudged" and before is not None:
            staged = stored(self._spark, self._folders, before.chain)
        else:
            staged = gather(
                self._spark,
                self._access,
                self._folders,
                self._run,
                self._secret,
                settings.names,
                self._terms,
                before,
                self._last.cut if self._last is not None else None,
                settings.part if settings.mode == "part" else None,
            )
        rows = staged.rows + (0 if before is None else sum(before.chain.rows.values()))
        with spread(self._spark, rows, self._journal.transactions()):
            return self._look(staged, before)

    def _scope(self, staged: Extract, before: CarriedState | None) -> Scope:
        known = self._rows_to_look_up(staged.cut, before)
        if self._settings.mode == "part":
            return scope_of_part(staged, self._terms, self._settings.part, known)
        if before is not None:
            self._on_stage("looking up earlier runs")
        if self._settings.mode == "rejudged" and before is not None:
            return scope_of_stored(self._spark, self._folders, staged, before, known)
        return scope_of(self._spark, self._folders, staged, before, known, self._kept)

    def _rows_to_look_up(
        self, cut: SnapshotBounds, before: CarriedState | None
    ) -> DataFrame | None:
        """Return the rows of transactions with messages for targets that were deleted, created or
        truncated since; None where there are none."""
        again = self._settings.mode == "rejudged"
        topics = targets_to_look_up(None if again else before, cut)
        if not topics or not self._store.exists:
            return None
        with settled(self._settings.folder, self._store, self._journal):
            self._store = self._opened()
            counting = counting_rows(self._store, self._run, cut.half, without_half=True)
            rows = self._kept(rows_of_topics(counting, sorted(topics)))
            return rows if rows.count() else None

    def _look(self, staged: Extract, before: CarriedState | None) -> RunSummary:
        scope, cut = self._scope(staged, before), staged.cut
        self._on_stage("judging")
        path = self._folders.verdicts(self._run)
        written = judge_scope(self._spark, scope, cut, self._terms, path)
        self._on_stage("summing up")
        tally = add_up(written, self._terms.now_ms)
        mode = "full" if before is None and self._continues else self._settings.mode
        summary = structs.replace(summary_of(self._run, mode, staged, tally), part=scope.part)
        horizon = scope.saved_horizon(self._terms.now_ms)
        if self._continues:
            self._on_stage("writing the state for the next run")
            leave_state(
                self._spark,
                self._folders,
                self._run,
                self._secret,
                self._settings.names,
                self._terms,
                staged,
                before,
                scope.facts,
                horizon,
                written,
                tally.carried,
                tally.carried_ms,
            )
        # From the first read of the tables on, so that none of their files is removed meanwhile.
        with settled(self._settings.folder, self._store, self._journal):
            self._store = self._opened()  # expiry may have removed rows since the run began
            chain = self._run if before is None else before.chain.runs[0].run
            current = partial(self._current, written, cut)
            missing = self._missing(partial(current, cut.half.since), cut)
            unknown_to_ms = self._unknown_to_ms(horizon.half_begin_ms, len(cut.half.ends))
            business, compared = self._compared(partial(current, chain), unknown_to_ms)
            summary = with_topics_and_business(summary, missing, business, compared)
            self._on_stage("writing the tables")
            # A run of a part may have written rows of any transaction that this one has judged.
            alone = mode == "incremental" and self._known is not None and not self._known.reopened
            again = scope.judged_again if alone else written.select("id")
            judged = JudgedRun(
                summary=summary,
                names=self._settings.names,
                now_ms=self._terms.now_ms,
                verdicts=written,
                op=scope.facts.op,
                earlier=earlier_rows(self._store, again, self._kept),
                keep=self._kept,
                before=self._known,
                last=self._last,
                broken=staged.broken,
                missing=missing,
                business=business,
                groups=self._settings.business.groups if self._settings.business else (),
                unknown_to_ms=unknown_to_ms,
                acknowledged=self._journal.acknowledged(),
                checks=self._settings.checks,
                days=tally.days,
                checked=self._may_be_checked(staged, before, scope),
                first=not self._store.exists,
            )
            return commit(self._journal, self._store, judged, self._ended)

    def _may_be_checked(self, staged: Extract, before: CarriedState | None, scope: Scope) -> bool:
        """Return whether there may be check-backs among the facts that were judged."""
        if staged.read["op"].checks or self._settings.mode == "rejudged":
            return True
        carried = before is not None and bool(before.chain.rows.get("op"))
        return carried or scope.judged_again is not None

    def _current(self, written: DataFrame, cut: SnapshotBounds, since: str) -> DataFrame:
        """Return the valid verdict of each transaction; of a part, of each that it judged.
        `since`: as in `counting_rows`."""
        rows = counting_rows(self._store, since, cut.half)
        return current_verdicts(rows, written, whole=self._settings.mode != "part")

    def _ended(self, summary: RunSummary) -> RunSummary:
        took_s = time.monotonic() - self._began_s
        return structs.replace(
            summary,
            started_ms=self._started_ms,
            took_s=took_s,
            terms=self._terms,
            cost=self._cost.so_far(),
        )

    def _kept(
        self, table: DataFrame, where: StorageLevel = StorageLevel.MEMORY_AND_DISK_DESER
    ) -> DataFrame:
        """Cache a table until the end of the run, in memory by default."""
        self._cached.append(table.persist(where))
        return table

    def _missing(self, current: Callable[[], DataFrame], cut: SnapshotBounds) -> DataFrame | None:
        """Return the transactions committed to missing topics; None where no topic is missing.

        `current`: returns the valid verdict of each transaction.
        """
        if not missing_topics(cut):
            return None
        op = self._settings.names.op
        return self._kept(committed_to_missing(current(), op, cut, self._terms))

    def _unknown_to_ms(self, begins_ms: dict[int, int], partitions: int) -> dict[int, int]:
        """Return the last time in ids of transactions that retention or expiry may have removed, by
        half partition. `begins_ms`: append times of the first half messages kept."""
        expired_ms = self._store.expired_ms
        known_ms = {p: max(begins_ms.get(p, 0), expired_ms) for p in range(partitions)}
        # A half message is at most one dedup window away from its id's time.
        return {p: ms + self._terms.dedup_window_ms for p, ms in known_ms.items() if ms}

    def _compared(
        self, current: Callable[[], DataFrame], unknown_to_ms: dict[int, int]
    ) -> tuple[DataFrame | None, dict[str, int]]:
        """Return the findings of the comparison with the business, and its counts."""
        business = self._settings.business
        if business is None:
            return None, {}
        self._on_stage("comparing with the business")
        return compare(
            self._spark,
            current(),
            business,
            self._terms,
            keep=self._kept,
            unknown_to_ms=unknown_to_ms,
        )


# --- checks before a run --------------------------------------------------------------------


def run_name(started_ms: int) -> str:
    """Return a unique, time-sortable run name."""
    started = datetime.fromtimestamp(started_ms / 1000, UTC)
    return f"{started:%Y%m%dT%H%M%S}{started_ms % 1000:03d}Z-{secrets.token_hex(2)}"


def check_window(was: Terms | None, now: Terms) -> None:
    """Check that the last run judged by the same dedup window."""
    if was is not None and was.dedup_window_ms != now.dedup_window_ms:
        raise ConfigurationError(
            f"the last run judged by a dedup window of {was.dedup_window_ms / 1000:g} s, not "
            f"{now.dedup_window_ms / 1000:g} s: dedup_window_s must be that of the proxies; if "
            "theirs was changed, run a full audit (--full)"
        )
