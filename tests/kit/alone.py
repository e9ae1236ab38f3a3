"""Python with the packages of one install line, and no others."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); "


@cache
def _closure(requirement: str) -> frozenset[str]:
    """Return the names of the distributions that pip installs for a requirement."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(requirement)]
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        place = name, frozenset(wanted.extras)
        if place in found:
            continue
        found.add(place)
        for text in distribution(name).requires or ():
            needed = Requirement(text)
            extras = wanted.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(needed)
    return frozenset(name for name, _ in found)


def _link(source: Path, target: Path) -> None:
    """Link a file or folder; folders that several distributions share are merged."""
    if not target.exists() and not target.is_symlink():
        target.symlink_to(source)
        return
    if target.is_symlink():
        if target.resolve() == source.resolve():
            return
        shared = target.resolve()
        target.unlink()
        target.mkdir()
        for each in shared.iterdir():
            _link(each, target / each.name)
    for each in source.iterdir():
        _link(each, target / each.name)


def _tops(found: Distribution) -> set[Path]:
    """Return the files and folders of a distribution in `site-packages`."""
    site = Path(str(found.locate_file("")))
    return {
        site / file.parts[0]
        for file in found.files or ()
        if file.parts[0] not in ("..", "__pycache__")
    }


def site_of(requirement: str, folder: Path) -> Path:
    """Make a folder with the packages that `pip install` brings for a requirement.

    Args:
        requirement: such as `txbroker[cli,relay]`; its packages are installed beside the tests.
    """
    folder.mkdir(parents=True)
    for name in _closure(requirement) - {"txbroker"}:
        for top in _tops(distribution(name)):
            _link(top, folder / top.name)
    _link(ROOT / "txbroker", folder / "txbroker")
    for top in _tops(distribution("txbroker")):
        if top.name.endswith(".dist-info"):
            _link(top, folder / top.name)
    return folder


def run_alone(
    site: Path, code: str, *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python code with the packages of a folder and the standard library alone."""
    command = [sys.executable, "-I", "-S", "-c", _START + code, str(site), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=cwd, env=environment
    )
