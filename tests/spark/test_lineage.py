"""What Spark's listener of OpenLineage writes of an audit, set up as the page shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.audit_process import environment
from txbroker.spark.schema import TABLES

PAGE = Path(__file__).parents[2] / "docs/how-to/connect-data-tools.md"
LISTENER = re.compile(r"--conf (spark\.\S*(?:openlineage|extraListeners)\S*)")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_openlineage_names_the_facts_of_a_run(tmp_path: Path) -> None:
    """In another Spark, which loads its package."""
    events = tmp_path / "lineage.jsonl"
    given = [word.replace(events.name, str(events)) for word in LISTENER.findall(PAGE.read_text())]
    assert len(given) == 5
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.lineage_main", str(tmp_path), *given],
        capture_output=True, text=True, timeout=600, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = f"run={done.stdout.strip()}"
    written = [json.loads(line) for line in events.read_text().splitlines()]
    outputs = {each["name"] for event in written for each in event.get("outputs", ())}
    assert outputs >= {f"{tmp_path}/out/facts/{run}/{name}" for name in TABLES}
    assert {event["job"]["namespace"] for event in written} == {"txbroker"}
    # A job that takes long is RUNNING in between.
    assert {event["eventType"] for event in written} - {"RUNNING"} == {"START", "COMPLETE"}
