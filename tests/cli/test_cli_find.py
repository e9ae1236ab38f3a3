"""`txbroker tx find` and `tx trace`: what happened to order 4711?"""

from __future__ import annotations

import click
import pytest

from tests.cli.cli_stub import Asked, Reply, Stub
from tests.cli.terminals import Run
from tests.kit.cli import Call
from tests.kit.until import unique
from txbroker.cli.client import ApiClient


def test_order_is_found_and_traced(there: Call) -> None:
    topic, key = unique("topic"), unique("order")
    sent = there("send", topic, "v", "--key", key, "-H", "kind=order", "--wait")
    id = sent.out.strip()
    there("send", topic, "v", "--key", "other", "--decision", "none")
    for terms in (
        ["--topic", topic, "--key", key],
        ["--header", "kind=order", "--topic", topic, "--since", "1h", "--until", "2999-01-01"],
        [f"{topic}/0@0"],
        [id],
        [id.lower()],
    ):
        rows = there("tx", "find", *terms, "-o", "ndjson", "--columns", "id,state")
        assert rows.out == f'{{"id": "{id}", "state": "promoted"}}\n', terms
    assert len(there("tx", "find", "--topic", topic, "-o", "json").json) == 2
    story = there("tx", "trace", id).out
    for words in ("prepared", "record txbroker.half/", "record txbroker.op/", f"{topic}/0@0"):
        assert words in story
    nothing = there("tx", "find", "--topic", topic, "--key", "nothing")
    assert (nothing.code, nothing.out) == (0, "")
    assert nothing.err.startswith("Nothing was found in ")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "name what to find"),
        (["'; DROP TABLE --"], "other characters than transaction ids"),
        (["<script>@1"], "no place of a record"),
        (["t/0@99999"], "does not exist"),
        (["--key", "k" * 10_000], "expected `str` of length <= 4096"),
        (["--header", "novalue"], "give it as name=value"),
        (["--since", "1h", "--until", "2h"], "the time range is empty"),
        (["--since", "yesterday"], "is no time"),
        (["--since", "9999-99-99"], "is no time"),
        (["0" * 26], "no such transaction"),
        (["0" * 60_000], "an id has 26 characters"),
    ],
)
def test_useless_terms_are_a_sentence(there: Call, arguments: list[str], why: str) -> None:
    wrong = there("tx", "find", *arguments)
    assert wrong.code in (1, 2)
    assert why in wrong.err


def pages(stub: Stub, count: int, size: int = 1) -> None:
    """Let the proxy answer with `size` transactions on each of so many pages."""
    rows = [stub.rows[id] for id in stub.add(count * size)]

    def answer(asked: Asked) -> Reply | None:
        if asked.path != "/v1/search":
            return None
        at = int(asked.query.get("cursor", 0))
        return 200, {
            "transactions": rows[at * size : (at + 1) * size],
            "next_cursor": str(at + 1) if at + 1 < count else None,
            "done": (at + 1) / count,
            "records": 1000,
            "unread": 0,
        }

    stub.answer = answer


@pytest.mark.parametrize(
    ("limit", "where"),
    [(3, "1,000 records, 25%"), (4, "1,000 records, 25%"), (15, "4,000 records"), (16, "")],
)
def test_limit_stops_search_and_says_where(call: Call, stub: Stub, limit: int, where: str) -> None:
    pages(stub, 4, 4)
    arguments = ["--key", "k", "--limit", limit, "--columns", "id", "--url", stub.url]
    found = call("tx", "find", *arguments)
    assert found.out.split() == ["ID", *list(stub.rows)[:limit]]
    assert (f"It stopped at {limit} after {where}" in found.err) is bool(where)


@pytest.mark.parametrize("pauses", [0, 3])
def test_search_outlasts_a_take_over(
    call: Call, stub: Stub, monkeypatch: pytest.MonkeyPatch, pauses: int
) -> None:
    monkeypatch.setattr("txbroker.cli.client.PAUSES_S", (0.01,) * pauses)
    pages(stub, 4)
    inner, refused = stub.answer, [2] * 3

    def answer(asked: Asked) -> Reply | None:
        if refused and asked.query.get("cursor") == "2":
            refused.pop()
            return 503, {"error": {"code": "owner_unavailable", "message": "it moves"}}
        return inner(asked)

    stub.answer = answer
    found = call("tx", "find", "--key", "k", "-o", "json", "--url", stub.url)
    known = list(stub.rows)[: 4 if pauses else 2]
    assert [row["id"] for row in found.json] == known
    if pauses:
        assert (found.code, found.err) == (0, "")
    else:
        assert found.code == 1
        assert "The search ended after 2,000 records, 50% of all.\nError: it moves" in found.err


def test_terminal_keeps_its_columns_from_page_to_page(stub: Stub, on_terminal: Run) -> None:
    pages(stub, 3)
    for number, row in enumerate(stub.rows.values()):
        row["group"] = "g" * 12 * (number + 1)
    shown = on_terminal("tx", "find", "--key", "k", "--url", stub.url, width=90)
    assert shown.end() == 0
    assert "100%" in shown.text
    titles, *rows = [click.unstyle(line).split() for line in shown.screen if line.strip()]
    rows = [row for row in rows if row[:2] != ["Left", "out"]]
    assert [row[:2] for row in rows] == [
        [id, "g" * 12 * number] for number, id in enumerate(stub.rows, 1)
    ]
    assert {len(row) for row in rows} == {len(titles)}


def test_user_stops_search_and_keeps_what_was_found(
    call: Call, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages(stub, 4)
    inner = ApiClient.get
    calls: list[object] = []

    def get(self: ApiClient, *path: str, **query: object) -> object:
        calls.append(query)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return inner(self, *path, **query)

    monkeypatch.setattr(ApiClient, "get", get)
    found = call("tx", "find", "--key", "k", "-o", "json", "--url", stub.url)
    assert [row["id"] for row in found.json] == list(stub.rows)[:2]
    assert "You stopped after 2,000 records, 50% of all" in found.err


def test_unknown_attempts_are_no_zero(call: Call, stub: Stub) -> None:
    (id,) = stub.add(1, state="promoted")
    stub.rows[id] |= {"attempts": None, "attempts_max": None, "round": None}
    stub.rows[id] |= {"gaps": ["decider and reason: gone"], "read_back": True}
    listed = call("tx", "list", "--state", "settled", "--columns", "attempts", "--url", stub.url)
    assert listed.out.split() == ["ATTEMPTS", "-"]
    story = call("tx", "show", id, "--url", stub.url).out
    assert "decider and reason: gone" in story
    assert "None" not in story
    assert "attempts" not in story
