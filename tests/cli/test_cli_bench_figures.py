"""The arithmetic and the HTTP calls of `txbroker bench`, without Kafka."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from rich.console import Console

from txbroker.cli.bench import http as bench_http
from txbroker.cli.bench.figures import (
    BOUNDS_MS,
    BenchLatency,
    Figures,
    LoadResult,
    ResourceUsage,
    TimeWindow,
    figures,
    histogram,
    latency,
    text,
)
from txbroker.cli.bench.http import BenchConnection
from txbroker.cli.bench.load import Job, LoadEvent, LoadLog, PlannedEnd
from txbroker.cli.bench.run import ListeningProcess, progress_bar
from txbroker.cli.proxy.serving import WORKER_MODULE
from txbroker.errors import TxbrokerError
from txbroker.kafka.tools.consumers import Count

TAG = "0123abcd"
TAKEN = ResourceUsage(
    {"proxy": 0.5, "broker": None, "client": 0.25},
    {"proxy": (100.0, 101.5), "broker": (None, None)},
)


def job(**given: object) -> Job:
    fields = {"url": "", "topic": "t", "tag": TAG, "book": "", "in_flight": 1, "size": 1}
    return Job(**{**fields, "messages": 1, "warmup_s": 0.0, **given})  # type: ignore[arg-type]


def counted(of: Job, times: list[tuple[float, float, float]], failed: int = 0) -> LoadResult:
    columns = [array("d", column).tobytes() for column in zip(*times, strict=True)]
    return LoadResult.of(of, LoadLog(*columns, {"why": failed} if failed else {}))


def seen(*numbers_at: tuple[int, float]) -> Count:
    count = Count(TAG)
    for number, at in numbers_at:
        count.note([name.encode() for name in job().names(number)], at)
    return count


def measured(of: Job, times: list[tuple[float, float, float]], count: Count) -> Figures:
    return figures(counted(of, times), count, TimeWindow(1.0, 3.0), TAKEN)


def test_only_decisions_in_the_window_count() -> None:
    times = [(0.0, 0.1, 0.9), (0.8, 0.9, 1.5), (1.0, 1.1, 2.0), (2.9, 3.0, 3.1)]
    count = seen((0, 0.95), (1, 1.7), (2, 2.2), (3, 3.2))
    found = measured(job(), times, count)
    assert (found.transactions, found.acked_per_s, found.promoted_per_s) == (2, 1.0, 1.0)
    assert found.whole
    assert found.visible == 4
    assert found.latency_ms["prepare"].max == 100.0
    assert (found.latency_ms["decide"].p50, found.latency_ms["decide"].max) == (600.0, 900.0)
    assert found.latency_ms["visible"].max == 1100.0
    assert found.acked_per_s_by_tenth == [0.0, 0.0, 5.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0]
    assert "proxy 100 to 102   broker unknown to unknown" in "\n".join(text(found, job()))
    assert found.cpu_s_per_1000 == {"proxy": 250.0, "broker": None, "client": 125.0}


def test_messages_read_later_count_without_time() -> None:
    times = [(1.0, 1.1, 1.2)] * 4
    found = measured(job(), times, seen((0, 1.3), (1, 0.0), (2, 0.0), (3, 0.0)))
    assert (found.promoted_per_s, found.visible, found.lost) == (2.0, 4, 0)
    assert sum(number for _, number in found.histogram_ms["visible"]) == 1


@pytest.mark.parametrize(
    ("messages", "numbers", "lost", "duplicated"),
    [
        (1, [0, 1], 0, 0),
        (1, [0], 1, 0),
        (1, [], 2, 0),
        (1, [0, 1, 1, 1], 0, 2),
        (2, [0, 1, 2, 3], 0, 0),
        (2, [0, 2, 2], 2, 1),
    ],
)
def test_lost_and_duplicated_messages_are_counted(
    messages: int, numbers: list[int], lost: int, duplicated: int
) -> None:
    times = [(1.0, 1.1, 1.2)] * 2
    found = measured(job(messages=messages), times, seen(*((number, 1.3) for number in numbers)))
    assert (found.lost, found.duplicated, found.wrong) == (lost, duplicated, 0)
    assert found.whole is not bool(lost or duplicated)


def test_rolled_back_messages_must_be_invisible() -> None:
    rolled = measured(job(rollback_share=1.0), [(1.0, 1.1, 1.2)] * 2, seen((1, 1.3)))
    assert (rolled.wrong, rolled.lost, rolled.whole) == (1, 0, False)
    failed = [(1.0, 0.0, 0.0)] * 2
    assert measured(job(), failed, seen((1, 1.3))).whole
    assert not measured(job(), failed, seen((1, 1.3), (1, 1.4))).whole


def test_undecided_transactions_must_become_visible() -> None:
    undecided = [(1.0, 1.1, 0.0)]
    found = measured(job(unknown_share=1.0), undecided, seen())
    assert (found.lost, found.transactions) == (1, 0)
    assert found.latency_ms["decide"] == BenchLatency()
    assert "-" in "\n".join(text(found, job(unknown_share=1.0)))


def test_any_range_has_the_shares() -> None:
    of = job(rollback_share=0.25, unknown_share=0.1)
    for first in (0, 777, 100_000):
        fates = [of.fate(number) for number in range(first, first + 1000)]
        assert abs(fates.count(PlannedEnd.ROLLBACK) - 250) <= 3
        assert abs(fates.count(PlannedEnd.UNKNOWN) - 100) <= 3
    assert {job().fate(number) for number in range(1000)} == {PlannedEnd.COMMIT}


def test_only_own_keys_are_recognised() -> None:
    count = Count(TAG)
    of = job(messages=2)
    count.note([key.encode() for number in (0, 5000) for key in of.names(number)], 1.0)
    count.note([None, b"", b"key", b"x" * 20, b"ffffffff" + b"0" * 12], 2.0)
    assert [count.of(number) for number in (0, 1, 2, 10_000, 10_001, 99_999)] == [1, 1, 0, 1, 1, 0]
    assert (count.total, count.strangers) == (4, 5)


def test_first_copy_sets_the_visible_time() -> None:
    assert seen((3, 1.0), (3, 2.0)).seen_at[3] == 1.0


def test_thousand_copies_do_not_overflow() -> None:
    assert seen(*[(0, 1.0)] * 1000).of(0) == 255


def test_percentiles() -> None:
    times_s = [number / 1000 for number in range(1, 1002)]
    assert latency(times_s) == BenchLatency(501.0, 901.0, 991.0, 1000.0, 1001.0)
    assert latency([0.002]) == BenchLatency(2.0, 2.0, 2.0, 2.0, 2.0)


def test_histogram_has_every_time_once() -> None:
    times_s = [0.0, 0.0001, 0.00011, 0.003, 0.0031, 500.0]
    found = histogram(times_s)
    assert found == [(0.1, 2), (0.15, 1), (3.0, 1), (5.0, 1), (BOUNDS_MS[-1], 1)]


# --- CPU -------------------------------------------------------------------------------------


def test_listening_process_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = ListeningProcess("127.0.0.1", server.getsockname()[1])
    before = listener.cpu_s()
    assert before is not None
    spent = time.process_time() + 0.1
    while time.process_time() < spent:
        os.getpid()
    after = listener.cpu_s()
    assert after is not None
    assert 0.05 <= after - before <= 5
    memory_mib = listener.memory_mib()
    assert memory_mib is not None
    assert 10 < memory_mib < 10_000


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_process_on_another_machine_is_unknown(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = ListeningProcess(host, server.getsockname()[1])
    assert (listener.cpu_s(), listener.memory_mib()) == (None, None)


def test_port_without_listener_is_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert ListeningProcess("127.0.0.1", port).cpu_s() is None


WORKER = """
import socket, sys, time
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.readline()
    while time.process_time() < 0.5: pass
    print(flush=True)
    sys.stdin.readline()
"""


def test_workers_of_one_parent_count_together() -> None:
    def start() -> subprocess.Popen[str]:
        # Workers are known by their module, and their parent is this process.
        command = [sys.executable, "-c", WORKER, WORKER_MODULE]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    with start() as listening, start() as working:
        try:
            assert listening.stdout is not None
            assert working.stdout is not None
            port = int(listening.stdout.readline())
            working.stdout.readline()
            listener = ListeningProcess("127.0.0.1", port)
            before = listener.cpu_s()
            print(file=working.stdin, flush=True)
            working.stdout.readline()
            after = listener.cpu_s()
        finally:
            listening.kill()
            working.kill()
    assert before is not None
    assert after is not None
    assert after - before >= 0.3


# --- the bar ---------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_bar_needs_a_terminal(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with progress_bar(console) as shown:
        shown.step("warming up", 1.0)
        shown.step("measuring", None, 10, 100)
        shown.done(LoadEvent("progress", done=60))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("measuring" in drawn and "transactions/s" in drawn) is terminal
    assert bool(drawn) is terminal


OK = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n{"a": 1}'


@asynccontextmanager
async def server(answers: Callable[[int], list[bytes] | None]) -> AsyncIterator[BenchConnection]:
    """Give a connection to a server that answers its nth request in these pieces; None: it hangs
    up."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(2)  # the body: {}
                pieces = answers(asked)
                asked += 1
                if pieces is None:
                    return
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        connection = BenchConnection(f"http://127.0.0.1:{port}", None, None, None, None)
        try:
            yield connection
        finally:
            connection.close()


async def test_answer_in_pieces_is_parsed() -> None:
    async with server(lambda _: [OK[cut : cut + 1] for cut in range(len(OK))]) as connection:
        for _ in range(3):
            assert await connection.post("/v1/x", {}) == {"a": 1}


async def test_refusal_is_raised_as_error() -> None:
    body = b'{"error": {"code": "overloaded", "message": "too much"}}'
    refused = b"HTTP/1.1 429 Too Many\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with server(lambda number: [refused] if number == 0 else [OK]) as connection:
        with pytest.raises(TxbrokerError, match=r"too much \(overloaded\)"):
            await connection.post("/v1/x", {})
        assert await connection.post("/v1/x", {}) == {"a": 1}


@pytest.mark.parametrize(
    "broken",
    [None, [b"HTTP/1.1 200 OK\r\n\r\n"], [OK[:-8] + b"no json!"], [OK.replace(b"8", b"x")]],
    ids=["hung up", "no length", "no JSON", "length is no number"],
)
async def test_invalid_answer_fails_and_next_call_reconnects(broken: list[bytes] | None) -> None:
    async with server(lambda number: broken if number == 1 else [OK]) as connection:
        assert await connection.post("/v1/x", {}) == {"a": 1}
        with pytest.raises(TxbrokerError, match="no answer to an HTTP call"):
            await connection.post("/v1/x", {})
        assert await connection.post("/v1/x", {}) == {"a": 1}


async def test_missing_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_http, "ANSWER_TIMEOUT_S", 0.05)
    async with server(lambda number: [OK] if number else [OK[:20]]) as connection:
        with pytest.raises(TxbrokerError, match="TimeoutError"):
            await connection.post("/v1/x", {})
        monkeypatch.undo()
        assert await connection.post("/v1/x", {}) == {"a": 1}


async def test_missing_proxy_raises_error() -> None:
    async with server(lambda _: [OK]) as connection:
        pass
    with pytest.raises(TxbrokerError, match="no answer to an HTTP call"):
        await connection.post("/v1/x", {})
