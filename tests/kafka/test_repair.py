"""Finding what stops partitions in the topics of a real Kafka, and passing it over."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.kit.kafka import KafkaHarness
from txbroker.core.encoding import (
    encode_claim,
    encode_half,
    encode_kept,
    encode_marker,
    encode_progress,
)
from txbroker.core.records import (
    RECORD_VERSION,
    Checkpoint,
    Claim,
    Half,
    Marker,
    MarkerKind,
    Message,
    ParkedCopy,
    Record,
    State,
)
from txbroker.core.routing import make_id
from txbroker.door.protocols import PromotionTxn
from txbroker.errors import ConfigurationError, NewerRecord

NEWER = RECORD_VERSION + 1
LOGS = ("checkpoint", "half", "op", "parked")
ID = make_id(1, 0, 0)  # of partition 1
HALF = encode_half(Half(ID, "orders", (Message("t", b"k", b"v", partition=0),)), NEWER)[0]
MARKER = encode_marker(Marker(NEWER, MarkerKind.COMMIT, ID))
(COPY,) = encode_kept(
    ParkedCopy(Half(ID, "orders", (Message("t", b"k", b"v", partition=0),)), 0, 1, State.PARKED),
    NEWER,
)


@pytest.mark.rule(10, 27)
async def test_stopping_records_are_found_and_skipped(world: KafkaHarness) -> None:
    door = await world.door()
    repair = door.repair()
    assert await repair.find() == []
    partition = door.partition(1)
    claim = Claim(RECORD_VERSION, "mine", "one", "")
    await partition.claim(claim)
    progress = Checkpoint(RECORD_VERSION, "mine", 3, 3)
    await (await partition.write(PromotionTxn((), (), progress))).visible()
    written = PromotionTxn((), (), structs.replace(progress, v=NEWER))
    await (await partition.write(written)).visible()
    newer, forged = encode_progress(written.progress), structs.replace(progress, op=99)
    await world.foreign(world.name("checkpoint"), 1, encode_progress(forged), committed=True)
    await world.foreign(world.name("checkpoint"), 2, newer, Record(b"progress", b"junk"))
    await world.foreign(world.name("half"), 1, Record(b"k", b"junk"), HALF)
    await world.foreign(world.name("op"), 1, Record(b"k", b"{"), MARKER)
    await world.foreign(world.name("parked"), 1, COPY, committed=True)
    # Certainly none of ours: of another partition, inside of a Kafka transaction, or outside.
    await world.foreign(world.name("half"), 2, HALF)
    await world.foreign(world.name("op"), 2, MARKER)
    await world.foreign(world.name("half"), 1, HALF, committed=True)
    await world.foreign(world.name("op"), 1, MARKER, committed=True)
    await world.foreign(world.name("parked"), 2, structs.replace(COPY, key=b"x/0"), COPY)
    found = await repair.find()
    at = [(each.topic, each.partition, each.stop.code) for each in found]
    assert at == [(world.name(name), 1, "newer") for name in LOGS]
    values = [each.stop.record.value for each in found]
    assert values == [newer.value, b"v", MARKER.value, COPY.value]
    aside = [each for each in await repair.find(set_aside=True) if each not in found]
    assert await repair.set_aside() == aside
    assert [each.at for each in aside] == [
        f"{world.name('checkpoint')}/1@6",
        *(
            f"{world.name(name)}/2@{offset}"
            for name in ("checkpoint", "parked")
            for offset in (0, 1)
        ),
    ]
    assert found[1].at == f"{world.name('half')}/1@1"
    with pytest.raises(NewerRecord):
        await partition.claim(structs.replace(claim, claim="second"))
    for each in found:
        await repair.skip(each, "me", "a test")
    assert await repair.find() == []
    claimed = await partition.claim(structs.replace(claim, claim="third"))
    assert claimed.progress == progress
    assert {(skip.log, skip.by, skip.reason) for skip in claimed.skips} == {
        (log, "me", "a test") for log in LOGS
    }


async def test_own_unreadable_progress_is_found(world: KafkaHarness) -> None:
    door = await world.door()
    claim = encode_claim(Claim(RECORD_VERSION, "x", "one", ""))
    junk = Record(b"progress", b"junk")
    await world.foreign(world.name("checkpoint"), 0, claim, junk, committed=True)
    await world.foreign(world.name("checkpoint"), 1, junk, committed=True)
    (found,) = await door.repair().find()
    assert (found.at, found.stop.code) == (f"{world.name('checkpoint')}/0@1", "unreadable")
    assert "the last checkpoint" in found.stop.loses
    await door.repair().skip(found, "me", "a test")
    assert await door.repair().find() == []


async def test_repair_fails_without_installation(world: KafkaHarness) -> None:
    with pytest.raises(ConfigurationError, match="topic_prefix"):
        await world.closed_door().repair().find()
