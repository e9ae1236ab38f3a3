"""The outbox as a source: rows that wait, in whole units and in the order of their keys.

The position in Kafka names the rows of the last delivery. Earlier deliveries are marked
in the table, so nothing depends on the order in which positions are drawn or become visible.

A delivery has one page of rows, or those of one longer unit. A page is marked in one transaction:
after a crash its rows are all marked, or none is, and are compared by the page's digest.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import chain, groupby
from typing import TypeVar

import msgspec
import structlog
from msgspec import Struct

from txbroker.contract.json import headers_from_json
from txbroker.core.encoding import ID_HEADER, INSTALLATION_HEADER
from txbroker.core.records import Header, Message
from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.outbox.leases import RelayIdentity
from txbroker.databases.outbox.operations import readable
from txbroker.databases.outbox.rows import check_message
from txbroker.databases.outbox.waiting import (
    FullRow,
    Group,
    Held,
    RefusedRows,
    Selection,
    WaitingRow,
    WaitingRows,
)
from txbroker.databases.steps import Steps
from txbroker.door.placing import MessagesRefused, Refusal, Remedy
from txbroker.door.writing import Fenced
from txbroker.errors import BadRequest, ConfigurationError
from txbroker.relay.sessions import DatabaseThread, RowsLocked
from txbroker.relay.source import Delivery
from txbroker.relay.wakeups import Wakeups

T = TypeVar("T")
log = structlog.wrap_logger(logging.getLogger(__name__))
RENAMED = "UPDATE txbroker_relay SET relay = 'ANOTHER-NAME'"
_COMPARE = (
    "Compare it with the topics (`txbroker audit outbox`), give rows that are visible the state "
    f"GLOBAL_COMMIT, then begin without a position: {RENAMED}"
)
_ROWS = 2000
"""Rows of a page."""
_DELIVERY_BYTES = 4 << 20
_SEARCH_SHARE = 20
"""A search from the beginning takes at most one in so many seconds of an idle relay."""
_UNMARKED_MAX, _PUT_OFF_MAX = 50, 5000
"""Pages, and groups. With more, the relay waits for those who have locked their rows."""
_PUT_OFF_S = 5
_PIECE_BYTES, _PIECE_ROWS = 1 << 20, 2000


class Page(Struct):
    """Rows of a delivery, by position.

    Attributes:
        runs: the gap before and the length of each run of adjacent ones, as compressed JSON: at
            most some bytes a row, in the relay's memory as in Kafka.
        digest: of their ids, so that rows of a restored table are not taken for them.
    """

    runs: bytes
    digest: str = ""

    @classmethod
    def of(cls, positions: Iterable[int]) -> Page:
        """Return a page of rows; it has no digest yet."""
        runs, end = list[int](), 0
        for position in positions:
            if runs and position == end:
                runs[-1] += 1
            else:
                runs += (position - end, 1)
            end = position + 1
        return cls(zlib.compress(msgspec.json.encode(runs)))

    def positions(self) -> list[int]:
        """Return the positions of the rows."""
        runs = iter(msgspec.json.decode(zlib.decompress(self.runs), type=list[int]))
        positions, end = list[int](), 0
        for gap, length in zip(runs, runs, strict=True):
            positions += range(end + gap, end + gap + length)
            end += gap + length
        return positions


class OutboxPosition(Struct, frozen=True):
    """The rows of a delivery, as JSON in Kafka.

    Attributes:
        identity: of the outbox table.
    """

    identity: str
    pages: Sequence[Page]


class Retries(Struct, frozen=True):
    """What happens to rows that Kafka refuses: they wait `pauses_s`, the last one for all further
    retries. Those that no waiting helps are given up after `max`."""

    max: int = 10
    pauses_s: tuple[float, ...] = (1, 2, 4, 8, 16, 32, 60)


class OutboxDelivery(Delivery):
    """Rows of whole units; see `Delivery`."""

    def __init__(self, source: OutboxSource) -> None:
        self._source = source
        self.pages: list[Page] = []
        self._ends: list[Sequence[int]] = []
        """Of the pieces of each page."""

    def add(self, rows: Sequence[WaitingRow]) -> None:
        """Add a page."""
        self.pages.append(Page.of(row.position for row in rows))
        self._ends.append(tuple(_ends([row.size for row in rows])))

    @property
    def positions(self) -> Iterator[int]:
        """Of all rows."""
        return chain.from_iterable(page.positions() for page in self.pages)

    @property
    def position(self) -> bytes:
        pages = [*self._source.unmarked, *self.pages]
        return msgspec.json.encode(OutboxPosition(self._source.identity, pages))

    async def pieces(self) -> AsyncIterator[Sequence[Message]]:
        """See `Delivery.pieces`."""
        count = 0
        for page, ends in zip(self.pages, self._ends, strict=True):
            positions, begin, digest = page.positions(), 0, sha256()
            for end in ends:
                rows = await self._source.fetch(positions[begin:end])
                if len(rows) != end - begin:
                    await self._source.check_owned()  # a successor may have deleted them
                    raise DatabaseUnavailable(
                        "rows of the outbox were deleted while they were sent: leave rows in the "
                        "state LOCAL_COMMIT to the relay"
                    )
                begin = end
                for row in rows:
                    digest.update(_line(row.id))
                messages, refusals = self._source.messages(rows)
                if refusals:
                    raise MessagesRefused(refusals).after(count)
                count += len(messages)
                yield messages
            page.digest = digest.hexdigest()

    def positions_of(self, refusals: Iterable[Refusal]) -> list[int]:
        """Return the positions of refused rows."""
        positions = [*self.positions]
        return [positions[each.number] for each in refusals]


class OutboxSource:
    """A `Source` of the rows of some shards.

    Args:
        named: the relay's name, for the headers of records, and the identity of its table.
        rows: of the shard.
        owned: returns whether the shard is still this relay's, and locks that.
        failed: called with an error that does not end the work.

    Attributes:
        unmarked: pages that are visible, and whose rows others have locked. Each position in Kafka
            names them until they are marked.
    """

    def __init__(
        self,
        named: RelayIdentity,
        rows: WaitingRows,
        thread: DatabaseThread,
        wakeups: Wakeups,
        retries: Retries,
        owned: Callable[[], Steps[bool]],
        failed: Callable[[Exception], None],
    ) -> None:
        self._owned = owned
        self._failed = failed
        self.unmarked: list[Page] = []
        self.identity = named.identity
        self._installation = (INSTALLATION_HEADER, named.relay.encode())
        self._rows = rows
        self._thread = thread
        self._wakeups = wakeups
        self._retries = retries
        self._held = Held({}, 0)
        self._put_off, self._put_off_s = set[Group](), 0
        """What others have locked, so that it is neither changed nor sent, and for how long."""
        self._floor, self._search_s = "", 0.0
        """See `WaitingRows.select`, and when to search from the beginning again."""

    # --- positions -----------------------------------------------------------------------------

    async def resume(self, position: bytes | None) -> None:
        """Mark the rows of the last delivery, unless they are; see `Source.resume`."""
        pages = () if position is None else self._last(position).pages
        await self._check_restored(max((max(page.positions()) for page in pages), default=0))
        self.unmarked, self._put_off, self._search_s = [], set(), 0.0
        for page in pages:
            try:
                await self._thread.attempt(self._checked(partial(self._mark_last, page)))
            except RowsLocked as error:
                await self._change(partial(self._waiting_of, page))
                self._locked(error, page)
        await self._reorder()
        # Also without a position only with the lease.
        self._held = await self._change(self._rows.held)
        self._wakeups.reset()

    async def _change(self, steps: Callable[[], Steps[T]]) -> T:
        """Execute steps in a transaction, as long as no other relay has the shard: its successor
        may have rows in flight that this one would give up or let wait.

        Raises:
            Fenced
        """

        return await self._thread.transaction(self._checked(steps))

    def _checked(self, steps: Callable[[], Steps[T]]) -> Callable[[], Steps[T]]:
        def checked() -> Steps[T]:
            if not (yield from self._owned()):
                raise Fenced("another relay has taken the lease of the shard")
            return (yield from steps())

        return checked

    async def check_owned(self) -> None:
        """Raise Fenced if another relay has the shard."""
        await self._change(_nothing)

    def _last(self, position: bytes) -> OutboxPosition:
        last = decode_position(position)
        if last.identity != self.identity:
            raise name_taken(last.identity, self.identity)
        return last

    async def _check_restored(self, delivered: int) -> None:
        """Check that the positions that the database draws are above all others.

        Args:
            delivered: the highest position of the last delivery.

        Raises:
            ConfigurationError
        """
        newest, drawn = await self._thread.read(self._rows.restored.drawn)
        if drawn is not None and max(newest, drawn) < delivered:
            raise ConfigurationError(
                f"the database is older than the last delivery, of row {delivered}: its positions "
                f"end at {drawn}. It was restored from a backup, or lost its last commits, so rows "
                f"that wait may be visible already. {_COMPARE}"
            )
        statement = self._rows.restored.set_drawn(newest)
        if drawn is not None and drawn < newest and statement:
            raise ConfigurationError(
                f"the sequence of positions is at {drawn}, behind row {newest} of the outbox, "
                "restored or copied without it: new rows come before older ones. Set it with "
                f"`{statement}`; rows that were written since keep their place"
            )

    async def _reorder(self) -> None:
        """Let rows of another PostgreSQL cluster come before all new ones."""
        if not await self._thread.read(self._rows.restored.has_foreign):
            return
        count, self._search_s = await self._change(self._rows.restored.reorder), 0.0
        if count:
            log.warning("rows of another PostgreSQL cluster are put before new ones", count=count)

    def _mark_last(self, page: Page) -> Steps[None]:
        yield from self._rows.mark((yield from self._waiting_of(page)))

    def _waiting_of(self, page: Page) -> Steps[list[int]]:
        """Return the positions of a page that are not marked: all of it, or none."""
        found = yield from self._rows.ids_waiting(page.positions())
        if not found:
            return []
        digest = sha256()
        for _position, id in found:
            digest.update(_line(id))
        if digest.hexdigest() != page.digest:
            raise ConfigurationError(
                "the outbox table does not hold the rows of the last delivery: it was restored or "
                f"changed. {_COMPARE}"
            )
        return [position for position, _id in found]

    def _locked(self, error: RowsLocked, *pages: Page) -> None:
        """Go on without rows that others have locked: those put off, and pages, which are visible.

        Raises:
            RowsLocked: there are too many.
        """
        self.unmarked += pages
        counts = len(self.unmarked), len(self._put_off)
        if counts[0] > _UNMARKED_MAX or counts[1] > _PUT_OFF_MAX:
            raise error
        self._failed(error)
        log.warning("rows are locked", pages=counts[0], put_off=counts[1], error=str(error))

    async def _unless_locked(
        self,
        steps: Callable[[], Steps[object]],
        positions: Callable[[], Iterable[int]],
        among: Iterable[int] | None = None,
    ) -> None:
        """Change rows that wait. If others have locked some, put these off, with their keys and
        whole units: the next look finds the rest.

        Args:
            among: see `WaitingRows.locked`.
        """
        try:
            await self._thread.attempt(self._checked(steps))
        except RowsLocked as error:
            locked = await self._thread.read(lambda: self._rows.locked(positions(), among))
            if locked:
                if not self._put_off:
                    self._put_off_s = _PUT_OFF_S
                self._put_off |= locked
                self._locked(error)
            else:  # not by one that stays
                await self._change(steps)
        self._held = await self._thread.read(partial(self._rows.held, self._put_off))

    async def _mark_locked(self) -> None:
        """Mark pages that were locked before, up to one that still is; that is tried last then."""
        while self.unmarked:
            page = self.unmarked[0]
            try:
                await self._thread.attempt(partial(self._rows.mark, page.positions()))
            except RowsLocked as error:
                self._locked(error, self.unmarked.pop(0))
                return
            del self.unmarked[0]

    # --- deliveries ----------------------------------------------------------------------------

    async def next(self) -> OutboxDelivery:
        """Wait for rows; see `Source.next`."""
        while True:
            if self._wakeups.is_second():
                await self._release()
            found = await self._select()
            if not found.rows:
                await self._wakeups.wait()
            elif delivery := await self._collect(found):
                await self._wakeups.found()
                return delivery

    async def _select(self) -> Selection:
        """Return the first rows, from the floor that the last search without rows has shown."""
        visible = [*chain.from_iterable(page.positions() for page in self.unmarked)]
        now_s = asyncio.get_running_loop().time
        begun_s, floor = now_s(), self._floor
        if begun_s >= self._search_s:
            floor = ""
            next_floor = await self._thread.read(self._rows.floor)
        select = partial(self._rows.select, _ROWS, visible, floor, self._put_off)
        found = await self._thread.read(select)
        if not floor:
            self._floor, self._search_s = "", 0.0
            if not found.rows and next_floor:
                took_s = now_s() - begun_s
                self._floor, self._search_s = next_floor, now_s() + max(1.0, _SEARCH_SHARE * took_s)
        return found

    async def _collect(self, found: Selection) -> OutboxDelivery | None:
        """Return a delivery of rows; None, if some cannot be sent now: expired ones, and the units
        of held keys."""
        delivery, blocked, late = OutboxDelivery(self), dict[Group, int](), False
        async for page in self._pages(found):
            delivery.add(page)
            blocked |= self._blocked(page)
            if expired := [row.position for row in page if row.expired]:
                steps = partial(self._rows.expire, expired)
                await self._unless_locked(steps, partial(iter, expired))
                late = True
        if late or not blocked:
            return None if late else delivery

        def positions() -> Iterator[int]:
            of_units = (row.position for row in page if row.group in blocked)
            return delivery.positions if found.longer else of_units

        until_ms = max(blocked.values())
        await self._unless_locked(lambda: self._rows.hold(positions(), until_ms), positions)
        return None

    async def _pages(self, found: Selection) -> AsyncIterator[Sequence[WaitingRow]]:
        page = _first_units(found.rows)
        while page:
            yield page
            rest = partial(self._rows.rest, page[-1], _ROWS)
            page = await self._thread.read(rest) if found.longer else ()

    def _blocked(self, rows: Sequence[WaitingRow]) -> dict[Group, int]:
        """Return the units that have rows of held keys, and until when they wait."""
        return {
            row.group: self._held.keys[row.orders_by]
            for row in rows
            if row.orders_by is not None and row.orders_by in self._held.keys
        }

    async def _release(self) -> None:
        """Let held rows be sent whose time has come."""
        self._put_off_s -= 1
        if self._put_off and self._put_off_s <= 0:
            self._put_off, self._search_s = set(), 0.0
            self._held = await self._thread.read(self._rows.held)
        # A look first: an idle relay takes no lock and writes nothing.
        while due := await self._thread.read(partial(self._rows.due, self._put_off)):
            await self._unless_locked(partial(self._rows.release, due), partial(iter, due))
            self._search_s = 0.0
        await self._reorder()
        await self._mark_locked()

    async def fetch(self, positions: Sequence[int]) -> list[FullRow]:
        """Return rows with their messages."""
        return await self._thread.read(lambda: self._rows.fetch(positions))

    def messages(self, rows: Sequence[FullRow]) -> tuple[list[Message], list[Refusal]]:
        """Return the messages of rows, and which are none: another program has written what no
        message can be."""
        messages, refusals = [], []
        for index, row in enumerate(rows):
            try:
                message = message_of(row, (self._installation, (ID_HEADER, row.id.encode())))
            except (TypeError, ValueError, BadRequest) as error:
                message = Message(str(readable(row.topic)))
                refusals.append(Refusal(index, message, f"the row holds no message: {error}"))
            messages.append(message)
        return messages, refusals

    async def delivered(self, delivery: Delivery) -> None:
        """Mark the rows; see `Source.delivered`."""
        assert isinstance(delivery, OutboxDelivery)
        for page in delivery.pages:
            try:
                await self._thread.attempt(partial(self._rows.mark, page.positions()))
            except RowsLocked as error:
                self._locked(error, page)

    async def refused(self, delivery: Delivery, refusals: Sequence[Refusal]) -> None:
        """Let refused rows wait, and the others of their units; see `Source.refused`."""
        assert isinstance(delivery, OutboxDelivery)
        by_cause = groupby(sorted(refusals, key=_cause_of), _cause_of)
        limits = {
            Remedy.WAITING.value: None,
            Remedy.RETRIES.value: self._retries.max,
            Remedy.NONE.value: 1,
        }
        refused = [
            RefusedRows(delivery.positions_of(group), cause, limits[remedy])
            for (cause, remedy), group in by_cause
        ]
        # Of many rows at most a thousand a second: the others must not wait for them.
        pauses_ms = [max(round(s * 1000), self._held.rows) for s in self._retries.pauses_s]
        await self._unless_locked(
            lambda: self._rows.refuse(refused, delivery.positions, pauses_ms),
            lambda: delivery.positions,
            [*chain.from_iterable(each.positions for each in refused)],
        )

    async def close(self) -> None:
        """See `Source.close`."""
        await self._thread.close()


def _nothing() -> Steps[None]:
    yield from ()


def message_of(row: FullRow, first: tuple[Header, ...] = ()) -> Message:
    """Return the message of a row.

    Args:
        first: headers before its own.

    Raises:
        ValueError, TypeError, BadRequest: another program has written what no message can be.
    """
    at_ms = row.created_at if row.timestamp_ms is None else row.timestamp_ms
    headers = (*first, *_headers(row.headers))
    message = Message(
        row.topic, row.message_key, row.message_value, headers, row.partition_id, at_ms
    )
    check_message(message)
    if row.order_key is not None:
        row.order_key.encode()
    return message


def decode_position(position: bytes) -> OutboxPosition:
    """Return a position of Kafka.

    Raises:
        ConfigurationError: another program wrote it, or a newer txbroker.
    """
    try:
        return msgspec.json.decode(position, type=OutboxPosition)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"the relay's position in Kafka cannot be read ({error}): use the txbroker that wrote "
            "it, or a newer one"
        ) from None


def name_taken(other: str, own: str) -> ConfigurationError:
    """Return the error for two outboxes with one name."""
    return ConfigurationError(
        f"the position in Kafka is of another outbox ({other}) than this one ({own}): two relays "
        f"have one name. Give one of them another name while none of its relays runs: {RENAMED}"
    )


def _first_units(rows: Sequence[WaitingRow]) -> Sequence[WaitingRow]:
    """Return the rows of the first units, up to the limits of a delivery."""
    units = set[Group]()
    size = 0
    for row in rows:
        if row.group not in units and size >= _DELIVERY_BYTES:
            break
        units.add(row.group)
        size += row.size
    return [row for row in rows if row.group in units]


def _ends(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the ends of pieces."""
    begin = size = 0
    for end, more in enumerate(sizes):
        if end > begin and (size + more > _PIECE_BYTES or end - begin == _PIECE_ROWS):
            yield end
            begin, size = end, 0
        size += more
    yield len(sizes)


def _headers(text: str) -> tuple[Header, ...]:
    return () if text == "[]" else headers_from_json(msgspec.json.decode(text))


def _line(id: str) -> bytes:
    """Return the id of a row for a digest."""
    return f"{id}\n".encode(errors="surrogateescape")


def _cause_of(refusal: Refusal) -> tuple[str, str]:
    return refusal.cause, refusal.remedy.value
