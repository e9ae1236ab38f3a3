"""Write the alert rules, the heads of the runbooks and their index from the table that all reports
follow, `txbroker/diagnosis/table.py`: `python docs/diagnoses.py`.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from txbroker.diagnosis.rows import AlertRule, Diagnosis
from txbroker.diagnosis.table import DIAGNOSES

ROOT = Path(__file__).parents[1]
ALERTS = ROOT / "charts/txbroker/files/alerts.yaml"
RUNBOOKS = ROOT / "docs/runbooks"
RUNBOOKS_URL = "https://github.com/txbroker/txbroker/blob/main/docs/runbooks/"
WIDTH = 100

_HEAD = """\
# Prometheus alert rules for txbroker, made by `python docs/diagnoses.py`. As they stand they are a
# rules file (`rule_files` of prometheus.yml); the chart puts the same groups into a PrometheusRule.
# `promtool test rules alerts_test.yaml` tries them.
#
# Series of all proxies of an installation are brought together by cluster, namespace and job, so
# that a partition which moves from one proxy to another neither resolves an alert nor fires one.
# severity: critical pages an operator, warning can wait for the morning.
groups:
"""
_GROUPS = {
    "transactions": "",
    "checks": "",
    "promotion": "",
    "proxies": "",
    "audit": "",
    "consumers": "From the processes of consumers, which register `consumer.collector()`.",
    "relays": "From the processes of relays: `--metrics-listen`, or `relay.collector()`. Several "
    "relays of one outbox count the same rows.",
}
"""The groups of rules in order, each with its remark."""
_TABLE = re.compile(r"(?<=\| --- \| --- \| --- \| --- \|\n)(\|.*\n)+")

Rules = dict[str, list[tuple[Diagnosis, AlertRule]]]


def rules_by_alert() -> Rules:
    """Return the rules of each alert, alerts with a critical one first."""
    rules: Rules = {}
    for one in DIAGNOSES:
        if one.rules:
            rules.setdefault(one.name, []).extend((one, rule) for rule in one.rules)
    for its in rules.values():
        its.sort(key=lambda pair: not pair[1].critical)
    return dict(sorted(rules.items(), key=lambda item: not item[1][0][1].critical))


def pages() -> dict[Path, str]:
    """Return the text of each file that is made, wholly or in part."""
    rules = rules_by_alert()
    index = (RUNBOOKS / "README.md").read_text()
    made = {
        ALERTS: "".join(_alerts(rules)),
        RUNBOOKS / "README.md": _TABLE.sub(lambda _: "".join(_index(rules)), index, count=1),
    }
    for name, its in rules.items():
        page = RUNBOOKS / f"{name}.md"
        made[page] = _runbook_head(name, its) + page.read_text().partition("\n## ")[2]
    return made


def _alerts(rules: Rules) -> Iterator[str]:
    yield _HEAD
    for number, (group, remark) in enumerate(_GROUPS.items()):
        yield "\n" * (number > 0) + _comment(remark, "  ")
        yield f"  - name: txbroker-{group}\n    rules:\n"
        its = [pair for pairs in rules.values() for pair in pairs if pair[1].group == group]
        yield "\n".join(_rule(one, rule) for one, rule in its)


def _rule(one: Diagnosis, rule: AlertRule) -> str:
    labels = {"severity": rule.severity, "scope": rule.scope}
    lines = [
        f"      - alert: {one.name}",
        "        expr: |",
        textwrap.indent(rule.expr, " " * 10),
        *([f"        for: {rule.after}"] if rule.after else []),
        "        labels:",
        *(f"          {label}: {value}" for label, value in labels.items() if value),
        "        annotations:",
        f"          summary: {one.summary(rule)}",
        "          description: >-",
        _filled(rule.description, " " * 12),
        f"          runbook_url: {RUNBOOKS_URL}{one.name}.md",
    ]
    return _comment(rule.remark, " " * 6) + "\n".join([*lines, ""])


def _comment(text: str, indent: str) -> str:
    return f"{_filled(text, f'{indent}# ')}\n" if text else ""


def _filled(text: str, indent: str) -> str:
    # Templates of Prometheus stay in one piece.
    whole = re.sub(r"\{\{.*?\}\}", lambda found: found[0].replace(" ", "\0"), text)
    wrapped = textwrap.fill(
        whole, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    return wrapped.replace("\0", " ")


def _index(rules: Rules) -> Iterator[str]:
    for name, its in rules.items():
        for number, (_, rule) in enumerate(its):
            link = "" if number else f" [{name}]({name}.md)"
            yield f"|{link} | {rule.severity} | {_fires(rule)} | {rule.after or 'at once'} |\n"


def _runbook_head(name: str, rules: list[tuple[Diagnosis, AlertRule]]) -> str:
    lines = [f"# {name}"]
    for _, rule in rules:
        after = f"after {rule.after}" if rule.after else "at once"
        lines.append(f"- *{rule.severity}*, {after}: {_fires(rule)}.")
    return "\n".join([*lines, "", "## "])


def _fires(rule: AlertRule) -> str:
    return rule.fires + (f" (`scope: {rule.scope}`)" if rule.scope else "")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
