"""A proxy that hung for longer than its session wakes up after its successor's claim, with
promotion transactions and calls in flight: not a byte of them may become visible."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from tests.faults.judge import Rec
from tests.kit.fleet import PARTITIONS, Fleet, claims, convict, owned_by, web_load
from tests.kit.proxies import Json, ProxyProcess
from tests.kit.topic_reader import read_all
from tests.kit.until import DEADLINE_S, unique, until
from tests.kit.workload import Recorder
from txbroker.core.routing import make_id
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import NotFound, RequestError

LANES = 24
LETTERS = 80
BEFORE, AFTER = (150, 600), 100
"""How many calls are made before a proxy hangs (between these), and while it does."""
ROUNDS = 5 if os.environ.get("TXBROKER_TEST_LONG") else 1


@pytest.fixture
async def fleet(kafka: EmbeddedKafka) -> AsyncIterator[Fleet]:
    """Two proxies without checks: only calls and promotion transactions have effects."""
    async with Fleet(kafka.bootstrap, 2) as made:
        yield made


Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def lines_to(proxy: ProxyProcess) -> list[Line]:
    """Open connections while the proxy still takes them: what hangs has only a short queue."""
    address = urlsplit(proxy.url)
    return [await asyncio.open_connection(address.hostname, address.port) for _ in range(LETTERS)]


class Letter:
    """A call that lies in a proxy's socket before the proxy can read it."""

    def __init__(self, line: Line, what: str, id: str = "") -> None:
        self.what = what
        self.id = id
        self._reader, self._writer = line

    async def post(self, proxy: ProxyProcess, body: Json) -> None:
        """Hand the call to the system on which the proxy hangs."""
        path = f"/v1/transactions/{self.id}/{self.what}" if self.id else "/v1/transactions"
        text = json.dumps(body).encode()
        host = urlsplit(proxy.url).netloc
        self._writer.write(
            f"POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n".encode()
            + text
        )
        await self._writer.drain()

    async def answer(self) -> tuple[int, Json]:
        """Return status and body."""
        async with asyncio.timeout(DEADLINE_S):
            head, _, body = (await self._reader.read()).partition(b"\r\n\r\n")
        self._writer.close()
        return int(head.split()[1]), json.loads(body)


async def posted(
    hung: ProxyProcess, lines: Sequence[Line], topic: str, decided: dict[str, str]
) -> list[Letter]:
    """Write to a proxy that hangs: the same decision as the standing one, the contrary, and
    prepares."""
    letters = []
    left = list(lines)
    for number, (id, decision) in enumerate(decided.items()):
        letters.append(Letter(left.pop(), decision if number % 3 == 0 else _contrary(decision), id))
        await letters[-1].post(hung, {"group": "web"})
    for number, line in enumerate(left):
        message = {"topic": topic, "key": f"letter-{number}", "value": "letter"}
        letters.append(Letter(line, "prepare"))
        body = {"group": "web", "messages": [message], "check_after_s": 600}
        await letters[-1].post(hung, body)
    return letters


def _contrary(decision: str) -> str:
    return "rollback" if decision == "commit" else "commit"


def standing(recorder: Recorder) -> dict[str, str]:
    """Return the decisions that were acknowledged, by id."""
    calls = recorder.history.calls
    return {c.id: c.what for c in calls if c.result == "ok" and c.what != "prepare"}


async def read_to_the_end(proxy: ProxyProcess) -> None:
    """Have the owners read half to an end that is asked for now: what a replaced proxy has stored
    there shows, which they look for once a second by themselves."""
    for partition in range(PARTITIONS):
        with pytest.raises(NotFound):
            await proxy.show(make_id(partition, round(time.time() * 1000), random.getrandbits(64)))


async def rest(proxy: ProxyProcess, recorder: Recorder) -> None:
    """Wait until nothing is in flight."""
    await read_to_the_end(proxy)
    for left in await proxy.unsettled():
        if left["state"] == "pending":
            # No client knows the id of a prepare stored without an answer.
            with suppress(RequestError), recorder.call("rollback", "", left["id"]):
                await proxy.act(left["id"], "rollback")
    await proxy.all_settled()


async def work_until_it_hangs(
    fleet: Fleet, hung: ProxyProcess, topic: str, recorder: Recorder, fate: random.Random
) -> None:
    """Load both proxies, let one hang in the middle of it, and go on with the other until all is
    at rest."""
    (other,) = (proxy for proxy in fleet.proxies if proxy is not hung)
    over = asyncio.Event()
    urls = fleet.urls
    fates = [random.Random(f"{fate.random()}") for _ in range(LANES)]
    working = asyncio.gather(
        *[
            # With a short timeout, as one proxy hangs.
            web_load(unique("lane"), urls, topic, recorder, own, over=over, timeout_s=1)
            for own in fates
        ]
    )
    try:
        await more_calls(recorder, fate.randint(*BEFORE))
        hung.pause()
        await fleet.taken_over(other)
        urls.remove(hung.url)
        await more_calls(recorder, AFTER)
        over.set()
        await working
    finally:
        working.cancel()
    await rest(other, recorder)


async def more_calls(recorder: Recorder, count: int) -> None:
    """Wait until `count` more calls have been answered."""

    def answered() -> int:
        return sum(call.result == "ok" for call in recorder.history.calls)

    wanted = answered() + count

    await until(lambda: answered() >= wanted)


def check_answers(
    letters: Sequence[Letter], answers: Sequence[tuple[int, Json]], decided: dict[str, str]
) -> set[str]:
    """A proxy that was replaced answers right or not at all; returns the ids that it prepared."""
    prepared = set()
    for letter, (status, answer) in zip(letters, answers, strict=True):
        if letter.what == "prepare":
            assert status in (201, 503), answer
            prepared |= {str(answer["id"])} if status == 201 else set()
        elif status != 503:
            assert status == (200 if letter.what == decided[letter.id] else 409), answer
    return prepared


async def test_replaced_proxy_makes_no_byte_visible(fleet: Fleet) -> None:
    topic = await fleet.proxies[0].topic(2)
    recorder = Recorder()
    fate = random.Random(os.environ.get("TXBROKER_TEST_SEED", random.random()))
    written: set[str] = set()
    for _ in range(ROUNDS):
        hung, other = fate.sample(fleet.proxies, 2)
        stays, goes = set(await owned_by(other)), set(await owned_by(hung))
        claimed = await claims(other)
        lines = await lines_to(hung)
        await work_until_it_hangs(fleet, hung, topic, recorder, fate)
        taken = await claims(other)
        assert {p for p in taken if taken[p] > claimed[p]} >= goes
        assert {p: taken[p] for p in stays} == {p: claimed[p] for p in stays}
        before = await asyncio.to_thread(read_all, other.bootstrap, other.prefix, [topic])
        decided = standing(recorder)
        newest = dict(list(decided.items())[-LETTERS * 3 // 4 :])
        letters = await posted(hung, lines, topic, newest)
        hung.resume()
        answers = await asyncio.gather(*[letter.answer() for letter in letters])
        written |= check_answers(letters, answers, newest)
        # It notices, rejoins and takes its share.
        await fleet.whole(fleet.proxies)
        await other.all_settled("none")
        after = await asyncio.to_thread(read_all, other.bootstrap, other.prefix, [topic])
        assert in_order(after.targets) == in_order(before.targets)
        assert in_order(after.parked) == in_order(before.parked)
        for id in written & set(await ids_pending(other)):
            with recorder.call("commit", "", id):
                await hung.act(id, "commit", wait="promoted")
    # A prepare that was answered 503 may have been stored.
    await rest(fleet.proxies[0], recorder)
    judge = await convict(fleet, recorder, [topic])
    assert written <= set(judge.visible)
    assert judge.unsettled() == {}


def in_order(records: Sequence[Rec]) -> list[Rec]:
    """Sort records by place: partitions are read side by side, in any order."""
    return sorted(records, key=lambda record: (record.topic, record.partition, record.offset))


async def ids_pending(proxy: ProxyProcess) -> list[str]:
    """Return the undecided transactions."""
    return [t["id"] for t in await proxy.unsettled() if t["state"] == "pending"]
