"""The examples of the how-to page, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "test-without-kafka.md"


def test_the_examples_work(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for number, example in enumerate(examples):
        (tmp_path / f"test_example_{number}.py").write_text(example, encoding="utf-8")
    tests = "".join(examples).count("\ndef test_")
    assert tests > 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "txbroker.testing.plugin", str(tmp_path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert f"{tests} passed" in result.stdout, result.stdout + result.stderr
