"""Both versions of Kafka's transaction protocol: which one is spoken, and late requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from tests.kafka.relay import ADD_PARTITIONS, END_TXN, PRODUCE, Fate
from tests.kafka.small_turns import FENCED_CODES, Relayed, claim, keys, progress, write
from tests.kit.kafka import KafkaHarness
from txbroker.core.records import Record
from txbroker.door.writing import Fenced, Unknown
from txbroker.kafka.client.client import Client, KafkaRefused, NotSent, Unanswered
from txbroker.kafka.client.producer import Producer, ProducerFenced
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.protocol.batch import batch_body
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.encoder import Request
from txbroker.kafka.protocol.schemas import api_versions, finalized_features
from txbroker.net.timers import Backoff

EPOCH_MAX = (1 << 15) - 1
second_protocol = pytest.mark.second_protocol


FEATURE = "transaction.version"
BROKERS_MAX_S = 900.0
"""`transaction.max.timeout.ms` by default."""
_UPGRADE, _UNSAFE_DOWNGRADE = 1, 3


class _UpdateFeaturesV1(Request):
    API_KEY, API_VERSION = 57, 1
    REQUEST = """timeout_ms:i32 updates[feature:str level:i16 upgrade_type:i8]
        validate_only:bool"""
    RESPONSE = """throttle_time_ms:i32 error_code:i16 error_message:str
        results[feature:str error_code:i16 error_message:str]"""


class _WriteTxnMarkersV1(Request):
    API_KEY, API_VERSION = 27, 1
    REQUEST = """markers[producer_id:i64 producer_epoch:i16 committed:bool
        topics[topic:str partitions[i32]] coordinator_epoch:i32]"""
    RESPONSE = """markers[producer_id:i64
        topics[topic:str partitions[partition:i32 error_code:i16]]]"""


async def level(client: Client) -> int:
    """Return the level of the feature, as the only broker knows it now."""
    answer = await client.ask_any(api_versions(), "features")
    return finalized_features(answer).get(FEATURE, 0)


async def set_level(client: Client, wanted: int) -> None:
    """Change the level of the feature, and wait until the only broker has heard of it."""
    change = _UPGRADE if wanted > await level(client) else _UNSAFE_DOWNGRADE
    request = _UpdateFeaturesV1(10_000, [(FEATURE, wanted, change)], False)
    answer = await client.ask_any(request, "features")
    assert answer.error_code == 0, (answer.error_code, answer.error_message)
    backoff = Backoff(10, 0.02)
    while await level(client) != wanted:
        assert await backoff.pause(), "the broker does not hear of it"


class Counted:
    """Lets every request pass and counts them by kind."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()

    def __call__(self, key: int) -> Fate:
        self.seen[key] += 1
        return Fate.PASS


HOLD_ALL = [Fate.HOLD] * 100
FOUR_TURNS = [b"first-%d" % op for op in (1, 2, 3, 4)]


@pytest.fixture
async def client(world: KafkaHarness) -> AsyncIterator[Client]:
    """Connections of the test itself."""
    made = Client(world.settings("itself"))
    yield made
    await made.close()


@pytest.fixture
async def spoken(client: Client) -> int:
    """The newest version of the protocol that this Kafka takes."""
    return 2 if await level(client) >= 2 else 1


def producer(client: Client, world: KafkaHarness) -> Producer:
    return Producer(client, "mine", world.name("id"))


# --- which version ---------------------------------------------------------------------------


@pytest.mark.parametrize("newest", [1, 2])
async def test_transaction_takes_minimal_requests(
    relayed: Relayed, spoken: int, newest: int
) -> None:
    await relayed.first(transactions=newest)
    await (await relayed.write(1)).committed()
    relayed.relay.decide = counted = Counted()
    # The other producer's first transaction, so that none of its own is in flight.
    await (await relayed.write(2)).committed()
    adds = 1 if min(spoken, newest) == 1 else 0
    assert {key: counted.seen[key] for key in (ADD_PARTITIONS, PRODUCE, END_TXN)} == {
        ADD_PARTITIONS: adds,
        PRODUCE: 1,
        END_TXN: 1,
    }
    assert await relayed.keys() == [b"first-1", b"first-2"]


# Brokers' features: none, an empty list, and `transaction.version` at these levels.
NO_FEATURES, LEVEL_1, LEVEL_2 = (
    b"\x01",
    b"\x02\x14transaction.version\x00\x01\x00\x01\x00",
    b"\x02\x14transaction.version\x00\x02\x00\x02\x00",
)
SPOKEN = {0: 12, 22: 5, 26: 5}


class Brokers(Client):
    """Answers what a producer asks, and remembers it."""

    def __init__(self, features: Any = LEVEL_2, spoken: dict[int, int] | None = None) -> None:
        super().__init__(KafkaSettings(bootstrap_servers=("x:1",), instance_id="one"))
        versions = [(key, 0, last) for key, last in (spoken or SPOKEN).items()]
        tags = {} if features is None else {2: features}
        self.features: Any = SimpleNamespace(error_code=0, api_versions=versions, tags=tags)
        self.asked: list[str] = []
        self.silent: list[str] = []
        self.leaders: dict[str, int] = {"a": 1}
        self.epoch = 1
        self.taken = False
        """Whether another producer has taken the transactional id meanwhile."""

    async def coordinator(self, *_: Any) -> int:
        return 1

    async def leader(self, topic: str, _partition: int) -> int:
        if topic not in self.leaders:
            raise KafkaRefused(3)
        return self.leaders[topic]

    async def ask(self, _node: int, request: Any, *_: Any) -> Any:
        name = type(request).__name__
        self.asked.append(name)
        if name in self.silent:
            self.silent.remove(name)
            raise Unanswered("silence")
        if name == "ApiVersionsV3":
            if isinstance(self.features, Exception):
                raise self.features
            return self.features
        if name == "AddPartitionsToTxnV0":
            errors = [(topic, [(p, 0) for p in parts]) for topic, parts in request.topics]
            return SimpleNamespace(errors=errors)
        if name == "InitProducerIdV5":
            return self._begin(*request.values[2:])
        return SimpleNamespace(error_code=0, producer_id=7, producer_epoch=self.epoch + 1)

    def _begin(self, producer: int, epoch: int) -> Any:
        if producer < 0:
            return SimpleNamespace(error_code=0, producer_id=7, producer_epoch=self.epoch)
        if (producer, epoch) != (7, self.epoch) or self.taken:
            return SimpleNamespace(error_code=90, producer_id=-1, producer_epoch=-1)
        if epoch >= EPOCH_MAX - 1:
            return SimpleNamespace(error_code=0, producer_id=8, producer_epoch=0)
        self.epoch += 1
        return SimpleNamespace(error_code=0, producer_id=7, producer_epoch=self.epoch)

    async def begun(self) -> Producer:
        """Return a started producer."""
        made = Producer(self, "lane", "id")
        await made.start(Backoff(1, 0.001))
        self.asked.clear()
        return made


@pytest.mark.parametrize(
    ("features", "spoken", "version"),
    [
        (LEVEL_2, SPOKEN, 2),
        (LEVEL_1, SPOKEN, 1),
        (NO_FEATURES, SPOKEN, 1),
        (None, SPOKEN, 1),
        # As Kafka 3.9 with the feature switched on before its time.
        (LEVEL_2, {0: 11, 22: 5, 26: 4}, 1),
        (LEVEL_2, {0: 12, 22: 5}, 1),
        (KafkaRefused(35), SPOKEN, 1),
    ],
)
async def test_version_is_negotiated(features: Any, spoken: dict[int, int], version: int) -> None:
    brokers = Brokers(features, spoken)
    if isinstance(features, Exception):
        brokers.features = features
    assert (await brokers.begun()).protocol == version


async def test_unanswered_negotiation_fails() -> None:
    brokers = Brokers()
    brokers.features = NotSent("unreachable")
    made = Producer(brokers, "lane", "id")
    with pytest.raises(NotSent):
        await made.start(Backoff(0.05, 0.01))
    assert made.id < 0


@pytest.mark.rule(15)
@pytest.mark.parametrize(
    ("leaders", "adds"),
    [({"a": 1, "b": 1}, 0), ({"a": 1, "b": 2}, 1), ({"a": 1}, 1)],
    ids=["one", "several", "unknown"],
)
async def test_partitions_of_several_brokers_are_added_at_once(
    leaders: dict[str, int], adds: int
) -> None:
    brokers = Brokers()
    brokers.leaders = leaders
    own = await brokers.begun()
    await own.add([("a", 0), ("b", 0)], Backoff(1, 0.001))
    assert brokers.asked == ["AddPartitionsToTxnV0"] * adds


@pytest.mark.rule(15)
async def test_partitions_are_added_explicitly_right_after_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brokers = Brokers()
    own = await brokers.begun()
    backoff = Backoff(1, 0.001)
    monkeypatch.setattr("txbroker.kafka.client.producer._MARKERS_S", 60)
    for _ in range(2):
        await own.add([("a", 0)], backoff)
        await own.end(commit=True, backoff=backoff)
    assert brokers.asked == ["EndTxnV5", "AddPartitionsToTxnV0", "EndTxnV5"]
    monkeypatch.setattr("txbroker.kafka.client.producer._MARKERS_S", -1)
    await own.add([("a", 0)], backoff)
    assert brokers.asked[3:] == []


@pytest.mark.parametrize(
    ("seen", "waited_s", "adds"), [("this", -1, 0), ("this", 60, 1), ("before", -1, 1)]
)
async def test_visible_transaction_completes_soon_after(
    monkeypatch: pytest.MonkeyPatch, seen: str, waited_s: float, adds: int
) -> None:
    brokers = Brokers()
    own = await brokers.begun()
    backoff = Backoff(1, 0.001)
    monkeypatch.setattr("txbroker.kafka.client.producer._MARKERS_S", 60)
    monkeypatch.setattr("txbroker.kafka.client.producer._COMPLETION_S", waited_s)
    if seen == "before":
        own.note_visible()
        await asyncio.sleep(0.001)
    await own.end(commit=True, backoff=backoff)
    if seen == "this":
        await asyncio.sleep(0.001)
        own.note_visible()
    brokers.asked.clear()
    await own.add([("a", 0)], backoff)
    assert brokers.asked == ["AddPartitionsToTxnV0"] * adds


@pytest.mark.parametrize("features", [LEVEL_1, LEVEL_2])
async def test_only_version_2_retries_unanswered_requests(features: bytes) -> None:
    brokers = Brokers(features)
    brokers.leaders = {"a": 1, "b": 2}
    own = await brokers.begun()
    ends = "EndTxnV0" if features == LEVEL_1 else "EndTxnV5"
    brokers.silent = ["AddPartitionsToTxnV0", ends]
    backoff = Backoff(1, 0.001)
    requests = (own.add([("a", 0), ("b", 0)], backoff), own.end(commit=True, backoff=backoff))
    for request in requests:
        if features == LEVEL_1:
            with pytest.raises(Unanswered):
                await request
        else:
            await request
    times = 1 if features == LEVEL_1 else 2
    assert Counter(brokers.asked) == {"AddPartitionsToTxnV0": times, ends: times}


@pytest.mark.rule(15)
@pytest.mark.parametrize(("epoch", "renewals"), [(EPOCH_MAX - 4, 0), (EPOCH_MAX - 3, 3)])
async def test_no_transaction_begins_in_last_epochs(epoch: int, renewals: int) -> None:
    brokers = Brokers()
    brokers.epoch = epoch
    own = await brokers.begun()
    await own.add([("a", 0)], Backoff(1, 0.001))
    assert brokers.asked == ["InitProducerIdV5"] * renewals
    assert (own.id, own.epoch) == ((8, 0) if renewals else (7, epoch))


async def test_fenced_producer_cannot_renew_its_epoch() -> None:
    brokers = Brokers()
    brokers.epoch = EPOCH_MAX - 2
    own = await brokers.begun()
    brokers.taken = True
    with pytest.raises(ProducerFenced):
        await own.add([("a", 0)], Backoff(1, 0.001))


@pytest.mark.rule(15)
@second_protocol
async def test_withdrawn_version_is_not_used(world: KafkaHarness, client: Client) -> None:
    topic = await world.create_topic("target")
    own = producer(client, world)
    partition = (await world.door("one")).partition(0)
    await partition.claim(claim("first"))
    written = []

    async def write_some(name: str) -> None:
        for op in range(len(written) + 1, len(written) + 4):
            await (await write(partition, name, op, topic)).visible()
            written.append(b"%s-%d" % (name.encode(), op))

    await write_some("first")
    try:
        for number, wanted in enumerate((1, 2), 2):
            open_turn = await write(partition, f"open{number}", len(written) + 1, topic)
            written.append(b"open%d-%d" % (number, len(written) + 1))
            await set_level(client, wanted)
            await open_turn.committed()
            await own.start(Backoff(10, 0.01))
            assert own.protocol == wanted
            # A started producer keeps its version until the next claim.
            await write_some(f"other{number}")
            taken = await partition.claim(claim(f"claim{number}"))
            assert taken.progress is not None
            assert taken.progress.op == len(written)
            await write_some(f"claim{number}")
    finally:
        if await level(client) != 2:
            await set_level(client, 2)
    assert await keys(world, topic) == written


@pytest.mark.rule(15)
@pytest.mark.parametrize("newest", [1, 2])
async def test_late_marker_of_an_abort_ends_no_later_transaction(
    world: KafkaHarness, client: Client, monkeypatch: pytest.MonkeyPatch, newest: int
) -> None:
    """A coordinator whose connection was cut sends it again, and both may arrive."""
    topic = await world.create_topic("target")
    monkeypatch.setattr(client, "settings", world.settings("itself", transactions=newest))
    own, backoff = producer(client, world), Backoff(20, 0.001)

    async def write(key: bytes) -> None:
        await own.add([(topic, 0)], backoff)
        await own.produce({(topic, 0): batch_body([Record(key, b"")])}, backoff)

    await own.start(backoff)
    await write(b"aborted")
    aborted = own.id, own.epoch + (own.protocol == 2)
    await own.abort(backoff)
    await write(b"committed")
    marker = _WriteTxnMarkersV1([(*aborted, False, [(topic, [0])], 0)])
    answer = await client.ask(await client.leader(topic, 0), marker, "late")
    assert answer.markers[0][1] == [(topic, [(0, Code.INVALID_PRODUCER_EPOCH)])]
    await own.end(commit=True, backoff=backoff)
    assert await keys(world, topic) == [b"committed"]


# --- the second version ----------------------------------------------------------------------


@pytest.mark.rule(15)
@second_protocol
async def test_every_end_raises_epoch_and_resets_sequences(
    world: KafkaHarness, client: Client
) -> None:
    topic = await world.create_topic("target")
    own = producer(client, world)
    backoff = Backoff(20, 0.001)
    await own.start(backoff)
    begun = own.id, own.epoch
    for number, commit in enumerate((True, False, True), 1):
        for part in range(2):
            await own.produce(
                {(topic, 0): batch_body([Record(b"%d-%d" % (number, part), b"")])}, backoff
            )
        await own.end(commit=commit, backoff=backoff)
        assert (own.id, own.epoch) == (begun[0], begun[1] + number)
    later = producer(client, world)
    await later.start(backoff)
    assert (later.id, later.epoch) == (begun[0], begun[1] + 4)
    assert await keys(world, topic) == [b"1-0", b"1-1", b"3-0", b"3-1"]


@pytest.fixture(params=[False, True], ids=["one-leader", "several"])
def several(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether partitions count as led by several brokers, where there is but one."""
    if request.param:

        async def not_led_by_one(*_: object) -> bool:
            return False

        monkeypatch.setattr(Producer, "_have_one_leader", not_led_by_one)
    return bool(request.param)


@pytest.mark.rule(15)
@second_protocol
@pytest.mark.parametrize(
    ("fate", "changes"),
    [(Fate.HOLD_AND_RESET, {}), (Fate.HOLD, {"request_timeout_s": 0.4})],
    ids=["reset", "timeout"],
)
async def test_v2_late_commit_ends_no_later_transaction(
    relayed: Relayed, several: bool, fate: Fate, changes: dict[str, Any]
) -> None:
    await relayed.first(**changes)
    relayed.decide(END_TXN, fate)
    first = await relayed.write(1)
    ghost = await relayed.relay.caught()
    await first.visible()
    relayed.relay.decide = counted = Counted()
    await (await relayed.write(2)).visible()
    assert counted.seen[ADD_PARTITIONS] == several
    # The next turn of the ghost's own producer is written, and not yet ended.
    relayed.decide(END_TXN, *HOLD_ALL)
    third = await relayed.write(3)
    await relayed.relay.caught(2)
    assert await ghost.release() in FENCED_CODES
    assert await relayed.keys() == [b"first-1", b"first-2"]
    relayed.decide(-1)
    relayed.relay.held[-1].reset()
    await third.visible()
    await (await relayed.write(4)).visible()
    assert await relayed.keys() == FOUR_TURNS


@second_protocol
@pytest.mark.usefixtures("several")
async def test_v2_commit_with_lost_answer_is_retried(relayed: Relayed) -> None:
    await relayed.first()
    for op in (1, 2, 3, 4):
        relayed.decide(END_TXN, Fate.LOSE_ANSWER, Fate.LOSE_ANSWER)
        await (await relayed.write(op)).visible()
    assert await relayed.taken_over() == progress("first", 4)
    assert await relayed.keys() == FOUR_TURNS


@second_protocol
@pytest.mark.parametrize("fate", [Fate.HOLD_AND_RESET, Fate.LOSE_ANSWER])
async def test_v2_unanswered_add_is_retried(relayed: Relayed, several: bool, fate: Fate) -> None:
    await relayed.first()
    relayed.decide(ADD_PARTITIONS, fate)
    for op in (1, 2, 3):
        await (await relayed.write(op)).visible()
    for ghost in relayed.relay.held:
        # A late request would begin a hanging transaction.
        await ghost.deliver()
    await (await relayed.write(4)).visible()
    held = int(fate is Fate.HOLD_AND_RESET)
    count = len(relayed.relay.held)
    assert count == held or (not several and not count)
    assert await relayed.keys() == FOUR_TURNS


@pytest.mark.rule(15)
@second_protocol
async def test_v2_never_answered_commit_is_lost(relayed: Relayed) -> None:
    await relayed.first(request_timeout_s=0.3, transaction_timeout_s=1.0)
    relayed.decide(END_TXN, *HOLD_ALL)
    handle = await relayed.write(1)
    await relayed.relay.caught(2)
    with pytest.raises((Unknown, Fenced)):
        await handle.committed()
    relayed.decide(-1)
    assert await relayed.taken_over() is None
    for ghost in relayed.relay.held:
        assert await ghost.release() in FENCED_CODES
    await (await relayed.write(1, "second")).visible()
    assert await relayed.keys() == [b"second-1"]


@pytest.mark.rule(15)
@second_protocol
async def test_v2_write_after_abort_is_refused(relayed: Relayed) -> None:
    await relayed.first(request_timeout_s=0.4)
    relayed.decide(PRODUCE, *HOLD_ALL)
    with pytest.raises(Unknown):
        await relayed.write(1)
    relayed.decide(-1)
    assert await relayed.taken_over() is None
    assert relayed.relay.held
    for ghost in relayed.relay.held:
        await ghost.deliver()
    # The late request began no hanging transaction.
    await (await relayed.write(1, "second")).visible()
    assert await relayed.keys() == [b"second-1"]


@second_protocol
async def test_unanswered_end_delays_next_end(relayed: Relayed) -> None:
    await relayed.first()
    relayed.decide(END_TXN, *HOLD_ALL)
    first = await relayed.write(1)
    ghost = await relayed.relay.caught()
    second = await relayed.write(2)
    relayed.decide(-1)
    ghost.reset()
    await asyncio.gather(first.visible(), second.visible())
    assert await ghost.release() in (0, *FENCED_CODES)
    assert len(relayed.relay.held) == 1
    assert await relayed.keys() == [b"first-1", b"first-2"]


@second_protocol
@pytest.mark.long
@pytest.mark.timeout(900)
async def test_exhausted_epochs_lead_to_a_new_producer_id(
    world: KafkaHarness, client: Client
) -> None:
    topic = await world.create_topic("target")
    own = producer(client, world)
    backoff = Backoff(600, 0.001, 0.005)
    await own.start(backoff)
    first_id, written = own.id, []
    while own.epoch < EPOCH_MAX - 6:
        await own.start(backoff)
    assert own.id == first_id
    for number in range(8):
        await own.add([(topic, 0)], backoff)
        assert own.epoch < EPOCH_MAX - 3
        await own.produce({(topic, 0): batch_body([Record(b"%d" % number, b"")])}, backoff)
        await own.end(commit=True, backoff=backoff)
        written.append(b"%d" % number)
    assert own.id != first_id
    assert own.epoch < 8
    assert await keys(world, topic) == written


@pytest.mark.parametrize("request_timeout_s", [1.0, BROKERS_MAX_S])
async def test_a_producer_takes_what_brokers_allow(
    world: KafkaHarness, request_timeout_s: float
) -> None:
    """Their `transaction.max.timeout.ms` is lower than the setting."""
    settings = structs.replace(
        world.settings("timeout"),
        transaction_timeout_s=3 * BROKERS_MAX_S,
        request_timeout_s=request_timeout_s,
    )
    client = Client(settings)
    producer = Producer(client, "mine", world.name("id"))
    try:
        if 2 * request_timeout_s > BROKERS_MAX_S:  # an abort would come too late
            with pytest.raises(KafkaRefused, match="no transaction of 1800 s: raise their trans"):
                await producer.start(Backoff(10, 0.01))
        else:
            await producer.start(Backoff(10, 0.01))
            assert producer.transaction_timeout_s == 0.75 * BROKERS_MAX_S
    finally:
        await client.close()
