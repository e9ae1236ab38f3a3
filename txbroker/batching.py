"""A sticky choice among equivalent partitions, which makes batches larger.

Messages for one partition at about the same time share batches, and a batch costs proxy and
brokers about the same at any size. Over time the choice is as even as a random one. Source:
the sticky partitioner of Kafka's clients (KIP-480).
"""

import random
import time
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

TIMES = 64
"""The most choices in a row of the same partition: enough for a batch. More would leave the other
partitions, and the proxies that own them, idle."""
SECONDS = 0.05
"""The longest time for one choice, seconds: a slow partition gets no more than its share, and a
producer with few messages spreads them evenly."""


class Sticky(Generic[T]):
    """Chooses one of several, and the same again for a while."""

    def __init__(self) -> None:
        self._chosen: T | None = None
        self._left = 0
        self._until_s = 0.0

    def choose(self, among: Sequence[T]) -> T:
        """Return one of `among`, which is not empty."""
        now_s = time.monotonic()
        chosen = self._chosen
        if self._left and now_s < self._until_s and chosen is not None and chosen in among:
            self._left -= 1
            return chosen
        chosen = self._chosen = among[random.randrange(len(among))]
        self._left, self._until_s = TIMES - 1, now_s + SECONDS
        return chosen
