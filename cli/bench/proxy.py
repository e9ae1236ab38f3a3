"""The proxy of `txbroker bench`, in a separate process: `python -m txbroker.cli.bench.proxy`.

It reads its settings as one line of JSON from stdin, and ends when stdin does.
"""

import asyncio
import json
import sys
from typing import Any

import click

from txbroker.cli.proxy.serving import owns_all, serve
from txbroker.cli.run import CommandFailed, run_async
from txbroker.config.settings import load_settings
from txbroker.errors import TxbrokerError
from txbroker.proxy.observe.logging import configure_logging


async def work(config: dict[str, Any]) -> None:
    """Serve until stdin ends; print `ready URL …`, or `failed` with the reason."""
    settings = load_settings(config, environ={})
    configure_logging(settings.log_format, settings.log_level)
    serving = asyncio.create_task(serve(settings, owns_all))
    ending = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
    await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    try:
        await serving
    except asyncio.CancelledError:
        pass
    except (TxbrokerError, CommandFailed) as error:
        click.echo(f"failed {error}")


if __name__ == "__main__":
    run_async(work(json.loads(sys.stdin.buffer.readline())))
