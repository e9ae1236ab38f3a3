"""A group's committed offsets, stored with a member's generation, alone or together with copies.

Copies and offsets are one Kafka transaction (KIP-447). Without the generation, as common clients
commit, a member that was replaced while it was stopped would move the offset back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence

from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Partition
from txbroker.door.writing import Copy, GroupOffsets, Identity
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused
from txbroker.kafka.client.groups import ask_group, error_codes, store_offsets, stored_offsets
from txbroker.kafka.client.transaction import group_writer
from txbroker.kafka.protocol.codes import Code, describe
from txbroker.kafka.protocol.schemas import OffsetCommitV7, OffsetFetchV7
from txbroker.kafka.protocol.transactions import by_topic
from txbroker.net.timers import Backoff

_CLOSE_S = 2.0
_UNSTABLE_MAX_S = 60.0
"""Longer than a transaction stays open whose producer has died."""
_UNSTABLE_PAUSE_S = 0.05


class CommittedOffsets:
    """Loads and commits a group's offsets.

    Args:
        identity: of the member that commits.
        exact: offsets are committed in transactions alone: in one generation Kafka stores the
            offset that arrives last, also an older one, unless its transaction has ended.
    """

    def __init__(
        self, client: Client, group: str, identity: Identity, *, exact: bool = False
    ) -> None:
        self._client = client
        self._settings = client.settings
        self._group = group
        self._identity = identity
        self._exact = exact
        self._writer = group_writer(client, group)
        self._turn = asyncio.Lock()
        """Of the writer: a claim would abort the transaction in flight."""

    # --- load --------------------------------------------------------------------------------

    async def load(self, partitions: Collection[Partition]) -> dict[Partition, StoredOffset]:
        """Return committed offsets, without partitions that have none; see `GroupMember.load`.

        Raises:
            KafkaUnavailable: no answer, or a transaction with offsets stays open.
        """
        await self._settle()
        if not partitions:
            return {}
        request = OffsetFetchV7(self._group, list(by_topic(partitions).items()), True)
        unstable = Backoff(_UNSTABLE_MAX_S, _UNSTABLE_PAUSE_S)
        while True:
            answer = await ask_group(self._client, self._group, request, self._backoff())
            codes = error_codes(answer)
            if not codes:
                return stored_offsets(answer)
            code = min(codes)
            why = f"cannot load the offsets of group {self._group}: {describe(code)}"
            if Code.UNSTABLE_OFFSET_COMMIT not in codes:
                raise KafkaRefused(code, why)
            if not await unstable.pause():
                raise KafkaUnavailable(why)

    # --- commit ------------------------------------------------------------------------------

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> None:
        """Store offsets, and copies with them or not at all; see `GroupMember.commit`.

        Raises:
            Fenced, Refused
            KafkaUnavailable: the result is unknown. It is known before the next `load` returns.
        """
        stored = GroupOffsets(self._group, offsets, self._identity)
        if not (copies or self._exact):
            await store_offsets(self._client, stored, OffsetCommitV7, self._backoff())
            return
        try:
            async with self._turn:
                if not self._writer.claimed:
                    await self._writer.claim()
                await self._writer.write(copies)
                await self._writer.commit(offsets=[stored])
        except asyncio.CancelledError:  # as where its partitions are released
            await self.close()
            raise
        except KafkaUnavailable:
            await self._writer.abort()  # readers of the copies wait for it
            raise

    async def close(self) -> None:
        """End a transaction whose result is unknown: readers and the next owner wait for it.

        Otherwise it ends when it times out.
        """
        with contextlib.suppress(KafkaUnavailable, TimeoutError):
            await asyncio.wait_for(self._settle(), _CLOSE_S)

    async def _settle(self) -> None:
        """End the transaction whose result is unknown."""
        async with self._turn:
            if self._writer.unsettled:
                await self._writer.claim()

    def _backoff(self) -> Backoff:
        return Backoff(self._settings.write_timeout_s, self._settings.retry_backoff_s)
