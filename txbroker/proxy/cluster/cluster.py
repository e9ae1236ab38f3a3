"""All proxies as one service: each call goes to the owner of its transaction.

Calls for this proxy's partitions go to its `Broker`; others are forwarded to the owner's proxy,
once: a proxy that receives a forwarded call never forwards it again.
"""

import asyncio
import random
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from msgspec import structs

from txbroker.contract.service import (
    Answer,
    DecideRequest,
    History,
    HistoryRequest,
    ListRequest,
    Overview,
    PrepareRequest,
    Readiness,
    Request,
    Run,
    SearchPage,
    SearchRequest,
    SubmitRequest,
    TransactionPage,
    TransactionStatus,
    TransactionView,
    execute,
)
from txbroker.core.routing import home, partition_of
from txbroker.errors import IdExpired, OwnerUnavailable, RequestError
from txbroker.proxy.cluster.broker import Broker
from txbroker.proxy.cluster.forwarding import ById, decode_cursor, merge, new_id, search_place
from txbroker.proxy.cluster.peers import Peers, Unsent
from txbroker.proxy.observe.history import joined_history
from txbroker.proxy.observe.overview import joined

T = TypeVar("T")


class Cluster:
    """The transactions of every proxy: a `txbroker.contract.service.Service`."""

    def __init__(self, broker: Broker, peers: Peers) -> None:
        self._broker = broker
        self._partitions = broker.partitions
        self._peers = peers

    # --- where -------------------------------------------------------------------------------

    def _owner_url(self, assigned: Sequence[str], partition: int, id: str | None) -> str | None:
        """Return the URL of the proxy that owns a partition, None if it is this proxy."""
        self._broker.check_open()
        url = assigned[partition]
        if url == self._partitions.url:
            return None
        if not url:
            raise OwnerUnavailable(f"half partition {partition} has no known owner: retry", id=id)
        return url

    def _owner_of(self, id: str) -> str | None:
        assigned = self._partitions.assigned()
        return self._owner_url(assigned, partition_of(id, len(assigned)), id)

    # --- runs --------------------------------------------------------------------------------

    def runs(self, requests: Sequence[Request]) -> Sequence[Run]:
        """Split operations into the runs of this proxy's broker; an operation that goes to another
        proxy, or is refused at once, runs alone."""
        here: list[int] = []
        runs: list[Run] = []
        assigned = self._partitions.assigned()
        for number, request in enumerate(requests):
            if self._is_here(request, assigned):
                here.append(number)
            else:
                runs.append(Run((number,), self._elsewhere(request)))
        own = self._broker.runs([requests[number] for number in here])
        return runs + [
            run._replace(numbers=[here[number] for number in run.numbers]) for run in own
        ]

    def _is_here(self, request: Request, assigned: Sequence[str]) -> bool:
        if isinstance(request, SubmitRequest):
            request = request.prepare
        try:
            if isinstance(request, DecideRequest):
                partition: int | None = partition_of(request.id, len(assigned))
            else:
                partition = home(request, len(assigned))
            if partition is None:
                return bool(self._broker.mine())  # without a key, any own partition will do
            return self._owner_url(assigned, partition, request.id) is None
        except RequestError:
            return False

    async def _elsewhere(self, request: Request) -> Sequence[Answer]:
        try:
            if isinstance(request, SubmitRequest):
                stored = await self._prepare(request.prepare)
                return (await self._decide(request.decide(stored.id)),)
            if isinstance(request, PrepareRequest):
                return (await self._prepare(request),)
            return (await self._decide(request),)
        except RequestError as error:
            return (error,)

    # --- at another proxy --------------------------------------------------------------------

    async def _prepare(self, request: PrepareRequest) -> TransactionStatus:
        assigned = self._partitions.assigned()
        partition = home(request, len(assigned))
        if partition is None:
            return await self._prepare_anywhere(request)
        url = self._owner_url(assigned, partition, request.id)
        if url is None:
            return await execute(self._broker, request)
        return await self._prepare_at(url, partition, request)

    async def _prepare_anywhere(self, request: PrepareRequest) -> TransactionStatus:
        """Prepare a transaction without a key: here if this proxy owns a partition, else at any
        owner."""
        self._broker.check_open()
        if self._broker.mine():
            return await execute(self._broker, request)
        at = {url: partition for partition, url in enumerate(self._partitions.assigned()) if url}
        at.pop(self._partitions.url, None)
        urls = random.sample(sorted(at), len(at))
        for url in urls[:-1]:
            try:
                return await self._prepare_at(url, at[url], request)
            except Unsent:
                # Certainly not stored there, so another partition will do.
                continue
        if not urls:
            raise OwnerUnavailable("no half partition has a known owner: retry")
        return await self._prepare_at(urls[-1], at[urls[-1]], request)

    async def _prepare_at(
        self, url: str, partition: int, request: PrepareRequest
    ) -> TransactionStatus:
        """Prepare at another proxy under an id made here, so that the caller can retry without
        storing the transaction twice."""
        if request.id is not None:
            return await self._peers.prepare(url, request)
        id = new_id(request, partition, self._broker.now_ms())
        try:
            return await self._peers.prepare(url, structs.replace(request, id=id))
        except IdExpired as error:
            # This proxy's clock differs from that of the partition's broker, and nothing was
            # stored. The owner's error has its time; an owner of an older build leaves it out and
            # makes the id itself.
            now_ms = error.details.get("now_ms")
            if isinstance(now_ms, int):
                id = new_id(request, partition, now_ms)
                request = structs.replace(request, id=id)
            return await self._peers.prepare(url, request)

    async def _decide(self, request: DecideRequest) -> TransactionStatus:
        url = self._owner_of(request.id)
        if url is None:
            return await execute(self._broker, request)
        return await self._peers.decide(url, request)

    # --- by id -------------------------------------------------------------------------------

    async def check(
        self, id: str, *, by: str = "", reason: str = "", group: str = ""
    ) -> TransactionStatus:
        url = self._owner_of(id)
        if url is None:
            return await self._broker.check(id, by=by, reason=reason, group=group)
        return await self._peers.check(url, id, by=by, reason=reason, group=group)

    async def revive(self, id: str, *, by: str = "", reason: str = "") -> TransactionStatus:
        url = self._owner_of(id)
        if url is None:
            return await self._broker.revive(id, by=by, reason=reason)
        return await self._peers.revive(url, id, by=by, reason=reason)

    async def find(
        self, id: str, *, bodies: bool = False, trace: bool = False, brief: bool = False
    ) -> TransactionView:
        url = self._owner_of(id)
        if url is None:
            return await self._broker.find(id, bodies=bodies, trace=trace, brief=brief)
        return await self._peers.find(url, ById(id, bodies=bodies, trace=trace, brief=brief))

    async def search(self, request: SearchRequest) -> SearchPage:
        """Return a page of a search, by the owner of the half partition that it has reached."""
        if request.record is not None:
            return await self._broker.searcher.record_page(request.record, request, self.find)
        assigned = self._partitions.assigned()
        place = search_place(request, len(assigned))
        url = None
        if place is not None:
            url = self._owner_url(assigned, place.steps[place.number][1], None)
        if url is None:
            return await self._broker.search(request)
        return await self._peers.search(url, request)

    # --- list --------------------------------------------------------------------------------

    async def list(self, request: ListRequest) -> TransactionPage:
        """Return transactions of all owners by time of preparation."""
        decode_cursor(request.cursor)
        assigned = self._partitions.assigned()
        numbers = range(len(assigned)) if request.partitions is None else request.partitions
        shares: dict[str | None, list[int]] = {}
        for partition in numbers:
            url = self._owner_url(assigned, partition, None)
            shares.setdefault(url, []).append(partition)
        parts = [
            asyncio.ensure_future(
                self._part(url, structs.replace(request, partitions=tuple(share)))
            )
            for url, share in shares.items()
        ]
        try:
            return merge(await asyncio.gather(*parts), request.limit, newest=request.newest)
        finally:
            # One failure cancels the others: there will be no list.
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _part(self, url: str | None, request: ListRequest) -> TransactionPage:
        if url is None:
            return await self._broker.list(request)
        return await self._peers.list(url, request)

    # --- overview ----------------------------------------------------------------------------

    async def overview(self) -> Overview:
        assigned = self._partitions.assigned()
        others = self._others(assigned)
        answers = await asyncio.gather(*[_settled(self._peers.overview(url)) for url in others])
        parts, missing = [await self._broker.overview()], {}
        for url, answer in zip(others, answers, strict=True):
            if isinstance(answer, RequestError):
                missing[url] = str(answer)
            else:
                parts.append(answer)
        return joined(assigned, parts, missing, self._broker.now_ms())

    def _others(self, assigned: Sequence[str]) -> Sequence[str]:
        """Return the URLs of the other proxies."""
        known = {url for url in (*self._partitions.proxies(), *assigned) if url}
        return sorted(known - {self._partitions.url})

    async def history(self, request: HistoryRequest) -> History:
        others = self._others(self._partitions.assigned())
        calls = [_settled(self._peers.history(url, request)) for url in others]
        answers = await asyncio.gather(*calls)
        parts = [one for one in answers if not isinstance(one, RequestError)]
        own = await self._broker.history(request)
        return joined_history([own, *parts], complete=len(parts) == len(answers))

    # --- about this proxy --------------------------------------------------------------------

    def readiness(self) -> Readiness:
        return self._broker.readiness()

    def owners(self) -> tuple[str, ...]:
        return self._partitions.owners()

    def now_ms(self) -> int:
        return self._broker.now_ms()


async def _settled(call: Awaitable[T]) -> T | RequestError:
    try:
        return await call
    except RequestError as error:
        return error
