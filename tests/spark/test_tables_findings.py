"""The life of findings over several runs: opened, seen, healed, expired, acknowledged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.spark.table_runs import NAMES, START_MS, Row, Tables, id_at, now_ms, time_of, verdict
from txbroker.spark.schema import Acknowledgement, TopicRead

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODES = ("full", "incremental", "incremental", "full", "incremental")
JUDGED = {"F": ("committed", ["late"]), ".": ("promoted", []), "g": ("gone", [])}
"""Of a transaction in a run; `-`: not judged."""
LIVES = {
    # By run: whether it was found; then state, times, and the runs that opened, saw, closed it.
    "F-.--": ("healed", 1, 1, 1, 3),
    "FF-F.": ("healed", 3, 1, 4, 5),
    "F----": ("expired", 1, 1, 1, 4),
    "Fg---": ("expired", 1, 1, 1, 2),
    "F.F-F": ("open", 3, 5, 5, None),
    "---F-": ("open", 1, 4, 4, None),
    ".F-FF": ("open", 3, 2, 5, None),
}


def run_of(number: int | None) -> str | None:
    return None if number is None else f"run{number}"


def test_a_finding_lives_until_it_is_healed_or_expires(spark: SparkSession) -> None:
    ids = {life: id_at(number) for number, life in enumerate(LIVES)}
    tables = Tables(spark)
    for number, mode in enumerate(MODES, 1):
        found = {life: JUDGED.get(life[number - 1]) for life in LIVES}
        verdicts = [
            verdict(ids[life], judged[0], findings=judged[1])
            for life, judged in found.items()
            if judged is not None
        ]
        tables.run(number, verdicts, mode=mode)
        still_open = [row for row in tables.rows["drift"] if row["state"] == "open"]
        assert tables.before is not None
        assert tables.before.open_findings.get("late", 0) == len(still_open)
    rows = {row["id"]: row for row in tables.rows["drift"]}
    assert rows.keys() == set(ids.values())
    for life, (state, times, opened, seen, closed) in LIVES.items():
        row, first = rows[ids[life]], life.index("F") + 1
        assert (row["state"], row["times"]) == (state, times), life
        runs = tuple(row[f"{name}_run"] for name in ("opened", "seen", "closed"))
        assert runs == (run_of(opened), run_of(seen), run_of(closed)), life
        assert row["opened_at"] == time_of(now_ms(first)), life
        assert row["closed_at"] == (closed and time_of(now_ms(closed))), life
        assert row["day"] == row["opened_at"].date()
        assert row["severity"] == "warning"


def test_a_finding_of_another_kind_is_another_finding(spark: SparkSession) -> None:
    tables, id = Tables(spark), id_at(1)
    tables.run(1, [verdict(id, "committed", findings=["late"])])
    tables.run(2, [verdict(id, "committed", findings=["lost"])])
    rows = {row["kind"]: (row["state"], row["severity"]) for row in tables.rows["drift"]}
    assert rows == {"late": ("healed", "warning"), "lost": ("open", "critical")}


def test_findings_about_topics_and_the_business(spark: SparkSession) -> None:
    tables = Tables(spark)
    place = {"topic": NAMES.op, "partition": 0, "offset": 7, "why": "committed to bills"}
    missing = [
        {"id": id_at(n), "kind": "target_missing", "grp": "g", "kept": n < 2, **place}
        for n in range(3)
    ]
    business = [{"id": id_at(9), "kind": "row_without_message", "grp": "g", "why": "no message"}]
    broken = [
        {"topic": NAMES.op, "partition": 1, "offset": n, "at_ms": 1, "why": "no", "own": n == 5}
        for n in (4, 5)
    ]
    tables.run(1, [], mode="full", missing=missing, business=business, broken=broken)
    unreadable = f"{NAMES.op}-1@5"
    assert states(tables) == {
        unreadable: "open", id_at(0): "open", id_at(1): "open", id_at(9): "open"
    }  # fmt: skip
    removed = [{**missing[0], "kept": False}, missing[2]]
    tables.run(2, [])
    assert states(tables)[id_at(0)] == "open", "the run has not judged it"
    tables.run(2, [verdict(id_at(1))], missing=removed)
    assert states(tables) == {
        unreadable: "open", id_at(0): "expired", id_at(1): "healed", id_at(9): "open"
    }  # fmt: skip
    tables.run(3, [], mode="full", business=[])
    assert states(tables) == {
        unreadable: "expired", id_at(0): "expired", id_at(1): "healed", id_at(9): "healed"
    }  # fmt: skip


def test_findings_that_a_run_cannot_look_at_again_are_not_healed(spark: SparkSession) -> None:
    tables, old_ms = Tables(spark), START_MS - 86_400_000
    ids = {"old": id_at(1, old_ms), "new": id_at(2), "other": id_at(3), "topic": id_at(4, old_ms)}
    ids["row"] = id_at(5)
    business = [{"id": ids["row"], "kind": "row_without_message", "grp": "h", "why": "rolled back"}]
    business += [
        {"id": ids[name], "kind": "message_without_row", "grp": group, "why": "no row"}
        for name, group in (("old", "g"), ("new", "g"), ("other", "h"))
    ]
    place = {"topic": NAMES.op, "partition": 0, "offset": 7, "why": "committed to bills"}
    missing = [{"id": ids["topic"], "kind": "target_missing", "grp": "g", "kept": True, **place}]
    tables.run(1, [], mode="full", missing=missing, business=business)
    tables.run(2, [], mode="full", business=[], groups=["g"], unknown_to_ms={0: old_ms})
    assert {name: states(tables)[id] for name, id in ids.items()} == {
        "old": "expired", "new": "healed", "other": "open", "topic": "expired", "row": "healed"
    }  # fmt: skip


def test_only_evidence_heals_a_finding(spark: SparkSession) -> None:
    """A run that judges the transaction again, but has not searched a target, has none."""

    def seen(topic: str, offset: int) -> Row:
        places = [{"topic": topic, "partition": 0, "offset": offset, "seq": 0}]
        return {"topics": [topic], "places": places, "findings": ["visible_twice"]}

    waiting = {"findings": ["late"]}
    lives: dict[str, tuple[Row, str | None, str]] = {
        # How it was found; its state in the next run; what becomes of the finding.
        "visible": (waiting, "promoted", "healed"),
        "taken by its target": (waiting, "refused", "healed"),
        "judged by another age": (waiting, "committed", "open"),
        "there": (seen("orders", 7), "promoted", "healed"),
        "removed": (seen("orders", 3), "promoted", "expired"),
        "created again": (seen("rare", 7), "promoted", "expired"),
        "deleted": (seen("former", 7), "promoted", "expired"),
        "unread": (seen("bills", 7), "promoted", "open"),
        "unread, and not judged": (seen("bills", 7), None, "open"),
        "not judged": (seen("orders", 7), None, "expired"),
    }
    ids = {label: id_at(number) for number, label in enumerate(lives)}
    tables = Tables(spark)
    tables.run(
        1, [verdict(ids[label], "committed", **found) for label, (found, *_) in lives.items()]
    )
    again = [
        verdict(ids[label], state, topics=found.get("topics", ["orders"]))
        for label, (found, state, _) in lives.items()
        if state is not None
    ]
    targets = [
        TopicRead("orders", (5,), (5,), (9,)),
        TopicRead("rare", (0,), (0,), (9,), since="run2"),
        TopicRead("former", (), (), (), since="run2"),
        TopicRead("bills", (0,), (9,), (9,), unread="no right"),
    ]
    tables.run(2, again, mode="full", targets=targets)
    found = states(tables)
    assert {label: found[id] for label, id in ids.items()} == {
        label: after for label, (*_, after) in lives.items()
    }


def test_clocks_that_went_back_heal_nothing(spark: SparkSession) -> None:
    lives = {
        "lost": ("committed", ["late"]),
        "overdue": ("pending", []),
        "not_kept": ("parked", []),
        "target_missing": ("committed", []),
    }
    ids = {kind: id_at(number) for number, kind in enumerate(lives)}
    found = [
        verdict(ids[kind], state, findings=[kind])
        for kind, (state, _) in lives.items()
        if kind != "target_missing"
    ]
    missing = {"id": ids["target_missing"], "kind": "target_missing", "grp": "g", "kept": True}
    tables = Tables(spark)
    tables.run(5, found, missing=[{**missing, "why": "committed to orders"}])
    targets = [TopicRead("orders", (), (), ())]
    again = [
        verdict(ids[kind], state, findings=findings) for kind, (state, findings) in lives.items()
    ]
    tables.run(4, again, missing=[], targets=targets)
    rows = {(row["id"], row["kind"]): row["state"] for row in tables.rows["drift"]}
    assert rows == {(id, kind): "open" for kind, id in ids.items()} | {
        (ids["lost"], "late"): "open"
    }
    tables.run(6, [verdict(id) for id in ids.values()])
    assert {row["state"] for row in tables.rows["drift"]} == {"healed"}


def states(tables: Tables) -> dict[str, str]:
    return {row["id"]: row["state"] for row in tables.rows["drift"]}


@pytest.mark.quick
def test_a_finding_names_where_its_evidence_is(spark: SparkSession) -> None:
    shown = [{"topic": "orders", "partition": 3, "offset": n, "seq": n} for n in (40, 41)]
    placed: dict[str, tuple[Row, tuple[str, int, int] | None]] = {
        "visible": ({"places": shown, "op_offset": 8, "half_offset": 9}, ("orders", 3, 40)),
        "decided": ({"op_offset": 8, "half_offset": 9}, (NAMES.op, 0, 8)),
        "prepared": ({"half_offset": 9}, (NAMES.half, 0, 9)),
        "nowhere": ({}, None),
    }
    ids = {label: id_at(number) for number, label in enumerate(placed)}
    tables = Tables(spark)
    tables.run(
        1,
        [
            verdict(ids[label], "committed", findings=["late"], **fields)
            for label, (fields, _) in placed.items()
        ],
    )
    found = {row["id"]: tuple(row[n] for n in PLACE) for row in tables.rows["drift"]}
    assert found == {ids[label]: place or (None,) * 3 for label, (_, place) in placed.items()}


PLACE = ("topic", "partition", "offset")


def given(by: str, at: int, until: int, **names: str) -> Acknowledgement:
    named = {"id": "", "grp": "", **names}
    return Acknowledgement(
        kind="late", by=by, why="known", at_ms=now_ms(at), until_ms=now_ms(until), **named
    )


def test_acknowledged_findings_stay_and_count_again_after_a_date(spark: SparkSession) -> None:
    tables = Tables(spark)
    named, grouped, other, closed = map(id_at, range(4))
    groups = {named: "a", grouped: "b", other: "c", closed: "b"}

    def found(*ids: str) -> list[Row]:
        return [verdict(i, "committed", findings=["late"], grp=groups[i]) for i in ids]

    tables.run(1, found(*groups))
    acknowledged = [
        given("ann", 2, 4, id=named),
        given("bob", 1, 1, id=other),  # over before this run
        given("cid", 1, 9, grp="b"),
    ]
    changed = tables.run(2, [verdict(closed)], acknowledged=acknowledged)["drift"]
    by = {row["id"]: row["acknowledged_by"] for row in changed}
    assert by == {named: "ann", grouped: "cid", closed: None}
    assert not tables.run(3, [], acknowledged=acknowledged).get("drift")
    row = next(row for row in tables.rows["drift"] if row["id"] == named)
    assert (row["state"], row["seen_run"], row["acknowledged_run"]) == ("open", "run1", "run2")
    assert row["acknowledged_until"] == time_of(now_ms(4))
    tables.run(3, found(named, grouped, other), acknowledged=acknowledged)
    assert tables.before is not None
    assert tables.before.acknowledged == {"late": 2}
    tables.run(5, found(named, grouped), acknowledged=acknowledged)
    assert tables.before.acknowledged == {"late": 1}
    again = [*acknowledged, given("dan", 5, 9, id=named)]
    (row,) = tables.run(6, [], acknowledged=again)["drift"]
    assert (row["id"], row["acknowledged_by"], row["acknowledged_run"]) == (named, "dan", "run6")
    assert row["opened_at"] == time_of(START_MS + 60_000)
    (row,) = tables.run(7, [], acknowledged=[one for one in again if one.by != "dan"])["drift"]
    assert (row["acknowledged_by"], row["acknowledged_until"]) == ("dan", time_of(now_ms(7)))


def test_a_finding_that_opens_again_is_acknowledged_again(spark: SparkSession) -> None:
    tables, id = Tables(spark), id_at(1)
    late, known = [verdict(id, "committed", findings=["late"])], [given("ann", 1, 9, id=id)]
    tables.run(1, late, acknowledged=known)
    tables.run(2, [verdict(id)], acknowledged=known)
    (row,) = tables.run(3, late, acknowledged=known)["drift"]
    assert (row["opened_run"], row["acknowledged_run"]) == ("run3", "run3")


def test_a_run_without_findings_reads_nothing(spark: SparkSession) -> None:
    tables = Tables(spark)
    tables.run(1, [verdict(id_at(2))])
    reads = tables.reads
    tables.run(2, [verdict(id_at(1), "gone")])
    assert tables.reads == reads + 1, "the latencies only"
