"""Processes under faults: how they start and end, and which ends are faults."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from aiokafka.errors import KafkaError
from confluent_kafka import KafkaException

from tests.faults.consuming.instance import NO_KAFKA
from tests.faults.consuming.tables import ERRORS
from tests.kit.proxies import die_with_parent

END_S = 30.0
ANSWER_S = 90.0
RUBBISH = ("Traceback", "Task was destroyed", "never retrieved", "never awaited")
_PLANNED = re.compile(
    r"(?:message failed|batch divided) +error=['\"](\S*\.(?:Planned|Reject|SessionChanged)): .*\n"
    r"(?:(?!\d{4}-).*\n)*?\1: .*"
)
"""What a consumer logs of an error that a handler is to raise, with its traceback."""


class Instance:
    """A process.

    Attributes:
        slot: with static members of a group, the number of its instance id.
    """

    def __init__(self, name: str, slot: int, process: asyncio.subprocess.Process, log: Path):
        self.name = name
        self.slot = slot
        self.process = process
        self.log = log

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    @property
    def stopped(self) -> bool:
        """Whether SIGSTOP has stopped it."""
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"
        return False

    def signal(self, what: signal.Signals) -> None:
        """Send a signal to it; nothing happens if it has ended."""
        # `Process.send_signal` looks whether it has ended, and then asyncio loses the exit code.
        with contextlib.suppress(ProcessLookupError):
            if self.running:
                os.kill(self.process.pid, what)


class Processes:
    """Processes of one module.

    Args:
        folder: for their logs.

    Attributes:
        module: its argument is what an instance is given, as JSON.
        expected: texts in the log of an instance that may end as it did.
        wrong: what should not have happened.
    """

    module: ClassVar[str]
    expected: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: Path) -> None:
        self.instances: list[Instance] = []
        self.wrong: list[str] = []
        self._folder = folder
        self._numbers = itertools.count(1)

    async def spawn(self, name: str, given: msgspec.Struct, slot: int = 0) -> Instance:
        """Start an instance."""
        log = self._folder / f"{name}.log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self.module, msgspec.json.encode(given).decode()),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=_before if sys.platform == "linux" else None,
            )
        instance = Instance(name, slot, process, log)
        self.instances.append(instance)
        return instance

    async def kill(self, instance: Instance) -> None:
        """End an instance as by kill -9."""
        instance.signal(signal.SIGKILL)
        await self.buried(instance)

    async def stop(self, instance: Instance) -> None:
        """End an instance in order."""
        instance.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(instance.process.wait(), END_S)
        except TimeoutError:
            self.wrong.append(f"{instance.name} does not end")
            await self.kill(instance)
            return
        await self.buried(instance)

    async def buried(self, instance: Instance) -> None:
        """Take out an instance that has ended."""
        code = await instance.process.wait()
        self.instances.remove(instance)
        if code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGUSR1, NO_KAFKA):
            return  # by a fault, before it had begun, or when it was over
        text = _PLANNED.sub("", instance.log.read_text(errors="replace"))
        if any(word in text for word in self.expected):
            return
        if code != 0 or any(word in text for word in RUBBISH):
            self.wrong.append(f"{instance.name} ended with {code}: {text[-1500:]}")

    async def answered(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a blocking call gets from Kafka or a database, which may break meanwhile."""
        return await self.awaited(partial(asyncio.to_thread, ask, *arguments))

    async def awaited(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """`answered` for a coroutine function."""
        until_s = time.monotonic() + ANSWER_S
        while True:
            try:
                return await ask()
            except (KafkaException, KafkaError, AssertionError, *ERRORS):
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(0.5)


def _before() -> None:
    for each in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(each, signal.SIG_IGN)  # until it has begun
    die_with_parent()
