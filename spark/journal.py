"""The audit's journal: one SQLite file with the result of every run.
A row for each run holds the whole summary as JSON, beside plain columns for `sqlite3` and
Datasette; two more tables hold drift by kind, and examples. Another names the runs that the proxies
do not know yet, one holds acknowledgements, and one the name of the series. A run's rows are
written in one transaction, so several processes may share a file.
"""

import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import sqlite_utils
from sqlite_utils.db import Table

from txbroker.errors import ConfigurationError
from txbroker.spark.schema import Acknowledgement, RunSummary
from txbroker.spark.storage.folder import JOURNAL_FILE as JOURNAL_FILE
from txbroker.spark.storage.folder import KeptFile, LocalFile

JOURNAL_VERSION = 1
_APPLICATION_ID = 0x54584241
""""TXBA" in the file's header, so that no other database is mistaken for a journal."""

_WAIT_S = 30.0
"""Maximum wait for another process's write; writing an entry takes milliseconds."""

_DAY_MS = 86_400_000
_BATCH = "mode in ('full', 'incremental')"


class Journal:
    """Results of a series of audits in a SQLite file, opened for each call, so that nothing stays
    locked.

    Every method raises a `ConfigurationError` where the file is no journal, is of a newer version,
    or cannot be used.

    Args:
        file: `DataFolder.journal`, or a local file; the first `add` creates it and its folder.

    Attributes:
        path: where the file is kept.
    """

    def __init__(self, file: KeptFile | Path) -> None:
        self._file = LocalFile(file) if isinstance(file, Path) else file
        self.path = self._file.path

    @property
    def exists(self) -> bool:
        """Whether there is such a file."""
        with self._file.read() as path:
            return path is not None

    def add(self, summary: RunSummary) -> None:
        """Store a run; one of the same name is replaced."""
        with self._changed() as db:
            # Before any read, or two processes could deadlock.
            db.execute("begin immediate")
            _make_tables(db)
            db.execute("delete from drift where run = ?", [summary.run])
            db.execute("delete from examples where run = ?", [summary.run])
            _table(db, "runs").insert(_row(summary), replace=True)
            _table(db, "drift").insert_all(_drift_rows(summary))
            _table(db, "examples").insert_all(_example_rows(summary))
            if summary.continues:  # a stream publishes its results itself
                _table(db, "untold").insert({"run": summary.run}, replace=True)
            if summary.changed_findings:
                _table(db, "unwritten").insert({"run": summary.run}, replace=True)
            db.conn.commit()

    def unpublished(self) -> list[RunSummary]:
        """Return the batch runs with drift that were not published yet, the oldest first."""
        which = "where drift > 0 and run in (select run from untold) order by run"
        return self._select(which, needs="untold")

    def mark_published(self, run: str) -> None:
        """Note that a run, and all before it, were published to the proxies."""
        self._remove("untold", run)

    def unwritten(self) -> list[RunSummary]:
        """Return the runs that changed findings and whose events are not in the drift topic yet,
        the oldest first."""
        which = "where run in (select run from unwritten) order by run"
        return self._select(which, needs="unwritten")

    def mark_written(self, run: str) -> None:
        """Note that the events of a run, and of all before it, are in the drift topic."""
        self._remove("unwritten", run)

    def _remove(self, table: str, run: str) -> None:
        with self._changed() as db:
            if table in db.table_names():
                db.execute(f"delete from {table} where run <= ?", [run])
                db.conn.commit()

    def last(self) -> RunSummary | None:
        """Return the newest batch run, full or incremental, which the next one continues."""
        return next(iter(self._select(f"where {_BATCH} order by run desc limit 1")), None)

    def newest(self) -> RunSummary | None:
        """Return the newest run of any mode but `stream`."""
        which = "where mode <> 'stream' order by run desc limit 1"
        return next(iter(self._select(which)), None)

    def runs(self, limit: int = 50) -> list[RunSummary]:
        """Return the newest runs of all modes, the newest first."""
        return self._select("order by started_ms desc, run desc limit ?", limit)

    def daily(self, days: int, until_ms: int) -> list[RunSummary]:
        """Return the last batch, full or incremental, of each of these days in UTC, the oldest
        first. The last day is that of `until_ms`, ms since 1970."""
        last = f"select max(run) as run, started_ms / {_DAY_MS} as day from runs where {_BATCH}"
        of_days = f"select run from ({last} group by day) where day > ? and day <= ?"
        day = until_ms // _DAY_MS
        return self._select(f"where run in ({of_days}) order by run", day - days, day)

    def transactions(self) -> int:
        """Return how many transactions runs have judged; as many rows may be in the tables."""
        with self._read() as db:
            if db is None or not _version(db):
                return 0
            counted = db.execute(f"select sum(transactions) from runs where {_BATCH}").fetchone()
            return int(counted[0] or 0)

    def get(self, run: str) -> RunSummary | None:
        """Return a run by name, None where there is none."""
        return next(iter(self._select("where run = ?", run)), None)

    def series(self) -> str:
        """Return the random name of this series of audits, drawn by the first call."""
        for known in self._rows("series", ""):
            return str(known["name"])
        with self._changed() as db:
            db.execute("begin immediate")
            _make_tables(db)
            for row in db.execute("select name from series"):
                return str(row[0])
            name = secrets.token_hex(8)
            _table(db, "series").insert({"name": name})
            db.conn.commit()
            return name

    # --- acknowledgements ---------------------------------------------------------------------

    def acknowledge(self, findings: Iterable[Acknowledgement]) -> None:
        """Store acknowledgements; one of the same finding is replaced."""
        with self._changed() as db:
            db.execute("begin immediate")
            _make_tables(db)
            rows = map(msgspec.to_builtins, findings)
            _table(db, "acknowledged").insert_all(rows, replace=True)
            db.conn.commit()

    def acknowledged(self, after_ms: int = 0) -> list[Acknowledgement]:
        """Return the acknowledgements that end after a time, ms since 1970."""
        rows = self._rows("acknowledged", "where until_ms > ? order by until_ms, id, grp", after_ms)
        return [msgspec.convert(row, Acknowledgement) for row in rows]

    def withdraw(self, id: str, grp: str, kinds: Sequence[str]) -> int:
        """Remove the acknowledgements of a transaction or group, all without `kinds`; return their
        number."""
        found = [one for one in self.acknowledged() if (one.id, one.grp) == (id, grp)]
        removed = [one for one in found if not kinds or one.kind in kinds]
        if removed:
            with self._changed() as db:
                for one in removed:
                    _table(db, "acknowledged").delete((id, grp, one.kind))
                db.conn.commit()
        return len(removed)

    def shown_findings(self, id: str) -> frozenset[str]:
        """Return the kinds of findings that the examples of runs show of a transaction."""
        rows = self._rows("examples", "where id = ?", id)
        return frozenset(kind for row in rows for kind in row["findings"].split(", "))

    # --- the file ----------------------------------------------------------------------------

    def _select(self, which: str, *values: Any, needs: str = "runs") -> list[RunSummary]:
        with self._read() as db:
            if db is None or not _version(db) or needs not in db.table_names():
                return []
            rows = db.execute(f"select run, summary from runs {which}", values).fetchall()
        return [_decoded(self.path, *row) for row in rows]

    def _rows(self, table: str, which: str, *values: Any) -> list[dict[str, Any]]:
        with self._read() as db:
            if db is None or table not in db.table_names():
                return []
            found = db.execute(f"select * from {table} {which}", values)
            names = [column[0] for column in found.description]
            return [dict(zip(names, row, strict=True)) for row in found]

    @contextmanager
    def _read(self) -> Iterator[sqlite_utils.Database | None]:
        """Yield the file to read it; None where there is none."""
        with self._file.read() as path:
            if path is None:
                yield None
                return
            with self._opened(path) as db:
                yield db

    @contextmanager
    def _changed(self) -> Iterator[sqlite_utils.Database]:
        """Yield the file to change it."""
        with self._file.changed() as path, self._opened(path) as db:
            yield db

    @contextmanager
    def _opened(self, path: Path) -> Iterator[sqlite_utils.Database]:
        """Open the file, check that it is a journal, and turn errors into a
        `ConfigurationError`."""
        try:
            connection = sqlite3.connect(path, timeout=_WAIT_S)
        except sqlite3.Error as error:
            raise ConfigurationError(f"the journal {self.path} cannot be opened: {error}") from None
        try:
            db = sqlite_utils.Database(connection)
            self._check(db)
            yield db
        except sqlite3.Error as error:
            raise ConfigurationError(_in_words(self.path, error)) from None
        finally:
            connection.close()  # rolls an open transaction back

    def _check(self, db: sqlite_utils.Database) -> None:
        version = _version(db)
        if version > JOURNAL_VERSION:
            raise ConfigurationError(
                f"the journal {self.path} has version {version}, this txbroker knows "
                f"{JOURNAL_VERSION}: install the newer txbroker, or start a new journal"
            )
        used = version or db.table_names()
        # Read last: another process may be creating the journal between two queries.
        ours = db.execute("pragma application_id").fetchone()[0] == _APPLICATION_ID
        if used and not ours:
            raise ConfigurationError(
                f"{self.path} is another application's database: name another --data-dir"
            )


def _in_words(path: Path | str, error: sqlite3.Error) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_NOTADB:
        return f"{path} is not a SQLite file: name another --data-dir"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return f"the journal {path} is locked by another process: run the command again"
    return f"the journal {path} cannot be used: {error}"


def _make_tables(db: sqlite_utils.Database) -> None:
    for name in ("untold", "unwritten"):
        if name not in db.table_names():
            # Runs from an earlier txbroker count as published.
            _table(db, name).create({"run": str}, pk="run")
    if "series" not in db.table_names():
        _table(db, "series").create({"name": str}, pk="name")
    if "acknowledged" not in db.table_names():
        columns = Acknowledgement.__annotations__
        _table(db, "acknowledged").create(columns, pk=("id", "grp", "kind"))
    if _version(db):
        return
    _table(db, "runs").create(
        {
            "run": str,
            "mode": str,
            "started": str,
            "started_ms": int,
            "took_s": float,
            "records": int,
            "transactions": int,
            "settled": int,
            "pending": int,
            "drift": int,
            "carried": int,
            "quarantined": int,
            "taken": int,
            "summary": str,
        },
        pk="run",
    )
    _table(db, "runs").create_index(["started_ms"])
    _table(db, "drift").create(
        {"run": str, "kind": str, "transactions": int},
        pk=("run", "kind"),
        foreign_keys=[("run", "runs", "run")],
    )
    _table(db, "examples").create(
        {"run": str, "id": str, "grp": str, "findings": str, "why": str},
        pk=("run", "id"),
        foreign_keys=[("run", "runs", "run")],
    )
    db.execute(f"pragma application_id = {_APPLICATION_ID}")
    db.execute(f"pragma user_version = {JOURNAL_VERSION}")


def _table(db: sqlite_utils.Database, name: str) -> Table:
    table = db[name]
    assert isinstance(table, Table)
    return table


def _version(db: sqlite_utils.Database) -> int:
    return int(db.execute("pragma user_version").fetchone()[0])


def _decoded(path: Path | str, run: str, summary: str) -> RunSummary:
    try:
        return msgspec.json.decode(summary, type=RunSummary)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ConfigurationError(
            f"the journal {path}: run {run} does not parse ({error}); delete its row, or start a "
            "new journal"
        ) from None


def _row(summary: RunSummary) -> dict[str, Any]:
    started = datetime.fromtimestamp(summary.started_ms / 1000, UTC)
    states = summary.states
    return {
        "run": summary.run,
        "mode": summary.mode,
        "started": started.isoformat(timespec="milliseconds"),
        "started_ms": summary.started_ms,
        "took_s": summary.took_s,
        "records": sum(summary.records.values()),
        "transactions": summary.transactions,
        "settled": sum(states.get(name, 0) for name in ("promoted", "rolled_back", "settled")),
        "pending": states.get("pending", 0),
        "drift": sum(summary.drift.values()),
        "carried": summary.carried,
        "quarantined": summary.quarantined,
        "taken": sum(summary.taken.values()),
        "summary": msgspec.json.encode(summary).decode(),
    }


def _drift_rows(summary: RunSummary) -> Iterator[dict[str, Any]]:
    for kind, count in summary.drift.items():
        yield {"run": summary.run, "kind": kind, "transactions": count}


def _example_rows(summary: RunSummary) -> Iterator[dict[str, Any]]:
    for example in {example.id: example for example in summary.examples}.values():
        yield {
            "run": summary.run,
            "id": example.id,
            "grp": example.grp,
            "findings": ", ".join(example.findings),
            "why": example.why,
        }
