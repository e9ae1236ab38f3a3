"""Facts from the operation topic: one row a marker, with the messages that came with a commit."""

from collections.abc import Sequence
from functools import reduce
from sys import float_info
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from txbroker.core.encoding import (
    VERSION_HEADER,
)
from txbroker.core.records import RECORD_VERSION, MarkerKind, Source
from txbroker.spark.facts.messages import (
    JSON_OPTIONS,
    NEWER,
    POSITION,
    MessageColumns,
    body_hash,
    first_reason,
    headers_hash,
    id_partition,
    id_time_ms,
    is_id,
    is_own,
    is_own_id,
    not_true,
)

_INT_MAX = (1 << 31) - 1

_TEXT = r'"[^"\\\x00-\x1f]*"'

_INTEGER = r"(?:0|-?[1-9][0-9]{0,8})"

_OFFSET = r"(?:0|-?[1-9][0-9]{0,17})"

_SECONDS_JSON = r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,2})?"

_OPTIONAL = (
    ("half", _OFFSET),
    ("source", f'"(?:{"|".join(Source)})"'),
    ("group", _TEXT),
    ("by", _TEXT),
    ("reason", _TEXT),
    ("round", _INTEGER),
    ("number", _INTEGER),
    ("claim", _TEXT),
    ("endpoint", _TEXT),
    ("previous", _TEXT),
    ("later_s", _SECONDS_JSON),
    ("contents", _INTEGER),
)
"""The optional fields of a marker, in the order in which our encoder writes them."""
_PLAIN = (
    rf'\A\{{"v":[1-{RECORD_VERSION}],"kind":"(?:{"|".join(MarkerKind)})","id":{_TEXT}'
    + "".join(f'(?:,"{name}":{value})?' for name, value in _OPTIONAL)
    + r"\}\z"
)
"""Nearly every marker, as our encoder writes it. Spark's JSON reader accepts much that is no
marker; text that matches this pattern is always one."""
_TYPES = {_TEXT: ("STRING",), _INTEGER: ("BIGINT",), _OFFSET: ("BIGINT",)}

_NUMBERS = ("BIGINT", "DOUBLE", "DECIMAL", "FLOAT")

_MARKER = (
    "v bigint, kind string, id string, source string, `group` string, reason string, "
    "round bigint, number bigint, later_s double, contents bigint"
)


_CONTENT = (
    "struct<seq: int, topic: string, target_partition: int, body: bigint, headers: bigint, "
    "timestamp_ms: bigint>"
)


class _Json:
    """A text that should be one JSON object, examined field by field."""

    def __init__(self, text: Column) -> None:
        # In brackets, so that text after the object is found too.
        self._parsed = F.try_parse_json(F.concat(F.lit("["), text, F.lit("]")))
        self.is_one = F.schema_of_variant(self._at("$[0]")).startswith("OBJECT") & (
            self._at("$[1]").isNull()
        )

    def _at(self, path: str) -> Column:
        return F.try_variant_get(self._parsed, path, "variant")

    def has(self, field: str, types: Sequence[str]) -> Column:
        """Return whether a field has one of these types; null where it is absent."""
        field_type = F.schema_of_variant(self._at(f"$[0].{field}"))
        return F.substring_index(field_type, "(", 1).isin(*types)

    def may_have(self, field: str, types: Sequence[str]) -> Column:
        """Return whether a field, if present, has one of these types."""
        return F.coalesce(self.has(field, types), F.lit(True))

    def is_newer(self) -> Column:
        """Return whether its version is newer than ours."""
        version = F.try_variant_get(self._parsed, "$[0].v", "bigint")
        return self.has("v", ("BIGINT",)) & (version > RECORD_VERSION)


def _strict(json: _Json) -> Column:
    """Return whether a text is an object with the fields of a marker; others are ignored."""
    required = json.has("v", ("BIGINT",)) & json.has("kind", ("STRING",))
    optional = [
        json.may_have(name, _TYPES.get(form, _NUMBERS if name == "later_s" else ("STRING",)))
        for name, form in _OPTIONAL
    ]
    all_typed = reduce(Column.__and__, optional, required & json.has("id", ("STRING",)))
    return F.coalesce(json.is_one & all_typed, F.lit(False))


def op_facts(records: DataFrame) -> DataFrame:
    """Return the facts of records of the operation topic.

    Columns: those of `schema.OP` without `clock_ms`, `early` and `contents`; `content`, a message
    that replaces a prepared one (its marker lies `content.seq + 1` offsets before it), and its
    `content_count`, both null for markers; `why` and `own`.
    """
    is_content = F.get("headers", F.lit(0)).getField("key").eqNullSafe(F.lit(VERSION_HEADER))
    # Nearly all records are markers; without headers, message columns cost nothing.
    part = MessageColumns(records.withColumn("headers", F.when(is_content, F.col("headers"))))
    is_content = F.col("_first").isNotNull()
    text = F.col("value").cast("string")
    # Spark evaluates a shared expression for every row, used or not. A column that is null for
    # nearly all rows keeps it from parsing each of them.
    odd = F.when(~is_content & ~text.rlike(_PLAIN), text)
    part.records = part.records.withColumn("_odd", odd)
    json = _Json(F.col("_odd"))
    plain = F.col("_odd").isNull()
    reads = plain | _strict(json)
    marker = F.when(
        ~is_content & reads & F.is_valid_utf8(text), F.from_json(text, _MARKER, JSON_OPTIONS)
    )
    content = F.struct(
        part.seq.alias("seq"),
        part.topic.alias("topic"),
        part.target_partition.alias("target_partition"),
        body_hash(part.key, part.value).alias("body"),
        headers_hash(part.user_headers).alias("headers"),
        part.timestamp_ms.alias("timestamp_ms"),
    )
    newer = F.when(~plain, json.is_newer())
    read = part.records.select(
        *POSITION,
        marker.alias("marker"),
        F.when(is_content, content).alias("content"),
        F.when(is_content, part.count).alias("content_count"),
        F.when(is_content, part.id).alias("content_id"),
        F.when(is_content, part.why())
        .when(F.col("value").isNull(), F.lit("a marker without a value"))
        .when(newer, F.lit(NEWER))
        .alias("unread"),
        F.col("key").cast("string").alias("key"),
        part.is_ours.alias("is_ours"),
    )
    return _markers(read)


def _int(number: Column) -> Column:
    """Return a number of a marker, 0 where it is absent, bounded by its column's type."""
    known = F.coalesce(number, F.lit(0))
    return F.greatest(F.least(known, F.lit(_INT_MAX)), F.lit(-_INT_MAX)).try_cast("int")


def _markers(read: DataFrame) -> DataFrame:
    marker = F.col("marker")
    id, contents = marker["id"], _int(marker["contents"])
    why = first_reason(
        [
            (marker.isNull() | not_true(marker["kind"].isin(*MarkerKind)), "it is not a marker"),
            (F.abs(marker["later_s"]) > F.lit(float_info.max), "it is not a marker"),
            (
                not_true(F.coalesce(marker["source"], F.lit(Source.PRODUCER)).isin(*Source)),
                "source",
            ),
            (marker["v"] > RECORD_VERSION, NEWER),
            (not_true(F.col("key") == id), "its key is not its transaction's id"),
            (
                (contents < 0) | ((contents > 0) & (marker["kind"] != MarkerKind.COMMIT)),
                "it replaces messages but is not a commit",
            ),
            (not_true(is_id(id)), "its id is not a transaction id"),
            (id_partition(id) != F.col("partition"), "its id belongs to another partition"),
        ]
    )
    is_marker = F.col("content").isNull()
    why = F.coalesce(F.col("unread"), F.when(is_marker, why))
    ours = F.when(is_marker, is_own_id(F.col("key"))).otherwise(F.col("is_ours"))
    return read.select(
        F.coalesce(F.col("content_id"), id).alias("id"),
        id_time_ms(id).alias("id_ms"),
        *POSITION,
        marker["kind"].alias("kind"),
        F.when(is_marker, F.coalesce(marker["source"], F.lit(Source.PRODUCER))).alias("source"),
        F.when(is_marker, F.coalesce(marker["group"], F.lit(""))).alias("grp"),
        F.when(is_marker, _int(marker["round"])).alias("round"),
        F.when(is_marker, _int(marker["number"])).alias("number"),
        F.when(is_marker, F.coalesce(marker["reason"], F.lit(""))).alias("reason"),
        F.when(
            is_marker, F.coalesce(F.rint(marker["later_s"] * 1000).try_cast("bigint"), F.lit(0))
        ).alias("later_ms"),
        F.when(is_marker, contents).alias("contents_count"),
        "content",
        "content_count",
        why.alias("why"),
        is_own(why, ours).alias("own"),
    )


_LOOSE = "a replaced message without its commit marker"

_TORN = "its replaced messages are incomplete"


class JoinedMarkers(NamedTuple):
    """`markers`: the valid markers, with `contents`. `broken`: records of incomplete batches,
    with `why`."""

    markers: DataFrame
    broken: DataFrame


def with_contents(rows: DataFrame) -> JoinedMarkers:
    """Join markers with the messages that follow them.

    Args:
        rows: `op_facts` without records that do not parse.
    """
    messages = rows.where(F.col("content").isNotNull())
    base = F.col("offset") - F.col("content")["seq"] - 1
    batches = (
        messages.select("partition", base.alias("base"), "id", "content_count", "content")
        .groupBy("partition", "base")
        .agg(
            F.array_sort(F.collect_list("content")).alias("contents"),
            F.min("id").alias("first_id"),
            F.max("id").alias("last_id"),
            F.min("content_count").alias("least"),
            F.max("content_count").alias("most"),
        )
    )
    markers = rows.where(F.col("content").isNull())
    announcing = markers.where("contents_count > 0").drop("contents")
    count = F.col("contents_count")
    joined = announcing.join(
        batches.withColumnRenamed("base", "offset"), ["partition", "offset"], "left"
    ).withColumn(
        "whole",
        F.coalesce(
            (F.size("contents") == count)
            & (F.col("least") == count)
            & (F.col("most") == count)
            & (F.col("first_id") == F.col("id"))
            & (F.col("last_id") == F.col("id")),
            F.lit(False),
        ),
    )
    whole = joined.where("whole")
    plain = markers.where("contents_count = 0")
    columns = [name for name in rows.columns if name != "contents"]
    torn = joined.where("NOT whole").select(*columns, F.lit(_TORN).alias("why_not"))
    bases = whole.select("partition", F.col("offset").alias("base"))
    loose = messages.withColumn("base", base).join(bases, ["partition", "base"], "left_anti")
    loose = loose.select(*columns, F.lit(_LOOSE).alias("why_not"))
    return JoinedMarkers(
        plain.unionByName(whole.select(*columns, "contents"), allowMissingColumns=True),
        torn.unionByName(loose).withColumn("why", F.col("why_not")).drop("why_not"),
    )
