"""Whether a topic belongs to an installation of txbroker, this one or another on the same Kafka.

There a promoted message would be taken for a record. One record or name proves nothing, as anybody
may write it: an installation has all of its topics, with partitions that go together, compacted
where they must be, and a record that only installations write: the layout with that number of
partitions in the groups topic, or claims or progress in the checkpoint topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from txbroker.core.records import Cause, Record
from txbroker.door.own_topics import (
    belongs_to,
    half_partitions,
    installation_of,
    is_layout,
    is_owners,
)
from txbroker.door.protocols import LogTruncated
from txbroker.errors import InvariantBroken, KafkaUnavailable
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import Client, KafkaRefused
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.protocol.codes import Code

_FOUND_S, _NOT_FOUND_S = 600.0, 30.0
"""How long it is remembered, seconds, that a prefix is an installation's, and that it is none."""
_KNOWN_MAX = 1000
"""Prefixes remembered before those out of date are dropped; clients may name any topic."""
_READ_BYTES_MAX = 512 << 10
"""Read of each topic at most, give or take a batch: a prepare waits for it."""
_FETCH_BYTES = 64 << 10
_NEWEST = 100
"""Offsets at the end of a checkpoint partition among which progress is looked for."""
_READ_S = 2.0
_CHANNEL = "installations"


class Installations:
    """Finds installations by the names and records of their topics."""

    def __init__(self, client: Client, admin: Admin) -> None:
        self._client = client
        self._admin = admin
        self._known: dict[str, tuple[float, bool]] = {}

    async def refused(self, topic: str) -> Cause | None:
        """Return why a topic is no target, None where it is no installation's.

        Kafka is asked only about names that an installation's topic could have. What may not be
        read counts as nobody's: a name alone proves nothing.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        prefix = installation_of(topic)
        if not prefix:
            return None
        now = asyncio.get_running_loop().time()
        until, found = self._known.get(prefix, (0.0, False))
        if now >= until:
            found = await self._exists(prefix)
            if len(self._known) >= _KNOWN_MAX:
                self._known = {name: one for name, one in self._known.items() if one[0] > now}
            if len(self._known) < _KNOWN_MAX:
                self._known[prefix] = (now + (_FOUND_S if found else _NOT_FOUND_S), found)
        return belongs_to(topic, prefix) if found else None

    async def _exists(self, prefix: str) -> bool:
        groups, checkpoint = f"{prefix}.groups", f"{prefix}.checkpoint"
        names = [f"{prefix}.half", f"{prefix}.op", checkpoint, groups]
        facts = await self._admin.topics(names)
        count = half_partitions(
            prefix, {name: len(one.partitions) for name, one in facts.items() if not one.error}
        )
        if not count:
            return False
        configs = await self._admin.configs([checkpoint, groups])
        if any("compact" not in one.get("cleanup.policy", "") for one in configs.values()):
            return False
        try:
            async with asyncio.timeout(_READ_S):
                # The first proxy to start writes the layout before there are groups.
                test = partial(is_layout, partitions=count)
                return await self._holds(groups, 1, test) or await self._holds(
                    checkpoint, count, is_owners, newest=_NEWEST
                )
        except TimeoutError:
            raise KafkaUnavailable(
                f"whether topics {prefix}.* are an installation's was not read in {_READ_S:g} s"
            ) from None

    async def _holds(
        self, topic: str, partitions: int, test: Callable[[Record], bool], newest: int = 0
    ) -> bool:
        """Say whether a topic holds such a record among the first of its partitions, or among
        their `newest` offsets."""
        left = _READ_BYTES_MAX
        for number in range(partitions):
            reader = Reader(self._client, topic, number, _CHANNEL, append_time=False)
            try:
                position, end = await reader.start(), await reader.stable_end()
                if newest:
                    position = max(position, end - newest)
                while position < end and left > 0:
                    fetched = await reader.fetch(position, _FETCH_BYTES)
                    for records in fetched.pieces():
                        if any(test(record) for record in records):
                            return True
                        await asyncio.sleep(0)
                    if fetched.next_offset == position:
                        break
                    position, left = fetched.next_offset, left - fetched.size_bytes
            except KafkaRefused as error:
                if error.code != Code.TOPIC_AUTHORIZATION_FAILED:
                    raise
                return False
            except (LogTruncated, InvariantBroken):
                pass  # what moves or does not read proves nothing
        return False
