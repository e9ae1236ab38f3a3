"""What a proxy promises about prepare and decide: the same over HTTP and the SDK, in memory and on
a real Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.kafka import now_ms
from tests.kit.service import Client, Json, Service
from tests.kit.until import unique, until
from txbroker.contract.audit import AuditNews, encode_news
from txbroker.core.records import Header, Message
from txbroker.core.routing import make_id, parse_id
from txbroker.errors import (
    AlreadyDecided,
    BadId,
    BadRequest,
    BadSchedule,
    BadTarget,
    IdConflict,
    IdExpired,
    NotFound,
    RequestError,
    TooLarge,
    UnknownTopic,
)

HEADERS: tuple[Header, ...] = (
    ("b", b"\x00\xff"),
    ("a", None),
    ("b", b"\x00\xff"),
    ("txb-id", b"a user's own"),
    ("naïve", b""),
)


# --- commit and rollback ---------------------------------------------------------------------


async def test_a_commit_is_promoted(service: Service, client: Client, topic: str) -> None:
    id = await client.prepare(Message(topic, b"key", b"value"))
    assert await service.state(id) == "pending"
    assert await service.visible(topic) == []
    assert await client.commit(id) == "promoted"
    (record,) = await service.visible(topic)
    assert (record.key, record.value) == (b"key", b"value")
    assert record.headers == (("txb-id", id.encode()),)
    assert record.timestamp_ms == (await service.show(id))["decided_at_ms"]


async def test_a_rollback_is_never_visible(service: Service, client: Client, topic: str) -> None:
    rolled_back = await client.prepare(Message(topic, b"k", b"never"))
    committed = await client.prepare(Message(topic, b"k", b"later"))
    assert await client.rollback(rolled_back) == "rolled_back"
    await client.commit(committed)
    assert await service.values(topic) == [b"later"]


@pytest.mark.parametrize(
    ("decision", "state", "values"),
    [("commit", "promoted", [b"once"]), ("rollback", "rolled_back", [])],
)
async def test_decision_stands_repeated_and_contradicted(
    service: Service, client: Client, topic: str, decision: str, state: str, values: list[bytes]
) -> None:
    id = await client.prepare(Message(topic, b"k", b"once"))
    decide, contradict = client.commit, client.rollback
    if decision == "rollback":
        decide, contradict = contradict, decide
    for _ in range(3):
        assert await decide(id) == state
    with pytest.raises(AlreadyDecided) as error:
        await contradict(id)
    assert error.value.details["decision"] == decision
    assert error.value.details["state"] == state
    assert await service.values(topic) == values


async def test_one_of_concurrent_contrary_decisions_wins(service: Service, topic: str) -> None:
    id = await service.prepare(Message(topic, b"k", b"v"))
    results = await asyncio.gather(
        *[service.act(id, what) for what in ["commit", "rollback"] * 8], return_exceptions=True
    )
    answers = [result for result in results if isinstance(result, dict)]
    refused = [result for result in results if isinstance(result, AlreadyDecided)]
    assert (len(answers), len(refused)) == (8, 8)
    (decision,) = {answer["decision"] for answer in answers}
    assert {error.details["decision"] for error in refused} == {decision}
    shown = await service.reaches(id, "promoted" if decision == "commit" else "rolled_back")
    assert shown["decision"] == decision
    assert len(await service.visible(topic)) == (decision == "commit")


async def test_an_operator_decides_with_a_reason(service: Service) -> None:
    id = await service.prepare(Message(await service.topic(), b"k", b""))
    answer = await service.act(id, "rollback", reason="the order was a test")
    assert answer == {"id": id, "decision": "rollback", "state": "rolled_back"}
    shown = await service.show(id)
    assert (shown["source"], shown["reason"]) == ("operator", "the order was a test")


# --- what comes out --------------------------------------------------------------------------


async def test_message_is_promoted_unchanged(service: Service, client: Client, topic: str) -> None:
    messages = [
        Message(topic, b"k", b"v", HEADERS, timestamp_ms=1_700_000_000_000),
        Message(topic, b"\x00\xff", bytes(range(256)), timestamp_ms=0),
        Message(topic, b"tombstone", None),
        Message(topic, None, b"no key", partition=0),
        Message(topic, b"", b""),
    ]
    id = await client.prepare(*messages)
    await client.commit(id)
    seen = await service.visible(topic)
    assert [(r.key, r.value) for r in seen] == [(m.key, m.value) for m in messages]
    for number, (record, message) in enumerate(zip(seen, messages, strict=True)):
        ours = (("txb-id", id.encode()), ("txb-seq", b"%d/5" % number))
        assert record.headers == (*ours, *message.headers)
    assert [record.timestamp_ms for record in seen[:2]] == [1_700_000_000_000, 0]


async def test_key_goes_to_partition_of_java_client(service: Service, client: Client) -> None:
    topic = await service.topic(partitions=5)
    await client.commit(
        await client.prepare(Message(topic, b"foobar", b""), Message(topic, b"abc"))
    )
    # Kafka's own tests give murmur2("foobar") as -790332482 and murmur2("abc") as 479470107.
    assert [record.key for record in await service.visible(topic, 1)] == [b"foobar"]
    assert [record.key for record in await service.visible(topic, 2)] == [b"abc"]


async def test_several_topics_become_visible_together(service: Service, client: Client) -> None:
    one, two = await service.topic(), await service.topic(partitions=2)
    messages = [Message(one, b"a", b"1"), Message(two, b"b", b"2", partition=1)]
    id = await client.prepare(*messages, Message(one, b"c", b"3"))
    assert await service.visible(one) == await service.visible(two, 1) == []
    await client.commit(id)
    assert await service.values(one) == [b"1", b"3"]
    assert await service.values(two, 1) == [b"2"]
    placed = (await service.show(id))["messages"]
    assert [(m["topic"], m["offset"]) for m in placed] == [(one, 0), (two, 0), (one, 1)]


async def test_commits_of_one_key_keep_their_order(service: Service) -> None:
    topic = await service.topic(partitions=2)
    ids = {
        key: [
            await service.prepare(Message(topic, b"%d" % key, b"%d.%d" % (key, n), partition=0))
            for n in range(10)
        ]
        for key in range(4)
    }

    async def commit_backwards(own: list[str]) -> None:
        for id in reversed(own):
            await service.act(id, "commit")

    await asyncio.gather(*[commit_backwards(own) for own in ids.values()])
    for own in ids.values():
        await service.reaches(own[0], "promoted")
    values = [value or b"" for value in await service.values(topic)]
    for key in range(4):
        own_values = [value for value in values if value.startswith(b"%d." % key)]
        assert own_values == [b"%d.%d" % (key, n) for n in reversed(range(10))]


async def test_an_order_key_keeps_order_over_several_keys(service: Service, topic: str) -> None:
    ids = [
        await service.prepare(Message(topic, b"%d" % n, b"%d" % n), order_key="customer-7")
        for n in range(8)
    ]
    assert len({parse_id(id).partition for id in ids}) == 1
    for id in ids[4:] + ids[:4]:
        await service.act(id, "commit")
    await service.reaches(ids[3], "promoted")
    assert await service.values(topic) == [b"%d" % n for n in (4, 5, 6, 7, 0, 1, 2, 3)]


# --- final content ---------------------------------------------------------------------------


async def test_committed_final_content_is_final(service: Service, client: Client) -> None:
    one, two = await service.topic(), await service.topic()
    id = await client.prepare(Message(one, b"k", b"draft"), Message(two, b"k", b"draft"))
    final = [Message(one, b"k", b"final", HEADERS), Message(two, b"k", None)]
    for _ in range(2):
        assert await client.commit(id, final) == "promoted"
    assert await client.commit(id) == "promoted"
    with pytest.raises(AlreadyDecided):
        await client.commit(id, [Message(one, b"k", b"other"), final[1]])
    (first,), (second,) = await service.visible(one), await service.visible(two)
    assert (first.value, first.headers[2:]) == (b"final", HEADERS)
    assert (second.value, second.headers[2:]) == (None, ())


async def test_final_content_equal_to_prepared_is_no_conflict(
    service: Service, client: Client, topic: str
) -> None:
    prepared = Message(topic, b"k", b"prepared", HEADERS)
    id = await client.prepare(prepared)
    await client.commit(id)
    assert await client.commit(id, [prepared]) == "promoted"
    with pytest.raises(AlreadyDecided):
        await client.commit(id, [Message(topic, b"k", b"prepared")])
    assert await service.values(topic) == [b"prepared"]


async def test_final_content_keeps_topics_and_count(service: Service, topic: str) -> None:
    other = await service.topic()
    id = await service.prepare(Message(topic, b"k", b"draft"))
    two = [{"topic": topic, "value": "1"}, {"topic": topic, "value": "2"}]
    for messages in (two, [{"topic": other, "value": "1"}], []):
        with pytest.raises(BadRequest):
            await service.act(id, "commit", messages=messages)
    assert await service.state(id) == "pending"


async def test_final_content_that_is_too_large_decides_nothing(service: Service) -> None:
    topic = await service.topic(max_message_bytes="2000")
    id = await service.prepare(Message(topic, b"k", b"draft"))
    with pytest.raises(TooLarge):
        await service.act(id, "commit", messages=[{"topic": topic, "value": "x" * 3000}])
    await service.commit(id)
    assert await service.values(topic) == [b"draft"]


# --- the same prepare again ------------------------------------------------------------------


async def test_repeated_id_is_the_same_transaction(service: Service, topic: str) -> None:
    message = Message(topic, b"k", b"v")
    first = await service.prepare(message)
    status, answer = await service.send(message, id=first)
    assert (status, answer["id"], answer["state"]) == (200, first, "pending")
    await service.commit(first)
    status, answer = await service.send(message, id=first)
    assert (status, answer["state"], answer["decision"]) == (200, "promoted", "commit")
    assert await service.values(topic) == [b"v"]


async def test_repeated_id_with_other_content_conflicts(service: Service, topic: str) -> None:
    first = await service.prepare(Message(topic, b"k", b"v"))
    for other in (Message(topic, b"k", b"w"), Message(topic, b"k", b"v", HEADERS)):
        with pytest.raises(IdConflict):
            await service.send(other, id=first)
    with pytest.raises(IdConflict):
        await service.send(Message(topic, b"k", b"v"), id=first, group="another")


async def test_callers_id_is_accepted(service: Service, topic: str) -> None:
    id = make_id(1, now_ms(), 42)
    status, answer = await service.send(Message(topic, None, b"v", partition=0), id=id.lower())
    assert (status, answer["id"]) == (201, id)


async def test_an_id_too_far_from_now_is_expired(service: Service, topic: str) -> None:
    for age_s in (300, -300):
        id = make_id(0, now_ms() - age_s * 1000, 1)
        with pytest.raises(IdExpired):
            await service.send(Message(topic, None, b"v"), id=id)


async def test_a_dedup_key_belongs_to_its_group(service: Service) -> None:
    message, key = Message(await service.topic(), b"k", b"v"), unique("key")
    ids = {await service.prepare(message, dedup_key=key, group=g) for g in ("one", "two")}
    assert len(ids) == 2


# --- what is refused at once -----------------------------------------------------------------


REFUSED: dict[str, tuple[type[RequestError], Callable[[str], Message]]] = {
    "unknown topic": (UnknownTopic, lambda topic: Message(f"{topic}-missing", b"k", b"v")),
    "partition out of range": (BadTarget, lambda topic: Message(topic, b"k", b"v", partition=1)),
    "too large for its topic": (TooLarge, lambda topic: Message(topic, b"k", bytes(3000))),
    "over an hour ahead": (
        BadTarget,
        lambda topic: Message(topic, b"k", b"v", timestamp_ms=now_ms() + 3_700_000),
    ),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_impossible_message_is_refused(service: Service, client: Client, why: str) -> None:
    topic, (error, refused) = await service.topic(max_message_bytes="2000"), REFUSED[why]
    with pytest.raises(error):
        await client.prepare(refused(topic))
    soon = Message(topic, b"k", bytes(1000), partition=0, timestamp_ms=now_ms() + 3_500_000)
    assert await client.commit(await client.prepare(soon)) == "promoted"


async def test_one_bad_message_refuses_the_whole_prepare(service: Service, topic: str) -> None:
    group = unique("group")
    bad = Message(topic, b"k", b"v", partition=7)
    with pytest.raises(BadTarget):
        await service.send(Message(topic, b"k", b"v"), bad, group=group)
    assert await service.listed(group=group) == []


async def test_checks_outlasting_retention_are_refused(service: Service) -> None:
    with pytest.raises(BadSchedule):
        await service.send(Message(await service.topic(), b"k", b""), check_after_s=30 * 86_400)


async def test_unknown_transaction_is_not_found(service: Service) -> None:
    id = make_id(0, now_ms(), 123)
    for what in ("commit", "rollback", "check", "revive"):
        with pytest.raises(NotFound):
            await service.act(id, what)
    with pytest.raises(NotFound):
        await service.show(id)


async def test_malformed_id_is_bad(service: Service) -> None:
    for id in ("nonsense", "U" * 26, make_id(60_000, now_ms(), 1)):
        with pytest.raises(BadId):
            await service.act(id, "commit")


# --- looking ---------------------------------------------------------------------------------


async def test_show_returns_timeline(service: Service, topic: str) -> None:
    message = Message(topic, b"\xff", b"text", HEADERS, timestamp_ms=5)
    id = await service.prepare(message, order_key="o", check_after_s=60, check_interval_s=30)
    shown = await service.show(id, bodies=True)
    assert (shown["group"], shown["order_key"], shown["attempts"]) == ("orders", "o", 0)
    assert shown["next_check_at_ms"] == shown["prepared_at_ms"] + 60_000
    (body,) = shown["messages"]
    assert (body["key_base64"], body["value"], body["timestamp_ms"]) == ("/w==", "text", 5)
    assert [name for name, _ in body["headers"]] == [name for name, _ in HEADERS]
    await service.commit(id, reason="paid")
    shown = await service.show(id)
    assert [event["event"] for event in shown["timeline"]] == ["prepared", "commit", "promoted"]
    assert shown["messages"] == [{"topic": topic, "partition": 0, "offset": 0}]


async def test_bodies_are_shown_only_on_request(service: Service) -> None:
    id = await service.prepare(Message(await service.topic(), b"k", b"secret"))
    assert "value" not in (await service.show(id))["messages"][0]
    (listed,) = [each for each in await service.listed(limit=1000) if each["id"] == id]
    assert "value" not in listed["messages"][0]


async def test_lists_are_filtered(service: Service, topic: str) -> None:
    other, group = await service.topic(), unique("group")
    first = await service.prepare(Message(topic, b"1", b""), group=group)
    second = await service.prepare(Message(other, b"2", b""), Message(topic, b"", b""), group=group)
    third = await service.prepare(Message(topic, b"3", b""))
    await service.commit(second)

    async def ids(**query: str | float) -> list[str]:
        return [each["id"] for each in await service.listed(**query)]

    assert await ids(group=group) == [first]
    assert await ids(group=group, state="promoted") == [second]
    assert sorted(await ids(topic=topic)) == sorted([first, third])
    assert await ids(topic=other, state="promoted") == [second]
    assert await ids(group=group, state="parked") == []
    assert await ids(group=group, older_than_s=3600) == []


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("newest", [False, True])
async def test_lists_are_paged_by_time(
    service: Service, topic: str, newest: bool, settled: bool
) -> None:
    group = unique("group")
    ids = {await service.prepare(Message(topic, b"%d" % n, b""), group=group) for n in range(7)}
    if settled:
        for id in ids:
            await service.commit(id)
    found: list[Json] = []
    cursor: str | None = None
    for size in (3, 3, 1):
        query: dict[str, Any] = {"cursor": cursor} if cursor else {}
        query |= {"newest": "true"} if newest else {}
        query |= {"state": "promoted"} if settled else {}
        page = await service.page(group=group, limit=3, **query)
        assert len(page["transactions"]) == size
        found += page["transactions"]
        cursor = page["next_cursor"]
    assert cursor is None
    assert {each["id"] for each in found} == ids
    times = [each["prepared_at_ms"] for each in found]
    assert times == sorted(times, reverse=newest)


async def test_metrics_count_service_calls(service: Service, topic: str) -> None:
    group = unique("group")
    ids = [await service.prepare(Message(topic, b"%d" % n, b""), group=group) for n in range(3)]
    assert await service.metric("prepared_total", topic=topic) == 3
    assert await service.metric("pending", group=group) == 3
    await service.commit(ids[0])
    await service.act(ids[1], "rollback")
    await service.counts("promoted_total", 1, topic=topic)
    assert await service.metric("pending", group=group) == 1
    decided = {"group": group, "decision": "commit", "source": "operator"}
    assert await service.metric("decisions_total", **decided) == 1
    committed = {"operation": "commit", "status": "2xx"}
    assert await service.metric("http_requests_total", **committed) >= 1
    assert await service.metric("http_requests_total", operation="prepare", status="2xx") >= 3
    assert await service.metric("prepare_latency_seconds_count") >= 3
    await service.counts("event_loop_lag_seconds_count", 1)
    owned = await service.metric("owned_partitions")
    assert await service.metric("recovery_seconds_count") >= owned > 0


async def test_proxy_shows_newest_audit_despite_broken_record(service: Service) -> None:
    assert await service.metric("audit_last_success_timestamp_seconds", mode="batch") == 0
    for value in (b"\xff", _news(1000, lost=0, late=3)):
        await service.world.write_audit("batch", value)
    await service.counts("audit_drift", 3, kind="late")
    await service.world.write_audit("batch", _news(2000, lost=2, late=0))
    await service.counts("audit_drift", 2, kind="lost")
    assert await service.metric("audit_drift", kind="late") == 0
    assert await service.metric("audit_last_success_timestamp_seconds", mode="batch") == 2
    await service.world.write_audit("batch", None)

    async def no_alarm() -> bool:
        return await service.metric("audit_drift", kind="lost") == 0

    await until(no_alarm)


def _news(ended_ms: int, **drift: int) -> bytes:
    times = {"started_ms": 0, "ended_ms": ended_ms}
    return encode_news(
        AuditNews(run="r", mode="full", transactions=5, states={}, drift=drift, **times)
    )
