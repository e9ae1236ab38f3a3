"""Messages as records: each in a partition that its topic has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from txbroker.core.records import NO_HEADERS, Cause, Message, Record
from txbroker.core.routing import murmur2
from txbroker.door.writing import Copy
from txbroker.errors import TxbrokerError

_KNOWN_S = 30.0
"""How long the number of a topic's partitions is used."""
_MISSING_S = 1.0
_UNKNOWN = 0.0, 0
_known_hash = lru_cache(maxsize=10_000)(murmur2)
"""Takes a tenth of the time where keys repeat, else a quarter more."""
_KNOWN_KEY_MAX = 256
"""Of longer keys no hashes are kept, which would keep the keys, too; bytes."""


class Remedy(Enum):
    """What can end a refusal."""

    WAITING = "waiting"
    """The topic is at fault, see `Cause.passing`."""
    RETRIES = "retries"
    """The message may be at fault: a few."""
    NONE = "none"


class Refusal(NamedTuple):
    """Why a message cannot be written.

    Attributes:
        number: of the message among those that were to be written, from 0; of a relay, in its
            delivery.
        cause: as a sentence.
        remedy: what can end it.
    """

    number: int
    message: Message
    cause: str
    remedy: Remedy = Remedy.RETRIES


class MessagesRefused(TxbrokerError):
    """Messages cannot be written; nothing of their transaction may be committed.

    Attributes:
        refusals: of at least one message. Of the others some may be refused next time.
    """

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__(refusals[0].cause)
        self.refusals = refusals

    def after(self, count: int) -> MessagesRefused:
        """Return the error of messages that follow `count` others."""
        return MessagesRefused([one._replace(number=count + one.number) for one in self.refusals])


class Placing:
    """Chooses the partitions of messages.

    Args:
        target: returns a topic's number of partitions, see `ConsumingDoor.target`.
        prefix: of txbroker's own topics, which are no targets.
    """

    def __init__(self, target: Callable[[str, str], Awaitable[int | Cause]], prefix: str) -> None:
        self._target = target
        self._prefix = prefix
        self._known: dict[str, tuple[float, int | Cause]] = {}
        self._now_s = asyncio.get_running_loop().time

    async def copies(self, messages: Sequence[Message], turn: int, timestamp_ms: int) -> list[Copy]:
        """Return the records of messages, in order.

        A message without a partition goes to that of its key, as Kafka's clients choose it.

        Args:
            turn: chooses the partition of messages without a key.
            timestamp_ms: of messages without one.

        Raises:
            MessagesRefused: a topic or a partition does not exist, or is an own one.
            and what the look for a topic's partitions raises.
        """
        now_s, copies, refusals = self._now_s(), [], []
        for index, message in enumerate(messages):
            topic, key, partition = message.topic, message.key, message.partition
            until_s, count = self._known.get(topic, _UNKNOWN)
            if now_s >= until_s:
                count = await self._target(topic, self._prefix)
                kept_s = _MISSING_S if isinstance(count, Cause) else _KNOWN_S
                self._known[topic] = now_s + kept_s, count
            if isinstance(count, Cause):
                remedy = Remedy.NONE if count.code == "reserved" else Remedy.WAITING
                refusals.append(Refusal(index, message, count.message, remedy))
                continue
            if partition is None:
                if key is None:
                    partition = turn % count
                else:
                    known = len(key) <= _KNOWN_KEY_MAX
                    partition = (_known_hash(key) if known else murmur2(key)) % count
            elif not 0 <= partition < count:
                cause = f"topic {topic} has {count} partitions, and no partition {partition}"
                refusals.append(Refusal(index, message, cause, Remedy.WAITING))
                continue
            time_ms = timestamp_ms if message.timestamp_ms is None else message.timestamp_ms
            headers = tuple(message.headers) if message.headers else NO_HEADERS
            copies.append(Copy(topic, partition, Record(key, message.value, headers, time_ms)))
        if refusals:
            raise MessagesRefused(refusals)
        return copies
