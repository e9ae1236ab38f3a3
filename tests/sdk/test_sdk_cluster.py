"""Three proxies that die, hang and hand partitions over, while calls and checks go on."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tests.sdk.fake_proxy import (
    QUICK,
    Action,
    DropAfter,
    DropBefore,
    FakeCluster,
    FakeProxy,
    GatedCheck,
    Ignore,
    Refuse,
)
from txbroker import batching as sticky
from txbroker.contract.frames import Decide, FromProducer, Prepare
from txbroker.core.records import Decision, Message
from txbroker.core.routing import order_hash, parse_id
from txbroker.sdk import TransactionalProducer

PATIENT = replace(QUICK, retry_s=30.0, heartbeat_s=0.4, session_idle_s=0.2, answer_timeout_s=0.2)
KEYLESS = Message("payments", value=b"body")


async def three(cluster: FakeCluster) -> list[FakeProxy]:
    proxies = [await cluster.proxy() for _ in range(3)]
    await cluster.own(*proxies)
    return proxies


def keyed(partition: int, partitions: int = 4) -> Message:
    numbers = (n for n in range(1000))
    return next(
        Message("t", key=b"%d" % n, value=b"body")
        for n in numbers
        if (order_hash(None, "t", b"%d" % n) or 0) % partitions == partition
    )


# --- at random ----------------------------------------------------------------------------------


class Chaos:
    """Kills, stops and wakes proxies, and hands partitions over; at least one always works."""

    def __init__(self, cluster: FakeCluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self._dead: set[FakeProxy] = set()
        self.done: list[str] = []

    async def step(self) -> None:
        steps: list[Callable[[], Awaitable[None]]] = [self.kill, self.pause, self.move, self.heal]
        # Each of the first three once, so that no run goes without.
        chosen = steps[len(self.done)] if len(self.done) < 3 else self._chance.choice(steps)
        await chosen()

    def _working(self) -> list[FakeProxy]:
        return [p for p in self._cluster.proxies if p not in self._dead and p.awake.is_set()]

    async def kill(self) -> None:
        working = self._working()
        if len(working) > 1:
            proxy = self._chance.choice(working)
            self._dead.add(proxy)
            await proxy.stop()
            self.done.append("kill")

    async def pause(self) -> None:
        working = self._working()
        if len(working) > 1:
            self._chance.choice(working).awake.clear()
            self.done.append("pause")

    async def heal(self) -> None:
        for proxy in list(self._dead):
            self._dead.discard(proxy)
            await proxy.start()
        for proxy in self._cluster.proxies:
            proxy.awake.set()

    async def move(self) -> None:
        """Partitions go to those that work; now and then one has no owner for a while."""
        working = self._working()
        await self._cluster.own(*[self._chance.choice([*working * 4, None]) for _ in range(4)])
        self.done.append("move")

    async def end(self) -> None:
        await self.heal()
        await self._cluster.own(*self._cluster.proxies)


def trouble(chance: random.Random) -> Callable[[FromProducer], Action | None]:
    actions = [DropBefore(), DropAfter(), Ignore(), Ignore(done=False),
               Refuse("owner_unavailable"), Refuse("overloaded")]  # fmt: skip
    return lambda _: chance.choice(actions) if chance.random() < 0.03 else None


@pytest.mark.parametrize("seed", range(4))
async def test_calls_count_once_while_proxies_crash(cluster: FakeCluster, seed: int) -> None:
    chance = random.Random(seed)
    proxies = await three(cluster)
    for proxy in proxies:
        proxy.rules.append(trouble(chance))
    answers: list[tuple[int, str, Decision]] = []

    async def one(producer: TransactionalProducer, n: int) -> None:
        message = Message("t", key=b"%d" % n if n % 2 else None, value=b"%d" % n)
        decision = Decision.COMMIT if n % 3 else Decision.ROLLBACK
        outcome = await producer.send_in_transaction(message, lambda tx: decision)
        assert outcome.decision is decision
        answers.append((n, outcome.id, outcome.decision))

    numbers, over = itertools.count(), asyncio.Event()

    async def several(producer: TransactionalProducer) -> None:
        while not over.is_set():
            await one(producer, next(numbers))

    chaos = Chaos(cluster, chance)
    urls = [proxy.url for proxy in chance.sample(proxies, chance.randint(1, 3))]
    async with TransactionalProducer(urls, group="g", limits=PATIENT) as producer:
        work = asyncio.gather(*(several(producer) for _ in range(24)))
        for _ in range(20):
            await asyncio.wait([work], timeout=0.04)
            await chaos.step()
        await chaos.end()
        while len(answers) <= 100:
            assert not work.done()
            await asyncio.wait([work], timeout=0.04)
        over.set()
        await work
    assert set(chaos.done) == {"kill", "pause", "move"}
    called = next(numbers)
    assert sorted(n for n, _, _ in answers) == list(range(called))
    for n, id, decision in answers:
        stored = cluster.transactions[id]
        assert stored.messages[0].value == b"%d" % n
        assert set(stored.decisions) == {decision}
    # An id is never reused, and other stored transactions were left undecided.
    contents: dict[str, set[bytes | None]] = {}
    for prepare in cluster.prepares:
        contents.setdefault(prepare.id, set()).add(prepare.messages[0].value)
    assert {len(values) for values in contents.values()} == {1}
    strays = set(cluster.transactions) - {id for _, id, _ in answers}
    assert all(cluster.transactions[stray].decision is None for stray in strays)


# --- one by one ---------------------------------------------------------------------------------


async def test_call_at_hanging_proxy_moves_to_new_owner(cluster: FakeCluster) -> None:
    a, b, _ = await three(cluster)
    limits = replace(QUICK, retry_s=60.0, answer_timeout_s=3600.0, heartbeat_s=3600.0)
    async with TransactionalProducer([a.url, b.url], group="g", limits=limits) as producer:
        first = await producer.prepare(keyed(0))
        await producer.prepare(keyed(1))
        a.awake.clear()
        waiting = asyncio.create_task(producer.commit(first))
        prepared = asyncio.create_task(producer.prepare(keyed(0)))
        await asyncio.wait([waiting, prepared], timeout=0.1)
        await cluster.own(b)
        assert (await waiting).decision is Decision.COMMIT
        assert parse_id(await prepared).partition == 0
        a.awake.set()


async def test_unsent_prepare_takes_another_partition(cluster: FakeCluster) -> None:
    a, b, _ = await three(cluster)
    async with TransactionalProducer(a.url, group="g", limits=PATIENT) as producer:
        await producer.prepare(keyed(1))
        await a.stop()
        ids = [await producer.prepare(KEYLESS) for _ in range(5)]
        assert {parse_id(id).partition for id in ids} <= {1}
        assert len(b.sessions) == 1


async def test_sent_prepare_keeps_its_id(cluster: FakeCluster) -> None:
    a, b, _ = await three(cluster)
    async with TransactionalProducer(a.url, group="g", limits=PATIENT) as producer:
        await producer.prepare(keyed(1))
        cluster.prepares.clear()
        for proxy in (a, b):
            proxy.once(Prepare, Refuse("owner_unavailable"), times=2)
        id = await producer.prepare(KEYLESS)
    assert {prepare.id for prepare in cluster.prepares} == {id}


async def test_owner_unavailable_is_retried_at_newest_owner(cluster: FakeCluster) -> None:
    a, b, _ = await three(cluster)
    async with TransactionalProducer(a.url, group="g", limits=PATIENT) as producer:
        id = await producer.prepare(keyed(0))
        a.rules.append(lambda op: Refuse("owner_unavailable") if isinstance(op, Decide) else None)
        waiting = asyncio.create_task(producer.commit(id))
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        await cluster.own(b)
        assert (await waiting).decision is Decision.COMMIT


async def test_unused_sessions_are_closed_except_one(cluster: FakeCluster) -> None:
    a, b, c = await three(cluster)
    async with TransactionalProducer(a.url, group="g", limits=PATIENT) as producer:
        for partition in range(3):
            await producer.prepare(keyed(partition))
        assert [len(proxy.sessions) for proxy in (a, b, c)] == [1, 1, 1]
        await cluster.own(a)
        await cluster.until(lambda: not b.sessions and not c.sessions)
        assert len(a.sessions) == 1
        await cluster.own(None)
        await asyncio.wait([asyncio.create_task(asyncio.Event().wait())], timeout=0.6)
        assert len(a.sessions) == 1
        await cluster.own(b)
        await producer.prepare(keyed(1))
        await cluster.until(lambda: not a.sessions)
        assert len(b.sessions) == 1


# --- checks -------------------------------------------------------------------------------------


async def test_open_check_keeps_its_session(cluster: FakeCluster) -> None:
    a, b, _ = await three(cluster)
    check = GatedCheck()
    async with TransactionalProducer(a.url, group="g", check=check, limits=PATIENT) as producer:
        id = await producer.prepare(keyed(1))
        await producer.prepare(keyed(0))
        asked = asyncio.create_task(b.sessions[0].check(id))
        await cluster.own(a)
        await asyncio.wait([asked], timeout=0.6)
        assert len(b.sessions) == 1
        check.go.set()
        assert (await asked).decision is Decision.COMMIT
        await cluster.until(lambda: not b.sessions)


async def test_check_on_two_sessions_calls_function_once(cluster: FakeCluster) -> None:
    a, b, _ = await three(cluster)
    check = GatedCheck(Decision.ROLLBACK)
    async with TransactionalProducer(a.url, group="g", check=check, limits=PATIENT) as producer:
        id = await producer.prepare(keyed(0))
        await producer.prepare(keyed(1))
        both = [asyncio.create_task(p.sessions[0].check(id)) for p in (a, b)]
        await asyncio.wait(both, timeout=0.05)
        check.go.set()
        assert {(await one).decision for one in both} == {Decision.ROLLBACK}
        assert [request.id for request in check.asked] == [id]


async def test_check_of_lost_session_is_answered_on_the_next(cluster: FakeCluster) -> None:
    a, b, _ = await three(cluster)
    check = GatedCheck()
    async with TransactionalProducer(a.url, group="g", check=check, limits=PATIENT) as producer:
        id = await producer.prepare(keyed(0))
        await producer.prepare(keyed(1))
        lost = asyncio.create_task(a.sessions[0].check(id))
        await check.asked_times(1)
        await a.stop()
        check.go.set()
        assert (await b.sessions[0].check(id, attempt=2)).decision is Decision.COMMIT
        lost.cancel()
        await cluster.own(b)
        assert (await producer.commit(id)).decision is Decision.COMMIT


# --- prepares without a key --------------------------------------------------------------------


async def test_choice_stays_until_partition_moves(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sticky, "SECONDS", 3600.0)
    proxy = await cluster.proxy()

    async def where(producer: TransactionalProducer) -> int:
        return parse_id(await producer.prepare(KEYLESS)).partition

    async with TransactionalProducer(proxy.url, group="g", limits=QUICK) as producer:
        first = await where(producer)
        assert {await where(producer) for _ in range(20)} == {first}
        await cluster.own(*[None if partition == first else proxy for partition in range(4)])
        # Its answer arrives after the news.
        await producer.prepare(keyed((first + 1) % 4))
        second = await where(producer)
        assert second != first
        assert {await where(producer) for _ in range(20)} == {second}


async def test_choice_moves_when_proxy_dies(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sticky, "SECONDS", 3600.0)
    proxies = [await cluster.proxy() for _ in range(2)]
    await cluster.own(*proxies)
    async with TransactionalProducer(
        [proxy.url for proxy in proxies], group="g", limits=QUICK
    ) as producer:
        for partition in range(2):  # now both are connected
            await producer.prepare(keyed(partition))
        chosen = proxies[parse_id(await producer.prepare(KEYLESS)).partition % 2]
        await chosen.stop()
        ids = [await producer.prepare(KEYLESS) for _ in range(20)]
        # Until it is known whose its partitions are, the other one's own will do.
        (left,) = set(proxies) - {chosen}
        assert {proxies[parse_id(id).partition % 2] for id in ids} == {left}
