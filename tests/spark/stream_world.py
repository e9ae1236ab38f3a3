"""Streams over planted topics: started, killed, and their findings."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tests.kit.topic_reader import read_topics
from tests.spark.audit_tables import audited
from tests.spark.planting import access_to
from txbroker.spark.run import AuditSettings
from txbroker.spark.schema import RunSummary, Terms, TopicNames

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.spark.stream.stream import AuditStream

DEADLINE_S = 200.0
TERMS = Terms(0, dedup_window_ms=8_000, late_after_ms=2_500, lost_after_ms=600_000)


class Batch(NamedTuple):
    """The result of a batch audit: its summary, and every finding with its transaction."""

    summary: RunSummary
    findings: set[tuple[str, str]]


class StreamWorld:
    def __init__(
        self, spark: SparkSession, bootstrap: str, prefix: str, folder: Path, terms: Terms = TERMS
    ) -> None:
        from txbroker.spark.stream.stream import StreamSettings

        self.names = TopicNames.of(prefix)
        self.bootstrap = bootstrap
        self._spark = spark
        self._access = access_to(bootstrap, prefix)
        self.settings = StreamSettings(
            str(folder / "checkpoint"),
            self.names,
            terms,
            every_s=0.2,
            tick_s=0.2,
            summary_s=0.0,
            buckets=2,
        )

    async def start(self, **changes: Any) -> AuditStream:
        from txbroker.spark.stream.stream import start_stream

        settings = msgspec.structs.replace(self.settings, **changes)
        return await asyncio.to_thread(start_stream, self._spark, self._access, settings)

    def batch(self, now_ms: int, folder: Path) -> Batch:
        """Audit the same topics by the same terms, all at once and from their starts."""
        terms = msgspec.structs.replace(self.settings.terms, now_ms=now_ms)
        folder.mkdir()
        settings = AuditSettings(str(folder / "out"), folder, self.names, terms, "full")
        summary, rows = audited(self._spark, self._access, settings)
        return Batch(summary, {(id, kind) for id in rows for kind in rows[id]["findings"]})

    async def reported(self) -> list[dict[str, Any]]:
        records = await asyncio.to_thread(read_topics, self.bootstrap, [self.names.drift])
        events = [json.loads(record.value or b"") for record in records]
        assert [record.key for record in records] == [each["event"].encode() for each in events]
        return events

    async def kinds(self) -> set[tuple[str, str]]:
        """Return the open findings by transaction; each change was reported once."""
        found = set[tuple[str, str]]()
        for each in await self.reported():
            finding = each["id"], each["kind"]
            assert (finding in found) == (each["state"] == "healed"), each
            found ^= {finding}
        return found


async def reached(stream: AuditStream, condition: Callable[[], bool]) -> None:
    """Wait for something, while the stream runs."""
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, stream.summary()
        assert not await asyncio.to_thread(stream.wait, 0.1), "the stream has ended"


async def judged(stream: AuditStream, at_ms: float) -> None:
    await reached(stream, lambda: stream.judged_ms > at_ms)


async def confirmed(stream: AuditStream) -> None:
    """Wait until everything that was stored so far is judged for good."""
    # Once read, and once all logs were read past the ticks that were read with it.
    for _ in range(2):
        await judged(stream, time.time() * 1000)
