"""What this process knows of its own transactions, so that it can answer their checks itself."""

import asyncio
from collections import OrderedDict

from txbroker.sdk.types import Answer, NotYet, ProducerClosed

REMEMBERED_MAX = 10_000
"""Decisions that could not be delivered, and prepares given up; the oldest are forgotten. A
check finds the truth without them, so this bound costs at most a question to the database."""


class LocalTransactions:
    """The answers that need no question: a block still runs, or has decided a moment ago."""

    def __init__(self, running_again_s: float) -> None:
        self._not_yet = NotYet(running_again_s)
        self._open: dict[str, Answer] = {}
        self._remembered: OrderedDict[str, Answer] = OrderedDict()
        self.started = False
        self.closed = False
        """No transaction may begin any more."""
        self._blocks = 0
        self._no_blocks = asyncio.Event()
        """Set when the last one ends after `closed`."""

    def require_open(self) -> None:
        """Return if a transaction may begin.

        Raises:
            ProducerClosed: the producer is not started yet, or draining, or closed.
        """
        if self.closed:
            raise ProducerClosed("the producer is draining or closed: no new transactions")
        self.require_started()

    def require_started(self) -> None:
        """Return if calls can be made.

        Raises:
            ProducerClosed: the producer is not started yet.
        """
        if not self.started:
            raise ProducerClosed("the producer is not started: use `async with` or `start()`")

    def answer(self, transaction_id: str) -> Answer | None:
        """Return what to say of a transaction; None where somebody else must be asked."""
        return self._open.get(transaction_id) or self._remembered.get(transaction_id)

    def running(self, transaction_id: str) -> None:
        """Its prepare is under way, or its local transaction is."""
        self._open[transaction_id] = self._not_yet

    def deciding(self, transaction_id: str, answer: Answer) -> None:
        """Its decision is made here and on its way."""
        self._open[transaction_id] = answer

    def settled(self, transaction_id: str) -> None:
        """Nothing of it is under way here any more."""
        self._open.pop(transaction_id, None)
        self._remembered.pop(transaction_id, None)

    def undelivered(self, transaction_id: str, answer: Answer) -> None:
        """Its decision is certain but could not be delivered: keep it for the check."""
        self._open.pop(transaction_id, None)
        self._remembered[transaction_id] = answer
        if len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)

    def block_opened(self) -> None:
        """A transaction begins here.

        Raises: as `require_open`.
        """
        if self.closed or not self.started:
            self.require_open()
        self._blocks += 1

    def block_closed(self) -> None:
        """A transaction ended here, however."""
        self._blocks -= 1
        if self.closed and self._blocks == 0:
            self._no_blocks.set()

    async def no_blocks(self) -> None:
        """Wait until no transaction runs here; after `closed`, so that none begins."""
        if self._blocks:
            await self._no_blocks.wait()
