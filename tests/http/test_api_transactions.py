"""Every row of the HTTP table that is about transactions, as a client meets it."""

from __future__ import annotations

import base64

import pytest

from tests.kit.http_api import Api, transaction
from txbroker.contract.service import DecideRequest, PrepareRequest
from txbroker.core.records import Decision, Message, Source
from txbroker.errors import KafkaUnavailable, OwnerUnavailable, TooOld

UNKNOWN_ID = "00" * 13


async def test_repeated_prepare_answers_201_then_200(api: Api) -> None:
    first = await api.call("POST", "/v1/transactions", transaction(dedup_key="k1"))
    again = await api.call("POST", "/v1/transactions", transaction(dedup_key="k1"))

    assert first == (201, {"id": first[1]["id"], "state": "pending"})
    assert again == (200, first[1])


async def test_prepare_with_other_content_is_a_conflict(api: Api) -> None:
    await api.call("POST", "/v1/transactions", transaction(dedup_key="k1"))
    status, answer = await api.call(
        "POST",
        "/v1/transactions",
        transaction(dedup_key="k1", messages=[{"topic": "payments", "value": "43"}]),
    )

    assert (status, answer["error"]["code"]) == (409, "id_conflict")


async def test_prepare_after_decision_answers_current_state(api: Api) -> None:
    id = await api.prepare(dedup_key="k1")
    await api.call("POST", f"/v1/transactions/{id}/commit", {})
    again = await api.call("POST", "/v1/transactions", transaction(dedup_key="k1"))

    assert again == (200, {"id": id, "state": "committed", "decision": "commit"})


async def test_prepare_passes_every_field(api: Api) -> None:
    body = transaction(
        order_key="o", check_after_s=1, check_interval_s=2.5, check_attempts_max=3,
        check_timeout_s=1,
        messages=[
            {
                "topic": "a", "key": "k", "value_base64": base64.b64encode(b"\xff").decode(),
                "headers": [["h", "1"], ["h", {"base64": "/w=="}], ["n", None]],
                "partition": 3, "timestamp_ms": 5,
            },
            {"topic": "b", "key_base64": "/w==", "value": None, "headers": {"x": "y"}},
            {"topic": "c", "value_json": {"n": 1.10}},
        ],
    )  # fmt: skip
    status, _ = await api.call("POST", "/v1/transactions", body)

    assert status == 201
    (request,) = api.service.requests
    assert request == PrepareRequest(
        group="orders",
        order_key="o",
        check_after_s=1.0,
        check_interval_s=2.5,
        check_attempts_max=3,
        check_timeout_s=1.0,
        messages=(
            Message("a", b"k", b"\xff", (("h", b"1"), ("h", b"\xff"), ("n", None)), 3, 5),
            Message("b", b"\xff", None, (("x", b"y"),)),
            Message("c", None, b'{"n": 1.1}'),
        ),
    )


async def test_null_of_an_optional_field_is_absent(api: Api) -> None:
    body = transaction(
        id=None, dedup_key=None, order_key=None, check_after_s=None, check_interval_s=None
    )
    assert (await api.call("POST", "/v1/transactions", body))[0] == 201


async def test_ids_are_accepted_in_either_case(api: Api) -> None:
    id = await api.prepare(id="7zzzzzzzzzzzzzzzzzzzzzzzzz")
    assert id == "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"
    assert (await api.call("GET", f"/v1/transactions/{id.lower()}"))[0] == 200
    assert (await api.call("POST", f"/v1/transactions/{id.lower()}/commit", {}))[0] == 200


@pytest.mark.parametrize(
    ("verb", "contrary", "state"),
    [("commit", "rollback", "committed"), ("rollback", "commit", "rolled_back")],
)
async def test_first_decision_stands(api: Api, verb: str, contrary: str, state: str) -> None:
    id = await api.prepare()
    first = await api.call("POST", f"/v1/transactions/{id}/{verb}", {"group": "orders"})
    again = await api.call("POST", f"/v1/transactions/{id}/{verb}", {"group": "orders"})
    status, refused = await api.call("POST", f"/v1/transactions/{id}/{contrary}", {})

    assert first == again == (200, {"id": id, "decision": verb, "state": state})
    assert status == 409
    assert refused["error"]["code"] == "already_decided"
    assert (refused["error"]["decision"], refused["error"]["state"]) == (verb, state)
    assert refused["error"]["id"] == id


@pytest.mark.parametrize("verb", ["commit", "rollback"])
async def test_decision_needs_no_body(api: Api, verb: str) -> None:
    id = await api.prepare()
    assert (await api.call("POST", f"/v1/transactions/{id}/{verb}"))[0] == 200


async def test_commit_passes_every_field(api: Api) -> None:
    id = await api.prepare()
    body = {
        "group": "orders", "reason": "because", "wait": "promoted",
        "messages": [{"topic": "payments", "value": "final"}],
    }  # fmt: skip
    answer = await api.call("POST", f"/v1/transactions/{id}/commit", body)

    assert answer == (200, {"id": id, "state": "promoted", "decision": "commit"})
    assert api.service.requests[-1] == DecideRequest(
        id=id,
        decision=Decision.COMMIT,
        group="orders",
        messages=(Message("payments", None, b"final"),),
        reason="because",
        source=Source.PRODUCER,
        by="http 127.0.0.1",
        wait=True,
        wait_s=30.0,
    )


async def test_decision_without_group_counts_as_operators(api: Api) -> None:
    id = await api.prepare()
    await api.call("POST", f"/v1/transactions/{id}/rollback", {"reason": "by hand"})
    _, view = await api.call("GET", f"/v1/transactions/{id}")

    assert (view["source"], view["reason"]) == ("operator", "by hand")


@pytest.mark.parametrize("verb", ["commit", "rollback", "check", "revive"])
async def test_author_and_address_are_recorded(api: Api, verb: str) -> None:
    id = await api.prepare()
    if verb == "revive":
        api.service.park(id)
    who = "ann@laptop via http 127.0.0.1"
    path = f"/v1/transactions/{id}/{verb}"
    status, _ = await api.call("POST", path, {"by": "ann@laptop", "reason": "seen"})

    assert status == 200
    asked = api.service.requests[-1]
    if isinstance(asked, DecideRequest):
        assert (asked.by, asked.reason, asked.source) == (who, "seen", Source.OPERATOR)
    else:
        assert asked == (verb, id, who, "seen")


@pytest.mark.parametrize("by", ["a\nb", "\x1b[2J", "x" * 201, 7])
async def test_malformed_author_is_refused(api: Api, by: object) -> None:
    id = await api.prepare()
    status, answer = await api.call("POST", f"/v1/transactions/{id}/commit", {"by": by})

    assert (status, answer["error"]["code"]) == (400, "bad_request")
    assert api.service.views[id].decision is None


async def test_another_groups_decision_is_refused(api: Api) -> None:
    id = await api.prepare()
    status, answer = await api.call("POST", f"/v1/transactions/{id}/commit", {"group": "other"})

    assert (status, answer["error"]["code"], answer["error"]["id"]) == (403, "wrong_group", id)


@pytest.mark.parametrize("verb", ["commit", "rollback", "check", "revive"])
async def test_unknown_ids_are_404_and_malformed_ones_400(api: Api, verb: str) -> None:
    unknown = await api.call("POST", f"/v1/transactions/{UNKNOWN_ID}/{verb}")
    malformed = await api.call("POST", f"/v1/transactions/nonsense/{verb}")

    assert (unknown[0], unknown[1]["error"]["code"]) == (404, "not_found")
    assert (malformed[0], malformed[1]["error"]["code"]) == (400, "bad_id")


@pytest.mark.parametrize("path", ["", f"/{UNKNOWN_ID}/commit"])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (TooOld(id=UNKNOWN_ID), 410, "too_old"),
        (OwnerUnavailable(id=UNKNOWN_ID), 503, "owner_unavailable"),
        (KafkaUnavailable("no broker answers"), 503, "kafka_unavailable"),
    ],
)
async def test_failure_has_its_status_and_code(
    api: Api, failure: Exception, status: int, code: str, path: str
) -> None:
    api.service.failure = failure
    body = {} if path else transaction(id=UNKNOWN_ID)
    async with api.client.post(f"{api.url}/v1/transactions{path}", json=body) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (status, code)
        assert answer.headers.get("Retry-After") == ("1" if status == 503 else None)


async def test_check_and_revive(api: Api) -> None:
    id = await api.prepare()
    checked = await api.call("POST", f"/v1/transactions/{id}/check", {"reason": "now"})
    early, _ = await api.call("POST", f"/v1/transactions/{id}/revive")
    api.service.park(id)
    parked, refused = await api.call("POST", f"/v1/transactions/{id}/check")
    revived = await api.call("POST", f"/v1/transactions/{id}/revive", {"reason": "found"})

    assert checked == revived == (200, {"id": id, "state": "pending"})
    assert (early, parked) == (409, 409)
    assert (refused["error"]["code"], refused["error"]["state"]) == ("not_pending", "parked")
    assert ("revive", id, "http 127.0.0.1", "found") in api.service.requests


async def test_bodies_are_only_shown_on_demand(api: Api) -> None:
    id = await api.prepare(
        messages=[
            {"topic": "a", "key": "k", "value": "v", "headers": {"h": "1"}},
            {"topic": "b", "value_base64": "/w=="},
            {"topic": "c", "value": None},
        ]
    )
    _, bare = await api.call("GET", f"/v1/transactions/{id}")
    _, full = await api.call("GET", f"/v1/transactions/{id}?bodies=1")

    assert bare["messages"] == [{"topic": topic, "partition": 0} for topic in "abc"]
    assert full["messages"] == [
        {"topic": "a", "partition": 0, "key": "k", "value": "v", "headers": [["h", "1"]]},
        {"topic": "b", "partition": 0, "value_base64": "/w=="},
        {"topic": "c", "partition": 0, "value": None},
    ]
    assert (bare["state"], bare["prepared_at_ms"]) == ("pending", 1_700_000_000_000)


async def test_listing_pages_and_filters(api: Api) -> None:
    ids = [await api.prepare(group=group) for group in ("a", "b", "a")]
    _, page = await api.call("GET", "/v1/transactions?group=a&limit=1")
    query = f"group=a&limit=1&cursor={page['next_cursor']}&state=pending&topic=x&older_than_s=0"
    _, rest = await api.call("GET", f"/v1/transactions?{query}")

    assert [view["id"] for view in page["transactions"]] == [ids[0]]
    assert [view["id"] for view in rest["transactions"]] == [ids[2]]
    assert rest["next_cursor"] is None
    assert api.service.requests[-1].older_than_s == 0.0  # type: ignore[attr-defined]


async def test_unknown_topic_is_named(api: Api) -> None:
    status, answer = await api.call(
        "POST", "/v1/transactions", transaction(messages=[{"topic": "missing", "value": ""}])
    )
    assert status == 422
    assert answer["error"]["code"] == "unknown_topic"
    assert answer["error"]["topic"] == "missing"


async def test_status_of_promoted_transaction_is_shown(api: Api) -> None:
    id = await api.prepare()
    await api.call("POST", f"/v1/transactions/{id}/commit", {"wait": "promoted"})
    _, view = await api.call("GET", f"/v1/transactions/{id}")
    assert (view["state"], view["decision"], view["decided_at_ms"]) == (
        "promoted", "commit", 1_700_000_000_001,
    )  # fmt: skip
