"""What the tests of the command line share: calling it, and one `txbroker dev` that runs."""

from __future__ import annotations

import io
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli import terminals
from tests.cli.cli_stub import Stub, stub
from tests.cli.terminals import Run
from tests.kit.cli import Call, Dev, Result
from txbroker.cli.main import cli
from txbroker.cli.run import run
from txbroker.testing.broker import InMemoryBroker


@pytest.fixture
def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Call:
    """Call the command line in this process, without the user's contexts and settings."""
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


class Terminal(io.StringIO):
    """A terminal as stdin, whose user acts before answering."""

    def __init__(self, answer: str, meanwhile: Callable[[], object]) -> None:
        super().__init__(f"{answer}\n")
        self._meanwhile = meanwhile

    def isatty(self) -> bool:
        """Return True."""
        return True

    def readline(self, *_: object) -> str:
        """Answer."""
        self._meanwhile()
        return super().readline()


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Answer the next question, after calling `meanwhile`."""

    def answering(text: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        monkeypatch.setattr(sys, "stdin", Terminal(text, meanwhile))

    return answering


@pytest.fixture
def memory() -> Iterator[InMemoryBroker]:
    """A whole proxy on a Kafka in memory."""
    with InMemoryBroker(partitions=4, check_after_s=3600) as broker:
        yield broker


@pytest.fixture
def there(call: Call, memory: InMemoryBroker) -> Call:
    """Call the command line for that proxy."""
    return lambda *arguments: call(*arguments, "--url", memory.url)


@pytest.fixture(name="stub")
def _stub() -> Iterator[Stub]:
    """A web server with the test's answers."""
    with stub() as running:
        yield running


@pytest.fixture(scope="session")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    """One `txbroker dev` for all tests that need a proxy."""
    data = tmp_path_factory.mktemp("dev") / "data"
    running = Dev(data, "--check-after-s", "1", "--check-interval-s", "1")
    try:
        running.start()
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


@pytest.fixture
def ask(call: Call, dev: Dev) -> Call:
    """Call the command line for that proxy."""
    return lambda *arguments: call(*arguments, "--url", dev.url)


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[Run]:
    """Run commands on terminals, without the user's contexts."""
    with terminals.on_terminal(tmp_path) as run:
        yield run


@pytest.fixture
def closed_port() -> Iterator[socket.socket]:
    """A reserved port without a listener."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound
