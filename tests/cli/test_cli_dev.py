"""`txbroker dev`: its one line, its end, what outlives kill -9, and its garbage collections."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.kit.cli import Call, Dev, until_gone
from txbroker.cli.proxy.serving import rare_collections


@pytest.mark.needs_tool("curl")
def test_dev_accepts_transactions_from_curl(dev: Dev) -> None:
    body = '{"group": "curl", "messages": [{"topic": "curl", "key": "k", "value": "v"}]}'
    curl = ["curl", "--silent", "--fail", "-H", "content-type: application/json"]
    done = subprocess.run(
        [*curl, "-d", body, f"{dev.url}/v1/transactions"], capture_output=True, check=True
    )
    assert b'"state":"pending"' in done.stdout


def test_dev_keeps_data_over_a_restart(tmp_path: Path, call: Call) -> None:
    """Start, kill -9 everything, start again on the same data, end in order."""
    dev = Dev(tmp_path / "data")
    dev.start()
    sent = call("send", "life", "v", "--decision", "none", "--url", dev.url)
    first = [dev.process.pid, *dev.children()]
    assert len(first) == 3  # itself, and Java with its watcher
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    dev.process.communicate()
    until_gone(first)

    dev.start()
    second = dev.children()
    found = call("tx", "list", "-o", "json", "--url", dev.url)
    assert [row["id"] for row in found.json] == [sent.out.strip()]
    done = call("tx", "commit", sent.out.strip(), "--wait", "--yes", "--url", dev.url, "-o", "json")
    assert done.json[0]["state"] == "promoted"
    assert dev.end(signal.SIGTERM) == (0, "")
    until_gone(second)
    assert "Traceback" not in dev.stderr


def test_several_workers(tmp_path: Path, call: Call) -> None:
    dev = Dev(tmp_path / "data", "--workers", "2")
    dev.start()
    below = dev.children()
    assert len(below) == 4  # Java with its watcher, and both workers
    assert dev.process.stdout is not None
    line = dev.process.stdout.readline().decode()
    ready = re.fullmatch(rf"ready (http://127\.0\.0\.1:\d+) kafka {dev.kafka}\n", line)
    assert ready is not None
    assert ready[1] != dev.url
    for url in (dev.url, ready[1]):
        call("send", "shared", "v", "--url", url)
    assert dev.end(signal.SIGTERM) == (0, "")
    until_gone(below)
    assert "Traceback" not in dev.stderr


def test_ctrl_c_during_start_leaves_nothing(tmp_path: Path) -> None:
    dev = Dev(tmp_path / "data")
    dev.launch()
    below: list[int] = []
    while len(below) < 2:
        assert dev.process.poll() is None
        below = dev.children()
    assert dev.end(signal.SIGINT) == (0, "")
    until_gone(below)
    assert "Traceback" not in dev.stderr


def test_port_in_use_is_reported(tmp_path: Path, call: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = call("dev", "--data-dir", tmp_path, "--listen", listen)
    assert (done.code, done.out) == (1, "")
    assert f"Error: cannot listen on {listen}: address already in use" in done.err


def test_data_directory_in_use_is_reported(dev: Dev, call: Call) -> None:
    result = call("dev", "--data-dir", dev.data_dir, "--listen", "127.0.0.1:0")
    assert (result.code, result.out) == (1, "")
    assert "is in use by a Kafka of process" in result.err


def test_impossible_data_directory_is_reported(tmp_path: Path, call: Call) -> None:
    (tmp_path / "file").touch()
    result = call("dev", "--data-dir", tmp_path / "file")
    assert (result.code, result.out) == (1, "")
    assert "Give another --data-dir" in result.err


def test_end_of_kafka_ends_dev(tmp_path: Path) -> None:
    dev = Dev(tmp_path / "data")
    dev.start()
    below = dev.children()
    java = next(pid for pid in below if "java" in Path(f"/proc/{pid}/comm").read_text())
    os.kill(java, signal.SIGKILL)
    out, _ = dev.process.communicate(timeout=60)
    assert (dev.process.returncode, out) == (1, b"")
    assert "Error: the embedded Kafka has ended" in dev.stderr
    assert "Traceback" not in dev.stderr
    until_gone(below)


def test_collections_are_rare_only_while_proxy_runs() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.isenabled()
        assert gc.get_threshold()[0] >= 20 * before[0]
        assert gc.get_threshold()[1:] == before[1:]
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
