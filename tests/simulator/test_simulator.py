"""The simulator in the everyday suite: some hundred seeds, those that failed once, and replay."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOMS = ("proxies", "consumers", "relays")
SEEDS = {"proxies": 200, "consumers": 300, "relays": 300}
"""About 35 s on two cores that have nothing else to do."""
TIMEOUT_S = 400
QUICK_MUTANTS = (
    ("proxies", "own marker applied across a gap"),
    ("proxies", "`returned` on a timeout"),
    ("consumers", "the position is stored in another transaction"),
    ("relays", "a replaced relay is not fenced"),
)
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
@pytest.mark.parametrize("room", ROOMS)
def test_some_hundred_seeds_pass(room: str) -> None:
    done = simulate("--room", room, "--seeds", str(SEEDS[room]), "--failures", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS[room]} seeds, 0 failed" in done.stdout


@pytest.mark.timeout(TIMEOUT_S)
def test_recorded_seeds_pass() -> None:
    for each in REGRESSIONS:
        room = each.get("room", "proxies")
        done = simulate("--room", room, "--seed", str(each["seed"]))
        assert done.returncode == 0, f"{each['found']}\n{done.stdout[-8000:]}{done.stderr}"


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("room", ROOMS)
def test_seed_replays_same_events(room: str) -> None:
    arguments = ("--room", room, "--digests", "--seeds", "25")
    first, second = (simulate(*arguments, hash_seed=hash_seed) for hash_seed in ("1", "2"))
    lines = first.stdout.splitlines()
    assert len(lines) == 25, first.stderr
    assert len({line.split()[2] for line in lines}) == 25
    assert first.stdout == second.stdout


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    ("room", "own"),
    [
        ("proxies", ("client: prepare lane-", "info: owned", "EndTxn is at broker")),
        ("consumers", ("JoinGroup is at broker", ": begin call=0 topic=orders")),
        ("relays", ("business: 0, ", "init txbroker.relay.relays.0", "EndTxn is at broker")),
    ],
)
def test_replay_shows_all_events(room: str, own: tuple[str, ...]) -> None:
    output = simulate("--room", room, "--seed", "3").stdout
    for words in (*own, "== healed"):
        assert words in output


def test_failed_run_shows_seed_and_events() -> None:
    done = mutate("proxies", "progress is left out of the turn", "--one", seeds=40)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "failed; its faults:" in done.stdout
    assert "make simulate ROOM=proxies SEED=" in done.stdout


def mutate(room: str, what: str, *arguments: str, seeds: int) -> subprocess.CompletedProcess[str]:
    """Try seeds of a room with a rule taken out."""
    command = [
        sys.executable,
        "-m",
        "tests.simulator.mutate",
        "--room",
        room,
        "--seeds",
        str(seeds),
        *arguments,
        what,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(("room", "what"), QUICK_MUTANTS)
def test_simulator_catches_some_mutants(room: str, what: str) -> None:
    done = mutate(room, what, seeds=160)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_simulator_catches_every_required_mutant() -> None:
    from tests.simulator.mutate import MUST_BE_CAUGHT

    for room, whats in MUST_BE_CAUGHT.items():
        for what in whats:
            done = mutate(room, what, seeds=2000)
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("room", "seeds"), [("proxies", 10_000), *((r, 3000) for r in ROOMS[1:])])
def test_thousands_of_seeds_pass(room: str, seeds: int) -> None:
    arguments = ("--room", room, "--first", "100000", "--seeds", str(seeds), "--failures", "1")
    done = simulate(*arguments, timeout_s=3500)
    assert done.returncode == 0, done.stdout + done.stderr
