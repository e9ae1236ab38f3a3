"""A Kafka that hangs: every call ends in bounded time, and all goes on when it comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kafka.small_turns import claim, progress, write
from tests.kit.kafka import KafkaHarness
from txbroker.core.records import Record
from txbroker.door.protocols import AppendUnknown
from txbroker.door.writing import Unknown
from txbroker.embedded import DEFAULT_VERSION, EmbeddedKafka
from txbroker.errors import KafkaUnavailable

SHORT = {
    "request_timeout_s": 0.3,
    "write_timeout_s": 0.6,
    "claim_timeout_s": 0.6,
    "visible_timeout_s": 0.6,
}
BOUND_S = 5.0


@pytest.fixture(scope="module")
def kafka() -> Iterator[EmbeddedKafka]:
    """A Kafka of these tests' own: others could not do without theirs."""
    version = os.environ.get("TXBROKER_TEST_KAFKA_VERSION", DEFAULT_VERSION)
    with EmbeddedKafka(version=version) as server:
        yield server


@contextmanager
def stopped(kafka: EmbeddedKafka) -> Iterator[None]:
    """Stop Kafka's process, as a machine that hangs does."""
    assert kafka.pid is not None
    os.kill(kafka.pid, signal.SIGSTOP)
    try:
        while not _is_stopped(kafka.pid):
            pass  # another processor may still run one of its threads
        yield
    finally:
        os.kill(kafka.pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    try:
        threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread ended while it was read
    return {stat.rpartition(")")[2].split()[0] for stat in threads} == {"T"}


async def test_calls_end_while_kafka_is_stopped_and_recover(
    world: KafkaHarness, kafka: EmbeddedKafka
) -> None:
    door = await world.door(**SHORT)
    partition = door.partition(0)
    await partition.claim(claim("before"))
    await partition.half.append([Record(b"before", b"")])
    with stopped(kafka):
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(AppendUnknown):
                await partition.half.append([Record(b"during", b"")])
            with pytest.raises(KafkaUnavailable):
                await partition.half.bounds()
            with pytest.raises(Unknown):
                await write(partition, "before", 1)
            with pytest.raises(KafkaUnavailable):
                await partition.claim(claim("during"))
            with pytest.raises(KafkaUnavailable):
                await door.targets.examine("anything")
    after = claim("after")
    async with asyncio.timeout(30):
        while True:
            try:
                claimed = await partition.claim(after)
                appended = await partition.half.append([Record(b"after", b"")])
                break
            except (KafkaUnavailable, AppendUnknown):
                continue  # it is still waking up
    assert claimed.progress is None
    keys = [
        record.key
        async for records in partition.half.read(0, appended.base_offset + 1)
        for record in records
    ]
    assert keys[0] == b"before"
    assert keys[-1] == b"after"
    # Unknown appends may have been stored, once.
    assert keys[1:-1] in ([], [b"during"])


async def test_door_closes_while_kafka_hangs(world: KafkaHarness, kafka: EmbeddedKafka) -> None:
    door = await world.door(**SHORT)
    partition = door.partition(0)
    await partition.claim(claim("mine"))
    await door.groups.load(lambda _group, _value: None)
    await door.membership.join("http://127.0.0.1:1", lambda _news: None, lambda _why: None)
    handle = await write(partition, "mine", 1)
    with stopped(kafka):
        appending = asyncio.create_task(partition.half.append([Record(b"during", b"")]))
        async with asyncio.timeout(BOUND_S):
            await door.membership.leave()
            await partition.close()
            await door.close()
            with pytest.raises(AppendUnknown):
                await appending
    with pytest.raises((Unknown, KafkaUnavailable)):
        await handle.visible()


async def test_restarted_kafka_has_acknowledged_records(
    world: KafkaHarness, kafka: EmbeddedKafka
) -> None:
    topic = await world.create_topic("target")
    door = await world.door(**{**SHORT, "claim_timeout_s": 10.0, "visible_timeout_s": 10.0})
    partition = door.partition(0)
    groups: dict[str, bytes | None] = {}
    await door.groups.load(groups.__setitem__)
    await partition.claim(claim("before"))
    await partition.half.append([Record(b"before", b"")])
    await (await write(partition, "before", 1, topic)).committed()
    await asyncio.to_thread(kafka.kill)
    try:
        with pytest.raises(AppendUnknown):
            await partition.half.append([Record(b"during", b"")])
    finally:
        await asyncio.to_thread(kafka.start)
    claimed = await partition.claim(claim("after"))
    assert claimed.progress == progress("before", 1)
    appended = await partition.half.append([Record(b"after", b"")])
    assert appended.base_offset == 1
    await door.groups.put("orders", b"{}")
    assert groups == {"orders": b"{}"}
    # Kafka has acknowledged the commit; its marker in the target may be written only now.
    async with asyncio.timeout(4 * BOUND_S):
        while not (found := await world.visible(topic)):
            continue
    assert [record.key for record in found] == [b"before-1"]


async def test_unreachable_broker_fails_at_once(world: KafkaHarness) -> None:
    door = world.closed_door(bootstrap_servers=("127.0.0.1:1",))
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(KafkaUnavailable, match=r"127\.0\.0\.1:1"):
            await door.start()


async def test_groups_are_followed_after_unexpected_error(world: KafkaHarness) -> None:
    door = await world.door()
    heard: list[str] = []

    def changed(group: str, _value: bytes | None) -> None:
        heard.append(group)
        if heard == ["orders"]:
            raise ValueError("a surprise")

    await door.groups.load(changed)
    await door.groups.put("orders", b"{}")
    assert heard == ["orders", "orders"]
