"""`txbroker audit explain`: from which records a verdict comes, and the sentence where none is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from tests.kit.cli import Call, Result
from tests.spark.audit_process import Commanded
from tests.spark.planted_cases import Planted
from txbroker.cli.main import cli
from txbroker.cli.run import run
from txbroker.core.routing import make_id
from txbroker.spark.journal import JOURNAL_FILE, Journal
from txbroker.spark.judge.kinds import BY_AGE
from txbroker.spark.query.explain import Explanation, explain
from txbroker.spark.tables.manifest import MANIFEST_FILE

UNKNOWN = make_id(0, 1_700_000_000_000, 7)


@pytest.fixture(scope="module")
def folder(commanded: Commanded) -> Path:
    """Return the data folder of an audit of everything that is planted."""
    commanded.ended()
    return commanded.folder


@pytest.fixture
def call(folder: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    def calling(*arguments: object, data_dir: Path = folder) -> Result:
        code = run(cli, ["audit", "explain", "--data-dir", str(data_dir), *map(str, arguments)])
        return Result(code, *capsys.readouterr())

    return calling


@pytest.fixture(scope="module")
def explained(planted: Planted, folder: Path) -> dict[str, Explanation]:
    """Return the explanations of everything that is planted, by id."""
    journal = Journal(folder / JOURNAL_FILE)
    return {id: explain(str(folder / "audit"), journal, id) for id in planted.planting.expected}


def test_every_finding_names_its_records(
    planted: Planted, folder: Path, explained: dict[str, Explanation]
) -> None:
    files = sorted(map(str, folder.glob("audit/facts/run=*/op/*.parquet")))
    markers: dict[str, list[int]] = {}
    for row in ds.dataset(files).to_table(["id", "offset"]).sort_by("offset").to_pylist():
        markers.setdefault(row["id"], []).append(row["offset"])
    newest = Journal(folder / JOURNAL_FILE).last()
    assert newest is not None
    for id, expected in planted.planting.expected.items():
        found = explained[id]
        kinds = {row["kind"] for row in found.findings}
        late = BY_AGE | ({"not_kept"} if expected.state == "parked" else set())
        assert kinds - late == expected.findings - late, expected.label
        offsets = {kind: list(_offsets(found, kind)) for kind in ("marker", "visible")}
        assert offsets["marker"] == markers.get(id, []), expected.label
        assert {record.run for record in found.records} == {newest.run}
        if found.verdict is not None:
            assert found.verdict["state"] == expected.state
            places = [place["offset"] for place in found.verdict["places"]]
            assert sorted(offsets["visible"]) == sorted(places), expected.label
            decided = [each for each in found.records if each.what.endswith("it decides")]
            assert [_offset(e.place) for e in decided] == (
                [found.verdict["op_offset"]] if decided else []
            )


def _offsets(found: Explanation, kind: str) -> Iterator[int]:
    others = {"half", "visible", "parked"}
    for record in found.records:
        if record.kind == kind or (kind == "marker" and record.kind not in others):
            yield _offset(record.place)


def _offset(place: str) -> int:
    return int(place.rpartition("@")[2])


def test_one_screen_shows_verdict_finding_and_records(
    call: Call, folder: Path, explained: dict[str, Explanation]
) -> None:
    found = next(e for e in explained.values() if _verdict(e) == "body_changed")
    assert found.run is not None
    assert found.verdict is not None
    half, commit, visible = found.records
    shown = call(found.id, "-o", "wide").out.splitlines()
    assert shown[0] == f"{found.id}: body_changed, promoted, group {found.verdict['grp']}"
    assert shown[1].endswith("; commit by producer")
    assert shown[2] == f"why: {found.verdict['why']}"
    assert shown[3].startswith(f"judged by {found.run.run} (full, ")
    assert [line.split()[:3] for line in shown[6:7]] == [["body_changed", "open", "critical"]]
    for line, record, words in zip(
        shown[-3:],
        (half, commit, visible),
        ("message 0 of 1 for ", "by producer, it decides", "message 0 of 1"),
        strict=True,
    ):
        assert line.split()[2:4] == [record.kind, record.place]
        assert words in line
    assert call(found.id, "-o", "json").json["run"] == {"run": found.run.run, "mode": "full"}


def _verdict(found: Explanation) -> str:
    return "" if found.verdict is None else str(found.verdict["verdict"])


def test_open_transactions_and_unreadable_records_are_explained(
    planted: Planted, call: Call, folder: Path, explained: dict[str, Explanation]
) -> None:
    pending = next(e for e in planted.planting.expected.values() if e.state == "pending")
    assert f"{pending.id}: it has not ended, and each run judges it again" in call(pending.id).out
    assert {found.verdict is None for found in explained.values() if found.is_open} == {True}
    broken = ds.dataset(sorted(map(str, folder.glob("audit/facts/run=*/broken/*.parquet"))))
    row = next(row for row in broken.to_table().to_pylist() if row["own"])
    place = "{topic}-{partition}@{offset}".format(**row)
    shown = call(place).out.splitlines()
    assert shown[0] == f"{place}: an unreadable record"
    assert shown[3].split()[:2] == ["unreadable", "open"]
    assert shown[-1].split()[2:4] == ["unreadable", place]
    assert shown[-1].endswith(row["why"])


NOTHING = {
    "no id": ("x", 2, "'x' is no transaction id (a transaction id has 26 characters, not 1), nor"),
    "unknown": (
        UNKNOWN,
        1,
        f"has read a record of {UNKNOWN}: audit again with `txbroker audit run`",
    ),
    "no such record": (
        "orders-0@7",
        1,
        "has set a record at orders-0@7 aside: `txbroker audit show",
    ),
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_stored_is_one_sentence(call: Call, case: str) -> None:
    id, code, words = NOTHING[case]
    result = call(id)
    assert (result.code, result.out) == (code, "")
    assert words in result.err


UNREADABLE = {
    "no tables": ({}, "there are no tables in"),
    "Delta": ({"format": "delta"}, "are of Delta Lake: query `transactions` and `drift` with"),
    "another series": ({"series": "theirs"}, "belong to audits with another data folder: name it"),
    "expired": (
        {"expired_before": "2026-01-01"},
        f"{UNKNOWN} is of 2023-11-14, and `txbroker audit expire` has removed the rows of all days",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_unsuitable_tables_are_one_sentence(call: Call, tmp_path: Path, case: str) -> None:
    fields, words = UNREADABLE[case]
    if fields:
        (tmp_path / MANIFEST_FILE).write_text(
            json.dumps({"version": 1, "installation": "x", **fields})
        )
    result = call(UNKNOWN, "--out", tmp_path, data_dir=tmp_path / "data")
    assert (result.code, result.out) == (1, "")
    assert words in result.err


def test_an_object_store_is_one_sentence(call: Call) -> None:
    assert "explain reads a local folder, not s3a://x" in call(UNKNOWN, "--out", "s3a://x").err


def test_without_facts_the_verdict_is_shown(
    call: Call, folder: Path, explained: dict[str, Explanation], tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("facts"))
    id = next(id for id, found in explained.items() if _verdict(found) == "body_changed")
    result = call(id, data_dir=tmp_path / "copy")
    assert (result.code, result.out.startswith(f"{id}: body_changed, promoted")) == (0, True)
    assert "The facts of the runs that have read its records were removed" in result.err
    for file in (tmp_path / "copy").glob("audit/transactions/*/*.parquet"):
        file.write_bytes(b"half")
    result = call(id, data_dir=tmp_path / "copy")
    assert (result.code, result.out) == (1, "")
    assert "cannot be read" in result.err


def test_it_starts_without_spark(folder: Path) -> None:
    code = (
        "import sys; from txbroker.cli.main import cli; from txbroker.cli.run import run;"
        f"code = run(cli, ['audit', 'explain', {UNKNOWN!r}, '--data-dir', {str(folder)!r}]);"
        "sys.exit(code if 'pyspark' not in sys.modules else 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 1
