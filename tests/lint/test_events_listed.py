"""The log calls of the product, compared with the page that documents them."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.lint.package import PACKAGE, ROOT, name_of, nodes
from txbroker.proxy.observe.logging import LINES_MAX, WINDOW_S

LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log", "msg"})
LOGGERS = frozenset({"log", "_log", "logger", "_logger", "logging"})
PAGE = (ROOT / "docs/reference/logs.md").read_text()


class LogCall(NamedTuple):
    """One call of a logger."""

    where: str
    level: str
    text: str | None
    fields: frozenset[str | None]
    positional: int


class LogEvent(NamedTuple):
    """One row of the page."""

    name: str
    level: str
    fields: frozenset[str]
    do: str


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of the tables of a page, without their heads."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith(("| ---", "| event ", "| level ")):
            yield [cell.strip() for cell in line.split("|")[1:-1]]


def listed_events(text: str) -> list[LogEvent]:
    """Return the events of a proxy that the page lists."""
    return [
        LogEvent(name.strip("`"), level, frozenset(re.findall(r"`(\w+)`", fields)), do)
        for name, level, fields, _, do in rows(text)
    ]


def _is_logger(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id in LOGGERS
    if isinstance(node, ast.Attribute):
        return node.attr in LOGGERS
    return isinstance(node, ast.Call) and "logger" in ast.unparse(node.func).lower()


def calls(path: Path, found: Iterable[ast.AST]) -> Iterator[LogCall]:
    """Yield the calls of loggers among the nodes of a file, also those passed as callbacks."""
    for node in found:
        if not isinstance(node, ast.Call):
            continue
        function, arguments = node.func, node.args
        if arguments and isinstance(arguments[0], ast.Attribute) and _is_logger(arguments[0].value):
            # stack.callback(log.info, "stopped")
            function, arguments = arguments[0], arguments[1:]
        if not isinstance(function, ast.Attribute) or function.attr not in LEVELS:
            continue
        if not _is_logger(function.value):
            continue
        first = arguments[0] if arguments else None
        text = first.value if isinstance(first, ast.Constant) else None
        fields = frozenset(keyword.arg for keyword in node.keywords)
        name = f"{path}:{node.lineno}"
        yield LogCall(name, function.attr, text, fields, len(arguments) - 1)


PROXY_PART, _, SDK_PART = PAGE.partition("\n## The SDK\n")
LISTED = listed_events(PROXY_PART)
EVENTS = {event.name: event for event in LISTED}
IN_CLIENTS = ("txbroker/sdk/", "txbroker/net/tls.py", "txbroker/tracing.py")


def product(*, clients: bool = False) -> list[LogCall]:
    """Return the calls of proxies, or those of clients."""
    return [
        call
        for path in PACKAGE
        if name_of(path).startswith(IN_CLIENTS) is clients
        for call in calls(path.relative_to(ROOT), nodes(path))
    ]


def test_finder_sees_every_form_of_log_call() -> None:
    source = """
log.info("a", x=1)
stack.callback(log.warning, "b")
self._log.error(name, y=2)
structlog.get_logger().debug("d")
math.log(3)
"""
    found = [(c.level, c.text, c.fields) for c in calls(Path("x.py"), ast.walk(ast.parse(source)))]

    assert found == [
        ("info", "a", {"x"}),
        ("warning", "b", set()),
        ("error", None, {"y"}),
        ("debug", "d", set()),
    ]
    assert len(product()) > 50


def test_log_calls_of_proxy_use_listed_events() -> None:
    faults = []
    for call in product():
        event = EVENTS.get(call.text or "")
        if event is None:
            faults.append(f"{call.where}: {call.text!r} is not a listed event")
        elif (call.level, call.positional) != (event.level, 0):
            faults.append(f"{call.where}: level {call.level}, or values outside of fields")
        elif more := call.fields - event.fields:
            faults.append(f"{call.where}: fields {more} are not listed")
    assert faults == []


def test_listed_events_and_fields_are_used() -> None:
    used: dict[str | None, set[str | None]] = {}
    for call in product():
        used.setdefault(call.text, set()).update(call.fields)
    assert {name: event.fields for name, event in EVENTS.items()} == used


def test_events_are_listed_once() -> None:
    assert len(LISTED) == len(EVENTS) > 50


def test_warnings_and_errors_name_the_next_step() -> None:
    silent = {"calls given up", "partition not closed cleanly", "connection dropped"}
    assert {
        event.name
        for event in EVENTS.values()
        if event.level in ("warning", "error") and not event.do
    } <= silent


def test_log_lines_of_sdk_are_listed() -> None:
    levels = {"error, with a traceback": "exception"}
    listed = {(levels.get(level, level), text.strip("`")) for level, text, _ in rows(SDK_PART)}
    assert {(call.level, call.text) for call in product(clients=True)} == listed


def test_page_names_the_rate_limit() -> None:
    assert f"At most {LINES_MAX} lines of one event are written within {WINDOW_S:g} s" in PAGE
