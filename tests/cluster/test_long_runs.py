"""The measurements of docs/measurements.md run, and add up, on a small scale."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


async def output(name: str, *arguments: str) -> str:
    """Run a measurement; return what it prints. It must succeed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(BENCHMARKS / name),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        printed, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said.decode()[-5000:] + printed.decode()
    return printed.decode()


@pytest.mark.timeout(600)
async def test_the_soak_adds_up() -> None:
    printed = await output("soak.py", "--minutes", "1.5")
    assert "\nadds up\n" in printed
    assert "every proxy lists what the topics hold" in printed


@pytest.mark.timeout(600)
async def test_restarts_are_measured() -> None:
    sizes = ["--pending", "3000", "--settled", "5000", "--pending-behind", "100"]
    printed = await output("recovery.py", *sizes, "--settle-s", "1", "--json")
    pending, settled = map(json.loads, printed.splitlines())
    assert (pending["pending"], pending["settled"]) == (3000, 0)
    assert (settled["pending"], settled["settled"]) == (100, 5000)
    for figures in (pending, settled):
        assert 0 < figures["recovery_s"] < figures["restart_s"] < 60
