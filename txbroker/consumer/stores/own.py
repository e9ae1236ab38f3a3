"""`PositionStore`: positions where the user keeps them."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from txbroker.consumer.rounds import StoreTraits
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Partition
from txbroker.door.consuming import ConsumingDoor, StoreUnavailable
from txbroker.door.writing import Copy, Fenced
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError

OWN_TRAITS = StoreTraits(repeatable=True, metadata_max=1 << 24)


@runtime_checkable
class PositionStore(Protocol):
    """Keeps positions; write one for a place that txbroker does not know.

    A position is an offset, that of the next message, and a text without a meaning for the store,
    which holds the token of the partition's owner and the done offsets above it. Both methods
    are coroutine functions or plain ones, which must not block.
    """

    def load(
        self, partitions: Collection[Partition]
    ) -> Mapping[Partition, StoredOffset] | Awaitable[Mapping[Partition, StoredOffset]]:
        """Return the stored positions of `(topic, partition)`s; leave out those without one, which
        begin at `start`. Called when partitions were assigned, before the first message is read."""

    def save(self, positions: Mapping[Partition, StoredOffset]) -> Awaitable[None] | None:
        """Store positions, all or none. Called after messages are done, by `CommitPolicy`, and
        before partitions are released. An exception: the consumer tries again."""


class OwnPositions:
    """A `PositionStore` as the `Store` of a consumer. Failed messages are copied to the group's
    topics first, at least once."""

    def __init__(self, store: PositionStore, door: ConsumingDoor, group: str) -> None:
        self._store = store
        self._door = door
        self._group = group

    async def load(self, partitions: Collection[Partition]) -> dict[Partition, StoredOffset]:
        """See `Store.load`.

        Raises:
            ConfigurationError: the store returned something else.
            StoreUnavailable
        """
        found = await self._call("load", self._store.load, list(partitions))
        if not isinstance(found, Mapping):
            raise ConfigurationError(
                f"load of {self._store!r} returned {found!r}: it returns a dict of positions by "
                "(topic, partition)"
            )
        for place, stored in found.items():
            if place not in partitions:
                raise ConfigurationError(
                    f"load of {self._store!r} returned a position of {place!r}, which was not "
                    "asked for: is it another group's?"
                )
            match stored:
                case (int(), str()):
                    continue
            raise ConfigurationError(
                f"load of {self._store!r} returned {stored!r} for {place!r}: a position is "
                "(offset, text), as it was saved"
            )
        return {place: StoredOffset(*stored) for place, stored in found.items()}

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> Collection[Partition]:
        """See `Store.commit`."""
        if copies:
            await self._door.store(self._group, copies)
        await self._call("save", self._store.save, dict(offsets))
        return ()

    async def _call(self, name: str, method: Any, argument: Any) -> Any:
        try:
            result = method(argument)
            return await result if inspect.isawaitable(result) else result
        except Fenced:
            raise
        except Exception as error:
            raise StoreUnavailable(f"{name} of {self._store!r}: {safe_repr(error)}") from error
