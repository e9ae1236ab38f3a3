"""Without a group: each instance reads everything and keeps its positions in a file."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.kit.consumer_world import Handler, World, counted
from tests.kit.processing import Doors
from tests.kit.until import until
from txbroker.consumer import Consumer, InFile
from txbroker.errors import ConfigurationError


def instance(path: Path, **options: Any) -> dict[str, Any]:
    return {"group": None, "store": InFile(path), **options}


async def test_each_instance_reads_all_from_its_start_on(world: World, tmp_path: Path) -> None:
    world.produce("before")
    one, two = Handler(), Handler()
    async with (
        world.running(one, **instance(tmp_path / "one.db")),
        world.running(two, **instance(tmp_path / "two.db")),
    ):
        world.produce("1", "2")
        world.produce("3", partition=1)
        await one.does("1", "2", "3")
        await two.does("1", "2", "3")
    world.produce("4")
    async with world.running(one, **instance(tmp_path / "one.db")):
        await one.does("1", "2", "3", "4")
    assert one.messages[-1].token == one.messages[0].token + 1
    assert two.done == two.seen
    assert not world.kafka.groups


@pytest.mark.parametrize("mode", ["at-least-once", "at-most-once"])
async def test_restart_continues(world: World, tmp_path: Path, mode: str) -> None:
    handler = Handler()
    total = 0
    for _ in range(4):
        options = instance(tmp_path / "one.db", mode=mode, order="key", start="earliest")
        async with world.running(handler, **options):
            for _ in range(25):
                world.produce(f"{total % 5}={total}", partition=total % 2)
                total += 1
            if total == 50:
                world.kafka.add_partitions("orders", 3)
                world.produce("new", partition=2)
            await until(lambda total=total: len(handler.done) >= total)
    assert sorted(handler.done) == sorted([*(str(number) for number in range(total)), "new"])


async def test_crash_loses_only_the_last_positions(world: World, tmp_path: Path) -> None:
    """A file as it is while the consumer runs."""
    handler = Handler()
    async with world.running(handler, **instance(tmp_path / "one.db")):
        world.produce("1", "2")
        await handler.does("1", "2")
        await asyncio.sleep(0.1)
        for file in tmp_path.glob("one.db*"):
            (tmp_path / file.name.replace("one", "two")).write_bytes(file.read_bytes())
    world.produce("3")
    again = Handler()
    async with world.running(again, **instance(tmp_path / "two.db")):
        await again.does("3")


async def test_full_disk_is_waited_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, refused = InFile(tmp_path / "one.db"), 0
    commit = store._commit

    def full(*arguments: Any) -> None:
        nonlocal refused
        if handler.done and refused < 2:
            refused += 1
            raise sqlite3.OperationalError("database or disk is full")
        commit(*arguments)

    monkeypatch.setattr(store, "_commit", full)
    handler = Handler()
    async with world.running(handler, group=None, store=store):
        world.produce("1")
        await handler.does("1")
        await until(lambda: refused == 2)
    again = Handler()
    async with world.running(again, **instance(tmp_path / "one.db")):
        world.produce("2")
        await again.does("2")
    assert again.done == ["2"]


async def test_skipped_messages_are_kept_in_the_file(world: World, tmp_path: Path) -> None:
    handler = Handler(bad=ValueError("bug"))
    async with world.running(handler, **instance(tmp_path / "one.db", order="key")) as consumer:
        world.produce("a=bad", "a=2", headers=(("trace", b"1"),))
        await handler.does("2")
        await until(lambda: counted(consumer, "dead") == 1)
    connection = sqlite3.connect(tmp_path / "one.db")
    ((key, value, headers),) = connection.execute("SELECT key, value, headers FROM failed")
    connection.close()
    assert (key, value) == (b"a", b"bad")
    names = [name for name, _value in json.loads(headers)]
    assert names == [
        "txb-source",
        "txb-attempt",
        "txb-step",
        "txb-due",
        "txb-cause",
        "txb-timestamp",
        "trace",
    ]
    assert not [name for name in world.kafka.topics if name.startswith("txbroker.")]


async def test_file_in_use(world: World, tmp_path: Path) -> None:
    async with world.running(Handler(), **instance(tmp_path / "one.db")):
        other = world.consumer(**instance(tmp_path / "one.db"))
        with pytest.raises(ConfigurationError, match=r"another consumer uses it; each instance"):
            await other.start()
    async with world.running(Handler(), **instance(tmp_path / "one.db")):
        pass


def _foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (x)")
    connection.commit()
    connection.close()


def _newer(path: Path) -> None:
    store = InFile(path)
    store.open()
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 2")
    connection.close()


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (_foreign, "another program's"),
        (_newer, "a newer version's"),
        (lambda path: path.write_bytes(b"no database" * 100), "not a database"),
        (lambda path: path.mkdir(), "unable to open"),
    ],
)
async def test_unusable_files(world: World, tmp_path: Path, prepare: Any, says: str) -> None:
    prepare(tmp_path / "one.db")
    with pytest.raises(ConfigurationError, match=says):
        await world.consumer(**instance(tmp_path / "one.db")).start()


@pytest.mark.parametrize("path", ["/nowhere/one.db", ":memory:"])
async def test_unusable_paths(world: World, path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be used|needs a file"):
        await world.consumer(**instance(Path(path))).start()


async def test_other_metadata_in_the_group(world: World) -> None:
    from txbroker.core.consuming.position import StoredOffset

    for metadata, says in (("consumer-1", "another program wrote"), ("txb3:x", "upgrade this one")):
        world.group.offsets["orders", 0] = StoredOffset(0, metadata)
        async with world.consumer() as consumer:
            with pytest.raises(ConfigurationError, match=says):
                await consumer.run(Handler())
        assert world.group.offsets["orders", 0] == StoredOffset(0, metadata), "it is unchanged"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group": None}, "need a store: give group, or store=InFile"),
        ({"store": InFile("x")}, "keeps its positions in Kafka: leave store out"),
        ({"group": "a/b"}, "makes no topic names"),
        ({"group": ""}, "makes no topic names"),
        ({"group": "g" * 201}, "makes no topic names"),
        ({"topics": "orders"}, r"write topics=\['orders'\]"),
        ({"topics": []}, "either topics or pattern"),
        ({"topics": ["orders"], "pattern": "o.*"}, "either topics or pattern"),
        ({"topics": None, "pattern": "("}, "pattern"),
        ({"mode": "exactly-once"}, "'at-least-once' and make the handler repeatable"),
        ({"mode": "twice"}, "'twice' is not one of"),
        ({"order": "random"}, "'random' is not one of"),
        ({"on_gap": "ask"}, "'ask' is not one of"),
        ({"start": "now"}, "start 'now' is not"),
        ({"in_flight_max": 0}, "in_flight_max is 0: it is a whole number, at least 1"),
        ({"readers": 0}, "readers is 0"),
        ({"buffered_bytes_max": 1}, "buffered_bytes_max is 1"),
        ({"lease_s": 70.0}, "must rise"),
        ({"heartbeat_s": 40.0}, "must rise"),
        ({"drain_s": -1.0}, "drain_s is -1"),
        ({"unknown": 1}, "unknown option of Consumer"),
        ({"mode": "at-most-once", "on_failure": "skip"}, "leave on_failure out"),
        ({"group": None, "store": InFile("x"), "on_failure": "aside"}, "needs a group's topics"),
        ({"group": None, "store": InFile("x"), "readers": 2}, "need a group"),
        ({"in_flight_max": "64"}, "in_flight_max is '64'"),
        ({"in_flight_max": 1.5}, "in_flight_max is 1.5: it is a whole number"),
        ({"retry_interval_s": "1"}, "retry_interval_s is '1': it is a number"),
        ({"drain_s": None}, "drain_s is None"),
        ({"group": b"stock"}, "group is b'stock': it is a name"),
        ({"topics": None, "pattern": b"o.*"}, "it is a regular expression, as text"),
        ({"commit": {"max_batch": 1}}, r"write commit=CommitPolicy\(max_batch"),
        ({"on_assign": 3}, "on_assign is 3, which cannot be called"),
        ({"start": {"orders": 5}}, "start has 'orders': 5; it is an offset by"),
        ({"start": {("orders", 0): "7"}}, r"start has \('orders', 0\): '7'"),
        ({"start": {("orders", 0): -1}}, r"start has \('orders', 0\): -1"),
    ],
)
async def test_bad_options(world: World, options: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"group": "stock", "topics": ["orders"], **options}
    with pytest.raises(ConfigurationError, match=says):
        Consumer(Doors.to(world.kafka), **given)


async def test_bad_worlds(world: World) -> None:
    with pytest.raises(ConfigurationError, match=r"topic nowhere does not exist, .* create it"):
        await world.consumer(topics=["orders", "nowhere"]).start()
    world.kafka.create_topic("txbroker.retry.mail", 3)
    with pytest.raises(ConfigurationError, match=r"has 3 partitions and needs 16.*topics plan"):
        await world.consumer(group="mail").start()
    world.kafka.create_refusal = "not authorized"
    with pytest.raises(ConfigurationError, match="topics plan"):
        await world.consumer(group="other").start()
    world.kafka.create_refusal = ""
    world.kafka.create_topic("secret", 1)
    world.kafka.set_authorized("secret", authorized=False)
    with pytest.raises(ConfigurationError, match="not authorized to read topic secret"):
        await world.consumer(topics=["secret"]).start()


async def test_record_larger_than_memory(world: World) -> None:
    world.produce("x" * 70_000)
    async with world.consumer(buffered_bytes_max=1 << 16) as consumer:
        with pytest.raises(Exception, match="buffered_bytes_max is 65536: raise it"):
            await consumer.run(Handler())


async def test_two_instances_with_one_name(world: World) -> None:
    handler = Handler()
    async with world.running(handler, instance="one"):
        world.produce("1")
        await handler.does("1")
        await world.commits(1)
        async with world.running(handler, instance="one"):
            world.produce("2")
            await handler.does("1", "2")
