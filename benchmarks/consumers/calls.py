"""Python calls of a message in a keyed consumer, at least once, on a Kafka in memory.

The count hardly depends on the machine, so a test bounds it (`BOUND`). Calls count as in
`benchmarks.calls`, here only those in `txbroker/consumer` and `txbroker/core/consuming`: neither
those of the Kafka in memory, nor the handler's. `python -m benchmarks.consumers.calls --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

from benchmarks.calls import PACKAGE, CallCounter, Calls, file_of
from txbroker.consumer import Consumer
from txbroker.core.records import Record
from txbroker.door.consuming import TopicSpec
from txbroker.testing.broker import InMemoryBroker

BOUND = 6.4
"""A little above the measurement. Lower it with the measurement, never raise it without a reason in
the commit."""

FOLDERS = PACKAGE / "consumer", PACKAGE / "core" / "consuming"
TOPIC = "orders"
PARTITIONS = 4
_VALUE = bytes(200)


async def fill(broker: InMemoryBroker, count: int, keys: int) -> None:
    """Create a topic with `count` records."""
    door = broker.consuming_door()
    await door.start()
    try:
        await door.create([TopicSpec(TOPIC, PARTITIONS, 1, {})])
        for partition in range(PARTITIONS):
            numbers = range(partition, count, PARTITIONS)
            records = [Record(b"%d" % (number % keys), _VALUE) for number in numbers]
            await door.append(TOPIC, partition, records)
    finally:
        await door.close()


async def consume(broker: InMemoryBroker, count: int, counter: CallCounter) -> Calls:
    """Consume the topic; return the calls from the first message to the last one."""
    left = count
    async with Consumer(broker, group="bench", topics=[TOPIC], order="key") as consumer:

        async def handle(_message: object) -> None:
            nonlocal left
            if left == count:
                counter.take()
            left -= 1
            if not left:
                consumer.stop()

        await consumer.run(handle)
        return counter.take()["client"]


def by_file(calls: Calls, count: int) -> dict[str, float]:
    """Return the calls of a message by file of `FOLDERS`."""
    found: Counter[str] = Counter()
    for code, number in calls.items():
        path = Path(code.co_filename)
        if any(path.is_relative_to(folder) for folder in FOLDERS):
            found[file_of(code)] += number
    return {name: number / count for name, number in found.most_common()}


def measure(count: int, keys: int) -> dict[str, float]:
    """Count; the Kafka in memory runs in a thread, which is not counted."""
    counter = CallCounter()
    with InMemoryBroker() as broker:
        asyncio.run(fill(broker, count, keys))
        with counter.counting():
            calls = asyncio.run(consume(broker, count, counter))
    return by_file(calls, count)


def main() -> int:
    """Measure, and print; return 1 if the bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="messages")
    parser.add_argument("--keys", type=int, default=1_000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    files = measure(given.count, given.keys)
    total = round(sum(files.values()), 2)
    if given.json:
        print(json.dumps({"calls": total, "bound": BOUND, "files": files}))
    else:
        print(f"{total:>8.2f}  calls of a message   at most {BOUND:g}")
        for name, number in files.items():
            if number >= 0.005:
                print(f"{number:>8.2f}  {name}")
    if total > BOUND:
        print(f"{total:g} calls of a message are more than {BOUND:g}", file=sys.stderr)
    return 1 if total > BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
