"""Every benchmark starts: its imports and its command line are right."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lint.package import ROOT


@pytest.mark.full
def test_benchmarks_start() -> None:
    faults = []
    for path in sorted((ROOT / "benchmarks").glob("[!_]*.py")):
        command = [sys.executable, "-m", f"benchmarks.{path.stem}", "--help"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if (ended.returncode, ended.stderr, ended.stdout[:7]) != (0, "", "usage: "):
            faults.append(f"{path.stem}: exit code {ended.returncode}: {ended.stderr[-500:]}")
    assert faults == []
