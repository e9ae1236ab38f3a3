"""What a PromQL expression asks for: names and labels, against those that a proxy can show."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

TARGET = frozenset({"cluster", "namespace", "job", "instance"})
"""Labels that Prometheus itself puts on what it scrapes; `cluster` where several are brought
together."""
_SUFFIXES: Mapping[str, Mapping[str, frozenset[str]]] = {
    "histogram": {"_bucket": frozenset({"le"}), "_sum": frozenset(), "_count": frozenset()},
    "counter": {"": frozenset()},
    "gauge": {"": frozenset()},
}
_METRIC = re.compile(r"\b((?:txbroker|process)_\w+|ALERTS)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_GROUPING = re.compile(r"\b(by|on|without)\s*\(([^)]*)\)\s*")
OTHERS: Mapping[str, frozenset[str]] = {
    "process_resident_memory_bytes": frozenset(),
    "process_cpu_seconds_total": frozenset(),
    "ALERTS": frozenset({"alertname", "alertstate", "severity", "scope"}),
}
"""Beside the proxies' own metrics: of the client library, and of Prometheus."""


def series(kinds: Mapping[str, tuple[str, tuple[str, ...]]]) -> dict[str, frozenset[str]]:
    """Return every name of a series with its labels, from metrics by name: kind and labels."""
    own = {
        f"{name}{suffix}": frozenset(labels) | more
        for name, (kind, labels) in kinds.items()
        for suffix, more in _SUFFIXES[kind].items()
    }
    return {**OTHERS, **own}


def matchers(expression: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, label and value of each matcher."""
    for name, inside in _METRIC.findall(expression):
        for label, value in _MATCHER.findall(inside):
            yield name, label, value


def names(expression: str) -> set[str]:
    """Return the names of the series that are asked for."""
    return {found[0] for found in _METRIC.findall(expression)}


def unknown(expression: str, known: Mapping[str, frozenset[str]]) -> list[str]:
    """Return the unknown series, labels and grouping labels of an expression."""
    wrong = [f"{name} is no series" for name in sorted(names(expression) - set(known))]
    for name, label, _ in matchers(expression):
        if label not in known.get(name, frozenset()) | TARGET:
            wrong.append(f"{name} has no label {label}")
    for found in _GROUPING.finditer(expression):
        there = TARGET.union(
            *(known.get(name, frozenset()) for name in names(_operand(expression, found)))
        )
        for label in re.findall(r"\w+", found[2]):
            if label not in there:
                wrong.append(f"nothing below `{found[0].strip()}` has the label {label}")
    return wrong


def _operand(expression: str, grouping: re.Match[str]) -> str:
    """Return what is grouped: the parentheses behind `by (…)`, all of it beside `on (…)`."""
    if grouping[1] == "on" or not expression.startswith("(", grouping.end()):
        return expression
    depth = 0
    for place in range(grouping.end(), len(expression)):
        depth += {"(": 1, ")": -1}.get(expression[place], 0)
        if depth == 0:
            return expression[grouping.end() : place]
    return expression[grouping.end() :]
