"""One call of a handler and what it stores, in one transaction of a database."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from txbroker.consumer.engine.calls import HandlerCall, call_of
from txbroker.consumer.engine.loop import Engine
from txbroker.consumer.engine.workers import Handler, RolledBack, until_end
from txbroker.consumer.message import ReceivedMessage
from txbroker.core.consuming.partition import Feed
from txbroker.core.consuming.queues import Order
from txbroker.databases.dialect import Dialect, Fault
from txbroker.databases.positions import PositionTable, Settled, Stored
from txbroker.databases.sessions import (
    AsyncSession,
    HandlerFailed,
    PlainSession,
    TransactionControlled,
    closed_by_user,
)
from txbroker.databases.steps import Steps, run, run_async
from txbroker.errors import ConfigurationError
from txbroker.failpoints import failpoint


class CommitUnanswered(Exception):
    """Whether a commit was executed is unknown."""


class TransactionPart:
    """The messages of a transaction that come from one feed of a partition."""

    def __init__(
        self, feed: Feed, messages: list[ReceivedMessage], order: Order, *, staged: bool
    ) -> None:
        self.partition = partition = feed.partition
        self.messages = messages
        self.stored = Stored.NOW
        place = partition.place
        if feed.is_kept:
            offsets = sorted([message.offset for message in messages])
            self.settled = Settled(place, partition.token, (), offsets, stages=staged)
            return
        offsets = sorted([message.record.offset for message in messages])
        position = None
        if order is Order.PARTITION and partition.progress.position.low == offsets[0]:
            position = partition.saved(ahead_too=offsets) if staged else partition.saved(offsets)
            if position[0] <= offsets[-1]:
                position = None  # messages between them are not done
        self.settled = Settled(place, partition.token, offsets, position=position)


class ResultTransaction:
    """One call of a handler, and what it stores.

    Attributes:
        parts: by partition, in an order that all consumers share.
        locks_first: no round may change their positions while the handler runs.
        handled: the handler has returned: what fails then is perhaps of its doing.
        own_opened: of `Connections` when the handler was called.
    """

    def __init__(
        self,
        positions: PositionTable,
        dialect: Dialect,
        engine: Engine,
        handler: Handler,
        messages: list[ReceivedMessage],
        argument: Any,
    ) -> None:
        self._positions = positions
        self._dialect = dialect
        self._handler = handler
        self._argument = argument
        self.engine = engine
        self.messages = messages
        by_feed: dict[Feed, list[ReceivedMessage]] = {}
        for message in messages:
            by_feed.setdefault(message.feed, []).append(message)
        self.parts = [
            TransactionPart(feed, by_feed[feed], engine.order, staged=engine.settlement.staged)
            for feed in sorted(by_feed, key=lambda feed: feed.partition.place)
        ]
        self._call = call_of(messages[0]) or HandlerCall()  # the partition may be lost
        self.locks_first = False
        self.handled = False
        self.own_opened = 0

    def run(self, session: PlainSession) -> int | None:
        """Call the handler with a plain connection; return the part that cannot be stored."""
        self.handled = False
        session.begin()
        if self.locks_first:
            run(self._lock(), session.execute)
        try:
            result = self._handler(self._argument, session.connection)
        except TransactionControlled:
            raise
        except Exception as error:
            _check_open(session)
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
        self.handled = False
        await session.begin()
        if self.locks_first:
            await run_async(self._lock(), session.execute)
        try:
            with self._timed():
                await self._handler(self._argument, session.connection)
        except TransactionControlled:
            raise
        except Exception as error:
            _check_open(session)
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

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Apply the timeout of handlers to the handler alone: a message has not failed because it
        waits for a connection, or because the answer of its commit is late."""
        self._call.untimed = True
        try:
            yield
        finally:
            self._call.resume_timeout(self.engine.time())

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        self._call.resume_timeout(self.engine.time())
        try:
            yield
        finally:
            self._call.untimed = True

    def _check(self, session: PlainSession | AsyncSession) -> None:
        """Raise TransactionControlled if the handler ended the transaction, RolledBack if it
        reported a failure of a message."""
        self.handled = True
        _check_open(session)
        if not session.in_transaction:
            raise TransactionControlled(
                "the handler ended the transaction of the consumer, by COMMIT, ROLLBACK or a "
                "statement that commits (on MariaDB also CREATE, ALTER and DROP): what it wrote "
                "may be stored without its position. Leave them out of the handler"
            )
        reports = self._call.reports or {}
        if any(error is not None for error in reports.values()):
            raise RolledBack

    def _lock(self) -> Steps[None]:
        for part in self.parts:
            if part.settled.position is None:
                yield from self._positions.lock(part.settled.place)

    def _settle(self) -> Steps[int | None]:
        for number, part in enumerate(self.parts):
            part.stored = yield from self._positions.settle(part.settled)
            if part.stored is not Stored.NOW:
                return number
        return None

    def _check_lease(self) -> None:
        if any(part.partition.lease.deadline_s <= self.engine.time() for part in self.parts):
            raise RolledBack

    def _commit_failed(self, error: Exception) -> None:
        if self._dialect.fault(error) is Fault.UNAVAILABLE:
            raise CommitUnanswered from error
        raise error


def _check_open(session: PlainSession | AsyncSession) -> None:
    if closed_by_user(session.connection):
        raise TransactionControlled(
            "the handler closed its connection, which the consumer uses again: leave it open"
        )
