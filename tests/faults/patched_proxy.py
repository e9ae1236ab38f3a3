"""Proxies with what no setting can do.

`patched_proxy.py older VERSION proxy` is limited to an older version of Kafka's transaction
protocol.
`patched_proxy.py failing ARMED proxy` does what a test has armed, once, at a named moment.

ARMED is a file that a test writes when it wants to: steps as JSON, each of `point`, `skip` (the
number of times it is passed first) and `action`. A process that reaches the first step removes it
from the file, writes a line to ARMED.fired, and does it:

- kill: this process ends as by kill -9;
- pause: it stops until it is woken;
- timeout: the answer that has just come is lost, or the request that is about to go; where there is
  none, everything is late.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from msgspec import structs

from txbroker import failpoints
from txbroker.cli.main import main
from txbroker.config import settings as config
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Unanswered
from txbroker.kafka.client.producer import BatchUnknown
from txbroker.kafka.client.settings import KafkaSettings

Step: TypeAlias = dict[str, Any]
"""Take the next step if this is its point."""

LATE_S = 1.5
"""Longer than a client of these tests waits for an answer."""
SESSION_MIN_S = 1.0
"""Allowed by the settings of the tests' Kafka, so that a takeover is quick."""


class Armed:
    """The hook.

    Args:
        file: the armed steps.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fired = file.with_suffix(".fired")
        self._lock = file.with_suffix(".lock")
        self._passed: dict[str, int] = {}

    def __call__(self, name: str) -> None:
        if not any(step["point"] == name for step in self._steps()[:1]):
            return
        # Two proxies may be here at once, and only one of them may take the step.
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            step = self._take(name)
        if step is not None:
            _act(step)

    def _steps(self) -> list[Step]:
        try:
            return list(json.loads(self._file.read_text()))
        except (FileNotFoundError, ValueError):
            return []

    def _take(self, name: str) -> Step | None:
        """Take the first step out of the file, if this is its moment."""
        steps = self._steps()
        if not steps or steps[0]["point"] != name:
            return None
        step, *others = steps
        passed = self._passed.get(step["token"], 0)
        self._passed[step["token"]] = passed + 1
        if passed < int(step["skip"]):
            return None
        if others:
            rest = self._file.with_suffix(".rest")
            rest.write_text(json.dumps(others))
            rest.rename(self._file)
        else:
            self._file.unlink(missing_ok=True)
        line = {"point": name, "action": step["action"], "pid": os.getpid(), "at": time.time()}
        with self._fired.open("a") as fired:
            fired.write(json.dumps(line) + "\n")
        return step


def _act(step: Step) -> None:
    if step["action"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif step["action"] == "pause":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        _lose(failpoints.POINTS[step["point"]].answer)


def _lose(answer: str) -> None:
    """Raise what Kafka's client raises when its patience is over.

    Raises:
        BatchUnknown, Unanswered, KafkaUnavailable: by whose answer is lost.
    """
    if answer in ("append", "produce"):
        raise BatchUnknown(("lost", 0), "the answer was lost")
    if answer == "coordinator":
        raise Unanswered("the answer was lost")
    if answer == "read":
        raise KafkaUnavailable("the answer was lost")
    time.sleep(LATE_S)


def import_all() -> None:
    """Import what a proxy needs, which is most of the work of starting one."""
    import uvloop  # noqa: F401

    import txbroker.cli.proxy.command  # noqa: F401


def run(arguments: list[str]) -> NoReturn:
    """Be a failing proxy: ARMED, then the command line of txbroker."""
    failpoints.hook = Armed(Path(arguments[0]))
    config.SESSION_MIN_S = SESSION_MIN_S
    _be_txbroker(arguments[1:])


def _run_older(version: int, arguments: list[str]) -> NoReturn:
    from_configuration = KafkaSettings.from_configuration

    def older(settings: config.Settings) -> KafkaSettings:
        return structs.replace(from_configuration(settings), transactions=version)

    KafkaSettings.from_configuration = older  # type: ignore[method-assign, assignment]
    _be_txbroker(arguments)


def _be_txbroker(arguments: list[str]) -> NoReturn:
    sys.argv = ["txbroker", *arguments]
    main()
    raise AssertionError("the command line always ends the process")


if __name__ == "__main__":
    kind, patch, *given = sys.argv[1:]
    if kind == "older":
        _run_older(int(patch), given)
    run([patch, *given])
