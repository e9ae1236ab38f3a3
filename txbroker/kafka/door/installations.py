"""Detect topics of txbroker installations on the same Kafka: they are no targets.

A promoted message would be taken for a record there. A name or one record is no proof, because any
client may write it. An installation has all of its topics, with matching partitions, compacted
where required, and a record that only installations write: the layout with that number of
partitions in the groups topic, or claims or progress in the checkpoint topic."""

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
"""Cache lifetime of a positive and of a negative result."""
_KNOWN_MAX = 1000
"""Cached prefixes until expired ones are dropped. Bounded, because clients may name any topic."""
_READ_BYTES_MAX = 512 << 10
"""Maximum bytes read of each topic, plus one batch: a prepare waits for it."""
_FETCH_BYTES = 64 << 10
_NEWEST = 100
"""Number of offsets at the end of a checkpoint partition that are searched."""
_READ_S = 2.0
_CHANNEL = "installations"


class Installations:
    """Detects installations by the names and records of their topics."""

    def __init__(self, client: Client, admin: Admin) -> None:
        self._client = client
        self._admin = admin
        self._known: dict[str, tuple[float, bool]] = {}

    async def refused(self, topic: str) -> Cause | None:
        """Return why a topic is no target; None if it belongs to no installation.

        Kafka is asked only about names that an installation's topic could have. Unreadable topics
        belong to none, because a name alone is no proof.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        prefix = installation_of(topic)
        if not prefix:
            return None
        now = asyncio.get_running_loop().time()
        until, exists = self._known.get(prefix, (0.0, False))
        if now >= until:
            exists = await self._exists(prefix)
            if len(self._known) >= _KNOWN_MAX:
                self._known = {p: known for p, known in self._known.items() if known[0] > now}
            if len(self._known) < _KNOWN_MAX:
                self._known[prefix] = (now + (_FOUND_S if exists else _NOT_FOUND_S), exists)
        return belongs_to(topic, prefix) if exists else None

    async def _exists(self, prefix: str) -> bool:
        groups, checkpoint = f"{prefix}.groups", f"{prefix}.checkpoint"
        names = [f"{prefix}.half", f"{prefix}.op", checkpoint, groups]
        facts = await self._admin.topics(names)
        count = half_partitions(
            prefix,
            {name: len(topic.partitions) for name, topic in facts.items() if not topic.error},
        )
        if not count:
            return False
        configs = await self._admin.configs([checkpoint, groups])
        if any("compact" not in c.get("cleanup.policy", "") for c in configs.values()):
            return False
        try:
            async with asyncio.timeout(_READ_S):
                # The first proxy to start writes the layout before any group.
                test = partial(is_layout, partitions=count)
                return await self._holds(groups, 1, test) or await self._holds(
                    checkpoint, count, is_owners, newest=_NEWEST
                )
        except TimeoutError:
            raise KafkaUnavailable(
                f"could not check within {_READ_S:g} s whether topics {prefix}.* belong to an "
                "installation of txbroker: retry"
            ) from None

    async def _holds(
        self, topic: str, partitions: int, test: Callable[[Record], bool], newest: int = 0
    ) -> bool:
        """Return whether the first records of a topic's partitions, or those at their `newest`
        offsets, include one that passes `test`."""
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
                pass  # truncated or corrupt: no proof
        return False
