"""However often something happens, its lines are few, and those left out are counted."""

import json
import logging
from collections.abc import Callable, Iterator

import pytest
import structlog

from txbroker.proxy.observe.logging import (
    LINES_MAX,
    LineBounds,
    configure_logging,
    flush_lines,
    get_logger,
)


class Time:
    """A clock and timers that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def later(self, delay_s: float, then: Callable[[], None]) -> "Timer":
        return Timer(self, self.now_s + delay_s, then)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        due = [timer for timer in self.timers if timer[0] <= self.now_s]
        self.timers = [timer for timer in self.timers if timer not in due]
        for _, then in due:
            then()


class Timer:
    """A timer that waits for `Time.advance`."""

    def __init__(self, time: Time, at_s: float, then: Callable[[], None]) -> None:
        self._time, self._at_s, self._then = time, at_s, then

    def start(self) -> None:
        self._time.timers.append((self._at_s, self._then))


class Bounded:
    """Bounds on a clock of the test's own."""

    def __init__(self) -> None:
        self.time = Time()
        self.reported: list[tuple[str, int]] = []
        self.bounds = LineBounds(
            lambda kind, count: self.reported.append((kind, count)),
            lines_max=3,
            window_s=10.0,
            now_s=lambda: self.time.now_s,
            later=self.time.later,
        )

    def admitted(self, kind: str, count: int) -> int:
        return sum(self.bounds.admit(kind) for _ in range(count))


def test_few_lines_are_all_written() -> None:
    bounded = Bounded()
    for _ in range(5):
        assert bounded.admitted("parked", 3) == 3
        bounded.time.advance(10.0)
    assert (bounded.reported, bounded.time.timers) == ([], [])


def test_first_lines_are_written_and_others_counted() -> None:
    bounded = Bounded()
    assert bounded.admitted("parked", 1000) == 3
    assert bounded.reported == []
    bounded.time.advance(10.0)
    assert bounded.reported == [("parked", 997)]
    assert bounded.admitted("parked", 2) == 2


def test_kinds_have_separate_limits() -> None:
    bounded = Bounded()
    bounded.admitted("parked", 1000)
    assert bounded.admitted("partition stopped", 1) == 1


def test_each_partition_gets_its_first_line() -> None:
    bounded = Bounded()
    for _ in range(10):
        for partition in range(64):
            bounded.bounds.admit("log not read", partition)
    bounded.time.advance(10.0)
    assert bounded.reported == [("log not read", 640 - 64)]
    assert [bounded.bounds.admit("owned", partition) for partition in range(64)] == [True] * 64
    assert not bounded.bounds.admit("owned", 0)


def test_lasting_flood_is_counted_completely() -> None:
    bounded = Bounded()
    written = 0
    for _ in range(100):
        written += bounded.admitted("refused", 50)
        bounded.time.advance(1.0)
    bounded.time.advance(20.0)
    assert written <= 3 * 11
    assert written + sum(count for _, count in bounded.reported) == 5000


def test_late_lines_are_reported_without_another_line() -> None:
    bounded = Bounded()
    bounded.admitted("a", 4)
    bounded.time.advance(9.0)
    bounded.admitted("b", 4)
    bounded.time.advance(1.0)
    assert bounded.reported == [("a", 1)]
    bounded.time.advance(10.0)
    assert bounded.reported == [("a", 1), ("b", 1)]
    assert bounded.time.timers == []


def test_flush_reports_all_suppressed_lines() -> None:
    bounded = Bounded()
    bounded.admitted("parked", 5)
    bounded.bounds.flush()
    bounded.bounds.flush()
    assert bounded.reported == [("parked", 2)]


@pytest.fixture
def _own_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    flush_lines()
    root.handlers[:], root.level = before
    structlog.reset_defaults()


@pytest.mark.usefixtures("_own_logging")
def test_thousands_of_parked_do_not_flood_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("json", "info")
    log = get_logger("txbroker.test")
    for number in range(20_000):
        log.warning("parked", id=number, group="orders")
    log.warning("not ready", problems=[])
    flush_lines()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    # A machine that is slow enough meets another window, or several.
    parked = [line for line in lines if line["event"] == "parked"]
    reported = [line for line in lines if line["event"] == "lines left out"]
    assert parked[:LINES_MAX] == [
        {**line, "id": number} for number, line in enumerate(parked[:LINES_MAX])
    ]
    assert len(lines) < 1000
    assert len(parked) + sum(line["count"] for line in reported) == 20_000
    assert {line["of"] for line in reported} == {"parked"}
    assert "not ready" in {line["event"] for line in lines}


@pytest.mark.usefixtures("_own_logging")
def test_libraries_do_not_flood_log(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")
    for number in range(1000):
        logging.getLogger("aiokafka.conn").error("connection %d refused", number)
    logging.getLogger("asyncio").error("once")
    flush_lines()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]

    reported = [line for line in lines if line["event"] == "lines left out"]
    assert [(line["of"], line["count"]) for line in reported] == [
        ("logger aiokafka.conn", 1000 - LINES_MAX)
    ]
    assert "once" in {line["event"] for line in lines}
