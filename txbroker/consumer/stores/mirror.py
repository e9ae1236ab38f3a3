"""A copy of positions in the group's offsets, for tools that show lag; never read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

import structlog

from txbroker.consumer.rounds import Store
from txbroker.core.consuming.position import (
    METADATA_LENGTH_MAX,
    StoredOffset,
    decode_metadata,
    encode_metadata,
)
from txbroker.core.records import Partition
from txbroker.door.consuming import GroupMember
from txbroker.door.writing import Copy
from txbroker.error_text import safe_repr
from txbroker.errors import KafkaUnavailable

log = structlog.wrap_logger(logging.getLogger(__name__))

_MIRROR_S = 2.0
"""How long a commit waits for it."""


class Mirrored:
    """A store whose positions a group member copies to Kafka."""

    def __init__(self, store: Store, member: GroupMember) -> None:
        self._store = store
        self._member = member

    async def load(self, partitions: Collection[Partition]) -> dict[Partition, StoredOffset]:
        """See `Store.load`."""
        return await self._store.load(partitions)

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> Collection[Partition]:
        """See `Store.commit`."""
        fenced = await self._store.commit(offsets, copies) or ()
        mirrored = {at: _short(each) for at, each in offsets.items() if at not in fenced}
        try:
            async with asyncio.timeout(_MIRROR_S):
                await self._member.commit(mirrored)
        except (KafkaUnavailable, TimeoutError) as error:
            log.info("positions not mirrored", error=safe_repr(error))
        return fenced


def _short(stored: StoredOffset) -> StoredOffset:
    """Return a position whose metadata Kafka accepts."""
    if len(stored.metadata) <= METADATA_LENGTH_MAX:
        return stored
    metadata = decode_metadata(stored.offset, stored.metadata)
    assert metadata is not None
    return StoredOffset(stored.offset, encode_metadata(stored.offset, metadata)[0])
