"""The log of failures: texts and tracebacks once, and no flood."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from tests.kit.consumer_world import World, counted, text
from tests.kit.until import until
from txbroker.consumer import ReceivedMessage
from txbroker.consumer.engine.failure_lines import FailureLines, error_text

FAILED = "message failed"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def grouped() -> BaseException:
    return ExceptionGroup("two", [KeyError("sku"), ValueError("price")])


@pytest.mark.parametrize("coroutine", [True, False])
@pytest.mark.parametrize("batch", [0, 10])
async def test_first_failure_has_its_text_and_traceback(
    world: World, coroutine: bool, batch: int
) -> None:
    def fail(given: Any) -> None:
        {}["sku"]

    async def fail_on_loop(given: Any) -> None:
        fail(given)

    world.produce("a=1", "b=2")
    options = {"order": "none", "on_failure": "skip", "local_attempts_max": 2}
    handler = fail_on_loop if coroutine else fail
    with structlog.testing.capture_logs() as lines:
        async with world.running(handler, run={"batch": batch}, **options) as consumer:
            await until(lambda: counted(consumer, "failed") == 4)
    failed = [line for line in lines if line["event"] == FAILED]
    assert [line["error"] for line in failed] == ["KeyError: 'sku'"] * 4
    assert 'in fail\n    {}["sku"]' in failed[0]["exception"]
    assert not any("exception" in line for line in failed[1:]), "the traceback is there once"


async def test_thousands_of_failures_are_a_few_lines(world: World) -> None:
    async def fail(message: ReceivedMessage) -> None:
        raise ValueError(text(message)) if int(text(message)) % 2 else LookupError("none")

    world.produce(*(f"{number}={number}" for number in range(2_000)))
    options = {"order": "key", "on_failure": "skip", "local_attempts_max": 1}
    with structlog.testing.capture_logs() as lines:
        async with world.running(fail, **options) as consumer:
            await until(lambda: counted(consumer, "failed") == 2_000)
    failed = [line for line in lines if line["event"] == FAILED]
    assert len(failed) <= 25
    assert sum(line.get("more", 1) for line in failed) == 2_000, "at its end the rest is counted"
    assert sum("exception" in line for line in failed) == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("sku"), "KeyError: 'sku'"),
        (Unprintable(), "Unprintable: <exception str() failed>"),
        (ValueError("two\nlines"), "ValueError: two lines"),
        (grouped(), "ExceptionGroup: two (2 sub-exceptions)"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 288 + " …"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_text_of_an_error(error: BaseException, expected: str) -> None:
    assert error_text(error).endswith(expected)


async def test_kinds_beyond_the_limit_are_counted_together() -> None:
    lines: list[dict[str, Any]] = []

    def write(event: str, **fields: Any) -> None:
        lines.append({"event": event, **fields})

    written = FailureLines()
    for number in range(100):
        error = type(f"Error{number}", (Exception,), {})("bug")
        written.note(write, FAILED, error=error)
    assert len(lines) == 10
    assert all("bug" in line["exception"] for line in lines)
    written.note(write, FAILED, error=grouped())
    written.flush()
    assert len(lines) == 21
    assert sum(line.get("more", 0) for line in lines) == 91
    written.note(write, FAILED, error=grouped())
    await asyncio.sleep(0)
    assert "sku" in lines[-1]["exception"], "a traceback that was not shown is shown later"
    written.flush()
    assert len(lines) == 22
