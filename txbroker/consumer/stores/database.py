"""`InDatabase`: the result of a handler and the position of its message in one transaction."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from txbroker.consumer.committer import StoreTraits
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.partition import Work
from txbroker.consumer.stores.connections import Connections, HandlerFailed, busy_pause
from txbroker.consumer.workers import Call, Handler, RolledBack, is_coroutine_function, until_end
from txbroker.core.consuming.copies import GroupTopics, Source, read_copy
from txbroker.core.consuming.position import Position, decode_metadata, encode_metadata
from txbroker.core.consuming.queues import Order
from txbroker.databases.database import Database
from txbroker.databases.dialect import Fault
from txbroker.databases.kept import DEAD, RETRY, SET_ASIDE, UNPUBLISHED, Kept, KeptTable
from txbroker.databases.positions import PositionTable, Settled, Stored
from txbroker.databases.sessions import (
    AsyncSession,
    PlainSession,
    TransactionControlled,
    closed_by_user,
)
from txbroker.databases.steps import Steps, run, run_async
from txbroker.door.consuming import Copy, Partition, StoredOffset, StoreUnavailable
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError, InvariantBroken, TxbrokerError
from txbroker.failpoints import failpoint
from txbroker.net.timers import grown_pause_s

if TYPE_CHECKING:
    from txbroker.consumer.engine import Engine

log = structlog.wrap_logger(logging.getLogger(__name__))

CONNECTIONS_MAX = 16
_METADATA_MAX = 1 << 24
_BUSY_ATTEMPTS = 10
_PAUSE_S, _PAUSE_MAX_S = 0.02, 1.0


class _Unanswered(Exception):
    """Whether a commit was executed is unknown."""


class TransactionAborted(TxbrokerError):
    """The handler caught an error of the database, which had aborted its transaction: let it pass,
    or enclose the statement in a savepoint."""


class InDatabase:
    """Keeps positions, failed messages and the results of handlers in one database.

    The consumer begins a transaction, calls the handler with its connection, stores the position
    and commits.

    Args:
        database: such as `SQLite`, `Postgres`, `MariaDB`, `from_sqlalchemy(engine)`.
        connections_max: transactions of handlers at the same time, at most.
        dead_letter_topic: a topic that receives dead letters, too, at least once.

    Raises:
        ConfigurationError: `database` is none.
    """

    traits = StoreTraits(exact=True, repeatable=True, metadata_max=_METADATA_MAX)
    second_argument = "connection"

    def __init__(
        self,
        database: Database,
        *,
        connections_max: int = CONNECTIONS_MAX,
        dead_letter_topic: str | None = None,
    ) -> None:
        if not isinstance(database, Database):
            raise ConfigurationError(
                f"InDatabase({database!r}): give a database, such as Postgres('dbname=shop') of "
                "txbroker.databases"
            )
        if connections_max < 1:
            raise ConfigurationError(f"connections_max is {connections_max}: it is at least 1")
        self.database = database
        self.dead_letter_topic = dead_letter_topic
        self._connections_max = connections_max

    async def open(self, group: str, topics: GroupTopics, session_s: float) -> OpenDatabase:
        """Check the tables, and connect.

        Raises:
            ConfigurationError: a table is missing, or may not be used.
            DatabaseUnavailable
        """
        await self.database.prepare_async()
        connections = Connections(self.database, self._connections_max, session_s)
        return OpenDatabase(connections, group, topics, publish=bool(self.dead_letter_topic))


class OpenDatabase:
    """An `InDatabase` in use by one consumer: its `Store`, and the `Results` of its handlers.

    Args:
        publish: dead letters also go to a topic.

    Attributes:
        kept: the statements for failed messages.
    """

    second_argument = InDatabase.second_argument

    def __init__(
        self, connections: Connections, group: str, topics: GroupTopics, *, publish: bool
    ) -> None:
        self.connections = connections
        database = connections.database
        self.kept = KeptTable(database.dialect, group)
        self._database = database
        self._positions = PositionTable(database.dialect, group)
        dead = UNPUBLISHED if publish else DEAD
        self._states = {topics.retry: RETRY, topics.aside: SET_ASIDE, topics.dead: dead}
        self._rows: dict[Partition, list[int]] = {}
        """Offsets of done rows that the next position replaces."""
        self._claimed: set[Partition] = set()
        """Partitions whose first position is not stored: it may be lower than the last one."""
        self._failures = 0
        """In a row: the database was unavailable for handlers."""

    async def close(self) -> None:
        """Close the connections."""
        await self.connections.close()

    # --- store -------------------------------------------------------------------------------

    async def load(self, partitions: Collection[Partition]) -> dict[Partition, StoredOffset]:
        """Take partitions over, and return their positions; see `Store.load`."""
        now_ms = round(time.time() * 1000)
        claimed = await self.connections.transaction(
            lambda: self._positions.claim(partitions, now_ms)
        )
        self._rows.update((place, list(each.rows)) for place, each in claimed.items())
        self._claimed.update(claimed)
        return {
            place: StoredOffset(
                each.next, encode_metadata(max(0, each.next), each.metadata, _METADATA_MAX)[0]
            )
            for place, each in claimed.items()
        }

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> Collection[Partition]:
        """Store positions and failed messages, see `Store.commit`."""
        first = self._claimed.intersection(offsets)
        rows = {place: self._replaced(place, offsets[place]) for place in offsets}
        kept: dict[Partition, list[Kept]] = {}
        for each in map(self._kept, copies):
            kept.setdefault(each.failed.source[:2], []).append(each)

        def steps() -> Steps[list[Partition]]:
            fenced = []
            for place in sorted(offsets):
                low, text = offsets[place]
                metadata = decode_metadata(low, text)
                assert metadata is not None
                position = (low, metadata)
                saved = yield from self._positions.save(
                    place, position, rows[place], lower=place in first
                )
                if not saved:
                    fenced.append(place)
                for each in kept.get(place, ()) if saved else ():
                    yield from self.kept.keep(each)
            return fenced

        try:
            fenced = await self.connections.transaction(steps)
        except BaseException:
            for place, offsets_ in rows.items():
                self._rows[place] = offsets_ + self._rows.get(place, [])
            raise
        self._claimed -= first
        return fenced

    def _replaced(self, place: Partition, stored: StoredOffset) -> list[int]:
        """Take the done rows of a partition that a position includes; the others stay. The first
        position after a claim replaces all: `on_assign` may have moved it."""
        rows = self._rows.pop(place, [])
        if place not in self._claimed:
            metadata = decode_metadata(*stored)
            assert metadata is not None
            left = Position(stored.offset, metadata.ranges).undone(rows)
            self._rows[place] = left
            rows = sorted(set(rows).difference(left))
        return rows

    def _kept(self, copy: Copy) -> Kept:
        found = read_copy(copy.record)
        assert found is not None
        record, failed = found
        return Kept(self._states[copy.topic], failed, record)

    # --- results -----------------------------------------------------------------------------

    def check(self, handler: Handler, *, batch: bool) -> None:
        """See `Results.check`."""
        coroutine = is_coroutine_function(handler)
        if coroutine and not self._database.asynchronous:
            raise ConfigurationError(
                f"{self._database.name} takes plain functions, which run in threads: write the "
                "handler with `def`, not with `async def`"
            )
        if not coroutine and not self._database.plain:
            raise ConfigurationError(
                f"{self._database.name} has an asynchronous driver: write the handler with "
                "`async def`"
            )

    def around(self, engine: Engine, handler: Handler) -> Call:
        """See `Results.around`."""
        coroutine = is_coroutine_function(handler)

        async def attempt(transaction: _Transaction) -> int | None:
            if coroutine:
                async with self.connections.for_handler() as session:
                    return await transaction.run_async(session)
            return await self.connections.in_thread(transaction.run)

        async def call(messages: list[ReceivedMessage], argument: Any) -> None:
            transaction = _Transaction(self, engine, handler, messages, argument)
            for number in range(_BUSY_ATTEMPTS):
                try:
                    stopped_at = await attempt(transaction)
                except _Unanswered:
                    stopped_at = await self._look(transaction)
                except Exception as error:
                    await self._failed(transaction, error, last=number + 1 == _BUSY_ATTEMPTS)
                    engine.counts["repeated"] += 1
                    await busy_pause(number)
                    continue
                self._failures = 0
                self._conclude(transaction, stopped_at)
                return

        return call

    async def _failed(self, transaction: _Transaction, error: Exception, *, last: bool) -> None:
        """Return if a transaction is to be repeated.

        Args:
            last: it is not repeated any more.

        Raises:
            RolledBack
            Exception: the error of the messages.
        """
        if isinstance(error, RolledBack):
            raise error
        if isinstance(error, ConfigurationError | InvariantBroken):
            transaction.engine.fail(error)
            raise RolledBack from None
        raised = error.error if isinstance(error, HandlerFailed) else None
        fault = self._database.dialect.fault(raised or error)
        task = asyncio.current_task()
        if fault is Fault.BUSY and not last and not (task and task.cancelling()):
            return
        if isinstance(error, HandlerFailed):
            lost = error.session_lost
            if not lost and fault is Fault.UNAVAILABLE:  # perhaps that of another database
                lost = not await self._can_write(transaction)
            if not lost:
                raise error.error from None
        elif fault is Fault.ABORTED:
            raise TransactionAborted from error
        elif fault not in (Fault.UNAVAILABLE, Fault.DENIED, Fault.NO_TABLE, Fault.BUSY):
            raise error
        await self._unavailable(transaction.works, raised or error)
        raise RolledBack

    async def _can_write(self, transaction: _Transaction) -> bool:
        place = transaction.parts[0].settled.place
        try:
            await self.connections.transaction(lambda: self._positions.touch(place))
        except StoreUnavailable:
            return False
        return True

    async def _unavailable(self, works: Iterable[Work], error: BaseException) -> None:
        """Let partitions wait for the database, and wait for a moment: it may refuse handlers and
        take positions."""
        log.warning("database unavailable", database=self._database.name, error=safe_repr(error))
        for work in works:
            if work.commits is not None:
                work.commits.unavailable(work.owner)
        self._failures += 1
        await asyncio.sleep(grown_pause_s(self._failures, _PAUSE_S, _PAUSE_MAX_S))

    async def _look(self, transaction: _Transaction) -> int | None:
        """Find out whether a commit was executed that was not answered.

        Raises:
            RolledBack: it was not.
        """
        log.warning("commit unanswered", message=repr(transaction.messages[0]))
        first = transaction.parts[0].settled
        while True:
            try:
                found = await self.connections.transaction(lambda: self._positions.look(first))
            except StoreUnavailable as error:
                await self._unavailable(transaction.works, error)
                continue
            if found is Stored.BEFORE:
                return None
            if found is Stored.FENCED:
                transaction.parts[0].stored = found
                return 0
            break
        raise RolledBack

    def _conclude(self, transaction: _Transaction, stopped_at: int | None) -> None:
        """Take note of what a transaction stored.

        Args:
            stopped_at: the part because of which it was rolled back; None: it was committed.

        Raises:
            RolledBack
        """
        if stopped_at is None:
            for part in transaction.parts:
                if part.settled.position is None and part.settled.offsets:
                    self._rows.setdefault(part.work.place, []).extend(part.settled.offsets)
            transaction.engine.first_stored(transaction.messages)
            return
        part = transaction.parts[stopped_at]
        if part.stored is Stored.FENCED:
            if part.work.commits is not None:
                part.work.commits.fenced(part.work.owner)
            raise RolledBack
        if len(transaction.messages) == 1:
            transaction.engine.first_stored(part.messages)
            return
        for message in part.messages:  # which of them was stored before, each shows alone
            message.alone = True
        raise RolledBack

    async def finished(self, messages: Sequence[ReceivedMessage]) -> None:
        """See `Results.finished`."""
        kept = [message for message in messages if message.stage and message.work.is_kept]
        if kept:
            sources = [Source(message.topic, message.partition, message.offset) for message in kept]

            def steps() -> Steps[None]:
                for source in sources:
                    yield from self.kept.remove(source)

            try:
                await self.connections.transaction(steps)
            except StoreUnavailable as error:
                await self._unavailable([message.work for message in kept], error)
                raise RolledBack from None


class _Part:
    """The messages of a transaction that come from one partition, or from one of its queues."""

    def __init__(self, work: Work, messages: list[ReceivedMessage], *, staged: bool) -> None:
        self.work = work
        self.messages = messages
        self.stored = Stored.NOW
        offsets = sorted(message.offset for message in messages)
        place = work.owner.place
        if work.is_kept:
            self.settled = Settled(place, work.token, (), offsets, stages=staged)
            return
        position = None
        if work.order is Order.PARTITION and work.position.low == offsets[0]:
            position = work.saved(ahead_too=offsets) if staged else work.saved(offsets)
            if position[0] <= offsets[-1]:
                position = None  # messages between them are not done
        self.settled = Settled(place, work.token, offsets, position=position)


class _Transaction:
    """One call of a handler, and what it stores.

    Attributes:
        parts: by partition, in an order that all consumers share.
    """

    def __init__(
        self,
        store: OpenDatabase,
        engine: Engine,
        handler: Handler,
        messages: list[ReceivedMessage],
        argument: Any,
    ) -> None:
        self._positions = store._positions
        self._dialect = store._database.dialect
        self._handler = handler
        self._argument = argument
        self.engine = engine
        self.messages = messages
        by_work: dict[Work, list[ReceivedMessage]] = {}
        for message in messages:
            by_work.setdefault(message.work, []).append(message)
        ordered = sorted(by_work, key=lambda work: work.place)
        self.parts = [_Part(work, by_work[work], staged=engine.staged) for work in ordered]
        self._holder = engine.in_flight.get(messages[0])

    @property
    def works(self) -> list[Work]:
        return [part.work for part in self.parts]

    def run(self, session: PlainSession) -> int | None:
        """Call the handler with a plain connection; return the part that cannot be stored."""
        session.begin()
        try:
            result = self._handler(self._argument, session.connection)
        except TransactionControlled:
            raise
        except Exception as error:
            raise HandlerFailed(error) from error
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise ConfigurationError(
                f"the handler {self._handler!r} returned an awaitable, which would run outside of "
                "its transaction: write it with `async def`"
            )
        self._check(session)
        stopped_at = run(self._settle(), session.execute)
        if stopped_at is not None:
            session.rollback()
            return stopped_at
        self._check_lease()
        failpoint("consumer.result_committing")
        try:
            session.commit()
        except Exception as error:
            self._commit_failed(error)
        failpoint("consumer.result_committed")
        return None

    async def run_async(self, session: AsyncSession) -> int | None:
        """`run` for asyncio."""
        await session.begin()
        try:
            await self._handler(self._argument, session.connection)
        except TransactionControlled:
            raise
        except Exception as error:
            raise HandlerFailed(error) from error
        self._check(session)
        stopped_at = await run_async(self._settle(), session.execute)
        if stopped_at is not None:
            await session.rollback()
            return stopped_at
        self._check_lease()
        failpoint("consumer.result_committing")
        try:
            await until_end(asyncio.ensure_future(session.commit()))
        except Exception as error:
            self._commit_failed(error)
        failpoint("consumer.result_committed")
        return None

    def _check(self, session: PlainSession | AsyncSession) -> None:
        """Raise TransactionControlled if the handler ended the transaction, RolledBack if it
        reported a failure of a message."""
        if closed_by_user(session.connection):
            raise TransactionControlled(
                "the handler closed its connection, which the consumer uses again: leave it open"
            )
        if not session.in_transaction:
            raise TransactionControlled(
                "the handler ended the transaction of the consumer, by COMMIT, ROLLBACK or a "
                "statement that commits (on MariaDB also CREATE, ALTER and DROP): what it wrote "
                "may be stored without its position. Leave them out of the handler"
            )
        reports = (self._holder.reports if self._holder is not None else None) or {}
        if any(error is not None for error in reports.values()):
            raise RolledBack

    def _settle(self) -> Steps[int | None]:
        for number, part in enumerate(self.parts):
            part.stored = yield from self._positions.settle(part.settled)
            if part.stored is not Stored.NOW:
                return number
        return None

    def _check_lease(self) -> None:
        if any(part.work.lease.left_s <= 0 for part in self.parts):
            raise RolledBack

    def _commit_failed(self, error: Exception) -> None:
        if self._dialect.fault(error) is Fault.UNAVAILABLE:
            raise _Unanswered from error
        raise error
