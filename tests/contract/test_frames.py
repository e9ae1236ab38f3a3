"""Frames of many operations: each is answered independently of the others; in memory
and on a real Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import aiohttp
import pytest

from tests.kit.cluster import Proxies
from tests.kit.kafka import now_ms
from tests.kit.memory import MemoryHarness
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import unique
from tests.kit.ws_client import Producer
from txbroker.contract import frames as wire
from txbroker.core.records import Decision, Message
from txbroker.core.routing import make_id, parse_id
from txbroker.errors import KafkaUnavailable
from txbroker.testing.topics import LostReply

FRAME = wire.FRAME_OPERATIONS_MAX
BAD = 100
"""Which operation of a frame is another one than the others."""

STATES = ("pending", "committed", "promoted", "rolled_back")

Answers = dict[int, wire.Status | wire.Failure]


@asynccontextmanager
async def connected(service: Service, group: str) -> AsyncIterator[Producer]:
    """Open a session and see it welcomed."""
    async with (
        aiohttp.ClientSession() as client,
        client.ws_connect(f"{service.proxy.url}/v1/session", max_msg_size=0) as socket,
    ):
        producer = Producer(socket)
        await producer.send(wire.Hello(wire.SESSION_VERSION, group, "worker-1", False))
        assert isinstance(await producer.next(), wire.Welcome)
        yield producer


async def known_topic(service: Service, **configs: str) -> str:
    """Create a topic that the proxy has examined: only prepares to such a one go in runs."""
    topic = await service.topic(**configs)
    await service.door.targets.examine(topic)
    return topic


async def answers(producer: Producer, count: int) -> Answers:
    """Return the answers to `count` operations by call; each comes once."""
    found: Answers = {}
    while len(found) < count:
        operation = await producer.next()
        if isinstance(operation, wire.Status | wire.Failure):
            assert operation.call not in found
            found[operation.call] = operation
    return found


def ids_of(partitions: Sequence[int], count: int = FRAME) -> list[str]:
    """Return new ids, spread over half partitions."""
    at_ms, first = now_ms(), int(unique("0").rpartition("-")[2]) << 20
    return [
        make_id(partitions[number % len(partitions)], at_ms, first + number)
        for number in range(count)
    ]


def prepares(ids: Sequence[str], topic: str) -> list[wire.Prepare]:
    """Return an operation for each id."""
    return [
        wire.Prepare(number, id, (Message(topic, None, id.encode(), partition=0),))
        for number, id in enumerate(ids)
    ]


def decides(ids: Sequence[str], decision: Decision = Decision.COMMIT) -> list[wire.Decide]:
    """Return a decision of each."""
    return [wire.Decide(number, id, decision) for number, id in enumerate(ids)]


def codes(found: Answers) -> list[str]:
    """Return, in the order of calls, the state or the error's code of each."""
    return [
        each.code if isinstance(each, wire.Failure) else str(each.state)
        for _, each in sorted(found.items())
    ]


async def sent(producer: Producer, *frame: Any) -> list[str]:
    """Send a frame and return the state or the error's code of each of its operations."""
    await producer.send(*frame)
    return codes(await answers(producer, len(frame)))


async def see_once_each(service: Service, topic: str, ids: Sequence[str]) -> None:
    """Wait until all are visible; each is once, those of one half partition in order."""
    seen = [(record.value or b"").decode() for record in await service.sees(topic, len(ids))]
    for partition in {parse_id(id).partition for id in ids}:
        here = [id for id in ids if parse_id(id).partition == partition]
        assert [id for id in seen if parse_id(id).partition == partition] == here
    assert len(seen) == len(ids)


# --- one of many is another one ------------------------------------------------------------------


def _changed(each: wire.Prepare, **fields: Any) -> wire.Prepare:
    given = {name: getattr(each, name) for name in each.__struct_fields__}
    return wire.Prepare(**{**given, **fields})


PREPARES: dict[str, Callable[[wire.Prepare, wire.Prepare], Any]] = {
    "bad_id": lambda each, _: _changed(each, id="nonsense"),
    "bad_request": lambda each, _: _changed(each, messages=()),
    "bad_request, does not read": lambda each, _: ["prepare", each.call, 17],
    "unknown_topic": lambda each, _: _changed(each, messages=(Message("nowhere", None, b""),)),
    "bad_target": lambda each, _: _changed(
        each, messages=(Message(each.messages[0].topic, None, b"", partition=7),)
    ),
    "too_large": lambda each, _: _changed(
        each, messages=(Message(each.messages[0].topic, None, b"x" * 60_000),)
    ),
    "id_expired": lambda each, _: _changed(each, id=make_id(0, now_ms() - 3_600_000, 1)),
    "id_conflict": lambda each, other: _changed(
        other, call=each.call, messages=(Message(each.messages[0].topic, None, b"w"),)
    ),
    "pending": lambda each, other: _changed(other, call=each.call),
}


@pytest.mark.rule(29)
@pytest.mark.parametrize("code", PREPARES)
async def test_bad_prepare_in_frame_fails_alone(service: Service, code: str) -> None:
    topic, group = await known_topic(service, max_message_bytes="50000"), unique("group")
    ids = ids_of([0, 1])
    frame: list[Any] = [*prepares(ids, topic)]
    frame[BAD] = PREPARES[code](frame[BAD], frame[BAD - 2])
    code = code.partition(",")[0]
    good = [*ids[:BAD], *ids[BAD + 1 :]]
    async with connected(service, group) as producer:
        await producer.send(*frame)
        found = await answers(producer, FRAME)
        assert codes(found) == [*["pending"] * BAD, code, *["pending"] * (FRAME - BAD - 1)]
        assert set(await sent(producer, *decides(good))) <= {"committed", "promoted"}
    await see_once_each(service, topic, good)


@pytest.mark.rule(29)
@pytest.mark.parametrize(
    "code",
    [
        *("wrong_group", "not_found", "bad_id", "already_decided", "repeated"),
        *("bad_request", "bad_request, does not read"),
    ],
)
async def test_bad_decision_in_frame_fails_alone(service: Service, code: str) -> None:
    topic, group = await known_topic(service), unique("group")
    ids = ids_of([0, 1])
    [strange] = ids_of([0], 1)
    other = decides(ids)[BAD - 2]
    odd: Any = {
        "wrong_group": wire.Decide(BAD, strange, Decision.COMMIT),
        "not_found": wire.Decide(BAD, ids_of([1], 1)[0], Decision.COMMIT),
        "bad_id": wire.Decide(BAD, strange.lower(), Decision.COMMIT),
        "already_decided": wire.Decide(BAD, other.id, Decision.ROLLBACK),
        "bad_request": wire.Decide(BAD, other.id, Decision.UNKNOWN),
        "bad_request, does not read": ["decide", BAD, other.id, "perhaps"],
        "repeated": wire.Decide(BAD, other.id, Decision.COMMIT),
    }[code]
    code = code.partition(",")[0]
    frame: list[Any] = [*decides(ids)]
    frame[BAD] = odd
    good = [*ids[:BAD], *ids[BAD + 1 :]]
    async with (
        connected(service, group) as producer,
        connected(service, unique("group")) as stranger,
    ):
        assert await sent(stranger, *prepares([strange], topic)) == ["pending"]
        assert await sent(producer, *prepares(ids, topic)) == ["pending"] * FRAME
        found = await sent(producer, *frame)
        assert set(found[:BAD] + found[BAD + 1 :]) <= {"committed", "promoted"}
        if code == "repeated":
            assert found[BAD] in ("committed", "promoted")
        else:
            assert found[BAD] == code
        await see_once_each(service, topic, good)
        # What its own frame did not decide is still to be decided.
        assert await sent(producer, *decides([ids[BAD]], Decision.ROLLBACK)) == ["rolled_back"]
        assert await sent(stranger, *decides([strange], Decision.ROLLBACK)) == ["rolled_back"]


async def test_mixed_frames_equal_their_single_operations(service: Service) -> None:
    fate = Random(20)
    topic, group = await known_topic(service), unique("group")
    undecided: list[str] = []
    values: dict[str, list[bytes]] = {}
    committed: list[str] = []
    async with connected(service, group) as producer:
        for size in (1, FRAME, 2, 31, FRAME, 128, 7, FRAME):
            fresh = iter(ids_of([0, 1], size))
            decided = fate.sample(undecided, min(len(undecided), size // 2))
            frame: list[wire.FromProducer] = []
            expected: list[set[str]] = []
            for call in range(size):
                if decided and fate.random() < 0.6:
                    id, decision = decided.pop(), fate.choice([Decision.COMMIT, Decision.ROLLBACK])
                    undecided.remove(id)
                    frame.append(wire.Decide(call, id, decision))
                    if decision is Decision.COMMIT:
                        committed.append(id)
                        expected.append({"committed", "promoted"})
                    else:
                        expected.append({"rolled_back"})
                else:
                    repeated = values and fate.random() < 0.2
                    id = fate.choice([*values]) if repeated else next(fresh)
                    count = fate.choice([1, 1, 3])
                    known = values.setdefault(
                        id, [b"%s %d" % (id.encode(), n) for n in range(count)]
                    )
                    messages = tuple(Message(topic, None, value, partition=0) for value in known)
                    frame.append(wire.Prepare(call, id, messages))
                    # A repeated one may be decided before, or in this very frame.
                    expected.append({*STATES} if repeated else {"pending"})
                    if not repeated:
                        undecided.append(id)
            found = await sent(producer, *frame)
            assert [
                code for code, these in zip(found, expected, strict=True) if code not in these
            ] == []
    wanted = sorted(value for id in committed for value in values[id])
    assert len(wanted) > FRAME
    seen = await service.sees(topic, len(wanted))
    assert sorted(record.value or b"" for record in seen) == wanted


# --- runs that are cut ---------------------------------------------------------------------------


@pytest.mark.rule(29)
async def test_frame_cut_by_disconnect_is_resent(service: Service) -> None:
    topic, group = await known_topic(service), unique("group")
    ids = ids_of([0, 1])
    async with connected(service, group) as producer:
        await producer.send(*prepares(ids, topic))
    async with connected(service, group) as producer:
        assert await sent(producer, *prepares(ids, topic)) == ["pending"] * FRAME
        await producer.send(*decides(ids))
    async with connected(service, group) as producer:
        assert set(await sent(producer, *decides(ids))) <= {"committed", "promoted"}
    seen = [record.value or b"" for record in await service.sees(topic, FRAME)]
    assert sorted(seen) == sorted(id.encode() for id in ids)


@pytest.mark.rule(29)
@pytest.mark.parametrize(
    "bounds",
    [{"pending_max": 100, "pending_group_max": 100}, {"pending_group_max": 100}],
    ids=["partition", "share"],
)
async def test_frame_is_overloaded_exactly_at_the_limit(
    world: Any, desk: FakeEndpoint, bounds: dict[str, int]
) -> None:
    async with Service(world, desk, partitions=1, **bounds) as service:
        topic, ids = await known_topic(service), ids_of([0])
        async with connected(service, "g") as producer:
            found = await sent(producer, *prepares(ids, topic))
            assert found == ["pending"] * 100 + ["overloaded"] * (FRAME - 100)
            # A retry: stored prepares stay stored, and there is no room for others.
            assert await sent(producer, *prepares(ids, topic)) == found
            await sent(producer, *decides(ids[:100]))
            await see_once_each(service, topic, ids[:100])
            found = await sent(producer, *prepares(ids[100:], topic))
            assert found == ["pending"] * 100 + ["overloaded"] * (FRAME - 200)


# --- partitions that moved -----------------------------------------------------------------------


@pytest.mark.rule(29)
async def test_each_proxy_runs_its_part_of_a_frame(two: Proxies) -> None:
    one, other = two.running.values()
    topic, group, ids = await known_topic(one), unique("group"), ids_of(range(two.partitions))
    async with connected(one, group) as here, connected(other, group) as there:
        for frame, done in (
            (prepares(ids, topic), {"pending"}),
            (decides(ids), {"committed", "promoted"}),
            (decides(ids, Decision.ROLLBACK), {"already_decided"}),
        ):
            await here.send(*frame)
            await there.send(*frame)
            found = codes(await answers(here, FRAME)), codes(await answers(there, FRAME))
            for pair in zip(*found, strict=True):
                assert "owner_unavailable" in pair
                assert set(pair) & done
        await see_once_each(one, topic, ids)


@pytest.mark.rule(29)
async def test_moved_partition_fails_only_its_operations(in_memory: Proxies) -> None:
    (one,) = await in_memory.add("one")
    assert isinstance(in_memory.world, MemoryHarness)
    topic, ids = await known_topic(one), ids_of(range(in_memory.partitions))
    gone, theirs = in_memory.absent()
    async with connected(one, "g") as producer:
        await producer.send(*prepares(ids, topic))
        found = await answers(producer, FRAME)
        assert codes(found) == [
            "owner_unavailable" if parse_id(id).partition in theirs else "pending" for id in ids
        ]
        in_memory.coordinator.leave(gone)
        await in_memory.settled()
        assert await sent(producer, *prepares(ids, topic)) == ["pending"] * FRAME
        await sent(producer, *decides(ids))
        await see_once_each(one, topic, ids)


@pytest.mark.rule(29)
async def test_frame_to_fenced_owner_is_done_by_next(in_memory: Proxies) -> None:
    one, two = await in_memory.add("one", "two")
    assert isinstance(in_memory.world, MemoryHarness)
    topic, ids = await known_topic(one), ids_of(sorted(await one.owned()))
    coordinator = in_memory.coordinator
    async with connected(one, "g") as here, connected(two, "g") as there:
        assert await sent(here, *prepares(ids, topic)) == ["pending"] * FRAME
        coordinator.silence("one")
        coordinator.forget("one")
        await two.owns(in_memory.partitions)
        assert await sent(here, *decides(ids)) == ["owner_unavailable"] * FRAME
        others = prepares(ids_of([parse_id(ids[0]).partition]), topic)
        assert await sent(here, *others) == ["owner_unavailable"] * FRAME
        assert set(await sent(there, *decides(ids))) <= {"committed", "promoted"}
        await see_once_each(two, topic, ids)
    coordinator.let_back("one")
    await in_memory.settled()


@pytest.mark.rule(29)
async def test_frame_without_kafka_is_answered_and_retryable(in_memory: Proxies) -> None:
    (one,) = await in_memory.add("one")
    assert isinstance(in_memory.world, MemoryHarness)
    topic, ids = await known_topic(one), ids_of(range(in_memory.partitions))
    async with connected(one, "g") as producer:
        await sent(producer, *prepares(ids[:4], topic))
        in_memory.world.kafka.go_down(LostReply.DONE)
        found = await sent(producer, *prepares(ids, topic))
        assert found == ["pending"] * 4 + ["owner_unavailable"] * (FRAME - 4)
        in_memory.world.kafka.come_up()
        assert await sent(producer, *prepares(ids, topic)) == ["pending"] * FRAME
        await sent(producer, *decides(ids))
        await see_once_each(one, topic, ids)


@pytest.mark.rule(29)
@pytest.mark.parametrize("answered", [True, False])
async def test_topic_lookup_delays_no_other_operation(
    in_memory: Proxies, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    (one,) = await in_memory.add("one")
    topic, new, ids = await one.topic(), await one.topic(), ids_of(range(in_memory.partitions))
    gate, examine = asyncio.Event(), one.door.targets.examine

    async def slow(name: str, *, create: bool = False) -> Any:
        if name == new:
            await gate.wait()
            if not answered:
                raise KafkaUnavailable("no answer")
        return await examine(name, create=create)

    async with connected(one, "g") as producer:
        await sent(producer, *prepares(ids[:1], topic))
        monkeypatch.setattr(one.door.targets, "examine", slow)
        frame = prepares(ids, topic)
        frame[BAD] = prepares([ids[BAD]], new)[0]
        frame[BAD] = _changed(frame[BAD], call=BAD)
        await producer.send(*frame)
        try:
            found = await answers(producer, FRAME - 1)
        finally:
            gate.set()
        assert BAD not in found
        assert set(codes(found)) == {"pending"}
        last = await answers(producer, 1)
        assert list(last) == [BAD]
        assert codes(last) == ["pending" if answered else "owner_unavailable"]
