"""Lines stay whole, few and free of secrets, with every name and reason."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import msgspec
import pytest
import structlog

from txbroker.contract.service import Readiness
from txbroker.error_text import raised_at, safe_repr, user_message
from txbroker.errors import KafkaUnavailable
from txbroker.proxy.cluster.watchers import ReadinessLog
from txbroker.proxy.observe.logging import (
    LINES_MAX,
    LineBounds,
    configure_logging,
    flush_lines,
    get_logger,
    printable,
)

FORGED = '2026-01-01T00:00:00Z [info ] forged [txbroker] {"event": "forged"}'
HOSTILE = [
    pytest.param(f"orders\n{FORGED}", id="newline"),
    pytest.param(f"orders\r{FORGED}", id="return"),
    pytest.param(f"orders\r\n{FORGED}", id="both"),
    pytest.param("\x1b[2J\x1b[1;1H\x1b[31mnothing", id="terminal sequence"),
    pytest.param("\x9b31mred", id="one byte sequence"),
    pytest.param(f"a\u2028{FORGED}\u2029\x85\x0b\x0c", id="other line ends"),
    pytest.param("abc\u202egnp.exe", id="writing turned round"),
    pytest.param("a\x00\x07\x08b", id="bell and backspace"),
    pytest.param("a\udcffb", id="lone surrogate"),
    pytest.param("plain-name", id="harmless"),
]


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    flush_lines()
    root.handlers[:], root.level = before
    structlog.reset_defaults()


def write_hostile(text: str) -> None:
    """Log a text in each place that others' words can get into."""
    log = get_logger("txbroker.test")
    log.info("owned", group=text, problems=[text], reason={"a": text})
    logging.getLogger("aiokafka.test").warning("topic %s", text)


@pytest.mark.parametrize("text", HOSTILE)
def test_console_line_stays_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("console", "info")
    write_hostile(text)
    err = capsys.readouterr().err

    assert len(err.splitlines()) == 2
    assert all(line.isprintable() for line in err.split("\n"))
    assert [re.findall(r"\[(\w+) *\]", line)[0] for line in err.splitlines()] == ["info", "warning"]


@pytest.mark.parametrize("text", HOSTILE)
def test_json_line_stays_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")
    write_hostile(text)
    err = capsys.readouterr().err
    first, second = map(json.loads, err.splitlines())

    assert err.isascii()
    assert all(line.isprintable() for line in err.split("\n"))
    assert (first["event"], first["group"], first["problems"]) == ("owned", text, [text])
    assert second["event"] == f"topic {text}"


def fail(body: str) -> None:
    """Raise an error whose text quotes its argument."""
    password = "hunter" + "2"
    raise ValueError(f"not a number: {body} {len(password)}")


def test_traceback_shows_no_variables_and_forges_no_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("console", "info")
    try:
        fail(f"x\n{FORGED}\x1b[2J")
    except ValueError:
        logging.getLogger("asyncio").exception("task failed")
    first, *rest = capsys.readouterr().err.splitlines()

    assert "task failed" in first
    assert [line for line in rest if not line.startswith("    | ")] == []
    assert "hunter2" not in "".join(rest)
    assert "\x1b" not in "".join(rest)
    assert any("ValueError" in line for line in rest)


def test_json_traceback_shows_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")
    try:
        fail("x")
    except ValueError:
        logging.getLogger("asyncio").exception("task failed")
    (line,) = capsys.readouterr().err.splitlines()

    assert "hunter2" not in line
    assert json.loads(line)["exception"][0]["exc_type"] == "ValueError"


def test_only_texts_of_own_errors_are_logged() -> None:
    body = b"\xffcard 4111 1111"
    errors: list[BaseException] = []
    for bad in (
        lambda: body.decode(),
        lambda: int("card 4111 1111"),
        lambda: {}["card 4111 1111"],
        lambda: msgspec.json.decode(b'{"card": 4111 1111}'),
    ):
        try:
            bad()
        except Exception as error:
            errors.append(error)

    assert [safe_repr(error) for error in errors] == [
        "UnicodeDecodeError",
        "ValueError",
        "KeyError",
        "DecodeError",
    ]
    assert [user_message(error) for error in errors] == [safe_repr(error) for error in errors]
    assert user_message(KafkaUnavailable("no answer")) == "no answer"
    assert raised_at(errors[0]).startswith("test_logging.py:")
    assert safe_repr(KafkaUnavailable("no answer")) == "KafkaUnavailable: no answer"
    assert safe_repr(OSError(111, "refused")) == "ConnectionRefusedError: [Errno 111] refused"


def test_printable_keeps_printable_text() -> None:
    assert printable("Grüße, 世界") == "Grüße, 世界"
    assert printable("a\x1b\nb\\") == "a\\x1b\\nb\\"


def test_readiness_is_logged_on_change_but_not_at_stop() -> None:
    found = Readiness(False, {0: "claiming"}, ("partition 0: claiming",))
    readiness_log = ReadinessLog(lambda: found)
    with structlog.testing.capture_logs() as lines:
        readiness_log.look()
        found = Readiness(True, {0: "owned", 1: "elsewhere"})
        readiness_log.look()
        readiness_log.look()
        found = Readiness(False, {0: "stopped"}, tuple(f"partition {n}" for n in range(64)))
        readiness_log.look()

    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("ready", "info"),
        ("not ready", "warning"),
    ]
    assert lines[0]["owned"] == 1
    assert (len(lines[1]["problems"]), lines[1]["count"]) == (5, 64)


async def test_stopping_proxy_logs_no_readiness() -> None:
    found = Readiness(True, {0: "owned"})
    readiness_log = ReadinessLog(lambda: found)
    with structlog.testing.capture_logs() as lines:
        readiness_log.look()
        readiness_log.start()
        await readiness_log.close()
        found = Readiness(False, {0: "elsewhere"}, ("going away",))
        readiness_log.look()
    assert [line["event"] for line in lines] == ["ready"]


def test_broker_in_service_tests_writes_no_stdout() -> None:
    code = (
        "from txbroker.testing.broker import InMemoryBroker\n"
        "with InMemoryBroker() as broker:\n"
        "    broker.create_topic('orders')\n"
        "print('the end')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")


# --- how many ------------------------------------------------------------------------------


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
