"""A proxy in a process of its own: `proxy_main.py '{"door": {…}, "settings": {…}}'`.

Prints `listening URL` once it listens; ends on SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import uvloop

from txbroker.config import Settings
from txbroker.errors import TxbrokerError
from txbroker.kafka import KafkaDoor, KafkaSettings
from txbroker.proxy.logging import configure_logging
from txbroker.proxy.process import run_proxy


async def main() -> None:
    given = json.loads(sys.argv[1])
    configure_logging("console", "info")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    servers = tuple(given["door"].pop("bootstrap_servers"))
    door = KafkaDoor(KafkaSettings(bootstrap_servers=servers, **given["door"]))
    async with run_proxy(door, Settings(**given["settings"])) as proxy:
        print(f"listening {proxy.url}", flush=True)
        await stop.wait()


if __name__ == "__main__":
    try:
        uvloop.run(main())
    except TxbrokerError as error:
        sys.exit(f"txbroker: {error}")
