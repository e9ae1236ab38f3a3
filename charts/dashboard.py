"""The Grafana dashboard, made from one line for each panel.

`python charts/dashboard.py > charts/txbroker/files/dashboard.json` renews it; a test asserts that
it is current, and that every query asks for what proxies show.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from txbroker.diagnosis.limits import LIMITS

Json = dict[str, Any]

SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24


@dataclass(frozen=True)
class Query:
    """A query and the legend of its result."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A panel; its `kind` decides its look.

    Args:
        kind: `stat`, `timeseries` or `table`.
        width, height: of the 24 columns; in Grafana's units of 30 pixels.
        unit: as Grafana names it.
        red_from: the value from which it is red, where there is one.
        red_below: the value below which it is red.
        units: of a table's columns.
        hidden: columns of a table that are left out.
    """

    kind: str
    title: str
    text: str
    queries: Sequence[Query]
    width: int = 8
    height: int = 8
    unit: str = "short"
    red_from: float | None = None
    red_below: float | None = None
    units: Sequence[tuple[str, str]] = ()
    hidden: Sequence[str] = ()

    def lettered(self) -> Iterable[tuple[str, Query]]:
        """Return the queries, each with the letter by which Grafana knows it."""
        return zip(ascii_uppercase, self.queries, strict=False)

    def json(self, number: int, x: int, y: int) -> Json:
        """Return it as Grafana reads it."""
        made = {"stat": _stat, "timeseries": _timeseries, "table": _table}[self.kind](self)
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": SOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "targets": [_target(self.kind, *each) for each in self.lettered()],
            **made,
        }


def _target(kind: str, letter: str, query: Query) -> Json:
    over_time = kind == "timeseries"
    return {
        "refId": letter,
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": over_time,
        "instant": not over_time,
        **({"format": "table"} if kind == "table" else {}),
    }


def _thresholds(panel: Panel) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.red_from is not None:
        steps.append({"color": "red", "value": panel.red_from})
    if panel.red_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    return {"mode": "absolute", "steps": steps}


def _stat(panel: Panel) -> Json:
    defaults = {"unit": panel.unit, "noValue": "no data", "thresholds": _thresholds(panel)}
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


def _timeseries(panel: Panel) -> Json:
    line = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 0, "showPoints": "never"}
    if panel.red_from is not None:
        # Where the alert begins.
        line["thresholdsStyle"] = {"mode": "dashed"}
    defaults = {"unit": panel.unit, "min": 0, "custom": line, "thresholds": _thresholds(panel)}
    if panel.red_from is None:
        defaults["color"] = {"mode": "palette-classic"}
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _table(panel: Panel) -> Json:
    columns = {f"Value #{letter}": q.legend for letter, q in panel.lettered()}
    return {
        "fieldConfig": {
            "defaults": {"noValue": "none", "custom": {"align": "auto", "filterable": True}},
            "overrides": [
                {
                    "matcher": {"id": "byName", "options": name},
                    "properties": [{"id": "unit", "value": unit}],
                }
                for name, unit in panel.units
            ],
        },
        "options": {"showHeader": True, "cellHeight": "sm"},
        "transformations": [
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": dict.fromkeys(["Time", *panel.hidden], True),
                    "renameByName": columns if len(panel.queries) > 1 else {},
                },
            },
        ],
    }


# --- all together ----------------------------------------------------------------------------


def laid_out(rows: Mapping[str, Sequence[Panel]]) -> list[Json]:
    """Return all panels, row by row, each from left to right."""
    made: list[Json] = []
    y = 0
    for title, row in rows.items():
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        head = {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}
        made.append({"id": len(made) + 1, **head})
        x, y = 0, y + 1
        for panel in row:
            made.append(panel.json(len(made) + 1, x, y))
            x += panel.width
            if x == WIDTH or panel is row[-1]:
                x, y = 0, y + panel.height
    return made


def variable(label: str, asked: str) -> Json:
    """Return a choice among the values of a label. "All" includes series without it."""
    query = f"label_values({asked}, {label})"
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
    }


# --- what it shows ---------------------------------------------------------------------------

HERE = 'cluster=~"$cluster", namespace=~"$namespace", job=~"$job"'
GROUP = f'{HERE}, group=~"$group"'
PLACE = "cluster, namespace, job"
RATE = "[$__rate_interval]"


# --- queries ---------------------------------------------------------------------------


def own(metric: str, where: str = HERE) -> str:
    """Return a metric of the proxies that were chosen."""
    return f"txbroker_{metric}{{{where}}}"


def rate(metric: str, by: str = "", where: str = HERE) -> str:
    """Return how fast a counter grows, per second."""
    return f"sum{f' by ({by})' if by else ''} (rate({own(metric, where)}{RATE}))"


def quantile(share: float, histogram: str, by: str = "", where: str = HERE) -> str:
    """Return a quantile of a histogram."""
    labels = ", ".join(filter(None, ["le", by]))
    buckets = rate(f"{histogram}_bucket", labels, where)
    return f"histogram_quantile({share}, {buckets})"


def or_zero(expr: str) -> str:
    """Return 0 where proxies are there and nothing is found, and nothing where none are: an empty
    screen must not look like a healthy one."""
    return f"{expr} or 0 * count({own('build_info')})"


def stat(title: str, text: str, expr: str, unit: str = "short", **more: Any) -> Panel:
    """One number."""
    return Panel("stat", title, text, (Query(expr, title),), 4, 3, unit, **more)


def lines(title: str, text: str, unit: str, *queries: tuple[str, str], **more: Any) -> Panel:
    """Lines over time."""
    return Panel("timeseries", title, text, [Query(*each) for each in queries], unit=unit, **more)


def by(label: str, title: str, text: str, unit: str, expr: str, **more: Any) -> Panel:
    """A line over time for each value of a label."""
    return lines(title, text, unit, (expr, f"{{{{{label}}}}}"), **more)


def latency(title: str, text: str, histogram: str) -> Panel:
    """The quantiles of a histogram."""
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
    queries = [(quantile(share, histogram), name) for name, share in shares.items()]
    return lines(title, text, "s", *queries)


def of_process(metric: str) -> str:
    """Return something of the proxies' processes."""
    return f"{metric} and on ({PLACE}, instance) {own('build_info')}"


WITHOUT_OWNER = (
    f"sum(max by ({PLACE}) (sum by ({PLACE}, instance) ({own('partitions')}))"
    f" - sum by ({PLACE}) ({own('owned_partitions')}))"
)
NO_DECISION = f'{GROUP}, outcome=~"unknown|unclear"'
UNREACHED = f'{GROUP}, outcome=~"unreachable|returned"'
ERRORS = f'{HERE}, status=~"4xx|5xx"'
NOT_ELSEWHERE = f'{HERE}, state!="elsewhere"'
# An alert without a namespace or job is shown for every selection.
FIRING = (
    'ALERTS{alertname=~"TxBroker.*", alertstate="firing", cluster=~"$cluster|", '
    'namespace=~"$namespace|", job=~"$job|"}'
)


# --- panels ---------------------------------------------------------------------------

OVERVIEW = [
    stat("Proxies ready", "Caught up on their partitions.", f"sum({own('ready')})", red_below=1),
    stat("Proxies not ready", "See their /readyz.", f"sum(1 - {own('ready')})", red_from=1),
    stat(
        "Partitions without owner", "Served by no proxy that is scraped.", WITHOUT_OWNER, red_from=1
    ),
    stat(
        "Oldest commit not visible",
        "How long the consumers of a committed transaction have been waiting.",
        or_zero(f"max({own('promotion_oldest_age_seconds')})"),
        "s",
        red_from=60,
    ),
    stat(
        "Refused",
        "Committed, and a target does not take them.",
        or_zero(f"sum({own('refused')})"),
        red_from=1,
    ),
    stat(
        "Lost",
        "Messages gone before they were settled, counted since the proxies were started.",
        f"sum({own('lost_undecided_total')})",
        red_from=1,
    ),
    stat("Pending", "Undecided transactions.", or_zero(f"sum({own('pending')})")),
    stat(
        "Oldest pending",
        "Age of the oldest undecided transaction.",
        or_zero(f"max({own('pending_oldest_age_seconds')})"),
        "s",
        red_from=LIMITS.pending_age_s,
    ),
    stat("Parked", "Waiting for an operator.", or_zero(f"sum({own('parked')})"), red_from=1),
    stat(
        "Unreachable groups",
        "Groups without a reachable instance; the highest count of all proxies.",
        f"max({own('unreachable_groups')})",
        red_from=1,
    ),
    stat(
        "Retention left",
        "Share of the half topic's retention left for transactions neither settled nor copied.",
        f"min({own('half_retention_headroom_seconds')} / {own('half_retention_seconds')})"
        f" or count({own('build_info')}) ^ 0",
        "percentunit",
        red_below=LIMITS.headroom_share,
    ),
    stat(
        "Audit drift",
        "Transactions that did not end as they were decided, by the newest audit.",
        f"sum(max by ({PLACE}, kind) ({own('audit_drift')}))",
        red_from=1,
    ),
    Panel(
        "table",
        "Firing alerts",
        "Each has a runbook of its name in docs/runbooks.",
        (Query(FIRING, ""),),
        height=7,
        hidden=("Value", "__name__", "alertstate"),
    ),
    lines(
        "Messages",
        "Stored and promoted, per second.",
        "mps",
        (rate("prepared_total"), "prepared"),
        (rate("promoted_total"), "promoted"),
        height=7,
    ),
    lines(
        "On their way",
        "Transactions that are neither visible nor rolled back.",
        "short",
        (f"sum({own('pending')})", "undecided"),
        (f"sum({own('promotion_lag_markers')})", "decided, not promoted"),
        height=7,
    ),
    lines("Decisions", "Per second.", "ops", (rate("decisions_total", "decision"), "{{decision}}")),
    latency(
        "Decision latency", "From a decision's call to its answer.", "decision_latency_seconds"
    ),
    latency("Prepare latency", "From a prepare's call to its answer.", "prepare_latency_seconds"),
    lines(
        "Turned away",
        "Calls that met a limit, and decisions contrary to the standing one, per second.",
        "reqps",
        (rate("overloaded_total", "operation"), "{{operation}}"),
        (rate("conflicts_total"), "contrary decision"),
        width=WIDTH,
        height=6,
    ),
]

GROUPS = [
    Panel(
        "table",
        "Groups",
        "How each group stands now.",
        (
            Query(f"sum by (group) ({own('pending', GROUP)})", "pending"),
            Query(f"max by (group) ({own('pending_oldest_age_seconds', GROUP)})", "oldest"),
            Query(f"sum by (group) ({own('parked', GROUP)})", "parked"),
            Query(f"sum by (group) ({own('sessions', GROUP)})", "sessions"),
            Query(rate("decisions_total", "group", GROUP), "decisions"),
            Query(rate("checks_total", "group", NO_DECISION), "failing checks"),
            Query(rate("checks_total", "group", UNREACHED), "unreached"),
        ),
        width=WIDTH,
        units=(
            ("oldest", "s"),
            ("decisions", "ops"),
            ("failing checks", "ops"),
            ("unreached", "ops"),
        ),
    ),
    lines(
        "Pending", "Undecided.", "short", (f"sum by (group) ({own('pending', GROUP)})", "{{group}}")
    ),
    by(
        "group",
        "Oldest pending",
        "Age of the oldest undecided transaction.",
        "s",
        f"max by (group) ({own('pending_oldest_age_seconds', GROUP)})",
        red_from=LIMITS.pending_age_s,
    ),
    by(
        "group",
        "Parked",
        "Undecided after the last attempt.",
        "short",
        f"sum by (group) ({own('parked', GROUP)})",
    ),
]

CHECKS = [
    by(
        "outcome",
        "Checks by outcome",
        "Per second. unreachable, returned and later use up no attempt; unknown and unclear do.",
        "ops",
        rate("checks_total", "outcome", GROUP),
    ),
    by(
        "group",
        "Checks without a decision",
        "Answered with unknown, with an error, or not in time; per second.",
        "ops",
        rate("checks_total", "group", NO_DECISION),
    ),
    by(
        "group",
        "Unreachable",
        "Attempts that reached no instance, per second.",
        "ops",
        rate("checks_total", "group", UNREACHED),
    ),
    by(
        "group",
        "Time of a check, p99",
        "From the question to its answer, or to its timeout.",
        "s",
        quantile(0.99, "check_duration_seconds", "group", GROUP),
    ),
    lines(
        "Who decides",
        "Producers, checks or people; per second.",
        "ops",
        (rate("decisions_total", "decision, source"), "{{decision}} by {{source}}"),
    ),
    by(
        "group",
        "Sessions",
        "Of SDKs. Groups that are checked over HTTP have none.",
        "short",
        f"sum by (group) ({own('sessions', GROUP)})",
    ),
]

PROMOTION = [
    by(
        "instance",
        "Oldest commit not visible",
        "How long consumers have been waiting, by proxy.",
        "s",
        f"max by (instance) ({own('promotion_oldest_age_seconds')})",
        red_from=60,
    ),
    by(
        "instance",
        "Decided, not promoted",
        "Markers that were written, by proxy.",
        "short",
        f"sum by (instance) ({own('promotion_lag_markers')})",
    ),
    latency(
        "Promotion latency",
        "From a commit's marker until consumers can see it.",
        "promotion_latency_seconds",
    ),
    by(
        "topic",
        "Prepared by topic",
        "Messages stored, per second.",
        "mps",
        rate("prepared_total", "topic"),
    ),
    by(
        "topic",
        "Promoted by topic",
        "Messages made visible, per second.",
        "mps",
        rate("promoted_total", "topic"),
    ),
    by(
        "topic",
        "Refused by topic",
        "Committed transactions that the topic does not take.",
        "short",
        f"sum by (topic) ({own('refused')})",
    ),
]

PROXIES = [
    lines(
        "Partitions by state",
        "What each proxy does with half partitions, but for those that are another's.",
        "short",
        (
            f"sum by (instance, state) ({own('partitions', NOT_ELSEWHERE)})",
            "{{instance}} {{state}}",
        ),
    ),
    lines(
        "Errors of Kafka",
        "What Kafka did not carry out, partitions that another owner took, and records of other "
        "clients in txbroker's own topics; per second.",
        "ops",
        (rate("kafka_errors_total", "operation"), "{{operation}}"),
        (rate("fenced_total"), "fenced"),
        (rate("foreign_records_total", "topic"), "foreign in {{topic}}"),
    ),
    lines(
        "Retention left",
        "Until retention reaches transactions neither settled nor copied, and the whole of it.",
        "s",
        (f"min({own('half_retention_headroom_seconds')})", "left"),
        (f"min({own('half_retention_seconds')})", "retention"),
    ),
    lines(
        "Recovery",
        "From gaining a partition until it is caught up.",
        "s",
        (quantile(0.5, "recovery_seconds"), "p50"),
        (quantile(0.99, "recovery_seconds"), "p99"),
    ),
    by(
        "instance",
        "Writing a snapshot, p99",
        "Beside the work.",
        "s",
        quantile(0.99, "snapshot_seconds", "instance"),
    ),
    by(
        "instance",
        "Snapshots that failed",
        "Per second; the next one is tried anyway.",
        "ops",
        rate("snapshot_failed_total", "instance"),
    ),
    by(
        "instance",
        "Entries of a snapshot",
        "Transactions in the one that was written last.",
        "short",
        f"max by (instance) ({own('snapshot_entries')})",
    ),
    by(
        "instance",
        "Event-loop lag, p99",
        "How late a timer runs: nothing else is served meanwhile.",
        "s",
        quantile(0.99, "event_loop_lag_seconds", "instance"),
    ),
    by(
        "operation",
        "HTTP requests",
        "Per second, by operation.",
        "reqps",
        rate("http_requests_total", "operation"),
    ),
    lines(
        "HTTP errors",
        "Answers of the classes 4xx and 5xx, per second.",
        "reqps",
        (rate("http_requests_total", "operation, status", ERRORS), "{{operation}} {{status}}"),
    ),
    by("instance", "Memory", "Resident.", "bytes", of_process("process_resident_memory_bytes")),
    by(
        "instance",
        "CPU",
        "Cores in use.",
        "short",
        of_process(f"rate(process_cpu_seconds_total{RATE})"),
    ),
    lines(
        "Topics and files",
        "Problems of txbroker's own topics, and files of credentials whose last content "
        "stays in force; txbroker doctor names both.",
        "short",
        (f"max({own('topic_problems')})", "topic problems"),
        (f"sum by (setting) ({own('files_not_read')})", "{{setting}} not read"),
        width=12,
        height=6,
    ),
    Panel(
        "table",
        "Versions",
        "Which build runs where.",
        (Query(f"count by (instance, version, python) ({own('build_info')})", ""),),
        width=12,
        height=6,
        hidden=("Value",),
    ),
]

AUDIT = [
    by(
        "kind",
        "Drift by kind",
        "Transactions that did not end as they were decided. Nothing until an audit has run.",
        "short",
        f"max by (kind) ({own('audit_drift')})",
        width=16,
    ),
    by(
        "mode",
        "Set aside by the newest audit",
        "Records that could not be judged, those of other clients included.",
        "short",
        f"max by (mode) ({own('audit_set_aside_records')})",
        width=8,
    ),
    by(
        "check",
        "Failed checks",
        "1 where a check of the newest batch audit failed. Nothing without checks.",
        "short",
        f"max by (check) ({own('audit_check_failed')})",
        width=8,
    ),
    by(
        "kind",
        "Acknowledged findings",
        "Of the newest batch audit; not counted as drift until a date.",
        "short",
        f"max by (kind) ({own('audit_acknowledged')})",
        width=8,
    ),
    Panel(
        "stat",
        "Since the newest audit",
        "How long ago the newest batch ended, and up to when a stream has judged.",
        (
            Query(
                f"time() - max by (mode) ({own('audit_last_success_timestamp_seconds')})",
                "{{mode}}",
            ),
        ),
        unit="s",
        red_from=LIMITS.audit_s,
    ),
    lines(
        "Lag of the streaming audit",
        "How long ago the moment is up to which it has judged, and how long its batches take.",
        "s",
        (
            "time() - max("
            + own("audit_last_success_timestamp_seconds", f'{HERE}, mode="stream"')
            + ")",
            "lag",
        ),
        (f"max({own('audit_stream_batch_seconds')})", "batch"),
    ),
    lines(
        "Load of the streaming audit",
        "Records that it has not read, and transactions in its state.",
        "short",
        (f"max({own('audit_stream_unread_records')})", "unread records"),
        (f"max by (state) ({own('audit_stream_transactions')})", "{{state}}"),
    ),
    lines(
        "State of the streaming audit",
        "Size of its files.",
        "bytes",
        (f"max({own('audit_stream_state_bytes')})", "files"),
    ),
]

ROWS = {
    "Overview": OVERVIEW,
    "Groups": GROUPS,
    "Checks": CHECKS,
    "Promotion": PROMOTION,
    "Proxies and Kafka": PROXIES,
    "Audit": AUDIT,
}


# --- put together ----------------------------------------------------------------------------


def variables() -> list[Json]:
    """Return what can be chosen above the panels."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    asked = '{__name__=~"txbroker_(pending|parked|sessions|checks_total)", ' + f"{HERE}}}"
    return [
        {**source, "query": "prometheus", "refresh": 1, "current": {}, "options": []},
        variable("cluster", "txbroker_build_info"),
        variable("namespace", 'txbroker_build_info{cluster=~"$cluster"}'),
        variable("job", 'txbroker_build_info{cluster=~"$cluster", namespace=~"$namespace"}'),
        variable("group", asked),
    ]


def dashboard() -> Json:
    """Return the whole of it."""
    return {
        "uid": "txbroker",
        "title": "txbroker",
        "description": "Transactional messages for Apache Kafka: pending transactions, "
        "promotion, checks, recovery and audit.",
        "tags": ["txbroker", "kafka"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "annotations": {"list": []},
        "templating": {"list": variables()},
        "panels": laid_out(ROWS),
    }


def text() -> str:
    """Return the file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    print(text(), end="")  # noqa: T201 - the file goes where the shell sends it
