"""What the tests of the command line share: calling it, and one `txbroker dev` that runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import Call, Dev, Result

from txbroker.cli.main import cli
from txbroker.cli.run import run


@pytest.fixture
def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Call:
    """Call the command line in this process, without contexts and settings of whoever tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in list(os.environ):
        if name.startswith("TXBROKER_"):
            monkeypatch.delenv(name)

    def calling(*arguments: object) -> Result:
        capsys.readouterr()
        code = run(cli, [str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Result(code, out, err)

    return calling


@pytest.fixture(scope="session")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    """One `txbroker dev` for all tests that need a proxy."""
    data = tmp_path_factory.mktemp("dev") / "data"
    running = Dev(data, "--check-after-s", "1", "--check-interval-s", "1")
    running.start()
    yield running
    running.process.kill()
    running.process.communicate()


@pytest.fixture
def ask(call: Call, dev: Dev) -> Call:
    """Call the command line for that proxy."""

    def asking(*arguments: object) -> Result:
        return call(*arguments, "--url", dev.url)

    return asking
