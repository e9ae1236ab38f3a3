"""The audit's journal: its content, by whom it may be shared, and which files it refuses."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import sqlite_utils

from tests.kit.kafka import KafkaHarness
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from tests.spark.audit_summaries import DAY_MS, STARTED_MS, drifted, summary
from txbroker.cli.audit.run import _report_until_end
from txbroker.contract.audit import UnreadRecord, decode_news, encode_news
from txbroker.errors import ConfigurationError
from txbroker.spark.access import key_of, news_of, publish
from txbroker.spark.journal import JOURNAL_VERSION, Journal
from txbroker.spark.judge.kinds import KIND_NAMES
from txbroker.spark.schema import Acknowledgement, BrokenRecord, CheckResult, RunSummary
from txbroker.spark.stream.stored import FindingSink, StreamManifest, StreamProgress
from txbroker.spark.stream.stream import AuditStream


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "new folder" / "audit.db")


def rows(journal: Journal, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(journal.path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_a_run_comes_back_whole(journal: Journal) -> None:
    kept = drifted(3)
    journal.add(kept)
    assert journal.get(kept.run) == kept
    assert journal.last() == kept
    assert journal.runs() == [kept]
    assert journal.get("another") is None


def test_reading_a_missing_journal_creates_no_file(journal: Journal) -> None:
    assert (journal.last(), journal.runs(), journal.get("x")) == (None, [], None)
    assert not journal.path.parent.exists()


def test_an_empty_file_is_a_journal_without_runs(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    journal = Journal(tmp_path / "a.db")
    assert (journal.last(), journal.runs()) == (None, [])
    journal.add(summary())
    assert journal.last() == summary()


def test_runs_are_newest_first_and_streams_not_continued(journal: Journal) -> None:
    for number in (2, 0, 1):
        journal.add(summary(number, mode="incremental" if number else "full"))
    journal.add(summary(9, mode="stream", cut=None))
    assert [found.run for found in journal.runs(3)] == ["run-000009", "run-000002", "run-000001"]
    last = journal.last()
    assert last is not None
    assert last.run == "run-000002"


def test_the_last_batch_of_each_day_is_found(journal: Journal) -> None:
    day = STARTED_MS // DAY_MS * DAY_MS
    for number, (started_ms, mode) in enumerate(
        [
            (day - 1, "full"),
            (day, "full"),
            (day + DAY_MS - 1, "incremental"),
            (day + DAY_MS - 1, "part"),
            (day + 2 * DAY_MS, "stream"),
            (day + 3 * DAY_MS, "incremental"),
        ]
    ):
        journal.add(summary(number, started_ms=started_ms, mode=mode))
    assert [found.run for found in journal.daily(4, day + 4 * DAY_MS - 1)] == [
        "run-000002",
        "run-000005",
    ]
    assert [found.run for found in journal.daily(2, day)] == ["run-000000", "run-000002"]


def test_plain_columns_agree_with_the_summary(journal: Journal) -> None:
    journal.add(drifted(1))
    journal.add(summary(2))
    assert rows(
        journal, "select run, started, transactions, settled, pending, drift, taken from runs"
    ) == [
        ("run-000001", "2025-10-10T08:53:20.000+00:00", 1100, 1070, 27, 3, 7),
        ("run-000002", "2025-10-11T08:53:20.000+00:00", 1100, 1070, 27, 0, 0),
    ]
    assert rows(journal, "select * from drift order by kind") == [
        ("run-000001", "lost", 2),
        ("run-000001", "visible_twice", 1),
    ]
    assert rows(journal, "select grp, findings from examples order by id") == [
        ("orders", "lost"),
        ("bills", "visible_twice, lost"),
    ]


def test_republished_run_replaces_itself(journal: Journal) -> None:
    journal.add(drifted(1))
    journal.add(drifted(1, drift={"late": 1}, examples=()))
    assert [found.drift for found in journal.runs()] == [{"late": 1}]
    assert rows(journal, "select kind from drift") == [("late",)]
    assert rows(journal, "select * from examples") == []


def test_an_example_that_is_named_twice_stands_once(journal: Journal) -> None:
    one = drifted().examples[0]
    journal.add(drifted(examples=(one, one)))
    assert rows(journal, "select count(*) from examples") == [(1,)]


def test_unpublished_drift_is_kept_until_published(journal: Journal) -> None:
    assert journal.unpublished() == []
    journal.mark_published("run-000009")  # nothing is there
    for run in (drifted(2), drifted(0), summary(1), drifted(3, mode="stream", cut=None)):
        journal.add(run)
    assert journal.unpublished() == [drifted(0), drifted(2)]
    journal.mark_published("run-000001")
    assert journal.unpublished() == [drifted(2)]
    journal.mark_published("run-000002")
    assert journal.unpublished() == []
    assert len(journal.runs()) == 4


def test_runs_of_an_earlier_txbroker_count_as_published(journal: Journal) -> None:
    journal.add(drifted(1))
    connection = sqlite3.connect(journal.path)
    with connection:
        connection.execute("drop table untold")  # which was not there yet
    connection.close()
    assert journal.unpublished() == []
    journal.mark_published("run-000001")
    journal.add(drifted(2))
    assert journal.unpublished() == [drifted(2)]


def test_a_run_whose_entry_breaks_off_does_not_count(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.add(summary(1))
    monkeypatch.setattr("txbroker.spark.journal._example_rows", lambda _: [{"no column": 1}])
    with pytest.raises(ConfigurationError, match="cannot be used"):
        journal.add(drifted(2))
    assert [found.run for found in journal.runs()] == ["run-000001"]
    assert rows(journal, "select * from drift") == []


def add_many(path: Path, first: int, count: int) -> None:
    while not os.path.exists(f"{path}.go"):
        pass
    for number in range(first, first + count):
        Journal(path).add(drifted(number))


def test_several_processes_write_a_new_journal_at_once(tmp_path: Path) -> None:
    path = tmp_path / "audit.db"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=add_many, args=(path, n * 10, 10)) for n in range(3)]
    for writer in writers:
        writer.start()
    Path(f"{path}.go").touch()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    journal = Journal(path)
    assert [found.run for found in journal.runs()] == [f"run-{n:06}" for n in range(29, -1, -1)]
    assert rows(journal, "select count(*) from drift") == [(60,)]


def test_file_that_becomes_a_journal_during_a_check_is_accepted(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [drifted(1)]
    look = sqlite_utils.Database.table_names

    def looked_at(db: sqlite_utils.Database, *args: Any, **more: Any) -> list[str]:
        while others:
            Journal(journal.path).add(others.pop())
        return look(db, *args, **more)

    monkeypatch.setattr(sqlite_utils.Database, "table_names", looked_at)
    journal.add(drifted(2))
    assert [found.run for found in journal.runs()] == ["run-000002", "run-000001"]


def test_a_journal_of_a_newer_version_is_left_alone(journal: Journal) -> None:
    journal.add(summary())
    connection = sqlite3.connect(journal.path)
    connection.execute(f"pragma user_version = {JOURNAL_VERSION + 1}")
    connection.close()
    before = journal.path.read_bytes()
    for call in (journal.last, journal.runs, lambda: journal.add(summary(1))):
        with pytest.raises(ConfigurationError, match=r"has version 2, this txbroker knows 1"):
            call()
    assert journal.path.read_bytes() == before


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database " * 100)
    other = tmp_path / "other.db"
    connection = sqlite3.connect(other)
    connection.execute("create table mine (a)")
    connection.close()
    for path, output in ((text, "not a SQLite file"), (other, "another application")):
        before = path.read_bytes()
        for call in (Journal(path).last, lambda path=path: Journal(path).add(summary())):
            with pytest.raises(ConfigurationError, match=output) as raised:
                call()
            assert "\n" not in str(raised.value)
        assert path.read_bytes() == before


def test_a_folder_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        Journal(tmp_path).runs()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        Journal(tmp_path / "file" / "audit.db").add(summary())


def test_locked_journal_is_one_sentence(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.add(summary())
    monkeypatch.setattr("txbroker.spark.journal._WAIT_S", 0.05)
    connection = sqlite3.connect(journal.path)
    connection.execute("begin exclusive")
    try:
        with pytest.raises(ConfigurationError, match="locked by another process"):
            journal.add(summary(1))
    finally:
        connection.close()


@pytest.mark.parametrize("damage", ["", "{}", '{"run": 5}'])
def test_a_damaged_entry_names_its_run(journal: Journal, damage: str) -> None:
    journal.add(summary(4))
    connection = sqlite3.connect(journal.path)
    with connection:
        connection.execute("update runs set summary = ?", [damage])
    connection.close()
    with pytest.raises(ConfigurationError, match="run-000004 does not parse"):
        journal.last()


def test_fields_that_a_later_version_adds_are_no_hindrance(journal: Journal) -> None:
    journal.add(summary(4))
    content = {**msgspec.to_builtins(summary(4)), "added": [1]}
    connection = sqlite3.connect(journal.path)
    with connection:
        connection.execute("update runs set summary = ?", [msgspec.json.encode(content).decode()])
    connection.close()
    assert journal.last() == summary(4)


# --- news for the proxies ------------------------------------------------------------------------


@pytest.fixture
async def world(kafka: Any) -> Any:
    made = KafkaHarness(kafka.bootstrap)
    yield made
    await made.close()


def test_every_kind_is_published_even_with_count_zero() -> None:
    reported = news_of(drifted(business={"compared": 5}))
    assert set(KIND_NAMES) < set(reported.drift)
    assert {kind: count for kind, count in reported.drift.items() if count} == {
        "lost": 2,
        "visible_twice": 1,
    }
    assert reported.drift["message_without_row"] == 0
    assert "message_without_row" not in news_of(summary()).drift
    assert reported.ended_ms == STARTED_MS + 12_500
    assert (reported.taken, reported.quarantined, reported.carried) == (7, 1, 27)


def test_unpublished_findings_are_published_with_new_ones() -> None:
    untold = [
        drifted(1, drift={"visible_twice": 3, "late": 4, "row_without_message": 1}),
        drifted(2, drift={"visible_twice": 2, "lost": 5}),
    ]
    now = summary(3, drift={"visible_twice": 1, "late": 1})
    reported = news_of(now, untold)
    # Who is late or lost is so in the later run, too, if nothing has mended it.
    assert {kind: count for kind, count in reported.drift.items() if count} == {
        "visible_twice": 3,
        "late": 1,
        "row_without_message": 1,
    }
    assert reported.run == now.run


def test_records_a_stream_skipped_are_published() -> None:
    # Neither needs Spark to be there.
    stream = AuditStream.__new__(AuditStream)
    stream._unread = {}
    stream._sink = cast(FindingSink, SimpleNamespace(progress=StreamProgress(strangers=3)))
    stream._home = StreamManifest(name="n", installation="half", started_ms=5, buckets=1, slot_ms=1)
    stream._judged_ms, stream._figures = 0, None
    reported = decode_news(encode_news(news_of(stream.summary())))
    assert reported.strangers == 3
    assert news_of(summary()).strangers == 0


def test_records_a_stream_skipped_are_reported_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Watched:
        looks = 0

        def wait(self, timeout_s: float) -> bool:
            self.looks += 1
            return self.looks > 4

        def summary(self) -> RunSummary:
            return summary(mode="stream", strangers=(self.looks - 1) // 2 * 7)

    _report_until_end(cast(AuditStream, Watched()))
    reported = capsys.readouterr().err
    assert reported.startswith("7 records arrived after the stream had dropped ")
    assert reported.count("records arrived") == 1


def test_published_record_stays_small_for_any_run() -> None:
    many = {f"topic-{number:05}-{'x' * 200}": number for number in range(5000)}
    example = drifted().examples[0]
    reported = news_of(drifted(taken=many, examples=(example,) * 5000))
    assert reported.taken == sum(many.values())
    assert len(reported.taken_topics) == 50
    assert max(many, key=many.__getitem__) in reported.taken_topics


def test_set_aside_and_missing_targets_are_published() -> None:
    aside = BrokenRecord("orders", 1, 7, "why", own=True)
    found = drifted(set_aside=(aside,), missing_targets={"gone": 2}, drift={"target_missing": 2})
    reported = decode_news(encode_news(news_of(found)))
    assert reported.set_aside == [UnreadRecord("orders", 1, 7, "why")]
    assert reported.missing_targets == {"gone": 2}
    assert (reported.drift["target_missing"], reported.drift["unreadable"]) == (2, 0)
    untold = [drifted(1, drift={"target_missing": 3, "overdue": 1, "unreadable": 4})]
    later = news_of(summary(2), untold).drift
    assert {kind: count for kind, count in later.items() if count} == {"unreadable": 4}


def test_acknowledged_findings_are_published_apart() -> None:
    result = CheckResult("slow", "error", "visible_p99_s", 7.2, 5, False)
    unknown = CheckResult("few", "error", "volume_min", None, 0.5, None)
    known = drifted(acknowledged={"lost": 2}, checks=(result, unknown))
    reported = decode_news(encode_news(news_of(known, [drifted(1, acknowledged={"lost": 2})])))
    assert (reported.drift["lost"], reported.drift["visible_twice"]) == (0, 1)
    assert reported.acknowledged == {"lost": 2}
    assert [(one.name, one.ok) for one in reported.checks] == [("slow", False), ("few", True)]


def test_acknowledgements_end(journal: Journal) -> None:
    assert journal.acknowledged() == []
    ones = [Acknowledgement("", "g", kind, "ada", "w", 5, 10 * n) for n, kind in enumerate("abc")]
    journal.acknowledge(ones)
    assert journal.acknowledged() == ones[1:]
    assert journal.acknowledged(10) == ones[2:]
    assert (ones[0].covers("id", "g"), ones[0].covers("id", "h")) == (True, False)
    assert journal.withdraw("", "h", ()) == 0
    assert journal.withdraw("", "g", ("b", "x")) == 1
    assert journal.acknowledged() == ones[2:]


def test_batch_and_stream_do_not_replace_one_another() -> None:
    modes = ("full", "incremental", "stream")
    assert [key_of(summary(mode=mode)) for mode in modes] == ["batch", "batch", "stream"]


async def test_a_proxy_shows_what_was_published(world: KafkaHarness) -> None:
    async with FakeEndpoint().serve() as desk:
        service = Service(world, desk)
        await service.start()
        try:
            kinds = ("lost", "visible_twice", "late")
            assert await service.metric("audit_last_success_timestamp_seconds", mode="batch") == 0
            await publish(world.settings(), drifted(1))

            async def shown() -> bool:
                # Each look is one at its own moment: the news may come in between.
                found = [await service.metric("audit_drift", kind=kind) for kind in kinds]
                return found == [2, 1, 0]

            await until(shown)
            ended_s = drifted(1).started_ms / 1000 + 12.5
            success = "audit_last_success_timestamp_seconds"
            assert await service.metric(success, mode="batch") == ended_s
            await world.write_audit("batch", b"\xff broken")
            await publish(world.settings(), summary(2))

            async def over() -> bool:
                return await service.metric("audit_drift", kind="lost") == 0

            await until(over)
        finally:
            await service.stop()
    reported = await world.visible(world.name("audit"))
    assert [record.key for record in reported] == [b"batch"] * 3
    assert decode_news(reported[-1].value or b"").run == "run-000002"


async def test_missing_audit_topic_names_the_next_step(world: KafkaHarness) -> None:
    with pytest.raises(ConfigurationError, match=r"audit does not exist: create it with"):
        await publish(world.settings(), summary())


@pytest.mark.parametrize("module", ["txbroker.spark.journal", "txbroker.spark.access"])
def test_neither_journal_nor_publishing_loads_spark(module: str) -> None:
    code = f"import sys, {module}; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
