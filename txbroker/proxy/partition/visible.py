"""Who waits until transactions are visible."""

import asyncio
from collections.abc import Iterable, Iterator

from txbroker.core.transaction import Transaction
from txbroker.errors import OwnerUnavailable


class Visible:
    """Who waits until a transaction is visible, by its id."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._waiting))

    def release(self, transactions: Iterable[Transaction]) -> None:
        """These are visible, or will not become so by themselves."""
        if self._waiting:
            for transaction in transactions:
                for future in self._waiting.pop(transaction.id, ()):
                    if not future.done():
                        future.set_result(None)

    def close(self) -> None:
        """Nobody here will know any more."""
        self._closed = True
        for waiting in self._waiting.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(OwnerUnavailable())
        self._waiting.clear()

    async def wait(self, id: str) -> None:
        """Wait until a transaction is visible.

        Raises:
            OwnerUnavailable: this owner closes.
        """
        if self._closed:
            raise OwnerUnavailable(id=id)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(id, []).append(future)
        try:
            await future
        finally:
            # Whoever gave up and asks again must not be remembered each time.
            waiting = self._waiting.get(id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._waiting.pop(id, None)
