"""Answers to checks that would fill memory, never end, or contradict themselves."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable

import pytest

from tests.checkers import check_server
from tests.kit.http_answers import LOOPBACK, Serve, answering, ask, named, read_request, response
from tests.kit.http_api import memory_bytes
from txbroker.checkers.answers import read_answer
from txbroker.checkers.base import Answered, CheckCall, Unclear
from txbroker.checkers.http import HttpChannel, HttpChecks, HttpLimits

CLASS = 9
call, checks, serve = check_server.call, check_server.checks, check_server.serve

MIB = 1024 * 1024
ANSWER_MAX = 16 * MIB
"""The largest bound that a group can register: the worst for memory and time."""
GROWTH_MAX = 160 * MIB
"""How far one answer may make the process grow."""
SECONDS_MAX = 10.0


def repeated(piece: bytes, times: int = 2**31) -> Callable[[], AsyncIterator[bytes]]:
    async def pieces() -> AsyncIterator[bytes]:
        block = piece * max(1, 65_536 // len(piece))
        for _ in range(max(1, times * len(piece) // len(block))):
            yield block

    return pieces


def whole(raw: bytes) -> Callable[[], AsyncIterator[bytes]]:
    async def pieces() -> AsyncIterator[bytes]:
        yield raw

    return pieces


async def drip() -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n{"
    while True:
        await asyncio.sleep(0.01)
        yield b" "


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
ZEROS = gzip.compress(b"0" * 64 * MIB)
DEEP = b'{"decision": ' + b"[" * (8 * MIB)
BROAD = b'{"x": [' + b"[],{}," * (2 * MIB) + b'0], "decision": "yes"}'

LISTS = b"[" + b"[]," * (4 * MIB) + b"[]]"
MANY = {
    "a decision of millions of lists": b'{"decision": %b}' % LISTS,
    "an id of millions of lists": b'{"decision": "commit", "id": %b}' % LISTS,
    "hundreds of thousands of messages": (
        b'{"decision": "commit", "messages": [%b{"topic": "t", "value": ""}]}'
        % (b'{"topic":"t","value":""},' * 300_000)
    ),
    "a topic of millions of lists": (
        b'{"decision": "commit", "messages": [{"value": "v", "topic": %b}]}' % LISTS
    ),
}

BOMBS = {
    "1 GB with its length": (OK + b"content-length: 1073741824\r\n\r\n", repeated(b"x" * 65_536)),
    "1 GB without a length": (OK + b"\r\n", repeated(b" " * 65_536)),
    "1 GB in chunks": (CHUNKED, repeated(b"10000\r\n" + b" " * 65_536 + b"\r\n")),
    "chunks of one byte": (CHUNKED, repeated(b"1\r\nx\r\n")),
    "chunks with long extensions": (CHUNKED, repeated(b"1;" + b"e" * 60_000 + b"\r\nx\r\n")),
    "endless trailers": (CHUNKED + b"0\r\n", repeated(b"t: v\r\n")),
    "gzip of 64 MiB": (
        OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(ZEROS),
        whole(ZEROS),
    ),
    "gzip that is not said": (OK + b"content-length: %d\r\n\r\n" % len(ZEROS), whole(ZEROS)),
    "a million headers": (OK, repeated(b"h: v\r\n", 1_000_000)),
    "one endless header": (OK + b"h: ", repeated(b"v" * 65_536)),
    "an endless status line": (b"HTTP/1.1 200 ", repeated(b"O" * 65_536)),
    "a million interim answers": (b"", repeated(b"HTTP/1.1 103 Early\r\n\r\n", 1_000_000)),
    "deeply nested JSON": (OK + b"content-length: %d\r\n\r\n" % len(DEEP), whole(DEEP)),
    "millions of values": (OK + b"content-length: %d\r\n\r\n" % len(BROAD), whole(BROAD)),
    **{
        name: (OK + b"content-length: %d\r\n\r\n" % len(body), whole(body))
        for name, body in ((name, named(body)) for name, body in MANY.items())
    },
    "a slow drip": (b"", drip),
}


@pytest.mark.parametrize("case", BOMBS)
async def test_bomb_is_unclear_soon_and_costs_little(
    case: str, serve: Serve, call: CheckCall
) -> None:
    """Unclear within the time of the check; memory stays bounded."""
    head, pieces = BOMBS[case]
    checks = HttpChecks(guard=LOOPBACK, limits=HttpLimits(messages_max=1000))

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head)
        async for piece in pieces():
            writer.write(piece)
            await writer.drain()
        await reader.read()

    server = await serve(handler)
    channel = await checks.acquire("orders", server.url, answer_bytes_max=ANSWER_MAX)
    assert isinstance(channel, HttpChannel)
    loop = asyncio.get_running_loop()
    started_s, sizes = loop.time(), [memory_bytes()]
    watched = asyncio.create_task(watch_memory(sizes))
    result = await channel.ask(call, 2.0)
    sizes.append(memory_bytes())
    watched.cancel()
    channel.release()
    await checks.close()

    assert isinstance(result, Unclear)
    assert loop.time() - started_s < SECONDS_MAX
    assert max(sizes) - sizes[0] < GROWTH_MAX


async def watch_memory(sizes: list[int]) -> None:
    while True:
        sizes.append(memory_bytes())
        await asyncio.sleep(0.005)


# --- two answers in one ----------------------------------------------------------------------

ID = "0V3R7K2M5N8P1Q4S6T9W0X2Y4Z"
MESSAGE = '{"topic": "t", "value": "v"}'

AMBIGUOUS = {
    "two decisions": '{"decision": "rollback", "decision": "commit"}',
    "two equal decisions": '{"decision": "commit", "decision": "commit"}',
    "a decision with an escaped name": '{"decision": "rollback", "d\\u0065cision": "commit"}',
    "two unknown fields": '{"decision": "commit", "x": 1, "x": 2}',
    "two ids": f'{{"id": "{ID}", "decision": "commit", "id": "{ID}"}}',
    "two lists of messages": '{"decision": "commit", "messages": [], "messages": null}',
    "two times to ask again": '{"decision": "unknown", "ask_again_s": 1, "ask_again_s": 3600}',
    "a message with two topics": (
        '{"decision": "commit", "messages": [{"topic": "a", "topic": "b", "value": "v"}]}'
    ),
    "a message with two values": (
        '{"decision": "commit", "messages": [{"topic": "a", "value": "v", "value": null}]}'
    ),
    "a second message with two keys": (
        f'{{"decision": "commit", "messages": [{MESSAGE}, '
        '{"topic": "t", "key": "a", "key": "b", "value": "v"}]}'
    ),
    "two headers of one name in an object": (
        '{"decision": "commit", "messages": [{"topic": "t", "value": "v", '
        '"headers": {"a": "1", "a": "2"}}]}'
    ),
    "a header with two values": (
        '{"decision": "commit", "messages": [{"topic": "t", "value": "v", '
        '"headers": [["a", {"base64": "AA==", "base64": "AQ=="}]]}]}'
    ),
    "another transaction's id": '{"id": "0V3R7K2M5N8P1Q4S6T9W0X2Y4A", "decision": "commit"}',
    "another transaction's id, behind": '{"decision": "rollback", "id": "x"}',
    "its id in small letters": f'{{"id": "{ID.lower()}", "decision": "commit"}}',
    "an empty id": '{"id": "", "decision": "commit"}',
    "an id that is a number": '{"id": 1, "decision": "commit"}',
    "a list of ids": f'{{"id": ["{ID}"], "decision": "commit"}}',
}


@pytest.mark.parametrize("case", AMBIGUOUS)
async def test_contradictory_answer_is_unclear(
    case: str, serve: Serve, checks: HttpChecks, call: CheckCall
) -> None:
    """Unclear: no decision."""
    assert call.id == ID
    answer = AMBIGUOUS[case].encode()
    server = await serve(answering(response(answer if b'"id"' in answer else named(answer))))
    result = await ask(checks, server.url, call)
    assert isinstance(result, Unclear)
    assert "0V3R" not in result.detail


CLEAR = {
    "its own id": {"id": ID, "decision": "commit"},
    "the same key in two messages": {
        "id": ID,
        "decision": "commit",
        "messages": [{"topic": "t", "value": "v"}, {"topic": "t", "value": "v"}],
    },
    "two headers of one name in a list": {
        "id": ID,
        "decision": "commit",
        "messages": [{"topic": "t", "value": "v", "headers": [["a", "1"], ["a", "2"]]}],
    },
}


@pytest.mark.parametrize("case", CLEAR)
def test_unambiguous_answer_is_accepted(case: str) -> None:
    """Taken as the decision that it names."""
    assert isinstance(read_answer(json.dumps(CLEAR[case]).encode(), ID), Answered)


def test_message_values_are_not_interpreted() -> None:
    """`value_json` is sent byte for byte, even with repeated keys."""
    value = b'{"a": 1, "a": 2}'
    body = b'{"decision": "commit", "messages": [{"topic": "t", "value_json": %b}]}' % value
    result = read_answer(named(body), ID)
    assert isinstance(result, Answered)
    assert result.messages is not None
    assert result.messages[0].value == value
