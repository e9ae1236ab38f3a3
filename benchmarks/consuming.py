"""Figures of consumers, against their aims, on an embedded Kafka.

Ratios of records a second: contenders consume the same topic in interleaved rounds, and a ratio is
that of their medians. Records have 200 bytes; every consumer must have handled every one. Times
and memory: with consumers in processes of their own. The exit code is 1 if an aim is missed.
`python -m benchmarks.consuming` takes up to 12 minutes; `--help` shows how to measure less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from benchmarks.consumers import times
from benchmarks.consumers.load import VALUE_BYTES, fill
from benchmarks.consumers.rounds import (
    IN_FLIGHT,
    Round,
    with_aiokafka,
    with_confluent,
    with_confluent_keyed,
    with_txbroker,
)
from benchmarks.peers.base import Missing
from benchmarks.peers.rocketmq import RocketMQ
from txbroker.embedded import EmbeddedKafka

BUSY_S = 50e-6
SLEEP_S = 0.01
RECORDS, BUSY_RECORDS, SLEEPS = 320_000, 64_000, 6_400
KEYS, MANY_KEYS = 1_000, 100_000
MEMORY_MIB = 96
"""The bound `buffered_bytes_max` (64 MiB), and a few fetched answers."""


class Aim(NamedTuple):
    """What a figure should be.

    Attributes:
        what: the figure, in words.
        least: it is at least that; None: no such aim.
        most: it is at most that.
    """

    what: str
    least: float | None = None
    most: float | None = None

    def met(self, figure: float) -> bool:
        """Return whether a figure meets it."""
        return (self.least is None or figure >= self.least) and (
            self.most is None or figure <= self.most
        )

    def __str__(self) -> str:
        if self.least is None and self.most is None:
            return "none"
        return f"at most {self.most:g}" if self.least is None else f"at least {self.least:g}"


_REPLACED = "seconds until a killed member is replaced, session {:g} s"
AIMS = {
    "empty": Aim("empty handler, keyed, at least once: times aiokafka's getmany", 0.6),
    "busy": Aim("handler of 50 µs: times aiokafka's getmany", 0.9),
    "sleep": Aim("64 handlers that sleep 10 ms: times one", 55.0),
    "keys": Aim("100,000 keys: times 1,000", 0.9),
    "moves": Aim("longest pause of a retained partition, two joining and leaving, s", None, 1.0),
    "killed": Aim(_REPLACED.format(times.SHORT_SESSION_S), None, times.SHORT_SESSION_S + 3),
    "killed-60": Aim(_REPLACED.format(times.LONG_SESSION_S), None, times.LONG_SESSION_S + 3),
    "retry": Aim("most seconds from a retry's due time until it begins", None, 1.0),
    "memory": Aim("growth of memory with a stuck key in each partition, MiB", None, MEMORY_MIB),
    "peers": Aim("empty handler, keyed: times confluent-kafka's consume(1000)"),
}
LONG = ("killed-60",)
"""Cases that are left out by default: a minute or more each."""


# --- ratios --------------------------------------------------------------------------------------


class Contender(NamedTuple):
    """A consumer of a topic with so many records and keys."""

    name: str
    consume: Round
    count: int = RECORDS
    keys: int = KEYS

    @property
    def topic(self) -> str:
        return f"bench-{self.count}-{self.keys}"


def contenders(case: str, others: Sequence[Contender]) -> list[Contender]:
    """Return those of a case; the ratio is that of the first to the second."""

    def sleep() -> Awaitable[None]:
        return asyncio.sleep(SLEEP_S)

    def busy() -> None:
        until_s = time.perf_counter() + BUSY_S
        while time.perf_counter() < until_s:
            pass

    txbroker = Contender("txbroker", with_txbroker())
    return {
        "empty": [txbroker, Contender("aiokafka", with_aiokafka())],
        "busy": [
            Contender("txbroker", with_txbroker(busy), BUSY_RECORDS),
            Contender("aiokafka", with_aiokafka(busy), BUSY_RECORDS),
        ],
        "keys": [Contender("100,000 keys", with_txbroker(), keys=MANY_KEYS), txbroker],
        "sleep": [
            Contender(f"{IN_FLIGHT} at a time", with_txbroker(sleep), SLEEPS),
            Contender("1 at a time", with_txbroker(sleep, in_flight_max=1), SLEEPS // 10),
        ],
        "peers": [
            txbroker,
            Contender("confluent-kafka", with_confluent),
            Contender("confluent-kafka, 4 threads by key", with_confluent_keyed),
            *others,
        ],
    }[case]


async def ratio(
    kafka: str, case: str, rounds: int, others: Sequence[Contender], filled: set[str]
) -> dict[str, Any]:
    """Return the figures of a case."""
    mine = contenders(case, others)
    for each in mine:
        if each.topic not in filled:
            await fill(kafka, each.topic, each.count, each.keys)
            filled.add(each.topic)
    rates: dict[str, list[float]] = {each.name: [] for each in mine}
    for _ in range(rounds):
        for each in mine:
            rates[each.name].append(await each.consume(kafka, each.topic, each.count))
            show(f"{case}: {each.name}: {rates[each.name][-1]:,.0f} a second")
    medians = [statistics.median(found) for found in rates.values()]
    per_s = {name: round(median) for name, median in zip(rates, medians, strict=True)}
    return {"figure": round(medians[0] / medians[1], 3), "rounds": rounds, "per_s": per_s}


def with_rocketmq(stack: ExitStack) -> Iterator[Contender]:
    """Yield RocketMQ's push consumers, on new servers with as many messages.

    Raises:
        Missing: they cannot run here.
    """
    folder = stack.enter_context(
        tempfile.TemporaryDirectory(prefix="txbroker-peer-", ignore_cleanup_errors=True)
    )
    consume = stack.enter_context(RocketMQ().consumers(Path(folder), RECORDS, VALUE_BYTES, KEYS))
    for mode in ("concurrently", "orderly"):

        async def run(_kafka: str, _topic: str, _count: int, mode: str = mode) -> float:
            return await asyncio.to_thread(consume, mode)

        yield Contender(f"RocketMQ {mode}", run)


# --- all cases -----------------------------------------------------------------------------------


def timed(case: str, kafka: str, folder: Path) -> Awaitable[dict[str, Any]]:
    """Measure a case that is no ratio."""
    measures: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
        "moves": lambda: times.rebalances(kafka, folder),
        "killed": lambda: times.replacement(kafka, folder, times.SHORT_SESSION_S),
        "killed-60": lambda: times.replacement(kafka, folder, times.LONG_SESSION_S),
        "retry": lambda: times.retries(kafka, folder),
        "memory": lambda: times.memory(kafka, folder),
    }
    return measures[case]()


def results(cases: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Measure cases on one Kafka, in the order of `AIMS`."""
    filled: set[str] = set()
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory() as folder:
        for case in [name for name in AIMS if name in cases]:
            began = time.monotonic()
            with ExitStack() as stack:
                others: list[Contender] = []
                missing = {}
                if case in ("empty", "busy", "sleep", "keys", "peers"):
                    if case == "peers":
                        try:
                            others += with_rocketmq(stack)
                        except Missing as error:
                            missing = {"missing": f"RocketMQ: {error}"}
                    found = uvloop.run(ratio(kafka.bootstrap, case, rounds, others, filled))
                else:
                    found = uvloop.run(timed(case, kafka.bootstrap, Path(folder)))
            aim = AIMS[case]
            judged = {"case": case, "aim": str(aim), "met": aim.met(found["figure"])}
            yield judged | found | missing | {"took_s": round(time.monotonic() - began)}


def show(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def as_text(result: dict[str, Any]) -> str:
    """Return a result as two lines for people."""
    rest = {key: value for key, value in result.items() if key not in _SHOWN}
    what, judged = AIMS[result["case"]].what, _judged(result)
    return f"{result['figure']:>9g}  {what} ({judged})\n{'':11}{json.dumps(rest)}"


def as_row(result: dict[str, Any]) -> str:
    """Return a result as a row of the table in `docs/measurements.md`."""
    rates = ", ".join(f"{name} {per_s:,}" for name, per_s in result.get("per_s", {}).items())
    figure = f"{result['figure']:g}{f' ({rates} a second)' if rates else ''}"
    return f"| {AIMS[result['case']].what} | {figure} | {_judged(result)} |"


def _judged(result: dict[str, Any]) -> str:
    if result["aim"] == "none":
        return "no aim"
    return f"{result['aim']}: {'met' if result['met'] else 'missed'}"


FORMATS: dict[str, Callable[[dict[str, Any]], str]] = {
    "text": as_text,
    "json": json.dumps,
    "table": as_row,
}
_SHOWN = ("case", "aim", "met", "figure")


def main() -> int:
    """Measure, and print; return 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    usual = [name for name in AIMS if name not in LONG]
    parser.add_argument("--cases", nargs="+", choices=list(AIMS), default=usual, metavar="CASE")
    parser.add_argument("--long", action="store_true", help=f"also measure {', '.join(LONG)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", choices=list(FORMATS), default="text")
    given = parser.parse_args()
    missed = 0
    for result in results([*given.cases, *(LONG if given.long else ())], given.rounds):
        missed += not result["met"]
        print(FORMATS[given.output](result), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
