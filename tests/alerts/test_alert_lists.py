"""Alerts, their unit tests, their runbooks, the metrics and the commands that they name agree."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.alerts import promql
from txbroker.consumer.statistics import METRICS
from txbroker.contract.service import CHECKS_FAILING_MIN, CHECKS_FAILING_SHARE
from txbroker.diagnosis.limits import LIMITS, percent, span
from txbroker.diagnosis.table import AUDIT_STALE, DIAGNOSES
from txbroker.proxy.observe.metrics import Metrics
from txbroker.relay.metrics import METRICS as RELAY_METRICS

ROOT = Path(__file__).parents[2]
FILES = ROOT / "charts/txbroker/files"
RUNBOOKS = ROOT / "docs/runbooks"
VALUES = yaml.safe_load((ROOT / "charts/txbroker/values.yaml").read_text())
RUNBOOKS_URL = VALUES["prometheusRule"]["runbooksUrl"]
SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


RULES = rules()
NAMES = {rule["alert"] for rule in RULES}
DESCRIBED = [*Metrics().described(), *METRICS, *RELAY_METRICS]
KNOWN = promql.series({one.name: (one.kind, one.labels) for one in DESCRIBED})
PAGES = sorted(path for path in RUNBOOKS.glob("*.md") if path.name != "README.md")


def rule_id(rule: dict[str, Any]) -> str:
    return "-".join(filter(None, [rule["alert"], rule["labels"].get("scope")]))


def test_alerts_and_runbooks_are_those_of_the_table() -> None:
    made = runpy.run_path(str(ROOT / "docs/diagnoses.py"))["pages"]()
    stale = [path.name for path, text in made.items() if path.read_text() != text]
    assert stale == [], "run make docs"
    assert {one.name for one in DIAGNOSES} == NAMES


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_alert_queries_exported_metrics(rule: dict[str, Any]) -> None:
    assert promql.names(rule["expr"])
    assert promql.unknown(rule["expr"], KNOWN) == []


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_alert_texts_use_labels_that_it_has(rule: dict[str, Any]) -> None:
    texts = rule["annotations"]
    assert set(texts) == {"summary", "description", "runbook_url"}
    assert texts["runbook_url"] == f"{RUNBOOKS_URL}{rule['alert']}.md"
    assert rule["labels"]["severity"] in ("critical", "warning")
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(texts.values())))
    kept = promql.TARGET.union(*(KNOWN[name] for name in promql.names(rule["expr"])))
    grouped = re.findall(r"by \(([^)]*)\)", rule["expr"])
    # What the outermost grouping drops, no text can show.
    assert shown <= (set(re.findall(r"\w+", grouped[0])) if grouped else kept)


def test_unknown_metric_or_label_is_found() -> None:
    expression = (
        'sum by (group, topic) (rate(txbroker_checks_total{outcome="commit", owner="a"}[5m]))'
        " / txbroker_cheks_total"
    )
    assert promql.unknown(expression, KNOWN) == [
        "txbroker_cheks_total is no series",
        "txbroker_checks_total has no label owner",
        "nothing below `by (group, topic)` has the label topic",
    ]


def test_alert_unit_tests_cover_firing_and_silence() -> None:
    tried = yaml.safe_load((FILES / "alerts_test.yaml").read_text())["tests"]
    checks = [check for test in tried for check in test["alert_rule_test"]]
    loud = {(c["alertname"]): c["exp_alerts"] for c in checks if c["exp_alerts"]}
    silent = {check["alertname"] for check in checks if not check["exp_alerts"]}
    assert set(loud) == silent == NAMES
    scopes = {
        alert["exp_labels"].get("scope")
        for check in checks
        for alert in check["exp_alerts"]
        if check["alertname"] in ("TxBrokerNotReady", "TxBrokerConsumerSetAside")
    }
    assert scopes == {rule["labels"].get("scope") for rule in RULES} - {None}


# --- runbooks --------------------------------------------------------------------------------


def test_alerts_and_runbooks_match() -> None:
    assert {page.stem for page in PAGES} == NAMES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_runbook_has_every_section(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS
    diagnosis = text.partition("## Diagnosis")[2].partition("## Mitigation")[0]
    assert "```\ntxbroker " in diagnosis
    assert len(text.split()) < 550


@pytest.mark.parametrize(
    ("page", "row", "limit"),
    [
        ("how-to/doctor.md", "kafka-clocks", span(LIMITS.clocks_s)),
        ("how-to/doctor.md", "proxies-latency", span(LIMITS.prepare_s)),
        ("how-to/doctor.md", "groups-answering", percent(CHECKS_FAILING_SHARE)),
        ("how-to/doctor.md", "groups-answering", f"at least {CHECKS_FAILING_MIN}"),
        ("how-to/doctor.md", "groups-deciding", f"{LIMITS.pending:,}"),
        ("how-to/doctor.md", "pending-age", span(LIMITS.pending_age_s)),
        ("how-to/doctor.md", "promotion", span(LIMITS.promotion_s)),
        ("how-to/doctor.md", "retention-headroom", percent(LIMITS.headroom_share)),
        ("how-to/doctor.md", "hanging-transactions", span(LIMITS.transaction_s)),
        ("how-to/doctor.md", "audit-fresh", span(LIMITS.audit_s)),
        ("how-to/doctor.md", "audit-stream", span(LIMITS.stream_s)),
        ("how-to/doctor.md", "relays-waiting", span(LIMITS.relay_s)),
        ("how-to/doctor.md", "relays-undecided", span(LIMITS.undecided_s)),
        (
            "operate/capacity.md",
            "txbroker_half_retention_headroom_seconds",
            percent(LIMITS.headroom_share),
        ),
    ],
)
def test_pages_name_the_limit(page: str, row: str, limit: str) -> None:
    (found,) = re.findall(rf"^\| `{row}` \|.*$", (ROOT / "docs" / page).read_text(), re.M)
    assert limit in found


def test_audits_are_stale_after_two_of_the_usual_intervals() -> None:
    schedule = VALUES["audit"]["schedule"]
    once_a_day = re.fullmatch(r"(\d+) (\d+) \* \* \*", schedule)
    assert once_a_day
    assert span(LIMITS.audit_s) == "2 days"
    page = (ROOT / "docs/how-to/schedule-the-audit.md").read_text()
    minute, hour = (int(number) for number in once_a_day.groups())
    assert f"OnCalendar={hour:02}:{minute:02}\n" in page
    shown = re.findall(r'(?:^|schedule=")([\d*/,-]+(?: [\d*/,-]+){4})', page, re.M)
    assert shown == [schedule, schedule]
    for text in (page, AUDIT_STALE.todo, (ROOT / "docs/operate/kubernetes.md").read_text()):
        assert "every night" in text
    runbook = (RUNBOOKS / "TxBrokerAuditStale.md").read_text()
    assert "two intervals" in runbook
    assert "once a night" in runbook


def test_docs_name_existing_metrics() -> None:
    reference = (ROOT / "docs/reference/metrics.md").read_text()
    listed = set(re.findall(r"^\| `(txbroker_\w+)` \|", reference, re.M))
    assert listed == {one.name for one in DESCRIBED}
    wrong = {
        f"{page.name}: {name}"
        for page in [*PAGES, RUNBOOKS / "README.md"]
        for name in re.findall(r"\btxbroker_[a-z_]+(?=[`{\[])", page.read_text())
        # The barrier's table in a group's own database.
        if name not in KNOWN and name not in listed | {"txbroker_barrier"}
    }
    assert wrong == set()
