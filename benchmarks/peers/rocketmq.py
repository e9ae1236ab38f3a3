"""Apache RocketMQ: one name server, one broker, and its own benchmark of transactions.

Run as a program it renews the lock of its jars: `python -m benchmarks.peers.rocketmq` (needs mvn).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.peers.base import Figure, Missing, Plan, Times, child, free_ports, wait_for_port
from txbroker.embedded.errors import EmbeddedKafkaError
from txbroker.embedded.jars import fetch_jars
from txbroker.embedded.java import find_java
from txbroker.embedded.lock import read_lock_file, resolve_pom, write_lock_file

VERSION = "5.5.0"
LOCK = Path(__file__).with_name(f"rocketmq-{VERSION}.lock")
COMMIT_TO_CONSUMER = Path(__file__).with_name("CommitToConsumer.java")
CONSUME_ALL = Path(__file__).with_name("ConsumeAll.java")
ARTIFACTS = ("rocketmq-namesrv", "rocketmq-broker", "rocketmq-example")
TOPIC = "Comparison"
"""Created by the first message, with 8 queues. The benchmark's default topic has 1,024 queues, each
with a file, which cost it the first minute."""
START_S = 90.0
VISIBLE_S = 300.0
REPORT_EVERY_S = 10.0
"""The benchmark reports the mean of the last 9 to 10 s every 10 s."""
COUNT = 1000
"""Transactions of which it is measured how soon the consumer has them."""
_REPORT = re.compile(
    r"Send TPS:\s*(?P<per_s>\d+)[ |]+Max RT\(ms\):\s*(?P<max>\d+)[ |]+"
    r"AVG RT\(ms\):\s*(?P<mean>[\d.]+|NaN)[ |]+Send Failed:\s*(?P<failed>\d+)"
)
_DEPENDENCY = (
    "<dependency><groupId>org.apache.rocketmq</groupId><artifactId>{}</artifactId>"
    f"<version>{VERSION}</version></dependency>"
)


class RocketMQ:
    """RocketMQ's TransactionProducer against one broker that flushes to disk now and then."""

    name = "rocketmq"
    title = f"RocketMQ {VERSION}"
    counts = (
        "its own benchmark: prepare acknowledged, commit sent one way and unconfirmed, "
        "nothing read; asynchronous flush, 8 queues"
    )

    def __init__(self) -> None:
        self._jars: Sequence[Path] = ()

    def version(self) -> str:
        """Return name and version of the software.

        Raises:
            Missing: there is no Java, or its jars cannot be had.
        """
        try:
            self._jars = fetch_jars(f"RocketMQ {VERSION}", read_lock_file(LOCK))
            return f"Apache RocketMQ {VERSION} from Maven Central, Java {find_java().major}"
        except EmbeddedKafkaError as error:
            raise Missing(str(error)) from None

    def turn(self, plan: Plan, folder: Path) -> Iterator[Figure]:
        """Measure on new servers."""
        with _servers(self._jars, folder) as names:
            for threads in plan.in_flight:
                yield self._throughput(plan, folder, names, threads)
            yield self._commit_to_consumer(plan, folder, names)

    @contextmanager
    def consumers(
        self, folder: Path, count: int, size: int, keys: int
    ) -> Iterator[Callable[[str], float]]:
        """Run new servers with a topic of `count` messages for the block. Give a function that
        consumes all of them `concurrently` or `orderly`, and returns the messages a second.

        Raises:
            Missing: it cannot run here; also from that function.
        """
        self.version()
        if shutil.which("javac") is None:
            raise Missing("it takes a JDK")
        with _servers(self._jars, folder) as names:
            main, arguments = str(CONSUME_ALL), [names, str(count), str(size), str(keys)]
            with _java(self._jars, folder, "consume", main, arguments, stdin=True) as process:
                _answer(process, "ready")
                yield lambda mode: _ask(process, mode)

    def _throughput(self, plan: Plan, folder: Path, names: str, threads: int) -> Figure:
        """Run the benchmark until it has reported the time after the warm-up."""
        main = "org.apache.rocketmq.example.benchmark.TransactionProducer"
        options = ["-n", names, "-t", TOPIC, "-w", str(threads), "-s", str(plan.size)]
        reports: list[re.Match[str]] = []
        # A report covers the last 9 s; the first 10 s are mostly warm-up in any case.
        skipped = max(1, round(plan.warmup_s / REPORT_EVERY_S))
        wanted = skipped + max(1, round(plan.duration_s / REPORT_EVERY_S))
        with _java(self._jars, folder, f"producer-{threads}", main, options) as process:
            assert process.stdout is not None
            watchdog = threading.Timer(START_S + (wanted + 1) * REPORT_EVERY_S, process.kill)
            watchdog.start()
            for line in process.stdout:
                found = _REPORT.search(line)
                if found is not None:
                    reports.append(found)
                if len(reports) == wanted:
                    break
            watchdog.cancel()
        reports = reports[skipped:]
        if not reports:
            raise Missing("its benchmark ended before its first report")
        # Its number of sent messages includes failed ones.
        rates = [float(one["per_s"]) - int(one["failed"]) / REPORT_EVERY_S for one in reports]
        if min(rates) <= 0:
            raise Missing(f"with {threads} threads its sends failed: {reports[-1].group()}")
        extra = {
            "mean_ms": round(sum(float(one["mean"]) for one in reports) / len(reports), 2),
            "max_ms": max(float(one["max"]) for one in reports),
            "failed": sum(int(one["failed"]) for one in reports),
        }
        return Figure(threads, round(sum(rates) / len(rates), 1), extra=extra)

    def _commit_to_consumer(self, plan: Plan, folder: Path, names: str) -> Figure:
        """Measure from the commit of one transaction at a time until a consumer has it."""
        if shutil.which("javac") is None:
            return Figure(1, None, extra={"visible": "not measured: it takes a JDK"})
        command = [names, str(plan.size), str(COUNT)]
        with _java(self._jars, folder, "visible", str(COMMIT_TO_CONSUMER), command) as process:
            try:
                out, _ = process.communicate(timeout=VISIBLE_S)
            except subprocess.TimeoutExpired:
                why = f"{COUNT:,} transactions took more than {VISIBLE_S:.0f} s"
                return Figure(1, None, extra={"visible": f"not measured: {why}"})
        found = dict(re.findall(r"^(\w+) ([\d.]+)$", out, re.M))
        if "sent_p99" not in found:
            log = (folder / "visible.log").read_text().strip().splitlines() or ["without output"]
            why = next((line for line in log if "Exception" in line), log[-1])
            return Figure(1, None, extra={"visible": f"not measured: {why}"})
        return Figure(
            1,
            None,
            Times(float(found["sent_p50"]), float(found["sent_p99"])),
            Times(float(found["visible_p50"]), float(found["visible_p99"])),
        )


def _ask(process: subprocess.Popen[str], mode: str) -> float:
    """Have the consuming program consume once; return its answer."""
    assert process.stdin is not None
    process.stdin.write(f"{mode}\n")
    process.stdin.flush()
    return float(_answer(process, "per_s"))


def _answer(process: subprocess.Popen[str], word: str) -> str:
    """Return the rest of the next line that begins with a word; other lines are its log's."""
    assert process.stdout is not None
    for line in process.stdout:
        first, _, rest = line.strip().partition(" ")
        if first == word:
            return rest
    raise Missing("its consumer ended")


@contextmanager
def _servers(jars: Sequence[Path], folder: Path) -> Iterator[str]:
    """Run a name server and a broker; give the name server's address."""
    (names_port,) = free_ports(1)
    port = _port_with_neighbours()
    names = f"127.0.0.1:{names_port}"
    (folder / "names.conf").write_text(f"listenPort={names_port}\n")
    (folder / "broker.conf").write_text(
        "brokerName=bench\nbrokerIP1=127.0.0.1\nflushDiskType=ASYNC_FLUSH\n"
        f"namesrvAddr={names}\nlistenPort={port}\nhaListenPort={port + 1}\n"
        f"storePathRootDir={folder / 'store'}\n"
        f"storePathCommitLog={folder / 'store' / 'commitlog'}\n"
        "autoCreateTopicEnable=true\n"
    )
    with ExitStack() as stack:
        for name, main, conf, at in (
            ("names", "org.apache.rocketmq.namesrv.NamesrvStartup", "names.conf", names_port),
            ("broker", "org.apache.rocketmq.broker.BrokerStartup", "broker.conf", port),
        ):
            server = stack.enter_context(_java(jars, folder, name, main, ["-c", conf], log=True))
            wait_for_port(at, lambda: server.poll() is None, START_S, f"RocketMQ's {name}")  # noqa: B023
        _wait_for_registration(folder)
        yield names


def _wait_for_registration(folder: Path) -> None:
    """Wait until the broker reports its start, after its registration at the name server."""
    deadline = time.monotonic() + START_S
    while "boot success" not in (folder / "broker.log").read_text(errors="replace"):
        if time.monotonic() > deadline:
            raise Missing("RocketMQ's broker does not come up")
        time.sleep(0.1)


def _port_with_neighbours() -> int:
    """Return a free port whose neighbours are free too: a broker also takes the one two below
    and the one above."""
    while True:
        (port,) = free_ports(1)
        if all(_is_free(port + step) for step in (-2, 1)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return 1024 < port < 65535 and probe.connect_ex(("127.0.0.1", port)) != 0


@contextmanager
def _java(
    jars: Sequence[Path],
    folder: Path,
    name: str,
    main: str,
    arguments: Sequence[str],
    *,
    log: bool = False,
    stdin: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """Run a class, or a source file, with RocketMQ's jars; end it with its block."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    heap = "-Xmx2g" if name == "broker" else "-Xmx512m"
    path = os.pathsep.join(map(str, jars))
    command = [str(find_java().path), heap, f"-Duser.home={home}", f"-Drocketmq.home.dir={home}"]
    command += ["-cp", path, main, *arguments]
    options = {} if log else {"stdout": subprocess.PIPE}
    if stdin:
        options["stdin"] = subprocess.PIPE
    with child(command, folder, name, **options) as process:
        yield process


def renew_lock() -> None:
    """Ask Maven which jars it takes, and write them down."""
    pom = (
        "<project><modelVersion>4.0.0</modelVersion><groupId>txbroker</groupId>"
        "<artifactId>lock</artifactId><version>1</version><dependencies>"
        f"{''.join(map(_DEPENDENCY.format, ARTIFACTS))}</dependencies></project>"
    )
    head = [
        f"# Apache RocketMQ {VERSION}: Maven path, size in bytes, SHA-256.",
        "# Renew with: python -m benchmarks.peers.rocketmq",
    ]
    write_lock_file(LOCK, head, resolve_pom(pom))


if __name__ == "__main__":
    renew_lock()
