"""`txbroker topics plan` and `apply` on a real Kafka."""

from __future__ import annotations

import subprocess

import pytest

from tests.kit.cli import Call, Dev

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
