"""Prometheus' own tool reads the rules, tries them, and reads every query of the dashboard."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.alerts.test_dashboard import GRAFANAS, QUERIES

FILES = Path(__file__).parents[2] / "charts/txbroker/files"

pytestmark = pytest.mark.needs_tool("prometheus")


def promtool(*words: str, folder: Path = FILES) -> tuple[int, str]:
    """Return exit code and output; promtool comes with prometheus."""
    done = subprocess.run(
        ["promtool", *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        pytest.param(
            ("check", "rules", "--lint-fatal", "alerts.yaml"),
            "SUCCESS: 25 rules found",
            id="rules are valid",
        ),
        pytest.param(("test", "rules", "alerts_test.yaml"), "SUCCESS", id="unit tests pass"),
    ],
)
def test_promtool_accepts_the_alerts(words: tuple[str, ...], found: str) -> None:
    code, output = promtool(*words)
    assert (code, found in output) == (0, True), output


CHANGES = {
    "_age_seconds) > 900": "_age_seconds) > 9000",
    "[15m:1m]) > 0.5": "[15m:1m]) < 0",
    "sum by (cluster, namespace, job, group) (txbroker_parked) > 0": "txbroker_parked > 1e9",
    "txbroker_lost_undecided_total offset 1h": "txbroker_lost_undecided_total offset 1ms",
    "> 0.5\n          and\n": "> 0.9\n          and\n",
    '{outcome=~"unreachable|returned"}[5m]': '{outcome="returned"}[5m]',
    ") > 1\n        for: 10m": ") > 2\n        for: 10m",
    "_age_seconds) > 60": "_age_seconds) > 600",
    "(txbroker_refused) > 0": "(txbroker_refused) > 5",
    "txbroker_ready == 0\n        for: 5m": "txbroker_ready == 0\n        for: 30m",
    "(txbroker_files_not_read) > 0": "(txbroker_files_not_read) > 1",
    "< 0.4 *": "< 0.2 *",
    "(txbroker_audit_drift) > 0": "(txbroker_audit_drift) > 3",
    '{severity="critical"}) > 0': '{severity="critical"}) > 1',
    "> 172800": "> 259200",
    "> 300\n": "> 3000\n",
    "unfinished_seconds) > 900": "unfinished_seconds) > 9000",
    "(txbroker_consumer_aside_keys) > 0": "(txbroker_consumer_aside_keys) > 3",
    ") > 60\n        for: 2m": ") > 600\n        for: 2m",
    '{state="MESSAGE_ERROR"}) > 0': '{state="MESSAGE_ERROR"}) > 3',
    "> 1073741824": "> 10737418240",
}
"""A change to each alert that makes it miss its trouble."""


def test_rule_unit_tests_fail_for_changed_rules(tmp_path: Path) -> None:
    rules = (FILES / "alerts.yaml").read_text()
    names = set(re.findall(r"- alert: (\w+)", rules))
    assert len(names) == len(CHANGES)
    for old, new in CHANGES.items():
        assert rules.count(old) == 1, old
        rules = rules.replace(old, new)
    (tmp_path / "alerts.yaml").write_text(rules)
    (tmp_path / "alerts_test.yaml").write_text((FILES / "alerts_test.yaml").read_text())
    code, output = promtool("test", "rules", "alerts_test.yaml", folder=tmp_path)
    assert code == 1, output
    assert set(re.findall(r"alertname: (\w+),", output)) == names, output


def test_prometheus_parses_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = []
    for number, (_, expression) in enumerate(QUERIES):
        for name, value in GRAFANAS.items():
            expression = expression.replace(f"${name}", value)
        expression = re.sub(r"\$\w+", ".*", expression)
        rules.append({"record": f"query:{number}", "expr": expression})
    (tmp_path / "queries.yaml").write_text(json.dumps({"groups": [{"name": "q", "rules": rules}]}))
    code, output = promtool("check", "rules", "queries.yaml", folder=tmp_path)
    assert (code, f"{len(rules)} rules found" in output) == (0, True), output
