"""A fresh build holds exactly the package, and its command runs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from txbroker import __version__

ROOT = Path(__file__).parents[2]
FOLDERS = {"checkers": "txbroker/checkers", "cli": "txbroker/cli", "spark": "txbroker/spark"}
DATA = (".lock", "py.typed", ".html", ".css", ".js", ".svg")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from what git knows."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if name and (path.is_symlink() or path.is_file()):
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                copy.symlink_to(path.readlink())
            else:
                copy.write_bytes(path.read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", target, source], check=True, capture_output=True)
    (found,) = target.glob("*.whl")
    return found


def test_wheel_has_every_module_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    code = sorted(name for name in names if ".dist-info/" not in name)
    wanted = set()
    for path in [
        *ROOT.glob("txbroker/**/*"),
        *(p for f in FOLDERS for p in ROOT.glob(f"{f}/**/*")),
    ]:
        inside = path.relative_to(ROOT)
        top = FOLDERS.get(inside.parts[0], inside.parts[0])
        linked = len(inside.parts) > 1 and (ROOT / inside.parts[0] / inside.parts[1]).is_symlink()
        if path.name.endswith((".py", *DATA)) and not linked:
            wanted.add("/".join((top, *inside.parts[1:])))
    assert code == sorted(wanted)


def test_the_installed_command_runs(wheel: Path, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path]
    subprocess.run([*install, wheel], check=True, capture_output=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import txbroker.cli.main as m;"
        "print(m.__file__); m.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, "--version"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        str(tmp_path / "txbroker/cli/main.py"),
        f"txbroker, version {__version__}",
    ]
