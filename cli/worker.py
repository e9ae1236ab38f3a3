"""One of the proxies of `txbroker proxy --workers`, in a process of its own.

`python -m txbroker.cli.worker` is given its number and settings as one line of JSON on stdin. What
comes behind asks it to stop; and when stdin ends, its parent has, so it stops too. SIGUSR1 has it
write to stderr what each of its threads is doing.
"""

import faulthandler
import json
import sys

import click

from txbroker.cli.lifeline import STACKS_SIGNAL
from txbroker.cli.proxy import run_one
from txbroker.cli.run import Failed, run
from txbroker.config.settings import load_settings
from txbroker.errors import TxbrokerError


@click.command()
def command() -> None:
    """Run one worker."""
    faulthandler.register(STACKS_SIGNAL)
    # Without a buffer, which would take in what comes behind the line.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    if not line:
        return
    told = json.loads(line)
    try:
        settings = load_settings(told["settings"], environ={})
        run_one(settings, worker=told["worker"], parent=sys.stdin.fileno())
    except (TxbrokerError, Failed) as error:
        raise Failed(f"worker {told['worker']}: {error}") from None


if __name__ == "__main__":
    sys.exit(run(command, []))
