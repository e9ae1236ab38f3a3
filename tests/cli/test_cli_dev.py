"""`txbroker dev`: its one line, its end, what outlives kill -9, and its garbage collections."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.terminals import Run
from tests.kit.cli import Call, Dev, descendants, until_gone
from tests.kit.secret_files import secret_file
from tests.kit.until import free_ports
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

    kafka = dev.kafka
    dev.start()
    assert dev.kafka == kafka
    second = dev.children()
    found = call("tx", "list", "-o", "json", "--url", dev.url)
    assert [row["id"] for row in found.json] == [sent.out.strip()]
    done = call("tx", "commit", sent.out.strip(), "--wait", "--yes", "--url", dev.url, "-o", "json")
    assert done.json[0]["state"] == "promoted"
    assert dev.end(signal.SIGTERM) == (0, "")
    until_gone(second)
    assert "Traceback" not in dev.stderr


def test_doctor_finds_kafka_through_the_proxy(dev: Dev, ask: Call) -> None:
    (kafka,) = [
        check
        for check in ask("doctor", "-o", "json").json["checks"]
        if check["name"] == "kafka-reachable"
    ]
    assert (kafka["level"], dev.kafka in kafka["found"]) == ("ok", True)


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


def test_terminal_gets_next_steps_and_sample_runs(
    tmp_path: Path, call: Call, on_terminal: Run
) -> None:
    (port,) = free_ports(1)
    data = str(tmp_path / "data")
    options = ("--check-after-s", "1", "--kafka-port", str(port), "--listen", "127.0.0.1:0")
    shown = on_terminal("dev", "--data-dir", data, "--sample", *options)
    shown.until(f"data stays in {data}", 90)
    started = re.search(rf"ready (\S+) kafka 127\.0\.0\.1:{port}\b", shown.text)
    assert started is not None
    url = started[1]
    assert f"Console    {url}/" in shown.text
    for command in ("tx list --state all", "consume shop.orders --from-beginning", "top"):
        assert f"txbroker {command} --url {url}" in shown.text

    def orders() -> set[tuple[str, str]]:
        rows = call("tx", "list", "--state", "settled", "-o", "json", "--url", url).json
        return {(row["state"], row.get("source")) for row in rows if row["group"] == "shop"}

    wanted = {("promoted", "producer"), ("rolled_back", "producer"), ("promoted", "check")}
    deadline = time.monotonic() + 60
    while not wanted <= orders():
        assert time.monotonic() < deadline, shown.text
        shown.wait()
    seen = call("consume", "shop.orders", "--from-beginning", "-n", "1", "--url", url)
    assert "shop.orders/0@0" in seen.out
    below = descendants(shown.pid)
    shown.type("\x03")
    assert shown.end() == 0
    until_gone(below)


@pytest.mark.parametrize("option", ["--listen", "--kafka-port"])
def test_port_in_use_is_reported(tmp_path: Path, call: Call, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = {"--listen": "127.0.0.1:0", option: f"127.0.0.1:{port}"}
        if option == "--kafka-port":
            given[option] = str(port)
        words = [word for pair in given.items() for word in pair]
        done = call("dev", "--data-dir", tmp_path, *words)
    assert (done.code, done.out) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}: address already in use" in done.err
    assert f"Choose another {'address with ' * (option == '--listen')}{option}" in done.err


def test_sample_needs_no_credentials(tmp_path: Path, call: Call) -> None:
    token = secret_file(tmp_path / "token", "0123456789abcdef")
    refused = call("dev", "--data-dir", tmp_path, "--sample", "--token-file", token)
    assert (refused.code, refused.out) == (2, "")
    assert "--sample calls the proxy without credentials: unset token_file" in refused.err


def test_data_directory_in_use_is_reported(dev: Dev, call: Call) -> None:
    result = call("dev", "--data-dir", dev.data_dir, "--listen", "127.0.0.1:0")
    assert (result.code, result.out) == (1, "")
    assert "is in use by a Kafka of process" in result.err


def test_impossible_data_directory_is_reported(tmp_path: Path, call: Call) -> None:
    (tmp_path / "file").touch()
    result = call("dev", "--data-dir", tmp_path / "file", "--listen", "127.0.0.1:0")
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
