"""What all peers have in common: what they are asked, what they answer, and how lanes are run."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

PARTITIONS = 4
"""Of every topic, and of txbroker's half topic."""


_PR_SET_PDEATHSIG = 1


class Missing(Exception):
    """A peer cannot be run here; the sentence says why."""


@dataclass(frozen=True)
class Plan:
    """What every peer is asked.

    Attributes:
        in_flight: how many transactions are under way at one time; measured one after another.
        size: bytes of each message.
        warmup_s: seconds to run before each measurement.
        duration_s: seconds of each measurement.
    """

    in_flight: tuple[int, ...]
    size: int
    warmup_s: float
    duration_s: float


@dataclass(frozen=True)
class Times:
    """How long something took, milliseconds."""

    p50: float
    p99: float


@dataclass(frozen=True)
class Figure:
    """What was measured with so many in flight.

    Attributes:
        per_s: transactions a second that were complete: acknowledged and, where the peer is seen
            to deliver, delivered; None where only times were measured.
        acked_ms: of a whole transaction, until its decision was acknowledged.
        visible_ms: from the call that decides until a consumer has the message.
        extra: further numbers, by name.
    """

    in_flight: int
    per_s: float | None
    acked_ms: Times | None = None
    visible_ms: Times | None = None
    extra: dict[str, object] = field(default_factory=dict)


class Peer(Protocol):
    """One of those that are compared.

    Attributes:
        name: in a word, for `--peers`.
        title: as the table shows it.
        counts: what one transaction of it is, and what it promises, in a sentence.
    """

    name: str
    title: str
    counts: str

    def version(self) -> str:
        """Return what is run, with its version.

        Raises:
            Missing: it cannot be run here.
        """
        ...

    def turn(self, plan: Plan, folder: Path) -> Iterator[Figure]:
        """Start all that it takes, in this folder; measure; end all, also where this is closed
        early.

        Raises:
            Missing: it cannot be run here.
        """
        ...


def times_of(seconds: Sequence[float]) -> Times | None:
    """Return the percentiles of some times, None of none."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    last = len(ordered) - 1
    p50, p99 = (round(ordered[round(last * share)] * 1000, 2) for share in (0.5, 0.99))
    return Times(p50, p99)


async def run_lanes(
    plan: Plan, lanes: int, transact: Callable[[int], Awaitable[int]]
) -> tuple[float, list[float]]:
    """Have lanes carry out one transaction after another, or several at once where `transact`
    says that these were more; return how many a second, and how long each call took."""
    began = time.monotonic()
    begin = began + plan.warmup_s
    end = begin + plan.duration_s
    count = 0
    times: list[float] = []

    async def lane(number: int) -> None:
        nonlocal count
        while (start := time.monotonic()) < end:
            done = await transact(number)
            now = time.monotonic()
            if begin <= now <= end:
                count += done
                times.append(now - start)

    await asyncio.gather(*map(lane, range(lanes)))
    return count / plan.duration_s, times


@contextmanager
def child(
    command: Sequence[str | Path], folder: Path, name: str, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run a process that dies with its block, and with us; it is thrown away, so it is killed.

    What it says goes to `NAME.log` in the folder, stdout too unless `options` say otherwise.
    """
    with (folder / f"{name}.log").open("a") as log:
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(
            command, cwd=folder, text=True, preexec_fn=_die_with_parent, **(given | options)
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _die_with_parent() -> None:
    # A session of its own keeps a terminal's Ctrl-C from it: we end it, in order.
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody listens on."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def wait_for_port(port: int, alive: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Wait until somebody listens.

    Raises:
        Missing: it takes too long, or whoever should has ended.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if not alive() or time.monotonic() > deadline:
                raise Missing(f"{what} does not start") from None
            time.sleep(0.1)
        else:
            return


def body_of(plan: Plan) -> bytes:
    """Return a message's value."""
    return os.urandom(plan.size)
