"""Half messages and markers, written directly to Kafka."""

import asyncio
import secrets
import sys
import time
from typing import Any

from benchmarks.rig.proxy import PARTITIONS, TARGET, Proxy
from txbroker.config.settings import load_settings
from txbroker.core.encoding import encode_half, encode_marker
from txbroker.core.records import (
    LOG_VERSION,
    CheckPolicy,
    Half,
    Marker,
    MarkerKind,
    Message,
    Record,
    Source,
)
from txbroker.core.routing import make_id
from txbroker.kafka.door.door import KafkaDoor

BATCH = 500
GROUPS = 8
NEVER = CheckPolicy(after_s=86_400.0)
BACKLOG_MAX = 50_000
"""Maximum number of written transactions that the proxy has not read."""


class Filler:
    """Writes half messages and markers as an owner would, at Kafka's speed."""

    def __init__(self, kafka: str, prefix: str, size: int, policy: CheckPolicy = NEVER) -> None:
        self._settings = load_settings(
            {"kafka": kafka, "topic_prefix": prefix, "instance": "filler"}, environ={}
        )
        self._policy = policy
        self._body = secrets.token_bytes(size)
        self._logs: dict[int, Any] = {}

    async def fill(self, proxy: Proxy, count: int, finish: str, rate: float, label: str) -> None:
        """Write `count` transactions; `finish` is empty, or the kind of their marker.

        As the proxy's limits do for clients, `BACKLOG_MAX` limits the backlog.
        """
        door = KafkaDoor.from_configuration(self._settings)
        await door.start()
        self._logs = {partition: door.partition(partition) for partition in range(PARTITIONS)}
        try:
            began = time.monotonic()
            done = 0
            shown = 0.0
            while done < count:
                some = [min(BATCH, (count - done + p) // PARTITIONS) for p in range(PARTITIONS)]
                await asyncio.gather(*[self._batch(p, n, finish) for p, n in enumerate(some) if n])
                done += sum(some)
                if time.monotonic() - shown > 1:
                    while proxy.backlog(0 if finish else done) > BACKLOG_MAX:
                        await asyncio.sleep(0.1)
                    shown = time.monotonic()
                    print(f"\r{label}: {done:,} of {count:,}", end="", file=sys.stderr, flush=True)
                await asyncio.sleep(max(0.0, began + done / rate - time.monotonic()))
            print(f"\r{label}: {done:,} in {time.monotonic() - began:.0f} s", file=sys.stderr)
        finally:
            await door.close()

    async def _batch(self, partition: int, count: int, finish: str) -> None:
        logs = self._logs[partition]
        now_ms = round(time.time() * 1000)
        halves: list[Record] = []
        markers: list[Record] = []
        for number in range(count):
            id = make_id(partition, now_ms, secrets.randbits(64))
            message = Message(TARGET, id.encode(), self._body, (), number % 4)
            group = f"bench-{number % GROUPS}"
            halves += encode_half(Half(id, group, (message,), policy=self._policy))
            if finish:
                kind, source = MarkerKind(finish), Source.PRODUCER
                markers += [encode_marker(Marker(LOG_VERSION, kind, id, -1, source, group))]
        await logs.half.append(halves)
        if markers:
            await logs.op.append(markers)
