"""Results of audits in every proxy's metrics, and malformed results."""

from __future__ import annotations

import msgspec
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from txbroker.contract.audit import AuditNews, UnreadRecord, decode_news, encode_news
from txbroker.proxy.observe.audit_metrics import AuditMetrics
from txbroker.proxy.observe.metrics import Metrics

DRIFT = "txbroker_audit_drift"
SUCCESS = "txbroker_audit_last_success_timestamp_seconds"
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
        sample.labels.get("kind") or f"{SUCCESS}/{sample.labels['mode']}": sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name in (DRIFT, SUCCESS)
    }


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


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
        families = text_string_to_metric_families(metrics.text().decode())
        samples = (sample for family in families for sample in family.samples)
        name = "txbroker_audit_set_aside_records"
        return {each.labels["mode"]: each.value for each in samples if each.name == name}

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
    for field in ("set_aside", "missing_targets"):
        del old[field]
    audit.changed("stream", msgspec.json.encode(old))
    assert counts() == {"batch": 5, "stream": 0}


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
