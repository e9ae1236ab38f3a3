"""Failed messages of a group, where its consumers keep them: in topics or in a database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from msgspec import structs

from txbroker.consumer.operations import copies
from txbroker.consumer.operations.copies import DeadLetter, SetAsideKey
from txbroker.consumer.operations.groups import GroupView
from txbroker.databases.database import Database, steps_in_transaction
from txbroker.databases.kept import DEAD, RELEASED, SET_ASIDE, UNPUBLISHED, Kept, KeptTable
from txbroker.databases.positions import PositionTable
from txbroker.databases.steps import Steps
from txbroker.databases.urls import from_url
from txbroker.door.consuming import ConsumingDoor
from txbroker.errors import ConfigurationError

T = TypeVar("T")


class FailedMessages(Protocol):
    """Set-aside keys and dead letters of a group, and how they return to their handler.

    All methods raise ConfigurationError if there is no place for them, and KafkaUnavailable or
    DatabaseUnavailable if it does not answer.
    """

    async def set_aside_keys(self) -> list[SetAsideKey]:
        """Return the set-aside keys, by partition."""

    async def release(self, keys: Iterable[SetAsideKey], reason: str) -> None:
        """Let the owners of the partitions handle set-aside keys again, in order."""

    async def dead_letters(self, limit: int, *, values: bool = False) -> list[DeadLetter]:
        """Return the newest dead letters that were not sent back, the newest first.

        Args:
            values: with the values of the messages.
        """

    async def send_back(self, letters: Sequence[DeadLetter], reason: str) -> int:
        """Let dead letters be handled again at once; return how many."""


class InTopics:
    """The failed messages in the topics of a group."""

    def __init__(self, door: ConsumingDoor, view: GroupView) -> None:
        self._door = door
        self._view = view

    async def set_aside_keys(self) -> list[SetAsideKey]:
        """See `FailedMessages`."""
        return await copies.set_aside_keys(self._door, self._view)

    async def release(self, keys: Iterable[SetAsideKey], reason: str) -> None:
        """See `FailedMessages`."""
        await copies.release(self._door, self._view, keys, reason)

    async def dead_letters(self, limit: int, *, values: bool = False) -> list[DeadLetter]:
        """See `FailedMessages`."""
        return await copies.dead_letters(self._door, self._view, limit, values=values)

    async def send_back(self, letters: Sequence[DeadLetter], reason: str) -> int:
        """See `FailedMessages`."""
        return await copies.send_back(self._door, self._view, letters, reason)


class InTable:
    """The failed messages of a group in `txbroker_aside`."""

    def __init__(self, database: Database, group: str) -> None:
        self._database = database
        self._group = group
        self._kept = KeptTable(database.dialect, group)

    @classmethod
    def at(cls, url: str, group: str) -> InTable:
        """Return those of the database of a URL, see `from_url`."""
        return cls(from_url(url), group)

    async def set_aside_keys(self) -> list[SetAsideKey]:
        """See `FailedMessages`."""
        by_key: dict[tuple[str, int, bytes | int], list[Kept]] = {}
        for kept in await self._do(lambda: self._kept.list((SET_ASIDE, RELEASED))):
            topic, partition, offset = kept.failed.source
            key = offset if kept.record.key is None else kept.record.key
            by_key.setdefault((topic, partition, key), []).append(kept)
        return [
            SetAsideKey(
                rows[0].record.key,
                len(rows),
                rows[0].failed,
                any(row.state == RELEASED for row in rows),
            )
            for rows in by_key.values()
        ]

    async def release(self, keys: Iterable[SetAsideKey], reason: str) -> None:
        """See `FailedMessages`."""

        def steps() -> Steps[None]:
            for each in keys:
                topic, partition, key = each.id
                yield from self._kept.release((topic, partition), key, reason)

        await self._do(steps)

    async def dead_letters(self, limit: int, *, values: bool = False) -> list[DeadLetter]:
        """See `FailedMessages`."""
        rows = await self._do(lambda: self._kept.list((DEAD, UNPUBLISHED), limit))
        return [_dead_letter(row, values) for row in rows]

    async def send_back(self, letters: Sequence[DeadLetter], reason: str) -> int:
        """See `FailedMessages`."""

        def steps() -> Steps[int]:
            sent = 0
            for letter in sorted(letters, key=lambda each: each.place):
                sent += yield from self._kept.retry(letter.place, reason)
            return sent

        return await self._do(steps)

    async def _do(self, steps: Callable[[], Steps[T]]) -> T:
        def checked() -> Steps[T]:
            if not (yield from PositionTable(self._database.dialect, self._group).known()):
                raise ConfigurationError(
                    f"{self._database.name} has no rows of group {self._group}: correct its name, "
                    "or the database's URL"
                )
            return (yield from steps())

        def in_thread() -> T:
            with self._database.explained():
                session = self._database.open()
                try:
                    return steps_in_transaction(checked(), session)
                finally:
                    session.close()

        return await asyncio.to_thread(in_thread)


def _dead_letter(row: Kept, values: bool) -> DeadLetter:
    size = None if row.record.value is None else len(row.record.value)
    size = row.failed.left_out.size if row.failed.left_out is not None else size
    message = row.record if values else structs.replace(row.record, value=None)
    return DeadLetter(row.failed.source, message, row.failed, size)
