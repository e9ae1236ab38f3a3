"""A transaction takes no more Python calls than `benchmarks/calls.py` bounds; the bounds bite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)  # 22 s of the processor, on a machine that may be busy

CALLS = ("-m", "benchmarks.calls")
ROOT = Path(__file__).parents[1]
SHORT = ["--count", "500", "--rounds", "1", "--in-flight", "64", "--json"]
ADDED = 60
MORE_CALLS = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from benchmarks import in_memory
from txbroker.testing.memory import MemoryKafka

def added(): pass

def add(times):
    for _ in range(times):
        added()

message, append = in_memory.Message, MemoryKafka.append

def in_client(*args, **named):
    add({ADDED})
    return message(*args, **named)

def in_proxy(self, name, partition, records):
    add({ADDED} * len(records) if name.endswith(".half") else 0)
    return append(self, name, partition, records)

if sys.argv.pop(1) == "client":
    in_memory.Message = in_client
else:
    MemoryKafka.append = in_proxy
runpy.run_module("benchmarks.calls", run_name="__main__")
"""


def test_transaction_stays_within_its_bounds() -> None:
    done = run(*CALLS, "--json")
    assert done.stderr == ""
    assert done.returncode == 0
    measured = json.loads(done.stdout)
    assert set(measured["figures"]) == set(measured["bounds"])
    assert min(measured["figures"].values()) > 0


@pytest.mark.parametrize("side", ["client", "proxy"])
def test_added_calls_count_on_their_side_and_fail(side: str, tmp_path: Path) -> None:
    script = tmp_path / "more_calls.py"
    script.write_text(MORE_CALLS, encoding="utf-8")
    done = run(str(script), side, *SHORT)
    calls = json.loads(done.stdout)["calls"]["64"]
    assert [name for name in calls if script.name in calls[name]] == [side]
    # Each function that adds is itself called up to twice a transaction.
    assert ADDED <= calls[side][script.name] <= ADDED + 4
    assert done.returncode == 1
    assert f"{side} at 64 in flight: " in done.stderr


def test_tables_name_the_calls_of_each_file() -> None:
    done = run(*CALLS, *SHORT[:-1], "--by-module", "--modules")
    for title in (
        "calls of a transaction in the proxy, 64 in flight",
        "calls of a transaction in the client, 64 in flight",
        "calls of a transaction in the proxy over HTTP at 64 in flight",
        "calls in the proxy of a check-back",
        "calls of one prepare in modules of txbroker, in the proxy",
        "calls of one commit in modules of txbroker, in the proxy",
    ):
        rows = done.stdout.partition(f"{title}\n")[2].partition("\n\n")[0].splitlines()
        assert len(rows) > 10
        assert all(float(row.split()[0]) > 0 for row in rows)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark, or a script around it."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)
