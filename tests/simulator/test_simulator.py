"""The simulator in the everyday suite: some hundred seeds, those that failed once, and replay."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SEEDS = 240
"""About 20 s on two cores."""
TIMEOUT_S = 400
REGRESSIONS = tomllib.loads((HERE / "seeds.toml").read_text())["seed"]


def simulate(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Run the simulator in a process of its own, as nothing of it may touch other tests."""
    return subprocess.run(
        [sys.executable, str(HERE / "simulate.py"), *arguments],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.timeout(TIMEOUT_S)
def test_some_hundred_seeds_hold() -> None:
    done = simulate("--seeds", str(SEEDS), "--failures", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds, 0 failed" in done.stdout


@pytest.mark.timeout(TIMEOUT_S)
def test_seeds_that_failed_once_hold() -> None:
    for each in REGRESSIONS:
        done = simulate("--seed", str(each["seed"]))
        assert done.returncode == 0, f"{each['found']}\n{done.stdout[-8000:]}{done.stderr}"


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("seed", [3, 8, 23])
def test_a_seed_replays_to_the_same_events(seed: int) -> None:
    logs = [simulate("--seed", str(seed), hash_seed=hash_seed) for hash_seed in ("1", "2", "1")]
    assert len(logs[0].stdout.splitlines()) > 100, logs[0].stderr
    assert "== healed" in logs[0].stdout
    assert logs[0].stdout == logs[1].stdout == logs[2].stdout
    assert logs[0].stdout != simulate("--seed", str(seed + 1)).stdout
