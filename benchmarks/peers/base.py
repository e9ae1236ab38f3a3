"""The interface of peers: plan, figures, and clients in parallel."""

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
    """A peer cannot run here; the message has the reason."""


@dataclass(frozen=True)
class Plan:
    """The measurement of every peer.

    Attributes:
        in_flight: numbers of transactions in flight, measured sequentially.
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
    """Percentiles in milliseconds."""

    p50: float
    p99: float


@dataclass(frozen=True)
class Figure:
    """One measurement.

    Attributes:
        per_s: complete transactions per second: acknowledged and, if the peer's delivery is
            measured, delivered; None: only times were measured.
        acked_ms: of a transaction until the acknowledgement of its decision.
        visible_ms: from the decision's call until a consumer received the message.
        extra: further numbers, by name.
    """

    in_flight: int
    per_s: float | None
    acked_ms: Times | None = None
    visible_ms: Times | None = None
    extra: dict[str, object] = field(default_factory=dict)


class Peer(Protocol):
    """A compared system.

    Attributes:
        name: for `--peers`.
        title: in the table.
        counts: definition and guarantee of its transaction, in a sentence.
    """

    name: str
    title: str
    counts: str

    def version(self) -> str:
        """Return name and version of the software.

        Raises:
            Missing: it cannot run here.
        """
        ...

    def turn(self, plan: Plan, folder: Path) -> Iterator[Figure]:
        """Start the servers in this folder, measure, and stop them, even if closed early.

        Raises:
            Missing: it cannot run here.
        """
        ...


def times_of(seconds: Sequence[float]) -> Times | None:
    """Return the percentiles, None without samples."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    last = len(ordered) - 1
    p50, p99 = (round(ordered[round(last * share)] * 1000, 2) for share in (0.5, 0.99))
    return Times(p50, p99)


async def run_lanes(
    plan: Plan, lanes: int, transact: Callable[[int], Awaitable[int]]
) -> tuple[float, list[float]]:
    """Run clients in parallel, each with sequential calls of `transact`.

    `transact` returns its number of transactions. Return the rate, and the duration of each call.
    """
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
    """Run a process, which is killed at the end of the block or of this process.

    Its output goes to `NAME.log` in the folder; `options` may redirect stdout.
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
    # In a new session Ctrl-C does not reach it, so that this process stops it in order.
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Return free ports of 127.0.0.1."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def wait_for_port(port: int, alive: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Wait until a server listens.

    Raises:
        Missing: the deadline passed, or the server ended.
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
    return os.urandom(plan.size)
