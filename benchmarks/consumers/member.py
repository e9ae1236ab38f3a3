"""A consumer in a process: notes in a file when it handled which message.

`python -m benchmarks.consumers.member KAFKA GROUP TOPIC FILE OPTIONS`, the options as JSON. It ends
with SIGTERM. A line of the file: time, partition, offset, attempt. A message with the key `stuck`
is never done; one with the key `fails` fails at its first attempt.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time

import uvloop

from txbroker.consumer import Consumer, ReceivedMessage

STUCK, FAILS = b"stuck", b"fails"


async def run(kafka: str, group: str, topic: str, file: str, options: str) -> None:
    """Consume until SIGTERM."""
    # Line by line, because some members are killed.
    with open(file, "w", buffering=1) as notes:
        async with Consumer(kafka, group=group, topics=[topic], **json.loads(options)) as consumer:

            async def handle(message: ReceivedMessage) -> None:
                notes.write(
                    f"{time.time():.4f} {message.partition} {message.offset} {message.attempt}\n"
                )
                if message.key == STUCK:
                    await asyncio.Event().wait()
                if message.key == FAILS and message.attempt == 1:
                    raise ValueError("fails at first")

            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
            await consumer.run(handle)


if __name__ == "__main__":
    uvloop.run(run(*sys.argv[1:]))
