"""Facts grouped by Spark: the plain judged in SQL as the judge would, and order within keys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.logs import PARTITION, START_MS, id_of
from tests.spark.audit_facts import TERMS as USUAL_TERMS
from tests.spark.audit_facts import check_row, half_rows, op_row, parked_row, visible_rows
from txbroker.spark.judge.judge import judge
from txbroker.spark.judge.rows import (
    ALWAYS,
    Content,
    HalfFact,
    Horizon,
    MarkerFact,
    ParkedFact,
    TransactionFacts,
    VisibleFact,
    read_id,
)
from txbroker.spark.schema import TABLES, VERDICT, Facts, SnapshotBounds, TopicRead

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEED = 20
LIVES = 600
TERMS = USUAL_TERMS._replace(overdue_after_ms=9_700_000)
"""Half of the random lives that nobody was asked of are overdue."""


def tables(spark: SparkSession, facts: Iterable[TransactionFacts]) -> Facts:
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    for each in facts:
        parts = read_id(each.id)
        known = {"id": each.id, "id_ms": None if parts is None else parts.time_ms}
        for name in TABLES:
            rows[name] += [{**known, **row._asdict()} for row in getattr(each, name)]
    return Facts(*(spark.createDataFrame(rows[name], ddl) for name, ddl in TABLES.items()))


def judged_by_spark(
    spark: SparkSession, facts: Iterable[TransactionFacts], horizon: Horizon | None = None
) -> dict[str, dict[str, Any]]:
    from pyspark.sql.types import StructType

    from txbroker.spark.judge.group import judge_facts

    with TemporaryDirectory() as folder:
        table = judge_facts(spark, tables(spark, facts), TERMS, horizon or Horizon(), folder)
        rows = [row.asDict(recursive=True) for row in table.collect()]
        kept = min(Path(folder).iterdir())  # `corrected`, if it is there, else `judged`
        # By verdict, so that findings are read without all others.
        of_verdicts = {path.name for path in kept.glob("verdict=*")} - {"verdict=unjudged"}
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    assert table.columns == StructType.fromDDL(VERDICT).names
    assert of_verdicts == {f"verdict={row['verdict']}" for row in rows}
    return found


# --- random lives ----------------------------------------------------------------------------


def random_facts(random: Random, number: int) -> TransactionFacts:
    """Return a transaction that is plain, or nearly, or not at all."""
    at_ms = START_MS + 1000 * number
    id = id_of(number, at_ms)
    offset = 10 * number
    topics = random.choices(["t", "u"], k=random.choice([1, 1, 1, 2, 3]))
    stamp_ms = random.choice([None, None, START_MS - 5])
    mark = random.choice([None, number])
    half = half_rows(topics, offset=offset, at_ms=at_ms, timestamp_ms=stamp_ms, order_mark=mark)
    group = random.choice(["", "g", "g", "g"])
    decided = op_row("commit", offset, at_ms + 100, grp=group)
    kind = random.choice(["commit", "commit", "commit", "rollback", "pending"])
    op, visible, parked = [decided], visible_rows(half, decided.at_ms, offset), []
    if kind != "commit":
        op = [decided._replace(kind=kind)] if kind == "rollback" else []
        visible = []
    if random.random() < 0.6:
        _spoil(random, half, op, visible, parked)
    for rows in (half, op, visible):
        random.shuffle(rows)
    return TransactionFacts(id, half, op, visible, parked)


def _spoil(
    random: Random,
    half: list[HalfFact],
    op: list[MarkerFact],
    visible: list[VisibleFact],
    parked: list[ParkedFact],
) -> None:
    rows: Any = random.choice([half, op, visible])
    place = random.randrange(len(rows)) if rows else 0
    what = random.choice(["drop", "change", "change", "change", "again", "more"])
    if what == "more" or not rows:
        first = half[0]
        contents = [Content(0, "t", 0, 1, 2, None)]
        random.choice(
            [
                lambda: parked.append(parked_row(random.choice(["refused", "parked", None]))),
                lambda: op.append(check_row(1, first.at_ms + 6000, first.offset + 5)),
                lambda: op.append(op_row("rollback", first.offset + 6, first.at_ms + 200)),
                lambda: op.append(
                    op_row("commit", first.offset + 7, contents=contents, contents_count=1)
                ),
                lambda: visible.extend(visible_rows(half, first.at_ms + 100, first.offset)),
            ]
        )()
    elif what == "drop":
        del rows[place]
    elif what == "again":
        rows.append(rows[place]._replace(offset=rows[place].offset + 4))
    else:
        rows[place] = rows[place]._replace(**_change(random, rows[place]))


def _change(random: Random, row: HalfFact | MarkerFact | VisibleFact) -> dict[str, object]:
    if isinstance(row, HalfFact):
        changes = [
            {"void": "expired"},
            {"partition": PARTITION + 1},
            {"grp": "h"},
            {"seq": row.seq + 1},
            {"count": row.count + 1},
            {"offset": row.offset + 5},
            {"body": 1},
            {"timestamp_ms": 1},
        ]
    elif isinstance(row, MarkerFact):
        changes = [
            {"partition": PARTITION + 1},
            {"grp": "h"},
            {"kind": "park"},
            {"kind": "rollback"},
            {"early": False},
            {"contents_count": 1},
            {"at_ms": row.at_ms + 1},
        ]
    else:
        changes = [
            {"topic": "v"},
            {"partition": 1},
            {"seq": row.seq + 1},
            {"count": row.count + 1},
            {"body": 1},
            {"headers": 1},
            {"at_ms": row.at_ms + 1},
            {"append_time": True, "at_ms": 5},
        ]
    return random.choice(changes)


def test_spark_comes_to_what_the_judge_comes_to(spark: SparkSession) -> None:
    random = Random(SEED)
    facts = {each.id: each for each in (random_facts(random, n) for n in range(LIVES))}
    found = judged_by_spark(spark, facts.values())
    expected = {id: judge(each, TERMS) for id, each in facts.items() if any(each[1:])}
    assert found.keys() == expected.keys()
    for id, verdict in expected.items():
        row = {**verdict._asdict(), "places": [place._asdict() for place in verdict.places]}
        row["findings"], row["topics"] = list(verdict.findings), list(verdict.topics)
        row.pop("id_ms")
        assert found[id] == row, facts[id]
    assert len({row["verdict"] for row in found.values()}) > 8


def test_without_facts_there_are_no_verdicts(spark: SparkSession) -> None:
    assert judged_by_spark(spark, []) == {}


def test_the_plain_never_come_to_python(spark: SparkSession) -> None:
    from txbroker.spark.judge.group import _by_sql, _grouped

    def facts(number: int, topics: list[str], kind: str) -> TransactionFacts:
        half = half_rows(topics, offset=10 * number)
        marker = op_row(kind, number, grp="g")
        shown = visible_rows(half) if kind == "commit" else []
        return TransactionFacts(id_of(number), half, [marker] if kind else [], shown)

    plain = [
        facts(1, ["t"], "commit"),
        facts(2, ["t", "u", "t"], "commit"),
        facts(3, ["t", "u"], "rollback"),
        facts(4, ["t", "u"], ""),
    ]
    grouped = _by_sql(_grouped(tables(spark, plain)), TERMS._replace(now_ms=0))
    verdicts = {row["id"]: row["verdict"] for row in grouped.collect()}
    assert verdicts == {id_of(n): "pending" if n == 4 else "settled" for n in range(1, 5)}


def test_one_hot_group_topic_and_key_spreads_over_tasks(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    from txbroker.spark.judge.group import _grouped
    from txbroker.spark.session import setting

    count, tasks = 2000, 8
    hot = [ordered(n, n, 10 * n) for n in range(1, count + 1)]
    with setting(spark, "spark.sql.shuffle.partitions", str(tasks)):
        grouped = _grouped(tables(spark, hot))
        rows = grouped.groupBy(F.spark_partition_id().alias("task")).count().collect()
    shares = [row["count"] for row in rows]
    assert (sum(shares), len(shares)) == (count, tasks)
    assert max(shares) < 2 * count / tasks
    assert {row["verdict"] for row in judged_by_spark(spark, hot).values()} == {"settled"}


# --- order -----------------------------------------------------------------------------------


def ordered(
    number: int, op_offset: int, offset: int, *, mark: int | None = 7, topics: str = "t"
) -> TransactionFacts:
    """Return a settled transaction with this place in the order, and in the target."""
    half = half_rows(list(topics), offset=10 * number, order_mark=mark)
    return TransactionFacts(
        id_of(number),
        half,
        [op_row("commit", op_offset, grp="g")],
        visible_rows(half, offset=offset),
    )


def out_of_order(spark: SparkSession, *facts: TransactionFacts) -> list[int]:
    found = judged_by_spark(spark, facts)
    numbers = {id_of(number): number for number in range(100)}
    late = [row for row in found.values() if "out_of_order" in row["findings"]]
    assert all(row["verdict"] == "out_of_order" and row["why"] for row in late)
    return sorted(numbers[row["id"]] for row in late)


def test_message_visible_after_later_decision_is_out_of_order(spark: SparkSession) -> None:
    assert out_of_order(
        spark,
        # In order; then 3 is overtaken by 4. Other keys, and none, do not matter.
        ordered(1, 1, 10),
        ordered(2, 2, 20),
        ordered(4, 4, 30),
        ordered(3, 3, 40),
        ordered(5, 5, 50),
        ordered(11, 14, 5, mark=8),
        ordered(12, 13, 15, mark=8)._replace(parked=[parked_row("refused"), parked_row(None, 1)]),
        ordered(21, 24, 6, mark=None),
        ordered(22, 23, 16, mark=None),
        ordered(31, 32, 7, mark=9),
        ordered(32, 31, 17, mark=9, topics="u"),
    ) == [3]


def test_transactions_judged_in_python_keep_order(spark: SparkSession) -> None:
    check = check_row(1, START_MS + 6000, 0)

    def checked(facts: TransactionFacts) -> TransactionFacts:
        return facts._replace(op=[check, *facts.op])

    later = [row._replace(offset=99) for row in ordered(2, 2, 0).visible]
    twice = ordered(2, 2, 20)
    twice = twice._replace(visible=[*twice.visible, *later])
    found = judged_by_spark(
        spark, [checked(ordered(1, 1, 30)), twice, ordered(3, 3, 40), checked(ordered(4, 4, 50))]
    )
    assert {id: row["findings"] for id, row in found.items()} == {
        id_of(1): ["out_of_order"],
        id_of(2): ["visible_twice"],
        id_of(3): [],
        id_of(4): [],
    }


# --- what retention left ---------------------------------------------------------------------


def test_horizon_follows_from_the_records_kept(spark: SparkSession) -> None:
    from txbroker.spark.judge.horizon import horizon_of

    facts = [ordered(n, n, 100 + n) for n in range(1, 4)]
    late = op_row("commit", 2, START_MS + 5000, grp="g")
    facts[1] = facts[1]._replace(op=[late])
    # Its marker was read by an earlier run.
    alone = ordered(4, 4, 200)
    facts.append(alone._replace(op=[], visible=[alone.visible[0]._replace(partition=2)]))
    starts = (0,) * PARTITION + (5,)

    def read(topic: str, *starts: int, compacted: bool = False) -> TopicRead:
        return TopicRead(topic, starts, starts, starts, 0, compacted)

    cut = SnapshotBounds(
        half=read("half", *starts),
        op=read("op", *starts),
        parked=read("parked", 0),
        targets=(
            read("t", 100, 100, 100),
            read("whole", 0),
            read("newest", 5, compacted=True),
            read("deleted"),
        ),
        op_early=starts,
        half_early=starts,
    )
    horizon = horizon_of(tables(spark, facts), cut, START_MS + 7)
    assert horizon.half_start == {PARTITION: 5}
    assert horizon.half_begin_ms == {PARTITION: START_MS}
    assert horizon.op_begin_ms == {PARTITION: START_MS + 100}
    assert horizon.taken_ms == {
        # Another half partition's may have been promoted an hour sooner after their decision.
        ("t", 0): START_MS + 5000 + 3_600_000,
        ("t", 1): ALWAYS,
        ("t", 2): START_MS + 7 + 3_600_000,
        ("newest", -1): ALWAYS,
        ("deleted", -1): ALWAYS,
    }
    cut = SnapshotBounds(
        read("half", 0), read("op", 0), read("parked", 0), (read("t", 0),), (0,), (0,)
    )
    assert horizon_of(tables(spark, facts), cut) == Horizon()


def test_order_is_judged_where_refusals_are_known(spark: SparkSession) -> None:
    facts = [ordered(1, 1, 20), ordered(2, 2, 10)]
    decided_ms = facts[0].op[0].at_ms
    for since_ms, findings in ((decided_ms, ["out_of_order"]), (decided_ms + 1, [])):
        horizon = Horizon(parked_from_ms={PARTITION: since_ms, PARTITION + 1: ALWAYS})
        assert judged_by_spark(spark, facts, horizon)[id_of(1)]["findings"] == findings


def test_refusals_are_known_from_first_dropped_copy_kept(spark: SparkSession) -> None:
    from txbroker.spark.judge.horizon import horizon_of, parked_from_ms

    day_ms = 86_400_000
    now_ms = START_MS + 3 * day_ms
    half = half_rows()

    def since_ms(ends: tuple[int, ...], *parked: ParkedFact) -> dict[int, int]:
        starts = (0,) * len(ends)
        cut = SnapshotBounds(
            TopicRead("half", starts, starts, starts),
            TopicRead("op", starts, starts, starts),
            TopicRead("parked", starts, starts, ends),
            (),
            starts,
            starts,
            op_clock_ms=(0, now_ms),
        )
        staged = tables(spark, [TransactionFacts(id_of(1), half, parked=parked)])
        found = dict(horizon_of(staged, cut).parked_from_ms)
        # And for a run that goes on after a while.
        assert parked_from_ms(staged.parked, cut, now_ms - day_ms - 1) == found
        assert parked_from_ms(staged.parked, cut, now_ms - day_ms) == {}
        return found

    copy = parked_row("refused", 4, START_MS)
    dropped = parked_row(None, 5, START_MS + 700)
    assert since_ms((0,) * (PARTITION + 1)) == {}
    written = (0,) * PARTITION + (6,)
    for rows in ((), (copy,), (dropped,), (dropped._replace(offset=3), copy)):
        assert since_ms(written, *rows) == {PARTITION: now_ms - day_ms}
    assert since_ms(written, copy, dropped) == {PARTITION: START_MS + 700}
    young = dropped._replace(at_ms=now_ms)
    assert since_ms(written, copy, young) == {PARTITION: now_ms - day_ms}


@pytest.mark.parametrize("until_ms", [ALWAYS, -1])
def test_horizon_reaches_the_judge(spark: SparkSession, until_ms: int) -> None:
    facts = ordered(1, 1, 1)._replace(visible=())
    found = judged_by_spark(spark, [facts], Horizon(taken_ms={("t", 0): until_ms}))
    assert found[id_of(1)]["verdict"] == ("gone" if until_ms == ALWAYS else "lost")
