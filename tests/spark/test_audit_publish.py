"""The results of a run reach every proxy through a real Kafka."""

from __future__ import annotations

import sys
from subprocess import run
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.kit.kafka import KafkaHarness
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from tests.spark.audit_summaries import STARTED_MS, drifted, summary
from txbroker.cli.audit.run import _report_until_end
from txbroker.contract.audit import UnreadRecord, decode_news, encode_news
from txbroker.errors import ConfigurationError
from txbroker.spark.access import key_of, news_of, publish
from txbroker.spark.schema import KIND_NAMES, BrokenRecord, RunSummary
from txbroker.spark.stream.stored import FindingSink, StreamManifest, StreamProgress
from txbroker.spark.stream.stream import AuditStream


@pytest.fixture
async def world(kafka: Any) -> Any:
    made = KafkaHarness(kafka.bootstrap)
    yield made
    await made.close()


def test_every_kind_is_published_even_with_count_zero() -> None:
    reported = news_of(drifted(business={"compared": 5}))
    assert set(KIND_NAMES) < set(reported.drift)
    assert {kind: count for kind, count in reported.drift.items() if count} == {
        "lost": 2,
        "visible_twice": 1,
    }
    assert reported.drift["message_without_row"] == 0
    assert "message_without_row" not in news_of(summary()).drift
    assert reported.ended_ms == STARTED_MS + 12_500
    assert (reported.taken, reported.quarantined, reported.carried) == (7, 1, 27)


def test_unpublished_findings_are_published_with_new_ones() -> None:
    untold = [
        drifted(1, drift={"visible_twice": 3, "late": 4, "row_without_message": 1}),
        drifted(2, drift={"visible_twice": 2, "lost": 5}),
    ]
    now = summary(3, drift={"visible_twice": 1, "late": 1})
    reported = news_of(now, untold)
    # Who is late or lost is so in the later run, too, if nothing has mended it.
    assert {kind: count for kind, count in reported.drift.items() if count} == {
        "visible_twice": 3,
        "late": 1,
        "row_without_message": 1,
    }
    assert reported.run == now.run


def test_records_a_stream_skipped_are_published() -> None:
    # Neither needs Spark to be there.
    stream = AuditStream.__new__(AuditStream)
    stream._unread = {}
    stream._sink = cast(FindingSink, SimpleNamespace(progress=StreamProgress(strangers=3)))
    stream._home = StreamManifest(name="n", installation="half", started_ms=5, buckets=1, slot_ms=1)
    stream._judged_ms = 0
    reported = decode_news(encode_news(news_of(stream.summary())))
    assert reported.strangers == 3
    assert news_of(summary()).strangers == 0


def test_records_a_stream_skipped_are_reported_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Watched:
        looks = 0

        def wait(self, timeout_s: float) -> bool:
            self.looks += 1
            return self.looks > 4

        def summary(self) -> RunSummary:
            return summary(mode="stream", strangers=(self.looks - 1) // 2 * 7)

    _report_until_end(cast(AuditStream, Watched()))
    reported = capsys.readouterr().err
    assert reported.startswith("7 records arrived after the stream had dropped ")
    assert reported.count("records arrived") == 1


def test_published_record_stays_small_for_any_run() -> None:
    many = {f"topic-{number:05}-{'x' * 200}": number for number in range(5000)}
    example = drifted().examples[0]
    reported = news_of(drifted(taken=many, examples=(example,) * 5000))
    assert reported.taken == sum(many.values())
    assert len(reported.taken_topics) == 50
    assert max(many, key=many.__getitem__) in reported.taken_topics


def test_set_aside_and_missing_targets_are_published() -> None:
    aside = BrokenRecord("orders", 1, 7, "why", own=True)
    found = drifted(set_aside=(aside,), missing_targets={"gone": 2}, drift={"target_missing": 2})
    reported = decode_news(encode_news(news_of(found)))
    assert reported.set_aside == [UnreadRecord("orders", 1, 7, "why")]
    assert reported.missing_targets == {"gone": 2}
    assert (reported.drift["target_missing"], reported.drift["unreadable"]) == (2, 0)
    untold = [drifted(1, drift={"target_missing": 3, "overdue": 1, "unreadable": 4})]
    later = news_of(summary(2), untold).drift
    assert {kind: count for kind, count in later.items() if count} == {"unreadable": 4}


def test_batch_and_stream_do_not_replace_one_another() -> None:
    modes = ("full", "incremental", "stream")
    assert [key_of(summary(mode=mode)) for mode in modes] == ["batch", "batch", "stream"]


async def test_a_proxy_shows_what_was_published(world: KafkaHarness) -> None:
    async with FakeEndpoint().serve() as desk:
        service = Service(world, desk)
        await service.start()
        try:
            kinds = ("lost", "visible_twice", "late")
            assert await service.metric("audit_last_success_timestamp_seconds", mode="batch") == 0
            await publish(world.settings(), drifted(1))

            async def shown() -> bool:
                # Each look is one at its own moment: the news may come in between.
                found = [await service.metric("audit_drift", kind=kind) for kind in kinds]
                return found == [2, 1, 0]

            await until(shown)
            ended_s = drifted(1).started_ms / 1000 + 12.5
            success = "audit_last_success_timestamp_seconds"
            assert await service.metric(success, mode="batch") == ended_s
            await world.write_audit("batch", b"\xff broken")
            await publish(world.settings(), summary(2))

            async def over() -> bool:
                return await service.metric("audit_drift", kind="lost") == 0

            await until(over)
        finally:
            await service.stop()
    reported = await world.visible(world.name("audit"))
    assert [record.key for record in reported] == [b"batch"] * 3
    assert decode_news(reported[-1].value or b"").run == "run-000002"


async def test_missing_audit_topic_names_the_next_step(world: KafkaHarness) -> None:
    with pytest.raises(ConfigurationError, match=r"audit does not exist: create it with"):
        await publish(world.settings(), summary())


@pytest.mark.parametrize("module", ["txbroker.spark.journal", "txbroker.spark.access"])
def test_neither_journal_nor_publishing_loads_spark(module: str) -> None:
    code = f"import sys, {module}; sys.exit('pyspark' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0
