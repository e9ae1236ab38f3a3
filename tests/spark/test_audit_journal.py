"""The audit's journal: what is kept, by whom it may be shared, and which files it refuses."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlite_utils

from tests.spark.audit_summaries import drifted, summary
from txbroker.errors import ConfigurationError
from txbroker.spark.journal import JOURNAL_VERSION, Journal


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
