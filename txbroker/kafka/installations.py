"""Whether a topic belongs to an installation of txbroker, this one or another on the same Kafka.

There a promoted message would be taken for a record. Installations are known by what only they
write: the layout in their groups topic, claims and progress in their checkpoint topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from txbroker.core.records import Cause, Record
from txbroker.door import LogTruncated
from txbroker.errors import InvariantBroken
from txbroker.kafka.admin import Admin
from txbroker.kafka.client import Client, KafkaRefused
from txbroker.kafka.codes import Code
from txbroker.kafka.reader import Reader
from txbroker.own_topics import belongs_to, installation_of, is_layout, is_owners

_FOUND_S, _NOT_FOUND_S = 600.0, 30.0
"""How long it is remembered, seconds, that a prefix is an installation's, and that it is none."""
_KNOWN_MAX = 1000
"""Prefixes remembered before those out of date are dropped; clients may name any topic."""
_READ_BYTES_MAX = 32 << 20
"""Read of one topic before it counts as nobody's."""
_LANE = "installations"


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
        tests = {f"{prefix}.groups": is_layout, f"{prefix}.checkpoint": is_owners}
        facts = await self._admin.topics(list(tests))
        for topic, test in tests.items():
            found = facts.get(topic)
            if found is None or found.error:
                continue
            share = _READ_BYTES_MAX // max(1, len(found.partitions))
            for partition in sorted(found.partitions):
                if await self._holds(topic, partition, test, share):
                    return True
        return False

    async def _holds(
        self, topic: str, partition: int, test: Callable[[Record], bool], bytes_max: int
    ) -> bool:
        """Say whether a partition holds such a record among its first ones."""
        reader = Reader(self._client, topic, partition, _LANE, append_time=False)
        try:
            position, end = await reader.start(), await reader.stable_end()
            read = 0
            while position < end and read < bytes_max:
                fetched = await reader.fetch(position, bytes_max)
                for records in fetched.pieces():
                    if any(test(record) for record in records):
                        return True
                    await asyncio.sleep(0)
                if fetched.next_offset == position:
                    return False
                position, read = fetched.next_offset, read + fetched.size_bytes
        except KafkaRefused as error:
            if error.code != Code.TOPIC_AUTHORIZATION_FAILED:
                raise
        except (LogTruncated, InvariantBroken):
            pass  # what moves or does not read proves nothing
        return False
