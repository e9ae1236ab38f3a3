"""A search without any index reads a million records in bounded pages and time."""

from __future__ import annotations

import time

from tests.kit.kafka import KafkaHarness, now_ms
from txbroker.core.encoding import encode_contents, encode_half, encode_marker
from txbroker.core.records import RECORD_VERSION, Half, Marker, MarkerKind, Message, Record
from txbroker.core.routing import make_id
from txbroker.core.terms import SearchTerms
from txbroker.proxy.partition.scan import PAGE_S, Cursor, Layer, search_topic

COUNT, BATCH = 1_000_000, 5_000
"""Records, half of them half messages, the others their markers."""
LIMIT_S = 20.0


async def test_million_records_are_searched_in_time(world: KafkaHarness) -> None:
    door = await world.door(partitions=1)
    logs, at_ms = door.partition(0), now_ms()
    final = b"final-17"
    for first in range(0, COUNT // 2, BATCH):
        halves: list[Record] = []
        markers: list[Record] = []
        for number in range(first, first + BATCH):
            message = Message("orders", b"order-%d" % number, b"x" * 20, partition=0)
            half = Half(make_id(0, at_ms, number), "shop", (message,))
            halves += encode_half(half)
            contents = int(number == 17)
            marker = Marker(RECORD_VERSION, MarkerKind.COMMIT, half.id, number, contents=contents)
            markers.append(encode_marker(marker))
            if contents:
                markers += encode_contents(half, [Message("orders", final, b"", partition=0)])
        await logs.half.append(halves)
        await logs.op.append(markers)
    found, pages, read, took_s, longest_s = [], 0, 0, 0.0, 0.0
    for layer, key in ((Layer.HALF, b"order-17"), (Layer.OP, final)):
        cursor: Cursor | None = Cursor()
        while cursor is not None:
            began_s = time.monotonic()
            terms = SearchTerms(topic="orders", key=key)
            page = await search_topic(logs.half, logs.op, layer, terms, cursor)
            page_s = time.monotonic() - began_s
            took_s, longest_s = took_s + page_s, max(longest_s, page_s)
            found += [match.id for match in page.matches]
            pages, read, cursor = pages + 1, read + page.records, page.next
    assert found == [make_id(0, at_ms, 17)] * 2
    assert read == COUNT + 1
    assert pages >= 50
    assert took_s < LIMIT_S
    assert longest_s < PAGE_S + 2
