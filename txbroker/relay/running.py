"""A relay that runs: its connections, its shards, and what it does beside them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.outbox.leases import Leases, RelayIdentity
from txbroker.databases.outbox.waiting import WaitingRows
from txbroker.door.consuming import ConsumingDoor, HasConsumingDoor
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError
from txbroker.net.tasks import Background
from txbroker.relay.connections import open_door
from txbroker.relay.metrics import RelayFigures
from txbroker.relay.sessions import DatabaseThread
from txbroker.relay.settings import RelaySettings, StillWaiting
from txbroker.relay.shard_pumps import ShardPumps
from txbroker.relay.shards import Shards, process_name

if TYPE_CHECKING:
    from txbroker.relay.checks import OutboxChecks
    from txbroker.relay.outbox import Outbox

log = structlog.wrap_logger(logging.getLogger(__name__))

_UPKEEP_S, _PURGE_S = 5.0, 60.0
_START_S = 3.0
"""How long a start waits for the first leases."""
_DRAIN_PAUSE_S, _DRAIN_PAUSE_MAX_S = 0.005, 0.1
_DIVIDE_PAUSE_S = 0.2
_CAUSES = 3


class RunningRelay:
    """The parts of a relay; see `Relay`."""

    def __init__(
        self, outbox: Outbox, kafka: str | HasConsumingDoor, settings: RelaySettings
    ) -> None:
        self._outbox = outbox
        self._database = outbox.database
        self._kafka = kafka
        self._settings = settings
        self._stack = contextlib.AsyncExitStack()
        self._closed = False
        self._figures = RelayFigures(lambda: len(self._shards.owned))
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background = Background(self._fail)
        self._threads: list[DatabaseThread] = []
        self._door: ConsumingDoor
        self._named: RelayIdentity
        self._thread: DatabaseThread
        self._leases: Leases
        self._shards: Shards

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """See `Relay.start`."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        settings = self._settings
        await self._database.prepare_async(self._outbox.tables)
        self._door = await open_door(self._kafka, settings.security, settings.positions)
        self._stack.push_async_callback(self._door.close)
        self._stack.push_async_callback(self._close_threads)
        self._thread = self._open_thread()
        self._leases = Leases(self._database.dialect, process_name(), settings.lease_s)
        self._named = await self._thread.read(self._leases.named)
        if settings.shards is not None:
            await self._divide(settings.shards)
        self._shards = Shards(
            self._thread, self._leases, settings.lease_s, self._pumps().open, self._fail
        )
        self._stack.push_async_callback(self._shards.close)
        checks = self._open_checks()
        self._stack.push_async_callback(self._background.end)
        # The holder of an SQLite file's lock may itself wait for this start.
        first = asyncio.ensure_future(self._shards.round())
        self._background.start(self._shards.run(first))
        await asyncio.wait([first], timeout=_START_S)
        if first.done():
            first.result()
        self._background.start(self._upkeep(self._open_thread()))
        if checks is not None:
            self._background.start(self._check(checks, min(1.0, settings.check_interval_s)))

    def _pumps(self) -> ShardPumps:
        return ShardPumps(
            self._outbox, self._named, self._leases, self._door, self._settings, self._figures
        )

    def _open_thread(self) -> DatabaseThread:
        thread = DatabaseThread(self._database, self._outbox.tables)
        self._threads.append(thread)
        return thread

    async def _close_threads(self) -> None:
        await asyncio.gather(*(thread.close() for thread in self._threads))

    def _fail(self, error: Exception) -> None:
        if not self._ended.done():
            log.error("relay stopped", relay=self._named.relay, error=safe_repr(error))
            self._ended.set_exception(error)
            self._ended.exception()  # or it is reported as never retrieved

    async def close(self) -> None:
        """See `Relay.close`."""
        self._closed = True
        await self._stack.aclose()
        if not self._ended.done():
            self._ended.set_result(None)

    def check(self) -> None:
        """Raise the error that has stopped the relay, if one has."""
        if self._ended.done():
            self._ended.result()

    async def run(self) -> None:
        """See `Relay.run`."""
        await asyncio.shield(self._ended)

    def _open_checks(self) -> OutboxChecks | None:
        """Return the checks of undecided rows; None: this relay cannot ask about them."""
        if self._settings.check is None and self._settings.check_url is None:
            return None
        from txbroker.relay.checks import open_checks

        checks = open_checks(self._settings, self._named.relay, self._open_thread())
        self._stack.push_async_callback(checks.close)
        return checks

    async def _check(self, checks: OutboxChecks, pause_s: float) -> None:
        while True:
            try:
                await checks.offer()
            except DatabaseUnavailable as error:
                log.warning("undecided rows not read", error=safe_repr(error))
            await asyncio.sleep(pause_s)

    # --- shards ----------------------------------------------------------------------------------

    async def _divide(self, shards: int) -> None:
        """Divide the rows into a number of shards. A relay that starts at the same time may do so,
        and one that was killed has its leases until they end.

        Raises:
            ConfigurationError: other relays run.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._settings.lease_s
        while self._named.shards != shards:
            if not await self._try_to_divide(shards) and loop.time() > end_s:
                raise ConfigurationError(
                    f"the outbox has {self._named.shards} shards, which running relays own: stop "
                    f"them before a relay starts with shards={shards}, or leave shards out"
                )
            self._named = await self._thread.read(self._leases.named)
            if self._named.shards != shards:
                await asyncio.sleep(_DIVIDE_PAUSE_S)

    async def _try_to_divide(self, shards: int) -> bool:
        """Divide the rows, after what the present owners delivered is marked: a shard knows only
        its own position. Return False if others own shards."""
        present = self._named.shards
        taken = await self._thread.transaction(lambda: self._leases.take(present))
        try:
            for shard in taken if len(taken) == present else ():
                await self._pumps().settle(shard)
            divided = await self._thread.transaction(lambda: self._leases.divide(shards))
        except BaseException:
            await self._thread.transaction(lambda: self._leases.release(taken))
            raise
        if not divided and taken:
            await self._thread.transaction(lambda: self._leases.release(taken))
        return divided

    # --- drain -----------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> None:
        """See `Relay.drain`."""
        rows, now_s = WaitingRows(self._database.dialect), asyncio.get_running_loop().time
        end_s, pause_s = now_s() + timeout_s, _DRAIN_PAUSE_S
        while True:
            self.check()
            if self._closed:
                raise ConfigurationError("the relay is closed: call drain before, or start another")
            try:
                count = await self._thread.read(rows.waiting)
            except DatabaseUnavailable:
                if now_s() >= end_s:
                    raise
                count = 1
            if not count:
                return
            if now_s() >= end_s:
                causes = await self._thread.read(lambda: rows.causes(_CAUSES))
                why = "; ".join(f"{topic}: {cause}" for topic, cause in causes)
                raise StillWaiting(
                    f"{count} rows still wait after {timeout_s:g} s" + (f": {why}" if why else "")
                )
            pause_s = min(_DRAIN_PAUSE_MAX_S, pause_s * 2)
            await asyncio.sleep(min(pause_s, max(0.0, end_s - now_s())))

    # --- figures ---------------------------------------------------------------------------------

    def statistics(self) -> Mapping[str, float]:
        """See `Relay.statistics`."""
        return {
            "_".join((name, *labels)): value
            for name, values in self._figures.samples().items()
            for labels, value in values.items()
        }

    def collector(self) -> Any:
        """See `Relay.collector`."""
        return self._figures.collector(self._named.relay)

    # --- upkeep ----------------------------------------------------------------------------------

    async def _upkeep(self, thread: DatabaseThread) -> None:
        """Count rows, and delete finished ones.

        Args:
            thread: another one than that of the leases, which must not wait.
        """
        rows, now_s = WaitingRows(self._database.dialect), asyncio.get_running_loop().time
        purged, begun_s = 0, now_s()
        while True:
            try:
                self._figures.rows = await thread.read(rows.counts)
                if now_s() - begun_s > _PURGE_S:  # rows below may have been finished since
                    purged, begun_s = 0, now_s()
                last: int | None = purged
                while last is not None and 0 in self._shards.owned:
                    purged = last
                    steps = partial(rows.purge, self._settings.keep_s, purged)
                    last = (await thread.transaction(steps)).last
            except DatabaseUnavailable as error:
                log.warning("outbox not looked after", error=safe_repr(error))
            await asyncio.sleep(_UPKEEP_S)
