"""The simulator in the everyday suite: some hundred seeds, those that failed once, and replay."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SEEDS = 200
"""About 10 s on two cores that have nothing else to do."""
TIMEOUT_S = 400
QUICK_MUTANTS = ("own marker applied across a gap", "`returned` on a timeout")
REGRESSIONS = tomllib.loads((HERE / "seeds.toml").read_text())["seed"]


def simulate(
    *arguments: str, hash_seed: str = "0", timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run the simulator in a separate process: it must not affect other tests."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulator.simulate", *arguments],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.timeout(TIMEOUT_S)
def test_some_hundred_seeds_pass() -> None:
    done = simulate("--seeds", str(SEEDS), "--failures", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds, 0 failed" in done.stdout


@pytest.mark.timeout(TIMEOUT_S)
def test_recorded_seeds_pass() -> None:
    for each in REGRESSIONS:
        done = simulate("--seed", str(each["seed"]))
        assert done.returncode == 0, f"{each['found']}\n{done.stdout[-8000:]}{done.stderr}"


@pytest.mark.timeout(TIMEOUT_S)
def test_seed_replays_same_events() -> None:
    arguments = ("--digests", "--seeds", "25")
    first, second = (simulate(*arguments, hash_seed=hash_seed) for hash_seed in ("1", "2"))
    lines = first.stdout.splitlines()
    assert len(lines) == 25, first.stderr
    assert len({line.split()[2] for line in lines}) == 25
    assert first.stdout == second.stdout


@pytest.mark.timeout(TIMEOUT_S)
def test_replay_shows_all_events() -> None:
    output = simulate("--seed", "3").stdout
    for words in ("client: prepare lane-", "EndTxn is at broker", "info: owned", "== healed"):
        assert words in output


def test_failed_run_shows_seed_and_events() -> None:
    done = mutate("progress is left out of the turn", "--one", seeds=40)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "failed; its faults:" in done.stdout
    assert "make simulate SEED=" in done.stdout


def mutate(what: str, *arguments: str, seeds: int) -> subprocess.CompletedProcess[str]:
    """Try seeds with a rule taken out."""
    command = [
        sys.executable,
        "-m",
        "tests.simulator.mutate",
        "--seeds",
        str(seeds),
        *arguments,
        what,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("what", QUICK_MUTANTS)
def test_simulator_catches_some_mutants(what: str) -> None:
    done = mutate(what, seeds=160)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_simulator_catches_every_required_mutant() -> None:
    from tests.simulator.mutate import MUST_BE_CAUGHT

    for what in MUST_BE_CAUGHT:
        done = mutate(what, seeds=2000)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_seeds_pass() -> None:
    done = simulate("--first", "100000", "--seeds", "10000", "--failures", "1", timeout_s=3500)
    assert done.returncode == 0, done.stdout + done.stderr
