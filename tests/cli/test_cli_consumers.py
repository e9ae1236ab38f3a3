"""`txbroker consumers`, with running consumers: on a Kafka in memory, and on a real one."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cli import Call, Result
from tests.kit.until import unique, until
from txbroker.cli.ops import consumers
from txbroker.cli.ops.consumer_rows import parse_key, shown_key
from txbroker.config.settings import load_kafka_access
from txbroker.consumer import Consumer, InDatabase, Reject
from txbroker.consumer.asides import table
from txbroker.consumer.message import ReceivedMessage
from txbroker.core.consuming.copies import GroupTopics
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Record
from txbroker.databases import SQLite
from txbroker.door.consuming import ConsumingDoor, TopicSpec
from txbroker.door.writing import Copy, Refused
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.door.consuming import KafkaConsumingDoor
from txbroker.testing.broker import InMemoryBroker

QUICK = {"session_s": 6.0, "lease_s": 3.0, "heartbeat_s": 0.2, "local_attempts_max": 1}


class Place:
    """A Kafka, and the command line for it.

    Attributes:
        file: the SQLite database in which consumers keep positions and failed messages.
        topic: of the test, with two partitions.
        group: of the test.
    """

    def __init__(
        self, kafka: Any, door: ConsumingDoor, call: Call, file: Path | None = None
    ) -> None:
        self.kafka = kafka
        self.file = file
        self.door = door
        self._call = call
        self.topic, self.group = unique("orders"), unique("stock")
        self.handled: list[tuple[bytes | None, bytes | None]] = []
        self.broken = True

    async def ask(self, *arguments: object) -> Result:
        """Call `txbroker consumers`."""
        where = ("--kafka", self.kafka) if isinstance(self.kafka, str) else ()
        if self.file is not None and arguments[0] not in ("list", "show"):
            where = ("--database", f"sqlite:///{self.file}")
        return await asyncio.to_thread(self._call, "consumers", *arguments, *where)

    async def rows(self, *arguments: object) -> Any:
        result = await self.ask(*arguments, "-o", "json")
        assert result.code == 0, result.err
        return json.loads(result.out)

    async def send(self, *records: tuple[bytes | None, bytes | None], partition: int = 0) -> None:
        await self.door.append(self.topic, partition, [Record(*each) for each in records])

    async def handle(self, message: ReceivedMessage) -> None:
        """`handle_in_thread` on the event loop."""
        self.handle_in_thread(message)

    def handle_in_thread(self, message: ReceivedMessage, _connection: object = None) -> None:
        """Handle a message; of the key `bad`, and without a key, only if nothing is broken."""
        if self.broken and message.key in (b"bad", None):
            raise Reject("no such item") if message.value == b"reject" else ValueError("no stock")
        self.handled.append((message.key, message.value))

    @asynccontextmanager
    async def consuming(self, **options: Any) -> AsyncIterator[None]:
        """Run a consumer."""
        given = {"group": self.group, "topics": [self.topic], **QUICK, **options}
        handler: Callable[..., Any] = self.handle
        if self.file is not None:
            database = SQLite(self.file, create_tables=True)
            given |= {"mode": "exactly-once", "store": InDatabase(database)}
            handler = self.handle_in_thread
        async with Consumer(self.kafka, **given) as consumer:
            running = asyncio.create_task(consumer.run(handler))
            try:
                yield
            finally:
                consumer.stop()
                await running


@pytest.fixture(params=["memory", "database", "kafka"])
async def place(
    request: pytest.FixtureRequest, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[Place]:
    kafka: Any
    monkeypatch.setattr(table, "_POLL_S", 0.05)
    if request.param != "kafka":
        kafka = request.getfixturevalue("memory")
        monkeypatch.setattr(consumers, "open_door", lambda _settings: kafka.consuming_door())
        door = kafka.consuming_door()
    else:
        kafka = request.getfixturevalue("kafka").bootstrap
        door = KafkaConsumingDoor.from_access(load_kafka_access(kafka))
    await door.start()
    made = Place(kafka, door, call, tmp_path / "shop.db" if request.param == "database" else None)
    await door.create([TopicSpec(made.topic, 2, 1, {})])
    yield made
    await door.close()


# --- set-aside keys --------------------------------------------------------------------------


async def test_key_set_aside_is_shown_released_and_handled_in_order(place: Place) -> None:
    first = [(b"bad", b"1"), (b"good", b"1"), (b"bad", b"2"), (b"good", b"2"), (None, b"3")]
    async with place.consuming(order="key", on_failure="aside"):
        await place.send(*first)
        await until(lambda: len(place.handled) == 2)

        async def set_aside() -> bool:
            return (await place.ask("aside", place.group)).out.count("ValueError") == 2

        await until(set_aside)
        rows = await place.rows("aside", place.group)
        bad, lone = rows
        since_ms = bad.pop("since_ms")
        assert bad == {
            "key": "bad",
            "messages": 2,
            "source": f"{place.topic}/0@0",
            "released": False,
            "attempts": 1,
            "cause": "ValueError: no stock",
        }
        assert (lone["key"], lone["source"]) == (None, f"{place.topic}/0@4")
        assert since_ms <= lone["since_ms"]
        narrowed = ("--topic", place.topic, "--partition", 0, "--key", "hex:626164")
        assert [row["key"] for row in await place.rows("aside", place.group, *narrowed)] == ["bad"]
        assert await place.rows("aside", place.group, "--partition", 1) == []
        await until(lambda: listed(place, aside_keys=2, lag=0))

        place.broken = False
        await place.send((b"bad", b"4"))
        await until(lambda: waits(place, 3))
        done = await place.ask(
            *("release", place.group, "--key", "bad", "--reason", "stock is back"),
            *("--wait", 30, "--yes", "-o", "json"),
        )
        assert (done.code, done.err) == (0, "1 key released, and all their messages are done.\n")
        assert [row["messages"] for row in done.json] == [3]
        assert place.handled[2:] == [(b"bad", b"1"), (b"bad", b"2"), (b"bad", b"4")]
        assert await place.rows("aside", place.group) == [lone]

        one = ("--source", lone["source"])
        alone = await place.ask("release", place.group, *one, "--reason", "r", "--wait", 30, "-y")
        assert alone.code == 0, alone.err
        assert place.handled[5:] == [(None, b"3")]
        assert await place.rows("aside", place.group) == []
        await place.send((b"bad", b"5"))
        await until(lambda: place.handled[6:] == [(b"bad", b"5")])
        await until(lambda: listed(place, aside_keys=0, lag=0))


async def listed(place: Place, **facts: Any) -> bool:
    """Return whether the list shows these facts of the group."""
    found = [row for row in await place.rows("list") if row["group"] == place.group]
    if place.file is not None and found:  # Kafka has no dead letters of it
        found[0]["dead_letters"] = len(await place.rows("dead", place.group))
    return len(found) == 1 and all(found[0][name] == value for name, value in facts.items())


async def waits(place: Place, messages: int) -> bool:
    """Return whether messages of the first set-aside key wait."""
    return bool((await place.rows("aside", place.group))[0]["messages"] == messages)


async def test_release_reports_a_key_that_fails_again(place: Place) -> None:
    async with place.consuming(order="key", on_failure="aside"):
        await place.send((b"bad", b"1"))
        await until(lambda: shown(place, "aside"))
        again = ("release", place.group, "--all", "--reason", "try", "--yes")
        failed = await place.ask(*again, "--wait", 30)
        assert failed.code == 3
        assert "1 of 1 key still set aside: 1 failed again; 0 not done" in failed.err
        assert [row["released"] for row in await place.rows("aside", place.group)] == [False]
        place.broken = False
        assert (await place.ask(*again, "--wait", 30)).code == 0
        place.broken = True
        await place.send((b"bad", b"2"))
        await until(lambda: shown(place, "aside"))
    unread = await place.ask(*again, "--wait", 0.2)  # no consumer runs
    assert unread.code == 3
    assert "0 failed again; 1 not done after 0.2 s" in unread.err
    assert [row["released"] for row in await place.rows("aside", place.group)] == [True]
    assert place.handled == [(b"bad", b"1")]


async def shown(place: Place, what: str) -> bool:
    """Return whether a list is not empty; false until the group has its topics."""
    return (await place.ask(what, place.group)).out != ""


# --- dead letters ----------------------------------------------------------------------------


async def test_dead_letter_is_sent_back_once(place: Place, answer: Callable[..., None]) -> None:
    value = b"\xff" * 5
    async with place.consuming(on_failure="skip"):
        await place.send((b"bad", b"reject"), (b"good", b"1"), (b"bad", value))
        await until(lambda: listed(place, dead_letters=2))
        newest, oldest = await place.rows("dead", place.group, "--values")
        assert (newest["value"], oldest["value"]) == ("hex:ffffffffff", "reject")
        assert (newest["cause"], oldest["cause"]) == ("ValueError: no stock", "no such item")
        assert (newest["source"], newest["attempts"]) == (f"{place.topic}/0@2", 1)
        assert (newest["key"], newest["size"]) == ("bad", 5)
        assert [row["source"] for row in await place.rows("dead", place.group, "--limit", 1)] == [
            newest["source"]
        ]
        assert "VALUE" not in (await place.ask("dead", place.group)).out

        place.broken = False
        one = ("retry", place.group, "--source", newest["source"], "--reason", "again")
        answer("n")
        stopped = await place.ask(*one)
        assert stopped.code == 1
        assert f"Send 1 dead letter of group {place.group} back?" in stopped.err
        assert newest["source"] in stopped.err
        done = await place.ask(*one, "--yes")
        assert (done.code, done.err) == (0, "1 dead letter sent back.\n")
        await until(lambda: place.handled == [(b"good", b"1"), (b"bad", value)])
        assert await place.rows("dead", place.group, "--values") == [oldest]
        twice = await place.ask(*one, "--yes")
        assert twice.code == 1
        assert f"{newest['source']} has no dead letter" in twice.err

        every = ("retry", place.group, "--key", "bad", "--reason", "again", "--yes")
        assert (await place.ask(*every)).code == 0
        await until(lambda: len(place.handled) == 3)
        assert await place.rows("dead", place.group) == []
        assert (await place.ask(*every)).code == 1
    assert place.handled[2:] == [(b"bad", b"reject")]


async def test_dead_letter_that_fails_again_is_a_new_one(place: Place) -> None:
    async with place.consuming(on_failure="skip"):
        await place.send((b"bad", b"1"))
        await until(lambda: listed(place, dead_letters=1))
        (before,) = await place.rows("dead", place.group)
        await place.ask("retry", place.group, "--all", "--reason", "again", "--yes")
        await until(lambda: listed(place, dead_letters=1))

        async def again() -> Any:
            rows = await place.rows("dead", place.group)
            return rows and rows[0]["attempts"] == 2 and rows

        (after,) = await until(again)
        assert after["source"] == before["source"]
        assert (after["dead_letter"] == before["dead_letter"]) == (place.file is not None)


async def test_store_is_all_or_nothing(place: Place) -> None:
    copies = [Copy(place.topic, number, Record(b"k", b"v")) for number in (0, 1)]
    await place.door.store(place.group, copies)
    missing = Copy(unique("none"), 0, Record(b"k", b"v"))
    with pytest.raises((Refused, KafkaUnavailable)):
        await place.door.store(place.group, [*copies, missing])
    for number in (0, 1):
        records = await place.door.read((place.topic, number), 0, 10)
        assert [record.value for record in records] == [b"v"]


# --- groups ----------------------------------------------------------------------------------


async def test_show_has_positions_owners_and_retries(place: Place) -> None:
    if place.file is not None:
        place.broken = False  # Kafka does not show retries of a database
    async with place.consuming(order="none"):
        await place.send((b"bad", b"1"), (b"good", b"2"))
        await until(lambda: listed(place, lag=0, state="Stable", members=1, partitions=2))
        view = await place.rows("show", place.group)
        (member,) = view["members"]
        zero = view["partitions"][0]
        assert (zero["owner"], zero["position"], zero["done_ahead"]) == (member["name"], 2, 0)
        assert (zero["lag"], zero["aside_keys"], zero["metadata"]) == (0, 0, "txbroker")
        assert zero["token"] >= 1
        text = (await place.ask("show", place.group)).out
        assert text.startswith(f"{place.group}: Stable, 1 member, lag 0\n")
        if place.file is None:
            (step,) = view["retries"]
            assert (step["step"], step["delay_s"], step["messages"]) == (0, 10, 1)
            assert "NEXT IS DUE" in text


async def test_group_of_other_programs_is_recognised(
    memory: InMemoryBroker, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "open_door", lambda _settings: memory.consuming_door())
    memory.create_topic("orders")
    door = memory.consuming_door()
    group = memory._kafka.group("other")
    group.offsets["orders", 0] = StoredOffset(0, "sent by another client")
    group.offsets["gone", 0] = StoredOffset(5, "")
    assert await door.groups() == ["other"]
    assert (await asyncio.to_thread(call, "consumers", "list")).err == (
        "No group of txbroker's consumers.\n"
    )
    found = await asyncio.to_thread(call, "consumers", "show", "other", "-o", "json")
    gone, orders = found.json["partitions"]
    assert (gone["metadata"], gone["end"], gone["lag"]) == ("none", None, None)
    assert orders["metadata"] == "foreign"
    assert "another program, or a newer version" in found.err


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (
            ("show", "unknown"),
            1,
            "no consumer group 'unknown': `txbroker consumers list` lists them",
        ),
        (("aside", "plain"), 1, "its consumers need on_failure='aside'"),
        (("dead", "plain"), 1, "has no dead-letter topic"),
        (("retry", "plain", "--all", "--reason", "r", "-y"), 1, "has no dead-letter topic"),
        (("release", "own", "--key", "k", "--reason", "r", "-y"), 1, "key k is not set aside"),
        (("release", "own", "--reason", "r", "-y"), 2, "choose by --key or --source"),
        (("release", "own", "--all", "--key", "k", "--reason", "r", "-y"), 2, "--all chooses"),
        (("release", "own", "--partition", "1", "--key", "k", "--reason", "r"), 2, "needs --topic"),
        (("release", "own", "--all", "-y"), 2, "--reason"),
        (("release", "own", "--all", "--reason", "r"), 2, "give --yes to go on"),
        (("retry", "own", "--all", "--reason", "r", "-y"), 1, "no such dead letter in group own"),
        (("retry", "own", "--source", "x/1", "--reason", "r", "-y"), 2, "TOPIC/PARTITION@OFFSET"),
        (("aside", "own", "--key", "hex:zz"), 2, "the bytes after hex: are no hex"),
        (("aside", "own", "--key", "base64:?"), 2, "the bytes after base64: are no base64"),
        (("aside", "own", "--database", "oracle://x"), 1, "has one of the forms sqlite:///FILE"),
        (("dead", "own", "--database", "sqlite:///none.db"), 1, "does not exist: correct its path"),
        (("dead", "unknown", "--database", "sqlite:///shop.db"), 1, "has no rows of group unknown"),
    ],
)
def test_bad_input_gets_a_sentence(
    memory: InMemoryBroker,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(consumers, "open_door", lambda _settings: memory.consuming_door())
    for topic in ("orders", *GroupTopics.of("txbroker", "own")):
        memory.create_topic(topic)
    memory._kafka.group("plain").offsets["orders", 0] = StoredOffset(0, "")
    SQLite(tmp_path / "shop.db").create()
    result = call("consumers", *arguments)
    assert (result.code, result.out) == (code, "")
    assert sentence in result.err


def test_unreachable_kafka_names_the_next_step(call: Call, closed_port: socket.socket) -> None:
    address = f"127.0.0.1:{closed_port.getsockname()[1]}"
    result = call("consumers", "list", "--kafka", address)
    assert (result.code, result.out) == (1, "")
    assert f"no connection to Kafka at {address}" in result.err
    assert "check that it is running, and its address" in result.err


@pytest.mark.parametrize("key", [b"", b"k", "ü".encode(), b"\xff\x00", b"hex:ab", b"a\nb"])
def test_shown_keys_can_be_given(key: bytes) -> None:
    text = shown_key(key)
    assert text is not None
    assert text.isprintable()
    assert parse_key(text) == key
