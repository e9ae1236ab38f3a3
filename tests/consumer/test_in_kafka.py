"""`InKafka` on a Kafka in memory: stages, gaps in positions, bounds, misuse."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.kit.consumer_world import GROUP, TIMING, Handler, World, counted, text
from tests.kit.until import until
from txbroker.consumer import (
    Consumer,
    InKafka,
    Later,
    Message,
    Outputs,
    ReceivedMessage,
    Reject,
    pending,
)
from txbroker.consumer.rounds import StoreTraits
from txbroker.core.consuming.copies import CLEARED_HEADER
from txbroker.core.consuming.position import (
    LaterPosition,
    Metadata,
    StoredOffset,
    encode_metadata,
)
from txbroker.errors import ConfigurationError
from txbroker.testing.consuming import MemoryConsumingDoor, MemoryMember
from txbroker.testing.topics import LostReply


class Prices(World):
    """Topic `orders` with one partition, and its outputs in topic `prices`."""

    def __init__(self) -> None:
        super().__init__(partitions=1)
        self.kafka.create_topic("prices", 1)

    def consumer(self, **options: Any) -> Consumer:
        given = {"mode": "exactly-once", "store": InKafka(), "order": "key", **TIMING}
        return super().consumer(**given | options)

    @property
    def prices(self) -> list[str]:
        return [(record.value or b"").decode() for record in self.kafka.visible("prices", 0)]

    def release_has_ended(self) -> bool:
        """Return whether the last record about set-aside keys is that a released one failed."""
        last = self.records("aside")[-1]
        return last.headers[0][0] == CLEARED_HEADER and last.value == b"0"

    async def has(self, *values: str) -> None:
        await until(lambda: len(self.prices) >= len(values))
        assert self.prices == list(values)


class Pricing(Handler):
    """Sends each value on; waits for `gates` by value, and fails as planned."""

    def __init__(self, **failing: Any) -> None:
        super().__init__(**failing)
        self.gates: dict[str, asyncio.Event] = {}

    def shut(self, value: str) -> asyncio.Event:
        self.gates[value] = asyncio.Event()
        return self.gates[value]

    async def __call__(self, message: ReceivedMessage, out: Outputs) -> None:  # type: ignore[override]
        out.send(Message("prices", message.key, message.value))
        if (gate := self.gates.get(text(message))) is not None:
            await gate.wait()
        await super().__call__(message)


@pytest.fixture
def prices(short_pauses: None) -> Prices:
    return Prices()


# --- handlers --------------------------------------------------------------------------------


async def test_failed_handler_sends_nothing(prices: Prices) -> None:
    handler = Pricing(again=[ValueError("bug"), Later(0.01), None], bad=Reject("hopeless"))
    prices.produce("a=again", "b=bad", "c=1")
    async with prices.running(handler) as consumer:
        await prices.commits(3)
        await until(lambda: counted(consumer, "dead") == 1)
    assert sorted(prices.prices) == ["1", "again"]
    assert prices.values("dead") == ["bad"]


async def test_plain_handler_sends_from_its_thread(prices: Prices) -> None:
    def handle(message: ReceivedMessage, out: Outputs) -> None:
        out.send(Message("prices", None, message.value))

    prices.produce("1", "2")
    async with prices.running(handle, order="partition"):
        await prices.has("1", "2")


async def test_waiting_workers_keep_no_outputs(prices: Prices) -> None:
    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        out.send(Message("prices", None, message.value))
        await asyncio.sleep(0)

    prices.produce("1", "2", "3")
    async with prices.running(handle, order="none"):
        await prices.commits(3)
        workers = [each for each in asyncio.all_tasks() if each.get_name() == "txbroker handler"]
        frames = [frame.f_locals for worker in workers for frame in worker.get_stack(limit=1)]
        values = [value for local in frames for value in (*local.values(), local["self"].outputs)]
    assert values
    assert not [value for value in values if isinstance(value, list) and value]


async def test_after_gets_an_error_where_nothing_is_stored(prices: Prices) -> None:
    begun, gate = threading.Event(), threading.Event()
    errors: list[BaseException | None] = []

    def handle(message: ReceivedMessage, out: Outputs) -> None:
        begun.set()
        assert gate.wait(20)
        out.send(Message("prices", None, message.value))

    def after(_message: ReceivedMessage, error: BaseException | None) -> None:
        errors.append(error)

    prices.produce("1")
    async with prices.running(handle, after=after) as consumer:
        await until(begun.is_set)
        (reader, _source) = consumer._readers[0]
        reader.lost("a test")
        gate.set()
        await until(lambda: len(errors) == 1)
    assert errors[0] is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", 1),
        ("value", {"order": 1}),
        ("topic", "prices\ud800"),
        ("headers", {"name": 1}),
        ("headers", None),
        ("headers", [b"name"]),
        ("headers", [("\ud800", b"value")]),
        ("partition", "0"),
        ("timestamp_ms", 1 << 70),
    ],
)
async def test_output_with_a_wrong_field_fails_its_message_only(
    prices: Prices, field: str, value: Any
) -> None:
    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        given = {field: value} if message.value == b"1" else {}
        out.send(Message(**{"topic": "prices", "value": message.value, **given}))

    prices.produce("a=1", "b=2")
    async with prices.running(handle, on_failure="skip"):
        await prices.has("2")


@pytest.mark.parametrize("topic", ["txbroker.op", "txbroker.aside.other"])
async def test_output_to_an_own_topic_is_a_dead_letter(prices: Prices, topic: str) -> None:
    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        out.send(Message(topic if text(message) == "1" else "prices", None, message.value))

    prices.kafka.create_topic(topic)
    prices.produce("a=1", "b=2")
    async with prices.running(handle):
        await prices.commits(2)
    assert (prices.prices, prices.values("dead")) == (["2"], ["1"])
    assert not prices.kafka.visible(topic)


async def test_late_and_wrong_outputs_are_refused(prices: Prices) -> None:
    kept: list[Outputs] = []
    errors: list[str] = []

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        kept.append(out)
        try:
            out.send(b"prices")  # type: ignore[arg-type]
        except ConfigurationError as error:
            errors.append(str(error))
        if text(message) == "fails":
            raise Reject("no")

    prices.produce("1", "fails")
    async with prices.running(handle):
        await prices.commits(2)
    for out in kept:
        with pytest.raises(ConfigurationError, match="after the end of the handler"):
            out.send(Message("prices"))
    assert len(errors) == 2
    assert "give a Message(topic" in errors[0]
    assert prices.prices == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda consumer: consumer.run(lambda _m, _o: None, batch=10), "batch is not for InKafka"),
        (lambda consumer: consumer.run(lambda _m: None), "two arguments"),
        (lambda consumer: anext(consumer.batches(5)), r"use run\(handler\)"),
    ],
)
async def test_other_ways_are_refused(prices: Prices, call: Any, words: str) -> None:
    async with prices.consumer() as consumer:
        with pytest.raises(ConfigurationError, match=words):
            await call(consumer)


# --- transactions ----------------------------------------------------------------------------


async def test_no_handler_runs_in_a_transaction(
    prices: Prices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transactions have a limit of outputs; the position of their messages is in the same one."""
    monkeypatch.setattr(pending, "COPIES_MAX", 100)  # fewer than a slow machine makes in a round
    sizes: list[tuple[int, int]] = []
    commit = MemoryMember.commit

    async def note(self: MemoryMember, offsets: Any, copies: Any = ()) -> None:
        if copies:
            sizes.append((len(copies), offsets["orders", 0].offset))
        await commit(self, offsets, copies)

    monkeypatch.setattr(MemoryMember, "commit", note)
    prices.produce(*(f"{n % 7}={n}" for n in range(2500)))
    async with prices.running(Pricing(), order="partition"):
        await prices.commits(2500)
    assert sum(count for count, _ in sizes) == 2500
    assert max(count for count, _ in sizes) == 100
    assert [offset for _, offset in sizes] == [
        sum(count for count, _ in sizes[: number + 1]) for number in range(len(sizes))
    ]


@pytest.mark.rule(44)
async def test_outputs_of_a_message_stay_together(
    prices: Prices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "COPIES_MAX", 10)
    sizes: list[int] = []
    commit = MemoryMember.commit

    async def note(self: MemoryMember, offsets: Any, copies: Any = ()) -> None:
        sizes.append(len(copies))
        await commit(self, offsets, copies)

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        for _ in range(4 if message.value else 25):
            out.send(Message("prices", None, message.value))

    monkeypatch.setattr(MemoryMember, "commit", note)
    prices.produce("1", "2", "3", "", "5")
    async with prices.running(handle, order="partition"):
        await prices.commits(5)
    assert set(sizes) <= {0, 4, 8, 25}
    assert len(prices.prices) == 4 * 4 + 25


async def test_waiting_outputs_are_bounded(prices: Prices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a message that closes the gap is tried again."""
    monkeypatch.setattr(pending, "COPIES_MAX", 10)
    monkeypatch.setattr(pending, "_WAITING_MAX", 20)
    waiting: list[int] = []
    closed = asyncio.Event()
    commit = MemoryMember.commit

    async def slowly(self: MemoryMember, offsets: Any, copies: Any = ()) -> None:
        if copies:
            await closed.wait()
        await commit(self, offsets, copies)

    monkeypatch.setattr(MemoryMember, "commit", slowly)
    handler = Pricing()
    prices.produce(*(f"{n}={n}" for n in range(200)))
    async with prices.running(handler, in_flight_max=4) as consumer:
        await until(lambda: len(handler.done) >= 20)
        await asyncio.sleep(0.1)
        waiting.append(consumer._readers[0][0]._rounds.copies.count)
        closed.set()
        await prices.commits(200)
    assert waiting[0] <= 20 + 4
    assert sorted(map(int, prices.prices)) == list(range(200))


# --- gaps in the position --------------------------------------------------------------------


@pytest.fixture
def short_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InKafka, "traits", StoreTraits(exact=True, metadata_max=70))
    monkeypatch.setattr(pending, "COPIES_MAX", 10)
    monkeypatch.setattr(pending, "_WAITING_MAX", 20)


@pytest.mark.rule(44)
async def test_outputs_wait_whose_messages_do_not_fit_into_the_position(
    prices: Prices, short_metadata: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Every second message is stuck. Nothing is repeated after a restart, and nothing lost."""
    handler = Pricing()
    gates = [handler.shut(f"{number}") for number in range(0, 60, 2)]
    prices.kafka.create_topic("others", 1)
    prices.produce(*(f"{number}={number}" for number in range(60)))
    options = {"topics": ["orders", "others"], "in_flight_max": 64, "drain_s": 0.1}
    async with prices.running(handler, **options) as consumer:
        await until(lambda: len(handler.done) == 30)
        prices.produce("x=other", topic="others")
        await until(lambda: "other" in prices.prices)
        stored = list(prices.prices)
        assert len(stored) < 30
        await until(lambda: counted(consumer, "handled") == len(stored))
        assert consumer.statistics().overflow > 0
        assert caplog.text.count("outputs wait") == 1
    for gate in gates:
        gate.set()
    async with prices.running(handler, **options):
        await prices.commits(60)
    numbers = [price for price in prices.prices if price != "other"]
    assert sorted(numbers, key=int) == [str(number) for number in range(60)]


async def test_thousands_of_outputs_between_stuck_messages_are_stored(prices: Prices) -> None:
    """The others are stuck: compressed, their gaps fit into the position."""
    prices.produce(*(f"{number % 2}={number}" for number in range(5000)))
    stuck = asyncio.Event()

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        if message.key == b"1":
            await stuck.wait()
        out.send(Message("prices", message.key, message.value))

    options = {"order": "none", "in_flight_max": 5000, "drain_s": 0.0}
    async with prices.running(handle, **options) as consumer:
        await until(lambda: counted(consumer, "handled") == 2500)
        assert len(prices.prices) == 2500
    stuck.set()
    async with prices.running(handle, **options):
        await prices.commits(5000)
    assert sorted(map(int, prices.prices)) == list(range(5000))


async def test_stuck_message_that_succeeds_lets_outputs_go_on(
    prices: Prices, short_metadata: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The partition is full: only messages that were handed out before are."""
    tries = {f"{number}": [ValueError("bug")] * 5 + [None] for number in range(0, 60, 2)}
    handler = Pricing(**tries)
    prices.produce(*(f"{number}={number}" for number in range(60)))
    caplog.set_level("INFO")
    async with prices.running(handler, in_flight_max=64, retry_interval_s=0.1) as consumer:
        await prices.commits(60)
        await until(lambda: counted(consumer, "handled") == 60)
        assert caplog.text.count("outputs go on") == caplog.text.count("outputs wait") > 0
    assert sorted(prices.prices, key=int) == [str(number) for number in range(60)]


# --- later stages ----------------------------------------------------------------------------


async def test_later_stages_run_after_the_outputs_are_stored(prices: Prices) -> None:
    seen: list[tuple[str, bool]] = []

    async def second(message: ReceivedMessage) -> None:
        seen.append((text(message), text(message) in prices.prices))

    prices.produce("a=1", "b=2", "c=3")
    async with prices.running(Pricing(), run={"then": [second]}) as consumer:
        await prices.commits(3)
        await until(lambda: consumer._engine.settlement.handled == 3)
    assert sorted(seen) == [("1", True), ("2", True), ("3", True)]
    assert sorted(prices.prices) == ["1", "2", "3"]


async def test_restart_repeats_only_stages_that_had_not_ended(prices: Prices) -> None:
    gate, seen = asyncio.Event(), []

    async def second(message: ReceivedMessage) -> None:
        seen.append(text(message))
        if text(message) == "1":
            await gate.wait()

    run = {"then": [second]}
    prices.produce("a=1", "b=2")
    async with prices.running(Pricing(), run=run, drain_s=0.1):
        await until(lambda: sorted(seen) == ["1", "2"])
        await prices.commits(2)
        await until(lambda: prices.committed()[1].later is not None)
    gate.set()
    handler = Pricing()
    async with prices.running(handler, run=run):
        await until(lambda: seen.count("1") == 2)
        await until(lambda: prices.committed()[1].later is None)
    assert handler.seen == []
    assert sorted(prices.prices) == ["1", "2"]


async def test_refused_output_of_a_first_stage_is_a_dead_letter(prices: Prices) -> None:
    seen: list[str] = []

    async def first(message: ReceivedMessage, out: Outputs) -> None:
        size = 2 << 20 if text(message) == "large" else 10
        out.send(Message("prices", message.key, bytes(size)))

    async def second(message: ReceivedMessage) -> None:
        seen.append(text(message))

    prices.produce("a=1", "b=large", "c=3")
    async with prices.running(first, run={"then": [second]}):
        await prices.commits(3)
    assert sorted(seen) == ["1", "3"]
    assert prices.values("dead") == ["large"]
    assert len(prices.prices) == 2


@pytest.mark.parametrize("outcome", list(LostReply))
@pytest.mark.parametrize("lost", [True, False])
async def test_first_stage_ends_when_its_partition_is_lost(
    prices: Prices, outcome: LostReply, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker waits for ever, no later stage runs before the outputs are stored."""
    seen: list[str] = []

    async def second(message: ReceivedMessage) -> None:
        seen.append(text(message))
        assert text(message) in prices.prices

    async with prices.running(Pricing(), run={"then": [second]}, in_flight_max=1):
        prices.group.lose_answer_of_next_commit(outcome)
        (name,) = prices.group.seats
        prices.produce("a=1", "a=2")
        if lost:
            prices.group.expire(name)
        await prices.commits(2)
        await until(lambda: sorted(set(seen)) == ["1", "2"])
    assert prices.prices == ["1", "2"]


@pytest.mark.rule(44)
async def test_outputs_of_a_cancelled_call_are_dropped(prices: Prices) -> None:
    """Its `after` hook waits. The next message has passed its first stage, and has no outputs."""
    prices.kafka.add_partitions("orders", 2)
    prices.produce("1")
    prices.produce("2", partition=1)
    metadata = Metadata(1, later=LaterPosition(0))
    prices.group.offsets["orders", 1] = StoredOffset(1, encode_metadata(1, metadata)[0])
    waits = asyncio.Event()

    async def after(message: ReceivedMessage, error: BaseException | None) -> None:
        if text(message) == "1" and not waits.is_set():
            waits.set()
            await asyncio.Event().wait()

    async with prices.consumer(after=after, in_flight_max=1) as consumer:
        consumer.suspend(partition=1)
        task = asyncio.create_task(consumer.run(Pricing()))
        await waits.wait()
        partitions = consumer._engine.partitions
        (first,) = (each for each in partitions if each.in_flight)
        consumer.suspend(partition=0)
        partitions.interrupt(first)
        consumer.resume(partition=1)
        await until(lambda: prices.committed(1)[1].later is None)
        assert prices.prices == []
        consumer.resume(partition=0)
        await prices.has("1")
        consumer.stop()
        await task


# --- released keys ---------------------------------------------------------------------------


@pytest.mark.rule(44)
@pytest.mark.parametrize("moment", ["restart", "refused", "rejected", "fails again"])
async def test_released_copies_are_processed_once(prices: Prices, moment: str) -> None:
    """A copy is cleared together with its outputs, also when the consumer ends between two."""
    handler = Pricing(**{f"{n}": ValueError("bug") for n in range(4)})
    options = {"on_failure": "aside", "local_attempts_max": 1, "drain_s": 0.1}
    prices.produce(*(f"bad={n}" for n in range(4)), "good=4")
    async with prices.running(handler, **options):
        await prices.commits(5)
    handler.failing.clear()
    gate = handler.shut("2") if moment == "restart" else None
    if moment == "rejected":
        handler.failing["2"] = Reject("hopeless")
    if moment == "fails again":
        handler.failing["2"] = [ValueError("bug"), None]

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        if moment == "refused" and text(message) == "2":
            out.send(Message("prices", b"large", bytes(2 << 20)))
        await handler(message, out)

    async with prices.running(handle, **options) as consumer:
        prices.release(b"bad")
        if moment == "restart":
            await until(lambda: prices.prices == ["4", "0", "1"])
        elif moment == "fails again":
            await until(lambda: prices.prices == ["4", "0", "1"] and handler.seen[-1] == "2")
            await until(prices.release_has_ended)
            prices.release(b"bad")
            await until(lambda: consumer.statistics().aside_keys == 0)
        else:
            await until(lambda: consumer.statistics().aside_keys == 0)
    if gate is not None:
        gate.set()
    async with prices.running(handle, **options) as consumer:
        await until(lambda: consumer.statistics().aside_keys == 0)
        prices.produce("bad=5")
        await until(lambda: prices.prices[-1] == "5")
    lost = ["2"] if moment in ("refused", "rejected") else []
    assert prices.prices == [n for n in ("4", "0", "1", "2", "3", "5") if n not in lost]
    assert prices.values("dead") == lost


@pytest.mark.rule(44)
@pytest.mark.parametrize("moment", ["restart", "fails again"])
async def test_first_stages_of_released_copies_are_stored_once(prices: Prices, moment: str) -> None:
    """Also if the consumer, or a later stage, ends between the first stage and the clearance."""
    handler = Pricing(**{f"{n}": ValueError("bug") for n in range(4)})
    options = {"on_failure": "aside", "local_attempts_max": 1, "drain_s": 0.1}
    prices.produce(*(f"bad={n}" for n in range(4)))
    seen: list[str] = []
    stuck = asyncio.Event()

    async def second(message: ReceivedMessage) -> None:
        seen.append(text(message))
        if text(message) == "2" and seen.count("2") == 1:
            if moment == "fails again":
                raise ValueError("bug")
            await stuck.wait()

    options["run"] = {"then": [second]}
    async with prices.running(handler, **options):
        await prices.commits(4)
    handler.failing.clear()
    async with prices.running(handler, **options):
        prices.release(b"bad")
        await until(lambda: "2" in seen)
        if moment == "fails again":
            await until(prices.release_has_ended)
            prices.release(b"bad")
            await until(lambda: seen.count("2") == 2)
    stuck.set()
    async with prices.running(handler, **options) as consumer:
        await until(lambda: consumer.statistics().aside_keys == 0)
    assert prices.prices == ["0", "1", "2", "3"]
    assert {"0", "1", "2", "3"} == set(seen)


async def test_first_stages_are_not_repeated_after_a_gap(prices: Prices) -> None:
    """Records that were deleted unread move the position, and no message that is ahead."""
    waits, passed = asyncio.Event(), asyncio.Event()

    async def first(message: ReceivedMessage, out: Outputs) -> None:
        out.send(Message("prices", message.key, message.value))

    async def second(message: ReceivedMessage) -> None:
        if not waits.is_set():
            await asyncio.Event().wait()
        if text(message) == "3":
            passed.set()

    prices.produce("a=0", "b=1", "c=2", "d=3")
    async with prices.running(first, run={"then": [second]}, drain_s=0.05):
        await prices.has("0", "1", "2", "3")
    waits.set()
    prices.kafka.truncate("orders", 0, before=1)
    async with prices.running(first, run={"then": [second]}, on_gap="skip"):
        await passed.wait()
    assert prices.prices == ["0", "1", "2", "3"]


async def test_outputs_are_refused_after_a_later_copy_failed(prices: Prices) -> None:
    """The release has ended, and with it the feed of both."""
    handler = Pricing(**{f"{n}": ValueError("bug") for n in range(3)})
    options = {"on_failure": "aside", "local_attempts_max": 1}
    prices.produce(*(f"bad={n}" for n in range(3)))

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        if not handler.failing.get("0") and text(message) == "0":
            out.send(Message("prices", b"large", bytes(2 << 20)))
        await handler(message, out)

    async with prices.running(handle, **options) as consumer:
        await prices.commits(3)
        handler.failing = {"1": [ValueError("bug"), None]}
        prices.release(b"bad")
        await until(lambda: prices.values("dead") == ["0"])
        await until(prices.release_has_ended)
        prices.release(b"bad")
        await until(lambda: consumer.statistics().aside_keys == 0)
    assert prices.prices == ["1", "2"]


# --- refused copies --------------------------------------------------------------------------


async def test_refused_outputs_keep_the_order_of_their_key(prices: Prices) -> None:
    """The dead letter in their place is refused, too, while a later message is handled."""
    topics = ("prices", f"txbroker.dead.{GROUP}")
    handler = Pricing()
    gate = handler.shut("1")

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        if text(message) == "0":
            for topic in topics:
                prices.kafka.set_authorized(topic, authorized=False)
        await handler(message, out)

    prices.produce("a=0", "a=1", "a=2")
    async with prices.running(handle, on_failure="wait") as consumer:
        await until(lambda: counted(consumer, "copy_refused") >= 1)
        for topic in topics:
            prices.kafka.set_authorized(topic, authorized=True)
        gate.set()
        await prices.commits(3)
    assert handler.seen == prices.prices == ["0", "1", "2"]


@pytest.mark.rule(44)
@pytest.mark.parametrize("staged", [False, True])
async def test_refused_clearance_waits_and_loses_nothing(prices: Prices, staged: bool) -> None:
    """The outputs are not at fault, and later copies of the key are handled meanwhile."""
    aside = f"txbroker.aside.{GROUP}"
    handler = Pricing(**{str(n): ValueError("bug") for n in range(3)})

    async def handle(message: ReceivedMessage, out: Outputs) -> None:
        if not handler.failing and text(message) == "0":
            prices.kafka.set_authorized(aside, authorized=False)
        await handler(message, out)

    async def later(_message: ReceivedMessage) -> None: ...

    prices.produce(*(f"bad={n}" for n in range(3)))
    run = {"then": [later]} if staged else {}
    options = {"on_failure": "aside", "local_attempts_max": 1, "drain_s": 0.1}
    async with prices.running(handle, run=run, **options) as consumer:
        await prices.commits(3)
        handler.failing.clear()
        handler.seen.clear()
        prices.release(b"bad")
        await until(lambda: counted(consumer, "copy_refused") >= 2)
        prices.kafka.set_authorized(aside, authorized=True)
        await until(lambda: consumer.statistics().aside_keys == 0)
    assert handler.seen == prices.prices == ["0", "1", "2"]
    assert prices.values("dead") == []


@pytest.mark.parametrize("slow", ["commit", "target"])
async def test_time_in_which_kafka_is_slow_is_not_the_handler_s(
    prices: Prices, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    commit, target, until_s = MemoryMember.commit, MemoryConsumingDoor.target, 0.6
    passed = 0.0

    async def wait() -> None:
        nonlocal passed
        if passed < until_s:
            passed += until_s
            await asyncio.sleep(until_s)

    async def slow_commit(self: MemoryMember, offsets: Any, copies: Any = ()) -> Any:
        if copies:
            await wait()
        return await commit(self, offsets, copies)

    async def slow_target(self: MemoryConsumingDoor, topic: str, prefix: str) -> Any:
        await wait()
        return await target(self, topic, prefix)

    monkeypatch.setattr(MemoryMember, "commit", slow_commit if slow == "commit" else commit)
    monkeypatch.setattr(MemoryConsumingDoor, "target", slow_target if slow == "target" else target)

    async def later(_message: ReceivedMessage) -> None: ...

    prices.produce("a=0", "b=1")
    options = {"on_failure": "skip", "local_attempts_max": 1, "handler_timeout_s": 0.2}
    async with prices.running(Pricing(), run={"then": [later]}, **options):
        await prices.commits(2)
    assert sorted(prices.prices) == ["0", "1"]
    assert prices.values("dead") == []
