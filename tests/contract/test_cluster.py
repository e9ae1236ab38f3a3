"""Several proxies act as one: each returns the owner's answer, or none at all."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.kit.cluster import Proxies
from tests.kit.kafka import now_ms
from tests.kit.until import unique, until
from txbroker.contract.service import (
    DecideRequest,
    PrepareRequest,
    execute,
)
from txbroker.core.decoding import decode_marker, is_content
from txbroker.core.records import Message
from txbroker.core.routing import make_id, parse_id
from txbroker.errors import (
    AlreadyDecided,
    BadId,
    BadRequest,
    IdConflict,
    IdExpired,
    NotFound,
    NotPending,
    TooLarge,
    UnknownTopic,
    WrongGroup,
)
from txbroker.proxy.cluster.cluster import Cluster
from txbroker.sdk import Decision

UNKNOWN = {"decision": "unknown"}
RACED = 5000
"""Transactions that both proxies decide contrarily at once."""


@pytest.fixture
async def topic(two: Proxies) -> str:
    """A target of the test's own."""
    return await two.running["one"].topic()


# --- exact answers through the wrong proxy ---------------------------------------------------


async def test_wrong_proxy_serves_a_whole_transaction(two: Proxies, topic: str) -> None:
    for partition in range(two.partitions):
        wrong = await two.wrong_for(partition)
        message = Message(topic, two.key(topic, partition), b"%d" % partition)
        status, answer = await wrong.send(message)
        id = answer["id"]
        assert (status, answer["state"], parse_id(id).partition) == (201, "pending", partition)
        assert await wrong.send(message, id=id) == (200, answer)
        shown = await wrong.show(id, bodies=True)
        assert shown["messages"][0]["value"] == str(partition)
        assert shown == await (await two.right_for(partition)).show(id, bodies=True)
        done = {"id": id, "decision": "commit", "state": "promoted"}
        assert await wrong.commit(id) == done
        assert await wrong.act(id, "commit") == done
    assert await wrong.values(topic) == [b"%d" % n for n in range(two.partitions)]


async def test_both_proxies_refuse_bad_calls_alike(two: Proxies, topic: str) -> None:
    unknown = two.world.name("none")
    for partition in range(two.partitions):
        right, wrong = await two.right_for(partition), await two.wrong_for(partition)
        key = two.key(topic, partition)
        id = await wrong.prepare(Message(topic, key, b"v"), group="mine")
        other = make_id((partition + 1) % two.partitions, now_ms(), 1)
        missing = make_id(partition, now_ms(), 2)
        old = make_id(partition, now_ms() - 300_000, 3)
        beyond = make_id(two.partitions, now_ms(), 4)
        nowhere = Message(unknown, two.key(unknown, partition), b"")
        for service in (right, wrong):
            act, send = service.act, service.send
            for error, call in (
                (WrongGroup, act(id, "rollback", group="theirs")),
                (WrongGroup, act(id, "commit", group="theirs")),
                (NotFound, service.show(missing)),
                (NotFound, act(missing, "commit")),
                (IdConflict, send(Message(topic, key, b"w"), id=id, group="mine")),
                (BadId, send(Message(topic, key, b"v"), id=other)),
                (BadId, act(beyond, "commit")),
                (IdExpired, send(Message(topic, key, b"v"), id=old)),
                (NotPending, act(id, "revive")),
                (UnknownTopic, send(nowhere, id=missing)),
                (BadRequest, act(id, "commit", messages=[])),
            ):
                with pytest.raises(error):
                    await call
        await right.act(id, "rollback", reason="enough")
        for service in (wrong, right):
            with pytest.raises(AlreadyDecided) as error:
                await service.act(id, "commit")
            details = error.value.details
            assert (details["decision"], details["state"]) == ("rollback", "rolled_back")


async def test_forward_keeps_the_deciding_principal(two: Proxies, topic: str) -> None:
    wrong = await two.wrong_for(0)
    id = await two.prepare_in(0, topic, wrong)
    await wrong.act(id, "rollback", reason="a test")
    shown = await wrong.show(id)
    assert (shown["source"], shown["reason"], shown["by"]) == (
        "operator",
        "a test",
        "http 127.0.0.1",
    )
    id = await two.prepare_in(0, topic, wrong, group="mine")
    await wrong.act(id, "commit", group="mine")
    assert (await wrong.show(id))["source"] == "producer"


async def test_forward_keeps_final_content(two: Proxies, topic: str) -> None:
    wrong = await two.wrong_for(1)
    id = await two.prepare_in(1, topic, wrong)
    await wrong.commit(id, messages=[{"topic": topic, "value_base64": "AP8="}])
    assert await wrong.values(topic) == [b"\x00\xff"]


async def test_forward_reports_smaller_target_limit(two: Proxies) -> None:
    wrong = await two.wrong_for(2)
    small = await wrong.topic(max_message_bytes="2000")
    with pytest.raises(TooLarge):
        await wrong.send(Message(small, two.key(small, 2), b"x" * 3000))


async def test_dedup_key_is_one_transaction_at_any_proxy(two: Proxies, topic: str) -> None:
    one, other = two.running.values()
    for _ in range(6):
        message, key = Message(topic, None, b"v"), unique("key")
        answers = await asyncio.gather(
            *[service.send(message, dedup_key=key) for service in (one, other) * 3]
        )
        assert len({answer["id"] for _, answer in answers}) == 1
        assert sorted(status for status, _ in answers) == [200] * 5 + [201]
        for service in (one, other):
            with pytest.raises(IdConflict):
                await service.send(Message(topic, None, b"w"), dedup_key=key)
        await one.commit(answers[0][1]["id"])
    assert await one.values(topic) == [b"v"] * 6


async def test_keyless_prepare_stays_at_called_proxy(two: Proxies, topic: str) -> None:
    for name, share in (await two.shares()).items():
        ids = [await two.running[name].prepare(Message(topic, None, b"v")) for _ in range(12)]
        assert {parse_id(id).partition for id in ids} <= share


async def test_forward_carries_checks_and_revivals(two: Proxies, topic: str) -> None:
    wrong, right = await two.wrong_for(3), await two.right_for(3)
    group = await wrong.group(UNKNOWN, check_after_s=3600, attempts_max=3)
    await right.knows(group)
    id = await two.prepare_in(3, topic, wrong, group=group)
    await wrong.act(id, "check", reason="now")
    await wrong.asked_times(group, 1)
    parks = await wrong.group(UNKNOWN, attempts_max=1, timeout_s=0.1)
    await right.knows(parks)
    id = await two.prepare_in(3, topic, wrong, group=parks)
    await right.reaches(id, "parked")
    assert (await wrong.act(id, "revive"))["state"] == "pending"
    assert (await right.show(id))["round"] == 2


# --- contrary decisions ----------------------------------------------------------------------


@pytest.mark.rule(1)
async def test_contrary_decisions_at_two_proxies_agree_with_log(two: Proxies, topic: str) -> None:
    one, other = [service.proxy.cluster for service in two.running.values()]
    gate = asyncio.Semaphore(256)

    async def prepare(number: int) -> str:
        async with gate:
            message = Message(topic, b"%d" % number, b"%d" % number)
            return (await execute(one, PrepareRequest("race", (message,)))).id

    answers: list[tuple[str, str]] = []

    async def decide(id: str, service: Cluster, decision: Decision) -> None:
        async with gate:
            try:
                answer = (await execute(service, DecideRequest(id, decision))).decision
            except AlreadyDecided as error:
                answer = error.details["decision"]
        answers.append((id, str(answer)))

    ids = await asyncio.gather(*[prepare(number) for number in range(RACED)])
    racing = []
    for number, id in enumerate(ids):
        first, second = (one, other) if number % 2 else (other, one)
        racing += [decide(id, first, Decision.COMMIT), decide(id, second, Decision.ROLLBACK)]
    await asyncio.gather(*racing)

    logged = await decisions(two)
    assert len(answers) == 2 * RACED
    assert {pair for pair in answers if logged[pair[0]] != pair[1]} == set()
    committed = {id for id in ids if logged[id] == "commit"}
    assert 0 < len(committed) < RACED
    records = await two.running["one"].sees(topic, len(committed))
    seen = Counter(dict(record.headers)["txb-id"] for record in records)
    assert seen == Counter(id.encode() for id in committed)


async def decisions(proxies: Proxies) -> dict[str, str]:
    """Return the first deciding marker of every transaction in the operation topic."""
    logged: dict[str, str] = {}
    for partition in range(proxies.partitions):
        for record in await proxies.world.visible(proxies.world.name("op"), partition):
            if is_content(record):
                continue
            marker = decode_marker(record)
            if marker.kind in ("commit", "rollback"):
                logged.setdefault(marker.id, str(marker.kind))
    return logged


# --- lists -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
async def test_list_merges_all_owners_in_order(two: Proxies, topic: str, limit: int) -> None:
    one, other = two.running.values()
    group = unique("group")
    ids = {
        await two.prepare_in(number % two.partitions, topic, one, group=group)
        for number in range(17)
    }
    for service in (one, other):
        listed = await two.all_listed(service, limit, group=group)
        keys = [(each["prepared_at_ms"], each["id"]) for each in listed]
        assert keys == sorted(set(keys))
        assert {each["id"] for each in listed} == ids
        assert await two.all_listed(service, limit, group=group, state="promoted") == []
    for id in sorted(ids)[:9]:
        await other.commit(id)
    for state, count in (("promoted", 9), ("pending", 8)):
        for newest in ({}, {"newest": "true"}):
            listed = await two.all_listed(one, limit, group=group, state=state, **newest)
            keys = [(each["prepared_at_ms"], each["id"]) for each in listed]
            assert len(keys) == count
            assert keys == sorted(set(keys), reverse=bool(newest))


async def test_paging_shows_lasting_transactions_under_churn(two: Proxies, topic: str) -> None:
    one, other = two.running.values()
    group = unique("group")
    staying, going = set(), []
    for number in range(60):
        id = await two.prepare_in(number % two.partitions, topic, other, group=group)
        if number % 2:
            staying.add(id)
        else:
            going.append(id)

    async def change() -> None:
        for number, id in enumerate(going):
            await one.act(id, "commit")
            await two.prepare_in(number % two.partitions, topic, one, group=group)

    changing = asyncio.ensure_future(change())
    rounds = 0
    while not changing.done() or not rounds:
        listed = [each["id"] for each in await two.all_listed(other, 4, group=group)]
        assert len(listed) == len(set(listed))
        assert staying <= set(listed)
        rounds += 1
    await changing


async def test_invalid_cursor_is_refused(two: Proxies) -> None:
    for cursor in ("x", "1.x", ".", "1"):
        with pytest.raises(BadRequest):
            await two.running["one"].page(cursor=cursor)


# --- checks ----------------------------------------------------------------------------------


async def test_check_reaches_session_at_another_proxy(two: Proxies, topic: str) -> None:
    holder = two.running["one"]
    (partition, *_) = await two.running["two"].owned()
    group = unique("group")
    async with holder.producer(group, check=lambda _: Decision.COMMIT):
        assert group in holder.proxy.sessions.counts()
        assert group not in two.running["two"].proxy.sessions.counts()
        id = await two.prepare_in(partition, topic, holder, group=group, check_after_s=0)
        shown = await holder.reaches(id, "promoted")
    assert shown["source"] == "check"
    (check,) = shown["checks"]
    assert check["endpoint"].endswith(f" at {holder.proxy.url}")


async def test_group_appearing_at_another_proxy_is_asked_at_once(two: Proxies, topic: str) -> None:
    holder, owner = two.running["one"], two.running["two"]
    (partition, *_) = await owner.owned()
    group = unique("group")
    id = await two.prepare_in(
        partition, topic, holder, group=group, check_after_s=0, check_interval_s=3600
    )
    await until(lambda: group in owner.proxy.checks.unreachable())
    async with holder.producer(group, check=lambda _: Decision.ROLLBACK):
        shown = await holder.reaches(id, "rolled_back")
    assert shown["attempts"] == 1
