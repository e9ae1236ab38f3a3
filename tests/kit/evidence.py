"""The contents of an installation's topics, compared with the answers of its proxies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from urllib.parse import quote

from tests.faults.judge import Judge
from tests.kit.fleet import Fleet
from tests.kit.proxies import ProxyProcess
from tests.kit.topic_reader import read_all, read_topics
from tests.kit.until import until
from tests.kit.workload import Recorder, Shop
from txbroker.errors import OwnerUnavailable

_PAGE = 37


async def listed(proxy: ProxyProcess) -> dict[str, str]:
    """Return the state of everything that one proxy lists as not settled, page by page.

    A list that fails with `owner_unavailable` is read again: a shorter one is never an answer.
    """

    async def whole() -> list[dict[str, str]] | None:
        found: list[dict[str, str]] = []
        cursor = ""
        try:
            while True:
                page = await proxy.call("GET", f"/v1/transactions?limit={_PAGE}{cursor}")
                found.append({t["id"]: t["state"] for t in page["transactions"]})
                if page["next_cursor"] is None:
                    return found
                cursor = f"&cursor={quote(page['next_cursor'])}"
        except OwnerUnavailable:
            return None

    pages = await until(whole)
    together = {id: state for page in pages for id, state in page.items()}
    assert len(together) == sum(map(len, pages)), "listed twice"
    return together


async def claims(proxy: ProxyProcess) -> Counter[int]:
    """Return how often each partition was claimed so far, as far as compaction has left it."""
    names = [f"{proxy.prefix}.checkpoint"]
    found = await asyncio.to_thread(read_topics, proxy.bootstrap, names)
    return Counter(record.partition for record in found if record.key == b"claim")


async def convict(
    fleet: Fleet, recorder: Recorder, topics: Sequence[str], shop: Shop | None = None
) -> Judge:
    """Judge an installation at rest: only undecided transactions may be left, and every proxy must
    list exactly those in the topics."""
    first = fleet.proxies[0]
    read = await asyncio.to_thread(read_all, first.bootstrap, first.prefix, topics)
    judge = Judge(recorder.history, read, shop.rows() if shop else (), settled=False)
    found = judge.judge()
    assert not found, "\n".join(map(str, found[:5]))
    held = judge.unsettled()
    assert "committed" not in held.values(), "committed, neither visible nor refused"
    for proxy in fleet.proxies:
        assert await listed(proxy) == held
    return judge
