"""What a proxy promises about check-back: in memory and on a real Kafka."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from tests.kit.service import Json, Service
from tests.kit.until import unique
from txbroker.core.records import Message
from txbroker.errors import NotPending
from txbroker.sdk import Decision

COMMIT: Json = {"decision": "commit"}
ROLLBACK: Json = {"decision": "rollback"}
UNKNOWN: Json = {"decision": "unknown"}
NEVER_S = 3600


async def pending(service: Service, group: str, value: bytes = b"v", **fields: float) -> str:
    """Prepare one message for a new topic."""
    return await service.prepare(Message(await service.topic(), b"k", value), group=group, **fields)


async def seen(service: Service, id: str) -> list[bytes | None]:
    """Return the visible values of a transaction's topic."""
    shown = await service.show(id)
    return await service.values(shown["messages"][0]["topic"])


# --- answers ---------------------------------------------------------------------------------


async def test_check_describes_its_transaction_and_commits(service: Service) -> None:
    group = await service.group(COMMIT, attempts_max=7)
    id = await pending(service, group)
    shown = await service.reaches(id, "promoted")
    (call, *_) = service.asked(group)
    assert (call["id"], call["group"], call["reason"]) == (id, group, "due")
    assert (call["attempt"], call["attempts_max"]) == (1, 7)
    assert [message["value"] for message in call["messages"]] == ["v"]
    assert (shown["source"], shown["attempts"]) == ("check", 1)
    assert shown["by"].endswith(f"/check/{group}")
    assert await seen(service, id) == [b"v"]


async def test_a_checks_rollback_is_never_visible(service: Service) -> None:
    id = await pending(service, await service.group(ROLLBACK))
    await service.reaches(id, "rolled_back")
    assert await seen(service, id) == []


@pytest.mark.rule(20)
async def test_unacceptable_final_content_decides_nothing(service: Service) -> None:
    topic = await service.topic(max_message_bytes="2000")
    draft = {"topic": topic, "key": "k"}
    ahead_ms = round(time.time() * 1000) + 7_200_000
    group = await service.group(
        {"decision": "commit", "messages": [{**draft, "value": "x" * 3000}]},
        {"decision": "commit", "messages": [{**draft, "value": "v", "timestamp_ms": ahead_ms}]},
        {"decision": "commit", "messages": [{**draft, "value": "final", "headers": {"a": "b"}}]},
    )
    id = await service.prepare(Message(topic, b"k", b"draft"), group=group)
    shown = await service.reaches(id, "promoted")
    assert shown["attempts"] == 3
    large, late, _ = [check["outcome"] for check in shown["checks"]]
    assert large.startswith("commit, but the message takes up to ")
    assert late.startswith("commit, but timestamp_ms is ")
    (record,) = await service.visible(topic)
    assert (record.value, record.headers[1:]) == (b"final", (("a", b"b"),))


async def test_final_content_for_other_topics_decides_nothing(service: Service) -> None:
    other = [{"topic": await service.topic(), "value": "v"}]
    group = await service.group({"decision": "commit", "messages": other}, ROLLBACK)
    id = await pending(service, group)
    shown = await service.reaches(id, "rolled_back")
    assert shown["checks"][0]["outcome"] == "commit with messages for other topics"


async def test_unknown_is_asked_again(service: Service) -> None:
    group = await service.group(UNKNOWN, UNKNOWN, COMMIT)
    id = await pending(service, group)
    shown = await service.reaches(id, "promoted")
    assert [call["attempt"] for call in service.asked(group)] == [1, 2, 3]
    times = [check["at_ms"] for check in shown["checks"]]
    assert all(later - earlier >= 100 for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize("odd", [500, 404, 204, {}, {"decision": "maybe"}, {"decision": None}])
async def test_empty_answer_counts_as_attempt(service: Service, odd: Json | int) -> None:
    group = await service.group(odd, COMMIT)
    id = await pending(service, group)
    assert (await service.reaches(id, "promoted"))["attempts"] == 2


async def test_not_yet_uses_no_attempt(service: Service) -> None:
    group = await service.group({"decision": "unknown", "ask_again_s": 1}, COMMIT)
    id = await pending(service, group, check_interval_s=NEVER_S)
    shown = await service.reaches(id, "promoted")
    first, second = shown["checks"]
    assert (first.get("counts", True), second.get("counts", True)) == (False, True)
    assert shown["attempts"] == 1
    assert second["at_ms"] - first["at_ms"] >= 1000


async def test_decision_precedes_answer_in_flight(service: Service) -> None:
    group = await service.group(ROLLBACK)
    held = service.desk.held[group] = asyncio.Event()
    id = await pending(service, group, check_interval_s=NEVER_S)
    await service.asked_times(group, 1)
    await service.commit(id)
    held.set()
    after = await pending(service, group)
    await service.reaches(after, "rolled_back")
    assert (await service.show(id))["decision"] == "commit"
    assert await seen(service, id) == [b"v"]


# --- the end of patience ---------------------------------------------------------------------


async def test_fifteen_unknowns_park(service: Service) -> None:
    group = await service.group(UNKNOWN, timeout_s=0.2)
    id = await pending(service, group)
    shown = await service.reaches(id, "parked")
    assert [call["attempt"] for call in service.asked(group)] == list(range(1, 16))
    assert shown["attempts"] == shown["attempts_max"] == 15
    assert [each["id"] for each in await service.listed(state="parked", group=group)] == [id]
    assert await service.metric("parked", group=group) == 1
    with pytest.raises(NotPending):
        await service.act(id, "check")
    assert await service.commit(id) == {"id": id, "decision": "commit", "state": "promoted"}
    assert await seen(service, id) == [b"v"]
    assert len(service.asked(group)) == 15


async def test_transaction_has_its_own_check_policy(service: Service) -> None:
    group = await service.group(UNKNOWN, attempts_max=5, timeout_s=30)
    id = await pending(service, group, check_attempts_max=2, check_timeout_s=0.2)
    shown = await service.reaches(id, "parked")
    assert [call["attempts_max"] for call in service.asked(group)] == [2, 2]
    assert shown["attempts"] == shown["attempts_max"] == 2
    id = await pending(service, group, check_interval_s=NEVER_S)
    assert (await service.show(id))["attempts_max"] == 5


async def test_revived_transaction_begins_new_round(service: Service) -> None:
    group = await service.group(*[UNKNOWN] * 6, COMMIT, attempts_max=3, timeout_s=0.1)
    id = await pending(service, group)
    await service.reaches(id, "parked")
    for turn in (2, 3):
        assert (await service.act(id, "revive", reason="again"))["state"] == "pending"
        state = "parked" if turn == 2 else "promoted"
        assert (await service.reaches(id, state))["round"] == turn
    assert [call["attempt"] for call in service.asked(group)] == [1, 2, 3, 1, 2, 3, 1]
    assert await seen(service, id) == [b"v"]


async def test_only_parked_is_revived_and_only_pending_checked(service: Service) -> None:
    group = await service.group(ROLLBACK)
    id = await pending(service, group, check_after_s=NEVER_S)
    with pytest.raises(NotPending):
        await service.act(id, "revive")
    await service.commit(id)
    for what in ("revive", "check"):
        with pytest.raises(NotPending):
            await service.act(id, what)
    assert service.asked(group) == []


# --- unreachable groups -----------------------------------------------------------------------


async def test_a_returned_check_uses_no_attempt(service: Service) -> None:
    groups = [await service.group(status, COMMIT) for status in (429, 502, 503)]
    ids = [await pending(service, group) for group in groups]
    for id, group in zip(ids, groups, strict=True):
        shown = await service.reaches(id, "promoted")
        assert shown["attempts"] == 1
        assert [check.get("counts", True) for check in shown["checks"]] == [False, True]
        assert len(service.asked(group)) == 2


async def test_an_unreachable_group_is_never_parked(service: Service) -> None:
    group = await service.group(COMMIT, check_url="http://127.0.0.1:9/", attempts_max=1)
    id = await pending(service, group)
    await service.counts("checks_total", 2, group=group, outcome="unreachable")
    shown = await service.show(id)
    assert (shown["state"], shown["attempts"], shown.get("checks", [])) == ("pending", 0, [])
    assert await service.metric("unreachable_groups") >= 1
    await service.act(id, "rollback")


async def test_group_is_asked_at_once_when_session_opens(service: Service) -> None:
    group = unique("group")
    id = await pending(service, group, check_after_s=0)
    unreachable = {"group": group, "outcome": "unreachable"}
    await service.counts("checks_total", 2, **unreachable)
    async with service.producer(group, check=lambda _: Decision.COMMIT):
        shown = await service.reaches(id, "promoted")
    # The third attempt would have been two seconds later at least.
    assert await service.metric("checks_total", **unreachable) < 3
    assert (shown["source"], shown["attempts"]) == ("check", 1)


async def test_a_new_check_url_is_asked_at_once(service: Service) -> None:
    group = await service.group(COMMIT, check_url="http://127.0.0.1:9/")
    id = await pending(service, group)
    await service.counts("checks_total", 2, group=group, outcome="unreachable")
    url = f"{service.desk.url}/check/{group}"
    await service.call("PUT", f"/v1/groups/{group}", {"check_url": url})
    await service.reaches(id, "promoted")


async def test_a_slow_group_delays_no_other(service: Service) -> None:
    slow, quick = await service.group(ROLLBACK), await service.group(COMMIT)
    held = service.desk.held[slow] = asyncio.Event()
    ids = [await pending(service, slow) for _ in range(12)]
    await service.asked_times(slow, 1)
    for id in [await pending(service, quick) for _ in range(3)]:
        await service.reaches(id, "promoted")
    assert {await service.state(id) for id in ids} == {"pending"}
    held.set()
    for id in ids:
        await service.reaches(id, "rolled_back")


# --- asked for -------------------------------------------------------------------------------


async def test_a_check_can_be_pulled_forward(service: Service) -> None:
    group = await service.group(COMMIT)
    id = await pending(service, group, check_after_s=NEVER_S)
    assert (await service.act(id, "check"))["state"] == "pending"
    await service.reaches(id, "promoted")
    assert [call["reason"] for call in service.asked(group)] == ["asked"]


async def test_requested_checks_are_a_second_apart(service: Service) -> None:
    group = await service.group(UNKNOWN, check_interval_s=NEVER_S)
    id = await pending(service, group, check_after_s=NEVER_S)
    for count in (1, 2):
        await service.act(id, "check")
        await service.asked_times(group, count)
    first, second = (await service.show(id))["checks"]
    assert second["at_ms"] - first["at_ms"] >= 1000


async def test_the_last_check_is_never_pulled_forward(service: Service) -> None:
    group = await service.group(UNKNOWN, attempts_max=2, check_interval_s=NEVER_S)
    id = await pending(service, group, check_after_s=NEVER_S)
    await service.act(id, "check")
    await service.asked_times(group, 1)
    with pytest.raises(NotPending):
        await service.act(id, "check")
    assert (await service.show(id))["attempts"] == 1
