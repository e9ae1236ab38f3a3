"""Choosing one of several that will all do, and staying with it for a while.

What is prepared for one half partition, or promoted to one target partition, at about the same
time goes into the same batches, and a batch costs proxy and brokers much the same whatever is in
it. Over a while the choice is as even as any at random. Source: the sticky partitioner of Kafka's
own clients (KIP-480).
"""

import random
import time
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

TIMES = 64
"""How often the same is chosen at most. So many are worth a batch; more would leave the other
partitions, and the proxies that own them, with nothing to do."""
SECONDS = 0.05
"""For how long at most, seconds: what is in trouble gets no more than its share, and whoever has
little to send spreads it like everybody else."""


class Sticky(Generic[T]):
    """Chooses one of several, and the same again while it is among them."""

    def __init__(self) -> None:
        self._chosen: T | None = None
        self._left = 0
        self._until_s = 0.0

    def choose(self, among: Sequence[T]) -> T:
        """Return one of those in `among`, of which there is at least one."""
        now_s = time.monotonic()
        chosen = self._chosen
        if self._left and now_s < self._until_s and chosen is not None and chosen in among:
            self._left -= 1
            return chosen
        chosen = self._chosen = among[random.randrange(len(among))]
        self._left, self._until_s = TIMES - 1, now_s + SECONDS
        return chosen
