"""`txbroker groups`, `topics` and `repair`, on a real Kafka."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.cli.cli_stub import Stub
from tests.kit.cli import Call, Dev
from tests.kit.secret_files import secret_file
from txbroker.core.records import RECORD_VERSION
from txbroker.core.routing import make_id
from txbroker.sdk import BlockingTransactionalProducer, CheckRequest, Decision
from txbroker.testing.broker import InMemoryBroker


def test_register_show_list_and_remove(ask: Call) -> None:
    url = "http://127.0.0.1:9/check"
    done = ask("groups", "register", "g1", "--check-url", url, "--timeout-s", "2", "--yes")
    assert (done.code, done.err) == (0, "")
    shown = ask("groups", "show", "g1", "-o", "json").json
    assert shown == {"group": "g1", "sessions": 0, "check_url": url, "timeout_s": 2.0}
    header, row = ask("groups", "list", "-o", "wide").out.splitlines()
    assert header.split()[:3] == ["GROUP", "CHECK", "URL"]
    assert row.split() == ["g1", url, "-", "0", "-/-/-/2", "-", "-", "-"]
    removed = ask("groups", "remove", "g1", "g2", "--yes")
    assert (removed.code, removed.out) == (3, "g1\n")
    assert "g2: " in removed.err
    assert "(unknown_group)" in removed.err
    assert ask("groups", "list") == (0, "", "No group is registered.\n")


def test_invalid_registration_is_refused(ask: Call) -> None:
    refused = ask("groups", "register", "g3", "--check-url", "nowhere", "--yes")
    assert (refused.code, refused.out) == (1, "")
    assert "(bad_request)" in refused.err
    assert ask("groups", "show", "g3").code == 1


def test_group_name_may_have_any_printable_text(ask: Call) -> None:
    assert ask("groups", "register", "a/b ?#ü", "--yes").code == 0
    assert ask("groups", "show", "a/b ?#ü", "-o", "json").json["group"] == "a/b ?#ü"
    assert ask("groups", "remove", "a/b ?#ü", "--yes").out == "a/b ?#ü\n"


# --- groups test ------------------------------------------------------------------------------


def test_connected_instance_is_asked_about_no_transaction(
    there: Call, memory: InMemoryBroker
) -> None:
    asked: list[str] = []

    def check(request: CheckRequest) -> Decision:
        asked.append(request.id)
        return Decision.COMMIT

    missing = there("groups", "test", "shop")
    assert (missing.code, "(unknown_group)" in missing.err) == (1, True)
    with BlockingTransactionalProducer(memory.url, group="shop", check=check) as producer:
        producer.start()
        sent = there("send", "t", "v", "--group", "shop", "--decision", "none").out.strip()
        before = there("tx", "show", sent, "-o", "json").json
        shown = there("groups", "test", "shop")
        (row,) = there("groups", "test", "shop", "-o", "json").json
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.splitlines()[1].split()[:3] == ["shop", "answered", "commit"]
    assert (row["answer"], "signature" in row) == ("commit", False)
    assert row["endpoint"].startswith("session ")
    assert row["took_ms"] > 0
    assert len(set(asked)) == 2
    assert there("tx", "show", sent, "-o", "json").json == before
    assert [there("tx", "show", id).code for id in asked] == [1, 1]


@pytest.mark.parametrize(
    ("status", "code", "signature"),
    [(204, 0, "accepted"), (401, 1, "refused"), (500, 1, "unknown")],
)
def test_check_url_is_tested(
    call: Call, stub: Stub, tmp_path: Path, status: int, code: int, signature: str
) -> None:
    secret_file(tmp_path / "shop", "open sesame")
    stub.answer = lambda asked: (status, b"")
    with InMemoryBroker(secrets_dir=tmp_path) as broker:
        where = ("--url", broker.url)
        ref = f"file:{tmp_path / 'shop'}"
        url = f"{stub.url}/check"
        call("groups", "register", "shop", "--check-url", url, "--secret-ref", ref, "--yes", *where)
        shown = call("groups", "test", "shop", "-o", "json", *where)
    (row,) = shown.json
    assert (shown.code, row["status"], row["signature"]) == (code, status, signature)
    assert (row["endpoint"], row["answered"]) == (url, not code)


def test_silent_instance_ends_the_test_in_time(there: Call, memory: InMemoryBroker) -> None:
    done = threading.Event()

    def check(request: CheckRequest) -> Decision:
        done.wait()
        return Decision.COMMIT

    there("groups", "register", "slow", "--timeout-s", "0.2", "--yes")
    with BlockingTransactionalProducer(memory.url, group="slow", check=check) as producer:
        producer.start()
        shown = there("groups", "test", "slow")
        done.set()
    assert (shown.code, "no answer within 0.2 s" in shown.out) == (1, True)


NAMES = [
    f"plan.{name}"
    for name in ("half", "op", "checkpoint", "parked", "groups", "audit", "audit.drift")
]


def test_plan_apply_and_nothing_left_to_do(call: Call, dev: Dev) -> None:
    where = ("--kafka", dev.kafka, "--topic-prefix", "plan", "--partitions", "3")
    planned = call("topics", "plan", *where, "-o", "json").json
    assert [(row["action"], row["topic"]) for row in planned] == [("create", n) for n in NAMES]
    assert planned[0]["what"] == "3 partitions, 1 copies"
    applied = call("topics", "apply", *where, "--yes", "-o", "json").json
    assert applied == planned
    again = call("topics", "plan", *where)
    assert again == (0, "", "All topics are as planned.\n")
    assert call("topics", "apply", *where, "--yes", "-o", "json").json == []


def test_apply_corrects_differing_settings(call: Call, dev: Dev) -> None:
    where = ("--kafka", dev.kafka, "--topic-prefix", "mend")
    call("topics", "apply", *where, "--half-retention-s", "86400", "--yes")
    planned = call("topics", "plan", *where, "--partitions", "9")
    assert planned.out.splitlines()[1].split()[:3] == ["change", "mend.half", "retention.ms:"]
    call("topics", "apply", *where, "--yes")
    assert call("topics", "plan", *where).out == ""


@pytest.mark.needs_tool("kcat")
def test_applied_topics_exist(call: Call, dev: Dev) -> None:
    call("topics", "apply", "--kafka", dev.kafka, "--topic-prefix", "there", "--yes")
    listed = subprocess.run(
        ["kcat", "-b", dev.kafka, "-L"], capture_output=True, text=True, check=True
    ).stdout
    assert 'topic "there.half" with 2 partitions' in listed
    assert 'topic "there.groups" with 1 partitions' in listed


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
