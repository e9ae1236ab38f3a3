"""Transactions around handlers: repeats, failures, and commits without an answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import structlog

from txbroker.consumer.engine.loop import Engine
from txbroker.consumer.engine.workers import Call, Handler, RolledBack, is_coroutine_function
from txbroker.consumer.message import ReceivedMessage, source_of
from txbroker.consumer.stores.connections import Connections
from txbroker.consumer.stores.stored import StoredPositions
from txbroker.consumer.stores.transaction import CommitUnanswered, ResultTransaction
from txbroker.databases.dialect import Fault
from txbroker.databases.kept import KeptTable
from txbroker.databases.positions import PositionTable, Settled, Stored
from txbroker.databases.sessions import HandlerFailed, busy_pause
from txbroker.databases.steps import Steps
from txbroker.door.consuming import StoreUnavailable
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError, InvariantBroken, TxbrokerError
from txbroker.net.timers import grown_pause_s

log = structlog.wrap_logger(logging.getLogger(__name__))

_BUSY_ATTEMPTS = 10
_LOCKS_AFTER = 2
"""Attempts, after which rounds wait for a handler: at repeatable read each one that ends while the
handler runs would make its transaction fail."""
_LOST_MAX = 3
"""Sessions that a message may lose while the consumer's own goes on: then that is its failure, as
of a statement that is larger than the server takes."""
_PAUSE_S, _PAUSE_MAX_S = 0.02, 1.0


class TransactionAborted(TxbrokerError):
    """The handler caught an error of the database, which had aborted its transaction: let it pass,
    or enclose the statement in a savepoint. Or it ended the transaction and began another one:
    leave that to the consumer."""


class SessionChanged(TxbrokerError):
    """The position cannot be stored in the handler's session, but in another one: let the handler
    restore what it changed, such as search_path, the database, the role or a timeout, before it
    returns."""

    def __init__(self, reason: str = "its tables are others") -> None:
        super().__init__()
        self.args = (f"{self} ({reason})",)


class DatabaseResults:
    """The `ResultStore` of handlers with a database."""

    second_argument = "connection"

    def __init__(
        self,
        connections: Connections,
        positions: PositionTable,
        kept: KeptTable,
        stored: StoredPositions,
    ) -> None:
        self._connections = connections
        self._database = connections.database
        self._positions = positions
        self._kept = kept
        self._stored = stored
        self._failures = 0
        """In a row: the database was unavailable for handlers."""

    def check(self, handler: Handler, *, batch: bool) -> None:
        """See `ResultStore.check`."""
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
        """See `ResultStore.around`."""
        coroutine = is_coroutine_function(handler)

        async def attempt(transaction: ResultTransaction) -> int | None:
            transaction.own_opened = self._connections.own_opened
            if coroutine:
                async with self._connections.for_handler() as session:
                    return await transaction.run_async(session)
            return await self._connections.in_thread(transaction.run)

        async def call(messages: list[ReceivedMessage], argument: Any) -> None:
            transaction = ResultTransaction(
                self._positions, self._database.dialect, engine, handler, messages, argument
            )
            with transaction.untimed():
                await repeated(transaction)

        async def repeated(transaction: ResultTransaction) -> None:
            for number in range(_BUSY_ATTEMPTS):
                transaction.locks_first = number >= _LOCKS_AFTER
                try:
                    stopped_at = await attempt(transaction)
                except CommitUnanswered:
                    stopped_at = await self._look(transaction)
                except Exception as error:
                    await self._failed(transaction, error, last=number + 1 == _BUSY_ATTEMPTS)
                    engine.settlement.counts["repeated"] += 1
                    await busy_pause(number)
                    continue
                self._failures = 0
                await self._conclude(transaction, stopped_at)
                return

        return call

    async def _failed(
        self, transaction: ResultTransaction, error: Exception, *, last: bool
    ) -> None:
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
        if fault is Fault.BUSY and not last:
            if task is not None and task.cancelling():
                raise RolledBack
            return
        if isinstance(error, HandlerFailed):
            if not (error.session_lost or fault is Fault.UNAVAILABLE):
                raise error.error from None
            if await self._can_write(transaction) and not (  # perhaps it is of another database
                error.session_lost and self._may_lose(transaction)
            ):
                raise error.error from None
        elif fault is Fault.ABORTED:
            raise TransactionAborted from error
        elif fault not in (Fault.UNAVAILABLE, Fault.DENIED, Fault.NO_TABLE, Fault.BUSY):
            raise error
        elif (
            transaction.handled
            and fault is not Fault.BUSY
            and await self._can_write(transaction)
            and (fault is not Fault.UNAVAILABLE or not self._may_lose(transaction))
        ):
            raise SessionChanged(str(self._database.explain(error))) from error
        await self._unavailable(transaction.engine, transaction.messages, raised or error)
        raise RolledBack

    def _may_lose(self, transaction: ResultTransaction) -> bool:
        """Return whether messages that lost their session are handled again without a failure."""
        if self._connections.own_opened != transaction.own_opened:
            return True  # the server was restarted
        for message in transaction.messages:
            message.alone = True  # which of them lost it, each shows alone
        message = transaction.messages[0]
        message.sessions_lost += len(transaction.messages) == 1
        return message.sessions_lost < _LOST_MAX

    async def _can_write(self, transaction: ResultTransaction) -> bool:
        place = transaction.parts[0].settled.place
        try:
            await self._connections.transaction(lambda: self._positions.touch(place))
        except StoreUnavailable:
            return False
        return True

    async def _unavailable(
        self, engine: Engine, messages: Sequence[ReceivedMessage], error: BaseException
    ) -> None:
        """Let the partitions of messages wait for the database, and wait for a moment: it may
        refuse handlers and take positions."""
        log.warning(
            "database unavailable",
            database=self._database.name,
            message=repr(messages[0]),
            error=safe_repr(self._database.explain(error)),
        )
        for partition in {message.feed.partition for message in messages}:
            if (commits := engine.partitions.commits.get(partition)) is not None:
                commits.unavailable(partition)
        self._stored.doubt()
        self._failures += 1
        await asyncio.sleep(grown_pause_s(self._failures, _PAUSE_S, _PAUSE_MAX_S))

    async def _look(self, transaction: ResultTransaction) -> int | None:
        """Find out whether a commit was executed that was not answered.

        Raises:
            RolledBack: it was not.
        """
        log.warning("commit unanswered", message=repr(transaction.messages[0]))
        first = transaction.parts[0].settled
        while True:
            try:
                found = await self._looked(first)
            except StoreUnavailable as error:
                await self._unavailable(transaction.engine, transaction.messages, error)
                continue
            if found is Stored.BEFORE:
                return None
            if found is Stored.FENCED:
                transaction.parts[0].stored = found
                return 0
            break
        raise RolledBack

    async def _looked(self, settled: Settled) -> Stored | None:
        return await self._connections.transaction(lambda: self._positions.look(settled))

    async def _conclude(self, transaction: ResultTransaction, stopped_at: int | None) -> None:
        """Take note of what a transaction stored.

        Args:
            stopped_at: the part because of which it was rolled back; None: it was committed.

        Raises:
            RolledBack
            SessionChanged
        """
        if stopped_at is None:
            for part in transaction.parts:
                if part.settled.position is not None:
                    self._stored.advanced(part.partition.place, part.settled.position)
                elif part.settled.offsets:
                    self._stored.add_rows(part.partition.place, part.settled.offsets)
            transaction.engine.settlement.store_stage(transaction.messages)
            return
        part = transaction.parts[stopped_at]
        if part.stored is Stored.FENCED:
            try:
                found = await self._looked(part.settled)
            except StoreUnavailable as error:
                await self._unavailable(transaction.engine, transaction.messages, error)
                raise RolledBack from None
            if found is not Stored.FENCED:  # its search_path or database has such tables, too
                raise SessionChanged
            commits = transaction.engine.partitions.commits.get(part.partition)
            if commits is not None:
                commits.fence(part.partition)
            raise RolledBack
        if len(transaction.messages) == 1:
            self._stored.add_rows(part.partition.place, part.settled.offsets)
            transaction.engine.settlement.store_stage(part.messages)
            return
        for message in part.messages:  # which of them was stored before, each shows alone
            message.alone = True
        raise RolledBack

    async def finished(self, engine: Engine, messages: Sequence[ReceivedMessage]) -> None:
        """See `ResultStore.finished`."""
        kept = [message for message in messages if message.stage and message.feed.is_kept]
        if kept:
            sources = [source_of(message) for message in kept]

            def steps() -> Steps[None]:
                for source in sources:
                    yield from self._kept.remove(source)

            try:
                await self._connections.transaction(steps)
            except StoreUnavailable as error:
                await self._unavailable(engine, kept, error)
                raise RolledBack from None
