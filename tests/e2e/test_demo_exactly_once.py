"""`txbroker demo exactly-once` on a real Kafka: what it shows, and that it finds a difference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from txbroker.cli.demo.exactly_once import IN_STOCK, ITEMS, compare
from txbroker.core.records import Record
from txbroker.kafka.tools.consumers import Seen

TXBROKER = Path(sys.executable).with_name("txbroker")


def test_killed_consumer_counts_every_message_once(tmp_path: Path) -> None:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [TXBROKER, "demo", "exactly-once"],
        capture_output=True,
        text=True,
        timeout=90,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert re.findall(r"paused +(.*) of message", done.stdout) == [
        "in the transaction",
        "after the commit",
        "in the transaction",
    ]
    ((left, counted),) = re.findall(
        rf"all {ITEMS} items +([\d,]+) +([\d,]+) +agree", done.stdout, re.MULTILINE
    )
    assert left == counted
    assert int(left.replace(",", "")) < ITEMS * IN_STOCK
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sold", "stock", "wrong"),
    [
        ([1, 2], {"item-00": IN_STOCK - 3}, []),
        ([1, 2], {"item-00": IN_STOCK - 5}, ["item-00"]),
        ([1, 2], {"item-00": IN_STOCK - 1}, ["item-00"]),
        ([1], {"item-01": IN_STOCK}, ["item-00"]),
    ],
    ids=["agrees", "counted twice", "not counted", "no row"],
)
def test_differences_are_found(sold: list[int], stock: dict[str, int], wrong: list[str]) -> None:
    seen = [
        Seen("sold", 0, Record(b"k", b'{"item": "item-00", "n": %d}' % n, offset=at))
        for at, n in enumerate(sold)
    ]
    lines = compare(seen, stock)
    assert [line.item for line in lines if line.expected != line.counted] == wrong
