"""Several proxies as one command: who has which ports, who is started again, and how all end."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from pydantic import SecretStr
from structlog.testing import capture_logs

from tests.cli.proxy_process import ProxyProcess, address_of, proxy_process
from tests.kit.cli import Call, Dev, descendants, until_gone
from tests.kit.until import free_ports, until
from txbroker.cli.proxy import workers
from txbroker.cli.run import CommandFailed
from txbroker.config.settings import Settings, load_settings
from txbroker.sdk import Limits, Message, TransactionalProducer

LANES = 8
DEADLINE_S = 60.0


def consecutive_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    while True:
        (first,) = free_ports(1)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError):
            continue
        return first


def pid_of(data_dir: Path, instance: str) -> int:
    """Return the process that holds an instance id."""
    text = (data_dir / "instances" / f"{instance}.lock").read_text()
    found = re.match(r"process (\d+) on ", text)
    assert found is not None, text
    return int(found[1])


async def until_line(proxy: ProxyProcess, event: str, worker: int) -> dict[str, Any]:
    """Return a worker's next log line of an event."""
    while (line := await proxy.until(event)).get("worker") != worker:
        pass
    return line


@asynccontextmanager
async def two_workers(data_dir: Path, dev: Dev, *words: object) -> AsyncIterator[ProxyProcess]:
    """Run two ready workers on the shared Kafka, and kill them afterwards."""
    async with proxy_process(
        data_dir, dev.kafka, "--workers", 2, "--partitions", 4, *words
    ) as proxy:
        below: list[int] = []
        try:
            await proxy.ready()
            await proxy.ready()
            below = descendants(proxy.process.pid)
            yield proxy
        finally:
            if proxy.process.returncode is None:
                proxy.process.kill()
            await asyncio.to_thread(until_gone, below)


# --- whole processes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.long)]
)  # one that hangs is killed by the parent half a minute later
async def test_transactions_continue_while_a_worker_restarts(
    dev: Dev, tmp_path: Path, way: str
) -> None:
    first = consecutive_ports(2)
    words = ("--topic-prefix", way, "--create-target-topics")
    async with two_workers(tmp_path, dev, *words, "--listen", f"127.0.0.1:{first}") as proxy:
        while len(proxy.events("starting")) < 2:
            await proxy.until("starting")
        starting = {line["worker"]: line for line in proxy.events("starting")}
        assert {w: line["listen"] for w, line in starting.items()} == {
            1: f"127.0.0.1:{first}",
            2: f"127.0.0.1:{first + 1}",
        }
        async with Committing(f"http://127.0.0.1:{first}", f"{way}-target") as committing:
            await committing.more(200)
            os.kill(pid_of(tmp_path, starting[2]["instance"]), signal.Signals[way])
            ended = await proxy.until("worker ended")
            assert (ended["worker"], ended["how"]) == (2, "SIGKILL")
            again = await until_line(proxy, "starting", 2)
            assert again["instance"] == starting[2]["instance"]
            assert again["listen"] == starting[2]["listen"]
            await until_line(proxy, "ready", 2)
            await committing.more(200)
        for port in (first, first + 1):
            assert b"txbroker_partitions{" in await page(f"http://127.0.0.1:{port}/metrics")
        assert await asyncio.to_thread(numbers_in, dev.kafka, f"{way}-target") == committing.done
        below = descendants(proxy.process.pid)
        assert len(below) == 2
        proxy.process.terminate()
        assert await proxy.ended() == 0
        until_gone(below)
        assert {line["worker"] for line in proxy.lines} == {1, 2}
        assert proxy.error == ""


async def test_workers_end_in_order_when_their_parent_is_killed(dev: Dev, tmp_path: Path) -> None:
    async with two_workers(tmp_path, dev, "--topic-prefix", "orphans") as proxy:
        below = descendants(proxy.process.pid)
        assert len(below) == 2
        proxy.process.kill()
        await proxy.ended()
        until_gone(below)
        assert sorted(line["worker"] for line in proxy.events("stopped")) == [1, 2]


async def test_signal_to_all_processes_ends_them_in_order(dev: Dev, tmp_path: Path) -> None:
    # As Ctrl-C does it, and systemd.
    async with two_workers(tmp_path, dev, "--topic-prefix", "together") as proxy:
        below = descendants(proxy.process.pid)
        for pid in (*below, proxy.process.pid):
            os.kill(pid, signal.SIGINT)
        assert await proxy.ended() == 0
        until_gone(below)
        assert sorted(line["worker"] for line in proxy.events("stopped")) == [1, 2]


async def test_one_worker_is_the_process_itself(dev: Dev, tmp_path: Path) -> None:
    words = ("--topic-prefix", "alone", "--workers", "1")
    async with proxy_process(tmp_path, dev.kafka, *words) as proxy:
        await proxy.ready()
        assert descendants(proxy.process.pid) == []
        proxy.process.terminate()
        assert await proxy.ended() == 0
        assert not any("worker" in line for line in proxy.lines)


async def test_workers_that_cannot_start_end_the_command(
    tmp_path: Path, closed_port: socket.socket
) -> None:
    words = ("--workers", 2, "--wait-for-kafka-s", 0)
    kafka = address_of(closed_port)
    async with proxy_process(tmp_path, kafka, *words) as proxy:
        assert await proxy.ended() == 1
    assert re.search(rf"Error: worker [12]: .*{kafka}", proxy.error)
    assert re.search(r"Error: worker [12] failed to start: .* all were stopped", proxy.error)
    assert "Traceback" not in proxy.error


async def test_workers_that_wait_for_kafka_end_by_a_signal(
    tmp_path: Path, closed_port: socket.socket
) -> None:
    async with proxy_process(tmp_path, address_of(closed_port), "--workers", 2) as proxy:
        await proxy.until("waiting for kafka")
        proxy.process.terminate()
        assert await proxy.ended() == 0
    assert proxy.error == ""


def test_port_in_use_of_second_worker_is_reported(call: Call, tmp_path: Path) -> None:
    first = consecutive_ports(2)
    with socket.create_server(("127.0.0.1", first + 1)):
        words = ("--workers", 2, "--listen", f"127.0.0.1:{first}", "--data-dir", tmp_path)
        done = call("proxy", "--kafka", "127.0.0.1:1", *words)
    assert (done.code, done.out) == (1, "")
    assert (
        f"Error: worker 2 cannot listen on 127.0.0.1:{first + 1}: address already in use. Each "
        "worker uses the port after the previous worker's: stop the process that listens there, or "
        "choose a listen with 2 free ports from its port on"
    ) in done.err


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("0", "must be greater than or equal to 1, not '0'"),
        ("-1", "must be greater than or equal to 1, not '-1'"),
        ("65", "must be less than or equal to 64, not '65'"),
        ("x", "must be a valid integer, unable to parse string as an integer, not 'x'"),
        ("1.5", "must be a valid integer"),
    ],
)
def test_invalid_number_of_workers_is_refused(call: Call, given: str, why: str) -> None:
    done = call("proxy", "--workers", given)
    assert (done.code, done.out) == (2, "")
    assert f"workers (option --workers) {why}" in done.err


class Committing:
    """Lanes that commit transactions one after another; `done` are the numbers committed."""

    def __init__(self, url: str, topic: str) -> None:
        self.done: list[int] = []
        self._url = url
        self._topic = topic
        self._numbers = itertools.count()
        self._more = asyncio.Event()
        self._stop = False

    async def __aenter__(self) -> Committing:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await self._task
        self.done.sort()

    async def more(self, count: int) -> None:
        """Wait until `count` more are committed."""
        wanted = len(self.done) + count
        async with asyncio.timeout(DEADLINE_S):
            while len(self.done) < wanted:
                assert not self._task.done(), self._task
                self._more.clear()
                await self._more.wait()

    async def _run(self) -> None:
        limits = Limits(in_flight_max=LANES)
        async with TransactionalProducer(self._url, group="workers", limits=limits) as producer:
            await asyncio.gather(*[self._lane(producer) for _ in range(LANES)])

    async def _lane(self, producer: TransactionalProducer) -> None:
        while not self._stop:
            number = next(self._numbers)
            key = b"%d" % number
            async with producer.transaction(Message(self._topic, key=key, value=b"v")):
                pass
            self.done.append(number)
            self._more.set()


async def page(url: str) -> bytes:
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        assert answer.status == 200
        return await answer.read()


def numbers_in(kafka: str, topic: str) -> list[int]:
    """Return the numbers of the messages that consumers see, in order."""
    settings = {
        "bootstrap.servers": kafka,
        "group.id": "unused",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
    consumer = Consumer(settings)
    with closing(consumer):
        partitions = consumer.list_topics(topic, 15).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
        found: list[int] = []
        ends = 0
        while ends < len(partitions):
            message = consumer.poll(15)
            assert message is not None
            if message.error():
                ends += 1
            else:
                key = message.key()
                assert isinstance(key, bytes)
                found.append(int(key))
    return sorted(found)


# --- the lifeline of a worker ----------------------------------------------------------------

SLOW_TO_END = """
import asyncio
from txbroker.cli.signals import until_signal

async def work():
    try:
        print("working", flush=True)
        await asyncio.sleep(1000)
    finally:
        print("ending", flush=True)
        await asyncio.sleep(1000)

asyncio.run(until_signal(work(), 0))
"""


async def tied_process(script: str) -> asyncio.subprocess.Process:
    """Run a script whose stdin and stdout are pipes to us."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", script)
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)


async def line_of(process: asyncio.subprocess.Process) -> bytes:
    """Return the next line that is no beat."""
    assert process.stdout is not None
    while (line := await process.stdout.readline()) == b"\n":
        pass
    return line


@pytest.mark.parametrize(
    "ways",
    [["stop", "end"], ["SIGTERM", "end"], ["SIGINT", "stop", "end"], ["end", "SIGTERM"]],
    ids=" ".join,
)
async def test_first_stop_is_orderly_and_second_is_immediate(ways: list[str]) -> None:
    process = await tied_process(SLOW_TO_END)
    assert process.stdin is not None
    async with asyncio.timeout(DEADLINE_S):
        assert await line_of(process) == b"working\n"
        for way in ways:
            assert process.returncode is None
            if way == "stop":
                process.stdin.write(b"stop\n")
                await process.stdin.drain()
            elif way == "end":
                process.stdin.close()
            else:
                process.send_signal(signal.Signals[way])
            if way == ways[0]:
                assert await line_of(process) == b"ending\n"
        assert await process.wait() == -signal.SIGTERM


HANGING = """
import asyncio, time
from txbroker.cli import signals
from txbroker.cli.signals import until_signal

signals.END_TIMEOUT_S = 0.2

async def work():
    print("working", flush=True)
    time.sleep(1000)

asyncio.run(until_signal(work(), 0))
"""


async def test_process_that_hangs_ends_with_its_parent() -> None:
    process = await tied_process(HANGING)
    assert process.stdin is not None
    async with asyncio.timeout(DEADLINE_S):
        assert await line_of(process) == b"working\n"
        process.stdin.close()
        assert await process.wait() == 1


# --- the parent alone ------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short times in place of those for people."""
    monkeypatch.setattr(workers, "PAUSE_S", 0.01)
    monkeypatch.setattr(workers, "PAUSE_MAX_S", 0.04)
    monkeypatch.setattr(workers, "END_TIMEOUT_S", 0.5)


def behaving(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Replace the workers by a script, with their settings as `config`."""
    head = "import json, os, signal, sys, time\nconfig = json.loads(sys.stdin.readline())\n"
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-c", head + body))


def two(**settings: Any) -> Settings:
    return Settings(workers=2, listen="127.0.0.1:0", **settings)


@asynccontextmanager
async def parent() -> AsyncIterator[asyncio.Task[None]]:
    """Run the parent of two workers; cancel it at the end."""
    task = asyncio.create_task(workers.run_workers(two()))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.usefixtures("quick")
async def test_repeated_deaths_lengthen_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    behaving(
        monkeypatch,
        "print('ready', config['worker'], flush=True)\n"
        "if config['worker'] == 2: sys.exit(3)\n"
        "sys.stdin.readline()\n",
    )
    with capture_logs() as lines:
        async with parent():
            await until(lambda: len(lines) >= 4)
    events = [(line["event"], line["worker"], line["how"]) for line in lines]
    assert set(events) == {("worker ended", 2, "exit code 3")}
    assert [line["seconds"] for line in lines[:4]] == [0.01, 0.02, 0.04, 0.04]


@pytest.mark.usefixtures("quick")
async def test_ready_lines_come_together_and_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    behaving(monkeypatch, "print('ready', config['worker'], flush=True)\nsys.stdin.readline()\n")
    async with parent() as task:
        assert await until(lambda: capsys.readouterr().out) == "ready 1\nready 2\n"
    assert task.cancelled()


@pytest.mark.usefixtures("quick")
async def test_worker_that_does_not_stop_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "BEAT_S", 60)  # the script does not beat: not hanging
    behaving(
        monkeypatch,
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "if config['worker'] == 2: time.sleep(1000)\n",
    )
    before = set(descendants(os.getpid(), deep=False))
    async with parent() as task:
        # Both lines: a worker whose start is cancelled is killed without an error.
        await until(lambda: "ready\nready\n" in capsys.readouterr().out)
        below = set(descendants(os.getpid(), deep=False)) - before
        assert len(below) == 2
    with pytest.raises(CommandFailed, match="worker 2 did not stop in order: SIGKILL"):
        task.result()
    until_gone(list(below))


@pytest.mark.usefixtures("quick")
async def test_hanging_worker_writes_stacks_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(workers, "BEAT_S", 0.1)
    monkeypatch.setattr(workers, "STACKS_S", 0.5)
    once = tmp_path / "once"
    behaving(
        monkeypatch,
        "import faulthandler, threading\n"
        "def beat():\n"
        "    while True: print(flush=True); time.sleep(0.1)\n"
        "def hang(): time.sleep(1000)\n"
        "faulthandler.register(signal.SIGUSR1)\n"
        "print('ready', config['worker'], flush=True)\n"
        f"if config['worker'] == 2 and not os.path.exists({str(once)!r}):\n"
        f"    open({str(once)!r}, 'w').close(); hang()\n"
        "threading.Thread(target=beat, daemon=True).start()\n"
        f"if config['worker'] == 2: open({str(once)!r} + ' more', 'w').close()\n"
        "sys.stdin.readline()\n",
    )
    with capture_logs() as lines:
        async with parent():
            await until((tmp_path / "once more").exists)
    events = [(line["event"], line["worker"], line.get("how")) for line in lines]
    assert events == [("worker hangs", 2, None), ("worker ended", 2, "SIGKILL")]
    assert lines[0]["seconds"] == pytest.approx(3)
    assert "in hang\n" in capfd.readouterr().err


@pytest.mark.usefixtures("quick")
async def test_starting_worker_has_longer_and_stop_kills_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "BEAT_S", 0.01)
    monkeypatch.setattr(workers, "BEATS_MISSED_MAX", 1)
    monkeypatch.setattr(workers, "END_TIMEOUT_S", 1000)
    monkeypatch.setattr(workers, "STACKS_S", 1000)
    behaving(monkeypatch, "signal.signal(signal.SIGUSR1, signal.SIG_IGN); time.sleep(1000)\n")
    before = set(descendants(os.getpid(), deep=False))
    with capture_logs() as lines:
        async with asyncio.timeout(DEADLINE_S), parent() as task:
            await until(lambda: len(lines) == 2)
            below = set(descendants(os.getpid(), deep=False)) - before
    assert task.cancelled()
    until_gone(list(below))
    assert {line["event"] for line in lines} == {"worker hangs"}
    assert [line["seconds"] for line in lines] == pytest.approx([1.2, 1.2])


@pytest.mark.usefixtures("quick")
async def test_worker_that_cannot_start_stops_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    behaving(
        monkeypatch,
        "if config['worker'] == 2: sys.exit(1)\n"
        f"open({str(config)!r}, 'w').write(sys.stdin.readline())\n",
    )
    with pytest.raises(CommandFailed, match="worker 2 failed to start"):
        await workers.run_workers(two())
    assert config.read_text() == "stop\n"


# --- what each is given ----------------------------------------------------------------------


def test_workers_have_consecutive_ports() -> None:
    given = Settings(
        workers=3,
        instance="shop",
        listen="[::1]:8470",
        advertise="http://proxy-1:8470",
        admin_listen="127.0.0.1:9000",
        peer_listen="127.0.0.1:0",
        peer_advertise="https://10.1.2.3:443",
    )
    first, third = given.of_worker(1), given.of_worker(3)
    assert first == given.model_copy(update={"workers": 1})
    assert (third.workers, third.instance) == (1, "shop-3")
    assert (third.listen, third.advertise) == ("[::1]:8472", "http://proxy-1:8472")
    assert (third.admin_listen, third.peer_listen) == ("127.0.0.1:9002", "127.0.0.1:0")
    assert third.peer_advertise == "https://10.1.2.3:445"
    assert Settings(workers=3).of_worker(3).instance == ""


def test_worker_receives_all_explicit_settings(tmp_path: Path) -> None:
    given = Settings(
        workers=2,
        data_dir=tmp_path,
        reserved_topics=("a*", "b"),
        kafka_security_protocol="SASL_SSL",
        kafka_sasl_mechanism="PLAIN",
        kafka_sasl_username="u",
        kafka_sasl_password=SecretStr("h1dden"),
    ).of_worker(2)
    config = load_settings(workers.plain_settings(given), environ={})
    assert config == given
    assert config.kafka_secret("kafka_sasl_password") == "h1dden"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"admin_listen": "127.0.0.1:8471"},
            "admin_listen 127.0.0.1:8471: worker 1 has the port 8471, which is one of listen. "
            "Leave room for 2 ports",
        ),
        (
            {"listen": "127.0.0.1:65535"},
            "listen 127.0.0.1:65535: worker 2 has the port 65536, which does not exist",
        ),
        (
            {"advertise": "http://proxy-1:65535"},
            "advertise http://proxy-1:65535: worker 2 has the port 65536, which does not exist",
        ),
        (
            {"advertise": "http://proxy-1"},
            "advertise http://proxy-1 names no port, and each of the 2 workers has the next one",
        ),
        ({"token_file": "token"}, "set peer_secret_file or peer_names"),
    ],
)
def test_settings_unusable_with_workers_are_refused(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("token").touch(mode=0o600)
    Path("token").write_text("of-everybody-alike\n")
    words = [word for name, at in given.items() for word in (f"--{name.replace('_', '-')}", at)]
    done = call("proxy", "--workers", 2, *words)
    assert (done.code, done.out) == (2, "")
    assert why in done.err
