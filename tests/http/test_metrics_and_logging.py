"""Metrics of one proxy, its partitions and audits; log lines that never hold a secret."""

from __future__ import annotations

import json
import logging
import timeit
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from txbroker.contract.audit import (
    AuditNews,
    CheckNews,
    StreamFigures,
    UnreadRecord,
    decode_news,
    encode_news,
)
from txbroker.contract.service import Readiness
from txbroker.core.ledger import ApplyResult, Effect
from txbroker.core.records import Decision, Half, Message, Source
from txbroker.core.transaction import Transaction, Verdict, places
from txbroker.proxy.observe import metrics as metrics_module
from txbroker.proxy.observe.gauges import LOOKED_AT_MAX, AuditMetrics, PartitionGauges
from txbroker.proxy.observe.logging import configure_logging, get_logger
from txbroker.proxy.observe.metrics import Gauges, Metrics
from txbroker.proxy.observe.overview import Unobserved


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name.removeprefix("txbroker_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name.startswith("txbroker_")
    }


def visible_after(milliseconds: int, messages: int = 1, group: str = "orders") -> Transaction:
    half = Half("", group, (Message("payments"),) * messages)
    found = Transaction(half, 0, 0, b"", places(half.messages), None)
    found.verdict = Verdict(Decision.COMMIT, at_ms=1, source=Source.PRODUCER)
    found.promoted_at_ms = 1 + milliseconds
    return found


def test_events_are_counted(metrics: Metrics) -> None:
    metrics.prepared([visible_after(0, messages=2)])
    metrics.prepared([visible_after(0)])
    metrics.decided([visible_after(0)])
    metrics.promoted([visible_after(0, messages=3)])
    metrics.checks_ended("orders", "commit", [0.02])
    metrics.outcome(ApplyResult(Effect.CONFLICT))
    metrics.outcome(ApplyResult(Effect.REPEATED))
    metrics.fenced()
    metrics.overloaded("prepare")
    metrics.kafka_failed("append")
    found = samples(metrics)

    assert found["prepared_total", (("topic", "payments"),)] == 3
    decided = (("decision", "commit"), ("group", "orders"), ("source", "producer"))
    assert found["decisions_total", decided] == 1
    assert found["promoted_total", (("topic", "payments"),)] == 3
    checked = (("group", "orders"), ("outcome", "commit"))
    assert found["checks_total", checked] == 1
    assert found["check_duration_seconds_count", (("group", "orders"),)] == 1
    assert found["conflicts_total", ()] == 1
    assert found["fenced_total", ()] == 1
    assert found["overloaded_total", (("operation", "prepare"),)] == 1
    assert found["kafka_errors_total", (("operation", "append"),)] == 1


def test_latencies_fall_into_buckets(metrics: Metrics) -> None:
    for seconds in (0.001, 0.003, 99.0):
        metrics.prepare_latency.add(seconds)
        metrics.decision_latency.add(seconds)
        metrics.loop_lag.add(seconds)
    metrics.promoted([visible_after(milliseconds) for milliseconds in (1, 3, 99_000)])
    metrics.recovered(1.5)
    found = samples(metrics)

    names = [f"{name}_latency_seconds" for name in ("prepare", "decision", "promotion")]
    for name in (*names, "event_loop_lag_seconds"):
        bucket = f"{name}_bucket"
        assert found[bucket, (("le", "0.001"),)] == 1
        assert found[bucket, (("le", "0.005"),)] == 2
        assert found[bucket, (("le", "10.0"),)] == 2
        assert found[bucket, (("le", "+Inf"),)] == 3
        assert found[f"{name}_sum", ()] == pytest.approx(99.004)
    assert found["recovery_seconds_count", ()] == 1


def test_gauges_are_read_and_merged_at_the_scrape(metrics: Metrics) -> None:
    one = Gauges(pending={"a": 1}, pending_oldest_age_seconds={"a": 5.0}, owned_partitions=1)
    two = Gauges(
        pending={"a": 2, "b": 3},
        pending_oldest_age_seconds={"a": 7.0},
        owned_partitions=2,
        half_retention_headroom_seconds=60.0,
        ready=False,
    )
    metrics.watch(lambda: one)
    metrics.watch(lambda: two)
    metrics.watch(lambda: Gauges(half_retention_headroom_seconds=90.0, ready=True))
    found = samples(metrics)

    assert found["pending", (("group", "a"),)] == 3
    assert found["pending", (("group", "b"),)] == 3
    assert found["pending_oldest_age_seconds", (("group", "a"),)] == 7
    assert found["owned_partitions", ()] == 3
    assert found["half_retention_headroom_seconds", ()] == 60
    assert found["ready", ()] == 0
    assert any(name == "build_info" for name, _ in found)


def test_groups_beyond_the_limit_count_as_other() -> None:
    metrics = Metrics(group_labels_max=2)
    for group in ("a", "b", "c", "d", "a"):
        metrics.checks_ended(group, "commit", [0.1])
        metrics.decided([visible_after(0, group=group)])
    metrics.watch(lambda: Gauges(pending={"c": 1, "d": 1}))
    found = samples(metrics)

    counted = {labels: value for (name, labels), value in found.items() if name == "checks_total"}
    assert counted == {
        (("group", "a"), ("outcome", "commit")): 2,
        (("group", "b"), ("outcome", "commit")): 1,
        (("group", "other"), ("outcome", "commit")): 2,
    }
    assert found["pending", (("group", "other"),)] == 2
    decided = {labels[1]: value for (name, labels), value in found.items() if "decisions" in name}
    assert decided == {("group", "a"): 2, ("group", "b"): 1, ("group", "other"): 2}


def test_one_share_cannot_take_all_labels() -> None:
    metrics = Metrics(group_labels_max=5, share_of=lambda group: group[:1])
    for number in range(9):
        metrics.checks_ended(f"shop-{number}", "commit", [0.1])
    metrics.checks_ended("bank", "commit", [0.1])
    checks = [labels for name, labels in samples(metrics) if name == "checks_total"]
    shown = {dict(labels)["group"] for labels in checks}
    assert shown == {"shop-0", "shop-1", "shop-2", "shop-3", "bank", "other"}


def test_share_of_a_group_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "LABELS_KNOWN_MAX", 50)
    asked: list[str] = []

    def share_of(group: str) -> str:
        asked.append(group)
        return group[:1]

    metrics = Metrics(group_labels_max=5, share_of=share_of)
    groups = {f"shop-{number}": 1.0 for number in range(60)}
    metrics.watch(lambda: Gauges(pending=groups, pending_oldest_age_seconds=groups, parked=groups))
    first, second = samples(metrics), samples(metrics)
    assert asked == list(groups)[:50]
    metrics.checks_ended("bank", "commit", [0.1])
    assert "bank" not in asked
    for found in (first, second):
        assert found["pending", (("group", "shop-3"),)] == 1
        assert found["pending", (("group", "other"),)] == 56


def test_no_share_is_read_when_all_labels_are_taken() -> None:
    asked: list[str] = []

    def share_of(group: str) -> str:
        asked.append(group)
        return group

    metrics = Metrics(group_labels_max=5, share_of=share_of)
    metrics.watch(lambda: Gauges(pending={f"g{number}": 1.0 for number in range(60)}))
    assert samples(metrics)["pending", (("group", "other"),)] == 55
    assert asked == [f"g{number}" for number in range(5)]


def test_every_metric_is_described(metrics: Metrics) -> None:
    metrics.watch(lambda: Gauges(half_retention_headroom_seconds=1.0, ready=True))
    described = {one.name.removesuffix("_total") for one in metrics.described()}
    shown = {
        family.name
        for family in text_string_to_metric_families(metrics.text().decode())
        if family.name.startswith("txbroker_")
    }
    assert shown <= described  # no `_created` among them
    assert len(described) == len(metrics.described())


# --- log lines -------------------------------------------------------------------------------


@pytest.fixture
def _own_logging() -> object:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield None
    root.handlers[:], root.level = before
    structlog.reset_defaults()


@pytest.mark.usefixtures("_own_logging")
def test_lines_are_json_on_stderr_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")
    log = get_logger("txbroker.test")
    log.info("opened", group="orders", token="hunter2", kafka_password="hunter2", token_file="/t")
    log.debug("unseen")
    logging.getLogger("aiokafka").info("unseen")
    logging.getLogger("other").warning("seen %s", "too")
    out, err = capsys.readouterr()
    first, second = map(json.loads, err.splitlines())

    assert out == ""
    assert (first["event"], first["group"], first["level"]) == ("opened", "orders", "info")
    assert (first["token"], first["kafka_password"], first["token_file"]) == ("***", "***", "/t")
    assert first["logger"] == "txbroker.test"
    assert (second["event"], second["logger"]) == ("seen too", "other")


@pytest.mark.usefixtures("_own_logging")
def test_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("console", "warning")
    get_logger("txbroker.test").warning("partition stopped", partition=3)
    get_logger("txbroker.test").info("unseen")
    err = capsys.readouterr().err

    assert "partition stopped" in err
    assert "partition=3" in err
    assert "unseen" not in err
    assert "\x1b" not in err


# --- gauges of partitions ----------------------------------------------------------------------


NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000


@dataclass(eq=False)
class Held:
    """A transaction, as far as a scrape looks at it."""

    offset: int
    prepared_at_ms: int
    kept: bool = False
    lost: bool = False
    decided_at_ms: int = 0
    copying: bool = False

    @property
    def verdict(self) -> Verdict:
        return Verdict(Decision.COMMIT, at_ms=self.decided_at_ms)

    @property
    def kept_at(self) -> tuple[int, ...]:
        return (self.offset,) if self.kept and not self.copying else ()


@dataclass
class HeldLedger:
    """A ledger's counters, and its transactions by offset."""

    pending_by_group: dict[str, int] = field(default_factory=dict)
    parked_by_group: dict[str, int] = field(default_factory=dict)
    refused_by_topic: dict[str, int] = field(default_factory=dict)
    oldest: dict[str, int] = field(default_factory=dict)
    committed: list[Held] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    looked_at: int = 0

    @property
    def index(self) -> HeldLedger:
        """The fake is its own index, also by offset."""
        return self

    by_offset = index

    @property
    def ready(self) -> dict[str, Transaction]:
        return {str(one.offset): cast(Transaction, one) for one in self.committed}

    def oldest_pending_ms(self, group: str) -> int | None:
        return self.oldest.get(group)

    def after(self, after_offset: int, count: int) -> Sequence[Transaction]:
        found = [one for one in self.held if one.offset > after_offset][:count]
        self.looked_at += len(found)
        return cast(Sequence[Transaction], found)


@dataclass(eq=False)
class HeldOwner:
    ledger: HeldLedger = field(default_factory=HeldLedger)
    clock: Any = field(default_factory=lambda: SimpleNamespace(now_ms=lambda: NOW_MS))


@dataclass
class HeldBroker:
    owners: list[HeldOwner]
    states: dict[int, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def partitions(self) -> Any:
        return SimpleNamespace(topic_problems=self.problems)

    def ledgers(self) -> list[HeldOwner]:
        return self.owners

    def readiness(self) -> Readiness:
        return Readiness(True, self.states)


class HeldProxy(Unobserved):
    """A proxy with one unreachable group."""

    def unreachable(self) -> dict[str, str]:
        return {"g": "silent"}


def watching(broker: HeldBroker) -> Metrics:
    metrics = Metrics()
    metrics.watch(PartitionGauges(HeldProxy(broker), 14 * 86400.0).read)
    return metrics


def test_counters_are_summed_and_the_oldest_counts() -> None:
    committed = [Held(n, 0, decided_at_ms=NOW_MS - 7000 + n) for n in range(2)]
    one = HeldLedger({"a": 1}, {"a": 2}, {"t": 1}, {"a": NOW_MS - 5000}, committed)
    two = HeldLedger({"a": 3, "b": 4}, {}, {"t": 2}, {"a": NOW_MS - 9000, "b": NOW_MS})
    two.committed = [Held(3, 0, decided_at_ms=NOW_MS + 500)]
    broker = HeldBroker(
        [HeldOwner(one), HeldOwner(two)],
        {0: "owned", 1: "owned", 2: "elsewhere", 3: "hanging: since 10:00"},
        ("txbroker.half has 5 partitions",),
    )
    metrics = watching(broker)
    found = samples(metrics)

    assert found["pending", (("group", "a"),)] == 4
    assert found["pending", (("group", "b"),)] == 4
    assert found["pending_oldest_age_seconds", (("group", "a"),)] == 9
    assert found["parked", (("group", "a"),)] == 2
    assert found["refused", (("topic", "t"),)] == 3
    assert found["promotion_lag_markers", ()] == 3
    assert found["promotion_oldest_age_seconds", ()] == 7
    assert found["half_retention_seconds", ()] == 14 * 86400
    assert found["owned_partitions", ()] == 2
    assert found["unreachable_groups", ()] == 1
    assert found["topic_problems", ()] == 1
    states = {
        labels[0][1]: value for (name, labels), value in found.items() if name == "partitions"
    }
    assert states == {"owned": 2, "elsewhere": 1, "hanging": 1}


def test_gauges_of_a_partition_vanish_when_it_moves() -> None:
    held = HeldLedger(
        {"a": 1}, {"a": 1}, {"t": 1}, {"a": NOW_MS}, [Held(1, NOW_MS)], held=[Held(0, NOW_MS)]
    )
    broker = HeldBroker([HeldOwner(held)])
    metrics = watching(broker)
    gone = {
        "pending",
        "parked",
        "refused",
        "pending_oldest_age_seconds",
        "promotion_oldest_age_seconds",
        "half_retention_headroom_seconds",
    }
    assert gone <= {name for name, _ in samples(metrics)}
    broker.owners = []
    found = samples(metrics)
    assert gone & {name for name, _ in found} == set()
    assert found["owned_partitions", ()] == 0
    assert found["promotion_lag_markers", ()] == 0


def headroom_days(metrics: Metrics) -> float:
    return samples(metrics)["half_retention_headroom_seconds", ()] / 86400


def test_headroom_is_that_of_the_oldest_without_a_copy() -> None:
    held = [Held(n, NOW_MS - (10 - n) * DAY_MS, kept=n < 4) for n in range(8)]
    owner, metrics = HeldOwner(HeldLedger(held=held)), Metrics()
    broker = HeldBroker([owner, HeldOwner()])
    metrics.watch(PartitionGauges(Unobserved(broker), 14 * 86400.0).read)

    assert headroom_days(metrics) == 14 - 6
    held[4].kept = True
    assert headroom_days(metrics) == 14 - 5
    del held[5]
    assert headroom_days(metrics) == 14 - 4
    for one in held:
        one.kept = True
    assert ("half_retention_headroom_seconds", ()) not in samples(metrics)
    held.append(Held(100, NOW_MS - DAY_MS))
    assert headroom_days(metrics) == 13


def test_copy_is_at_risk_until_its_transaction_commits() -> None:
    held = [Held(0, NOW_MS - 9 * DAY_MS), Held(1, NOW_MS - 3 * DAY_MS)]
    metrics = watching(HeldBroker([HeldOwner(HeldLedger(held=held))]))

    held[0].kept = held[0].copying = True
    assert headroom_days(metrics) == 5
    held[0].kept = held[0].copying = False  # The turn was lost.
    assert headroom_days(metrics) == 5
    held[0].kept = True
    assert headroom_days(metrics) == 11


def test_lost_body_is_not_at_risk_until_revived() -> None:
    held = [Held(0, NOW_MS - 20 * DAY_MS, lost=True), Held(1, NOW_MS - 3 * DAY_MS)]
    metrics = watching(HeldBroker([HeldOwner(HeldLedger(held=held))]))
    assert headroom_days(metrics) == 11
    held[0].lost = False
    assert headroom_days(metrics) == -6


def test_headroom_is_never_overstated() -> None:
    copied = 3 * LOOKED_AT_MAX
    held = [Held(n, NOW_MS - 2 * DAY_MS + n, kept=n < copied) for n in range(copied + 10)]
    owner = HeldOwner(HeldLedger(held=held))
    metrics = watching(HeldBroker([owner]))
    true_s = 12 * 86400 + copied / 1000
    seen = [samples(metrics)["half_retention_headroom_seconds", ()] for _ in range(5)]
    assert seen == sorted(seen)
    assert seen[0] < true_s
    assert seen[-1] == true_s
    before = owner.ledger.looked_at
    samples(metrics)
    assert owner.ledger.looked_at - before == 10


def test_reports_of_owners_are_counted(metrics: Metrics) -> None:
    metrics.lost(3)
    metrics.snapshot_written(0.2, 1000)
    metrics.snapshot_written(0.3, 900)
    metrics.snapshot_failed()
    found = samples(metrics)
    assert found["lost_undecided_total", ()] == 3
    assert found["snapshot_seconds_count", ()] == 2
    assert found["snapshot_entries", ()] == 900
    assert found["snapshot_failed_total", ()] == 1


def test_scrape_time_is_independent_of_pending() -> None:
    pending = {f"g{n}": 1000 for n in range(1000)}
    ledgers = [HeldLedger(dict(pending), oldest=dict.fromkeys(pending, NOW_MS)) for _ in range(4)]
    metrics = watching(HeldBroker([HeldOwner(ledger) for ledger in ledgers]))
    assert min(timeit.repeat(metrics.text, number=1, repeat=3)) < 0.2
    text = samples(metrics)
    assert sum(value for (name, _), value in text.items() if name == "pending") == 4_000_000


# --- audits ------------------------------------------------------------------------------------


DRIFT = "audit_drift"
SUCCESS = "audit_last_success_timestamp_seconds"
BATCH, STREAM = f"{SUCCESS}/batch", f"{SUCCESS}/stream"


def news(ended_ms: int = 1000, **drift: int) -> bytes:
    return encode_news(
        AuditNews(
            run="r",
            mode="full",
            started_ms=0,
            ended_ms=ended_ms,
            transactions=5,
            states={},
            drift={"lost": 0, "late": 0, **drift},
        )
    )


def shown(metrics: Metrics) -> dict[str, float]:
    return {
        dict(labels).get("kind") or f"{SUCCESS}/{dict(labels)['mode']}": value
        for (name, labels), value in samples(metrics).items()
        if name in (DRIFT, SUCCESS)
    }


@pytest.fixture
def audit(metrics: Metrics) -> AuditMetrics:
    return AuditMetrics(metrics)


def test_no_series_before_the_first_audit(metrics: Metrics, audit: AuditMetrics) -> None:
    assert shown(metrics) == {}
    audit.changed("batch", news(1_700_000_000_500))
    assert shown(metrics) == {"lost": 0, "late": 0, BATCH: 1_700_000_000.5}


def test_worse_of_batch_and_stream_counts(metrics: Metrics, audit: AuditMetrics) -> None:
    audit.changed("batch", news(5000, lost=3))
    audit.changed("stream", news(9000, lost=1, late=2))
    assert shown(metrics) == {"lost": 3, "late": 2, BATCH: 5, STREAM: 9}
    audit.changed("batch", news(7000))
    assert shown(metrics) == {"lost": 1, "late": 2, BATCH: 7, STREAM: 9}
    audit.changed("stream", None)
    assert shown(metrics) == {"lost": 0, "late": 0, BATCH: 7}
    audit.changed("batch", None)
    assert shown(metrics) == {}


def test_quarantined_records_are_counted_by_kind(metrics: Metrics, audit: AuditMetrics) -> None:
    def counts() -> dict[str, float]:
        name = "audit_set_aside_records"
        found = samples(metrics).items()
        return {dict(labels)["mode"]: value for (each, labels), value in found if each == name}

    assert counts() == {}
    read = decode_news(news())
    found = UnreadRecord("orders", 3, 7, "its txb-id is no transaction id")
    result = msgspec.structs.replace(
        read, quarantined=5, set_aside=[found], missing_targets={"gone": 2}
    )
    assert decode_news(encode_news(result)) == result
    audit.changed("batch", encode_news(result))
    # A record of an older version does not count quarantined records.
    old = msgspec.json.decode(news())
    for name in ("set_aside", "missing_targets"):
        del old[name]
    audit.changed("stream", msgspec.json.encode(old))
    assert counts() == {"batch": 5, "stream": 0}


def test_checks_and_acknowledged_findings_of_a_batch(metrics: Metrics, audit: AuditMetrics) -> None:
    def values(family: str) -> dict[tuple[str, ...], float]:
        found = samples(metrics).items()
        return {
            tuple(dict(labels).values()): value for (name, labels), value in found if name == family
        }

    assert (values("audit_check_failed"), values("audit_acknowledged")) == ({}, {})
    checks = [CheckNews("slow", "critical", False), CheckNews("few", "error", True)]
    result = msgspec.structs.replace(decode_news(news()), checks=checks, acknowledged={"lost": 3})
    audit.changed("batch", encode_news(result))
    audit.changed("stream", news(9000))
    assert values("audit_check_failed") == {("slow", "critical"): 1, ("few", "error"): 0}
    assert values("audit_acknowledged") == {("lost",): 3}
    assert values("audit_drift")[("lost",)] == 0
    batch = next(one for one in audit.overviews() if one.mode == "batch")
    assert batch.failed_checks == {"slow": "critical"}
    audit.changed("batch", news())
    assert values("audit_check_failed") == {}


def test_load_of_the_stream_is_shown_until_its_record_is_deleted(
    metrics: Metrics, audit: AuditMetrics
) -> None:
    def shown() -> dict[str, float]:
        found = samples(metrics).items()
        return {
            " ".join([name, *(value for _, value in labels)]): value
            for (name, labels), value in found
            if name.startswith("audit_stream_")
        }

    figures = StreamFigures(unread=7, open=3, ended=5, state_bytes=100, batch_ms=1500)
    result = encode_news(msgspec.structs.replace(decode_news(news()), stream=figures))
    assert decode_news(result).stream == figures
    audit.changed("batch", news(5000))
    assert shown() == {}
    audit.changed("stream", result)
    assert shown() == {
        "audit_stream_unread_records": 7,
        "audit_stream_transactions open": 3,
        "audit_stream_transactions ended": 5,
        "audit_stream_state_bytes": 100,
        "audit_stream_batch_seconds": 1.5,
    }
    audit.changed("stream", None)
    assert shown() == {}


def test_newer_version_is_logged_and_skipped(metrics: Metrics, audit: AuditMetrics) -> None:
    audit.changed("batch", news(lost=4))
    with structlog.testing.capture_logs() as lines:
        audit.changed("batch", b'{"v":2,"drift":"otherwise"}')
    assert [line["log_level"] for line in lines] == ["warning"]
    assert "newer" in lines[0]["event"]
    assert shown(metrics)["lost"] == 4


def broken() -> dict[str, bytes]:
    good = msgspec.json.decode(news())
    return {
        "empty": b"",
        "binary": b"\xff\xfe\x00",
        "no object": b"[1]",
        "no version": b"{}",
        "version of another type": b'{"v":"1"}',
        "deep": b'{"v":1,"x":' + b"[" * 100_000,
        "negative": msgspec.json.encode({**good, "drift": {"lost": -1}}),
        "huge": msgspec.json.encode({**good, "drift": {"lost": 0}}).replace(
            b'"ended_ms":1000', b'"ended_ms":' + b"9" * 400
        ),
        "no number": msgspec.json.encode({**good, "drift": {"lost": None}}),
        "a kind that is no label": msgspec.json.encode({**good, "drift": {'a"}\n': 1}}),
        "too many kinds": msgspec.json.encode({**good, "drift": {f"k{n}": 1 for n in range(999)}}),
    }


@pytest.mark.parametrize("value", broken().values(), ids=broken().keys())
def test_undecodable_audit_record_changes_nothing(
    metrics: Metrics, audit: AuditMetrics, value: bytes
) -> None:
    audit.changed("batch", news(lost=1))
    with structlog.testing.capture_logs() as lines:
        audit.changed("batch", value)
        audit.changed("stream", value)
    assert len(lines) == 2
    assert shown(metrics) == {"lost": 1, "late": 0, BATCH: 1}


def test_unknown_audit_keys_are_skipped(metrics: Metrics, audit: AuditMetrics) -> None:
    with structlog.testing.capture_logs() as lines:
        audit.changed("unknown", news(lost=1))
    assert (lines, shown(metrics)) == ([], {})
