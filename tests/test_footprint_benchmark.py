"""A complete transaction takes no more requests to Kafka than `benchmarks/footprint.py` bounds."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys

import pytest


@pytest.mark.long
@pytest.mark.timeout(600)
def test_requests_stay_within_their_bounds() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.footprint",
        "--commits",
        "--json",
        "--count",
        "20000",
    ]
    done = subprocess.run(
        [*command, "--count", "20000", "--in-flight", "64", "512"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    asked = json.loads(done.stdout)["requests"]
    print(json.dumps(asked, indent=1))
    for name in ("committed, 64 in flight", "committed, 512 in flight"):
        assert asked[name]["Produce"] > 0
        assert asked[name]["End"] > 0


@pytest.mark.parametrize(("added", "count"), [(-0.01, 0), (0.001, 1)])
@pytest.mark.parametrize("in_flight", [64, 512])
def test_exceeded_bounds_are_reported(in_flight: int, added: float, count: int) -> None:
    script = runpy.run_module("benchmarks.footprint")
    asked = {script["phase_of"](in_flight): {"Produce": script["BOUNDS"][in_flight], "End": added}}
    bounds = script["exceeded"](asked)
    assert len(bounds) == count
    assert all(line.startswith(f"committed, {in_flight} in flight: ") for line in bounds)
