"""The lock files themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from txbroker.embedded import lock
from txbroker.embedded.errors import EmbeddedKafkaError, UnknownVersionError


@pytest.mark.parametrize("version", lock.versions())
def test_lock_file_has_kafka_and_logger(version: str) -> None:
    names = [jar.name for jar in lock.read_lock(version)]
    assert f"kafka_2.13-{version}.jar" in names
    assert [name for name in names if name.startswith("slf4j-simple-")]
    assert len(names) == len(set(names))


def test_promised_versions_exist() -> None:
    assert lock.versions() == ["3.9.1", "4.2.1", "4.3.1"]


def test_unknown_version_names_known_ones() -> None:
    with pytest.raises(UnknownVersionError, match=r"3\.9\.1, 4\.2\.1, 4\.3\.1"):
        lock.read_lock("1.0.0")


@pytest.mark.parametrize(
    "line", ["a/b.jar 12", f"../../b.jar 12 {'0' * 64}", f"a/b.jar x {'0' * 64}"]
)
def test_malformed_lock_line_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    monkeypatch.setattr(lock, "_FOLDER", tmp_path)
    (tmp_path / "kafka-9.9.9.lock").write_text(f"# head\n{line}\n")
    with pytest.raises(EmbeddedKafkaError, match="malformed"):
        lock.read_lock("9.9.9")


def test_lock_file_round_trips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lock, "_FOLDER", tmp_path)
    jars = [lock.Jar("org/x/a-b_2.13/1.0/a-b_2.13-1.0.jar", 3, "ab" * 32)]
    lock.write_lock("9.9.9", jars)
    assert lock.read_lock("9.9.9") == jars


def test_invalid_version_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert lock.main(["latest"]) == 2
    assert "usage" in capsys.readouterr().err
