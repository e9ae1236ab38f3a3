"""A proxy process with its metrics, for measurements."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

PARTITIONS = 4
TARGET = "bench-target"
DEADLINE_S = 3600.0
END_S = 30.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Proxy:
    """A `txbroker proxy` process that can be killed and restarted."""

    def __init__(self, kafka: str, prefix: str, folder: Path, settings: dict[str, Any]) -> None:
        self._options = {
            "kafka": kafka,
            "topic_prefix": prefix,
            "listen": "127.0.0.1:0",
            "instance": "bench",
            "data_dir": str(folder / prefix),
            "partitions": str(PARTITIONS),
            "create_target_topics": "true",
            "log_level": "warning",
            **{name: str(value) for name, value in settings.items()},
        }
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> float:
        """Start it; return the seconds until it was ready."""
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
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def resident_bytes(self) -> int:
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        return sum(value for _, value in self._samples(name))

    def metric_by(self, name: str, label: str) -> Counter[str]:
        """Return the sums of a metric by one of its labels."""
        found: Counter[str] = Counter()
        for line, value in self._samples(name):
            found[line.partition(f'{label}="')[2].partition('"')[0]] += round(value)
        return found

    def _samples(self, name: str) -> list[tuple[str, float]]:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line.startswith(f"txbroker_{name}"))
        return [(line, float(value)) for line, value in samples]

    def backlog(self, pending: int) -> float:
        """Return the number of transactions to read, from the expected number of pending ones."""
        return abs(self.metric("pending{") - pending)

    def list_all(self) -> dict[str, float]:
        """List all pending transactions; return their number and the seconds per page."""
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
        """Wait until a metric has this value."""
        end = time.monotonic() + DEADLINE_S
        while self.metric(name) != wanted:
            if time.monotonic() > end:
                raise SystemExit(f"{name} does not reach {wanted:g}")
            time.sleep(0.5)


@contextmanager
def proxy_on(kafka: str, prefix: str, folder: Path, **settings: Any) -> Iterator[Proxy]:
    """Run a proxy of a new installation, with these settings."""
    made = Proxy(kafka, prefix, folder, settings)
    try:
        made.start()
        yield made
    finally:
        made.end(signal.SIGKILL)


def cpu_s(pid: int) -> float:
    """Return a process's CPU time in seconds."""
    # After the name, which may contain spaces: user and system time are fields 14 and 15.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def make_target(kafka: str, **configs: str) -> None:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({"bootstrap.servers": kafka, "log_level": 0})
    admin.create_topics([NewTopic(TARGET, 4, 1, config=configs)])[TARGET].result(15)


@contextmanager
def beside(script: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module, and wait for its `ready` on stdout; it ends when its stdin does."""
    process = subprocess.Popen(
        [sys.executable, "-m", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != b"ready\n":
            raise SystemExit(f"{script} {' '.join(arguments)} did not start")
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def call(method: str, url: str, body: dict[str, Any] | None = None) -> None:
    """Make a call that must succeed."""
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()
