"""I6: a message is visible if and only if the business row exists, despite any kill.

The demo itself is the test: real Kafka, a real proxy, real processes, a real database.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from txbroker.cli.demo.command import EXPECTED
from txbroker.cli.demo.comparison import compare
from txbroker.cli.demo.shop import ShopOrder, messages_of
from txbroker.core.records import Record
from txbroker.kafka.tools.consumers import Seen

TXBROKER = Path(sys.executable).with_name("txbroker")
EXISTING = {"A-1", "B-1", "C-1"}


def test_the_database_and_kafka_agree(tmp_path: Path) -> None:
    environment = {**os.environ, "COLUMNS": "140", "NO_COLOR": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [TXBROKER, "demo"], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for order in EXPECTED:
        row = re.search(rf"^ {order} +(\S.*?)  +(yes|no) +(\S+) +(\S+)", done.stdout, re.MULTILINE)
        assert row is not None, done.stdout
        assert row[1] == EXPECTED[order]
        assert (row[2] == "yes") == (row[3] != "nothing") == (order in EXISTING)
        assert row[4] == "agree"
    assert len(re.findall(r"shop-\d +killed +kill -9", done.stdout)) == 2
    assert re.search(r"B-1 +check .*: commit by the check function", done.stdout)
    assert re.search(r"B-2 +rollback +by check, session shop-3", done.stdout)
    assert re.search(r"C-1 +check .*: not yet, by the producer itself", done.stdout)
    assert "\x1b[" not in done.stdout
    assert list(tmp_path.iterdir()) == []


ORDER = ShopOrder("A-1", "lamp", 40)


def visible(order: ShopOrder) -> list[Seen]:
    """Return the messages of an order as a consumer sees them."""
    return [
        Seen(message.topic, 0, Record(message.key, message.value)) for message in messages_of(order)
    ]


@pytest.mark.parametrize(
    ("orders", "seen", "agree"),
    [
        ([ORDER], visible(ORDER), True),
        ([], [], True),
        ([ORDER], [], False),
        ([], visible(ORDER), False),
        ([ORDER], visible(ORDER)[:1], False),
        ([ORDER], visible(ORDER) * 2, False),
        ([ORDER], visible(replace(ORDER, amount=41)), False),
        ([ORDER], visible(ORDER) + visible(ORDER)[1:], False),
    ],
    ids="same none lost invented half doubled other-content one-doubled".split(),  # noqa: SIM905
)
def test_every_difference_is_found(orders: list[ShopOrder], seen: list[Seen], agree: bool) -> None:
    lines = compare({"A-1": "commits"}, orders, seen)
    assert [(line.number, line.agree) for line in lines] == [("A-1", agree)]


def test_messages_without_an_order_are_a_difference() -> None:
    stray = [Seen("shop.orders", 0, Record(None, b"?"))]
    lines = compare({"A-1": "rolled back"}, [], stray)
    assert [(line.number, line.agree) for line in lines] == [("", False), ("A-1", True)]
