"""The shards of a relay process: which it owns, and a pump for each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable

import structlog
from msgspec import Struct

from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.outbox.leases import Leases, ShardLease
from txbroker.databases.outbox.table import SHARDS_MAX
from txbroker.door.writing import Fenced
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.relay.pump import Pump
from txbroker.relay.sessions import DatabaseThread

log = structlog.wrap_logger(logging.getLogger(__name__))

_FENCED_MAX, _FENCED_WITHIN_S = 3, 60.0
"""If another process takes a shard so often whose lease this one has, they do not share the
database."""
_STOP_S, _RELEASE_S = 1.5, 1.0
"""Also where the database hangs, a process ends within five seconds of a signal."""


class _Running(Struct):
    pump: Pump
    task: asyncio.Task[None]
    close: Callable[[], Awaitable[None]]


class Shards:
    """Takes, renews and releases the leases of shards, so that each relay has its share.

    Args:
        leases: of this process.
        start: opens a shard: returns its pump and what closes its connections.
        fail: called with an error that stops the relay.
    """

    def __init__(
        self,
        thread: DatabaseThread,
        leases: Leases,
        lease_s: float,
        start: Callable[[int], Awaitable[tuple[Pump, Callable[[], Awaitable[None]]]]],
        fail: Callable[[Exception], None],
    ) -> None:
        self._thread = thread
        self._leases = leases
        self._renew_s = lease_s / 4
        self._start = start
        self._fail = fail
        self._running: dict[int, _Running] = {}
        self._fenced: dict[int, list[float]] = {}
        """When other processes took shards."""

    @property
    def owned(self) -> frozenset[int]:
        """The shards that this process works on."""
        return frozenset(self._running)

    async def run(self, first: Awaitable[None]) -> None:
        """Keep leases until cancelled.

        Args:
            first: the first round.
        """
        turn = first
        while True:
            try:
                await turn
            except (DatabaseUnavailable, KafkaUnavailable) as error:
                log.warning("leases not renewed", error=safe_repr(error))
            await asyncio.sleep(self._renew_s)
            turn = self.round()

    async def round(self) -> None:
        """Renew the leases, and take, ask for and release shards."""
        owned = set(await self._thread.transaction(self._leases.renew))
        ended = {shard for shard, running in self._running.items() if running.task.done()}
        for shard in self.owned - ended:
            self._fenced.pop(shard, None)
        for shard in ended | (self.owned - owned):
            await self._stop(shard)
        leases = await self._thread.read(self._leases.all)
        own = self._leases.owner
        # One that asked for a shard whose owner is gone may be gone itself.
        running = [lease for lease in leases if lease.left_ms > 0]
        others = {name for lease in running for name in (lease.owner, lease.wanted_by)}
        relays = len((others | {own}) - {""})
        most, least = -(-len(leases) // relays), len(leases) // relays
        wanted = [each.shard for each in leases if each.owner == own and each.wanted_by]
        if given := set(wanted[: max(0, len(owned) - most)]):
            for shard in self.owned & given:  # one that could not be opened does not run
                await self._stop(shard)
            await self._thread.transaction(lambda: self._leases.release(sorted(given)))
            owned -= given
        elif len(owned) < most:
            taken = await self._thread.transaction(lambda: self._leases.take(most - len(owned)))
            owned |= set(taken)
            if asked := self._to_ask(leases, least - len(owned), most):
                await self._thread.transaction(lambda: self._leases.want(asked))
        for shard in owned - self.owned:
            await self._begin(shard)

    def _to_ask(self, leases: list[ShardLease], missing: int, most: int) -> list[int]:
        """Return shards of relays that have more than their share."""
        found: list[int] = []
        for owner in {lease.owner for lease in leases if lease.left_ms > 0} - {self._leases.owner}:
            theirs = [lease for lease in leases if lease.owner == owner and lease.left_ms > 0]
            found += [lease.shard for lease in theirs[most:]]
        return found[: max(0, missing)]

    async def _begin(self, shard: int) -> None:
        pump, close = await self._start(shard)
        task = asyncio.create_task(self._run(shard, pump), name=f"txbroker relay {shard}")
        self._running[shard] = _Running(pump, task, close)

    async def _run(self, shard: int, pump: Pump) -> None:
        try:
            await pump.run()
        except Fenced as error:
            log.warning("shard taken by another relay", shard=shard, error=str(error))
            now_s = asyncio.get_running_loop().time()
            recent = [
                at_s for at_s in self._fenced.get(shard, ()) if now_s - at_s < _FENCED_WITHIN_S
            ]
            self._fenced[shard] = [*recent, now_s]
            if len(recent) + 1 >= _FENCED_MAX:
                self._fail(
                    ConfigurationError(
                        f"another process takes shard {shard} again and again without its lease in "
                        "this database: two relays have one name, or a copy of the database is in "
                        "use. Stop one, or give its outbox another name"
                    )
                )
        except Exception as error:
            self._fail(error)

    async def _stop(self, shard: int) -> None:
        """End a shard's pump after the delivery in flight."""
        running = self._running[shard]
        running.pump.stop()
        try:
            await asyncio.wait([running.task], timeout=_STOP_S)
        finally:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
            self._running.pop(shard, None)
            await running.close()

    async def close(self) -> None:
        """End all pumps, and release the leases."""
        await asyncio.gather(*(self._stop(shard) for shard in self.owned))
        # Also of shards that could not be opened.
        with contextlib.suppress(DatabaseUnavailable, TimeoutError):
            release = self._thread.transaction(lambda: self._leases.release(range(SHARDS_MAX)))
            await asyncio.wait_for(release, _RELEASE_S)


def process_name() -> str:
    """Return a name of this process for leases, unique and for people."""
    host = socket.gethostname().encode("ascii", "replace").decode()[:100]
    return f"{host}/{os.getpid()}/{secrets.token_hex(4)}"
