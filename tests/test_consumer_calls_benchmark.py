"""A message takes a consumer no more Python calls than `benchmarks/consumers/calls.py` bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CALLS = "benchmarks.consumers.calls"
ROOT = Path(__file__).parents[1]
MORE = ROOT / "txbroker" / "consumer" / "more.py"
"""Where the added calls seem to be: the benchmark counts by file."""
ONE_MORE = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
from txbroker.consumer.rounds import Rounds

code = "def added(call): return lambda *args: call(*args)"
exec(compile(code, {str(MORE)!r}, "exec"))
Rounds.changed = added(Rounds.changed)
runpy.run_module({CALLS!r}, run_name="__main__", alter_sys=True)
"""


def test_message_stays_within_the_bound() -> None:
    done = run("-m", CALLS, "--json")
    assert done.stderr == ""
    assert done.returncode == 0
    measured = json.loads(done.stdout)
    assert 0 < measured["calls"] <= measured["bound"]


def test_one_more_call_of_each_message_fails(tmp_path: Path) -> None:
    script = tmp_path / "one_more.py"
    script.write_text(ONE_MORE, encoding="utf-8")
    done = run(str(script))
    assert "txbroker/consumer/more.py" in done.stdout
    assert "are more than" in done.stderr
    assert done.returncode == 1


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark, or a script around it."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)
