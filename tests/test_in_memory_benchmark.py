"""The measurement of processor time on a Kafka in memory measures something."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks/in_memory.py"


@pytest.mark.parametrize("more", [[], ["--principals"], ["--http"]])
def test_each_round_tells_what_a_transaction_takes_of_the_processor(more: list[str]) -> None:
    command = [sys.executable, str(SCRIPT), "--count", "200", "--rounds", "2", "--in-flight", "20"]
    command += more
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    told = [(int(a), int(b)) for a, b in re.findall(r"proxy (\d+), client (\d+)", done.stdout)]
    assert len(told) == 3
    least = told.pop()
    assert least == (min(proxy for proxy, _ in told), min(client for _, client in told))
    assert min(least) > 0
