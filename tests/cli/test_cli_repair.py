"""`txbroker repair` on a real Kafka."""

from __future__ import annotations

import json

from confluent_kafka import Producer

from tests.kit.cli import Call, Dev
from txbroker.core.records import RECORD_VERSION
from txbroker.core.routing import make_id

ID = make_id(1, 0, 0)


def write(dev: Dev, topic: str, key: str, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": dev.kafka})
    producer.produce(topic, value, key, 1)
    assert producer.flush(60) == 0


def test_stopping_record_is_shown_and_skipped(call: Call, dev: Dev) -> None:
    where = ("--kafka", dev.kafka, "--topic-prefix", "repair")
    missing = call("repair", "show", *where)
    assert missing.code == 1
    assert "topic_prefix" in missing.err
    call("topics", "apply", *where, "--yes")
    assert call("repair", "show", *where) == (0, "", "No record stops a partition.\n")
    write(dev, "repair.op", ID, b'{"v": %d, "x": "%s"}' % (RECORD_VERSION + 1, b"\xff" * 300))
    (row,) = call("repair", "show", *where, "-o", "json").json
    assert (row["record"], row["code"], row["key"]) == ("repair.op/1@0", "newer", ID)
    assert "\\xff" in row["value"]
    assert row["value"].endswith("… 117 more bytes")
    skip = ("repair", "skip", *where, "--reason", "a test")
    other = call(*skip, "repair.op/1@7", "--yes")
    assert (other.code, "These records do: repair.op/1@0." in other.err) == (1, True)
    dry = call(*skip, "repair.op/1@0", "--dry-run", "-o", "json")
    assert (dry.code, dry.json["reason"], dry.err) == (0, "a test", "Nothing was changed.\n")
    assert call(*skip, "repair.op/1@0").code == 2  # stdin is no terminal
    assert len(call("repair", "show", *where, "-o", "json").json) == 1
    done = call(*skip, "repair.op/1@0", "--yes", "-o", "json")
    assert (done.code, json.loads(done.out)["record"]) == (0, "repair.op/1@0")
    assert call("repair", "show", *where).err == "No record stops a partition.\n"
    write(dev, "repair.checkpoint", "progress", b"junk")
    shown = call("repair", "show", *where, "-o", "json")
    (row,) = shown.json
    assert (row["record"], row["code"]) == ("repair.checkpoint/1@1", "set_aside")
    assert "set aside, stops nothing" in row["why"]
    assert shown.err == "No record stops a partition.\n"
    assert call(*skip, row["record"], "--yes").code == 1
