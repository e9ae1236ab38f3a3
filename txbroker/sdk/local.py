"""The answers to checks that this process knows without its check function."""

import asyncio
from collections import OrderedDict

from txbroker.sdk.types import Answer, NotYet, ProducerClosed

REMEMBERED_MAX = 10_000
"""Undelivered decisions and abandoned prepares that are remembered; the oldest are dropped. Without
them a check calls the check function, which costs a query of the database."""


class LocalTransactions:
    """The transactions of this process: running blocks and recent decisions."""

    def __init__(self, running_again_s: float) -> None:
        self._not_yet = NotYet(running_again_s)
        self._open: dict[str, Answer] = {}
        self._remembered: OrderedDict[str, Answer] = OrderedDict()
        self.started = False
        self.closed = False
        """No further transaction may begin."""
        self._blocks = 0
        self._no_blocks = asyncio.Event()
        """Set when the last block ends after `closed`."""

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
        """Return the answer for a transaction; None if it is not known here."""
        return self._open.get(transaction_id) or self._remembered.get(transaction_id)

    def running(self, transaction_id: str) -> None:
        """Note that its prepare or its local transaction is in progress."""
        self._open[transaction_id] = self._not_yet

    def deciding(self, transaction_id: str, answer: Answer) -> None:
        """Note that its decision is made and in flight."""
        self._open[transaction_id] = answer

    def settled(self, transaction_id: str) -> None:
        """Note that nothing of it is in progress any more."""
        self._open.pop(transaction_id, None)
        self._remembered.pop(transaction_id, None)

    def undelivered(self, transaction_id: str, answer: Answer) -> None:
        """Keep a decision that is certain but could not be delivered, for the check."""
        self._open.pop(transaction_id, None)
        self._remembered[transaction_id] = answer
        if len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)

    def block_opened(self) -> None:
        """Count a transaction that begins.

        Raises: as `require_open`.
        """
        if self.closed or not self.started:
            self.require_open()
        self._blocks += 1

    def block_closed(self) -> None:
        """Count a transaction that ended."""
        self._blocks -= 1
        if self.closed and self._blocks == 0:
            self._no_blocks.set()

    async def no_blocks(self) -> None:
        """Wait until no transaction runs here; set `closed` before, so that none begins."""
        if self._blocks:
            await self._no_blocks.wait()
