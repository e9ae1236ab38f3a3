"""`txbroker consume`: what becomes visible, in every format, and each way to end."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import socket
import subprocess
import time
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.cli.terminals import Run
from tests.kit.cli import TXBROKER, Call, Dev
from tests.kit.until import unique
from txbroker.cli.ops import consume
from txbroker.cli.run import CommandFailed
from txbroker.core.records import Partition, Record
from txbroker.errors import KafkaUnavailable

EVIL = "\x1b[2J\x07\r\nline"


@pytest.fixture
def topic(ask: Call) -> str:
    """A topic with three visible messages, and one of a pending transaction."""
    name = unique("consumed")
    ask("send", name, "10 EUR", "--key", "42", "-H", "source=cli", "--wait")
    ask("send", name, EVIL, "--key", EVIL, "-H", f"evil={EVIL}", "--wait")
    ask("send", name, "--tombstone", "--wait")
    ask("send", name, "hidden", "--decision", "none")
    return name


def test_visible_messages_are_shown_from_the_beginning(ask: Call, topic: str) -> None:
    shown = ask("consume", topic, "--from-beginning")
    assert (shown.code, shown.err) == (0, "")
    header, *rows = shown.out.splitlines()
    assert header.split() == ["RECORD", "KEY", "VALUE", "HEADERS", "ID", "TIME"]
    assert [row.split()[0] for row in rows] == [f"{topic}/0@{offset}" for offset in (0, 2, 4)]
    assert rows[0].split()[1:5] == ["42", "10", "EUR", "source=cli"]
    escaped = r"\x1b[2J\x07\r\nline"
    assert rows[1].split()[1:4] == [escaped, escaped, f"evil={escaped}"]
    assert "hidden" not in shown.out
    ids = {
        row["id"]
        for row in ask("tx", "list", "--state", "promoted", "--topic", topic, "-o", "json").json
    }
    assert {row.split()[-3] for row in rows} == ids


@pytest.mark.parametrize("output", ["json", "ndjson", "csv"])
def test_formats_hold_whole_messages(ask: Call, dev: Dev, topic: str, output: str) -> None:
    producer = Producer({"bootstrap.servers": dev.kafka})
    producer.produce(topic, b"\xff\x00", None, 0, headers=[("raw", b"\xfe")])
    assert producer.flush(60) == 0
    shown = ask("consume", topic, "--from-beginning", "-o", output)
    assert (shown.code, shown.err, "\x1b" in shown.out) == (0, "", False)
    if output == "csv":
        rows = list(csv.DictReader(io.StringIO(shown.out)))
        assert [row["value"] for row in rows][::3] == ["10 EUR", r"\xff\x00"]
        assert (rows[3]["headers"], rows[3]["id"]) == (r"raw=\xfe", "")
        return
    first, second, third, binary = map(json.loads, shown.out.splitlines())
    assert (first["key"], first["value"], first["offset"]) == ("42", "10 EUR", 0)
    assert first["headers"] == [["txb-id", first["id"]], ["source", "cli"]]
    assert (second["key"], third["value"]) == (EVIL, None)
    assert (binary["id"], binary["value_base64"]) == (None, "/wA=")
    assert binary["headers"] == [["raw", {"base64": "/g=="}]]


def test_messages_arrive_until_there_are_enough(dev: Dev, ask: Call, on_terminal: Run) -> None:
    name = unique("arriving")
    shown = on_terminal("consume", name, "-n", "2", "--url", dev.url)
    shown.until(f"Waiting: there is no topic {name}")
    for value in ("first", "second", "third"):
        ask("send", name, value, "--wait")
    assert shown.end() == 0
    assert "first" in shown.text
    assert "second" in shown.text
    assert "third" not in shown.text


def test_follow_begins_at_the_end_and_stops_by_ctrl_c(
    dev: Dev, ask: Call, topic: str, on_terminal: Run
) -> None:
    shown = on_terminal("consume", topic, "--url", dev.url)
    deadline = time.monotonic() + 60
    while "newer" not in shown.text:
        assert time.monotonic() < deadline
        ask("send", topic, "newer", "--wait")
        shown.wait()
    shown.type("\x03")
    assert shown.end() == 130
    assert "10 EUR" not in shown.text
    assert "Traceback" not in shown.text


def test_closed_pipe_ends_it_without_further_messages(dev: Dev, topic: str) -> None:
    command = [TXBROKER, "consume", topic, "--from-beginning", "--follow", "--url", dev.url]
    environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    ) as consuming:
        assert consuming.stdout is not None
        assert consuming.stdout.readline().startswith(b"RECORD")
        consuming.stdout.close()
        try:
            assert consuming.wait(30) == 1
        finally:
            consuming.kill()
        assert consuming.stderr is not None
        assert consuming.stderr.read() == b""


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["a b"], 2, "'a b' is no topic: use up to 249 letters"),
        (["\x1b[2J"], 2, r"'\\x1b[2J' is no topic"),
        (["t", "-n", "0"], 2, "0 is not in the range"),
        (["t", "--kafka", "127.0.0.1:9"], 1, "no connection to Kafka at 127.0.0.1:9"),
        (["t", "--url", "http://127.0.0.1:9"], 1, "Name Kafka by --kafka"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_input_is_one_sentence(call: Call, words: list[str], code: int, sentence: str) -> None:
    began = time.monotonic()
    shown = call("consume", *words)
    assert (shown.code, shown.out) == (code, "")
    assert sentence in shown.err
    assert time.monotonic() - began < 10


def test_missing_topic_is_named_with_a_similar_one(ask: Call, topic: str) -> None:
    shown = ask("consume", f"{topic}x", "--from-beginning")
    assert (shown.code, shown.out) == (1, "")
    assert f"there is no topic {topic}x on Kafka" in shown.err
    assert f"Did you mean {topic}?" in shown.err


def test_silent_kafka_is_reported(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that accepts and never answers."""
    monkeypatch.setattr(consume, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        kafka = f"127.0.0.1:{silent.getsockname()[1]}"
        shown = call("consume", "t", "--kafka", kafka)
    assert (shown.code, shown.out) == (1, "")
    assert f"no answer from Kafka at {kafka} within 0.5 s" in shown.err


class _Fetcher:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.resumed: list[Partition] = []

    def resume(self, partition: Partition) -> None:
        """Note it."""
        self.resumed.append(partition)


@pytest.mark.parametrize("bounded", [False, True])
async def test_failing_kafka_is_reported_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """Following goes on; reading to an end gives up after a time."""
    monkeypatch.setattr(consume, "TIMEOUT_S", 0.0)
    place, fetcher = ("t", 0), _Fetcher()
    arrived: asyncio.Queue[Any] = asyncio.Queue()
    for _ in range(3):
        arrived.put_nowait(consume._Delivery(place, error=KafkaUnavailable("no answer")))
    arrived.put_nowait(consume._Delivery(place, [Record(b"k", b"v", offset=7)], 8))
    shown = consume._MessageOutput("csv", 1)
    showing = consume._show(arrived, fetcher, shown, {place}, {place: 9} if bounded else None)  # type: ignore[arg-type]
    if bounded:
        with pytest.raises(CommandFailed, match="Check the topic and Kafka"):
            await showing
    else:
        await showing
        assert fetcher.resumed == [place]
    out, err = capsys.readouterr()
    assert bounded or err.count("no answer; trying again") == 1
    assert ("t/0@7,k,v" in out) != bounded
