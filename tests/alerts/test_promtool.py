"""Prometheus' own tool reads the rules, tries them, and reads every query of the dashboard."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

FILES = Path(__file__).parents[2] / "charts/txbroker/files"

pytestmark = pytest.mark.needs_tool("prometheus")


def promtool(*words: str, folder: Path = FILES) -> tuple[int, str]:
    """Return exit code and output; promtool comes with prometheus."""
    done = subprocess.run(
        ["promtool", *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_rules_are_valid() -> None:
    code, said = promtool("check", "rules", "--lint-fatal", "alerts.yaml")
    assert (code, "SUCCESS: 14 rules found" in said) == (0, True), said


def test_the_rules_fire_as_they_should() -> None:
    code, said = promtool("test", "rules", "alerts_test.yaml")
    assert (code, "SUCCESS" in said) == (0, True), said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("> 900", "> 9000"),
        ("> 2 * 86400", "> 3 * 86400"),
        ("0.4 *", "0.2 *"),
        ("unless\n", "and\n"),
    ],
)
def test_the_unit_tests_notice_a_rule_that_was_changed(tmp_path: Path, old: str, new: str) -> None:
    rules = (FILES / "alerts.yaml").read_text()
    assert old in rules
    (tmp_path / "alerts.yaml").write_text(rules.replace(old, new))
    (tmp_path / "alerts_test.yaml").write_text((FILES / "alerts_test.yaml").read_text())
    code, said = promtool("test", "rules", "alerts_test.yaml", folder=tmp_path)
    assert (code, "FAILED" in said) == (1, True), said
