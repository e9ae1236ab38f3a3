"""The measurement of processor time on a Kafka in memory measures something."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize("more", [[], ["--principals"], ["--http"]])
def test_each_round_reports_cpu_time(more: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.in_memory",
        "--count",
        "200",
        "--rounds",
        "2",
        "--in-flight",
        "20",
    ]
    command += more
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    rounds = [(int(a), int(b)) for a, b in re.findall(r"proxy (\d+), client (\d+)", done.stdout)]
    assert len(rounds) == 3
    least = rounds.pop()
    assert least == (min(proxy for proxy, _ in rounds), min(client for _, client in rounds))
    assert min(least) > 0
