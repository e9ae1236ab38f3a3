"""`txbroker bench` on a real Kafka, and its detection of lost and duplicated messages."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from tests.cli.cli_stub import Asked, Reply, Stub, error
from tests.kit.cli import TXBROKER, Call, Dev, descendants, until_gone
from txbroker.cli.signals import until_signal
from txbroker.kafka.tools.consumers import stop_consumer

SHORT = ("--warmup-s", "0", "--transactions", "40", "--in-flight", "8", "-o", "json")


@pytest.fixture
def bench(call: Call, dev: Dev) -> Call:
    """Measure the running proxy."""

    def measuring(*arguments: object) -> Any:
        return call("bench", *arguments, "--url", dev.url, "--kafka", dev.kafka)

    return measuring


def topics(dev: Dev) -> set[str]:
    return set(AdminClient({"bootstrap.servers": dev.kafka}).list_topics(timeout=10).topics)


def test_bench_over_sdk_sessions_adds_up(bench: Call, dev: Dev) -> None:
    before = topics(dev)
    options = ("--messages-per-transaction", 3, "--rollback-share", 0.25, "--unknown-share", 0.1)
    done = bench(*SHORT, *options, "--groups", 2, "--read-along", "all")
    assert (done.code, done.err) == (0, "")
    found = done.json
    assert {found[name] for name in ("lost", "duplicated", "wrong", "failed")} == {0}
    # More than requested, because transactions in flight are completed.
    assert found["visible"] % 3 == 0
    assert 40 * 0.7 * 3 <= found["visible"] <= (40 + 1 + 2 * 8) * 0.8 * 3
    for name in ("prepare", "decide", "visible"):
        times = found["latency_ms"][name]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["p999"] <= times["max"]
    assert sum(count for _, count in found["histogram_ms"]["prepare"]) == found["transactions"]
    assert found["acked_per_s"] > 0
    assert found["promoted_per_s"] > 0
    assert all(taken >= 0 for taken in found["cpu_s_per_1000"].values())
    assert all(after > 1 for _, after in found["memory_mib"].values())
    assert len(found["acked_per_s_by_tenth"]) == 10
    assert topics(dev) == before


def test_http(bench: Call) -> None:
    done = bench(*SHORT, "--http", "--rollback-share", 0.5)
    assert (done.code, done.err) == (0, "")
    assert done.json["asked"]["api"] == "http"
    assert {done.json[name] for name in ("lost", "duplicated", "wrong", "failed")} == {0}
    assert done.json["visible"] > 0


@pytest.mark.parametrize("api", [(), ("--http",)], ids=["sdk", "http"])
def test_keyless_messages_are_recognised(bench: Call, api: tuple[str, ...]) -> None:
    options = ("--rollback-share", 0.5, "--messages-per-transaction", 2)
    done = bench(*SHORT, *api, "--keyless", *options, "--read-along", "all")
    assert (done.code, done.err) == (0, "")
    assert done.json["asked"]["keyless"] is True
    assert {done.json[name] for name in ("lost", "duplicated", "wrong", "failed")} == {0}
    assert done.json["visible"] > 0


def test_text_output_has_table_and_histogram(bench: Call) -> None:
    done = bench("--warmup-s", 0, "--duration-s", 0.5, "--in-flight", 2, "--size", 10)
    assert (done.code, done.err) == (0, "")
    assert "transactions by SDK, 2 in flight, 1 of 10 bytes each" in done.out
    assert "lost 0, duplicated 0, visible after a rollback 0" in done.out
    assert "decide, up to ms\n" in done.out
    assert "█" * 40 in done.out


# --- proxies that lie ------------------------------------------------------------------------


class Liar:
    """Answers as a proxy does, and publishes a committed message `copies` times, or even one that
    is rolled back."""

    def __init__(self, kafka: str, copies: int, verb: str) -> None:
        self._producer = Producer({"bootstrap.servers": kafka, "log_level": 2})
        self._copies = copies
        self._verb = verb
        self._prepared: dict[str, Any] = {}

    def __call__(self, asked: Asked) -> Reply:
        """Answer a call."""
        *_, id, verb = asked.path.split("/")
        if verb == "transactions":
            id = str(len(self._prepared))
            self._prepared[id] = asked.body["messages"][0]
            return 201, {"id": id, "state": "pending"}
        if verb == self._verb:
            message = self._prepared[id]
            for _ in range(self._copies):
                self._producer.produce(message["topic"], message["value"], message["key"])
            self._producer.flush()
        return 200, {"id": id, "decision": verb, "state": "promoted"}


@pytest.mark.parametrize(
    ("copies", "verb", "rollbacks", "message"),
    [
        (0, "commit", 0, "41 messages lost, 0 duplicated, 0 visible after a rollback"),
        (2, "commit", 0, "0 messages lost, 41 duplicated, 0 visible after a rollback"),
        (1, "rollback", 1, "0 messages lost, 0 duplicated, 41 visible after a rollback"),
    ],
)
def test_lost_and_duplicated_messages_are_detected(
    call: Call,
    dev: Dev,
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
    copies: int,
    verb: str,
    rollbacks: int,
    message: str,
) -> None:
    monkeypatch.setattr("txbroker.kafka.tools.consumers.QUIET_S", 0.3)
    stub.answer = Liar(dev.kafka, copies, verb)
    where = ("--url", stub.url, "--kafka", dev.kafka, "--http", "--in-flight", 1)
    done = call("bench", *SHORT, *where, "--rollback-share", rollbacks)
    assert (done.code, done.err) == (1, f"Error: {message}\n")


def test_failed_calls_are_reported(
    call: Call, dev: Dev, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar = Liar(dev.kafka, 1, "commit")
    prepared = iter([False, *[True] * 3])

    def answer(asked: Asked) -> Reply:
        if asked.path.endswith("/transactions") and next(prepared, False):
            return error(503, "overloaded")
        return liar(asked)

    stub.answer = answer
    where = ("--url", stub.url, "--kafka", dev.kafka, "--http", "--in-flight", 1)
    done = call("bench", *SHORT, *where)
    assert (done.code, done.json["failed"], done.json["lost"]) == (1, 3, 0)
    assert done.err.startswith("Error: 3 transactions failed, the first with: it is overloaded")


# --- what cannot be measured -----------------------------------------------------------------


def test_unreachable_server_is_reported(call: Call, dev: Dev) -> None:
    no_proxy = call("bench", "--http", "--url", "http://127.0.0.1:9", "--kafka", dev.kafka)
    assert (no_proxy.code, no_proxy.out) == (1, "")
    assert no_proxy.err.startswith("Error: no answer to an HTTP call: ")
    no_kafka = call("bench", "--url", dev.url, "--kafka", "127.0.0.1:9")
    assert (no_kafka.code, no_kafka.out) == (1, "")
    assert no_kafka.err.startswith("Error: no connection to Kafka at 127.0.0.1:9")
    no_topic = call("bench", "--url", dev.url, "--kafka", dev.kafka, "--topic", "nowhere")
    assert (no_topic.code, no_topic.err) == (
        1,
        f"Error: topic nowhere does not exist on Kafka at {dev.kafka}\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://x"], "--url and --kafka belong together"),
        (["--kafka", "x:1"], "--url and --kafka belong together"),
        (["--duration-s", "1", "--transactions", "1"], "not both"),
        (["--rollback-share", "0.6", "--unknown-share", "0.6"], "exceed 1 together"),
        (["--http", "--unknown-share", "0.1"], "--unknown-share needs SDK sessions"),
        (["--in-flight", "0"], "0 is not in the range"),
    ],
)
def test_invalid_options_are_refused(call: Call, arguments: list[str], message: str) -> None:
    done = call("bench", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


# --- on its own ------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a measurement with a new Kafka, with temporary files in `tmp_path`."""
    started: list[subprocess.Popen[str]] = []

    def starting(*arguments: str) -> subprocess.Popen[str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("TXBROKER_")}
        process = subprocess.Popen(
            [TXBROKER, "bench", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environ, "TMPDIR": str(tmp_path)},
        )
        started.append(process)
        return process

    yield starting
    for process in started:
        process.kill()
        process.communicate()


def test_bench_starts_its_own_kafka_and_proxy(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start("--warmup-s", "0", "--transactions", "20", "--partitions", "1")
    out, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (0, "")
    assert "lost 0, duplicated 0" in out
    assert "unknown" not in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stop_at_any_time_leaves_no_process(
    start: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = start("--duration-s", "1000")
    children: list[int] = []
    while len(children) < 2:  # Kafka's watcher and Java
        assert process.poll() is None
        children = descendants(process.pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    until_gone(children)
    if number is signal.SIGINT:
        assert (process.returncode, out, err) == (130, "", "Stopped.\n")


class CancellingConsumer:
    """Stops as the client library's does after a request that went wrong."""

    def __init__(self) -> None:
        self.closed = False
        self._client = self

    async def close(self) -> None:
        self.closed = True

    async def stop(self) -> None:
        task = asyncio.ensure_future(asyncio.sleep(3600))
        task.cancel()
        await task


async def test_cancelled_consumer_task_ends_nothing_else() -> None:
    consumers = [CancellingConsumer(), CancellingConsumer()]
    await stop_consumer(consumers[0])
    task = asyncio.ensure_future(stop_consumer(consumers[1]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(each.closed for each in consumers)


async def test_work_that_cancels_itself_raises_error() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled itself"):
        await until_signal(work())
