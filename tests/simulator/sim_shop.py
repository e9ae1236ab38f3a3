"""The clients of the simulation: producers with a business database, and services that are asked
back. Both write down what they did for the judge."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from random import Random
from typing import Any, TypeAlias, cast

from tests.faults.judge import Asked, Body, Call, History
from tests.simulator.sim_loop import PROCESS, START_S, Process
from tests.simulator.sim_network import Network
from tests.simulator.sim_proxy import SimProxy
from txbroker.checkers.base import Answered, CheckCall, CheckResult, Unclear, Unreached, already
from txbroker.contract.frames import FRAME_OPERATIONS_MAX
from txbroker.contract.service import (
    DecideRequest,
    PrepareRequest,
    TransactionStatus,
    TransactionView,
    execute,
)
from txbroker.core.records import Decision, Message, Source
from txbroker.core.routing import make_id, order_hash
from txbroker.errors import OwnerUnavailable, RequestError
from txbroker.proxy.cluster.broker import Broker

CALL_S = 5.0
GIVE_UP_S = 25.0
PAUSE_S = 0.4
LONG_S = 60.0
TOPICS = ("t", "u")

Request: TypeAlias = PrepareRequest | DecideRequest
Work = Callable[[Broker], Awaitable[Any]] | Request
"""A request to a proxy: a single call, or an operation that may share a frame."""
Frame: TypeAlias = list[tuple[Request, asyncio.Future[Any]]]
GATHER_S = (0.0, 0.0, 0.003, 0.05)
"""For how long operations may wait for others of their frame."""
BURSTS = (5, 40, 2 * FRAME_OPERATIONS_MAX)
BURST_SHARE = 0.15
"""Share of the clients with frames that begin with a burst of transactions."""


class Silence(Exception):
    """No answer came; the request may or may not have been executed."""


class Shop:
    """What producers and their services share: the business database and the history.

    Attributes:
        rows: the business database: `row` where a local transaction was committed, `barrier` where
            a check came first.
        tempers: how the service behaves when it is asked about a token.
        reachable: whether services can be asked at all.
    """

    def __init__(self, network: Network, process: Process, proxies: list[SimProxy]) -> None:
        self.network = network
        self.loop = network.loop
        self.process = process
        self.proxies = proxies
        self.history = History()
        self.rows: dict[str, str] = {}
        self.running: set[str] = set()
        self.tempers: dict[str, str] = {}
        self.asked_times: dict[str, int] = {}
        self.served: dict[asyncio.Future[Any], tuple[SimProxy, int]] = {}
        """The calls that proxies work on, each with the proxy and which of its lives."""
        self.repeats: list[asyncio.Task[None]] = []
        self.reachable = True
        self.trouble = True
        """During the faults: services are slow and answer arbitrarily."""
        self.frames: Random | None = None
        """Decides what shares a frame; None where each operation goes alone."""
        self._gathering: dict[str, Frame] = {}

    def now_s(self) -> float:
        """Return the time for the history, seconds since 1970."""
        return START_S + self.loop.time()

    # --- calls -----------------------------------------------------------------------------------

    async def ask(self, proxy: SimProxy, work: Work) -> Any:
        """Call a proxy.

        Raises:
            RequestError: as the proxy answers.
            Silence: it does not.
        """
        future: asyncio.Future[Any] = self.loop.create_future()
        if isinstance(work, Request):
            self._gather(proxy, work, future)
        else:
            delay_s = self.network.delay_s(self.process)
            self.loop.call_later(
                delay_s, self._arrive, proxy, work, (future,), context=proxy.process.context
            )
        try:
            async with asyncio.timeout(CALL_S):
                return await future
        except TimeoutError:
            raise Silence from None

    def _gather(self, proxy: SimProxy, request: Request, future: asyncio.Future[Any]) -> None:
        """Put an operation into the next frame to a proxy."""
        frame = self._gathering.setdefault(proxy.name, [])
        frame.append((request, future))
        if self.frames is None or len(frame) == FRAME_OPERATIONS_MAX:
            self._send_frame(proxy, frame)
        elif len(frame) == 1:
            self.loop.call_later(self.frames.choice(GATHER_S), self._send_frame, proxy, frame)

    def _send_frame(self, proxy: SimProxy, frame: Frame) -> None:
        if self._gathering.get(proxy.name) is not frame:
            return
        del self._gathering[proxy.name]
        delay_s = self.network.delay_s(self.process)
        self.loop.call_later(
            delay_s, self._arrive_frame, proxy, frame, context=proxy.process.context
        )

    def _arrive_frame(self, proxy: SimProxy, frame: Frame) -> None:
        """Let a proxy work on a frame, as its sessions do: on each run of it apart."""
        broker = proxy.broker
        if broker is None:
            self._arrive(proxy, _nothing, [future for _, future in frame])
            return
        self.network.note(f"{proxy.name}: a frame of {len(frame)}")
        for run in broker.runs([request for request, _ in frame]):
            # A separate task: it ends with the proxy, begun or not.
            answers = asyncio.ensure_future(run.answers)

            async def answered(
                _: Broker, answers: asyncio.Future[Sequence[Any]] = answers
            ) -> Sequence[Any]:
                return await answers

            self._arrive(proxy, answered, [frame[number][1] for number in run.numbers])

    def _arrive(
        self,
        proxy: SimProxy,
        work: Callable[[Broker], Awaitable[Any]],
        futures: Sequence[asyncio.Future[Any]],
    ) -> None:
        self.loop.create_task(self._serve(proxy, work, futures))

    async def _serve(
        self,
        proxy: SimProxy,
        work: Callable[[Broker], Awaitable[Any]],
        futures: Sequence[asyncio.Future[Any]],
    ) -> None:
        results: Sequence[Any]
        self.served[futures[0]] = (proxy, proxy.lives)
        try:
            if proxy.broker is None:
                raise OwnerUnavailable("it has only just been started")
            found = await work(proxy.broker)
            results = found if isinstance(found, (list, tuple)) else [found]
        except RequestError as error:
            results = [error] * len(futures)
        del self.served[futures[0]]
        weather, random = self.network.weather, PROCESS.get().random
        if random.random() < weather.unanswered:
            return
        delay_s = self.network.delay_s(PROCESS.get())
        for future, result in zip(futures, results, strict=True):
            self.loop.call_later(delay_s, _answer, future, result, context=self.process.context)

    async def recorded(
        self,
        what: str,
        token: str,
        id: str,
        proxy: SimProxy,
        work: Work,
        messages: tuple[Body, ...] | None = None,
    ) -> Call:
        """Call a proxy and write down how it went."""
        call = Call(what, token, self.now_s(), id, messages=messages)
        self.history.calls.append(call)
        try:
            answer = await self.ask(proxy, work)
        except RequestError as error:
            call.result = "unknown" if error.retryable else "fail"
            call.code = error.code
            call.id = call.id or str(error.details.get("id", ""))
            call.decision = str(error.details.get("decision", ""))
        except Silence:
            call.result = "unknown"
        else:
            call.result = "ok"
            if isinstance(answer, TransactionStatus):
                call.id, call.state = answer.id, str(answer.state)
        call.ended = self.now_s()
        self.network.note(f"client: {what} {token} at {proxy.name}: {call.result} {call.code}")
        return call

    async def insist(
        self,
        what: str,
        token: str,
        id: str,
        work: Work,
        messages: tuple[Body, ...] | None = None,
        give_up_s: float = GIVE_UP_S,
    ) -> Call:
        random = self.process.random
        until_s = self.loop.time() + give_up_s
        number = random.randrange(len(self.proxies))
        while True:
            proxy = self.proxies[number % len(self.proxies)]
            call = await self.recorded(what, token, id, proxy, work, messages)
            id = id or call.id
            if call.result in ("ok", "fail") or self.loop.time() > until_s:
                return call
            if call.code:
                number += 1
            await asyncio.sleep(PAUSE_S * (0.5 + random.random()))

    async def show(self, partition: int, id: str) -> TransactionView | str:
        """Return the owner's view of a transaction, or its error."""
        found: TransactionView | str = "nowhere"
        for proxy in self.proxies:
            if proxy.broker is not None and partition in proxy.broker.mine():
                try:
                    return cast(TransactionView, await self.ask(proxy, lambda b: b.find(id)))
                except (RequestError, Silence) as error:
                    found = getattr(error, "code", "silence")
        return found

    async def operate(self, what: str, id: str) -> None:
        """Decide a parked transaction by hand, as the business database shows, or revive it."""
        if what == "revive":
            by, why = "operator", "simulated"
            await self.insist("revive", "", id, lambda broker: broker.revive(id, by=by, reason=why))
            return
        there = self.rows.setdefault(id, "barrier") == "row"
        decision = Decision.COMMIT if there else Decision.ROLLBACK
        request = DecideRequest(id=id, decision=decision, source=Source.OPERATOR, by="operator")
        await self.insist(str(decision), "", id, lambda broker: execute(broker, request))

    # --- being asked -----------------------------------------------------------------------------

    def check(self, call: CheckCall) -> tuple[float, CheckResult | None]:
        """Return the answer to a question and its delay, seconds; None for no answer."""
        token = token_of(call.messages)
        temper = self.tempers.get(token, "right") if self.trouble else self._in_the_end(token)
        random = self.process.random
        times = self.asked_times[call.id] = self.asked_times.get(call.id, 0) + 1
        delay_s = random.random() * (2.5 if temper == "slow" else 0.02)
        if temper == "mute":
            self._note(call, "nothing")
            return delay_s, None
        if temper == "unknown" or (temper == "later knows" and times < 3):
            self._note(call, "unknown")
            return delay_s, Answered(Decision.UNKNOWN)
        if temper == "fickle":
            decision = random.choice([Decision.COMMIT, Decision.ROLLBACK])
            self._note(call, str(decision))
            return delay_s, Answered(decision)
        return delay_s, self._truth(call, token, temper)

    def _in_the_end(self, token: str) -> str:
        """What a service is like once all is healed: those that never know stay so."""
        temper = self.tempers.get(token, "right")
        return temper if temper in ("unknown", "fickle", "replaces") else "right"

    def _truth(self, call: CheckCall, token: str, temper: str) -> CheckResult:
        id = call.id
        if id in self.running:
            self._note(call, "not yet")
            return Answered(Decision.UNKNOWN, ask_again_s=1.0)
        if self.rows.setdefault(id, "barrier") == "row":
            replaced = replaced_messages(call.messages) if temper == "replaces" else None
            self._note(call, "commit", None if replaced is None else bodies(replaced))
            return Answered(Decision.COMMIT, messages=replaced)
        self._note(call, "rollback")
        return Answered(Decision.ROLLBACK)

    def _note(self, call: CheckCall, answer: str, messages: tuple[Body, ...] | None = None) -> None:
        asked = Asked(call.id, self.now_s(), answer, call.attempt, messages)
        self.history.asked.append(asked)
        self.network.note(f"service: asked about {call.id}, attempt {call.attempt}: {answer}")

    # --- the business ----------------------------------------------------------------------------

    async def local_transaction(self, id: str, seconds: float) -> bool:
        """Write the row of a transaction unless a check was first; return whether it exists."""
        self.running.add(id)
        await asyncio.sleep(seconds)
        self.running.discard(id)
        return self.rows.setdefault(id, "row") == "row"


async def _nothing(_: Broker) -> None:
    """No broker will ever be asked."""


def _answer(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
        # The caller may have given up.
        future.exception()
    else:
        future.set_result(result)


def token_of(messages: tuple[Message, ...]) -> str:
    return next(
        ((value or b"").decode() for name, value in messages[0].headers if name == "token"), ""
    )


def bodies(messages: tuple[Message, ...]) -> tuple[Body, ...]:
    """Return messages as the judge takes them."""
    return tuple(Body(m.topic, m.key, m.value, m.headers, m.timestamp_ms) for m in messages)


def replaced_messages(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(
        Message(m.topic, m.key, b"final " + (m.value or b""), m.headers, None, m.timestamp_ms)
        for m in messages
    )


class Asker:
    """A `txbroker.checkers.base.Finder` and `Channel` in one: the way from a proxy to a service."""

    endpoint = "service"
    instance = ""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop

    def at_hand(self, group: str, prefer: str) -> Asker | None:
        """Return itself where a connection stands, which it does now and then."""
        return self if self._shop.reachable and PROCESS.get().random.random() < 0.5 else None

    async def acquire(
        self, group: str, prefer: str, avoid: Collection[str] = ()
    ) -> Asker | Unreached:
        await self._shop.network.pass_message()
        return self if self._shop.reachable else Unreached("connection refused")

    def ask(self, call: CheckCall, timeout_s: float) -> asyncio.Future[CheckResult]:
        shop, asking = self._shop, PROCESS.get()
        network = shop.network
        if not shop.reachable:
            return already(Unreached("503"))
        future: asyncio.Future[CheckResult] = shop.loop.create_future()

        def arrive() -> None:
            answer_s, result = shop.check(call)
            if result is not None:
                shop.loop.call_later(
                    answer_s + network.delay_s(shop.process), _answer, future, result
                )

        if asking.random.random() >= network.weather.lost:
            shop.loop.call_later(network.delay_s(asking), arrive, context=shop.process.context)
        return asyncio.ensure_future(self._result(future, timeout_s))

    async def _result(self, future: asyncio.Future[CheckResult], timeout_s: float) -> CheckResult:
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return Unclear("no answer in time")

    def release(self) -> None:
        """Nothing is kept."""


TEMPERS = ("right", "right", "slow", "later knows", "unknown", "fickle", "mute", "replaces")


class Lane:
    """One client: transactions one after the other, some of one order key.

    Args:
        name: the client's; its messages have it as their key.
        partitions: how many half partitions there are.
    """

    def __init__(self, shop: Shop, name: str, partitions: int, dedup_window_s: float) -> None:
        self._shop = shop
        self._name = name
        self._partitions = partitions
        self._window_s = dedup_window_s
        self._random = shop.process.random
        self._ahead_ms = 0

    async def run(self, transactions: int, hurry: float) -> None:
        """Run `count` transactions; this share of them concurrently with the next ones."""
        await self._learn_time()
        async with asyncio.TaskGroup() as group:
            frames = self._shop.frames
            burst = frames.choice(BURSTS) if frames and frames.random() < BURST_SHARE else 0
            for number in range(burst):
                group.create_task(self._one(f"{self._name}/burst {number}"))
            for number in range(transactions):
                task = group.create_task(self._one(f"{self._name}/{number}"))
                if self._random.random() < hurry:
                    await asyncio.sleep(self._random.random() * 0.02)
                else:
                    await task
                    await asyncio.sleep(self._random.random() * 1.5)

    async def _learn_time(self) -> None:
        """Take the clock by which ids are made from a proxy, as a session does."""

        async def now_ms(broker: Broker) -> int:
            return broker.now_ms()

        proxy = self._random.choice(self._shop.proxies)
        try:
            reading = await self._shop.ask(proxy, now_ms)
        except (RequestError, Silence):
            reading = int(self._shop.now_s() * 1000)
        self._ahead_ms = reading - int(self._shop.now_s() * 1000)
        if self._random.random() < 0.04:
            # One that makes ids by its own clock.
            self._ahead_ms += self._random.choice([-1_600_000_000_000, 3_000_000_000_000])

    async def _one(self, token: str) -> None:
        random, shop = self._random, self._shop
        messages = self._messages(token)
        temper = random.choice(TEMPERS)
        shop.tempers[token] = temper
        shop.history.sent[token] = bodies(messages)
        contrary = random.random() < 0.15
        if temper != "fickle" and not contrary:
            shop.history.business.add(token)
        request = self._request(token, messages)
        prepared = await self._prepare(token, request)
        if prepared.result != "ok":
            return
        if contrary:
            await self._contrary(token, prepared.id)
            return
        await self._decide(token, prepared.id, temper, messages)

    def _request(self, token: str, messages: tuple[Message, ...]) -> PrepareRequest:
        random = self._random
        order = f"order {self._name}" if random.random() < 0.5 else None
        if order is not None and self._window_s > LONG_S and random.random() < 0.4:
            # Without an order key the dedup key would stand for it, and order be lost on purpose.
            # Beyond the window, to which a stopped proxy can hold a request, it counts again.
            return PrepareRequest("g", messages, dedup_key=token, order_key=order)
        hashed = order_hash(order, messages[0].topic, messages[0].key)
        wanted = random.randrange(self._partitions) if hashed is None else hashed % self._partitions
        now_ms = int(self._shop.now_s() * 1000) + self._ahead_ms
        id = make_id(wanted, now_ms, random.getrandbits(64))
        return PrepareRequest("g", messages, id=id, order_key=order)

    def _messages(self, token: str) -> tuple[Message, ...]:
        count = 1 if self._random.random() < 0.6 else self._random.randint(2, 4)
        return tuple(self._message(token, number) for number in range(count))

    def _message(self, token: str, number: int) -> Message:
        random = self._random
        headers: list[tuple[str, bytes | None]] = [("token", token.encode())]
        if random.random() < 0.2:
            headers += [("same", b"\x00\xff"), ("same", b""), ("null", None), ("txb-id", b"mine")]
        return Message(
            random.choice(TOPICS),
            key=random.choice([None, self._name.encode()]),
            value=None if random.random() < 0.05 else f"{token} {number}".encode(),
            headers=tuple(headers),
            timestamp_ms=1_600_000_000_000 if random.random() < 0.1 else None,
        )

    async def _prepare(self, token: str, request: PrepareRequest) -> Call:
        give_up_s = min(GIVE_UP_S, self._window_s / 2)
        call = await self._shop.insist(
            "prepare", token, request.id or "", request, give_up_s=give_up_s
        )
        if call.result == "ok" and self._random.random() < 0.25:
            repeat = self._repeat(token, request.id or "", request)
            self._shop.repeats.append(self._shop.loop.create_task(repeat))
        return call

    async def _repeat(self, token: str, id: str, work: Work) -> None:
        """Prepare once more, as a request does that was long on its way."""
        await asyncio.sleep(self._random.choice([0.0, 0.1, 2.0, 6.0]))
        proxy = self._random.choice(self._shop.proxies)
        await self._shop.recorded("prepare", token, id, proxy, work)

    async def _contrary(self, token: str, id: str) -> None:
        async with asyncio.TaskGroup() as group:
            for decision in self._random.sample([Decision.COMMIT, Decision.ROLLBACK], 2):
                group.create_task(self._decide_as(token, id, decision))

    async def _decide(
        self, token: str, id: str, temper: str, messages: tuple[Message, ...]
    ) -> None:
        random, shop = self._random, self._shop
        draw = random.random()
        if draw < 0.15 and temper != "fickle":
            # Its local transaction never runs: only a check finds out.
            return
        slow = random.random() < 0.15
        there = await shop.local_transaction(id, random.random() * (4.0 if slow else 0.05))
        if draw < 0.3:
            # It ends before its decision; at most it requests a check.
            if random.random() < 0.4:
                await self._ask_for_check(token, id)
            return
        if draw < 0.4 and not there:
            return
        decision = Decision.COMMIT if there else Decision.ROLLBACK
        final = there and temper == "replaces" and draw > 0.6
        replaced = replaced_messages(messages) if final else None
        times = 3 if random.random() < 0.1 else 1
        async with asyncio.TaskGroup() as group:
            for _ in range(times):
                group.create_task(self._decide_as(token, id, decision, replaced))

    async def _ask_for_check(self, token: str, id: str) -> None:
        await self._shop.insist("check", token, id, lambda broker: broker.check(id, by="client"))

    async def _decide_as(
        self, token: str, id: str, decision: Decision, messages: tuple[Message, ...] | None = None
    ) -> None:
        wait = self._random.random() < 0.2
        request = DecideRequest(id=id, decision=decision, group="g", messages=messages, wait=wait)
        sent = None if messages is None else bodies(messages)
        await self._shop.insist(str(decision), token, id, request, sent)
