"""A test without its program is skipped by name; in CI it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest


@pytest.mark.needs_tool("no-such-program")
def test_of_a_program_that_is_missing(): ...


@pytest.mark.needs_tool("sh")
def test_of_a_program_that_is_there(): ...


@pytest.mark.needs_root
def test_of_root(): ...
"""
MISSING = "no-such-program is missing: `make tools` installs it"


def run(folder: Path, ci: str, *, root: bool) -> tuple[int, str]:
    """Run tests beside our conftest.py; return pytest's exit code and output."""
    conftest = Path(__file__).with_name("conftest.py").read_text()
    user = f"import os\nos.geteuid = lambda: {0 if root else 1000}\n"
    (folder / "conftest.py").write_text(f"{conftest}\n\n{user}")
    (folder / "test_some.py").write_text(TESTS)
    around = {**os.environ, "CI": ci}
    around.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers"]
    done = subprocess.run(
        [*command, folder], cwd=folder, env=around, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def test_missing_programs_skip_tests_by_name(tmp_path: Path) -> None:
    code, output = run(tmp_path, "", root=False)
    assert (code, "1 passed, 2 skipped" in output) == (0, True), output
    left_out = output.partition(f"left out, as {MISSING}")[2]
    program, title, root = left_out.partition("left out, as the rights of root are missing")
    assert title, output
    assert "test_some.py::test_of_a_program_that_is_missing" in program
    assert "test_some.py::test_of_root" in root
    assert "test_of_a_program_that_is_there" not in output


def test_missing_programs_fail_in_ci(tmp_path: Path) -> None:
    code, output = run(tmp_path, "true", root=False)
    assert (code, "1 passed, 2 errors" in output) == (pytest.ExitCode.TESTS_FAILED, True), output
    assert MISSING in output
    assert "the rights of root are missing" in output


def test_root_may_do_what_root_may(tmp_path: Path) -> None:
    code, output = run(tmp_path, "", root=True)
    assert (code, "2 passed, 1 skipped" in output) == (0, True), output
