"""What RocketMQ's transactional messages get wrong, and how it is here: one test for each row of
the comparison in docs/design.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.kit.proxies import ProxyProcess
from tests.kit.service import FakeEndpoint
from tests.kit.until import unique, until
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import AlreadyDecided, IdExpired, NotPending
from txbroker.sdk import CheckRequest, Decision, Message, TransactionalProducer

Json = dict[str, Any]


async def register(
    world: ProxyProcess, desk: FakeEndpoint, answers: Sequence[Json | int], **policy: Any
) -> str:
    """Register a group whose endpoint gives these answers, the last one again and again."""
    group = unique("group")
    desk.answers[group] = list(answers)
    given = {
        "check_url": f"{desk.url}/check/{group}",
        "check_after_s": 0,
        "check_interval_s": 0.1,
        "timeout_s": 0.5,
        **policy,
    }
    await world.call("PUT", f"/v1/groups/{group}", given)
    return group


async def markers(world: ProxyProcess, id: str) -> list[Json]:
    """Return the markers of a transaction, as they lie in the operation topic."""
    records = [record for record in await world.own("op") if record.key == id.encode()]
    return [json.loads(record.value or b"") for record in records]


async def values(world: ProxyProcess, topic: str) -> list[bytes | None]:
    """Return the visible values of a topic."""
    return [record.value for record in await world.visible(topic)]


@asynccontextmanager
async def killed_and_started(world: ProxyProcess) -> AsyncIterator[None]:
    """Kill the proxy, run a function, start the proxy again."""
    await world.kill()
    try:
        yield
    finally:
        await world.start()


async def test_repeated_commit_is_one_message_after_rollback_none(
    shared: ProxyProcess,
) -> None:
    topic, group = await shared.topic(), unique("group")
    async with TransactionalProducer(shared.url, group=group) as producer:
        twice = await producer.prepare(Message(topic, value=b"twice"))
        over_http = [shared.act(twice, "commit", group=group) for _ in range(4)]
        over_sdk = [producer.commit(twice) for _ in range(4)]
        await asyncio.gather(*over_http, *over_sdk)
        refused = await producer.prepare(Message(topic, value=b"rolled back"))
        await producer.rollback(refused)
        with pytest.raises(AlreadyDecided) as raised:
            await producer.commit(refused)
        assert raised.value.details["decision"] == "rollback"
        with pytest.raises(AlreadyDecided) as raised:
            await shared.act(refused, "commit", group=group)
        assert raised.value.details["decision"] == "rollback"
    await shared.reaches(twice, "promoted")
    assert await values(shared, topic) == [b"twice"]
    stored = await markers(shared, twice)
    assert {marker["kind"] for marker in stored} == {"commit"}
    await shared.act(twice, "commit", group=group)
    assert await markers(shared, twice) == stored


async def test_answer_follows_all_acks_and_names_outcome(shared: ProxyProcess) -> None:
    topic = await shared.topic()
    ids = [await shared.prepare({"topic": topic, "value": str(n)}) for n in range(20)]
    answers = await asyncio.gather(*[shared.act(id, "commit") for id in ids])
    async with killed_and_started(shared):
        stored = {record.key for record in await shared.own("op")}
    assert {id.encode() for id in ids} <= stored
    assert {answer["decision"] for answer in answers} == {"commit"}
    assert {answer["state"] for answer in answers} <= {"committed", "promoted"}
    for id in ids:
        await shared.reaches(id, "promoted")
    assert set(await values(shared, topic)) == {str(n).encode() for n in range(20)}


@pytest.mark.quick
async def test_target_write_and_checkpoint_are_one_transaction(shared: ProxyProcess) -> None:
    """Killed while it promotes, again and again: nothing is there twice."""
    topic, sent = await shared.topic(2), 0
    for _ in range(3):
        async with TransactionalProducer(shared.url, group="crash") as producer:
            numbers = range(sent, sent + 200)
            prepared = [producer.prepare(Message(topic, value=b"%d" % n)) for n in numbers]
            ids = await asyncio.gather(*prepared)
            await asyncio.gather(*[producer.commit(id) for id in ids])
        sent += 200
        async with killed_and_started(shared):
            pass
    await shared.all_settled("crash")
    seen = await values(shared, topic)
    assert len(seen) == sent
    assert set(seen) == {b"%d" % n for n in range(sent)}


async def test_checks_append_no_body(shared: ProxyProcess, desk: FakeEndpoint) -> None:
    group = await register(shared, desk, [{"decision": "unknown"}], attempts_max=5)
    topic, body = await shared.topic(), "x" * 200_000
    id = await shared.prepare({"topic": topic, "value": body}, group=group)
    shown = await shared.reaches(id, "parked")
    assert shown["attempts"] == 5
    half = [r for r in await shared.own("half") if r.header("txb-id") == id]
    assert len(half) == 1
    op = [r for r in await shared.own("op") if r.key == id.encode()]
    assert len(op) == 6
    assert sum(len(record.value or b"") for record in op) < 5000


async def test_only_checks_that_reach_an_instance_count(
    shared: ProxyProcess, desk: FakeEndpoint
) -> None:
    """503 means "not handled": more of those than attempts, and nothing is given up."""
    outage = [503] * 2
    group = await register(shared, desk, [*outage, {"decision": "commit"}], attempts_max=1)
    topic = await shared.topic()
    id = await shared.prepare({"topic": topic, "value": "kept"}, group=group)
    shown = await shared.reaches(id, "promoted")
    assert shown["attempts"] <= 1
    kinds = [m["kind"] for m in await markers(shared, id)]
    assert kinds.count("returned") == len(outage)
    assert kinds[-1] == "commit"
    assert await values(shared, topic) == [b"kept"]


async def test_offline_group_uses_no_attempt_and_is_asked_on_return(
    shared: ProxyProcess,
) -> None:
    topic, group = await shared.topic(), unique("group")
    id = await shared.prepare(
        {"topic": topic, "value": "v"}, group=group, check_after_s=0.01, check_interval_s=0.01
    )

    async def unreachable() -> bool:
        async with asyncio.timeout(10):
            metrics = await shared.text("/metrics")
        return any(
            line.startswith("txbroker_unreachable_groups ") and float(line.split()[1]) > 0
            for line in metrics.splitlines()
        )

    await until(unreachable)
    assert (await shared.show(id))["attempts"] == 0

    def check(request: CheckRequest) -> Decision:
        return Decision.COMMIT

    async with TransactionalProducer(shared.url, group=group, check=check):
        began = time.monotonic()
        shown = await shared.reaches(id, "promoted")
        assert time.monotonic() - began < 5
    assert shown["attempts"] == 1


async def test_refused_messages_are_kept_and_others_continue(shared: ProxyProcess) -> None:
    small, topic = await shared.topic(max_message_bytes="2000"), await shared.topic()
    whole = [{"topic": topic, "value": "one"}, {"topic": small, "value": "two"}]
    refused = await shared.prepare(*whole)
    other = await shared.prepare({"topic": topic, "value": "flows"})
    await shared.delete_topic(small)
    await shared.act(refused, "commit")
    await shared.act(other, "commit", wait="promoted")
    shown = await shared.reaches(refused, "refused")
    assert shown["cause"]["topic"] == small
    assert await values(shared, topic) == [b"flows"]
    kept = [r for r in await shared.own("parked") if r.header("txb-id") == refused]
    assert [r.value for r in kept][-2:] == [b"one", b"two"]
    await shared.create_again(small)
    with contextlib.suppress(NotPending):  # a retry may be faster
        await shared.act(refused, "revive")
    await shared.reaches(refused, "promoted")
    assert await values(shared, topic) == [b"flows", b"one"]
    assert await values(shared, small) == [b"two"]


async def test_a_body_is_copied_before_retention_takes_it(kafka: EmbeddedKafka) -> None:
    """At half of half's retention, in one Kafka transaction with the progress; and the copy is
    all that is needed when the half message and its proxy are gone."""
    world = ProxyProcess(
        kafka.bootstrap,
        half_retention_s=20,
        dedup_window_s=10,
        check_after_s=3,
        check_interval_s=3,
        check_attempts_max=2,
        partitions=1,
    )
    try:
        await world.start()
        topic = await world.topic()
        id = await world.prepare({"topic": topic, "key": "k", "value": "old"}, group="nobody")

        async def copied() -> bool:
            return any(r.header("txb-id") == id for r in await world.own("parked"))

        await until(copied)
        assert (await world.show(id))["state"] == "pending"
        await world.kill()
        await asyncio.to_thread(delete_records, kafka.bootstrap, f"{world.prefix}.half")
        await world.start()
        assert (await world.show(id))["state"] == "pending"
        await world.act(id, "commit", wait="promoted")
        (record,) = await world.visible(topic)
        assert (record.key, record.value) == (b"k", b"old")
    finally:
        await world.close()


def delete_records(bootstrap: str, topic: str) -> None:
    """Delete all that is in partition 0 of a topic, as retention does."""
    whole = TopicPartition(topic, 0, -1)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_records([whole])[whole].result(15)


async def test_producer_clock_decides_nothing(
    shared: ProxyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer a day ahead, messages of the last century: Kafka's append time counts."""
    topic, day_s = await shared.topic(), 86400
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + day_s)
    async with TransactionalProducer(shared.url, group="late") as producer:
        id = await producer.prepare(Message(topic, value=b"x", timestamp_ms=1), check_after_s=500)
        shown = await shared.show(id)
        await producer.commit(id, wait="promoted")
    assert abs(shown["prepared_at_ms"] - right() * 1000) < 20_000
    assert shown["next_check_at_ms"] == shown["prepared_at_ms"] + 500_000
    (half,) = [r for r in await shared.own("half") if r.header("txb-id") == id]
    assert half.timestamp_ms == shown["prepared_at_ms"]
    (record,) = await shared.visible(topic)
    assert record.timestamp_ms == 1
    ahead = encode(decode(id) + (day_s * 1000 << 64))
    with pytest.raises(IdExpired):
        await shared.prepare({"topic": topic, "value": "x"}, id=ahead)


async def test_id_names_the_half_partition(shared: ProxyProcess) -> None:
    """A proxy that knows nothing of it, at the first moment that it answers, decides it."""
    topic = await shared.topic()
    messages = [{"topic": topic, "key": str(n), "value": str(n)} for n in range(12)]
    prepared = [shared.prepare(message) for message in messages]
    ids = await asyncio.gather(*prepared)
    half = {r.header("txb-id"): r.partition for r in await shared.own("half")}
    # The first 2 of the id's 16 bytes are the half partition.
    assert [half[id] for id in ids] == [int(decode(id) >> 112) for id in ids]
    assert len({half[id] for id in ids}) > 1
    async with killed_and_started(shared):
        pass
    await asyncio.gather(*[shared.act(id, "commit", wait="promoted") for id in ids])
    assert len(await values(shared, topic)) == 12


LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def decode(id: str) -> int:
    """The 128 bits of an id."""
    number = 0
    for letter in id:
        number = number << 5 | LETTERS.index(letter)
    return number


def encode(number: int) -> str:
    """The id of 128 bits."""
    return "".join(LETTERS[number >> shift & 31] for shift in range(125, -1, -5))


async def test_partitions_run_in_parallel_despite_slow_group(
    shared: ProxyProcess, desk: FakeEndpoint
) -> None:
    topic = await shared.topic()
    slow = await register(shared, desk, [{"decision": "unknown"}], timeout_s=20)
    quick = await register(shared, desk, [{"decision": "commit"}])
    desk.held[slow] = asyncio.Event()
    try:
        held = [{"topic": topic, "key": str(n), "value": "slow"} for n in range(40)]
        await asyncio.gather(*[shared.prepare(message, group=slow) for message in held])

        await until(lambda: bool(desk.calls.get(slow)))
        began = time.monotonic()
        ids = await asyncio.gather(
            *[shared.prepare({"topic": topic, "value": "q"}, group=quick) for _ in range(20)]
        )
        await asyncio.gather(*[shared.reaches(id, "promoted") for id in ids])
        assert time.monotonic() - began < 10
        left = {t["partition"] for t in await shared.unsettled(slow)}
        assert len(left) > 1
    finally:
        desk.answers[slow] = [{"decision": "rollback"}]
        desk.held[slow].set()
    assert await values(shared, topic) == [b"q"] * 20


async def test_poison_record_is_set_aside_and_others_continue(shared: ProxyProcess) -> None:
    topic = await shared.topic()

    async def prepared(value: str) -> list[str]:
        # Keys, so that they are in several partitions.
        messages = [{"topic": topic, "key": str(n), "value": value} for n in range(4)]
        return [await shared.prepare(message) for message in messages]

    before = await prepared("before")
    await asyncio.to_thread(poison, shared)
    after = await prepared("after")
    for id in before[:2] + after[:2]:
        await shared.act(id, "commit", wait="promoted")
    async with killed_and_started(shared):
        pass
    for id in before[2:] + after[2:]:
        await shared.act(id, "commit", wait="promoted")
    assert Counter(await values(shared, topic)) == {b"after": 4, b"before": 4}


def poison(world: ProxyProcess) -> None:
    """Write rubbish into every partition of half, operation and parked topic."""
    producer = Producer({"bootstrap.servers": world.bootstrap})
    rubbish: list[Any] = [None, [("txb-v", b"1")], [("txb-v", b"one \xff")], [("txb-v", None)]]
    for name in ("half", "op", "parked"):
        for partition in range(4):
            for headers in rubbish:
                producer.produce(
                    f"{world.prefix}.{name}", b"{\xff", b"k", partition, headers=headers
                )
            marker = b'{"v":1,"kind":"commit","id":"00000000000000000000000000","contents":-3}'
            producer.produce(f"{world.prefix}.{name}", marker, b"k", partition)
    assert producer.flush(20) == 0


async def test_messages_of_several_topics_are_atomic_and_ordered(shared: ProxyProcess) -> None:
    one, two, group = await shared.topic(), await shared.topic(), unique("group")
    async with TransactionalProducer(shared.url, group=group) as producer:
        for n in range(30):
            body = b"%d" % n
            block = producer.transaction(
                Message(one, value=body), Message(two, value=body), order_key="o"
            )
            async with block as transaction:
                if n % 3 == 1:
                    await transaction.rollback()
        last = await producer.prepare(Message(one, value=b"30"), Message(two, value=b"30"))
        await producer.commit(last, wait="promoted")
    await shared.all_settled(group)
    wanted = [b"%d" % n for n in range(30) if n % 3 != 1]
    assert [v for v in await values(shared, one) if v != b"30"] == wanted
    assert [v for v in await values(shared, two) if v != b"30"] == wanted
    sequences = [record.header("txb-seq") for record in await shared.visible(two)]
    assert sequences == ["1/2"] * 21


async def test_pending_transactions_are_resolved_over_http(shared: ProxyProcess) -> None:
    topic, group = await shared.topic(), unique("group")
    ids = [await shared.prepare({"topic": topic, "value": "v"}, group=group) for _ in range(3)]
    page = await shared.call("GET", f"/v1/transactions?group={group}&state=pending&limit=2")
    assert [t["id"] for t in page["transactions"]] == ids[:2]
    rest = await shared.call("GET", f"/v1/transactions?group={group}&cursor={page['next_cursor']}")
    assert [t["id"] for t in rest["transactions"]] == ids[2:]
    await shared.act(ids[0], "commit", reason="seen in the books", wait="promoted")
    await shared.act(ids[1], "rollback", reason="a test order")
    shown = await shared.show(ids[0])
    assert (shown["source"], shown["reason"]) == ("operator", "seen in the books")
    assert [event["event"] for event in shown["timeline"]] == ["prepared", "commit", "promoted"]
    left = await shared.call("GET", f"/v1/transactions?topic={topic}")
    assert [t["id"] for t in left["transactions"]] == ids[2:]
    assert "txbroker" in await shared.text("/")
