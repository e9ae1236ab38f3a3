"""Check-backs find their group at any proxy, while proxies die and leave.

Nothing here is decided by its producer: every transaction is prepared over plain HTTP at any
proxy, and what becomes of it is known to an SDK session at another one, or to a check URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest
from aiohttp import web

from tests.faults.judge import Asked
from tests.kit.fleet import Fleet, convict
from tests.kit.http_calls import attempted, calling, listening
from tests.kit.proxies import ProxyProcess
from tests.kit.until import until
from tests.kit.workload import Recorder
from txbroker.embedded import EmbeddedKafka
from txbroker.sdk import CheckRequest, Decision, Limits, Message, NotYet, TransactionalProducer

LANES, EACH = 5, 16
GROUPS = ("home", "everywhere", "url", "never", "later")
ATTEMPTS = 3
"""Attempts after which a transaction of the group `never` parks."""


@pytest.fixture
async def fleet(kafka: EmbeddedKafka) -> AsyncIterator[Fleet]:
    """Three proxies."""
    async with Fleet(kafka.bootstrap, 3) as made:
        yield made


class Truth:
    """Answers checks with the outcome of each transaction, sometimes only the second time."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.answered: Counter[str] = Counter()

    def answer(self, id: str, token: str, group: str, attempt: int) -> str:
        """Return `commit`, `rollback`, `unknown` or `not yet`, and write it down."""
        draw = hashlib.sha256(token.encode()).digest()
        first = self.answered[id] == 0
        self.answered[id] += 1
        decision = "commit" if draw[0] % 4 else "rollback"
        if group == "never" or (first and draw[1] % 4 == 0):
            decision = "unknown"
        elif first and draw[1] % 4 == 1:
            decision = "not yet"
        self._recorder.history.asked.append(Asked(id, time.time(), decision, attempt))
        return decision

    def check(self, request: CheckRequest) -> Decision | NotYet:
        """The SDK's check function."""
        (token,) = (value for name, value in request.messages[0].headers if name == "token")
        given = (token or b"").decode()
        decision = self.answer(request.id, given, request.group, request.attempt)
        return NotYet(1.0) if decision == "not yet" else Decision(decision)

    async def post(self, request: web.Request) -> web.Response:
        """Serve the check URL. Some calls are refused, and some answers are lost."""
        asked = await request.json()
        token = dict(asked["messages"][0]["headers"])["token"]
        fate = (hashlib.sha256(token.encode()).digest()[2] + self.answered[asked["id"]]) % 8
        if fate == 0:
            # By contract: not handled. The attempt is given back.
            self.answered[asked["id"]] += 1
            return web.Response(status=503)
        decision = self.answer(asked["id"], token, asked["group"], asked["attempt"])
        if fate == 1 and request.transport is not None:
            request.transport.abort()
        if decision == "not yet":
            later = {"decision": "unknown", "ask_again_s": 1}
            return web.json_response({"id": asked["id"], **later})
        return web.json_response({"id": asked["id"], "decision": decision})


@contextlib.asynccontextmanager
async def serving(truth: Truth) -> AsyncIterator[str]:
    """Serve the check URL."""
    app = web.Application()
    app.router.add_post("/check", truth.post)
    async with listening(app) as url:
        yield f"{url}/check"


async def undecided(
    name: str, urls: Sequence[str], topic: str, recorder: Recorder, count: int, fate: random.Random
) -> None:
    """Prepare `count` transactions, of one group after the other, and never decide."""
    groups = itertools.cycle(GROUPS)
    async with calling(urls, recorder, fate) as caller:
        for number in range(count):
            key = f"key-{fate.randrange(50)}"
            await attempted(caller.prepare(f"{name}/{number}", next(groups), topic, key=key))
            recorder.finished += 1


def lanes(
    name: str, urls: Sequence[str], topic: str, recorder: Recorder
) -> asyncio.Future[list[None]]:
    """Start `LANES` clients that prepare."""
    return asyncio.gather(
        *[
            undecided(f"{name}-{n}", urls, topic, recorder, EACH, random.Random(n))
            for n in range(LANES)
        ]
    )


async def registered(proxy: ProxyProcess, url: str) -> None:
    """Register the groups that have a check URL."""
    for group, policy in {
        "url": {},
        "never": {"attempts_max": ATTEMPTS, "check_after_s": 0.5},
        "later": {"check_after_s": 3600.0},
    }.items():
        given = {"check_url": url, **policy}
        status, answer = await proxy.request("PUT", f"/v1/groups/{group}", given)
        assert status == 200, answer


async def test_checks_find_group_while_proxies_die_and_leave(
    fleet: Fleet,
) -> None:
    home, dies, leaves = fleet.proxies
    topic = await home.topic(3)
    recorder = Recorder()
    truth = Truth(recorder)
    sessions = [("home", home)] + [("everywhere", proxy) for proxy in fleet.proxies]
    async with contextlib.AsyncExitStack() as stack:
        await registered(home, await stack.enter_async_context(serving(truth)))
        for group, proxy in sessions:
            limits = Limits(answer_timeout_s=3, heartbeat_s=3)
            producer = TransactionalProducer(
                proxy.url, group=group, check=truth.check, limits=limits
            )
            await stack.enter_async_context(producer)
        preparing = lanes("lane", fleet.urls, topic, recorder)
        await asked(recorder, 5)
        await dies.kill()
        await preparing
        await fleet.whole([home, leaves])
        await dies.launch()
        await fleet.whole(fleet.proxies)
        preparing = lanes("more", fleet.urls, topic, recorder)
        await asked(recorder, 5)
        assert await leaves.stop() == 0
        await preparing
        await leaves.start()
        await fleet.whole(fleet.proxies)

        async def settled() -> bool:
            left = await home.unsettled()
            return {t["state"] for t in left if t["group"] != "later"} <= {"parked"}

        await until(settled)
    assert recorder.finished == 2 * LANES * EACH
    judge = await convict(fleet, recorder, [topic])
    for tx in judge.log.values():
        wanted = {"never": {"parked"}, "later": {"pending"}}
        assert tx.state in wanted.get(tx.group, {"committed", "rolled_back"}), judge.story(tx.id)
        if tx.group == "never":
            assert len(tx.counted) == ATTEMPTS
    assert {tx.group for tx in judge.log.values()} == set(GROUPS)


async def asked(recorder: Recorder, count: int) -> None:
    """Wait until `count` more checks were answered."""
    wanted = len(recorder.history.asked) + count

    await until(lambda: len(recorder.history.asked) >= wanted)


async def test_proxy_death_during_check_counts_as_attempt(
    fleet: Fleet,
) -> None:
    """The session's proxy dies with a check in flight; the SDK reconnects to another automatically,
    and is asked again there."""
    topic = await fleet.proxies[0].topic()
    recorder = Recorder()
    going_on, heard = asyncio.Event(), asyncio.Event()

    async def check(request: CheckRequest) -> Decision:
        recorder.history.asked.append(Asked(request.id, time.time(), "commit"))
        heard.set()
        await going_on.wait()
        return Decision.COMMIT

    async with TransactionalProducer(
        fleet.urls, group="moving", check=check, limits=Limits(answer_timeout_s=3, heartbeat_s=3)
    ):
        at = await holder(fleet, "moving")
        (asks, *_) = (proxy for proxy in fleet.proxies if proxy is not at)
        token = "moving/0"
        message = Message(topic, None, b"v", (("token", token.encode()),))
        recorder.means(token, [message], business=False)
        shown = {"topic": topic, "value": "v", "headers": {"token": token}}
        with recorder.call("prepare", token) as call:
            # Without a key it stays with the proxy that is called: not the session's.
            call.id = await asks.prepare(shown, group="moving")
        await asyncio.wait_for(heard.wait(), 20)
        await at.kill()
        going_on.set()
        standing = await asks.reaches(call.id, "promoted")
        assert standing["source"] == "check"
        assert standing["attempts"] == 2
        await at.launch()
        await fleet.whole(fleet.proxies)
    judge = await convict(fleet, recorder, [topic])
    assert len(judge.asked[call.id]) == 2
    assert judge.unsettled() == {}


async def holder(fleet: Fleet, group: str) -> ProxyProcess:
    """Return the one proxy at which a group has its session."""

    async def found() -> ProxyProcess | None:
        for proxy in fleet.proxies:
            if f'txbroker_sessions{{group="{group}"}} 1.0' in await proxy.text("/metrics"):
                return proxy
        return None

    world = await until(found)
    assert isinstance(world, ProxyProcess)
    return world
