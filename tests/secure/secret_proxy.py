"""A `txbroker proxy` in a separate process, and all of its output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.kit.cli import TXBROKER, Result

TIMEOUT_S = 60.0


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return settings as options of the command line."""
    given = ((f"--{name.replace('_', '-')}", str(value)) for name, value in options.items())
    return [word for pair in given for word in pair]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return our variables without txbroker's own, and with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TXBROKER_")}
    return {**kept, **more}


def call(
    words: Sequence[object], more: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> Result:
    """Run a command of txbroker's to its end."""
    done = subprocess.run(
        [TXBROKER, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment(more or {}),
    )
    return Result(done.returncode, done.stdout, done.stderr)


class RunningProxy(NamedTuple):
    """A proxy that takes calls."""

    url: str
    pid: int
    log: Path


@contextlib.contextmanager
def running_proxy(
    folder: Path, options: Mapping[str, Any], more: Mapping[str, str] | None = None
) -> Iterator[RunningProxy]:
    """Run a proxy until the block is left, and see it end well."""
    given = {"listen": "127.0.0.1:0", "data_dir": folder / "data", "log_level": "debug", **options}
    log = folder / "proxy.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [TXBROKER, "proxy", *words_of(given)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(more or {}),
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline().decode()
        assert line.startswith("ready http://"), log.read_text()
        yield RunningProxy(line.split()[1], process.pid, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        process.stdout.close()


def wait_until(condition: Any, what: object = "") -> Any:
    """Ask again and again until the answer is true; return it."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found
