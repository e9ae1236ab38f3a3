"""The shards of an outbox: which relay owns which, as steps.

A relay first takes the lease, then claims its position in Kafka. Kafka fences an earlier owner that
writes records, and a look at the lease one that holds rows back or gives them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from txbroker.databases.dialect import Dialect
from txbroker.databases.outbox.table import RELAY, SHARDS_MAX
from txbroker.databases.steps import Query, Steps

_LONGEST_MS = 600_000
"""Longer than any lease."""


class RelayIdentity(NamedTuple):
    """The name of an outbox's relays, the identity of its tables, and its number of shards."""

    relay: str
    identity: str
    shards: int


class ShardLease(Struct, frozen=True):
    """A shard, as stored.

    Attributes:
        owner: the relay that has it; "": none.
        left_ms: how long it has it; not positive: it is free.
        wanted_by: a relay that has fewer shards than its share.
    """

    shard: int
    owner: str
    left_ms: int
    wanted_by: str


class Leases:
    """The leases of one relay process.

    Args:
        owner: its name, unique among the processes.
        lease_s: how long it has a shard, seconds, unless it renews the lease.
    """

    def __init__(self, dialect: Dialect, owner: str, lease_s: float) -> None:
        self._dialect = dialect
        self.owner = owner
        self._end = f"{dialect.now_ms} + {round(lease_s * 1000)}"

    def named(self) -> Steps[RelayIdentity]:
        """Return names and number of shards."""
        found = yield Query(f"SELECT relay, identity, shards FROM {RELAY} WHERE shard = 0")
        relay, identity, shards = found.rows[0]
        return RelayIdentity(str(relay), str(identity), int(shards))

    def all(self) -> Steps[list[ShardLease]]:
        """Return all leases."""
        found = yield Query(
            f"SELECT shard, owner, lease_until - {self._dialect.now_ms}, wanted_by "
            f"FROM {RELAY} ORDER BY shard"
        )
        return [
            ShardLease(int(shard), str(owner), int(left_ms), str(wanted_by))
            for shard, owner, left_ms, wanted_by in found.rows
        ]

    def take(self, count: int) -> Steps[list[int]]:
        """Take free shards, at most `count`; return their numbers."""
        now_ms = self._dialect.now_ms
        free = (
            # A clock that was set back would keep a lease for as long.
            f"SELECT shard FROM {RELAY} "
            # Without NOT, which MariaDB's HIGH_NOT_PRECEDENCE applies to the first term alone.
            f"WHERE (lease_until <= {now_ms} OR lease_until > {now_ms} + {_LONGEST_MS}) "
            f"ORDER BY shard LIMIT {count}"
        )
        # Rows that another relay is taking are left to it.
        found = yield Query(self._dialect.lock_free.format(select=free))
        taken = [int(row[0]) for row in found.rows]
        if taken:
            yield Query(
                f"UPDATE {RELAY} SET owner = ?, lease_until = {self._end}, wanted_by = '' "
                f"WHERE shard IN ({_numbers(taken)})",
                (self.owner,),
            )
        return taken

    def renew(self) -> Steps[list[int]]:
        """Extend this relay's leases; return the shards that it has. Others have taken the rest."""
        yield Query(f"UPDATE {RELAY} SET lease_until = {self._end} WHERE owner = ?", (self.owner,))
        found = yield Query(
            f"SELECT shard FROM {RELAY} WHERE owner = ? ORDER BY shard", (self.owner,)
        )
        return [int(row[0]) for row in found.rows]

    def owned(self, shard: int) -> Steps[bool]:
        """Return whether a shard is this relay's, and keep it so until the transaction ends."""
        found = yield Query(
            f"SELECT owner FROM {RELAY} WHERE shard = ?{self._dialect.lock}", (shard,)
        )
        return bool(found.rows) and found.rows[0][0] == self.owner

    def want(self, shards: Sequence[int]) -> Steps[None]:
        """Ask the owners of shards to release them."""
        yield Query(
            f"UPDATE {RELAY} SET wanted_by = ? WHERE shard IN ({_numbers(shards)})", (self.owner,)
        )

    def release(self, shards: Sequence[int]) -> Steps[None]:
        """Give shards back, if they are still this relay's."""
        yield Query(
            f"UPDATE {RELAY} SET owner = '', lease_until = 0, wanted_by = '' "
            f"WHERE owner = ? AND shard IN ({_numbers(shards)})",
            (self.owner,),
        )

    def divide(self, shards: int) -> Steps[bool]:
        """Divide the rows into another number of shards. Return False if this relay does not own
        all of them."""
        found = yield Query(
            f"SELECT owner, relay, identity, cluster, version FROM {RELAY} "
            f"ORDER BY shard{self._dialect.lock}"
        )
        if any(row[0] != self.owner for row in found.rows):
            return False
        _owner, relay, identity, cluster, version = found.rows[0]
        if any(row[3] != cluster for row in found.rows):
            cluster = ""
        yield Query(f"DELETE FROM {RELAY} WHERE shard > 0")
        yield Query(
            f"UPDATE {RELAY} SET shards = {shards}, owner = '', lease_until = 0, cluster = ?",
            (cluster,),
        )
        for shard in range(1, shards):
            yield Query(
                f"INSERT INTO {RELAY} (shard, version, relay, identity, shards, cluster) "
                f"VALUES ({shard}, ?, ?, ?, {shards}, ?)",
                (version, relay, identity, cluster),
            )
        return True


def rows_of_shard(shard: int, shards: int) -> tuple[int, ...]:
    """Return the numbers that rows of a shard have; none: all rows."""
    return () if shards == 1 else tuple(range(shard, SHARDS_MAX, shards))


def _numbers(shards: Sequence[int]) -> str:
    return ", ".join(map(str, shards))
