"""One proxy of `txbroker proxy --workers`, in a separate process.

`python -m txbroker.cli.proxy.worker` reads its number and settings as one line of JSON from stdin.
Any later byte asks it to stop; it also stops when stdin ends, because then its parent has ended.
On SIGUSR1 it writes the stacks of its threads to stderr.
"""

import faulthandler
import json
import sys

import click

from txbroker.cli.proxy.command import run_one
from txbroker.cli.proxy.lifeline import STACKS_SIGNAL
from txbroker.cli.run import CommandFailed, run
from txbroker.config.settings import load_settings
from txbroker.errors import TxbrokerError


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
