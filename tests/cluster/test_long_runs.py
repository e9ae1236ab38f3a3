"""The measurements of docs/measurements.md run, and add up, on a small scale."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

pytestmark = pytest.mark.long


async def output(name: str, *arguments: str) -> str:
    """Run a measurement, which must succeed; return its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"benchmarks.{name}",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-5000:] + printed.decode()
    return printed.decode()


@pytest.mark.timeout(600)
async def test_soak_history_is_consistent() -> None:
    printed = await output("soak", "--minutes", "1.5")
    assert "\nadds up\n" in printed
    assert "every proxy lists what the topics hold" in printed


@pytest.mark.timeout(600)
async def test_restart_times_are_measured() -> None:
    sizes = ["--pending", "3000", "--settled", "5000", "--pending-behind", "100"]
    printed = await output("recovery", *sizes, "--settle-s", "1", "--json")
    pending, settled = map(json.loads, printed.splitlines())
    assert (pending["pending"], pending["settled"]) == (3000, 0)
    assert (settled["pending"], settled["settled"]) == (100, 5000)
    for figures in (pending, settled):
        assert 0 < figures["recovery_s"] < figures["restart_s"] < 60


@pytest.mark.timeout(600)
async def test_checkback_rates_are_measured() -> None:
    printed = await output("checks", "--count", "2000", "--rate", "2000", "--json")
    found = [json.loads(line) for line in printed.splitlines()]
    assert [(each["way"], each["checks"]) for each in found] == [("sessions", 2000), ("http", 2000)]
    assert all(0 < each["seconds"] < 300 and each["proxy_cpu_s_per_1000"] > 0 for each in found)


@pytest.mark.timeout(600)
async def test_cost_of_many_sessions_is_measured() -> None:
    sizes = ["--producers", "50", "--groups", "5", "--rounds", "1"]
    printed = await output("crowd", *sizes, "--warmup-s", "1", "--duration-s", "2")
    alone, beside, ratio = printed.splitlines()
    assert alone.startswith("alone ")
    assert beside.startswith("beside ")
    assert ratio.startswith("50 producers of 5 groups beside: ")


@pytest.mark.timeout(600)
async def test_endurance_run_is_measured() -> None:
    printed = await output("endurance", "--transactions", "3000", "--warmup-s", "1", "--json")
    found = json.loads(printed)
    assert found["bench"]["transactions"] >= 3000
    assert found["looks"][-1]["done"] >= 3000
    assert min(found["looks"][-1]["disk_mib"], found["looks"][-1]["proxy_mib"]) > 0
