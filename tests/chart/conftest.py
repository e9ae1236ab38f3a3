"""The chart, rendered by helm as a cluster would get it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.chart_pods import Helm, Object, Render
from tests.chart.chart_values import NEEDED

CHART = Path(__file__).parents[2] / "charts/txbroker"
KUBERNETES = "1.31.0"
"""Kubernetes version passed to helm, because a helm built from source assumes a very old one."""


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Call helm; return its exit code and its output."""
    home = tmp_path_factory.mktemp("helm")
    numbers = iter(range(1_000_000))

    def call(*words: str, values: Mapping[str, Any] | None = None) -> tuple[int, str]:
        more = []
        if values is not None:
            path = home / f"values-{next(numbers)}.yaml"
            path.write_text(yaml.safe_dump(dict(values)))
            more = ["--values", str(path)]
        done = subprocess.run(
            ["helm", *words, *more],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PATH": os.environ["PATH"], "HOME": str(home)},
        )
        return done.returncode, done.stdout + done.stderr

    return call


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """Return the chart's objects with these values, rendered once for each."""
    known: dict[str, list[Object]] = {}

    def rendered(values: Mapping[str, Any] | None = None) -> list[Object]:
        values = {**NEEDED, **(values or {})}
        key = yaml.safe_dump(values)
        if key not in known:
            words = ("template", "shop", str(CHART), "--namespace", "pay")
            code, output = helm(*words, "--kube-version", KUBERNETES, values=values)
            assert code == 0, output
            known[key] = [found for found in yaml.safe_load_all(output) if found]
        return known[key]

    return rendered
