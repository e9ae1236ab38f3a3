"""Signs that the tables of an outbox were restored, and how its rows keep their order then."""

from __future__ import annotations

from txbroker.databases.dialect import POSTGRESQL, Dialect
from txbroker.databases.outbox.table import CLUSTER, MAYBE_UNDECIDED, OUTBOX, RELAY, SEQUENCE
from txbroker.databases.steps import Query, Steps

_NEXT_UNIT = "lpad(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS text), 20, '0')"
"""Above the units of all transactions that this PostgreSQL cluster has begun."""


class RestoredRows:
    """The rows that wait in the shards of a relay.

    Args:
        shard: the first one.
        of_shards: the condition of their rows, with its AND; "": all rows.
    """

    def __init__(self, dialect: Dialect, shard: int, of_shards: str) -> None:
        self._dialect = dialect
        self._in_relay = f"shard = {shard}"
        self._waiting = f"state = 'LOCAL_COMMIT'{of_shards}"

    def drawn(self) -> Steps[tuple[int, int | None]]:
        """Return the position of the newest row, 0 without one, and the last position that was
        drawn; None: this user may not see it."""
        newest = yield Query(f"SELECT MAX(position) FROM {OUTBOX}")
        # Read later: it includes every row that the first statement has seen.
        drawn = yield Query(self._dialect.drawn.format(table=OUTBOX, sequence=SEQUENCE))
        last = drawn.rows[0][0]
        return int(newest.rows[0][0] or 0), None if last is None else int(last)

    def set_drawn(self, position: int) -> str:
        """Return SQL that lets the next position be above one; "": no database needs it."""
        dialect = self._dialect
        return dialect.set_drawn.format(table=OUTBOX, sequence=SEQUENCE, position=position)

    def has_foreign(self) -> Steps[bool]:
        """Return whether units may be those of another PostgreSQL cluster, which have no order with
        new ones: the tables were restored there, or rows replicated or copied."""
        if self._dialect is not POSTGRESQL:  # elsewhere the sequence comes with the table
            return False
        foreign = f"unit >= {_NEXT_UNIT} AND unit < ':'"
        looks = (
            f"{OUTBOX} WHERE {self._waiting} AND next_at = 0 AND {foreign}",
            f"{OUTBOX} WHERE {MAYBE_UNDECIDED} AND {foreign}",
            f"{RELAY} WHERE {self._in_relay} AND cluster <> {CLUSTER}",
        )
        exist = " OR ".join(f"EXISTS (SELECT 1 FROM {each})" for each in looks)
        return bool((yield Query(f"SELECT {exist}")).rows[0][0])

    def reorder(self) -> Steps[int]:
        """Put the rows that wait before all new ones, in the order of their positions; return their
        number. No unit is split."""
        count = 0
        # Of undecided rows all at once: they are decided together in all shards.
        for condition in (self._waiting, MAYBE_UNDECIDED):
            changed = yield Query(
                f"UPDATE {OUTBOX} AS kept SET unit = '!' || lpad(CAST(begin AS text), 20, '0') "
                f"FROM (SELECT unit AS of_unit, MIN(position) AS begin FROM {OUTBOX} "
                f"WHERE {condition} GROUP BY unit) AS units "
                f"WHERE unit = of_unit AND {condition} AND left(unit, 1) BETWEEN '0' AND '9'"
            )
            count += changed.count
        yield Query(f"UPDATE {RELAY} SET cluster = {CLUSTER} WHERE {self._in_relay}")
        return count
