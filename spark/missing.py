"""Targets that do not exist although transactions were committed to them."""

from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from txbroker.spark.schema import TEXT_MAX, Cut, Example, Terms
from txbroker.spark.summary import EXAMPLES_A_KIND

TOPICS_MAX = 50
"""Topics that are named: those with the most transactions."""


class Missing(NamedTuple):
    """Transactions that were committed to topics that do not exist.

    Attributes:
        transactions: how many there are.
        topics: how many by topic, the most first, a bounded number of topics.
        examples: the oldest of them, a bounded number.
    """

    transactions: int
    topics: dict[str, int]
    examples: tuple[Example, ...]


def missing_topics(cut: Cut) -> list[str]:
    """Return the targets that did not exist when their ends were asked for."""
    return [target.topic for target in cut.targets if not (target.ends or target.unread)]


def unread_topics(cut: Cut) -> dict[str, str]:
    """Return why targets could not be read, by topic; a bounded number of topics."""
    unread = [target for target in cut.targets if target.unread]
    return {target.topic[:TEXT_MAX]: target.unread for target in unread[:TOPICS_MAX]}


def committed_to_missing(verdicts: DataFrame, cut: Cut, terms: Terms) -> Missing:
    """Return the transactions that were committed to topics that do not exist.

    Whether a message was visible before its topic was deleted makes no difference: a run that reads
    everything again cannot know. For the same reason only those count whose half message is still
    there. What was refused is left out, because its copy is kept.

    Args:
        verdicts: for each transaction the row that counts.
        cut: how far the run has read.
        terms: a commit counts once it is late by these.
    """
    starts = F.array(*[F.lit(start).cast("bigint") for start in cut.half.starts])
    found = verdicts.select(
        "id",
        F.coalesce("grp", F.lit("")).alias("grp"),
        "decided_at_ms",
        F.array_intersect("topics", F.array(*map(F.lit, missing_topics(cut)))).alias("missing"),
    ).where(
        (F.col("decision") == "commit")
        & (F.col("state") != "refused")
        & (F.col("decided_at_ms") < terms.now_ms - terms.late_after_ms)
        & (F.col("half_offset") >= F.get(starts, F.col("half_partition")))
        & (F.size("missing") > 0)
    )
    found = found.persist()
    try:
        counts = found.select(F.explode("missing").alias("topic")).groupBy("topic").count()
        most = counts.orderBy(F.col("count").desc(), "topic").head(TOPICS_MAX)
        oldest = found.orderBy("decided_at_ms", "id").head(EXAMPLES_A_KIND)
        return Missing(
            found.count(),
            {row["topic"][:TEXT_MAX]: row["count"] for row in most},
            tuple(
                Example(
                    row["id"],
                    ("target_missing",),
                    row["grp"][:TEXT_MAX],
                    f"committed to {', '.join(row['missing'])}"[:TEXT_MAX],
                )
                for row in oldest
            ),
        )
    finally:
        found.unpersist()
