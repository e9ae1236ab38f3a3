"""Actions in the console: previewed, then done, with author and reason on record."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.console.console_world import Reader, Seen, parked, pending, reader_of
from tests.kit.cluster import Proxies
from tests.kit.service import Service
from tests.kit.until import unique
from txbroker.contract.service import (
    Answer,
    Request,
    Run,
)
from txbroker.core.records import Message
from txbroker.errors import OwnerUnavailable
from txbroker.proxy.console import actions


async def confirmed(reader: Reader, asked: Seen, reason: str = "a test", **fields: str) -> Seen:
    return await reader.send(
        asked.url.path, {**asked.form("/actions/"), "reason": reason, **fields}
    )


# --- one -------------------------------------------------------------------------------------


async def test_transaction_is_committed_after_a_preview(service: Service, reader: Reader) -> None:
    topic = await service.topic()
    id = await service.prepare(Message(topic, b"k", b"v"))
    shown = await reader.open(f"/transactions/{id}")
    asked = await reader.open(shown.link("Commit…"))
    assert asked.main.one("h1").text == "Commit 1 transaction"
    assert "cannot be undone" in asked.text
    assert asked.listed() == [id]
    assert await service.state(id) == "pending"
    done = await confirmed(reader, asked, "in the books", by="Ada")
    assert (done.status, done.url.path) == (200, f"/transactions/{id}")
    await service.reaches(id, "promoted")
    record = await service.show(id)
    assert (record["source"], record["reason"]) == ("operator", "in the books")
    assert record["by"] == "Ada via console 127.0.0.1"
    assert len(await service.world.visible(topic)) == 1


async def test_author_is_remembered_for_the_next_form(service: Service, reader: Reader) -> None:
    first, second = await pending(service, 2)
    await reader.act(f"/actions/rollback?id={first}", reason="test", by="Grâce 😀")
    asked = await reader.open(f"/actions/rollback?id={second}")
    assert asked.form("/actions/")["by"] == "Grâce 😀"


async def test_check_is_requested(service: Service, reader: Reader) -> None:
    group = await service.group({"decision": "rollback"}, check_after_s=3600)
    (id,) = await pending(service, group=group)
    await reader.act(f"/actions/check?id={id}")
    await service.reaches(id, "rolled_back")


async def test_parked_transaction_is_revived(service: Service, reader: Reader) -> None:
    group, (id,) = await parked(service)
    service.desk.answers[group] = [{"decision": "rollback"}]
    await reader.act(f"/actions/revive?id={id}", reason="check mended")
    shown = await service.reaches(id, "rolled_back")
    assert shown["round"] == 2


async def test_transaction_decided_meanwhile_is_unchanged(service: Service, reader: Reader) -> None:
    (id,) = await pending(service)
    asked = await reader.open(f"/actions/commit?id={id}")
    await service.act(id, "rollback")
    done = await confirmed(reader, asked, "late")
    assert done.main.one("h1").text == "Nothing left to do"
    assert await service.state(id) == "rolled_back"
    again = await reader.open(f"/actions/commit?id={id}")
    assert "Nothing to do" in again.text
    assert again.root.all("form", action="/actions/commit") == []


# --- many ------------------------------------------------------------------------------------


async def test_only_matching_transactions_are_rolled_back(service: Service, reader: Reader) -> None:
    group, other = unique("group"), unique("group")
    ids, left = await pending(service, 12, group=group), await pending(service, 2, group=other)
    listed = await reader.open(f"/transactions?state=pending&group={group}")
    asked = await reader.open(listed.link("Roll back…"))
    assert asked.main.one("h1").text == "Roll back 12 transactions"
    assert len(set(asked.listed()) & set(ids)) == 10
    done = await confirmed(reader, asked)
    assert done.main.one("h1").text == "Rolled back 12 transactions"
    assert {await service.state(id) for id in ids} == {"rolled_back"}
    assert {await service.state(id) for id in left} == {"pending"}
    assert {(await service.show(id))["reason"] for id in ids} == {"a test"}


async def test_transaction_prepared_after_preview_is_unchanged(
    service: Service, reader: Reader
) -> None:
    group, topic = unique("group"), await service.topic()
    id = await service.prepare(Message(topic, b"k", b"v"), group=group)
    asked = await reader.open(f"/actions/rollback?state=pending&group={group}")
    late = await service.prepare(Message(topic, b"k", b"v"), group=group)
    done = await confirmed(reader, asked)
    assert await service.state(id) == "rolled_back"
    assert await service.state(late) == "pending"
    assert "More transactions match than the preview covered" in done.text


async def test_transaction_parked_after_preview_is_unchanged(
    service: Service, reader: Reader
) -> None:
    knows_not = {"decision": "unknown"}
    away = await service.group(503, attempts_max=1, timeout_s=0.1)
    here = await service.group(knows_not, attempts_max=1, timeout_s=0.1)
    topic = await service.topic()
    # Prepared before the previewed one, so the time of the prepare does not distinguish them.
    late = await service.prepare(Message(topic, b"k", b"v"), group=away)
    id = await service.prepare(Message(topic, b"k", b"v"), group=here)
    await service.reaches(id, "parked")
    asked = await reader.open(f"/actions/rollback?state=parked&topic={topic}")
    assert asked.listed() == [id]
    service.desk.answers[away] = [knows_not]
    await service.reaches(late, "parked")
    await confirmed(reader, asked)
    assert await service.state(id) == "rolled_back"
    assert await service.state(late) == "parked"


async def test_bulk_decision_excludes_pending(service: Service, reader: Reader) -> None:
    group, (id,) = await parked(service)
    (left,) = await pending(service, group=group, check_after_s=3600)
    asked = await reader.open(f"/actions/commit?group={group}")
    assert asked.listed() == [id]
    assert "Pending transactions are excluded" in asked.text
    await confirmed(reader, asked, state="")  # nor does a form that leaves the state out
    assert await service.state(id) in ("committed", "promoted")
    assert await service.state(left) == "pending"


async def test_bulk_action_is_bounded(
    service: Service, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "BULK_MAX", 3)
    group = unique("group")
    ids = await pending(service, 5, group=group)
    asked = await reader.open(f"/actions/rollback?state=pending&group={group}")
    assert asked.main.one("h1").text == "Roll back 3 transactions the first of more"
    await reader.act(f"/actions/rollback?state=pending&group={group}", reason="first")
    states = [await service.state(id) for id in ids]
    assert sorted(states) == ["pending"] * 2 + ["rolled_back"] * 3
    done = await reader.act(f"/actions/rollback?state=pending&group={group}", reason="rest")
    assert done.main.one("h1").text == "Rolled back 2 transactions"


async def test_failures_are_listed_and_the_rest_is_done(
    service: Service, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = unique("group")
    ids = await pending(service, 3, group=group)
    runs: Callable[[Sequence[Request]], Sequence[Run]] = service.proxy.cluster.runs

    async def away() -> Sequence[Answer]:
        return (OwnerUnavailable("its owner is away"),)

    def failing(requests: Sequence[Request]) -> Sequence[Run]:
        left = [n for n, request in enumerate(requests) if request.id != ids[1]]
        found = runs([requests[n] for n in left])
        return [
            *[Run([left[n] for n in run.numbers], run.answers) for run in found],
            *[Run((n,), away()) for n in range(len(requests)) if n not in left],
        ]

    monkeypatch.setattr(service.proxy.cluster, "runs", failing)
    done = await reader.act(f"/actions/rollback?state=pending&group={group}", reason="a test")
    assert done.main.one("h1").text == "Rolled back 2 of 3 transactions"
    assert done.listed() == [ids[1]]
    assert "its owner is away" in done.text
    assert [await service.state(id) for id in ids] == ["rolled_back", "pending", "rolled_back"]


async def test_untried_transactions_are_counted(
    service: Service, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "BULK_S", 0.0)
    group = unique("group")
    ids = await pending(service, 2, group=group)
    done = await reader.act(f"/actions/rollback?state=pending&group={group}", reason="a test")
    assert "2 transactions were not tried" in done.text
    assert {await service.state(id) for id in ids} == {"pending"}


async def test_any_proxy_acts_on_all_partitions(proxies: Proxies) -> None:
    one, _ = await proxies.add("one", "two")
    topic, group = await one.topic(), unique("group")
    ids = [await proxies.prepare_in(p, topic, one, group=group) for p in range(proxies.partitions)]
    async with reader_of(one.proxy.url) as reader:
        asked = await reader.open(f"/actions/commit?state=pending&group={group}")
        assert set(asked.listed()) == set(ids)
        late = await proxies.prepare_in(0, topic, one, group=group)
        done = await confirmed(reader, asked)
    assert done.main.one("h1").text == "Committed 4 transactions"
    for id in ids:
        await one.reaches(id, "promoted")
    assert await one.state(late) == "pending"


async def test_unknown_filter_is_refused_by_actions(service: Service, reader: Reader) -> None:
    group = unique("group")
    (id,) = await pending(service, group=group)
    path = f"/actions/rollback?state=pending&group={group}"
    assert (await reader.open(f"{path}&older_than_s=600")).status == 400
    done = await reader.act(path, reason="a test", older_than_s="600")
    assert done.status == 400
    assert "older_than_s" in done.text
    assert await service.state(id) == "pending"


# --- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["", "  ", "x" * 1001, "line\nbreak"])
async def test_decision_needs_a_valid_reason(service: Service, reader: Reader, reason: str) -> None:
    (id,) = await pending(service)
    done = await reader.act(f"/actions/commit?id={id}", reason=reason)
    assert done.status == 400
    assert "reason" in done.text
    assert await service.state(id) == "pending"


async def test_form_of_another_visitor_is_refused(service: Service, reader: Reader) -> None:
    (id,) = await pending(service)
    path = f"/actions/commit?id={id}"
    form = {**(await reader.open(path)).form("/actions/"), "reason": "mine"}
    forged = {name: value for name, value in form.items() if name != "form_secret"}
    assert (await reader.send("/actions/commit", forged)).status == 403
    assert (await reader.send("/actions/commit", {**form, "form_secret": "0" * 64})).status == 403
    async with reader_of(service.proxy.url) as other:
        # Without a cookie, then with another one.
        assert (await other.send("/actions/commit", form)).status == 403
        assert (await other.open(path)).status == 200
        assert (await other.send("/actions/commit", form)).status == 403
    assert await service.state(id) == "pending"
    assert (await reader.send("/actions/commit", form)).status == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
async def test_cross_site_form_is_refused(service: Service, reader: Reader, origin: str) -> None:
    (id,) = await pending(service)
    form = {**(await reader.open(f"/actions/commit?id={id}")).form("/actions/"), "reason": "x"}
    refused = await reader.send("/actions/commit", form, Origin=origin)
    assert refused.status == 403
    assert await service.state(id) == "pending"
    taken = await reader.send("/actions/commit", form, Origin=service.proxy.url)
    assert taken.status == 200


async def test_action_accepts_forms_only(service: Service, reader: Reader) -> None:
    (id,) = await pending(service)
    form = {**(await reader.open(f"/actions/commit?id={id}")).form("/actions/"), "reason": "x"}
    async with reader.http.post("/actions/commit", json=form) as answer:
        assert answer.status == 415
    for raw in (b"\xff", b"a=1&" * 60, b"x" * 70_000):
        kind = {"content-type": "application/x-www-form-urlencoded"}
        async with reader.http.post("/actions/commit", data=raw, headers=kind) as answer:
            assert answer.status in (400, 403, 413)
    assert (await reader.send("/actions/commit", {**form, "covered": "soon"})).status == 400
    assert (await reader.open("/actions/explode")).status == 400
    assert await service.state(id) == "pending"


async def test_preview_changes_nothing(service: Service, reader: Reader) -> None:
    group = unique("group")
    ids = await pending(service, 2, group=group)
    for action in ("commit", "rollback", "check", "revive"):
        assert (await reader.open(f"/actions/{action}?group={group}&reason=x")).status == 200
    assert {await service.state(id) for id in ids} == {"pending"}
