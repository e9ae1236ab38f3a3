"""Write the alert rules, the heads of the runbooks and their index from the table that all reports
follow, `txbroker/diagnosis/table.py`: `python docs/diagnoses.py`.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from txbroker.diagnosis.rows import Diagnosis
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

Rules = dict[str, list[Diagnosis]]


def rules_by_alert() -> Rules:
    """Return the rules of each alert, alerts with a critical one first."""
    rules: Rules = {}
    for one in DIAGNOSES:
        if one.expr:
            rules.setdefault(one.name, []).append(one)
    for its in rules.values():
        its.sort(key=lambda one: not one.critical)
    return dict(sorted(rules.items(), key=lambda item: not item[1][0].critical))


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
        its = [one for ones in rules.values() for one in ones if one.section == group]
        yield "\n".join(map(_rule, its))


def _rule(one: Diagnosis) -> str:
    labels = {"severity": _severity(one), "scope": one.scope}
    # The facts of the condition's title are the labels of its series.
    summary = one.summary or re.sub(r"{(\w+)}", r"{{ $labels.\1 }}", one.title.one)
    lines = [
        f"      - alert: {one.name}",
        "        expr: |",
        textwrap.indent(one.expr, " " * 10),
        *([f"        for: {one.after}"] if one.after else []),
        "        labels:",
        *(f"          {label}: {value}" for label, value in labels.items() if value),
        "        annotations:",
        f"          summary: {summary}",
        "          description: >-",
        _filled(one.description, " " * 12),
        f"          runbook_url: {RUNBOOKS_URL}{one.name}.md",
    ]
    return _comment(one.remark, " " * 6) + "\n".join([*lines, ""])


def _severity(one: Diagnosis) -> str:
    return "critical" if one.critical else "warning"


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
        for number, one in enumerate(its):
            link = "" if number else f" [{name}]({name}.md)"
            after = one.after or "at once"
            yield f"|{link} | {_severity(one)} | {_fires(one)} | {after} |\n"


def _runbook_head(name: str, rules: list[Diagnosis]) -> str:
    lines = [f"# {name}"]
    for one in rules:
        after = f"after {one.after}" if one.after else "at once"
        lines.append(f"- *{_severity(one)}*, {after}: {_fires(one)}.")
    return "\n".join([*lines, "", "## "])


def _fires(one: Diagnosis) -> str:
    return one.fires + (f" (`scope: {one.scope}`)" if one.scope else "")


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
