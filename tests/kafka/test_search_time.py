"""A search without any index reads a million half messages in bounded pages and time."""

from __future__ import annotations

import time

from tests.kit.kafka import KafkaHarness, now_ms
from txbroker.core.encoding import encode_half
from txbroker.core.records import Half, Message
from txbroker.core.routing import make_id
from txbroker.core.terms import Terms
from txbroker.proxy.partition.scan import MEMORY_DONE, PAGE_S, search_half

COUNT, BATCH = 1_000_000, 5_000
LIMIT_S = 20.0


async def test_million_records_are_searched_in_time(world: KafkaHarness) -> None:
    door = await world.door(partitions=1)
    half, at_ms = door.partition(0).half, now_ms()
    for first in range(0, COUNT, BATCH):
        records = []
        for number in range(first, first + BATCH):
            message = Message("orders", b"order-%d" % number, b"x" * 20, partition=0)
            records += encode_half(Half(make_id(0, at_ms, number), "shop", (message,)))
        await half.append(records)
    terms = Terms(topic="orders", key=b"order-17")
    cursor, found, pages, read, longest_s = MEMORY_DONE, [], 0, 0, 0.0
    began_s = time.monotonic()
    while cursor is not None:
        page_began_s = time.monotonic()
        page = await search_half(half, terms, cursor)
        longest_s = max(longest_s, time.monotonic() - page_began_s)
        found += [match.id for match in page.matches]
        pages, read, cursor = pages + 1, read + page.records, page.next
    took_s = time.monotonic() - began_s
    assert found == [make_id(0, at_ms, 17)]
    assert read == COUNT
    assert pages >= 50
    assert took_s < LIMIT_S
    assert longest_s < PAGE_S + 2
