"""`txbroker demo outbox` on a real Kafka: what it shows, and that it finds every difference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from txbroker.cli.demo.comparison import compare
from txbroker.cli.demo.outbox import SHOPS, by_story, stories
from txbroker.cli.demo.outbox_shop import order_of
from txbroker.cli.demo.shop import messages_of
from txbroker.core.records import Record
from txbroker.kafka.tools.consumers import Seen

TXBROKER = Path(sys.executable).with_name("txbroker")


def test_killed_relays_deliver_every_order_once(tmp_path: Path) -> None:
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [TXBROKER, "demo", "outbox"],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert len(re.findall(r"shop +killed", done.stdout)) == 2
    assert re.search(r"relay +killed", done.stdout)
    lines = re.findall(r"^ (\w.*?) +(\d+) +(\d+) +(\d+) +agree", done.stdout, re.MULTILINE)
    assert sum(int(orders) for _story, orders, _stored, _visible in lines) == SHOPS[-1][1]
    one = {story: (stored, visible) for story, orders, stored, visible in lines if orders == "1"}
    assert one == {
        "prepare, decide: killed before the local transaction": ("0", "0"),
        "prepare, decide: killed after the local transaction": ("1", "2"),
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stored", "seen", "agree"),
    [
        (True, (0, 1), True),
        (False, (), True),
        (True, (0,), False),
        (True, (0, 1, 1), False),
        (False, (0, 1), False),
    ],
    ids=["both visible", "rolled back", "one missing", "one twice", "visible but rolled back"],
)
def test_differences_are_found(stored: bool, seen: tuple[int, ...], agree: bool) -> None:
    order, _scheme = order_of(1)
    messages = messages_of(order)
    visible = [
        Seen(messages[at].topic, 0, Record(messages[at].key, messages[at].value, offset=offset))
        for offset, at in enumerate(seen)
    ]
    lines = by_story(compare({order.number: stories()[order.number]}, [order] * stored, visible))
    assert [(line.orders, line.agree) for line in lines] == [(1, agree)]
