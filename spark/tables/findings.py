"""The life of findings: opened, seen again, healed or expired, opened again, and acknowledged.

A finding is open until a run judges its transaction again, has searched what the finding is about,
and does not find it; or until the topics no longer hold its evidence. Every other run leaves it as
it is.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import msgspec
from pyspark.sql import Column, DataFrame

from txbroker.spark import expressions as F
from txbroker.spark.facts.messages import id_partition, id_time_ms
from txbroker.spark.judge.horizon import of_partition
from txbroker.spark.judge.kinds import ALL_KINDS, BUSINESS_KINDS, IN_TARGET, KIND_NAMES, NOT_VISIBLE
from txbroker.spark.schema import TopicNames, TopicRead
from txbroker.spark.tables.judged import (
    FOUND_COLUMNS,
    JudgedRun,
    Replacement,
    known_keys,
    moment,
    shaped,
)
from txbroker.spark.tables.layout import DRIFT, Table

_BUSINESS = tuple(kind.name for kind in BUSINESS_KINDS)
_UNDECIDED = ("pending", "parked")


def drift(judged: JudgedRun, read: Callable[[Table], DataFrame]) -> Replacement | None:
    """Return the findings that this run opened, saw again or closed, or that were acknowledged
    since the last one; None where there are none.

    `read`: returns the rows that a table holds now.
    """
    was_open = judged.before is None or bool(judged.before.open_findings)
    if not judged.summary.drift and (judged.first or not was_open):
        return None
    current = read(DRIFT)
    new = _found(judged).select("id", "kind", F.struct(*FOUND_COLUMNS).alias("new"))
    old = current.select("id", "kind", F.struct(*current.columns).alias("old"))
    lives = new.join(old, ["id", "kind"], "full_outer").where(
        "new IS NOT NULL OR old.state = 'open'"
    )
    # Only of findings that were open: a run judges far more transactions than have any.
    was = current.where("state = 'open'").select("id").distinct()
    again = judged.verdicts.select("id", "verdict", "state", "findings", "topics").join(
        was, "id", "left_semi"
    )
    lives = lives.join(again, "id", "left")
    removed = F.lit(True).alias("removed")
    if judged.missing is None:
        lives = lives.withColumn("removed", F.lit(False))
    else:
        gone = judged.missing.where("NOT kept").select("id", "kind", removed)
        lives = lives.join(gone, ["id", "kind"], "left")
    rows = judged.keep(_lived(judged, lives))
    return Replacement(DRIFT, shaped(DRIFT, rows), rows.where("held").select(*known_keys(DRIFT)))


# --- findings of a run ---------------------------------------------------------------------------


def _found(judged: JudgedRun) -> DataFrame:
    """Return this run's findings; columns as in `judged.FOUND`."""
    # A row with findings is in the folder of the gravest one; other folders are not opened.
    drifted = judged.verdicts.where(F.col("verdict").isin(*KIND_NAMES))
    place = _place(judged.names)
    parts = [
        drifted.select("id", F.explode("findings").alias("kind"), "grp", place, "why").select(
            "id", "kind", "grp", "place.*", "why"
        )
    ]
    if judged.summary.drift.get("unreadable") and judged.broken is not None:
        position = F.format_string("%s-%d@%d", "topic", "partition", "offset")
        parts.append(
            judged.broken.where("own").select(
                position.alias("id"),
                F.lit("unreadable").alias("kind"),
                F.lit("").alias("grp"),
                *("topic", "partition", "offset", "why"),
            )
        )
    if judged.missing is not None:
        parts.append(judged.missing.where("kept").select(*FOUND_COLUMNS))
    if judged.business is not None:
        parts.append(judged.business.select(*FOUND_COLUMNS))
    return reduce(DataFrame.unionAll, parts)


def _place(names: TopicNames) -> Column:
    """Return where a transaction's evidence is."""

    def at(topic: Column, partition: Column, offset: Column) -> Column:
        return F.struct(topic.alias("topic"), partition.alias("partition"), offset.alias("offset"))

    shown, home = F.get("places", F.lit(0)), F.col("half_partition")
    visible = at(shown["topic"], shown["partition"], shown["offset"])
    marker = at(F.lit(names.op), home, F.col("op_offset"))
    half = at(F.lit(names.half), home, F.col("half_offset"))
    return (
        F.when(shown.isNotNull(), visible)
        .when(F.col("op_offset").isNotNull(), marker)
        .when(F.col("half_offset").isNotNull(), half)
        .alias("place")
    )


# --- their life -------------------------------------------------------------------------------


def _lived(judged: JudgedRun, lives: DataFrame) -> DataFrame:
    """Return the changed rows, and whether the table holds each (`held`).

    `lives`: `new`, a finding of this run; `old`, the row in the table; `verdict`, `state`,
    `findings` and `topics` of the transaction in this run; each null where there is none.
    """
    new, old, kind = F.col("new"), F.col("old"), F.col("kind")
    now, run = moment(judged.now_ms), F.lit(judged.run)
    found, end, accepted = new.isNotNull(), F.col("end"), F.col("accepted")
    # What others use several times is a column: as a part of their text, Java would parse it again
    # each time.
    for columns in (
        {"target": _target(judged), **_acknowledged(judged)},
        {"best": _best(), "vanished": _vanished()},
        {"accepted": _accepted(judged), "end": F.when(new.isNull(), _end(judged))},
    ):
        lives = F.with_columns(lives, columns)
    opens = found & (old.isNull() | (old["state"] != "open"))
    same = [old[f"acknowledged_{name}"].eqNullSafe(accepted[name]) for name in ("at", "until")]
    accepts = end.isNull() & accepted.isNotNull() & (opens | ~(same[0] & same[1]))
    closed = F.when(end.isNotNull(), F.struct(now.alias("at"), run.alias("run")))
    lived = {
        "day": F.coalesce(old["day"], F.to_date(now)),
        "installation": F.lit(judged.names.prefix),
        "severity": _severity(kind),
        **{
            name: F.when(found, new[name]).otherwise(old[name])
            for name in ("grp", "topic", "partition", "offset", "why")
        },
        "state": F.coalesce(end, F.lit("open")),
        "opened_at": F.coalesce(old["opened_at"], now),
        "opened_run": F.when(opens, run).otherwise(old["opened_run"]),
        "seen_at": F.when(found, now).otherwise(old["seen_at"]),
        "seen_run": F.when(found, run).otherwise(old["seen_run"]),
        "times": F.coalesce(old["times"], F.lit(0)) + found.cast("int"),
        "closed_at": closed["at"],
        "closed_run": closed["run"],
        **{
            f"acknowledged_{name}": F.when(accepts, value).otherwise(old[f"acknowledged_{name}"])
            for name, value in (
                *((name, accepted[name]) for name in ("at", "by", "why", "until")),
                ("run", run),
            )
        },
        "held": old.isNotNull(),
    }
    changed = lives.where(found | end.isNotNull() | accepts)
    return F.select(changed, "id", "kind", *(value.alias(name) for name, value in lived.items()))


def _end(judged: JudgedRun) -> Column:
    """Return how an open finding that was not found again ended; null where it is still open."""
    kind, verdict = F.col("kind"), F.col("verdict")
    seen = kind.isin(*IN_TARGET)
    # A message that is only late by terms and clocks of this run may be lost.
    worse = F.array_contains("findings", "lost")
    still_waits = kind.isin(*NOT_VISIBLE) & (F.col("state") == "committed") & ~worse
    # By clocks that went back, an open transaction is younger than when it was found.
    younger = (F.col("old")["seen_at"] > moment(judged.now_ms)) & F.col("state").isin(*_UNDECIDED)
    again = (
        F.when(verdict == "gone", "expired")
        .when(seen & F.col("vanished"), "expired")
        # By its age, which depends on terms and clocks, or because a promotion may be in flight.
        .when(still_waits | ((kind == "refused_visible") & (F.col("state") == "refused")), None)
        .when(younger, None)
        .when(verdict.isNotNull(), "healed")
    )
    # A full run reads all records that there are.
    unread = F.lit("expired" if judged.is_full else None).cast("string")
    looked = F.lit(not judged.is_part) | verdict.isNotNull()
    # A transaction that no run knows any more is not found again, whether healed or not.
    id = F.col("id")
    unknown = id_time_ms(id) <= of_partition(judged.unknown_to_ms, id_partition(id))
    lost_sight = (verdict.isNull() | (verdict == "gone")) & unknown
    expired = (verdict == "gone") | lost_sight
    # Rows are compared with the transactions of all groups.
    other = (
        (kind == "message_without_row") & ~F.col("old")["grp"].isin(*judged.groups)
        if judged.groups
        else F.lit(False)
    )
    compared = F.lit(judged.business is not None) & ~F.coalesce(other, F.lit(False))
    # A part is not compared with all transactions of its order keys.
    alone = F.lit(judged.is_part) & (kind == "out_of_order") & (verdict != "gone")
    return (
        F.when((kind == "unreadable") | alone, unread)
        .when((seen | kind.isin(*NOT_VISIBLE, "target_missing")) & _unread(judged), None)
        .when(
            kind == "target_missing",
            F.when(F.col("removed") | (looked & lost_sight), "expired")
            .when(_missing(judged) & (F.col("state") != "refused"), None)
            .when(verdict != "gone", "healed")
            .when(verdict.isNull(), unread),
        )
        .when(
            kind.isin(*_BUSINESS),
            F.when((verdict == "gone") | (compared & expired), "expired").when(compared, "healed"),
        )
        .otherwise(F.when(verdict.isNull(), unread).otherwise(again))
    )


def _targets(judged: JudgedRun) -> Sequence[TopicRead]:
    cut = judged.summary.cut
    return () if cut is None else cut.targets


def _unread(judged: JudgedRun) -> Column:
    """Return whether a target of the transaction, or with the evidence, could not be read."""
    names = [target.topic for target in _targets(judged) if target.unread]
    return _is_for(names) | F.coalesce(F.col("old")["topic"].isin(*names), F.lit(False))


def _missing(judged: JudgedRun) -> Column:
    """Return whether a target of the transaction does not exist."""
    return _is_for([each.topic for each in _targets(judged) if not (each.ends or each.unread)])


def _target(judged: JudgedRun) -> Column:
    """Return what the run has read of the target with the evidence; null where that is none."""
    known = {
        each.topic: {"starts": each.starts, "since": each.since}
        for each in _targets(judged)
        if not each.unread
    }
    text = msgspec.json.encode(known).decode()
    targets = F.from_json(F.lit(text), "map<string, struct<starts: array<bigint>, since: string>>")
    return F.try_element_at(targets, F.col("old")["topic"])


def _vanished() -> Column:
    """Return whether the evidence is a record of a target that is not there any more."""
    target, old = F.col("target"), F.col("old")
    start = F.get(target["starts"], old["partition"])
    # A topic that was deleted, or created again, may have fewer partitions.
    removed = F.coalesce(old["offset"] < start, F.lit(True))
    again = target["since"] > old["seen_run"]
    return F.coalesce(target.isNotNull() & (again | removed), F.lit(False))


def _is_for(topics: Sequence[str]) -> Column:
    """Return whether the transaction has a message for one of these topics."""
    names = F.array(*map(F.lit, topics)).cast("array<string>")
    return F.coalesce(F.arrays_overlap("topics", names), F.lit(False))


def _severity(kind: Column) -> Column:
    pairs = [F.lit(text) for each in ALL_KINDS for text in (each.name, each.severity)]
    return F.try_element_at(F.create_map(*pairs), kind)


# --- acknowledgements --------------------------------------------------------------------------

_GIVEN = "at bigint, by string, why string, until bigint"


def _acknowledged(judged: JudgedRun) -> dict[str, Column]:
    """Return the newest acknowledgements of a finding: `one` of its transaction, and `every` of its
    group."""
    valid = [each for each in judged.acknowledged if each.until_ms > judged.now_ms]
    newest = {
        _key(each.id, each.kind, each.grp): {
            "at": each.at_ms, "by": each.by, "why": each.why, "until": each.until_ms
        }
        for each in sorted(valid, key=lambda each: each.at_ms)
    }  # fmt: skip
    text = msgspec.json.encode(newest).decode()
    known = F.from_json(F.lit(text), f"map<string, struct<{_GIVEN}>>")
    group = F.coalesce(F.col("new")["grp"], F.col("old")["grp"])
    return {
        "one": F.try_element_at(known, F.concat_ws("\n", "id", "kind", F.lit(""))),
        "every": F.try_element_at(known, F.concat_ws("\n", F.lit(""), "kind", group)),
    }


def _best() -> Column:
    one, every = F.col("one"), F.col("every")
    return F.coalesce(F.when(one["at"] >= F.coalesce(every["at"], F.lit(0)), one), every)


def _accepted(judged: JudgedRun) -> Column:
    """Return the acknowledgement of a finding: the newest that names it, or the one in the table,
    which ends now if it was withdrawn; null without any."""
    now, old, best = moment(judged.now_ms), F.col("old"), F.col("best")
    named = _given(moment(best["at"]), best["by"], best["why"], moment(best["until"]))
    known_one = _given(*(old[f"acknowledged_{name}"] for name in ("at", "by", "why")), now)
    return F.when(best.isNotNull(), named).when(old["acknowledged_until"] > now, known_one)


def _given(*columns: Column) -> Column:
    names = ("at", "by", "why", "until")
    return F.struct(*(each.alias(name) for each, name in zip(columns, names, strict=True)))


def _key(id: str, kind: str, group: str) -> str:
    return "\n".join((id, kind, group))


# --- counts ------------------------------------------------------------------------------------


class DriftTotals(NamedTuple):
    """Counts by kind, after a run.

    Attributes:
        open: open findings in the table.
        acknowledged: those of this run's findings that are acknowledged.
        changed: rows that this run changed.
    """

    open: dict[str, int]
    acknowledged: dict[str, int]
    changed: int


def count_findings(
    judged: JudgedRun, change: Replacement | None, read: Callable[[Table], DataFrame]
) -> DriftTotals:
    """Count the findings after a run; `change` and `read` as in `drift`."""
    run, before = judged.run, judged.before
    left = Counter[str]({} if before is None else before.open_findings)
    if change is None:
        return DriftTotals(dict(left), {}, 0)
    if before is None and not judged.first:
        current = read(DRIFT).where("state = 'open'").groupBy("kind").count()
        left = Counter({row["kind"]: row["count"] for row in current.collect()})
    accepted = (F.col("seen_run") == run) & (F.col("acknowledged_until") > moment(judged.now_ms))
    counts = change.rows.groupBy("kind").agg(
        F.count("*").alias("changed"),
        F.count_if(F.col("opened_run") == run).alias("opened"),
        F.count_if(F.col("closed_run") == run).alias("closed"),
        F.count_if(accepted).alias("acknowledged"),
    )
    rows = counts.collect()
    for row in rows:
        left[row["kind"]] += row["opened"] - row["closed"]
    return DriftTotals(
        {kind: number for kind, number in left.items() if number},
        {row["kind"]: row["acknowledged"] for row in rows if row["acknowledged"]},
        sum(row["changed"] for row in rows),
    )
