"""Facts out of Kafka records: Spark SQL expressions that read what `txbroker.core.encoding` writes.

Every function takes a DataFrame of the Kafka source, batch or streaming, after `with_at_ms`, and
returns one narrow row for each record. Where that does not read, `why` says so, and `own` whether
it is one of ours; `why` is null for all others. No body goes on, only 64-bit hashes: those of a
half message and of the record that was promoted from it are equal where nothing was changed. No
record may raise an error here: in ANSI mode that ends the whole run. So texts become numbers by
`try_cast` only.
"""

from collections.abc import Sequence
from functools import reduce
from sys import float_info

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from txbroker.core.encoding import (
    DEFAULT_PREFIX,
    DURATION_MAX_S,
    ID_HEADER,
    INSTALLATION_HEADER,
    SEQUENCE_HEADER,
    VERSION_HEADER,
)
from txbroker.core.records import RECORD_VERSION, CheckPolicy, MarkerKind, Source, State
from txbroker.spark.id_columns import id_partition, id_time_ms, is_id

_FIXED = ("txb-id", "txb-group", "txb-topic", "txb-part", "txb-seq")
_NATURAL = r"\A[0-9]{1,19}\z"
_SEQUENCE = r"\A[0-9]{1,19}/[0-9]{1,19}\z"
_SECONDS = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_POLICY = rf"\A{_SECONDS}/{_SECONDS}/[0-9]{{1,19}}/{_SECONDS}\z"
_NEWER = "a newer version of txbroker wrote it"
_INT_MAX = (1 << 31) - 1
_NOWHERE = b"\x00txbroker: found in no header\x00"

_USUAL = {
    " ".join((str(version), *optional)): (
        VERSION_HEADER,
        *_FIXED,
        *(f"txb-{name}" for name in optional),
    )
    for version in range(1, RECORD_VERSION + 1)
    for timestamp in ((), ("ts",))
    for others in (("check",), (), ("check", "order"), ("check", "dedup"))
    for optional in ((*timestamp, *others),)
}
"""Nearly all first headers, as our encoder writes them, and the names of all that are ours: what is
said of these is quickly found, and the same as of any other."""
_USUAL_MAX = max(map(len, _USUAL.values()))
_DEFAULT_POLICY = (
    f"{CheckPolicy().after_s:g}/{CheckPolicy().interval_s:g}/"
    f"{CheckPolicy().attempts_max}/{CheckPolicy().timeout_s:g}"
)

_BASE = ("partition", "offset", "at_ms")
"""What every row tells of its record: half or target partition, offset, append time."""


def _any_of(conditions: Sequence[tuple[Column, str]]) -> Column:
    """Return the reason of the first condition that is true, null where none is."""
    first = F.when(*conditions[0][:1], F.lit(conditions[0][1]))
    return reduce(lambda chain, each: chain.when(each[0], F.lit(each[1])), conditions[1:], first)


def _not(condition: Column) -> Column:
    """Say whether a condition is false, or null."""
    return ~F.coalesce(condition, F.lit(False))


def with_at_ms(records: DataFrame) -> DataFrame:
    """Return records of the Kafka source with their timestamps in ms since 1970, as `at_ms`."""
    return records.withColumn("at_ms", F.unix_millis("timestamp")).drop("timestamp")


# --- whose a record is --------------------------------------------------------------------------


def _is_ours(id: Column) -> Column:
    """Say whether a text is the id of a transaction of the record's own partition."""
    return F.coalesce(id_partition(id) == F.col("partition"), F.lit(False))


def _own(why: Column, ours: Column) -> Column:
    """Say whether a record that does not read is one of ours; a newer version's does not count."""
    return F.coalesce((why != _NEWER) & ours, F.lit(False))


# --- hashes ----------------------------------------------------------------------------------


def body_hash(key: Column, value: Column) -> Column:
    """Return the hash of a message's key and value, in which null and empty differ."""
    return F.xxhash64(key.isNull(), key, value.isNull(), value)


def headers_hash(headers: Column) -> Column:
    """Return the hash of headers in their order. Null hashes as no headers do."""
    values = headers.getField("value")
    # Spark's hash of an array passes over nulls, so where they stand is hashed too. What is
    # asked for is never there, and the answer for that is null where any element is.
    has_null = F.array_contains(values, F.lit(_NOWHERE)).isNull() & (F.size(headers) > 0)
    texts = values.cast("array<string>")
    nulls = F.when(has_null, F.array_join(texts, "\x01", _NOWHERE.decode()))
    return F.xxhash64(headers, nulls)


def _order_mark(order: Column, topic: Column, key: Column) -> Column:
    by_key = F.when(key.isNotNull(), F.xxhash64(F.lit("k"), topic, key))
    return F.when(order.isNotNull(), F.xxhash64(F.lit("o"), order)).otherwise(by_key)


# --- half messages ---------------------------------------------------------------------------


class _Part:
    """The columns of records in the form of half messages.

    `records`: the records, with what is needed more than once as columns of its own: Spark does it
    once then, and not in every expression anew.
    """

    def __init__(self, records: DataFrame) -> None:
        first = F.get("headers", F.lit(0))
        told = F.coalesce(first.getField("value").cast("string"), F.lit(""))
        records = records.withColumn(
            "_first", F.when(first.getField("key") == VERSION_HEADER, told)
        )
        self._first = F.col("_first")
        usual = self._first.isin(*_USUAL)
        records = records.withColumns({"_usual": usual, "_names": self._header_names()})
        self._usual, self._names, self._count = F.col("_usual"), F.col("_names"), F.size("_names")
        texts = {f"_text{number}": self._text(number) for number in range(1, 6)}
        options = {f"_{name}": self._optional(name) for name in ("ts", "order", "dedup", "check")}
        self.records = records.withColumns({**texts, **options})
        self.id, self.grp, self.topic, self._partition, self._seq = map(F.col, texts)
        self._ts, self.order, self.dedup, self._check = map(F.col, options)
        self.key, self.value = F.col("key"), F.col("value")
        self.target_partition = self._partition.try_cast("int")
        self.seq = F.substring_index(self._seq, "/", 1).try_cast("int")
        self.count = F.substring_index(self._seq, "/", -1).try_cast("int")
        left = F.greatest(F.size("headers") - self._count, F.lit(0))
        self.user_headers = F.slice("headers", self._count + 1, left)
        self.timestamp_ms = self._ts.try_cast("bigint")
        # Nothing is taken apart, and no number read, where it is the usual one.
        self.records = self.records.withColumn(
            "_policy", F.when(~self._is_default, F.split(self._check, "/"))
        )
        self._policy = F.col("_policy")

    def _header_names(self) -> Column:
        """Return the names of the headers that are ours."""
        # ` ts order` becomes ` txb-ts txb-order`.
        optional = F.substring(self._first, F.length(self._version) + 1, F.length(self._first))
        named = F.replace(optional, F.lit(" "), F.lit(" txb-"))
        fixed = F.lit(" ".join((VERSION_HEADER, *_FIXED)))
        names = F.split(F.concat(fixed, named), " ")
        for first, usual in reversed(_USUAL.items()):
            names = F.when(self._first == first, F.array(*map(F.lit, usual))).otherwise(names)
        return names

    @property
    def _version(self) -> Column:
        return F.substring_index(self._first, " ", 1)

    @property
    def is_ours(self) -> Column:
        """Whether the first header is ours, of a version that we know."""
        known = self._version.try_cast("bigint") <= RECORD_VERSION
        return F.coalesce(self._usual | (self._version.rlike(_NATURAL) & known), F.lit(False))

    def _text(self, number: int) -> Column:
        value = F.get("headers", F.lit(number)).getField("value").cast("string")
        return F.when(self._first.isNotNull(), value)

    def _optional(self, name: str) -> Column:
        return self.optional(f"txb-{name}").cast("string")

    def optional(self, name: str) -> Column:
        """Return the value of an optional header, null where it is not there."""
        at = F.array_position(self._names, name).cast("int")
        return F.when(at > 0, F.get("headers", at - 1).getField("value"))

    def seconds_ms(self, number: int, default_s: float) -> Column:
        """Return a duration of the check policy, ms."""
        seconds = F.coalesce(self._seconds(number), F.lit(default_s))
        told = F.rint(seconds * 1000).try_cast("bigint")
        return F.when(self._is_default, F.lit(round(default_s * 1000)).cast("bigint")).otherwise(
            told
        )

    def _seconds(self, number: int) -> Column:
        return F.get(self._policy, F.lit(number)).try_cast("double")

    @property
    def attempts_max(self) -> Column:
        """How often the check policy lets ask."""
        default = F.lit(CheckPolicy().attempts_max)
        told = F.coalesce(F.get(self._policy, F.lit(2)).try_cast("int"), default)
        return F.when(self._is_default, default).otherwise(told)

    @property
    def _is_default(self) -> Column:
        return self._check.isNull() | (self._check == _DEFAULT_POLICY)

    def why(self) -> Column:
        """Return why the record does not read, null where it does."""
        whole = F.when(self._usual, self._as_named()).otherwise(self._named_once())
        version = self._version.try_cast("bigint")
        texts = (self.id, self.grp, self.topic, self.order, self.dedup)
        readable = reduce(
            Column.__and__,
            [F.coalesce(F.is_valid_utf8(text), F.lit(True)) for text in texts],
            F.is_valid_utf8(self._first),
        )
        numbers = (
            self._partition.rlike(_NATURAL)
            & self._seq.rlike(_SEQUENCE)
            & (self.seq < self.count)
            & self.target_partition.isNotNull()
        )
        stamped = self._ts.isNull() | (self._ts.rlike(_NATURAL) & self.timestamp_ms.isNotNull())
        return _any_of(
            [
                (self._first.isNull(), f"the first header is not {VERSION_HEADER}"),
                (
                    _not(self._usual | self._version.rlike(_NATURAL)),
                    "the version is not a whole number",
                ),
                (_not(self._usual | (version <= RECORD_VERSION)), _NEWER),
                (_not(whole), "its headers are not those that the first one names"),
                (_not(numbers & stamped), "a number in its headers does not read"),
                (_not(readable), "a text in its headers does not read"),
                (_not(self._is_default | self._policy_holds()), "its check policy is none"),
            ]
        )

    def _as_named(self) -> Column:
        """Say whether the headers are those that a usual first one names, each with a value."""
        conditions = []
        for number in range(1, _USUAL_MAX):
            header = F.get("headers", F.lit(number))
            there = (header["key"] == F.get(self._names, F.lit(number))) & header[
                "value"
            ].isNotNull()
            optional = number > len(_FIXED)
            conditions.append((self._count <= number) | there if optional else there)
        return reduce(Column.__and__, conditions)

    def _named_once(self) -> Column:
        """Say whether the headers are those that any first one names, none twice."""
        values = F.slice(F.col("headers").getField("value"), 1, self._count)
        keys = F.slice(F.col("headers").getField("key"), 1, self._count)
        return (
            keys.eqNullSafe(self._names)
            & F.array_contains(values, F.lit(_NOWHERE)).isNotNull()
            & (F.size(F.array_distinct(self._names)) == self._count)
        )

    def _policy_holds(self) -> Column:
        durations = [
            self._seconds(number).between(F.lit(0.0), F.lit(DURATION_MAX_S)) for number in (0, 1, 3)
        ]
        attempts = F.get(self._policy, F.lit(2)).try_cast("int") >= 1
        return reduce(Column.__and__, durations, self._check.rlike(_POLICY) & attempts)


def half_facts(records: DataFrame) -> DataFrame:
    """Return the facts of records of the half topic.

    Columns: those of `schema.HALF` without `clock_ms` and `early`, `why` and `own`. `void` is `id`
    where the id is none, or belongs to another partition, else null.
    """
    part = _Part(records)
    first = part.seq == 0
    default = CheckPolicy()
    of_first = {
        "order_mark": _order_mark(part.order, part.topic, part.key),
        "dedup": part.dedup,
        "after_ms": part.seconds_ms(0, default.after_s),
        "interval_ms": part.seconds_ms(1, default.interval_s),
        "attempts_max": part.attempts_max,
        "timeout_ms": part.seconds_ms(3, default.timeout_s),
    }
    facts = part.records.select(
        part.id.alias("id"),
        *_BASE,
        part.grp.alias("grp"),
        part.seq.alias("seq"),
        part.count.alias("count"),
        part.topic.alias("topic"),
        part.target_partition.alias("target_partition"),
        body_hash(part.key, part.value).alias("body"),
        headers_hash(part.user_headers).alias("headers"),
        part.timestamp_ms.alias("timestamp_ms"),
        *[F.when(first, column).alias(name) for name, column in of_first.items()],
        part.why().alias("why"),
        part.is_ours.alias("_ours"),
    )
    id = F.col("id")
    return (
        facts.withColumn("id_ms", id_time_ms(id))
        .withColumn("void", F.when(~_is_ours(id), F.lit("id")))
        .withColumn("own", _own(F.col("why"), F.col("_ours")))
        .drop("_ours")
    )


# --- the operation topic ---------------------------------------------------------------------

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
"""Nearly every marker, as our encoder writes it. Spark's JSON reader takes much that is no marker;
behind this it cannot be wrong."""
_TYPES = {_TEXT: ("STRING",), _INTEGER: ("BIGINT",), _OFFSET: ("BIGINT",)}
_NUMBERS = ("BIGINT", "DOUBLE", "DECIMAL", "FLOAT")
_MARKER = (
    "v bigint, kind string, id string, source string, `group` string, reason string, "
    "round bigint, number bigint, later_s double, contents bigint"
)
_JSON = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}

_CONTENT = (
    "struct<seq: int, topic: string, target_partition: int, body: bigint, headers: bigint, "
    "timestamp_ms: bigint>"
)


class _Json:
    """A text that should be one JSON object, looked at type by type."""

    def __init__(self, text: Column) -> None:
        # In brackets: what follows behind the object is found too.
        self._parsed = F.try_parse_json(F.concat(F.lit("["), text, F.lit("]")))
        self.is_one = F.schema_of_variant(self._at("$[0]")).startswith("OBJECT") & (
            self._at("$[1]").isNull()
        )

    def _at(self, path: str) -> Column:
        return F.try_variant_get(self._parsed, path, "variant")

    def has(self, field: str, types: Sequence[str]) -> Column:
        """Say whether a field is there and of one of these types; null where it is not there."""
        found = F.schema_of_variant(self._at(f"$[0].{field}"))
        return F.substring_index(found, "(", 1).isin(*types)

    def may_have(self, field: str, types: Sequence[str]) -> Column:
        """Say whether a field, if it is there, is of one of these types."""
        return F.coalesce(self.has(field, types), F.lit(True))

    def is_newer(self) -> Column:
        """Say whether it tells a newer version."""
        version = F.try_variant_get(self._parsed, "$[0].v", "bigint")
        return self.has("v", ("BIGINT",)) & (version > RECORD_VERSION)


def _strict(json: _Json) -> Column:
    """Say whether a text is an object with the fields of a marker, whatever else it holds."""
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
    that replaces one (of the marker that stands `content.seq + 1` offsets before it) and its
    `content_count`, both null for markers; `why` and `own`.
    """
    is_content = F.get("headers", F.lit(0)).getField("key").eqNullSafe(F.lit(VERSION_HEADER))
    # Nearly all are markers: where there are no headers, a part costs nothing.
    part = _Part(records.withColumn("headers", F.when(is_content, F.col("headers"))))
    is_content = F.col("_first").isNotNull()
    text = F.col("value").cast("string")
    # Spark does at the beginning of a row what is done more than once, asked for or not: a column
    # that is null for nearly all is what keeps it from parsing each of them.
    odd = F.when(~is_content & ~text.rlike(_PLAIN), text)
    part.records = part.records.withColumn("_odd", odd)
    json = _Json(F.col("_odd"))
    plain = F.col("_odd").isNull()
    reads = plain | _strict(json)
    marker = F.when(~is_content & reads & F.is_valid_utf8(text), F.from_json(text, _MARKER, _JSON))
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
        *_BASE,
        marker.alias("marker"),
        F.when(is_content, content).alias("content"),
        F.when(is_content, part.count).alias("content_count"),
        F.when(is_content, part.id).alias("content_id"),
        F.when(is_content, part.why())
        .when(F.col("value").isNull(), F.lit("a marker without a value"))
        .when(newer, F.lit(_NEWER))
        .alias("unread"),
        F.col("key").cast("string").alias("key"),
        part.is_ours.alias("is_ours"),
    )
    return _markers(read)


def _int(number: Column) -> Column:
    """Return a number of a marker, 0 where there is none; no larger than its column holds."""
    known = F.coalesce(number, F.lit(0))
    return F.greatest(F.least(known, F.lit(_INT_MAX)), F.lit(-_INT_MAX)).try_cast("int")


def _markers(read: DataFrame) -> DataFrame:
    marker = F.col("marker")
    id, contents = marker["id"], _int(marker["contents"])
    why = _any_of(
        [
            (marker.isNull() | _not(marker["kind"].isin(*MarkerKind)), "it is not a marker"),
            (F.abs(marker["later_s"]) > F.lit(float_info.max), "it is not a marker"),
            (_not(F.coalesce(marker["source"], F.lit(Source.PRODUCER)).isin(*Source)), "source"),
            (marker["v"] > RECORD_VERSION, _NEWER),
            (_not(F.col("key") == id), "its key is not its transaction's id"),
            (
                (contents < 0) | ((contents > 0) & (marker["kind"] != MarkerKind.COMMIT)),
                "replaced messages with what is no commit",
            ),
            (_not(is_id(id)), "its id is no transaction id"),
            (id_partition(id) != F.col("partition"), "its id belongs to another partition"),
        ]
    )
    is_marker = F.col("content").isNull()
    why = F.coalesce(F.col("unread"), F.when(is_marker, why))
    ours = F.when(is_marker, _is_ours(F.col("key"))).otherwise(F.col("is_ours"))
    return read.select(
        F.coalesce(F.col("content_id"), id).alias("id"),
        id_time_ms(id).alias("id_ms"),
        *_BASE,
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
        _own(why, ours).alias("own"),
    )


# --- target topics ---------------------------------------------------------------------------


def visible_facts(records: DataFrame, prefix: str) -> DataFrame:
    """Return the facts of those records of target topics that an installation has promoted.

    Their first header is `txb-id`, of other prefixes than the default one `txb-installation` and
    the second `txb-id`. Columns: those of `schema.VISIBLE`, `why` and `own`, which is never true:
    anybody may write to a target.

    Args:
        prefix: of the installation's own topics.
    """
    headers = F.col("headers")
    its_own = F.lit(True)
    before = 0 if prefix == DEFAULT_PREFIX else 1
    if before:
        named = F.get(headers, F.lit(0))
        its_own = (named.getField("key") == INSTALLATION_HEADER) & (
            named.getField("value") == F.lit(prefix.encode())
        )
    first, second = F.get(headers, F.lit(before)), F.get(headers, F.lit(before + 1))
    sequence = second.getField("value").cast("string")
    seq = F.substring_index(sequence, "/", 1).try_cast("int")
    count = F.substring_index(sequence, "/", -1).try_cast("int")
    # Of a single message there is no such header, so one that is no place among several is
    # the user's.
    ours = F.coalesce(
        (second.getField("key") == SEQUENCE_HEADER)
        & sequence.rlike(_SEQUENCE)
        & (count > 1)
        & (seq < count),
        F.lit(False),
    )
    behind_id, behind_seq = (
        F.slice(headers, begin, F.greatest(F.size(headers) - begin + 1, F.lit(0)))
        for begin in (before + 2, before + 3)
    )
    id = first.getField("value").cast("string")
    return records.where(its_own & (first.getField("key") == ID_HEADER)).select(
        id.alias("id"),
        id_time_ms(id).alias("id_ms"),
        "topic",
        *_BASE,
        F.when(ours, seq).otherwise(0).alias("seq"),
        F.when(ours, count).otherwise(1).alias("count"),
        body_hash(F.col("key"), F.col("value")).alias("body"),
        headers_hash(F.when(ours, behind_seq).otherwise(behind_id)).alias("headers"),
        F.when(ours, headers_hash(behind_id)).alias("headers_if_alone"),
        (F.col("timestampType") == 1).alias("append_time"),
        F.when(_not(is_id(id)), F.lit("its txb-id is no transaction id")).alias("why"),
        F.lit(False).alias("own"),
    )


# --- the parked topic ------------------------------------------------------------------------

_CAUSE = "cause struct<code: string, message: string, topic: string, partition: bigint>"


def parked_facts(records: DataFrame) -> DataFrame:
    """Return the facts of records of the parked topic.

    Columns: those of `schema.PARKED`, `why` and `own`.
    """
    part = _Part(records)
    key = F.col("key").cast("string")
    id = F.substring_index(key, "/", 1)
    number = F.substring(key, F.length(id) + 2, F.length(key))
    tombstone = F.col("value").isNull()
    # Key and null value of the user's message lie in headers, as these are the transaction's.
    value = F.when(part.optional("txb-tombstone").isNull(), F.col("value"))
    kept_text = part.optional("txb-kept").cast("string")
    kept = F.from_json(kept_text, f"state string, half bigint, at_ms bigint, {_CAUSE}", _JSON)
    held = {
        "grp": part.grp,
        "count": part.count,
        "topic": part.topic,
        "target_partition": part.target_partition,
        "body": body_hash(part.optional("txb-key"), value),
        "headers": headers_hash(part.user_headers),
        "timestamp_ms": part.timestamp_ms,
        "due_ms": F.try_add(kept["at_ms"], part.seconds_ms(0, CheckPolicy().after_s)),
    }
    readable = kept_text.isNull() | (
        kept["state"].isin(*State) & kept["half"].isNotNull() & kept["at_ms"].isNotNull()
    )
    why = _any_of(
        [
            (
                _not(F.is_valid_utf8(key) & number.rlike(_NATURAL)),
                "its key is not ID/NUMBER",
            ),
            (~tombstone & part.why().isNotNull(), ""),
            (
                ~tombstone & _not((part.id == id) & (part.seq == number.try_cast("int"))),
                "it lies under another's key",
            ),
            (~tombstone & _not(readable), "what it says of its transaction does not read"),
        ]
    )
    why = F.when(why == "", part.why()).otherwise(why)
    ours = part.is_ours | (_is_ours(id) & number.rlike(_NATURAL))
    return part.records.select(
        id.alias("id"),
        id_time_ms(id).alias("id_ms"),
        *_BASE,
        number.try_cast("int").alias("seq"),
        F.when(~tombstone, kept["state"]).alias("state"),
        F.when(~tombstone, kept["cause"]["code"]).alias("cause"),
        tombstone.alias("tombstone"),
        *[F.when(~tombstone, column).alias(name) for name, column in held.items()],
        why.alias("why"),
        _own(why, ours).alias("own"),
    )
