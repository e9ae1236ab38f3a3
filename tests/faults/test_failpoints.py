"""Crashes at named moments on a real Kafka, and the door to them, which only tests can open."""

from __future__ import annotations

import ast
import re
import subprocess
import timeit
from pathlib import Path

import pytest

from tests.faults.crash_cases import ACTIONS, OUTCOMES, all_cases, chosen_cases, page
from tests.faults.crash_run import Result, run_cases
from txbroker import failpoints
from txbroker.embedded import EmbeddedKafka
from txbroker.failpoints import POINTS, failpoint

ROOT = Path(__file__).parents[2]
PAIRS = 3


def sources() -> list[Path]:
    names = ["txbroker/*.py", "checkers/*.py", "cli/*.py", "spark/*.py"]
    listed = subprocess.run(
        ["git", "ls-files", *names], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return [path for name in listed.stdout.split() if (path := ROOT / name).is_file()]


# --- the door --------------------------------------------------------------------------------


def test_failpoints_match_the_code() -> None:
    found: list[str] = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "failpoint":
                found += _names(node.args[0])
    assert sorted(set(found)) == sorted(POINTS)


def _names(name: ast.expr) -> list[str]:
    """The moments of a call: of several logs or writers, where the name is put together."""
    match name:
        case ast.Constant():
            return [str(name.value)]
        case ast.JoinedStr(values=[_, ast.Constant(value=str(step))]):
            return [point for point in POINTS if point.endswith(step)]
        case ast.Attribute(attr="_sending" | "_stored"):
            step = name.attr.replace("_", ".")
            logs = ("half", "op", "snapshots")
            return [log + step for log in logs if log + step in POINTS]
    raise AssertionError(f"the name of a moment is put together: {ast.unparse(name)}")


def test_package_never_sets_the_hook() -> None:
    assert failpoints.hook is None
    for path in sources():
        if path.name == "failpoints.py":
            continue
        text = path.read_text()
        assert not re.search(r"failpoints\.(hook|install)|import failpoints|\bhook =", text), path
    own = (ROOT / "txbroker/failpoints.py").read_text()
    tree = ast.parse(own)
    targets = [
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    assert targets.count("hook") == 1
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree))
    assert not re.search(r"environ|getenv|open\(|import os|sys", own)


def test_hook_receives_the_failpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[str] = []
    failpoint("turn.ended")
    monkeypatch.setattr(failpoints, "hook", reached.append)
    failpoint("turn.ended")
    assert reached == ["turn.ended"]


def test_failpoint_is_cheap_when_off() -> None:
    """Measured against one call of a function that does nothing at all."""

    def nothing(name: str) -> None:
        pass

    best = [
        min(timeit.repeat(lambda f=f: f("turn.ended"), number=100_000, repeat=5))  # type: ignore[misc]
        for f in (failpoint, nothing)
    ]
    assert best[0] < 3 * best[1]


def test_page_of_failpoints_is_current() -> None:
    assert (ROOT / "docs/reference/failpoints.md").read_text() == page()


# --- crashes ---------------------------------------------------------------------------------


def test_chosen_cases_cover_steps_actions_and_ends() -> None:
    chosen = chosen_cases()
    assert {case.action for case in chosen} == set(ACTIONS)
    assert {case.outcome for case in chosen} == set(OUTCOMES)
    assert {case.step for case in chosen} == {case.step for case in all_cases()}


def report(results: list[Result], cases: int) -> None:
    done = sum(len(result.took) for result in results)
    print(f"{done} of {cases} cases, {sum(r.transactions for r in results)} transactions")
    failed = [why for result in results for why in result.failed]
    assert not failed, "\n".join(failed[:10])
    assert done == cases


@pytest.mark.timeout(400)
async def test_chosen_crashes_break_no_invariant(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    cases = chosen_cases()
    report(await run_cases(kafka.bootstrap, cases, tmp_path, PAIRS), len(cases))
