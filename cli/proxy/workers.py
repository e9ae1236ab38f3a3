"""Several proxies on one machine as one command: `txbroker proxy --workers N`.

Each worker is a separate process and a regular member of the proxies' group. The parent starts
workers, restarts those that end or hang, and stops them. It uses two pipes for each: the worker's
stdin carries the settings and later the request to stop, and ends when the parent dies; its stdout
carries the ready line and heartbeats (`lifeline` in `serving.py`).

`python -m txbroker.cli.proxy.workers` runs a worker, which reads its number and settings as one
line of JSON. On SIGUSR1 it writes the stacks of its threads to stderr.
"""

import asyncio
import faulthandler
import json
import signal
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NoReturn

import click
from pydantic import SecretStr

from txbroker.cli.proxy.serving import STACKS_SIGNAL, WORKER_MODULE, run_one, why_not_free
from txbroker.cli.run import CommandFailed, run
from txbroker.cli.signals import BEAT_S, END_TIMEOUT_S
from txbroker.config.addresses import parse_address
from txbroker.config.settings import Settings, load_settings
from txbroker.errors import TxbrokerError
from txbroker.proxy.observe.logging import get_logger

COMMAND = (sys.executable, "-m", WORKER_MODULE)
PAUSE_S, PAUSE_MAX_S = 0.5, 30.0
"""First and longest pause before a worker is restarted; it doubles each time."""
WELL_S = 60.0
"""A worker that ran for this time restarts with the shortest pause."""
BEATS_MISSED_MAX = 30
"""Missed heartbeats after which a worker counts as hanging and is killed. Counted, not timed: a
parent that was suspended, for example by Ctrl-Z, must not kill its workers when it resumes."""
FIRST_BEAT_MAX = 120
"""The same before the first heartbeat, as starting workers share the cores. The chart's startup
probe allows the first worker the same time; its liveness probe leaves time to replace it."""
STACKS_S = 1.0
"""Time for a hanging worker to write its stacks before it is killed."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""A signal to the process group may end a worker that has not installed its handlers yet."""

log = get_logger(__name__)


async def run_workers(settings: Settings, welcome: Callable[[str], None] | None = None) -> None:
    """Run `settings.workers` proxies until this is cancelled.

    `welcome` is called with the first one's ready line once all are ready.
    """
    _require_free(settings)
    first_lines: dict[int, str] = {}

    def ready(number: int, line: str) -> None:
        first_lines[number] = line
        if len(first_lines) == settings.workers:
            click.echo("\n".join(line for _, line in sorted(first_lines.items())))
            sys.stdout.flush()
            if welcome is not None:
                welcome(first_lines[1])

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(1, settings.workers + 1):
                group.create_task(_ProxyProcess(settings, number, ready).run())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


def _require_free(settings: Settings) -> None:
    for number in range(1, settings.workers + 1):
        of_worker = settings.of_worker(number)
        for name in ("listen", "admin_listen", "peer_listen"):
            address = getattr(of_worker, name)
            if address and (reason := why_not_free(parse_address(address))):
                raise CommandFailed(
                    f"worker {number} cannot listen on {address}: {reason}. Each worker uses the "
                    f"port after the previous worker's: stop the process that listens there, or "
                    f"choose a {name} with {settings.workers} free ports from its port on"
                )


class _ProxyProcess:
    """A proxy in a child process, which is restarted when it ends.

    `ready` is called with number and ready line when the worker accepts calls for the first time.
    """

    def __init__(self, settings: Settings, number: int, ready: Callable[[int, str], None]) -> None:
        config = {"worker": number, "settings": plain_settings(settings.of_worker(number))}
        self._config = json.dumps(config).encode() + b"\n"
        self._number = number
        self._ready = ready
        self._was_ready = False

    async def run(self) -> NoReturn:
        """Run it until this is cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = PAUSE_S
        while True:
            began = loop.time()
            code = await self._once()
            if code > 0 and not self._was_ready:
                raise CommandFailed(
                    f"worker {self._number} failed to start: see its error above; all were stopped"
                )
            if loop.time() - began >= WELL_S:
                pause_s = PAUSE_S
            log.error("worker ended", worker=self._number, how=_how(code), seconds=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _once(self) -> int:
        """Run one process and return its exit code; for a signal, its negative number."""
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        with closing(process.stdin) as stdin:
            try:
                stdin.write(self._config)
                hung_s = await self._hung_s(process)
            except asyncio.CancelledError:
                await self._end(process)
                raise
            if hung_s:
                await self._kill(process, hung_s)
            return await process.wait()

    async def _hung_s(self, process: asyncio.subprocess.Process) -> float:
        """Read a process's lines until it ends or hangs; return how long it has been hanging."""
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
            text = line.decode().rstrip()
            if text and not self._was_ready:
                self._was_ready = True
                self._ready(self._number, text)
        return missed * BEAT_S

    async def _kill(self, process: asyncio.subprocess.Process, hung_s: float) -> None:
        """Kill a hanging process after it wrote its stacks; immediately if cancelled."""
        log.error("worker hangs", worker=self._number, seconds=hung_s)
        try:
            with suppress(ProcessLookupError):  # already ended
                process.send_signal(STACKS_SIGNAL)
            await asyncio.sleep(STACKS_S)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Stop a process, which finishes the calls in flight."""
        assert process.stdin is not None
        with suppress(ConnectionError):  # already ended
            process.stdin.write(b"stop\n")
        try:
            code = await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            log.error("worker killed", worker=self._number, seconds=END_TIMEOUT_S)
            with suppress(ProcessLookupError):  # already ended
                process.kill()
            code = await process.wait()
        if code and -code not in _SIGNALS:
            raise CommandFailed(
                f"worker {self._number} did not stop in order: {_how(code)}; see its log"
            )


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Return the explicit settings as JSON data, secrets included: only for a pipe."""
    return {name: _value(getattr(settings, name)) for name in sorted(settings.model_fields_set)}


def _value(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return str(value) if isinstance(value, Path) else value


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


@click.command()
def command() -> None:
    """Run one worker."""
    faulthandler.register(STACKS_SIGNAL)
    # Unbuffered: the lifeline reads the bytes after this line.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    if not line:
        return
    config = json.loads(line)
    try:
        settings = load_settings(config["settings"], environ={})
        run_one(settings, worker=config["worker"], parent=sys.stdin.fileno())
    except (TxbrokerError, CommandFailed) as error:
        raise CommandFailed(f"worker {config['worker']}: {error}") from None


if __name__ == "__main__":
    sys.exit(run(command, []))
