"""Class 10: rubbish over HTTP and in sessions. Every answer is typed, and the proxy serves on."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest
from msgspec import structs

from tests.kit.logs import START_MS, half_of, id_of, marker_of, new_ledger, with_fields
from tests.kit.memory import MemoryHarness
from tests.kit.service import FakeEndpoint, Service
from tests.security.installation import TABLES, TOKENS, Installation
from txbroker.contract import frames as wire
from txbroker.core.decoding import (
    Malformed,
    NewerVersion,
    decode_checkpoint,
    decode_half,
    decode_kept,
    decode_marker,
    decode_skip,
    is_content,
)
from txbroker.core.encoding import (
    CLAIM_KEY,
    PROGRESS_KEY,
    encode_claim,
    encode_contents,
    encode_half,
    encode_kept,
    encode_marker,
    encode_progress,
    encode_skip,
)
from txbroker.core.records import (
    RECORD_VERSION,
    Anchor,
    Checkpoint,
    Claim,
    Decision,
    Message,
    ParkedCopy,
    Record,
    State,
)
from txbroker.core.routing import make_id
from txbroker.core.snapshot import chunk_key, chunks_in, closing_key, find_whole, segments_in
from txbroker.door.own_topics import (
    CheckpointScan,
    encode_layout,
    find_layout,
    is_layout,
    is_owners,
)
from txbroker.door.writing import Fenced
from txbroker.errors import ConfigurationError, request_errors
from txbroker.proxy.http.api import operations

CLASS = 10
SEED = 19
LONG = bool(os.environ.get("TXBROKER_TEST_LONG"))
CASES = 100_000 if LONG else 3_000
"""Of each kind."""
AT_ONCE = 32
PIECES: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, 1e308, "", "shop", "bank", "\x00", "\u202e", "A" * 5000, [], {}, [[]],
    {"topic": "shop.orders"}, {"topic": "txbroker.half"}, [{"topic": "shop.orders", "value": "x"}],
    "commit", "promoted", "0" * 26, {"a": {"a": {"a": {}}}}, b"\xff\xfe",
)  # fmt: skip
FIELDS = ("group", "messages", "id", "order_key", "dedup_key", "reason", "by", "wait", "check_url")


def body_of(dice: random.Random) -> bytes:
    """Return a body: JSON of odd fields, maybe cut off, or mere bytes."""
    if dice.random() < 0.1:
        return dice.randbytes(dice.randrange(200))
    given = {field: dice.choice(PIECES) for field in dice.sample(FIELDS, dice.randrange(6))}
    if dice.random() < 0.7:
        given["group"] = dice.choice(("shop", "bank"))
    if dice.random() < 0.5:
        given["messages"] = [{"topic": "shop.orders", "value": dice.choice(("x", 7, None))}]
    raw = msgspec.json.encode({name: v for name, v in given.items() if not isinstance(v, bytes)})
    return raw[: dice.randrange(len(raw))] if dice.random() < 0.1 else raw


async def test_http(site: Installation, record_property: Any) -> None:
    dice = random.Random(SEED)
    declared = operations()
    site.allow(*(name for name in TABLES if name != "revoked"))
    own = [await site.prepared("shop") for _ in range(8)]
    theirs = [await site.prepared("bank") for _ in range(8)]
    ids = [*own, *theirs, "0" * 26, "x", "%00", make_id(3, 1, 1)]
    seen: set[str] = set()
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        operation = dice.choice(declared)
        path = operation.path.format(
            id=dice.choice(ids), group=dice.choice(("shop", "bank", "%2e"))
        )
        by = dice.choice(("shop", "shop", "shop", "bank", "viewer", "revoked"))
        headers = {
            "authorization": f"Bearer {TOKENS[by]}" if dice.random() < 0.95 else "Bearer \xff",
            "content-type": "application/json" if dice.random() < 0.9 else "text/xml",
        }
        data = body_of(dice) if operation.changes else None
        url = dice.choice(site.urls)
        async with (
            gate,
            site._http.request(operation.method, url + path, data=data, headers=headers) as answer,
        ):
            raw = await answer.read()
            assert answer.status < 500 or operation.name == "ready", (operation.name, data, raw)
            if answer.status >= 400:
                error = msgspec.json.decode(raw)["error"]
                assert error["code"] in request_errors(), error
                seen.add(error["code"])

    await asyncio.gather(*(one() for _ in range(CASES)))
    # What one team may do it may do to its own; the other's is as it was.
    for id in theirs:
        view = await site.view(id)
        assert view.get("by") in (None, "", "bank"), view
    assert {"unauthorized", "not_permitted", "bad_request", "unsupported_media_type"} <= seen
    assert (await site.get("/healthz")).status == 200
    record_property("result", "typed errors, none above 499; nothing of another team was changed")


REQUEST_LINES = (
    b"", b"GET", b"GET /", b"GET / HTTP/1.1", b"POST /v1/transactions HTTP/9.9", b"\x16\x03\x01",
    b"PRI * HTTP/2.0", b"GET /v1/session HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET http:// HTTP/1.1",
)  # fmt: skip
HEADER_LINES = (
    b"Host: localhost", b"Host: evil.example", b"Content-Length: -1", b"Content-Length: 9" * 3,
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: xchunked", b"Upgrade: websocket",
    b"Connection: upgrade", b"Sec-WebSocket-Key: x", b": x", b"x", b"\x00: \x00", b"Expect: x",
    b"Authorization: Bearer the-token-of-shop", b"Content-Type: application/json",
)  # fmt: skip


async def test_bytes_on_the_socket(site: Installation, record_property: Any) -> None:
    dice = random.Random(SEED)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        lines = [dice.choice(REQUEST_LINES), *dice.choices(HEADER_LINES, k=dice.randrange(6))]
        data = b"\r\n".join(lines) + b"\r\n\r\n" + dice.randbytes(dice.randrange(64))
        address = urlsplit(dice.choice(site.urls))
        async with gate:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                writer.write(data)
                writer.write_eof()
                async with asyncio.timeout(30):
                    raw = await reader.read()
                assert not raw.startswith(b"HTTP/1.1 5"), (data, raw)
            except ConnectionError:
                pass  # dropped, as such a caller may be
            finally:
                writer.close()

    await asyncio.gather(*(one() for _ in range(CASES // 3)))
    assert (await site.get("/healthz")).status == 200
    record_property("result", "answered with a 4xx or dropped; the proxy serves on")


def frame_of(dice: random.Random, ids: list[str]) -> bytes:
    """Return a frame: odd operations, maybe cut off, or mere bytes."""
    if dice.random() < 0.2:
        return dice.randbytes(dice.randrange(100))
    id = dice.choice(ids)
    operations: list[Any] = [
        wire.Decide(dice.randrange(9), id, dice.choice(list(Decision))),
        wire.AskEarly(1, id, "\x00" * dice.randrange(3)),
        wire.CheckAnswer(dice.randrange(99), dice.choice([*Decision, None])),
        wire.Prepare(2, id, (Message(dice.choice(("shop.orders", "", "txbroker.op"))),)),
        wire.Prepare(3, make_id(0, 1, dice.getrandbits(32)), ()),
        wire.Hello(1, "shop", "again"),
        wire.Drain(),
        {"type": "decide", "call": "x"},
        dice.choice(PIECES[:6]),
    ]
    raw = wire.encode_frame(dice.choices(operations, k=dice.randrange(1, 5)))
    return raw[: dice.randrange(len(raw))] if dice.random() < 0.2 else raw


async def test_frames_of_sessions(site: Installation, record_property: Any) -> None:
    dice = random.Random(SEED)
    theirs = [await site.prepared("bank") for _ in range(8)]
    ids = [*theirs, "0" * 26, "", "x" * 26, make_id(999, 1, 1)]
    left = [CASES // 3]

    async def one_session() -> None:
        while left[0] > 0:
            async with site.socket("shop", dice.choice(site.urls)) as socket:
                assert isinstance(await socket.hello("shop"), wire.Welcome)
                while left[0] > 0:
                    left[0] -= 1
                    try:
                        await socket.socket.send_bytes(frame_of(dice, ids))
                    except (ConnectionError, aiohttp.ClientError):
                        break
                    if socket.socket.closed or dice.random() < 0.1:
                        break

    await asyncio.gather(*(one_session() for _ in range(AT_ONCE)))
    for id in theirs:
        view = await site.view(id)
        assert (view["state"], view.get("by")) in (("pending", None), ("pending", ""))
    async with site.socket("bank") as socket:
        assert isinstance(await socket.hello("bank"), wire.Welcome)
    record_property("result", "nothing foreign was changed; new sessions are taken")


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
async def test_a_frame_before_the_hello(
    site: Installation, size: int, record_property: Any
) -> None:
    for url in site.urls:
        async with site.socket("shop", url) as socket:
            await socket.socket.send_bytes(bytes(size))
            failure = await socket.next()
            assert isinstance(failure, wire.Failure)
            assert failure.code == "bad_request"
            assert await socket.ended()
    record_property("result", "bad_request, and the session's end")


# --- noise in the own topics ---------------------------------------------------------------------

RECORDS = 100_000 if LONG else 10_000
SEEDS = range(8 if LONG else 2)
"""One test takes all of them, so that a long run has the same rows as a short one."""
MINE = Claim(RECORD_VERSION, "mine", "one", "")
PROGRESS = Checkpoint(RECORD_VERSION, "mine", 5, 5, Anchor(4, START_MS), Anchor(4, START_MS))
OWN = ("half", "op", "checkpoint", "parked", "groups", "audit")


def templates() -> list[Record]:
    half = half_of(id_of(1), Message("t", b"k", b"v", (("h", b"x"),), 0, 7), Message("u", None))
    half = with_fields(
        half,
        messages=tuple(structs.replace(each, partition=0) for each in half.messages),
        order_key="o",
        dedup_key="d",
    )
    kept = [ParkedCopy(half, 0, START_MS, state) for state in State]
    return [
        *encode_half(half),
        *encode_contents(half, half.messages),
        *[record for each in kept for record in encode_kept(each)],
        *[
            encode_marker(marker_of(kind, id_of(1)))
            for kind in ("commit", "rollback", "check", "park", "revive", "later", "returned")
        ],
        encode_marker(structs.replace(marker_of("commit", id_of(1)), contents=2)),
        encode_claim(MINE),
        encode_progress(PROGRESS),
        encode_layout(4),
        encode_skip("op", Record(b"k", b"v", offset=3), "me", "why"),
        Record(closing_key(0), b'{"v": 1, "chunks": 3, "segments": ["x"]}'),
        Record(chunk_key(0, 3), b"\x93\x01\x02\x03"),
        Record(b"orders", b'{"check_url": "http://127.0.0.1:1"}'),
    ]


TEMPLATES = templates()
TEXTS = (b"", b"\x00", b"\xff\xfe", b"{", b"[" * 100_000, b'{"v":1e999}', b'{"v":99}', b"9" * 5000)
KEYS = (
    CLAIM_KEY,
    PROGRESS_KEY,
    b"skip/op/3",
    b"\tlayout",
    closing_key(0),
    closing_key(1) + b"/" + b"9" * 30,
    closing_key(1) + b"/" + b"9" * 5000,
    id_of(1).encode(),
    f"{id_of(1)}/0".encode(),
    None,
)


def noise(random: Random) -> Record:
    """Return any record: bytes of any kind, or one of ours with something changed."""
    record = random.choice(TEMPLATES)
    if random.random() < 0.2:
        record = Record(some_bytes(random), some_bytes(random), tuple(headers(random)))
    for _ in range(random.randrange(3)):
        record = changed(random, record)
    return record


def changed(random: Random, record: Record) -> Record:
    what = random.randrange(6)
    if what == 0:
        return structs.replace(record, value=spoilt(random, record.value))
    if what == 1:
        return structs.replace(record, key=random.choice(KEYS))
    if what == 2:
        return structs.replace(record, value=some_bytes(random))
    if what == 3:
        return structs.replace(record, key=spoilt(random, record.key))
    found = list(record.headers)
    if what == 4 or not found:
        found[random.randrange(len(found) + 1) :] = headers(random)
    else:
        at = random.randrange(len(found))
        name, value = found[at]
        found[at] = (name, spoilt(random, value) if random.random() < 0.8 else None)
    return structs.replace(record, headers=tuple(found))


def spoilt(random: Random, data: bytes | None) -> bytes | None:
    """Return bytes with one changed, taken out or put in."""
    if not data:
        return some_bytes(random)
    at = random.randrange(len(data))
    new = random.choice((b"", bytes([random.randrange(256)]), b"9", b"-", b'"', b"}"))
    return data[:at] + new + data[at + random.randrange(2) :]


def some_bytes(random: Random) -> bytes | None:
    if random.random() < 0.3:
        return random.choice((None, *TEXTS))
    return random.randbytes(random.randrange(60))


def headers(random: Random) -> Iterator[tuple[str, bytes | None]]:
    for _ in range(random.randrange(4)):
        name = random.choice(("txb-v", "txb-id", "txb-seq", "txb-kept", "txb-check", "", "x"))
        yield name, some_bytes(random)


DECODERS: tuple[Callable[[Record], object], ...] = (
    decode_half,
    decode_marker,
    decode_checkpoint,
    decode_kept,
    decode_skip,
    is_layout,
    is_owners,
    is_content,
)


def test_decoders_raise_typed_errors_only() -> None:
    """Typed errors alone."""
    random = Random(0)
    for _ in range(RECORDS):
        record = noise(random)
        for decode in DECODERS:
            try:
                decode(record)
            except (Malformed, NewerVersion):
                pass
            except Exception as error:
                raise AssertionError(f"{decode.__name__} of {record!r}"[:2000]) from error


def test_ledger_ignores_any_noise() -> None:
    """Void or stepped over; the transactions beside it settle."""
    for seed in SEEDS:
        a_ledger_goes_on(Random(seed))


def a_ledger_goes_on(random: Random) -> None:
    ledger = new_ledger()
    ids = [id_of(number) for number in range(1000, 1050)]

    def apply(half: bool, *records: Record) -> None:
        skipped = random.choice((0, 0, 3))
        for record in records:
            position = ledger.half_position if half else ledger.op_position
            offset = position + skipped
            stored = structs.replace(
                record, offset=offset, skipped=skipped, timestamp_ms=START_MS, producer=-1
            )
            (ledger.apply_half if half else ledger.apply_op)(stored)
            skipped = 0

    for id in ids:
        for _ in range(RECORDS // len(SEEDS) // len(ids)):
            apply(random.random() < 0.5, noise(random))
        apply(True, *encode_half(half_of(id, Message("t", b"k", b"v", partition=0))))
        apply(False, encode_marker(marker_of("commit", id)))
    assert [ledger.index.transactions[id].state for id in ids] == [State.COMMITTED] * len(ids)


def test_claim_reads_any_noise() -> None:
    """Set aside; the claim comes through."""
    random = Random(0)
    for _ in range(RECORDS // 50):
        scan = CheckpointScan("x-0")
        records = [structs.replace(noise(random), producer=-1) for _ in range(48)]
        ours = [encode_progress(PROGRESS), encode_claim(MINE)]
        at = random.randrange(len(records))
        records[at:at] = [structs.replace(each, producer=7) for each in ours]
        scan.note([structs.replace(each, offset=n) for n, each in enumerate(records)])
        try:
            claimed = scan.claimed(MINE)
        except Fenced:
            # A forged, decodable claim.
            assert [r for r in records[at + 2 :] if r.key == CLAIM_KEY]
            continue
        assert claimed.progress is not None
        find_whole(claimed.snapshots)
        segments_in(claimed.snapshots)
        assert all(0 <= chunks_in(slot, claimed.snapshots) <= 200_000 for slot in range(2))
        try:
            find_layout(records)
        except ConfigurationError:
            assert not any(is_layout(record) for record in records)


def harmless(random: Random, topic: str) -> Record:
    """Return noise for a topic that no newer version could have written, and that forges nothing:
    what reads as ours counts as ours."""
    while True:
        record = noise(random)
        if len(record.value or b"") + len(record.key or b"") > 50_000:
            continue
        if not forged(record, topic):
            return record


def forged(record: Record, topic: str) -> bool:
    decoders: dict[str, Sequence[Callable[[Record], object]]] = {
        "half": (decode_half,),
        "op": (decode_marker, decode_half),
        "parked": (decode_kept,),
        "checkpoint": (decode_checkpoint,),
    }
    for decode in decoders.get(topic, ()):
        try:
            decode(record)
        except NewerVersion:
            return topic != "checkpoint"
        except Malformed:
            continue
        return True
    return topic == "groups" and is_layout(record)


@pytest.mark.parametrize(
    "committed", [None, True, False], ids=["without a transaction", "committed", "aborted"]
)
async def test_proxy_survives_noise_in_all_its_topics(committed: bool | None) -> None:
    """Set aside; no partition stops, transactions settle."""
    for seed in SEEDS:
        await a_proxy_goes_on(Random(seed), committed)


async def a_proxy_goes_on(random: Random, committed: bool | None) -> None:
    world = MemoryHarness()
    rounds, together = (40, 50) if LONG else (8, 25)
    async with FakeEndpoint().serve() as desk:
        service = Service(world, desk)
        await service.start()
        try:
            topic = await service.topic()
            expected, counted = [], 0.0
            for number in range(rounds):
                for name in OWN:
                    for partition in range(1 if name in ("groups", "audit") else 2):
                        records = [harmless(random, name) for _ in range(together)]
                        if name == "groups" and committed is not None:
                            continue  # its followers in memory know no transactions
                        await world.foreign(
                            world.name(name), partition, *records, committed=committed
                        )
                for one in range(4):
                    value = b"%d-%d" % (number, one)
                    id = await service.prepare(Message(topic, value, value))
                    assert (await service.commit(id))["state"] == "promoted"
                    expected.append(value)
                # Each process counts the records it read, and a stop stores the position.
                counted += await service.metric("foreign_records_total", topic="half")
                if number % 2:
                    await service.restart()
                assert await service.owned() == {0, 1}
            assert await service.values(topic) == expected
            assert counted > 0 or not committed
        finally:
            await service.stop()
            await world.close()
