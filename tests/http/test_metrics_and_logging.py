"""Metrics of one proxy, and log lines that never hold a secret."""

from __future__ import annotations

import json
import logging

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from txbroker.core.ledger import ApplyResult, Effect
from txbroker.core.records import Decision, Half, Message, Source
from txbroker.core.transaction import Transaction, Verdict, places
from txbroker.proxy.observe import metrics as metrics_module
from txbroker.proxy.observe.logging import configure_logging, get_logger
from txbroker.proxy.observe.metrics import Gauges, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def visible_after(milliseconds: int, messages: int = 1) -> Transaction:
    half = Half("", "orders", (Message("payments"),) * messages)
    found = Transaction(half, 0, 0, b"", places(half.messages), None)
    found.verdict = Verdict(Decision.COMMIT, at_ms=1, source=Source.PRODUCER)
    found.promoted_at_ms = 1 + milliseconds
    return found


def test_events_are_counted() -> None:
    metrics = Metrics()
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

    assert found["txbroker_prepared_total", (("topic", "payments"),)] == 3
    decided = (("decision", "commit"), ("source", "producer"))
    assert found["txbroker_decisions_total", decided] == 1
    assert found["txbroker_promoted_total", (("topic", "payments"),)] == 3
    checked = (("group", "orders"), ("outcome", "commit"))
    assert found["txbroker_checks_total", checked] == 1
    assert found["txbroker_check_duration_seconds_count", (("group", "orders"),)] == 1
    assert found["txbroker_conflicts_total", ()] == 1
    assert found["txbroker_fenced_total", ()] == 1
    assert found["txbroker_overloaded_total", (("operation", "prepare"),)] == 1
    assert found["txbroker_kafka_errors_total", (("operation", "append"),)] == 1


def test_latencies_fall_into_buckets() -> None:
    metrics = Metrics()
    for seconds in (0.001, 0.003, 99.0):
        metrics.decisions_took(seconds)
    metrics.promoted([visible_after(milliseconds) for milliseconds in (1, 3, 99_000)])
    metrics.recovered(1.5)
    found = samples(metrics)

    for name in ("decision", "promotion"):
        bucket = f"txbroker_{name}_latency_seconds_bucket"
        assert found[bucket, (("le", "0.001"),)] == 1
        assert found[bucket, (("le", "0.005"),)] == 2
        assert found[bucket, (("le", "10.0"),)] == 2
        assert found[bucket, (("le", "+Inf"),)] == 3
        assert found[f"txbroker_{name}_latency_seconds_sum", ()] == pytest.approx(99.004)
    assert found["txbroker_recovery_seconds_count", ()] == 1


def test_gauges_are_read_and_merged_at_the_scrape() -> None:
    metrics = Metrics()
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

    assert found["txbroker_pending", (("group", "a"),)] == 3
    assert found["txbroker_pending", (("group", "b"),)] == 3
    assert found["txbroker_pending_oldest_age_seconds", (("group", "a"),)] == 7
    assert found["txbroker_owned_partitions", ()] == 3
    assert found["txbroker_half_retention_headroom_seconds", ()] == 60
    assert found["txbroker_ready", ()] == 0
    assert any(name == "txbroker_build_info" for name, _ in found)


def test_groups_beyond_the_limit_count_as_other() -> None:
    metrics = Metrics(group_labels_max=2)
    for group in ("a", "b", "c", "d", "a"):
        metrics.checks_ended(group, "commit", [0.1])
    metrics.watch(lambda: Gauges(pending={"c": 1, "d": 1}))
    found = samples(metrics)

    counted = {
        labels: value for (name, labels), value in found.items() if name == "txbroker_checks_total"
    }
    assert counted == {
        (("group", "a"), ("outcome", "commit")): 2,
        (("group", "b"), ("outcome", "commit")): 1,
        (("group", "other"), ("outcome", "commit")): 2,
    }
    assert found["txbroker_pending", (("group", "other"),)] == 2


def test_one_share_cannot_take_all_labels() -> None:
    metrics = Metrics(group_labels_max=5, share_of=lambda group: group[:1])
    for number in range(9):
        metrics.checks_ended(f"shop-{number}", "commit", [0.1])
    metrics.checks_ended("bank", "commit", [0.1])
    checks = [labels for name, labels in samples(metrics) if name == "txbroker_checks_total"]
    shown = {dict(labels)["group"] for labels in checks}
    assert shown == {"shop-0", "shop-1", "shop-2", "shop-3", "bank", "other"}


def test_share_of_a_group_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape holds up all else, and groups are as many as producers make."""
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
        assert found["txbroker_pending", (("group", "shop-3"),)] == 1
        assert found["txbroker_pending", (("group", "other"),)] == 56


def test_no_share_is_read_when_all_labels_are_taken() -> None:
    asked: list[str] = []

    def share_of(group: str) -> str:
        asked.append(group)
        return group

    metrics = Metrics(group_labels_max=5, share_of=share_of)
    metrics.watch(lambda: Gauges(pending={f"g{number}": 1.0 for number in range(60)}))
    assert samples(metrics)["txbroker_pending", (("group", "other"),)] == 55
    assert asked == [f"g{number}" for number in range(5)]


def test_every_metric_is_described() -> None:
    metrics = Metrics()
    metrics.watch(lambda: Gauges(half_retention_headroom_seconds=1.0, ready=True))
    described = {one.name.removesuffix("_total") for one in metrics.described()}
    shown = {
        family.name
        for family in text_string_to_metric_families(metrics.text().decode())
        if family.name.startswith("txbroker_") and not family.name.endswith("_created")
    }
    assert shown <= described
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
