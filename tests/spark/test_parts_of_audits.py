"""A run of a part, and one of stored facts, come to the verdicts of a run that reads everything.

The last file of this folder: it waits for the audit that the first test begins.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from tests.spark.audit_process import Commanded, summary_of
from tests.spark.planted_cases import Planted, plant_all, plant_clean
from tests.spark.planting import Planting, access_to
from txbroker.errors import ConfigurationError
from txbroker.spark.journal import Journal
from txbroker.spark.run import AuditSettings, run_audit
from txbroker.spark.schema import Part, RunSummary, Terms
from txbroker.spark.tables.layout import ATTEMPTS, LATENCY, TRANSACTIONS
from txbroker.spark.tables.store import open_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.embedded import EmbeddedKafka

Row = dict[str, Any]
_OF_A_RUN = ("run", "observed_at")


def held(spark: SparkSession, out: Path) -> dict[str, Row]:
    """Return the rows of `transactions` by id, without the columns that name their run."""
    rows = open_store(spark, str(out)).read(TRANSACTIONS).drop(*_OF_A_RUN).collect()
    found = {row["id"]: row.asDict(recursive=True) for row in rows}
    assert len(found) == len(rows)
    return found


def audit(
    spark: SparkSession, planting: Planting, data_dir: Path, **fields: Any
) -> tuple[RunSummary, dict[str, Row]]:
    out = data_dir / "audit"
    settings = AuditSettings(str(out), data_dir, planting.names, **fields)
    summary = run_audit(spark, access_to(planting.bootstrap, planting.prefix), settings)
    return summary, held(spark, out)


def differences(one: dict[str, Row], other: dict[str, Row]) -> dict[str, Any]:
    """Return what differs, by id; a row that only one has stands whole."""
    both = one.keys() & other.keys()
    alone = {id: (one.get(id), other.get(id)) for id in one.keys() ^ other.keys()}
    changed = {
        id: {name: (one[id][name], other[id][name]) for name in one[id]}
        for id in both
        if one[id] != other[id]
    }
    return alone | changed


def as_text(rows: Iterable[Any]) -> list[str]:
    """Return rows, in which Spark orders maps as it likes, so that they compare."""
    return sorted(json.dumps(row.asDict(True), sort_keys=True, default=str) for row in rows)


def test_half_messages_of_all_ids_of_a_part_are_read() -> None:
    terms, part = Terms(0), Part(from_ms=10_000_000, to_ms=20_000_000)
    first_ms, last_ms = part.id_times_ms(terms)
    window_ms = terms.dedup_window_ms
    assert part.read_from_ms(terms) + window_ms <= first_ms <= part.from_ms - window_ms
    assert last_ms >= part.to_ms + window_ms


@pytest.mark.timeout(300)
def test_part_of_groups_and_topics_has_the_verdicts_of_a_whole_run(
    spark: SparkSession, planted: Planted, commanded: Commanded, tmp_path: Path
) -> None:
    p = planted.planting
    part = Part(topics=(p.orders,), groups=("group-0", "group-1"))
    # Some verdicts depend on the time.
    terms = summary_of(commanded.ended()).terms
    summary, found = audit(spark, p, tmp_path, terms=terms, mode="part", part=part)
    rows = held(spark, commanded.folder / "audit")
    expected = {
        id: row
        for id, row in rows.items()
        if p.orders in (row["topics"] or ()) and row["grp"] in part.groups
    }
    assert 3 < len(expected) < len(rows)
    assert differences(found, expected) == {}
    assert (summary.mode, summary.part) == ("part", part)
    # The next run of all does not continue it.
    assert not list(tmp_path.glob("audit/carry/*"))
    assert not list(tmp_path.glob("audit/facts/*"))


@pytest.mark.timeout(300)
def test_stored_facts_are_judged_again_without_kafka(
    spark: SparkSession, planted: Planted, commanded: Commanded, tmp_path: Path
) -> None:
    terms = summary_of(commanded.ended()).terms
    assert terms is not None
    shutil.copytree(commanded.folder, tmp_path / "data", ignore=shutil.ignore_patterns("artifacts"))
    rows = held(spark, tmp_path / "data/audit")
    # As if an earlier version had not known them.
    shutil.rmtree(tmp_path / "data/audit/transactions")
    settings = AuditSettings(
        str(tmp_path / "data/audit"), tmp_path / "data", planted.planting.names, terms, "rejudged"
    )
    nothing: Any = None
    summary = run_audit(spark, nothing, settings)
    assert held(spark, tmp_path / "data/audit") == rows
    assert summary.mode == "rejudged"
    last = Path(settings.out) / "carry"
    assert [path.name for path in last.iterdir()] != [f"run={summary.run}"]
    part = structs.replace(summary, run="20991231", mode="part", part=Part())
    Journal(settings.journal).add(part)
    with pytest.raises(ConfigurationError, match=r"judged a part.*before --rejudge"):
        run_audit(spark, nothing, settings)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_time_span_reads_and_has_only_its_records(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The margins would be minutes.
    monkeypatch.setattr(Part, "read_from_ms", lambda self, terms: self.from_ms)
    monkeypatch.setattr(Part, "id_times_ms", lambda self, terms: (self.from_ms, self.to_ms))
    async with Planting(kafka.bootstrap) as p:
        terms = await plant_all(p)
        middle_ms = round(time.time() * 1000)
        await plant_clean(p)
        whole, rows = audit(spark, p, tmp_path / "whole", terms=terms)
        spans: dict[str, tuple[Part, Callable[[int], bool]]] = {
            "after": (Part(from_ms=middle_ms), lambda at_ms: at_ms >= middle_ms),
            "before": (Part(to_ms=middle_ms), lambda at_ms: at_ms < middle_ms),
        }
        records = {}
        for name, (part, within) in spans.items():
            folder = tmp_path / name
            summary, found = audit(spark, p, folder, terms=terms, mode="part", part=part)
            expected = {
                id: row
                for id, row in rows.items()
                if row["prepared_at"] and within(round(row["prepared_at"].timestamp() * 1000))
            }
            prepared = {id: row for id, row in found.items() if row["prepared_at"]}
            wrong = {
                p.expected[id].label: row for id, row in differences(prepared, expected).items()
            }
            # Without a margin, the transaction that held its key before is not read.
            wrong.pop("the first with its key", None)
            assert wrong == {}, name
            records[name] = summary.records
    assert records["before"]["half"] == whole.records["half"]
    assert 0 < records["after"]["half"] < whole.records["half"]
    assert 0 < records["after"]["op"] < whole.records["op"]


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_run_after_a_part_has_the_tables_of_a_whole_run(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with Planting(kafka.bootstrap) as p:
        terms = await plant_clean(p)
        audit(spark, p, tmp_path / "parts", terms=terms)
        terms = await plant_all(p)
        part = Part(groups=("group-0", "group-1"))
        audit(spark, p, tmp_path / "parts", terms=terms, mode="part", part=part)
        summary, _ = audit(spark, p, tmp_path / "parts", terms=terms)
        audit(spark, p, tmp_path / "whole", terms=terms)
    assert summary.mode == "incremental"
    for table in (TRANSACTIONS, ATTEMPTS, LATENCY):
        found, expected = (
            open_store(spark, str(tmp_path / name / "audit")).read(table).drop(*_OF_A_RUN).collect()
            for name in ("parts", "whole")
        )
        assert as_text(found) == as_text(expected), table.name
