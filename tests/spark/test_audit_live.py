"""Audits while a proxy works, is killed and starts again: nothing is ever found. Half an hour."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit.proxies import ProxyProcess
from tests.kit.workload import Shop
from tests.spark.audit_load import Load
from txbroker.config.settings import load_settings
from txbroker.embedded import EmbeddedKafka
from txbroker.spark.schema import RunSummary, Terms, TopicNames

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEED_VARIABLE = "TXBROKER_TEST_SEED"
AUDITS = 20
RATE = 500.0
LIVES_S = (0.5, 20.0)
FULL = (0, 4, 12)
BETWEEN = 1000
"""Transactions from one audit to the next."""
TERMS = Terms(0, late_after_ms=30_000)


class Reader(NamedTuple):
    """Audits an installation repeatedly, in one folder."""

    spark: SparkSession
    world: ProxyProcess
    folder: Path

    def audit(self, mode: str) -> RunSummary:
        """Audit once."""
        from txbroker.spark.access import access_from
        from txbroker.spark.run import AuditSettings, run_audit

        prefix = self.world.prefix
        given = {"kafka": self.world.bootstrap, "topic_prefix": prefix, "instance": "audit"}
        topics = ("half", "op", "parked", "audit", "audit.drift")
        names = TopicNames(*(f"{prefix}.{topic}" for topic in topics))
        settings = load_settings(given, environ={})
        expected = AuditSettings(self.out, self.folder, names, TERMS, mode)  # type: ignore[arg-type]
        return run_audit(self.spark, access_from(settings), expected)

    @property
    def out(self) -> str:
        """Where the verdicts are."""
        return str(self.folder / "out")

    def states(self) -> dict[str, str]:
        """Return the newest state of every transaction."""
        return {row["id"]: row["state"] for row in self._verdicts().collect()}

    def business(self, ids: Sequence[str], summary: RunSummary) -> dict[str, int]:
        """Compare with rows that were read after the topics; a decision may be ever so young."""
        from txbroker.spark.business import BusinessTable, compare

        rows = self.folder / f"{summary.run}.rows.parquet"
        pq.write_table(pa.table({"id": pa.array(ids, pa.string())}), rows)
        terms = Terms(summary.started_ms, late_after_ms=-3_600_000)
        source = BusinessTable(f"parquet:{rows}", "", "id", groups=("orders", "bills"))
        return compare(self.spark, self._verdicts(), source, terms)[1]

    def _verdicts(self) -> Any:
        from txbroker.spark.folders import current_verdicts
        from txbroker.spark.journal import Journal
        from txbroker.spark.run import JOURNAL_FILE

        runs = [run.run for run in Journal(self.folder / JOURNAL_FILE).runs(1000)]
        return current_verdicts(self.spark, self.out, runs)


@pytest.fixture
async def world(kafka: EmbeddedKafka) -> AsyncIterator[ProxyProcess]:
    """A proxy that checks back soon."""
    made = ProxyProcess(kafka.bootstrap, check_after_s=1.0, check_interval_s=1.0)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def output(summary: RunSummary) -> str:
    """Return what a run has found, for people."""
    return f"{summary.mode} {summary.run}: {summary.drift} {summary.examples[:5]}"


async def listed(world: ProxyProcess) -> dict[str, str]:
    """Return what `txbroker tx list` says is not settled."""
    process = await asyncio.create_subprocess_exec(
        *(*world.program, "tx", "list", "--all", "-o", "json", "--url", world.url),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    found = json.loads(printed)
    rows = found["transactions"] if isinstance(found, dict) else found
    return {row["id"]: row["state"] for row in rows}


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_audits_of_a_proxy_that_works_and_is_killed_find_nothing(
    spark: SparkSession, world: ProxyProcess, tmp_path: Path
) -> None:
    seed = int(os.environ.get(SEED_VARIABLE, random.randrange(1 << 32)))
    print(f"{SEED_VARIABLE}={seed}")
    shop = Shop(tmp_path / "shop.db")
    topics = [await world.topic(3), await world.topic(1)]
    stamped = await world.topic(1, message_timestamp_type="LogAppendTime")
    reader = Reader(spark, world, tmp_path)
    judged = 0
    began_s = time.monotonic()
    async with Load(world, shop, [*topics, stamped], RATE, LIVES_S).running(seed) as load:
        for number in range(AUDITS):
            await load.reached(load.finished + BETWEEN)
            # The history gets long at this rate.
            mode = "full" if number in FULL else "incremental"
            summary = await asyncio.to_thread(reader.audit, mode)
            print(f"{number} {mode}: {summary.took_s:.0f} s, {load.finished} finished", flush=True)
            assert not summary.has_drift, output(summary)
            assert summary.quarantined == 0
            assert summary.taken == {}
            judged += summary.transactions
            counts = await asyncio.to_thread(reader.business, shop.rows(), summary)
            assert counts["message_without_row"] == counts["row_without_message"] == 0, counts
        kills, rate = load.kills, load.finished / (time.monotonic() - began_s)
    print(f"{rate:.0f} transactions a second, {kills} kills")
    assert rate > 0.95 * RATE
    assert kills >= AUDITS // 3
    assert judged > AUDITS * BETWEEN

    message = {"topic": topics[0], "value": "waits"}
    waiting = [await world.prepare(message, group="slow", check_after_s=600) for _ in range(5)]
    summary = await asyncio.to_thread(reader.audit, "incremental")
    assert not summary.has_drift, output(summary)
    states = await asyncio.to_thread(reader.states)
    unsettled = {
        id: state for id, state in states.items() if state not in ("promoted", "rolled_back")
    }
    assert unsettled == await listed(world)
    assert set(waiting) <= unsettled.keys()
    assert set(shop.rows()) <= {id for id, state in states.items() if state == "promoted"}
    counts = await asyncio.to_thread(reader.business, shop.rows(), summary)
    assert counts["message_without_row"] == counts["row_without_message"] == 0, counts
    assert counts["rows"] == len(shop.rows())
    shop.close()
