"""What the audits of an outbox and of a capture share: records of a relay, rows as Parquet, and
the counts of what differs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from msgspec import Struct, convert
from py4j.protocol import Py4JJavaError
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession

from txbroker.core.encoding import ID_HEADER, INSTALLATION_HEADER
from txbroker.spark import expressions as F
from txbroker.spark.access import AuditKafka
from txbroker.spark.facts.bounds import OVERFLOW, find_far
from txbroker.spark.facts.topics import TopicReader, in_words
from txbroker.spark.judge.kinds import Kind
from txbroker.spark.schema import TopicRead

E = TypeVar("E")
EXAMPLES_MAX = 20


class Compared(Struct, frozen=True, kw_only=True):
    """The result of a comparison.

    Attributes:
        rows: number of rows, by state or table.
        records: records of the relay or capture in the topics.
        drift: number of rows, or keys without a row, with each kind of finding.
        gone: rows whose record retention or compaction may have removed.
        young: what changed too shortly before the rows were read to be judged.
        unread: topics and tables that could not be compared, each with the reason.
        kinds: every kind of finding, the gravest first.
    """

    kinds: ClassVar[Sequence[Kind]]
    rows: dict[str, int]
    records: int
    drift: dict[str, int]
    gone: int = 0
    young: int = 0
    unread: dict[str, str] = {}


def of_relay(records: DataFrame, relay: str) -> DataFrame:
    """Return the records that a relay or capture of a name has written, with `id`."""
    first, second = F.get("headers", 0), F.get("headers", 1)
    ours = (
        (first["key"] == INSTALLATION_HEADER)
        & (first["value"] == F.lit(relay.encode()))
        & (second["key"] == ID_HEADER)
    )
    return records.where(ours).withColumn("id", second["value"].cast("string"))


def place() -> Column:
    """Return the column with the place of a record, as `topic-0@7`."""
    return F.concat_ws("", "topic", F.lit("-"), "partition", F.lit("@"), "offset")


@contextmanager
def on_disk(table: DataFrame) -> Iterator[DataFrame]:
    """Keep the rows of a table on disk during the block, from their first use on."""
    table.persist(StorageLevel.DISK_ONLY)
    try:
        yield table
    finally:
        table.unpersist()


@contextmanager
def kept(
    spark: SparkSession,
    access: AuditKafka,
    reads: Sequence[TopicRead],
    facts: Callable[[DataFrame], DataFrame],
) -> Iterator[tuple[DataFrame, int]]:
    """Yield the facts of the records of topics, kept on disk during the block, and their number."""
    reader = TopicReader(spark, access)
    with ExitStack() as stack:
        found = stack.enter_context(on_disk(facts(reader.records(reads))))
        try:
            with in_words():
                count = found.count()
        except (Py4JJavaError, PySparkException) as error:
            far = find_far(access, reads) if OVERFLOW in str(error) else {}
            if not far:
                raise
            parts = [facts(records) for records in reader.around(reads, far)]
            found = stack.enter_context(on_disk(reduce(DataFrame.unionByName, parts)))
            count = found.count()
        yield found, count


def write_rows(
    path: Path, columns: Mapping[str, str], pieces: Iterable[Sequence[Sequence[Any]]]
) -> int:
    """Write rows as a Parquet file, and return their number.

    Args:
        columns: their types by name: those of Spark that are listed below.
        pieces: rows, some at a time.
    """
    import pyarrow as pa
    from pyarrow import parquet

    types = {
        "bigint": pa.int64(),
        "string": pa.string(),
        "binary": pa.binary(),
        "boolean": pa.bool_(),
    }
    schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        for piece in filter(None, pieces):
            count += len(piece)
            arrays = map(pa.array, zip(*piece, strict=True), schema.types)
            writer.write_table(pa.Table.from_arrays(list(arrays), schema=schema))
    return count


class Tally(NamedTuple, Generic[E]):
    """What a comparison found.

    Attributes:
        drift: number of rows by kind of finding, the gravest first.
        apart: number of rows that are not judged, or not whole, by the reason.
        examples: some rows with findings.
    """

    drift: dict[str, int]
    apart: Counter[str]
    examples: tuple[E, ...]


def tally(
    judged: DataFrame, kinds: Sequence[Kind], example: type[E], order: Sequence[str]
) -> Tally[E]:
    """Count a judgement: one row for each id or key, with its `findings`, and with `apart`, the
    reasons why it is not judged, or not whole.

    Args:
        example: what a row becomes, by the names of its columns.
        order: columns of examples.
    """
    drift, apart = Counter[str](), Counter[str]()
    # One job: there are few different rows.
    for row in judged.groupBy("findings", "apart").count().collect():
        for counts, names in ((drift, row["findings"]), (apart, row["apart"])):
            counts.update(dict.fromkeys(names, row["count"]))
    ordered = {kind.name: drift[kind.name] for kind in kinds if kind.name in drift}
    if not drift:
        return Tally(ordered, apart, ())
    found = judged.where(F.size("findings") > 0).orderBy(*order).limit(EXAMPLES_MAX).collect()
    return Tally(ordered, apart, tuple(convert(row.asDict(), example) for row in found))


def findings(tests: Mapping[str, Column], kinds: Sequence[Kind]) -> Column:
    """Return the column with the names of the tests that are true, the gravest first."""
    return F.array_compact(F.array(*[F.when(tests[kind.name], kind.name) for kind in kinds]))
