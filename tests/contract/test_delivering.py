"""The contract of a writer of records and positions, in memory and on a real Kafka."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.kit.until import until
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Record
from txbroker.door.consuming import LATEST, ConsumingDoor, TopicSpec
from txbroker.door.writing import (
    Copy,
    Fenced,
    GroupOffsets,
    PositionRecord,
    Refused,
    Unknown,
    Writer,
)
from txbroker.errors import ConfigurationError, KafkaUnavailable

KEY = "outbox/0"


class Writers:
    """Writers with one transactional id, and the topics that they write."""

    def __init__(self, world: Any, door: ConsumingDoor, target: str) -> None:
        self._world = world
        self._door = door
        self.target = target
        self.positions = world.name("relay")

    def new(self, key: str = KEY, id: str = "", **options: Any) -> Writer:
        id = f"{self.positions}.{id or key}"
        return self._door.writer(id, PositionRecord(self.positions, key), **options)

    async def forge(self, *records: Record, committed: bool | None = True) -> None:
        """Write to the topic of positions as another client."""
        await self._world.foreign(self.positions, 0, *records, committed=committed)

    async def compact(self, *, kept: int) -> None:
        """Lose all but the last offsets of the topic of positions."""
        end = (await self._door.offsets([(self.positions, 0)], LATEST))[self.positions, 0]
        await self._world.compact(self.positions, 0, end - kept)

    async def delivered(self, *numbers: bytes, **options: Any) -> None:
        """Store positions with a new writer."""
        writer = self.new(**options)
        await writer.claim()
        for number in numbers:
            await writer.write(self.copies(number))
            await writer.commit(number)

    def copies(self, *values: bytes) -> list[Copy]:
        return [Copy(self.target, 0, Record(b"key", value)) for value in values]

    async def visible(self) -> list[bytes | None]:
        return [record.value for record in await self._world.visible(self.target)]


@pytest.fixture
async def writers(world: Any) -> AsyncIterator[Writers]:
    door = await world.consuming_door()
    await door.create([TopicSpec(world.name("relay"), 1, -1, {"cleanup.policy": "compact"})])
    target = await world.create_topic("target", max_message_bytes="10000")
    yield Writers(world, door, target)
    await door.close()


async def test_position_is_that_of_the_last_delivery(writers: Writers) -> None:
    writer, other = writers.new(), writers.new("outbox/1")
    assert await writer.claim() is None
    assert await other.claim() is None
    for number in (b"1", b"2"):
        await writer.write(writers.copies(b"first " + number))
        await writer.write(writers.copies(b"second " + number))
        await writer.commit(number)
    await other.commit(b"other")
    assert await writers.visible() == [b"first 1", b"second 1", b"first 2", b"second 2"]
    assert await writers.new().claim() == await writers.new().look() == b"2"


@pytest.mark.rule(47)
async def test_claim_fences_the_writer_before(writers: Writers) -> None:
    first, second = writers.new(), writers.new()
    await first.claim()
    await first.write(writers.copies(b"open"))
    await first.write(writers.copies(b"more"))
    assert await second.claim() is None
    with pytest.raises(Fenced):
        await first.commit(b"1")
    with pytest.raises(KafkaUnavailable):
        await first.write(writers.copies(b"again"))
    await second.write(writers.copies(b"second"))
    await second.commit(b"2")
    assert await writers.visible() == [b"second"]


@pytest.mark.rule(47)
async def test_aborted_messages_are_not_in_the_next_delivery(writers: Writers) -> None:
    writer = writers.new()
    await writer.claim()
    for pieces in (1, 2, 3):
        for piece in range(pieces):
            await writer.write(writers.copies(b"aborted %d" % piece))
        await writer.abort()
        await writer.write(writers.copies(b"delivered %d" % pieces))
        await writer.commit(b"%d" % pieces)
    assert await writers.visible() == [b"delivered 1", b"delivered 2", b"delivered 3"]


@pytest.mark.parametrize("fault", ["of the message", "of the topic"])
async def test_refused_message_is_named_and_the_others_are_aborted(
    writers: Writers, fault: str
) -> None:
    """Waiting helps where the topic is at fault: a row waits, and is not given up."""
    writer = writers.new()
    await writer.claim()
    good, bad = writers.copies(b"good", b"x" * 20_000)
    if fault == "of the topic":
        bad = Copy(bad.topic, 99, good.record)
    await writer.write([good, bad])
    with pytest.raises(Refused) as refused:
        await writer.commit(b"1")
    assert list(refused.value.indexes) == [1]
    assert refused.value.of_topic == (fault == "of the topic")
    await writer.write([good])
    await writer.commit(b"2")
    assert await writers.visible() == [b"good"]
    assert await writers.new().claim() == b"2"


# --- records of other clients ----------------------------------------------------------------

FORGED = Record(KEY.encode(), b"9")
FORGERIES: dict[str, tuple[tuple[Record, ...], bool | None]] = {
    "no transaction": ((FORGED,), None),
    "another transaction": ((FORGED,), True),
    "with a claim": ((Record(f"{KEY}/owner".encode(), b"{}"), FORGED), True),
    "tombstone": ((Record(KEY.encode(), None),), True),
    "with headers": ((Record(KEY.encode(), b"9", (("txb-id", b"x"),)),), True),
}


@pytest.fixture(params=FORGERIES)
def forgery(request: pytest.FixtureRequest) -> tuple[tuple[Record, ...], bool | None]:
    return FORGERIES[request.param]


@pytest.mark.rule(47)
async def test_records_of_others_are_no_positions(writers: Writers, forgery: Any) -> None:
    records, committed = forgery
    await writers.delivered(b"1", b"2")
    await writers.forge(*records, committed=committed)
    assert await writers.new().look() == b"2"
    assert await writers.new().claim() == b"2"
    # The claim has stored it again, or compaction would remove it.
    await writers.compact(kept=3)
    assert await writers.new().claim() == b"2"


@pytest.mark.rule(47)
@pytest.mark.parametrize("claimed", [True, False])
async def test_position_of_another_client_stops_the_relay(
    writers: Writers, forgery: Any, claimed: bool
) -> None:
    """Ours is not there: compaction keeps the newest record of a key."""
    records, committed = forgery
    if claimed:
        await writers.new().claim()
    else:
        records = records[-1:]
    await writers.forge(*records, committed=committed)
    for call in (writers.new().look, writers.new().claim):
        with pytest.raises(ConfigurationError, match="does not prove the position of outbox/0"):
            await call()
    taken = records[-1].value
    assert await writers.new(take=True).look() == taken
    assert await writers.new(take=True).claim() == taken
    assert await writers.new().claim() == taken


@pytest.mark.rule(47)
async def test_position_that_is_gone_stops_the_relay(writers: Writers) -> None:
    """A tombstone of another client has removed it, and was removed itself."""
    await writers.delivered(b"1")
    await writers.new().claim()
    await writers.compact(kept=2)
    with pytest.raises(ConfigurationError, match="follows one, and there is none"):
        await writers.new().claim()
    assert await writers.new(take=True).claim() is None


@pytest.mark.rule(47)
async def test_position_outlives_its_transactional_id(writers: Writers) -> None:
    """Kafka forgets a transactional id that is not used; another one gets another producer, too."""
    await writers.delivered(b"1", b"2", id="a")
    for id in "bcd":
        await writers.forge(FORGED)
        assert await writers.new(id=id).look() == b"2"
        assert await writers.new(id=id).claim() == b"2"
    await writers.delivered(b"3", id="d")
    assert await writers.new(id="e").claim() == b"3"


# --- positions of groups ----------------------------------------------------------------------


class Offsets:
    """The offsets of a group without members, which a writer stores with its records."""

    def __init__(self, world: Any, writers: Writers) -> None:
        self._door = writers._door
        self._group = world.name("group")
        self._at = (writers.target, 0)

    def of(self, offset: int) -> GroupOffsets:
        return GroupOffsets(self._group, {self._at: StoredOffset(offset, "by a writer")})

    async def stored(self) -> int | None:
        found = (await self._door.committed(self._group)).get(self._at)
        assert found is None or found.metadata == "by a writer"
        return None if found is None else found.offset

    async def reach(self, offset: int) -> None:
        """Wait until an offset is stored: it is visible a moment after the commit."""

        async def is_reached() -> bool:
            return await self.stored() == offset

        await until(is_reached)


@pytest.fixture
def offsets(world: Any, writers: Writers) -> Offsets:
    return Offsets(world, writers)


async def test_position_and_offsets_of_a_group_are_stored_with_the_records(
    writers: Writers, offsets: Offsets
) -> None:
    writer = writers.new()
    await writer.claim()
    for number in (1, 2):
        await writer.write(writers.copies(b"first %d" % number))
        await writer.write(writers.copies(b"second %d" % number))
        await writer.commit(b"%d" % number, [offsets.of(number)])
        await offsets.reach(number)
    await writer.commit(offsets=[offsets.of(3)])
    await offsets.reach(3)
    assert len(await writers.visible()) == 4
    assert await writers.new().claim() == b"2"


async def test_refused_and_aborted_transactions_store_no_offsets(
    writers: Writers, offsets: Offsets
) -> None:
    writer = writers.new()
    await writer.claim()
    await writer.write(writers.copies(b"good", b"x" * 20_000))
    with pytest.raises(Refused) as refused:
        await writer.commit(b"1", [offsets.of(1)])
    assert list(refused.value.indexes) == [1]
    await writer.write(writers.copies(b"aborted"))
    await writer.abort()
    assert await offsets.stored() is None
    await writer.write(writers.copies(b"good"))
    await writer.commit(b"2", [offsets.of(2)])
    await offsets.reach(2)
    assert await writers.visible() == [b"good"]


@pytest.mark.rule(47)
async def test_writer_that_was_replaced_stores_no_offsets(
    writers: Writers, offsets: Offsets
) -> None:
    """No generation fences it: the claim of its successor does."""
    first, second = writers.new(), writers.new()
    await first.claim()
    await first.write(writers.copies(b"first"))
    await second.claim()
    with pytest.raises(Fenced):
        await first.commit(b"1", [offsets.of(1)])
    await second.write(writers.copies(b"second"))
    await second.commit(b"2", [offsets.of(2)])
    with pytest.raises(KafkaUnavailable):
        await first.commit(offsets=[offsets.of(3)])
    await offsets.reach(2)
    assert await writers.visible() == [b"second"]


# --- after a failure --------------------------------------------------------------------------


async def _unusable(writer: Writer, copies: list[Copy]) -> None:
    """Check that a writer waits for its claim."""
    with pytest.raises(Unknown):
        await writer.write(copies)
    with pytest.raises(Unknown):
        await writer.commit(b"9")
    await writer.abort()


@pytest.mark.rule(47)
@pytest.mark.parametrize("call", ["write", "abort", "commit"])
async def test_fenced_writer_can_be_claimed_again(writers: Writers, call: str) -> None:
    first, second = writers.new(), writers.new()
    await first.claim()
    await first.write(writers.copies(b"a"))
    await first.write(writers.copies(b"b"))
    await second.claim()
    with pytest.raises(Fenced):
        await {
            "write": lambda: first.write(writers.copies(b"c")),
            "abort": first.abort,
            "commit": lambda: first.commit(b"1"),
        }[call]()
    await _unusable(first, writers.copies(b"c"))
    await second.write(writers.copies(b"second"))
    await second.commit(b"2")
    assert await first.claim() == b"2"
    await first.write(writers.copies(b"first"))
    await first.commit(b"3")
    assert await writers.visible() == [b"second", b"first"]


@pytest.mark.rule(47)
async def test_writer_whose_claim_failed_is_unusable(writers: Writers) -> None:
    writer = writers.new()
    await _unusable(writer, writers.copies(b"never claimed"))
    await writer.claim()
    await writer.write(writers.copies(b"a"))
    await writer.write(writers.copies(b"b"))
    await writers.forge(FORGED)
    with pytest.raises(ConfigurationError):
        await writer.claim()
    await _unusable(writer, writers.copies(b"c"))
    assert await writers.new(take=True).claim() == b"9"
    assert await writer.claim() == b"9"
    await writer.commit(b"10")
    assert await writers.visible() == []
