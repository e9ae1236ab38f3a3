"""A `Service` in a dictionary: enough of a proxy to test its APIs without Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from txbroker.contract.service import (
    HISTORY_STEPS_S,
    Answer,
    DecideRequest,
    History,
    HistoryRequest,
    ListRequest,
    Overview,
    PlacedMessage,
    PrepareRequest,
    Readiness,
    Request,
    Run,
    SearchPage,
    SearchRequest,
    TransactionPage,
    TransactionStatus,
    TransactionView,
)
from txbroker.core.records import Decision, State
from txbroker.core.routing import dedup_randomness, make_id
from txbroker.errors import (
    AlreadyDecided,
    IdConflict,
    NotFound,
    NotPending,
    RequestError,
    UnknownTopic,
    WrongGroup,
)

NOW_MS = 1_700_000_000_000
_AFTER = {Decision.COMMIT: State.COMMITTED, Decision.ROLLBACK: State.ROLLED_BACK}


class FakeService:
    """Stores transactions; tests set its other behaviour."""

    def __init__(self) -> None:
        self.views: dict[str, TransactionView] = {}
        self.requests: list[object] = []
        self.ready = Readiness(ready=True, partitions={0: "owned"})
        self.overviewed = Overview(NOW_MS, True, (), (), (), 0, {})
        self.owner_urls: tuple[str, ...] = ("http://127.0.0.1:8470",)
        self.failure: BaseException | None = None
        self.gate: asyncio.Event | None = None
        self.made = 0

    async def _come_in(self, request: object) -> None:
        self.requests.append(request)
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure

    def runs(self, requests: Sequence[Request]) -> Sequence[Run]:
        return [Run((n,), self._answers(request)) for n, request in enumerate(requests)]

    async def _answers(self, request: Request) -> Sequence[Answer]:
        try:
            if isinstance(request, DecideRequest):
                return (await self.decide(request),)
            if isinstance(request, PrepareRequest):
                return (await self.prepare(request),)
            stored = await self.prepare(request.prepare)
            return (await self.decide(request.decide(stored.id)),)
        except RequestError as error:
            return (error,)

    async def prepare(self, request: PrepareRequest) -> TransactionStatus:
        await self._come_in(request)
        for message in request.messages:
            if message.topic == "missing":
                raise UnknownTopic("topic missing does not exist", topic="missing")
        id = request.id or self._new_id(request)
        placed = tuple(PlacedMessage(m.topic, 0, None, m) for m in request.messages)
        known = self.views.get(id)
        if known is not None:
            if known.messages != placed or known.group != request.group:
                raise IdConflict(id=id)
            return TransactionStatus(id, known.state, known.decision)
        self.views[id] = TransactionView(
            id=id,
            group=request.group,
            state=State.PENDING,
            partition=0,
            half_offset=len(self.views),
            prepared_at_ms=NOW_MS,
            messages=placed,
            order_key=request.order_key,
            dedup_key=request.dedup_key,
        )
        return TransactionStatus(id, State.PENDING, created=True)

    def _new_id(self, request: PrepareRequest) -> str:
        if request.dedup_key is not None:
            return make_id(0, NOW_MS, dedup_randomness(request.group, request.dedup_key))
        self.made += 1
        return make_id(0, NOW_MS, self.made)

    def _view(self, id: str) -> TransactionView:
        view = self.views.get(id)
        if view is None:
            raise NotFound(id=id)
        return view

    def _change(self, id: str, **changes: object) -> None:
        self.views[id] = msgspec.structs.replace(self.views[id], **changes)

    async def decide(self, request: DecideRequest) -> TransactionStatus:
        await self._come_in(request)
        view = self._view(request.id)
        if request.group and request.group != view.group:
            raise WrongGroup(id=request.id)
        if view.decision not in (None, request.decision):
            raise AlreadyDecided(id=request.id, decision=view.decision, state=view.state)
        if view.decision is None:
            state = State.PROMOTED if request.wait else _AFTER[request.decision]
            self._change(
                request.id,
                state=state,
                decision=request.decision,
                decided_at_ms=NOW_MS + 1,
                source=request.source,
                by=request.by,
                reason=request.reason,
            )
        view = self.views[request.id]
        return TransactionStatus(view.id, view.state, view.decision)

    async def check(
        self, id: str, *, by: str = "", reason: str = "", group: str = ""
    ) -> TransactionStatus:
        await self._come_in(("check", id, by, reason))
        view = self._view(id)
        if view.state is not State.PENDING:
            raise NotPending(id=id, state=view.state)
        return TransactionStatus(id, view.state)

    async def revive(self, id: str, *, by: str = "", reason: str = "") -> TransactionStatus:
        await self._come_in(("revive", id, by, reason))
        view = self._view(id)
        if view.state not in (State.PARKED, State.REFUSED):
            raise NotPending(id=id, state=view.state)
        self._change(id, state=State.PENDING, round=view.round + 1)
        return TransactionStatus(id, State.PENDING)

    def park(self, id: str) -> None:
        """Let a transaction have had its last attempt."""
        self._change(id, state=State.PARKED, attempts=15)

    async def find(
        self, id: str, *, bodies: bool = False, trace: bool = False, brief: bool = False
    ) -> TransactionView:
        await self._come_in(("find", id, bodies, brief))
        return self._view(id)

    async def search(self, request: SearchRequest) -> SearchPage:
        """Return one transaction on each page, by the id alone."""
        await self._come_in(request)
        found = [view for id, view in self.views.items() if id.startswith(request.id or "")]
        at = int(request.cursor or 0)
        cursor = str(at + 1) if at + 1 < len(found) else None
        return SearchPage(tuple(found[at : at + 1]), cursor, (at + 1) / max(1, len(found)), 1)

    async def list(self, request: ListRequest) -> TransactionPage:
        await self._come_in(request)
        views = [
            view
            for view in self.views.values()
            if request.state in (None, view.state) and request.group in (None, view.group)
        ]
        start = int(request.cursor) if (request.cursor or "").isdecimal() else 0
        end = start + request.limit
        return TransactionPage(tuple(views[start:end]), str(end) if end < len(views) else None)

    async def overview(self) -> Overview:
        await self._come_in("overview")
        return self.overviewed

    async def history(self, request: HistoryRequest) -> History:
        await self._come_in(request)
        return History(HISTORY_STEPS_S[-1])

    def readiness(self) -> Readiness:
        return self.ready

    def owners(self) -> tuple[str, ...]:
        return self.owner_urls

    def now_ms(self) -> int:
        return NOW_MS


class FakeStore:
    """A `GroupStore` in a dictionary."""

    def __init__(self, **stored: bytes) -> None:
        self.stored: dict[str, bytes] = stored
        self.failure: BaseException | None = None
        self._changed: Callable[[str, bytes | None], None] = lambda _group, _value: None

    async def load(self, changed: Callable[[str, bytes | None], None]) -> None:
        self._changed = changed
        for group, value in self.stored.items():
            changed(group, value)

    async def put(self, group: str, value: bytes | None) -> None:
        if self.failure is not None:
            raise self.failure
        if value is None:
            self.stored.pop(group, None)
        else:
            self.stored[group] = value
        self._changed(group, value)
