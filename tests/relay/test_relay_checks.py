"""Undecided rows are checked: by a function, or at a URL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.until import until
from tests.relay.world import Shop, with_transaction
from txbroker.checkers import attempts as attempts_of_checks
from txbroker.contract.checks import CheckRequest, Commit, NotYet
from txbroker.databases import DatabaseUnavailable
from txbroker.errors import ConfigurationError
from txbroker.relay import Decision, Message
from txbroker.sdk import parse_check, verify_webhook

SOON = {"check_after_s": 0, "check_interval_s": 0.05}


def final(request: CheckRequest) -> Commit:
    """Commit with another content."""
    return Commit(
        [Message(each.topic, each.key, b"7" + (each.value or b"")) for each in request.messages]
    )


class Once:
    """Answers "not yet" to the first check of each row, then commits."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, request: CheckRequest) -> object:
        self.asked.append((request.id, request.attempt))
        first = [id for id, _attempt in self.asked].count(request.id) == 1
        return NotYet(0.01) if first else Decision.COMMIT


ANSWERS: dict[str, tuple[Callable[..., Any], list[int], str]] = {
    "commit": (lambda request: Decision.COMMIT, [1, 2], "GLOBAL_COMMIT"),
    "roll back": (lambda request: Decision.ROLLBACK, [], "LOCAL_ROLLBACK"),
    "other content": (final, [71, 72], "GLOBAL_COMMIT"),
    "not yet": (Once(), [1, 2], "GLOBAL_COMMIT"),
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_check_decides(shop: Shop, answer: str) -> None:
    function, visible, state = ANSWERS[answer]
    shop.outbox.prepare(*shop.messages([1, 2]))
    async with shop.relay(check=function, **SOON):
        await until(lambda: shop.states() == {state: 2}, 20)
    assert shop.numbers() == visible
    if isinstance(function, Once):  # "not yet" uses no attempt
        assert {attempt for _id, attempt in function.asked} == {1}


async def test_young_rows_are_left_alone(sqlite_shop: Shop) -> None:
    shop, asked = sqlite_shop, list[CheckRequest]()
    shop.outbox.prepare(*shop.messages([1]))
    async with shop.relay(check=asked.append, check_after_s=3600, check_interval_s=0.05) as relay:
        shop.add([2])
        await relay.drain(20)
        await asyncio.sleep(0.3)  # several rounds of looks
    assert (asked, shop.states()) == ([], {"UNKNOWN": 1, "GLOBAL_COMMIT": 1})


@pytest.mark.parametrize("fault", ["raises", "unknown", "rubbish"])
async def test_a_row_is_given_up_after_fifteen_checks(sqlite_shop: Shop, fault: str) -> None:
    shop, attempts = sqlite_shop, list[int]()

    def check(request: CheckRequest) -> Any:
        attempts.append(request.attempt)
        if fault == "raises":
            raise ValueError("no database")
        return Decision.UNKNOWN if fault == "unknown" else "perhaps"

    prepared = shop.outbox.prepare(*shop.messages([1, 2]))
    async with shop.relay(check=check, check_after_s=0, check_interval_s=0.01):
        await until(lambda: shop.states() == {"MESSAGE_ERROR": 2}, 30)
        assert attempts == list(range(1, 16))
        ((cause,),) = shop.place.select("SELECT DISTINCT cause FROM txbroker_outbox")
        assert cause.startswith("undecided after 15 checks: ")
        with shop.place.transaction() as connection:  # it stays decidable
            with_transaction(connection)
            shop.outbox.decide(connection, prepared, Decision.COMMIT)
        await until(lambda: shop.states() == {"GLOBAL_COMMIT": 2}, 20)
    assert shop.numbers() == [1, 2]


async def test_outage_of_the_checks_database_uses_no_attempt(
    sqlite_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts_of_checks, "LATER_FIRST_S", 0.01)
    shop, attempts = sqlite_shop, list[int]()

    def check(request: CheckRequest) -> Decision:
        attempts.append(request.attempt)
        if len(attempts) < 20:
            raise DatabaseUnavailable("shop: connection refused")
        return Decision.COMMIT

    shop.outbox.prepare(*shop.messages([1]))
    async with shop.relay(check=check, check_after_s=0, check_interval_s=0.01):
        await until(lambda: shop.states() == {"GLOBAL_COMMIT": 1}, 30)
    assert attempts == [1] * 20


@pytest.mark.rule(52)
async def test_an_attempt_is_stored_before_its_question(sqlite_shop: Shop) -> None:
    shop, stored = sqlite_shop, list[int]()

    def check(request: CheckRequest) -> Decision:
        rows = shop.place.select("SELECT check_attempts FROM txbroker_outbox")
        stored.append(int(rows[0][0]))
        return Decision.COMMIT

    shop.outbox.prepare(*shop.messages([1]))
    async with shop.relay(check=check, **SOON):
        await until(lambda: shop.states() == {"GLOBAL_COMMIT": 1}, 20)
    assert stored == [1]


# --- a URL -----------------------------------------------------------------------------------


async def test_check_url_is_called_with_a_signature(sqlite_shop: Shop) -> None:
    shop, heard = sqlite_shop, list[tuple[dict[str, str], bytes]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = [line.partition(": ") for line in head.splitlines()[1:] if line]
        headers = {name.lower(): value for name, _colon, value in lines}
        body = await reader.readexactly(int(headers["content-length"]))
        heard.append((headers, body))
        answer = json.dumps({"id": json.loads(body)["id"], "decision": "commit"}).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(answer)
            + answer
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    prepared = shop.outbox.prepare(*shop.messages([1]))
    url = f"http://127.0.0.1:{port}/check"
    async with server, shop.relay(check_url=url, check_secret="s" * 32, **SOON):
        await until(lambda: shop.states() == {"GLOBAL_COMMIT": 1}, 20)
    assert shop.numbers() == [1]
    (headers, body), *_more = heard
    verify_webhook("s" * 32, headers, body)
    check = parse_check(body)
    assert (check.id, check.messages[0].value) == (prepared.ids[0], b"1")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"check_url": "ftp://host/"}, "check_url"),
        ({"check_url": "http://host/", "check": print}, "not both"),
        ({"check_secret": "x"}, "is for check_url"),
        ({"check": 7}, "is a function"),
        ({"shards": 3}, "1, 2, 4, 8 or 16"),
        ({"keep_s": -1}, "keep_s is at least 0"),
        ({"retries_max": 0}, "retries_max"),
        ({"chekc": print}, "unknown option of Relay"),
    ],
)
async def test_wrong_options_are_refused(
    sqlite_shop: Shop, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        async with sqlite_shop.relay(**options):
            raise AssertionError("it started")
