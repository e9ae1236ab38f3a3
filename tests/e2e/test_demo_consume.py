"""`txbroker demo consume` on a real Kafka: what it shows, and that it finds every difference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.kit.until import unique
from txbroker.cli.demo import consume
from txbroker.cli.demo.consume import POISONED, OrderMessage, Stock, compare, set_aside
from txbroker.cli.demo.stage import Timeline
from txbroker.cli.run import CommandFailed
from txbroker.consumer import ReceivedMessage
from txbroker.core.consuming.aside import clearance_record, release_record
from txbroker.core.consuming.copies import Failed, MessageSource, make_copy
from txbroker.core.records import Record
from txbroker.embedded import EmbeddedKafka
from txbroker.kafka.tools.consumers import Seen

TXBROKER = Path(sys.executable).with_name("txbroker")
PAGE = Path(__file__).parents[2] / "docs/how-to/consume.md"


def test_one_poisoned_key_and_4999_continue(tmp_path: Path) -> None:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [TXBROKER, "demo", "consume"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    rows = re.findall(
        r"^ (all other keys|the poisoned key) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+) +(\w+)",
        done.stdout,
        re.MULTILINE,
    )
    others = ("all other keys", "4,999", "5,197", "5,197", "0", "agree")
    assert rows == [
        others,
        ("the poisoned key", "1", "3", "0", "3", "agree"),
        others,
        ("the poisoned key", "1", "3", "3", "0", "agree"),
    ]
    assert re.findall(r"failed +item-0042, attempt (\d):", done.stdout) == ["1", "2", "3"]
    assert re.findall(r"booked +item-0042, (.*)", done.stdout) == ["order 1", "order 2", "order 3"]
    assert list(tmp_path.iterdir()) == []
    assert lines_of(done.stdout) == lines_of(PAGE.read_text().rpartition("Recorded:")[2])


def lines_of(shown: str) -> list[str]:
    """Return what a run prints, sorted, without times, ports and the width of the table."""
    lines = (re.sub(r"^[\d:.]{12}|:\d{5}$|─+| +", " ", line) for line in shown.splitlines())
    return sorted(filter(str.strip, (line.strip() for line in lines if "```" not in line)))


class ForgetfulStock(Stock):
    """Does not book one order."""

    async def book(self, message: ReceivedMessage) -> None:
        await super().book(message)
        if (message.key, message.value) == (b"item-0007", b"order 2"):
            self.booked = [one for one in self.booked if one.offset != message.offset]


async def test_fault_of_the_service_is_found(kafka: EmbeddedKafka) -> None:
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    with pytest.raises(CommandFailed, match="differ"):
        await consume.show(
            kafka.bootstrap,
            Timeline(console),
            console,
            ForgetfulStock(),
            unique("orders"),
            unique("stock"),
        )


def orders(key: bytes, count: int) -> list[OrderMessage]:
    return [OrderMessage(key, 1, offset, b"order %d" % offset) for offset in range(count)]


OTHERS, POISON = orders(b"a", 2) + orders(b"b", 1), orders(POISONED, 2)
SENT = OTHERS + POISON


@pytest.mark.parametrize(
    ("booked", "aside", "released", "agree"),
    [
        (OTHERS, POISON, False, (True, True)),
        (SENT, [], True, (True, True)),
        (OTHERS[::-1], POISON, False, (False, True)),
        (OTHERS[1:], POISON, False, (False, True)),
        (OTHERS + OTHERS[:1], POISON, False, (False, True)),
        ([OTHERS[0]._replace(value=b"?"), *OTHERS[1:]], POISON, False, (False, True)),
        (OTHERS, POISON + OTHERS[:1], False, (False, True)),
        (SENT, POISON, False, (True, False)),
        (OTHERS, POISON[:1], False, (True, False)),
        (OTHERS, POISON[::-1], False, (True, False)),
        (OTHERS, POISON, True, (True, False)),
        (OTHERS + POISON[::-1], [], True, (True, False)),
        (SENT + POISON, [], True, (True, False)),
        (SENT, POISON[1:], True, (True, False)),
    ],
    ids="set-aside released disorder lost twice changed other-aside both aside-lost "  # noqa: SIM905
    "aside-disorder not-released released-disorder released-twice not-cleared".split(),
)
def test_every_difference_is_found(
    booked: list[OrderMessage], aside: list[OrderMessage], released: bool, agree: tuple[bool, bool]
) -> None:
    lines = compare(SENT, booked, aside, released=released)
    assert tuple(line.agree for line in lines) == agree


def test_empty_topics_are_a_difference() -> None:
    assert [line.agree for line in compare([], [], [], released=True)] == [False, False]


def test_cleared_copies_are_not_set_aside() -> None:
    copies = [
        make_copy(Record(POISONED, b"%d" % offset), Failed(MessageSource("t", 1, offset), 3))
        for offset in (4, 7)
    ]
    cleared = clearance_record(MessageSource("t", 1, 4), POISONED, 1)
    release = release_record(MessageSource("t", 1, 0), POISONED, "why")
    seen = [Seen("aside", 0, record) for record in (*copies, release, cleared)]
    assert set_aside(seen) == [OrderMessage(POISONED, 1, 7, b"7")]
