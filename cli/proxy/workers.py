"""Several proxies on one machine as one command: `txbroker proxy --workers N`.

Each is a process of its own and a member of the proxies' group like any other, so the parent
only starts them, starts again whichever ends by itself or hangs, and ends them. It talks to them by
pipes: their stdin carries the settings and then the wish to stop, and its end tells that the parent
has died, however that happened; their stdout says when they are ready, and that they do not hang
(`txbroker.cli.proxy.lifeline`).
"""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NoReturn

import click
from pydantic import SecretStr

from txbroker.cli.proxy.lifeline import BEAT_S, END_TIMEOUT_S, STACKS_SIGNAL, WORKER_MODULE
from txbroker.cli.proxy.serving import why_not_free
from txbroker.cli.run import CommandFailed
from txbroker.config.addresses import parse_address
from txbroker.config.settings import Settings
from txbroker.proxy.observe.logging import get_logger

COMMAND = (sys.executable, "-m", WORKER_MODULE)
PAUSE_S, PAUSE_MAX_S = 0.5, 30.0
"""How long a worker that has ended stays away, at first and at most; twice as long each time."""
WELL_S = 60.0
"""A worker that ran for so long begins again with the shortest pause."""
BEATS_MISSED_MAX = 30
"""A worker that hangs for so many beats is killed. Beats are counted and no time is taken, so that
nobody is killed when the parent goes on that was stopped itself, by Ctrl-Z, say."""
FIRST_BEAT_MAX = 120
"""The same before the first beat, as many that start at once share the cores. The chart's startup
probe gives the first worker as long; its liveness probe leaves time to replace it."""
STACKS_S = 1.0
"""For a worker that hangs to write where, before it is killed."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""One that was sent to all may end a worker that has only begun."""

log = get_logger(__name__)


async def run_workers(settings: Settings) -> None:
    """Run `settings.workers` proxies until this is cancelled.

    Raises:
        CommandFailed: an address is taken, a worker cannot start, or one did not end in order.
    """
    _require_free(settings)
    first_lines: dict[int, str] = {}

    def ready(number: int, line: str) -> None:
        first_lines[number] = line
        if len(first_lines) == settings.workers:
            click.echo("\n".join(line for _, line in sorted(first_lines.items())))
            sys.stdout.flush()

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(1, settings.workers + 1):
                group.create_task(_Worker(settings, number, ready).run())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


def _require_free(settings: Settings) -> None:
    """Refuse addresses of which one cannot be listened on.

    Raises:
        CommandFailed: says which worker's, and what to do.
    """
    for number in range(1, settings.workers + 1):
        given = settings.of_worker(number)
        for name in ("listen", "admin_listen", "peer_listen"):
            at = getattr(given, name)
            if at and (reason := why_not_free(parse_address(at))):
                raise CommandFailed(
                    f"worker {number} cannot listen on {at}: {reason}. Each worker has the ports "
                    f"after those of the one before: stop what listens there, or choose a {name} "
                    f"from whose port on {settings.workers} are free"
                )


class _Worker:
    """A proxy in a process of its own, and in another one after that has ended.

    `ready` is told the number and the line on stdout when the worker can take calls for the first
    time.
    """

    def __init__(self, settings: Settings, number: int, ready: Callable[[int, str], None]) -> None:
        told = {"worker": number, "settings": plain_settings(settings.of_worker(number))}
        self._told = json.dumps(told).encode() + b"\n"
        self._number = number
        self._ready = ready
        self._was_ready = False

    async def run(self) -> NoReturn:
        """Run it until this is cancelled.

        Raises:
            CommandFailed: it cannot start, or did not end in order when it was asked to.
        """
        loop = asyncio.get_running_loop()
        pause_s = PAUSE_S
        while True:
            began = loop.time()
            code = await self._once()
            if code > 0 and not self._was_ready:
                raise CommandFailed(f"worker {self._number} could not start, so all have ended")
            if loop.time() - began >= WELL_S:
                pause_s = PAUSE_S
            log.error("worker ended", worker=self._number, how=_how(code), seconds=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _once(self) -> int:
        """Return the exit code of one process; of a signal, its number below zero."""
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        with closing(process.stdin) as stdin:
            try:
                stdin.write(self._told)
                hung_s = await self._hung_s(process)
            except asyncio.CancelledError:
                await self._end(process)
                raise
            if hung_s:
                await self._kill(process, hung_s)
            return await process.wait()

    async def _hung_s(self, process: asyncio.subprocess.Process) -> float:
        """Read what a process says until it has ended, or hangs; return how long it hangs."""
        assert process.stdout is not None
        missed, missed_max = 0, FIRST_BEAT_MAX
        while missed < missed_max:
            try:
                async with asyncio.timeout(BEAT_S):
                    line = await process.stdout.readline()
            except TimeoutError:
                missed += 1
                continue
            if not line:
                await process.wait()
                return 0.0
            missed, missed_max = 0, BEATS_MISSED_MAX
            said = line.decode().rstrip()
            if said and not self._was_ready:
                self._was_ready = True
                self._ready(self._number, said)
        return missed * BEAT_S

    async def _kill(self, process: asyncio.subprocess.Process, hung_s: float) -> None:
        """Kill a process that hangs, once it has said where; at once if this is cancelled."""
        log.error("worker hangs", worker=self._number, seconds=hung_s)
        try:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                process.send_signal(STACKS_SIGNAL)
            await asyncio.sleep(STACKS_S)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Let a process end what is under way, then itself.

        Raises:
            CommandFailed: it did not.
        """
        assert process.stdin is not None
        with suppress(ConnectionError):  # it has ended meanwhile
            process.stdin.write(b"stop\n")
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                code = await process.wait()
        except TimeoutError:
            log.error("worker killed", worker=self._number, seconds=END_TIMEOUT_S)
            with suppress(ProcessLookupError):  # it has ended meanwhile
                process.kill()
            code = await process.wait()
        if code and -code not in _SIGNALS:
            raise CommandFailed(f"worker {self._number} did not end in order: {_how(code)}")


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Return what was set as JSON has it, secrets included: for a pipe, nothing else."""
    return {name: _value(getattr(settings, name)) for name in sorted(settings.model_fields_set)}


def _value(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value) if isinstance(value, Path) else value


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
