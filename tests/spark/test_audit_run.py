"""What a batch run is made of: its lock, its files, what it leaves over, what it says."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.table_runs import verdict
from txbroker.errors import ConfigurationError
from txbroker.spark.commit import RunNote, note_down, tidy_up
from txbroker.spark.facts.history import (
    PastRun,
    RemainingRuns,
    joined,
    left_of,
    times_of,
)
from txbroker.spark.folders import Folders, runs_in
from txbroker.spark.journal import Journal
from txbroker.spark.judge.horizon import (
    RetentionGaps,
    SavedHorizon,
    gaps_between,
    with_gaps,
    without_removed,
)
from txbroker.spark.judge.rows import ALWAYS, Horizon
from txbroker.spark.report.summary import AGE_BOUNDS_MS, EXAMPLES_A_KIND, add_up
from txbroker.spark.schema import (
    VERDICT,
    RunSummary,
    SnapshotBounds,
    TableCount,
    Terms,
    TimeSpan,
    TopicRead,
)
from txbroker.spark.storage.folder import data_folder
from txbroker.spark.storage.local import LocalStorage
from txbroker.spark.tables.current import counting_rows, current_verdicts
from txbroker.spark.tables.layout import TRANSACTIONS
from txbroker.spark.tables.store import open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOW_MS = 1_700_000_000_000


# --- one at a time -----------------------------------------------------------------------------


def test_second_audit_of_a_data_folder_names_the_holder(tmp_path: Path) -> None:
    code = (
        "import sys; from txbroker.spark.storage.folder import data_folder\n"
        f"with data_folder({str(tmp_path)!r}).alone(): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigurationError, match=rf"process {other.pid}\) is running"),
            data_folder(tmp_path).alone(),
        ):
            pass
        other.kill()
    with data_folder(tmp_path).alone():
        assert (tmp_path / "audit.lock").read_text().strip() != str(other.pid)


def test_data_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        data_folder(tmp_path / "data").alone().__enter__()


def summary(run: str, **fields: Any) -> RunSummary:
    return RunSummary(run, "full", NOW_MS, 1.0, None, {}, 0, {}, {}, **fields)


def test_output_of_dead_run_is_removed_and_the_rest_stays(
    spark: SparkSession, tmp_path: Path
) -> None:
    out, journal = str(tmp_path / "out"), Journal(tmp_path / "audit.db")
    for folder in (*Folders(out).all_of("dead"), *Folders(out).all_of("old")):
        LocalStorage().write(f"{folder}/part", b"1")
    note_down(data_folder(tmp_path), RunNote("dead", out, (Folders(out).carry("old"),)))
    assert tidy_up(spark, data_folder(tmp_path), journal) == "dead"
    assert not any(map(LocalStorage().exists, Folders(out).all_of("dead")))
    assert all(map(LocalStorage().exists, Folders(out).all_of("old")))
    assert tidy_up(spark, data_folder(tmp_path), journal) == ""


def test_counted_run_that_died_before_cleanup_is_cleaned_up(
    spark: SparkSession, tmp_path: Path
) -> None:
    out, journal = str(tmp_path / "out"), Journal(tmp_path / "audit.db")
    journal.add(summary("new"))
    for folder in (*Folders(out).all_of("new"), *Folders(out).all_of("old")):
        LocalStorage().write(f"{folder}/part", b"1")
    note_down(data_folder(tmp_path), RunNote("new", out, (Folders(out).carry("old"),)))
    assert tidy_up(spark, data_folder(tmp_path), journal) == ""
    assert all(map(LocalStorage().exists, Folders(out).all_of("new")))
    assert LocalStorage().exists(Folders(out).facts("old"))
    assert not LocalStorage().exists(Folders(out).carry("old"))


def test_a_note_that_was_cut_off_is_no_obstacle(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "audit.running").write_bytes(b'{"run": "x')
    assert tidy_up(spark, data_folder(tmp_path), Journal(tmp_path / "audit.db")) == ""
    assert not (tmp_path / "audit.running").exists()


# --- files -------------------------------------------------------------------------------------


def test_runs_whose_files_are_there_are_listed(spark: SparkSession, tmp_path: Path) -> None:
    folders = Folders(f"{tmp_path}/a b")
    assert runs_in(spark, folders.facts("1")) == frozenset()
    for path in (folders.facts("1"), folders.facts("2"), folders.verdicts("3")):
        LocalStorage().write(f"{path}/part", b"1")
    assert runs_in(spark, folders.facts("3")) == {"1", "2"}


def table(spark: SparkSession, *rows: dict[str, Any]) -> DataFrame:
    return spark.createDataFrame(list(rows), VERDICT)


def test_newest_verdict_counts_unless_it_is_gone(spark: SparkSession, tmp_path: Path) -> None:
    store = open_store(spark, str(tmp_path / "out"), "shop")
    earlier = {"a": "gone", "b": "settled", "c": "settled", "d": "settled"}
    earlier |= {"old": "settled", "kept": "settled"}
    made = [
        {"id": id, "verdict": word, "run": "1" if id in "abcd" else "0", "half_partition": 0}
        | {"half_offset": 5 if id == "kept" else 4}
        for id, word in earlier.items()
    ]
    made.append({"id": "former", "verdict": "settled", "run": "", "half_partition": 0})
    made[-1]["half_offset"] = 9
    store.stage("1", TRANSACTIONS, spark.createDataFrame(made, TRANSACTIONS.ddl))
    store.apply("1")
    twice = verdict("b", findings=["visible_twice"])
    newest = [verdict("a"), twice, verdict("c", "gone"), verdict("e")]
    half = TopicRead("half", (5,), (5,), (9,), since="0")
    rows = counting_rows(store, "1", half)
    found = current_verdicts(rows, table(spark, *newest)).collect()
    assert sorted((row["id"], row["verdict"]) for row in found) == [
        ("a", "settled"), ("b", "visible_twice"), ("c", "settled"), ("d", "settled"),
        ("e", "settled"), ("kept", "settled"),
    ]  # fmt: skip
    part = current_verdicts(rows, table(spark, *newest), whole=False).collect()
    assert sorted(row["id"] for row in part) == ["a", "b", "c", "e"]


# --- what a run says ---------------------------------------------------------------------------


def test_a_run_adds_up_its_verdicts(spark: SparkSession) -> None:
    twice = {"findings": ["visible_twice", "body_changed"], "why": "x" * 1000}
    rows = [verdict(f"a{n}") for n in range(3)]
    rows += [verdict(f"b{n:02}", **twice) for n in range(EXAMPLES_A_KIND + 2)]
    rows += [
        verdict("c", "pending", prepared_at_ms=NOW_MS - 1000),
        verdict("d", grp="h", topics=["t", "u"]),
        verdict("e", "rolled_back", grp=None),
    ]
    tally = add_up(table(spark, *rows), NOW_MS)
    assert (tally.transactions, tally.carried) == (18, 1)
    assert tally.states == {"pending": 1, "promoted": 16, "rolled_back": 1}
    assert tally.drift == {"visible_twice": 12, "body_changed": 12}
    assert [each.id for each in tally.examples] == [f"b{n:02}" for n in range(EXAMPLES_A_KIND)]
    assert tally.examples[0].findings == ("visible_twice", "body_changed")
    assert len(tally.examples[0].why) == 500
    assert tally.pending_age.counts[AGE_BOUNDS_MS.index(1000)] == 1
    assert sum(tally.pending_age.counts) == 1
    assert tally.oldest_undecided_ms == 1000


def test_values_beyond_the_last_bound_are_counted_too(spark: SparkSession) -> None:
    old = verdict("a", "pending", prepared_at_ms=NOW_MS - 10 * AGE_BOUNDS_MS[-1])
    young = verdict("b", "pending", prepared_at_ms=NOW_MS - 1000)
    tally = add_up(table(spark, old, young), NOW_MS)
    ages = tally.pending_age.counts
    assert (ages[-1], sum(ages), len(ages)) == (1, 2, len(AGE_BOUNDS_MS) + 1)
    assert tally.oldest_undecided_ms == 10 * AGE_BOUNDS_MS[-1]


# --- spans and gaps ----------------------------------------------------------------------------


def test_spans_are_joined_where_the_gaps_are_smallest() -> None:
    spans = [TimeSpan(90, 99), TimeSpan(0, 1), TimeSpan(3, 4), TimeSpan(50, 60)]
    assert joined(spans, most=4) == sorted(spans)
    assert joined(spans, most=3) == [TimeSpan(0, 4), TimeSpan(50, 60), TimeSpan(90, 99)]
    assert joined(spans, most=2) == [TimeSpan(0, 4), TimeSpan(50, 99)]
    assert joined(spans, most=1) == [TimeSpan(0, 99)]
    assert joined([], most=1) == []


def read(topic: str, starts: tuple[int, ...], ends: tuple[int, ...]) -> TopicRead:
    return TopicRead(topic, starts, starts, ends)


def test_retention_between_two_runs_widens_the_horizon() -> None:
    was = SnapshotBounds(
        read("half", (5, 0), (10, 10)), read("op", (0, 0), (10, 10)), read("parked", (), ()),
        (read("t", (0,), (10,)), read("u", (0,), (10,))), (), (),
    )  # fmt: skip
    now = SnapshotBounds(
        read("half", (11, 10), (20, 20)), read("op", (10, 12), (20, 20)), read("parked", (), ()),
        (read("t", (10, 3), (20, 9)), read("u", (4,), (12,)), read("v", (1,), (2,))), (), (),
    )  # fmt: skip
    gaps = gaps_between(was, now)
    assert gaps == RetentionGaps(frozenset({0}), frozenset({1}), frozenset({("t", 1), ("v", 0)}))
    fresh = Horizon(
        {0: 11, 1: 10},
        {0: 500, 1: 501},
        {0: 600, 1: 601},
        {("t", 0): 1, ("t", 1): 2, ("v", 0): 3, ("w", -1): 9},
    )
    merged = with_gaps(Horizon({0: 5}, {0: 900}, {}, {("u", 0): 7}), fresh, gaps)
    assert merged == Horizon(
        {0: 11}, {0: 900}, {1: 601}, {("u", 0): 7, ("t", 1): 2, ("v", 0): 3, ("w", -1): 9}
    )
    assert SavedHorizon.of(merged, 10_000).read() == merged
    nothing_left = Horizon({}, {0: ALWAYS}, {1: ALWAYS}, {("t", 0): ALWAYS, ("w", -1): ALWAYS})
    assert SavedHorizon.of(nothing_left, NOW_MS).read() == Horizon(
        {}, {0: NOW_MS}, {1: NOW_MS}, {("t", 0): NOW_MS, ("w", -1): NOW_MS}
    )
    assert not gaps_between(was, was)


def test_ids_of_the_far_future_do_not_widen_the_span() -> None:
    terms = Terms(NOW_MS, dedup_window_ms=500)

    def counted(*spans: TimeSpan | None) -> dict[str, TableCount]:
        return {str(n): TableCount(1, 0, span) for n, span in enumerate(spans)}

    read = counted(TimeSpan(NOW_MS - 9, NOW_MS + 500), None, TimeSpan(NOW_MS - 20, NOW_MS - 5))
    assert times_of(read, (), terms) == TimeSpan(NOW_MS - 20, NOW_MS + 500)
    read = counted(TimeSpan(NOW_MS - 9, 1 << 47), TimeSpan(1 << 46, 1 << 47))
    assert times_of(read, (), terms) == TimeSpan(NOW_MS - 9, NOW_MS + 500)
    assert times_of(counted(TimeSpan(1 << 46, 1 << 47)), (), terms) == TimeSpan(
        NOW_MS + 500, NOW_MS + 500
    )
    assert times_of(counted(None), (), terms) is None
    # What came while the run read is no such id.
    read = counted(TimeSpan(NOW_MS, NOW_MS + 9_000))
    assert times_of(read, (NOW_MS, NOW_MS + 9_000), terms) == TimeSpan(NOW_MS, NOW_MS + 9_000)


def test_nothing_before_a_removed_run_is_looked_up() -> None:
    runs = tuple(PastRun(str(n), n * 10, n * 10 + 5, ()) for n in range(4))
    assert left_of(runs, {"0", "1", "2", "3"}) == RemainingRuns(runs, None)
    assert left_of(runs, {"2", "3"}) == RemainingRuns(runs[2:], 15)
    # Not the oldest first: the rest of older runs is incomplete.
    assert left_of(runs, {"0", "1", "3"}) == RemainingRuns(runs[3:], 25)
    assert left_of(runs, set()) == RemainingRuns((), 35)
    assert left_of((PastRun("0", None, None, ()),), set()) == RemainingRuns((), -1)


def test_removed_facts_are_beyond_the_horizon() -> None:
    horizon = Horizon({0: 7}, {0: 900, 1: 100}, {1: 5}, {("t", 0): 3})
    assert without_removed(horizon, None, 3) == horizon
    widened = Horizon({0: 7}, {0: 900, 1: 500, 2: 500}, {1: 5}, {("t", 0): 3}, removed_ms=500)
    assert without_removed(horizon, 500, 3) == widened


def test_names_of_runs_sort_by_time() -> None:
    from txbroker.spark.run import run_name

    names = [run_name(NOW_MS + n) for n in (0, 1, 999, 60_000)]
    assert names == sorted(names)
    assert names[0].startswith("20231114T221320000Z-")
    assert run_name(round(time.time() * 1000)) > names[-1]
