"""Seconds and bytes: how long a rebalance pauses partitions, how soon a killed member is replaced
and a retry begins, and how much memory a consumer with stuck keys takes.

Consumers are processes (`benchmarks.consumers.member`), whose notes are read here.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.consumers.load import (
    PARTITIONS,
    VALUE_BYTES,
    door_to,
    new_name,
    steady_load,
    until,
)
from benchmarks.consumers.member import FAILS, STUCK
from benchmarks.peers.base import child
from txbroker.core.records import Record
from txbroker.door.consuming import TopicSpec

SHORT_SESSION_S = 6.0
"""The shortest one that a broker takes by default."""
LONG_SESSION_S = 60.0
RETRY_AFTER_S = 10.0
"""The first delay of a retry."""
MIB = 1 << 20
_TIMING = {
    SHORT_SESSION_S: {"session_s": SHORT_SESSION_S, "lease_s": 4.0, "heartbeat_s": 1.0},
    LONG_SESSION_S: {},
}
_CALM_S = 4.0
_END_S = 30.0
_FRESH_S = 0.5
_KILLS = 3
_RETRIES, _RETRY_BATCH = 300, 25
_STUCK_RECORDS = 400_000


class Note(NamedTuple):
    """A message that a member began to handle."""

    at_s: float
    member: str
    partition: int
    offset: int
    attempt: int


class Members:
    """Consumer processes of one group, and their notes."""

    def __init__(self, kafka: str, topic: str, folder: Path, **options: Any) -> None:
        self._command = [sys.executable, "-m", "benchmarks.consumers.member"]
        self._arguments = [kafka, new_name("bench"), topic]
        self._options = json.dumps({"order": "key", **options})
        self._folder = folder
        self._files: dict[str, Path] = {}

    @contextmanager
    def member(self, name: str) -> Iterator[subprocess.Popen[str]]:
        """Run a member for the block at most."""
        self._files[name] = file = self._folder / f"{self._arguments[1]}-{name}"
        arguments = [*self._arguments, str(file), self._options]
        root = Path(__file__).parents[2]
        with child([*self._command, *arguments], root, str(file)) as process:
            yield process

    def notes(self, name: str | None = None) -> list[Note]:
        """Return the notes of one member or all, in the order of time."""
        found = []
        for member, file in self._files.items():
            if name in (None, member) and file.exists():
                for line in file.read_text().splitlines():
                    fields = line.split()
                    if len(fields) == 4:  # a killed member may leave a part of a line
                        numbers = map(int, fields[1:])
                        found.append(Note(float(fields[0]), member, *numbers))
        return sorted(found)

    def all_served(self, since_s: float, name: str | None = None) -> bool:
        """Return whether a message of every partition was handled after a time."""
        places = {note.partition for note in self.notes(name) if note.at_s > since_s}
        return len(places) == PARTITIONS

    def joined(self, name: str) -> bool:
        """Return whether a member works, and all partitions are served."""
        return bool(self.notes(name)) and self.all_served(time.time() - _FRESH_S)


def gaps(notes: list[Note]) -> tuple[float, float]:
    """Return the longest time between two messages of a partition that the same member handled,
    and of one that moved to another member."""
    last: dict[int, Note] = {}
    stayed = moved = 0.0
    for note in notes:
        before = last.get(note.partition)
        last[note.partition] = note
        if before is None:
            continue
        if before.member == note.member:
            stayed = max(stayed, note.at_s - before.at_s)
        else:
            moved = max(moved, note.at_s - before.at_s)
    return stayed, moved


async def rebalances(kafka: str, folder: Path) -> dict[str, Any]:
    """Measure the pauses of partitions while two more members join and leave again."""
    topic = new_name("moves")
    members = Members(kafka, topic, folder)
    async with steady_load(kafka, topic):
        with ExitStack() as stack:
            stack.enter_context(members.member("first"))
            await until(lambda: members.all_served(0), "the first member works")
            began_s = time.time()
            await asyncio.sleep(_CALM_S)
            calm, _ = gaps([note for note in members.notes() if note.at_s > began_s])
            running = {}
            for name in ("second", "third"):
                running[name] = stack.enter_context(members.member(name))
                await until(lambda: members.joined(name), f"the {name} member works")  # noqa: B023
                await asyncio.sleep(_CALM_S)
            for name in ("third", "second"):
                running[name].send_signal(signal.SIGTERM)
                await asyncio.to_thread(running[name].wait, _END_S)
                left_s = time.time()
                await until(lambda: members.all_served(left_s), f"the {name} member is replaced")  # noqa: B023
                await asyncio.sleep(_CALM_S)
            notes = [note for note in members.notes() if note.at_s > began_s]
    stayed, moved = gaps(notes)
    places = [(note.partition, note.offset) for note in notes]
    return {
        "figure": round(stayed, 3),
        "calm_s": round(calm, 3),
        "moved_s": round(moved, 3),
        "handled": len(notes),
        "repeated": len(places) - len(set(places)),
    }


async def replacement(kafka: str, folder: Path, session_s: float) -> dict[str, Any]:
    """Measure from `kill -9` of a member until another one handles all of its partitions."""
    topic = new_name("killed")
    members = Members(kafka, topic, folder, **_TIMING[session_s])
    took: list[float] = []
    async with steady_load(kafka, topic):
        with members.member("survivor"):
            await until(lambda: members.all_served(0), "the survivor works")
            for number in range(_KILLS if session_s == SHORT_SESSION_S else 1):
                name = f"killed-{number}"
                with members.member(name) as process:
                    await until(lambda: members.joined(name), "the second member works")  # noqa: B023
                    await asyncio.sleep(_CALM_S / 4 * number)  # another moment between heartbeats
                    killed_s = time.time()
                    process.kill()
                    process.wait()
                await until(
                    lambda: members.all_served(killed_s, "survivor"),  # noqa: B023
                    "the killed member is replaced",
                    session_s + 60,
                )
                first: dict[int, float] = {}
                for note in members.notes("survivor"):
                    if note.at_s > killed_s:
                        first.setdefault(note.partition, note.at_s)
                took.append(max(first.values()) - killed_s)
    return {
        "figure": round(max(took), 2),
        "session_s": session_s,
        "each_s": [round(each, 2) for each in took],
    }


async def retries(kafka: str, folder: Path) -> dict[str, Any]:
    """Measure how late messages that failed begin their second attempt, without order."""
    topic = new_name("retries")
    members = Members(kafka, topic, folder, order="none", local_attempts_max=1)
    async with door_to(kafka) as door:
        await door.create([TopicSpec(topic, PARTITIONS, 1, {})])
        with members.member("only") as process:
            for number in range(0, _RETRIES, _RETRY_BATCH):
                records = [Record(FAILS, bytes(VALUE_BYTES)) for _ in range(_RETRY_BATCH)]
                await door.append(topic, number % PARTITIONS, records)
                await asyncio.sleep(0.2)
            await until(lambda: len(members.notes()) >= 2 * _RETRIES, "all were retried")
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait, _END_S)
    attempts: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for note in members.notes():
        attempts[note.partition, note.offset].append(note.at_s)
    late = [times[1] - times[0] - RETRY_AFTER_S for times in attempts.values()]
    return {
        "figure": round(max(late), 3),
        "median_s": round(statistics.median(late), 3),
        "least_s": round(min(late), 3),
        "retried": len(late),
        "again": sum(len(times) - 2 for times in attempts.values()),
    }


async def memory(kafka: str, folder: Path) -> dict[str, Any]:
    """Measure the growth of a consumer's memory while every partition has a key that is stuck."""
    topic, value = new_name("stuck"), bytes(VALUE_BYTES)
    members = Members(kafka, topic, folder)
    async with door_to(kafka) as door:
        await door.create([TopicSpec(topic, PARTITIONS, 1, {})])
        for partition in range(PARTITIONS):
            await door.append(topic, partition, [Record(b"first", value)])
        with members.member("only") as process:
            await until(lambda: members.all_served(0), "the consumer works")
            before = _resident_bytes(process.pid)
            keys = [STUCK if number % 2 else b"%d" % number for number in range(100)]
            batch = [Record(key, value) for key in keys]

            async def append(partition: int) -> None:
                for _ in range(_STUCK_RECORDS // PARTITIONS // len(batch)):
                    await door.append(topic, partition, batch)

            await asyncio.gather(*map(append, range(PARTITIONS)))
            handled, most, quiet_s = -1, 0, time.monotonic()
            while time.monotonic() - quiet_s < _CALM_S:
                most = max(most, _resident_bytes(process.pid))
                if (now := len(members.notes())) != handled:
                    handled, quiet_s = now, time.monotonic()
                await asyncio.sleep(0.1)
    return {
        "figure": round((most - before) / MIB, 1),
        "before_mib": round(before / MIB, 1),
        "written": _STUCK_RECORDS,
        "handled": handled - PARTITIONS,
    }


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024
