"""Facts from Kafka records: Spark SQL expressions that parse the records of
`txbroker.core.encoding`.

Every function takes a DataFrame of the Kafka source, batch or streaming, after `with_at_ms`, and
returns one narrow row for each record. `why` is the reason why a record does not parse, null where
it does, and `own` whether the record is txbroker's. Bodies are reduced to 64-bit hashes, which are
equal for a half message and the record promoted from it unless something was changed. No record
may raise an error here: in ANSI mode that would end the run. So texts become numbers by `try_cast`
only.
"""

import operator
from collections.abc import Sequence
from functools import reduce
from sys import float_info
from typing import NamedTuple

from pyspark.sql import Column, DataFrame

from txbroker.core.encoding import (
    DEFAULT_PREFIX,
    DURATION_MAX_S,
    ID_HEADER,
    INSTALLATION_HEADER,
    SEQUENCE_HEADER,
    VERSION_HEADER,
)
from txbroker.core.records import RECORD_VERSION, CheckPolicy, MarkerKind, Source, State
from txbroker.core.routing import ALPHABET, TIME_MAX_MS
from txbroker.spark import expressions as F

_FIXED = ("txb-id", "txb-group", "txb-topic", "txb-part", "txb-seq")
_NATURAL = r"\A[0-9]{1,19}\z"
_SEQUENCE = r"\A[0-9]{1,19}/[0-9]{1,19}\z"
_SECONDS = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_POLICY = rf"\A{_SECONDS}/{_SECONDS}/[0-9]{{1,19}}/{_SECONDS}\z"
NEWER = "a newer version of txbroker wrote it"
JSON_OPTIONS = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
_ABSENT = b"\x00txbroker: found in no header\x00"

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
"""Nearly all first headers as our encoder writes them, with the names of all our headers: the fast
path, with the same result as the general one."""
_USUAL_MAX = max(map(len, _USUAL.values()))
_DEFAULT_POLICY = (
    f"{CheckPolicy().after_s:g}/{CheckPolicy().interval_s:g}/"
    f"{CheckPolicy().attempts_max}/{CheckPolicy().timeout_s:g}"
)

POSITION = ("partition", "offset", "at_ms")
"""Columns of every row: half or target partition, offset, append time."""


def first_reason(conditions: Sequence[tuple[Column, str]]) -> Column:
    """Return the reason of the first condition that is true, null where none is."""
    first = F.when(*conditions[0][:1], F.lit(conditions[0][1]))
    return reduce(lambda chain, case: chain.when(case[0], F.lit(case[1])), conditions[1:], first)


def not_true(condition: Column) -> Column:
    """Return whether a condition is false or null."""
    return ~F.coalesce(condition, F.lit(False))


def with_at_ms(records: DataFrame) -> DataFrame:
    """Return records of the Kafka source with their timestamps in ms since 1970, as `at_ms`."""
    return records.withColumn("at_ms", F.unix_millis("timestamp")).drop("timestamp")


# --- own records --------------------------------------------------------------------------


def is_own_id(id: Column) -> Column:
    """Return whether a text is the id of a transaction of the record's partition."""
    return F.coalesce(id_partition(id) == F.col("partition"), F.lit(False))


def is_own(why: Column, ours: Column) -> Column:
    """Return whether an unreadable record is one of txbroker's; a newer version's does not
    count."""
    # `ours` costs nothing for a record that parses.
    return F.when(why.isNull() | (why == NEWER), F.lit(False)).otherwise(
        F.coalesce(ours, F.lit(False))
    )


# --- hashes ----------------------------------------------------------------------------------


def body_hash(key: Column, value: Column) -> Column:
    """Return the hash of a message's key and value, in which null and empty differ."""
    return F.xxhash64(key.isNull(), key, value.isNull(), value)


def headers_hash(headers: Column) -> Column:
    """Return the hash of headers in their order. Null has the hash of an empty list."""
    values = headers.getField("value")
    # Spark's hash of an array skips nulls, so their positions are hashed too. `array_contains` of
    # an absent value returns null if any element is null.
    has_null = F.array_contains(values, F.lit(_ABSENT)).isNull() & (F.size(headers) > 0)
    texts = values.cast("array<string>")
    nulls = F.when(has_null, F.array_join(texts, "\x01", _ABSENT.decode()))
    return F.xxhash64(headers, nulls)


def _order_mark(order: Column, topic: Column, key: Column) -> Column:
    by_key = F.when(key.isNotNull(), F.xxhash64(F.lit("k"), topic, key))
    return F.when(order.isNotNull(), F.xxhash64(F.lit("o"), order)).otherwise(by_key)


# --- half messages ---------------------------------------------------------------------------


class MessageColumns:
    """Columns of records in the form of half messages.
    `records`: the records with every shared expression as a column, so that Spark evaluates it
    once."""

    def __init__(self, records: DataFrame) -> None:
        first = F.get("headers", F.lit(0))
        text = F.coalesce(first.getField("value").cast("string"), F.lit(""))
        records = records.withColumn(
            "_first", F.when(first.getField("key") == VERSION_HEADER, text)
        )
        self._first = F.col("_first")
        usual = self._first.isin(*_USUAL)
        records = F.with_columns(records, {"_usual": usual, "_names": self._header_names()})
        self._usual, self._names, self._count = F.col("_usual"), F.col("_names"), F.size("_names")
        texts = {f"_text{number}": self._text(number) for number in range(1, 6)}
        options = {f"_{name}": self._optional(name) for name in ("ts", "order", "dedup", "check")}
        self.records = F.with_columns(records, {**texts, **options})
        self.id, self.grp, self.topic, self._partition, self._seq = map(F.col, texts)
        self._ts, self.order, self.dedup, self._check = map(F.col, options)
        self.key, self.value = F.col("key"), F.col("value")
        self.target_partition = self._partition.try_cast("int")
        self.seq = F.substring_index(self._seq, "/", 1).try_cast("int")
        self.count = F.substring_index(self._seq, "/", -1).try_cast("int")
        left = F.greatest(F.size("headers") - self._count, F.lit(0))
        self.user_headers = F.slice("headers", self._count + 1, left)
        self.timestamp_ms = self._ts.try_cast("bigint")
        # The default policy is neither split nor parsed.
        self.records = self.records.withColumn(
            "_policy", F.when(~self._is_default, F.split(self._check, "/"))
        )
        self._policy = F.col("_policy")

    def _header_names(self) -> Column:
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
        """Whether the first header is ours, of a known version."""
        known = self._version.try_cast("bigint") <= RECORD_VERSION
        return F.coalesce(self._usual | (self._version.rlike(_NATURAL) & known), F.lit(False))

    def _text(self, number: int) -> Column:
        value = F.get("headers", F.lit(number)).getField("value").cast("string")
        return F.when(self._first.isNotNull(), value)

    def _optional(self, name: str) -> Column:
        return self.optional(f"txb-{name}").cast("string")

    def optional(self, name: str) -> Column:
        """Return the value of an optional header, null where it is absent."""
        at = F.array_position(self._names, name).cast("int")
        return F.when(at > 0, F.get("headers", at - 1).getField("value"))

    def seconds_ms(self, number: int, default_s: float) -> Column:
        """Return a duration of the check policy, ms."""
        seconds = F.coalesce(self._seconds(number), F.lit(default_s))
        parsed = F.rint(seconds * 1000).try_cast("bigint")
        default = F.lit(round(default_s * 1000)).cast("bigint")
        return F.when(self._is_default, default).otherwise(parsed)

    def _seconds(self, number: int) -> Column:
        return F.get(self._policy, F.lit(number)).try_cast("double")

    @property
    def attempts_max(self) -> Column:
        """Number of attempts that the check policy allows."""
        default = F.lit(CheckPolicy().attempts_max)
        parsed = F.coalesce(F.get(self._policy, F.lit(2)).try_cast("int"), default)
        return F.when(self._is_default, default).otherwise(parsed)

    @property
    def _is_default(self) -> Column:
        return self._check.isNull() | (self._check == _DEFAULT_POLICY)

    def why(self) -> Column:
        """Return why the record does not parse, null where it does."""
        whole = F.when(self._usual, self._as_named()).otherwise(self._named_once())
        version = self._version.try_cast("bigint")
        texts = (self.id, self.grp, self.topic, self.order, self.dedup)
        readable = reduce(
            operator.and_,
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
        return first_reason(
            [
                (self._first.isNull(), f"the first header is not {VERSION_HEADER}"),
                (
                    not_true(self._usual | self._version.rlike(_NATURAL)),
                    "the version is not a whole number",
                ),
                (not_true(self._usual | (version <= RECORD_VERSION)), NEWER),
                (not_true(whole), "its headers differ from those that the first one names"),
                (not_true(numbers & stamped), "a number in its headers does not parse"),
                (not_true(readable), "a text in its headers is not UTF-8"),
                (not_true(self._is_default | self._policy_holds()), "its check policy is invalid"),
            ]
        )

    def _as_named(self) -> Column:
        """Return whether the headers are those that a usual first one names, each with a value."""
        conditions = []
        for number in range(1, _USUAL_MAX):
            header = F.get("headers", F.lit(number))
            matches = (header["key"] == F.get(self._names, F.lit(number))) & header[
                "value"
            ].isNotNull()
            optional = number > len(_FIXED)
            conditions.append((self._count <= number) | matches if optional else matches)
        return reduce(operator.and_, conditions)

    def _named_once(self) -> Column:
        """Return whether the headers are those that any first one names, each once."""
        values = F.slice(F.col("headers").getField("value"), 1, self._count)
        keys = F.slice(F.col("headers").getField("key"), 1, self._count)
        return (
            keys.eqNullSafe(self._names)
            & F.array_contains(values, F.lit(_ABSENT)).isNotNull()
            & (F.size(F.array_distinct(self._names)) == self._count)
        )

    def _policy_holds(self) -> Column:
        durations = [
            self._seconds(number).between(F.lit(0.0), F.lit(DURATION_MAX_S)) for number in (0, 1, 3)
        ]
        attempts = F.get(self._policy, F.lit(2)).try_cast("int") >= 1
        return reduce(operator.and_, durations, self._check.rlike(_POLICY) & attempts)


def half_facts(records: DataFrame) -> DataFrame:
    """Return the facts of records of the half topic.

    Columns: those of `schema.HALF` without `clock_ms` and `early`, `why` and `own`. `void` is `id`
    where the id is invalid or belongs to another partition, else null.
    """
    part = MessageColumns(records)
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
    facts = F.select(
        part.records,
        part.id.alias("id"),
        *POSITION,
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
    elsewhere = not_true(F.col("_id_partition") == F.col("partition"))
    return (
        with_id_parts(facts)
        .withColumn("void", F.when(elsewhere, F.lit("id")))
        .withColumn("own", is_own(F.col("why"), F.col("_ours")))
        .drop("_ours", "_id_partition")
    )


# --- target topics ---------------------------------------------------------------------------


def visible_facts(records: DataFrame, prefix: str) -> DataFrame:
    """Return the facts of the records of target topics that an installation has promoted.

    Their first header is `txb-id`; for a prefix other than the default, `txb-installation` comes
    first and `txb-id` second. Columns: those of `schema.VISIBLE`, `why` and `own`, which is always
    false: any producer may write to a target.
    """
    headers = F.col("headers")
    of_installation = F.lit(True)
    before = 0 if prefix == DEFAULT_PREFIX else 1
    if before:
        named = F.get(headers, F.lit(0))
        of_installation = (named.getField("key") == INSTALLATION_HEADER) & (
            named.getField("value") == F.lit(prefix.encode())
        )
    first, second = F.get(headers, F.lit(before)), F.get(headers, F.lit(before + 1))
    sequence = second.getField("value").cast("string")
    seq = F.substring_index(sequence, "/", 1).try_cast("int")
    count = F.substring_index(sequence, "/", -1).try_cast("int")
    # A single message has no such header, so a header that is no place among several messages is
    # the user's.
    ours = F.coalesce(
        (second.getField("key") == SEQUENCE_HEADER)
        & sequence.rlike(_SEQUENCE)
        & (count > 1)
        & (seq < count),
        F.lit(False),
    )
    after_id, after_seq = (
        F.slice(headers, begin, F.greatest(F.size(headers) - begin + 1, F.lit(0)))
        for begin in (before + 2, before + 3)
    )
    id = first.getField("value").cast("string")
    promoted = records.where(of_installation & (first.getField("key") == ID_HEADER))
    return F.select(
        with_id_parts(promoted.withColumn("id", id)),
        "id",
        "id_ms",
        "topic",
        *POSITION,
        F.when(ours, seq).otherwise(0).alias("seq"),
        F.when(ours, count).otherwise(1).alias("count"),
        body_hash(F.col("key"), F.col("value")).alias("body"),
        headers_hash(F.when(ours, after_seq).otherwise(after_id)).alias("headers"),
        F.when(ours, headers_hash(after_id)).alias("headers_if_alone"),
        (F.col("timestampType") == 1).alias("append_time"),
        F.lit(None).cast("boolean").alias("former"),
        F.when(F.col("id_ms").isNull(), F.lit("its txb-id is not a transaction id")).alias("why"),
        F.lit(False).alias("own"),
    )


# --- the parked topic ------------------------------------------------------------------------

_CAUSE = "cause struct<code: string, message: string, topic: string, partition: bigint>"


def parked_facts(records: DataFrame) -> DataFrame:
    """Return the facts of records of the parked topic.

    Columns: those of `schema.PARKED`, `why` and `own`.
    """
    part = MessageColumns(records)
    key, tombstone = F.col("key").cast("string"), F.col("value").isNull()
    # Each of them is used several times, as part of a text that Java parses.
    shared = {
        "_id": F.substring_index(key, "/", 1),
        "_tombstone": tombstone,
        "_kept_text": part.optional("txb-kept").cast("string"),
        "_unread": F.when(~tombstone, part.why()),
    }
    id, tombstone, kept_text, unread = map(F.col, shared)
    number = F.substring(key, F.length(id) + 2, F.length(key))
    kept_type = f"state string, half bigint, at_ms bigint, {_CAUSE}"
    parsed = {
        "_number": number,
        "_seq": number.try_cast("int"),
        "_kept": F.from_json(kept_text, kept_type, JSON_OPTIONS),
    }
    number, seq, kept = map(F.col, parsed)
    readable = kept_text.isNull() | (
        kept["state"].isin(*State) & kept["half"].isNotNull() & kept["at_ms"].isNotNull()
    )
    same = (part.id == id) & (part.seq == seq)
    why = (
        F.when(not_true(F.is_valid_utf8(key) & number.rlike(_NATURAL)), "its key is not ID/NUMBER")
        .when(unread.isNotNull(), unread)
        .when(~tombstone & not_true(same), "its key is another transaction's")
        .when(~tombstone & not_true(readable), "its description of the transaction does not parse")
    )
    # Key and null value of the user's message lie in headers, as these are the transaction's.
    value = F.when(part.optional("txb-tombstone").isNull(), F.col("value"))
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
    records = part.records
    for columns in (shared, parsed, {"_why": why}):
        records = F.with_columns(records, columns)
    ours = part.is_ours | (is_own_id(id) & number.rlike(_NATURAL))
    return F.select(
        records,
        id.alias("id"),
        id_time_ms(id).alias("id_ms"),
        *POSITION,
        seq.alias("seq"),
        F.when(~tombstone, kept["state"]).alias("state"),
        F.when(~tombstone, kept["cause"]["code"]).alias("cause"),
        tombstone.alias("tombstone"),
        *[F.when(~tombstone, column).alias(name) for name, column in held.items()],
        F.col("_why").alias("why"),
        is_own(F.col("_why"), ours).alias("own"),
    )


_ID = r"\A[0-7][0-9A-HJKMNP-TV-Z]{25}\z"  # 128 bits: the first character has but three
_DIGITS32 = "0123456789ABCDEFGHIJKLMNOPQRSTUV"
_DIGITS = 14
"""Characters of an id before its randomness."""


def is_id(text: Column) -> Column:
    """Return whether a text is a transaction id; null for null."""
    return text.rlike(_ID)


def id_partition(id: Column) -> Column:
    """Return the half partition in a transaction id; null for any other text."""
    return _partition(_digits(id))


def id_time_ms(id: Column) -> Column:
    """Return the time in a transaction id, ms since 1970; null for any other text."""
    return _time_ms(_digits(id))


def with_id_parts(rows: DataFrame) -> DataFrame:
    """Add `id_ms` and `_id_partition` of the column `id`, which is examined once; both are null for
    a text that is no transaction id."""
    digits = F.col("_digits")
    parts = {"id_ms": _time_ms(digits), "_id_partition": _partition(digits)}
    return F.with_columns(F.with_columns(rows, {"_digits": _digits(F.col("id"))}), parts).drop(
        "_digits"
    )


def _digits(id: Column) -> Column:
    """Return the digits of an id before its randomness, as `conv` reads them."""
    digits = F.translate(F.substring(id, 1, _DIGITS), ALPHABET, _DIGITS32)
    return F.when(is_id(id), digits)


def _partition(digits: Column) -> Column:
    # The first 4 characters are 20 bits: 2 that are always zero, 16, and 2 of the time.
    return F.shiftright(_base32(digits, 1, 4), 2).cast("int")


def _time_ms(digits: Column) -> Column:
    # Bits 60 to 114 in 11 characters; the time's are 64 to 111.
    return F.shiftright(_base32(digits, 4, 11), 4).bitwiseAND(F.lit(TIME_MAX_MS))


def _base32(digits: Column, first: int, length: int) -> Column:
    return F.conv(F.substring(digits, first, length), 32, 10).try_cast("bigint")


# --- the operation topic -------------------------------------------------------------------------

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
    all_typed = reduce(operator.and_, optional, required & json.has("id", ("STRING",)))
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
    read = F.select(
        part.records,
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
    id = F.coalesce(F.col("content_id"), F.col("marker")["id"])
    return _markers(with_id_parts(read.withColumn("id", id)))


def _int(number: Column) -> Column:
    """Return a number of a marker, 0 where it is absent, bounded by its column's type."""
    known = F.coalesce(number, F.lit(0))
    return F.greatest(F.least(known, F.lit(_INT_MAX)), F.lit(-_INT_MAX)).try_cast("int")


def _markers(read: DataFrame) -> DataFrame:
    marker = F.col("marker")
    contents = _int(marker["contents"])
    why = first_reason(
        [
            (marker.isNull() | not_true(marker["kind"].isin(*MarkerKind)), "it is not a marker"),
            (F.abs(marker["later_s"]) > F.lit(float_info.max), "it is not a marker"),
            (
                not_true(F.coalesce(marker["source"], F.lit(Source.PRODUCER)).isin(*Source)),
                "source",
            ),
            (marker["v"] > RECORD_VERSION, NEWER),
            (not_true(F.col("key") == marker["id"]), "its key is not its transaction's id"),
            (
                (contents < 0) | ((contents > 0) & (marker["kind"] != MarkerKind.COMMIT)),
                "it replaces messages but is not a commit",
            ),
            (F.col("id_ms").isNull(), "its id is not a transaction id"),
            (
                F.col("_id_partition") != F.col("partition"),
                "its id belongs to another partition",
            ),
        ]
    )
    is_marker = F.col("content").isNull()
    why = F.coalesce(F.col("unread"), F.when(is_marker, why))
    ours = F.when(is_marker, is_own_id(F.col("key"))).otherwise(F.col("is_ours"))
    return F.select(
        read,
        "id",
        "id_ms",
        *POSITION,
        marker["kind"].alias("kind"),
        F.when(is_marker, F.coalesce(marker["source"], F.lit(Source.PRODUCER))).alias("source"),
        F.when(is_marker, F.coalesce(marker["group"], F.lit(""))).alias("grp"),
        F.when(is_marker, _int(marker["round"])).alias("round"),
        F.when(is_marker, _int(marker["number"])).alias("number"),
        # Of other markers it is a person's text, which no verdict depends on.
        F.when(marker["kind"] == MarkerKind.CHECK, F.coalesce(marker["reason"], F.lit("")))
        .otherwise(F.lit(""))
        .alias("reason"),
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
    """Join markers with the messages that follow them. `rows`: of `op_facts`, none broken."""
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
    torn = F.select(joined.where("NOT whole"), *columns).withColumn("why_not", F.lit(_TORN))
    bases = whole.select("partition", F.col("offset").alias("base"))
    loose = messages.withColumn("base", base).join(bases, ["partition", "base"], "left_anti")
    loose = F.select(loose, *columns).withColumn("why_not", F.lit(_LOOSE))
    return JoinedMarkers(
        plain.unionByName(F.select(whole, *columns, "contents"), allowMissingColumns=True),
        torn.unionByName(loose).withColumn("why", F.col("why_not")).drop("why_not"),
    )
