"""Proxies that come, go, fall silent and die: what stays is not touched, what moves is not lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from tests.kit.cluster import CLOSED_URL, TAKEOVER_S, Proxies
from tests.kit.memory import MemoryHarness
from tests.kit.until import unique, until
from txbroker.contract.service import PrepareRequest, TransactionStatus
from txbroker.core.records import Message
from txbroker.core.routing import make_id, parse_id
from txbroker.errors import OwnerUnavailable, RequestError, TooOld
from txbroker.proxy.partition.owner import PartitionOwner
from txbroker.sdk import CheckRequest, Decision
from txbroker.testing.door import MemoryDoor

# --- who has what ----------------------------------------------------------------------------


async def test_proxy_without_partition_still_serves(proxies: Proxies) -> None:
    proxies.partitions = 2
    await proxies.add("one", "two", "three")
    shares = await proxies.shares()
    assert sorted(map(len, shares.values())) == [0, 1, 1]
    (idle,) = [proxies.running[name] for name, share in shares.items() if not share]
    assert (await idle.get("/readyz"))["ready"] is True
    topic = await idle.topic()
    ids = [await idle.prepare(Message(topic, None, b"v")) for _ in range(8)]
    ids += [await proxies.prepare_in(number, topic, idle) for number in range(2)]
    assert {each["id"] for each in await idle.listed()} == set(ids)
    for id in ids:
        await idle.commit(id)
    assert len(await idle.visible(topic)) == len(ids)


async def test_leaving_proxy_is_replaced_at_once(proxies: Proxies) -> None:
    one, two = await proxies.add("one", "two")
    topic = await one.topic()
    ids = [await proxies.prepare_in(number, topic, two) for number in range(proxies.partitions)]
    await proxies.stop("two")
    started = time.monotonic()
    await proxies.settled()
    # A session that times out would take ten seconds.
    assert time.monotonic() - started < 8.0
    for id in ids:
        await one.commit(id)


@pytest.mark.rule(26)
async def test_kept_partition_is_neither_claimed_nor_paused(
    proxies: Proxies, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = await proxies.add("one", "two")
    topic = await one.topic()
    before = await proxies.shares()
    owners = dict(one.proxy.broker.partitions.open())
    claims = {number: await proxies.claims(number) for number in range(proxies.partitions)}
    moving: list[PartitionOwner] = []
    may_open = asyncio.Event()
    open_ = PartitionOwner.open

    async def held(owner: PartitionOwner) -> None:
        moving.append(owner)
        await may_open.wait()
        await open_(owner)

    monkeypatch.setattr(PartitionOwner, "open", held)
    adding = asyncio.create_task(proxies.add("three"))
    try:
        await until(lambda: moving, TAKEOVER_S)
        for number in set(range(proxies.partitions)) - {owner.partition for owner in moving}:
            await one.commit(await proxies.prepare_in(number, topic, one))
    finally:
        may_open.set()
        await adding
    after = await proxies.shares()
    assert len(moving) == len(after["three"]) == 1
    for name in ("one", "two"):
        for number in before[name] & after[name]:
            assert await proxies.claims(number) == claims[number]
    kept = before["one"] & after["one"]
    assert kept
    for number in kept:
        assert one.proxy.broker.partitions.open()[number] is owners[number]


async def test_nothing_is_lost_while_proxies_join_and_leave(proxies: Proxies) -> None:
    one, _ = await proxies.add("one", "two")
    topic = await one.topic()
    ends = asyncio.Event()
    committed: set[str] = set()

    async def again(call: Any) -> Any:
        """Retry a retryable call, at any running proxy."""
        while True:
            service = next(iter(proxies.running.values()))
            try:
                return await call(service)
            except RequestError as error:
                if not error.retryable:
                    raise
            except OSError:
                pass
            await asyncio.sleep(0.02)

    async def work(worker: int) -> None:
        number = 0
        while not ends.is_set():
            number += 1
            message, key = Message(topic, None, b"v"), f"{worker}.{number}"
            _, answer = await again(lambda s: s.send(message, dedup_key=key))  # noqa: B023
            await again(lambda s: s.act(answer["id"], "commit"))  # noqa: B023
            committed.add(answer["id"])

    working = [asyncio.ensure_future(work(number)) for number in range(8)]
    await proxies.add("three")
    await proxies.stop("two")
    await proxies.settled()
    await proxies.add("two")
    await proxies.stop("three")
    await proxies.settled()
    ends.set()
    await asyncio.gather(*working)
    ids = [dict(record.headers)["txb-id"] for record in await one.sees(topic, len(committed))]
    assert Counter(ids) == Counter(id.encode() for id in committed)


async def test_calls_in_flight_are_answered_when_proxy_leaves(proxies: Proxies) -> None:
    one, two = await proxies.add("one", "two")
    topic = await one.topic()
    mine = sorted(await two.owned())
    calls = [
        asyncio.ensure_future(
            one.send(Message(topic, proxies.key(topic, mine[n % len(mine)]), b"%d" % n))
        )
        for n in range(60)
    ]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    await proxies.stop("two")
    results = await asyncio.gather(*calls, return_exceptions=True)
    await proxies.settled()
    acked = [result[1]["id"] for result in results if isinstance(result, tuple)]
    refused = [result for result in results if not isinstance(result, tuple)]
    assert acked
    assert all(isinstance(error, OwnerUnavailable) for error in refused)
    listed = {each["id"] for each in await proxies.all_listed(one, 100)}
    assert set(acked) <= listed
    for error in refused:
        assert isinstance(error, OwnerUnavailable)
        if "id" not in error.details:
            continue
        # Whether it was stored or not, the same id again is the same transaction.
        assert parse_id(error.details["id"]).partition in mine


async def test_id_older_than_the_log_is_expired(proxies: Proxies) -> None:
    await proxies.add("one", "two")
    for number in range(proxies.partitions):
        wrong = await proxies.wrong_for(number)
        topic = await wrong.topic()
        for _ in range(3):
            await wrong.commit(await proxies.prepare_in(number, topic, wrong))
        await proxies.world.truncate(proxies.world.name("half"), number, 2)
        old = make_id(number, round(time.time() * 1000) - 3_600_000, 1)
        with pytest.raises(TooOld):
            await wrong.act(old, "commit")


# --- owners that are not there ---------------------------------------------------------------


@pytest.mark.rule(1)
async def test_unreachable_owner_is_never_an_ack(in_memory: Proxies) -> None:
    (one,) = await in_memory.add("one")
    topic = await one.topic()
    ids = [await in_memory.prepare_in(number, topic, one) for number in range(in_memory.partitions)]
    gone, theirs = in_memory.absent()
    assert 0 < len(theirs) < in_memory.partitions
    for number, id in enumerate(ids):
        if number not in theirs:
            await one.commit(id)
            continue
        message = Message(topic, in_memory.key(topic, number), b"v")
        with pytest.raises(OwnerUnavailable) as error:
            await one.send(message)
        assert parse_id(error.value.details["id"]).partition == number
        sent = error.value.details["id"]
        with pytest.raises(OwnerUnavailable) as error:
            await one.send(message, id=sent)
        assert error.value.details["id"] == sent
        for what in ("commit", "rollback", "check", "revive"):
            with pytest.raises(OwnerUnavailable) as error:
                await one.act(id, what)
            assert error.value.details["id"] == id
        with pytest.raises(OwnerUnavailable):
            await one.show(id)
    with pytest.raises(OwnerUnavailable):
        await one.listed()
    states = (await one.get("/readyz"))["partitions"]
    assert {states[str(number)] for number in theirs} == {"elsewhere"}
    in_memory.coordinator.leave(gone)
    await in_memory.settled()
    for id in ids:
        await one.commit(id)
    assert len(await one.visible(topic)) == len(ids)


@pytest.mark.rule(26)
async def test_lost_group_contact_suspends_without_claim(in_memory: Proxies) -> None:
    one, two = await in_memory.add("one", "two")
    topic = await one.topic()
    mine = sorted(await one.owned())
    claims = [await in_memory.claims(number) for number in mine]
    id = await in_memory.prepare_in(mine[0], topic, one)
    in_memory.coordinator.silence("one")
    ready = await one.get("/readyz")
    assert ready["ready"] is False
    assert {ready["partitions"][str(number)] for number in mine} == {"suspended"}
    for service in (one, two):
        with pytest.raises(OwnerUnavailable):
            await service.act(id, "commit")
        with pytest.raises(OwnerUnavailable):
            await service.send(Message(topic, in_memory.key(topic, mine[0]), b"v"))
    in_memory.coordinator.let_back("one")
    await in_memory.settled()
    assert [await in_memory.claims(number) for number in mine] == claims
    assert (await two.commit(id))["state"] == "promoted"


@pytest.mark.rule(26)
async def test_zombie_makes_nothing_visible(in_memory: Proxies) -> None:
    one, two = await in_memory.add("one", "two")
    topic = await one.topic()
    mine = sorted(await one.owned())
    ids = [await in_memory.prepare_in(number, topic, one) for number in mine]
    coordinator = in_memory.coordinator
    coordinator.silence("one")
    coordinator.forget("one")
    await two.owns(in_memory.partitions)
    for id in ids:
        with pytest.raises(OwnerUnavailable):
            await one.act(id, "commit")
        assert (await two.act(id, "rollback"))["state"] == "rolled_back"
        # Nor does it answer from memory, which may be out of date.
        with pytest.raises(OwnerUnavailable):
            await one.state(id)
        with pytest.raises(OwnerUnavailable):
            await one.act(id, "check")
    with pytest.raises(OwnerUnavailable):
        await one.listed(state="pending")
    coordinator.let_back("one")
    await in_memory.settled()
    for id in ids:
        assert await one.state(id) == await two.state(id) == "rolled_back"
    assert await two.visible(topic) == []


@pytest.mark.rule(16)
async def test_stuck_proxy_leaves_to_another(
    in_memory: Proxies, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await in_memory.add("one", "two", stuck_after_s=0.5)
    manager = one.proxy.broker.partitions
    monkeypatch.setattr(manager, "_rejoin_s", 0.1)
    stuck = next(iter(manager.open().values()))
    claims = await in_memory.claims(stuck.partition)
    monkeypatch.setattr(stuck, "stuck_since_s", lambda: 60.0)

    async def moved() -> bool:
        return await in_memory.claims(stuck.partition) > claims

    await until(moved)
    shares = await in_memory.settled()
    assert all(shares.values())
    topic = await one.topic()
    for number in range(in_memory.partitions):
        await one.commit(await in_memory.prepare_in(number, topic, two))


@pytest.mark.rule(16)
async def test_stuck_proxy_without_others_stays(in_memory: Proxies) -> None:
    (one,) = await in_memory.add("one")
    manager = one.proxy.broker.partitions
    assert not manager._should_leave(3600.0)
    await in_memory.add("two")
    assert manager._should_leave(3600.0)
    assert not manager._should_leave(29.0)
    in_memory.coordinator.silence("one")
    assert not manager._should_leave(3600.0)
    in_memory.coordinator.let_back("one")
    await in_memory.settled()


async def test_proxy_with_wrong_clock_uses_owners_time(
    in_memory: Proxies, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PrepareRequest] = []

    async def watched(url: str, request: PrepareRequest) -> TransactionStatus:
        asked.append(request)
        return await prepare(url, request)

    assert isinstance(in_memory.world, MemoryHarness)
    in_memory.world.kafka.clock.advance(600)
    in_memory.partitions = 2
    await in_memory.add("one", "two", "three")
    (idle,) = [in_memory.running[n] for n, share in (await in_memory.shares()).items() if not share]
    peers = idle.proxy.cluster._peers
    prepare = peers.prepare
    monkeypatch.setattr(peers, "prepare", watched)
    topic = await idle.topic()
    for number in range(2):
        id = await in_memory.prepare_in(number, topic, idle)
        assert parse_id(id).time_ms > time.time() * 1000 + 500_000
    assert await idle.prepare(Message(topic, None, b"v"), dedup_key="key")
    status, _ = await idle.send(Message(topic, None, b"v"), dedup_key="key")
    assert status == 200
    # Even without an answer the caller gets an id, so that its retry counts once.
    assert len(asked) > 4
    assert all(request.id is not None for request in asked)


@pytest.mark.rule(1)
async def test_unsent_prepare_goes_to_another_owner(in_memory: Proxies) -> None:
    in_memory.partitions = 2
    await in_memory.add("one")
    gone, _ = in_memory.absent()
    (idle,) = await in_memory.start("two")
    assert not await idle.owned()
    assert CLOSED_URL in idle.proxy.broker.partitions.assigned()
    topic = await idle.topic()
    for _ in range(10):
        await idle.prepare(Message(topic, None, b"v"))
    in_memory.coordinator.leave(gone)
    await in_memory.settled()


@pytest.mark.rule(1)
async def test_sent_prepare_goes_to_no_other_owner(in_memory: Proxies) -> None:
    async def take_and_go(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(take_and_go, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    in_memory.partitions = 2
    await in_memory.add("one")
    gone, (theirs,) = in_memory.absent(url)
    (idle,) = await in_memory.start("two")
    topic = await idle.topic()
    # Each prepare goes to one of two owners by chance.
    refused: list[OwnerUnavailable] = []
    for _ in range(60):
        try:
            await idle.prepare(Message(topic, None, b"v"))
        except OwnerUnavailable as error:
            refused.append(error)
            break
    (refusal,) = refused
    assert parse_id(refusal.details["id"]).partition == theirs
    server.close()
    in_memory.coordinator.leave(gone)
    await in_memory.settled()


async def test_changed_own_topics_are_reported(in_memory: Proxies) -> None:
    (one,) = await in_memory.add("one")
    assert (await one.get("/readyz"))["problems"] == []
    await in_memory.world.add_partitions(in_memory.world.name("op"), in_memory.partitions + 1)
    await one.proxy.broker.partitions.look_at_topics()
    (problem,) = (await one.get("/readyz"))["problems"]
    assert in_memory.world.name("op") in problem
    assert await one.metric("topic_problems") == 1


# --- checks through moves --------------------------------------------------------------------


async def test_session_is_found_after_takeover(proxies: Proxies) -> None:
    one, two = await proxies.add("one", "two")
    topic, group = await one.topic(), unique("group")
    asked: list[str] = []
    known = asyncio.Event()

    async def answer(call: CheckRequest) -> Decision:
        asked.append(call.id)
        return Decision.COMMIT if known.is_set() else Decision.UNKNOWN

    number = min(await two.owned())
    async with one.producer(group, check=answer):
        id = await proxies.prepare_in(
            number, topic, one, group=group, check_after_s=0, check_interval_s=0.2
        )
        await until(lambda: asked)
        await proxies.add("three")
        await proxies.stop("two")
        known.set()
        await proxies.settled()
        shown = await one.reaches(id, "promoted")
    attempts = [(each["round"], each["number"]) for each in shown["checks"]]
    assert attempts == sorted(set(attempts))
    assert shown["attempts"] <= shown["attempts_max"]


@pytest.mark.rule(22)
async def test_session_holder_lost_during_check_costs_one_attempt(proxies: Proxies) -> None:
    one, two = await proxies.add("one", "two")
    topic, group = await two.topic(), unique("group")
    asked, never = asyncio.Event(), asyncio.Event()

    async def hang(call: CheckRequest) -> Decision:
        asked.set()
        await never.wait()
        return Decision.COMMIT

    number = min(await two.owned())
    producer = one.producer(group, check=hang)
    async with producer:
        id = await proxies.prepare_in(
            number, topic, two, group=group, check_after_s=0, check_interval_s=0.2
        )
        await asyncio.wait_for(asked.wait(), TAKEOVER_S)
        assert (await two.show(id))["attempts"] == 1
        await proxies.stop("one")
        never.set()
    async with two.producer(group, check=lambda _: Decision.ROLLBACK):
        shown = await two.reaches(id, "rolled_back")
    assert [each["number"] for each in shown["checks"]] == list(range(1, len(shown["checks"]) + 1))
    assert shown["checks"][0]["counts"] is True


async def test_hanging_transaction_is_reported_without_leaving(in_memory: Proxies) -> None:
    one, two = await in_memory.add("one", "two", stuck_after_s=0.5)
    kept = min(await one.owned())
    moving = min(await two.owned())
    end = await in_memory.world.hang(in_memory.world.name("checkpoint"), moving)
    assert isinstance(one.door, MemoryDoor)
    one.door._claim_timeout_s = 0.1
    await in_memory.stop("two")

    async def shown() -> bool:
        states = (await one.get("/readyz"))["partitions"]
        return bool(states[str(moving)].startswith("hanging") and states[str(kept)] == "owned")

    await until(shown)
    slot = one.proxy.broker.partitions._slots[moving]
    assert slot.stuck_s() == 0.0
    await end()
    await in_memory.settled()
