"""Why a verdict or a finding is as it is: its rows in the tables, and the records that led to them.

It reads with pyarrow what runs have stored, so that the answer needs no Spark and takes a second.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
from msgspec import Struct

from txbroker.core.routing import parse_id
from txbroker.errors import ConfigurationError, TxbrokerError
from txbroker.spark.journal import Journal
from txbroker.spark.schema import TEXT_MAX, RunSummary, TopicNames
from txbroker.spark.storage.local import LocalStorage, local_path
from txbroker.spark.tables.formats import MERGED
from txbroker.spark.tables.layout import DRIFT, TRANSACTIONS, Table
from txbroker.spark.tables.manifest import MANIFEST_FILE, manifest_of

Row = dict[str, Any]
_FILE = "__filename"
"""The column in which pyarrow names the file of a row."""
_EPOCH = date(1970, 1, 1)


class NotExplained(TxbrokerError):
    """Runs have stored nothing of a transaction or record; the message names the next step."""


class ReadRecord(Struct, frozen=True):
    """A record that a run has read.

    Attributes:
        kind: `half`, the kind of a marker, `parked`, `visible` or `unreadable`.
        place: its position, `TOPIC-PARTITION@OFFSET`.
        at_ms: its timestamp, ms since 1970.
        what: the record in words.
        run: the run that has read it.
    """

    kind: str
    place: str
    at_ms: int
    what: str
    run: str


class Explanation(Struct, frozen=True):
    """What runs have stored of a transaction, or of an unreadable record.

    Attributes:
        id: the transaction, or the record's position.
        verdict: the row in `transactions`; None: there is none.
        is_open: whether the newest run has judged it, and the next one does so again.
        findings: its rows in `drift`, those that opened last first.
        records: by topic and offset; none where the facts of the runs that have read them were
            removed.
        run: the run that wrote `verdict`; without one, the newest run.
    """

    id: str
    verdict: Row | None
    is_open: bool
    findings: tuple[Row, ...]
    records: tuple[ReadRecord, ...]
    run: RunSummary | None


def explain(out: str, journal: Journal, id: str) -> Explanation:
    """Return what runs have stored of a transaction, or of an unreadable record.

    Args:
        out: the output folder of audits.
        journal: of the same audits.
        id: a transaction's id, or a position as `TOPIC-PARTITION@OFFSET`; it must be valid.

    Raises:
        ConfigurationError: there are no tables, or it cannot read them.
        NotExplained: they hold nothing of it.
    """
    stored = _opened(out, journal)
    try:
        found = stored.of_record(id) if "@" in id else stored.of_transaction(id)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise ConfigurationError(
            f"the tables in {out} cannot be read: {reason}. If a run is changing them, try again"
        ) from None
    if not (found.verdict or found.findings or found.records):
        raise NotExplained(stored.why_nothing(id))
    return found


def _opened(out: str, journal: Journal) -> "_Stored":
    folder = local_path(out)
    if folder is None:
        raise ConfigurationError(
            f"audit explain reads a local folder, not {out}: query the tables `transactions` and "
            "`drift` with `txbroker audit sql`"
        )
    content = LocalStorage().read(f"{out}/{MANIFEST_FILE}")
    series = journal.series() if journal.exists else ""
    manifest = manifest_of(out, content, series=series)
    if manifest is None:
        raise ConfigurationError(f"there are no tables in {out}: run `txbroker audit run` first")
    if manifest.format in MERGED:
        raise ConfigurationError(
            f"audit explain reads tables in Parquet, and those in {out} are of "
            f"{MERGED[manifest.format].title}: query `transactions` and `drift` with "
            "`txbroker audit sql`"
        )
    return _Stored(folder, journal, TopicNames.of(manifest.installation), manifest.expired_before)


class _Stored(NamedTuple):
    """What runs have stored in a folder."""

    folder: Path
    journal: Journal
    names: TopicNames
    expired_before: str | None

    def of_transaction(self, id: str) -> Explanation:
        mine, last = ds.field("id") == id, self.journal.last()
        at_ms = parse_id(id).time_ms
        verdict = next(iter(self._rows(TRANSACTIONS, _day(at_ms).isoformat(), mine)), None)
        since = {} if last is None or last.cut is None else last.cut.since
        records = _Records(self.names, verdict or {}, since)
        # The time narrows the search: Parquet keeps its least and greatest value.
        here = mine & (ds.field("id_ms") == at_ms)
        found = [
            record
            for name, words in records.of.items()
            for record in sorted(map(words, self._facts(name, here)), key=_by_place)
        ]
        run = last if verdict is None else self.journal.get(verdict["run"])
        return Explanation(
            id, verdict, self._is_open(mine), self._findings(mine), tuple(found), run
        )

    def of_record(self, place: str) -> Explanation:
        topic, _, position = place.rpartition("-")
        partition, offset = map(int, position.split("@"))
        fields = {"topic": topic, "partition": partition, "offset": offset}
        here = ds.scalar(True)
        for name, value in fields.items():
            here = here & (ds.field(name) == value)
        found = [
            ReadRecord("unreadable", place, row["at_ms"], row["why"][:TEXT_MAX], row["run"])
            for row in self._facts("broken", here)
        ]
        findings = self._findings(ds.field("id") == place)
        return Explanation(place, None, False, findings, tuple(found), self.journal.last())

    def why_nothing(self, id: str) -> str:
        last = self.journal.last()
        newest = "" if last is None else f" up to {last.run}"
        if "@" in id:
            return (
                f"no run{newest} has set a record at {id} aside: `txbroker audit show last` lists "
                "some that it did"
            )
        day, first = _day(parse_id(id).time_ms), self.expired_before
        if first is not None and day < date.fromisoformat(first):
            return (
                f"{id} is of {day}, and `txbroker audit expire` has removed the rows of all days "
                f"before {first}: `txbroker audit run --full` reads what the topics still hold"
            )
        return (
            f"no run{newest} has read a record of {id}: audit again with `txbroker audit run`, or "
            f"ask the proxies with `txbroker tx show {id}`"
        )

    def _is_open(self, mine: ds.Expression) -> bool:
        last = self.journal.last()
        carry = self.folder / "carry"
        return last is not None and bool(_read(carry.glob(f"run={last.run}/ids/*.parquet"), mine))

    def _findings(self, mine: ds.Expression) -> tuple[Row, ...]:
        rows = self._rows(DRIFT, "*", mine)
        return tuple(sorted(rows, key=lambda row: str(row["opened_at"]), reverse=True))

    def _rows(self, table: Table, day: str, mine: ds.Expression) -> list[Row]:
        rows = _read((self.folder / table.name).glob(f"day={day}/*.parquet"), mine)
        # While a run replaces a row, a reader may find it twice.
        unique = {tuple(row[key] for key in table.keys): row for row in rows}
        return [
            {name: _plain(value) for name, value in row.items() if name != _FILE}
            for row in unique.values()
        ]

    def _facts(self, name: str, mine: ds.Expression) -> Iterator[Row]:
        """Yield the facts of the runs that count, each with its `run`."""
        counts: dict[str, bool] = {}
        for row in _read((self.folder / "facts").glob(f"run=*/{name}/*.parquet"), mine):
            run = Path(row[_FILE]).parent.parent.name.removeprefix("run=")
            if run not in counts:
                counts[run] = self.journal.get(run) is not None
            if counts[run]:
                yield {**row, "run": run}


def _read(files: Iterator[Path], mine: ds.Expression) -> list[Row]:
    found = ds.dataset([str(file) for file in sorted(files)], format="parquet")
    # Files of earlier versions may lack columns.
    schemas = [fragment.physical_schema for fragment in found.get_fragments()]
    if not schemas:
        return []
    schema = pa.unify_schemas(schemas)
    rows = found.replace_schema(schema).to_table([*schema.names, _FILE], filter=mine)
    return list(rows.to_pylist())


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value.isoformat() if isinstance(value, date) else value


def _day(at_ms: int) -> date:
    """Return the day of `transactions` for the time in an id; see `current.day_of`."""
    try:
        return _EPOCH + timedelta(milliseconds=at_ms)
    except OverflowError:
        return _EPOCH


# --- records in words --------------------------------------------------------------------------


class _Records:
    """Facts of a transaction in words.

    `of`: by table, what makes a record of a row.
    """

    def __init__(self, names: TopicNames, verdict: Row, since: Mapping[str, str]) -> None:
        self._names, self._verdict, self._since = names, verdict, since
        self.of = {
            "half": self._half,
            "op": self._marker,
            "parked": self._parked,
            "visible": self._visible,
        }

    def _half(self, row: Row) -> ReadRecord:
        counts = row["void"] and f"does not count: {row['void']}"
        target = f"for {row['topic']}-{row['target_partition']}"
        what = (f"{_message(row)} {target}", f"group {row['grp']}", counts)
        return _evidence("half", self._names.half, row, *what)

    def _marker(self, row: Row) -> ReadRecord:
        kind, replaces = row["kind"], row["contents_count"]
        attempt = row["number"] and f"attempt {row['number']} of round {row['round']}"
        by = kind in ("commit", "rollback", "revive") and f"by {row['source']}"
        later = row["later_ms"] and f"again in {row['later_ms'] / 1000:g} s"
        contents = replaces and f"replaces its messages by {replaces}"
        here = row["offset"] == self._verdict.get("op_offset")
        decides = here and kind in ("commit", "rollback") and "it decides"
        what = (by, attempt, later, row["reason"], contents, decides)
        return _evidence(kind, self._names.op, row, *what)

    def _parked(self, row: Row) -> ReadRecord:
        what = f"copy of {_message(row)}"
        if row["tombstone"]:
            what = f"copy of message {row['seq']} dropped"
        return _evidence("parked", self._names.parked, row, what, row["state"], row["cause"])

    def _visible(self, row: Row) -> ReadRecord:
        topic = row["topic"]
        gone = row["run"] < self._since.get(topic, "") and "in a topic that is there no more"
        return _evidence("visible", topic, row, _message(row), gone)


def _evidence(kind: str, topic: str, row: Row, *what: str | int | None) -> ReadRecord:
    place = f"{topic}-{row['partition']}@{row['offset']}"
    words = ", ".join(str(each) for each in what if each)
    return ReadRecord(kind, place, row["at_ms"], words[:TEXT_MAX], row["run"])


def _message(row: Row) -> str:
    # Counted from 0, as in the sentences of verdicts.
    return f"message {row['seq']} of {row['count']}"


def _by_place(record: ReadRecord) -> tuple[str, int]:
    partition, _, offset = record.place.rpartition("@")
    return partition, int(offset)
