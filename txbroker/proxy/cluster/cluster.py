"""All proxies as one: a call over HTTP finds the owner of its transaction, wherever that is.

What belongs to this proxy goes to its `Broker`, the rest to the owner's proxy, once: whoever gets
a call that was handed on answers it alone.
"""

import asyncio
import random
from collections.abc import Awaitable, Sequence
from typing import Protocol

from msgspec import structs

from txbroker.contract.service import (
    DecideRequest,
    ListRequest,
    Overview,
    PrepareRequest,
    Readiness,
    Run,
    Service,
    TransactionPage,
    TransactionStatus,
    TransactionView,
    alone,
)
from txbroker.core.routing import home, partition_of
from txbroker.errors import BadRequest, IdExpired, OwnerUnavailable, RequestError
from txbroker.proxy.cluster.forwarding import decode_cursor, merge, new_id
from txbroker.proxy.cluster.peers import Peers, Unsent
from txbroker.proxy.observe.overview import joined


class Local(Service, Protocol):
    """This proxy's own part of the cluster."""

    @property
    def url(self) -> str:
        """This proxy's own URL."""
        ...

    def mine(self) -> frozenset[int]:
        """Return the half partitions that are this proxy's and can take calls."""
        ...

    def assigned(self) -> tuple[str, ...]:
        """Return the URL of each half partition's proxy, whether it can take calls or not, ""
        where none is known."""
        ...

    def proxies(self) -> tuple[str, ...]:
        """Return the URLs of all proxies of the group, this one's included."""
        ...

    def check_open(self) -> None:
        """Raise if this proxy is going away.

        Raises:
            OwnerUnavailable: it is.
        """
        ...


class Cluster:
    """Every proxy's transactions: a `txbroker.contract.service.Service`.

    Args:
        local: this proxy's own part.
        peers: the other proxies.
    """

    def __init__(self, local: Local, peers: Peers) -> None:
        self._local = local
        self._peers = peers

    # --- where -------------------------------------------------------------------------------

    def _partitions(self) -> int:
        return len(self._local.assigned())

    def _owner(self, partition: int, id: str | None = None) -> str | None:
        """Return the URL of another proxy that owns a partition, None where it is ours.

        Raises:
            OwnerUnavailable: nobody is known to own it, or this proxy is going away.
        """
        return self._owner_among(self._local.assigned(), partition, id)

    def _owner_among(self, assigned: Sequence[str], partition: int, id: str | None) -> str | None:
        self._local.check_open()
        url = assigned[partition]
        if url == self._local.url:
            return None
        if not url:
            raise OwnerUnavailable(
                f"nobody is known to own half partition {partition} now: try again", id=id
            )
        return url

    def _owner_of(self, id: str) -> str | None:
        return self._owner(partition_of(id, self._partitions()), id)

    # --- runs --------------------------------------------------------------------------------

    def runs(self, requests: Sequence[PrepareRequest | DecideRequest]) -> Sequence[Run]:
        """Return operations as the runs of this proxy's own part; what goes to other proxies, or
        is refused at once, goes alone."""
        here: list[int] = []
        runs: list[Run] = []
        assigned = self._local.assigned()
        for number, request in enumerate(requests):
            if self._is_here(request, assigned):
                here.append(number)
            else:
                runs.append(Run((number,), alone(self, request)))
        own = self._local.runs([requests[number] for number in here])
        return runs + [
            run._replace(numbers=[here[number] for number in run.numbers]) for run in own
        ]

    def _is_here(self, request: PrepareRequest | DecideRequest, assigned: Sequence[str]) -> bool:
        """Say whether an operation is for this proxy's own part."""
        try:
            if isinstance(request, DecideRequest):
                partition: int | None = partition_of(request.id, len(assigned))
            elif not request.messages:
                return False
            else:
                partition = home(request, len(assigned))
            if partition is None:
                return bool(self._local.mine())  # what no key ties goes here if anywhere
            return self._owner_among(assigned, partition, request.id) is None
        except RequestError:
            return False

    # --- prepare -----------------------------------------------------------------------------

    async def prepare(self, request: PrepareRequest) -> TransactionStatus:
        """Store a half message, here or at its owner; see `txbroker.contract.service.Service`."""
        if not request.messages:
            raise BadRequest("a transaction holds at least one message")
        partition = home(request, self._partitions())
        if partition is None:
            return await self._prepare_anywhere(request)
        url = self._owner(partition, request.id)
        if url is None:
            return await self._local.prepare(request)
        return await self._prepare_at(url, partition, request)

    async def _prepare_anywhere(self, request: PrepareRequest) -> TransactionStatus:
        """Prepare what no key ties to a partition: here if anything is ours, else at any owner."""
        self._local.check_open()
        if self._local.mine():
            return await self._local.prepare(request)
        at = {url: partition for partition, url in enumerate(self._local.assigned()) if url}
        at.pop(self._local.url, None)
        urls = random.sample(sorted(at), len(at))
        for url in urls[:-1]:
            try:
                return await self._prepare_at(url, at[url], request)
            except Unsent:
                # Nothing of it was sent, so another partition will do.
                continue
        if not urls:
            raise OwnerUnavailable("no half partition is known to have an owner now: try again")
        return await self._prepare_at(urls[-1], at[urls[-1]], request)

    async def _prepare_at(
        self, url: str, partition: int, request: PrepareRequest
    ) -> TransactionStatus:
        """Prepare at another proxy, under an id of ours: whatever becomes of the call, the caller
        can send it again and counts once."""
        if request.id is not None:
            return await self._peers.prepare(url, request)
        id = new_id(request, partition, self._local.now_ms())
        try:
            return await self._peers.prepare(url, structs.replace(request, id=id))
        except IdExpired as error:
            # Our clock is not that of the partition's broker, and nothing was stored: its owner
            # knows the time. One of an older build does not tell it, and makes the id itself.
            now_ms = error.details.get("now_ms")
            if isinstance(now_ms, int):
                id = new_id(request, partition, now_ms)
                request = structs.replace(request, id=id)
            return await self._peers.prepare(url, request)

    # --- by id -------------------------------------------------------------------------------

    async def decide(self, request: DecideRequest) -> TransactionStatus:
        """Write a deciding marker, here or at the owner; see `Service`."""
        url = self._owner_of(request.id)
        if url is None:
            return await self._local.decide(request)
        return await self._peers.decide(url, request)

    async def check(
        self, id: str, *, by: str = "", reason: str = "", group: str = ""
    ) -> TransactionStatus:
        """Pull the next attempt forward; see `txbroker.contract.service.Service`."""
        url = self._owner_of(id)
        if url is None:
            return await self._local.check(id, by=by, reason=reason, group=group)
        return await self._peers.check(url, id, by=by, reason=reason, group=group)

    async def revive(self, id: str, *, by: str = "", reason: str = "") -> TransactionStatus:
        """Begin a new round, or retry a refused one; see `txbroker.contract.service.Service`."""
        url = self._owner_of(id)
        if url is None:
            return await self._local.revive(id, by=by, reason=reason)
        return await self._peers.revive(url, id, by=by, reason=reason)

    async def find(self, id: str, *, bodies: bool = False) -> TransactionView:
        """Return all that is known of a transaction; see `txbroker.contract.service.Service`."""
        url = self._owner_of(id)
        if url is None:
            return await self._local.find(id, bodies=bodies)
        return await self._peers.find(url, id, bodies=bodies)

    # --- list --------------------------------------------------------------------------------

    async def list(self, request: ListRequest) -> TransactionPage:
        """Return transactions of all owners, oldest first.

        Raises:
            OwnerUnavailable: a partition has no owner that answers; a shorter list would lie.
            BadRequest: the cursor is none of ours.
        """
        decode_cursor(request.cursor)
        wanted = request.partitions
        shares: dict[str | None, list[int]] = {}
        for partition in range(self._partitions()) if wanted is None else wanted:
            shares.setdefault(self._owner(partition), []).append(partition)
        parts = [
            asyncio.ensure_future(
                self._part(url, structs.replace(request, partitions=tuple(share)))
            )
            for url, share in shares.items()
        ]
        try:
            return merge(await asyncio.gather(*parts), request.limit)
        finally:
            # One that fails ends the others too: there will be no list.
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _part(self, url: str | None, request: ListRequest) -> TransactionPage:
        if url is None:
            return await self._local.list(request)
        return await self._peers.list(url, request)

    # --- overview ----------------------------------------------------------------------------

    async def overview(self) -> Overview:
        """Return how all stands, with what each proxy says; see `Service`."""
        assigned = self._local.assigned()
        others = sorted({url for url in (*self._local.proxies(), *assigned) if url})
        others = [url for url in others if url != self._local.url]
        asked = [self._peers.overview(url) for url in others]
        answers = await asyncio.gather(*map(_settled, asked))
        parts, missing = [await self._local.overview()], {}
        for url, answer in zip(others, answers, strict=True):
            if isinstance(answer, RequestError):
                missing[url] = str(answer)
            else:
                parts.append(answer)
        return joined(assigned, parts, missing, self._local.now_ms())

    # --- about this proxy --------------------------------------------------------------------

    def readiness(self) -> Readiness:
        """Say whether this proxy can take calls, and if not, why."""
        return self._local.readiness()

    def owners(self) -> tuple[str, ...]:
        """Return the URL of each half partition's owner, "" where none is known."""
        return self._local.owners()

    def now_ms(self) -> int:
        """Return the clock by which ids are made, ms."""
        return self._local.now_ms()


async def _settled(asked: Awaitable[Overview]) -> Overview | RequestError:
    """Return the answer, or why there is none."""
    try:
        return await asked
    except RequestError as error:
        return error
