"""How long a restart takes, and how much memory undecided transactions cost.

`pending`: one proxy holds a million undecided transactions of 1 KiB; its memory, and the time from
`kill -9` and start until it is ready again. `settled`: the same with a thousand undecided ones
behind millions that were settled; the time must not grow with their number.

The logs are filled straight through Kafka, as an owner's appenders would, while the proxy that owns
them reads along, promotes and writes its snapshots. `python benchmarks/recovery.py --help`.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvloop

from txbroker.config import load_settings
from txbroker.core.codec import encode_half, encode_marker
from txbroker.core.ids import make_id
from txbroker.core.records import (
    RECORD_VERSION,
    CheckPolicy,
    Half,
    Marker,
    MarkerKind,
    Message,
    Record,
    Source,
)
from txbroker.embedded import EmbeddedKafka
from txbroker.kafka.wiring import door_from

PARTITIONS = 4
BATCH = 500
GROUPS = 8
TARGET = "bench-target"
NEVER = CheckPolicy(after_s=86_400.0)
DEADLINE_S = 3600.0
BEHIND_MAX = 50_000
"""Transactions that the proxy may still have to read while others are written."""


class Proxy:
    """One `txbroker proxy` in a process of its own, that can be killed and started again."""

    def __init__(self, kafka: str, prefix: str, folder: Path, dedup_window_s: float) -> None:
        self._options = {
            "dedup_window_s": str(dedup_window_s),
            "kafka": kafka,
            "topic_prefix": prefix,
            "listen": "127.0.0.1:0",
            "instance": "bench",
            "data_dir": str(folder / prefix),
            "partitions": str(PARTITIONS),
            "create_target_topics": "true",
            "log_level": "warning",
        }
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> float:
        """Start it; return how long it took until it said that it is ready, seconds."""
        began = time.monotonic()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TXBROKER_")}
        environment |= {f"TXBROKER_{k.upper()}": v for k, v in self._options.items()}
        self._process = subprocess.Popen(
            [str(Path(sys.executable).with_name("txbroker")), "proxy"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            raise SystemExit("the proxy did not start")
        self.url = line.split()[1]
        return time.monotonic() - began

    def end(self, how: signal.Signals) -> None:
        """End it."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def resident_bytes(self) -> int:
        """Return the memory that it has now, bytes."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(f"txbroker_{name}"))

    def behind(self, pending: int) -> float:
        """Return how far from so many pending ones it is: what it has still to read."""
        return abs(self.metric("pending{") - pending)

    def list_all(self) -> dict[str, float]:
        """Page through everything that is pending; return how many pages, and seconds a page."""
        found: set[str] = set()
        url, took_s = f"{self.url}/v1/transactions?state=pending&limit=1000", []
        cursor: str | None = None
        while cursor or not took_s:
            began = time.monotonic()
            with urllib.request.urlopen(
                url + (f"&cursor={quote(cursor)}" if cursor else "")
            ) as answer:
                page = json.load(answer)
            took_s.append(time.monotonic() - began)
            found.update(each["id"] for each in page["transactions"])
            cursor = page["next_cursor"]
        took_s.sort()
        return {
            "listed": len(found),
            "page_p50_s": took_s[len(took_s) // 2],
            "page_max_s": took_s[-1],
            "list_s": sum(took_s),
        }

    def wait_for(self, name: str, wanted: float) -> None:
        """Wait until a metric is there."""
        end = time.monotonic() + DEADLINE_S
        while self.metric(name) != wanted:
            if time.monotonic() > end:
                raise SystemExit(f"{name} does not get to {wanted:g}")
            time.sleep(0.5)


class Filler:
    """Writes half messages and markers as an owner would, as fast as Kafka takes them."""

    def __init__(self, kafka: str, prefix: str, size: int) -> None:
        self._settings = load_settings(
            {"kafka": kafka, "topic_prefix": prefix, "instance": "filler"}, environ={}
        )
        self._body = secrets.token_bytes(size)
        self._logs: dict[int, Any] = {}

    async def fill(self, proxy: Proxy, count: int, finish: str, rate: float, label: str) -> None:
        """Write so many transactions; `finish` is empty, or the marker that they get.

        Clients would be held back by the proxy's bounds; here nobody is far ahead of it either.
        """
        door = door_from(self._settings)
        await door.start()
        self._logs = {partition: door.partition(partition) for partition in range(PARTITIONS)}
        try:
            began = time.monotonic()
            done = 0
            shown = 0.0
            while done < count:
                some = [min(BATCH, (count - done + p) // PARTITIONS) for p in range(PARTITIONS)]
                await asyncio.gather(*[self._batch(p, n, finish) for p, n in enumerate(some) if n])
                done += sum(some)
                if time.monotonic() - shown > 1:
                    while proxy.behind(0 if finish else done) > BEHIND_MAX:
                        await asyncio.sleep(0.1)
                    shown = time.monotonic()
                    print(f"\r{label}: {done:,} of {count:,}", end="", file=sys.stderr, flush=True)
                await asyncio.sleep(max(0.0, began + done / rate - time.monotonic()))
            print(f"\r{label}: {done:,} in {time.monotonic() - began:.0f} s", file=sys.stderr)
        finally:
            await door.close()

    async def _batch(self, partition: int, count: int, finish: str) -> None:
        logs = self._logs[partition]
        now_ms = round(time.time() * 1000)
        halves: list[Record] = []
        markers: list[Record] = []
        for number in range(count):
            id = make_id(partition, now_ms, secrets.randbits(64))
            message = Message(TARGET, id.encode(), self._body, (), number % 4)
            group = f"bench-{number % GROUPS}"
            halves += encode_half(Half(id, group, (message,), policy=NEVER))
            if finish:
                kind, source = MarkerKind(finish), Source.PRODUCER
                markers += [encode_marker(Marker(RECORD_VERSION, kind, id, -1, source, group))]
        await logs.half.append(halves)
        if markers:
            await logs.op.append(markers)


@contextmanager
def proxy_on(kafka: str, prefix: str, folder: Path, dedup_window_s: float) -> Iterator[Proxy]:
    """Run a proxy of an installation of its own."""
    made = Proxy(kafka, prefix, folder, dedup_window_s)
    try:
        made.start()
        yield made
    finally:
        made.end(signal.SIGKILL)


def restart(proxy: Proxy, pending: int) -> dict[str, float]:
    """Kill the proxy, start it again, and return what that took."""
    held = proxy.resident_bytes()
    proxy.end(signal.SIGKILL)
    took_s = proxy.start()
    found = proxy.metric("pending{")
    if found != pending:
        raise SystemExit(f"{found:g} are pending after the restart, not {pending}")
    figures = {
        "resident_mib": held / 2**20,
        "restart_s": took_s,
        "resident_after_mib": proxy.resident_bytes() / 2**20,
        **proxy.list_all(),
    }
    if figures["listed"] != pending:
        raise SystemExit(f"{figures['listed']:g} are listed, not {pending}")
    return figures


def make_target(kafka: str) -> None:
    """Create the topic that everything goes to."""
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({"bootstrap.servers": kafka, "log_level": 0})
    admin.create_topics([NewTopic(TARGET, 4, 1)])[TARGET].result(15)


def measure(
    kafka: str, folder: Path, name: str, pending: int, settled: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Fill an installation, restart its proxy, and return the figures."""
    with proxy_on(kafka, name, folder, arguments.dedup_window_s) as proxy:
        small = Filler(kafka, name, arguments.settled_size)
        committed = round(settled * arguments.committed_share)
        if settled:
            rate = arguments.rate
            uvloop.run(small.fill(proxy, settled - committed, "rollback", rate, "rolled back"))
            uvloop.run(small.fill(proxy, committed, "commit", rate, "committed"))
            proxy.wait_for("promoted_total{", committed)
        large = Filler(kafka, name, arguments.size)
        uvloop.run(large.fill(proxy, pending, "", arguments.rate, "pending"))
        proxy.wait_for("pending{", pending)
        time.sleep(arguments.settle_s)
        figures = restart(proxy, pending)
        recovery_s = proxy.metric("recovery_seconds_sum") / PARTITIONS
    found = {"case": name, "pending": pending, "settled": settled, **figures}
    return {**found, "recovery_s": recovery_s}


def main() -> int:
    """Measure and print a table, and JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pending", type=int, default=1_000_000)
    parser.add_argument("--settled", type=int, nargs="*", default=[1_000_000, 5_000_000])
    parser.add_argument("--pending-behind", type=int, default=1000)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--settled-size", type=int, default=100)
    parser.add_argument("--committed-share", type=float, default=0.01)
    parser.add_argument(
        "--rate", type=float, default=12_000.0, help="transactions a second at most"
    )
    parser.add_argument(
        "--dedup-window-s",
        type=float,
        default=60.0,
        help="with the rate it says how many settled ones are remembered",
    )
    parser.add_argument("--settle-s", type=float, default=30.0, help="rest before the restart")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = [("pending", arguments.pending, 0)] if arguments.pending else []
    cases += [
        (f"settled-{n}", arguments.pending_behind, settled)
        for n, settled in enumerate(arguments.settled)
    ]
    found = []
    for name, pending, settled in cases:
        with (
            tempfile.TemporaryDirectory() as folder,
            EmbeddedKafka(Path(folder) / "kafka", heap_mb=1024) as kafka,
        ):
            make_target(kafka.bootstrap)
            found.append(measure(kafka.bootstrap, Path(folder), name, pending, settled, arguments))
            show(found[-1:], arguments.json)
    return 0


def show(found: list[dict[str, Any]], as_json: bool) -> None:
    """Print figures."""
    for each in found:
        if as_json:
            print(json.dumps(each), flush=True)
            continue
        print(
            f"{each['pending']:>9,} pending, {each['settled']:>9,} settled: "
            f"{each['resident_mib']:6.0f} MiB, restart {each['restart_s']:5.1f} s "
            f"(recovery of a partition {each['recovery_s']:.1f} s), "
            f"then {each['resident_after_mib']:.0f} MiB; all listed in {each['list_s']:.1f} s, "
            f"a page of 1,000 in {each['page_p50_s']:.3f} s (at most {each['page_max_s']:.3f} s)",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
