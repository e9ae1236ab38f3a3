"""Generate the reference pages of HTTP API, settings, metrics and errors, and the schema of drift
events.

`python -m txbroker.cli.api_reference docs/reference`
"""

import json
import sys
from inspect import cleandoc
from pathlib import Path
from typing import Any

import msgspec
from pydantic.fields import FieldInfo

from txbroker.config.settings import ENV_PREFIX, Settings
from txbroker.consumer.statistics import METRICS
from txbroker.contract.drift import DriftEvent
from txbroker.errors import request_errors
from txbroker.metrics import Described
from txbroker.proxy.http.api import SESSION_PATH, operations
from txbroker.proxy.http.operations import Operation, describe
from txbroker.proxy.observe.metrics import Metrics
from txbroker.relay.metrics import METRICS as RELAY_METRICS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NOTICE = "<!-- Written by `python -m txbroker.cli.api_reference`; edit the code instead. -->\n"


def pages() -> dict[str, str]:
    """Return the reference pages and the schema by file name."""
    made = {
        "http.md": _http(),
        "settings.md": _settings(),
        "metrics.md": _metrics(),
        "errors.md": _errors(),
    }
    schema = {"drift-event.schema.json": drift_event_schema()}
    return {name: _NOTICE + text for name, text in made.items()} | schema


def write(folder: Path) -> None:
    """Write the reference pages into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


def drift_event_schema() -> str:
    """Return the JSON schema of the records in the drift topic."""
    schema = msgspec.json.schema(DriftEvent)["$defs"][DriftEvent.__name__]
    description = cleandoc(DriftEvent.__doc__ or "")
    return json.dumps({"$schema": _DIALECT, **schema, "description": description}, indent=1) + "\n"


# --- HTTP ------------------------------------------------------------------------------------


def _http() -> str:
    declared = operations()
    document = describe(declared)
    lines = [
        "# HTTP API",
        "",
        "JSON over HTTP, by default at `http://127.0.0.1:8470`. An OpenAPI 3.1 document of it is "
        "at `/v1/openapi.json`. Calls that change state need `content-type: application/json`. "
        'The answer to a failed call is `{"error": {"code", "message", …}}`, with the codes of '
        "[errors](errors.md). "
        "Times are milliseconds since 1970.",
        "",
        "| call | description |",
        "| --- | --- |",
        *(f"| {_anchor(operation)} | {operation.summary} |" for operation in declared),
        f"| `GET {SESSION_PATH}` | The WebSocket of an SDK session |",
    ]  # fmt: skip
    for operation in declared:
        lines += ["", *_call(operation, document)]
    lines += ["", "## Bodies"]
    for name, schema in document["components"]["schemas"].items():
        if "properties" in schema:
            lines += ["", *_body(name, schema)]
        elif "enum" in schema:
            lines += ["", *_values(name, schema)]
    return "\n".join(lines) + "\n"


def _anchor(operation: Operation) -> str:
    return f"[`{operation.method} {operation.path}`](#{operation.name})"


def _call(operation: Operation, document: dict[str, Any]) -> list[str]:
    described = document["paths"][operation.path][operation.method.lower()]
    lines = [
        f'<a id="{operation.name}"></a>',
        f"## {operation.method} {operation.path}",
        "",
        f"{operation.summary}.".replace("?.", "?"),
    ]
    if "description" in described:
        lines += ["", described["description"]]
    queries = [one for one in described["parameters"] if one["in"] == "query"]
    if queries:
        lines += ["", "| query | type |", "| --- | --- |"]
        lines += [f"| `{one['name']}` | {_cell(_type(one['schema']))} |" for one in queries]
    if operation.body is not None:
        optional = ", optional" if operation.body_optional else ""
        lines += ["", f"Body: {_link(operation.body.__name__)}{optional}."]
    lines += ["", "| status | answer |", "| --- | --- |"]
    for status, response in described["responses"].items():
        (media, content), = response["content"].items()  # fmt: skip
        schema = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
        shown = _link(schema) if schema else f"`{media}`"
        text = response["description"]
        lines.append(f"| {status} | {_cell(text if schema == 'ErrorBody' else shown)} |")
    return lines


def _body(name: str, schema: dict[str, Any]) -> list[str]:
    lines = [f'<a id="{name.lower()}"></a>', f"### {name}", "", schema.get("description", "")]
    required = schema.get("required", ())
    lines += ["", "| field | description |", "| --- | --- |"]
    for field, shape in schema["properties"].items():
        need = "" if field in required else ", optional"
        text = shape.get("description", "")
        lines.append(
            f"| `{field}` | {_cell(_type(shape))}{need}{'. ' if text else ''}{_cell(text)} |"
        )
    return lines


def _values(name: str, schema: dict[str, Any]) -> list[str]:
    lines = [f'<a id="{name.lower()}"></a>', f"### {name}", ""]
    if text := cleandoc(schema.get("description", "")):
        lines += [text, ""]
    return [*lines, f"One of {_type(schema)}."]


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        kinds = [_type(one) for one in schema["anyOf"] if one != {"type": "null"}]
        return " or ".join(dict.fromkeys(kinds))
    kind = schema.get("type", "any JSON")
    if isinstance(kind, list):
        kind = " or ".join(one for one in kind if one != "null")
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"array of {_type(schema['items'])}"
    bounds = [
        f"{word} {schema[key]:g}"
        for key, word in (("minimum", "from"), ("maximum", "to"), ("exclusiveMinimum", "above"))
        if key in schema
    ]
    return " ".join([kind, *bounds])


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# --- settings, metrics, errors ---------------------------------------------------------------


def _settings() -> str:
    lines = [
        "# Settings",
        "",
        "Each setting is a command line option (`--check-after-s`), an environment variable "
        "(`TXBROKER_CHECK_AFTER_S`) and a key of the configuration file (`check_after_s`, TOML; "
        "named by `--config` or `TXBROKER_CONFIG`). Options override the environment, which "
        "overrides the file, which overrides the default. In the environment, lists are separated "
        "by commas.",
        "",
        "| setting | variable | default | description |",
        "| --- | --- | --- | --- |",
    ]
    for name, field in Settings.model_fields.items():
        variable = f"{ENV_PREFIX}{name.upper()}"
        text = _cell(field.description or "")
        lines.append(f"| `{name}` | `{variable}` | {_default(field)} | {text} |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.default_factory is not None:
        return "derived from others"
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:.10g}`"
    return f"`{value}`"


def _metrics() -> str:
    lines = [
        "# Metrics",
        "",
        "At `/metrics`, in Prometheus' text format, with those of the process and of Python. "
        "Groups beyond `group_labels_max`, and topics beyond 500, count as `other`.",
        "",
        "| metric | type | labels | description |",
        "| --- | --- | --- | --- |",
    ]
    lines += map(_metric, Metrics().described())
    lines += [
        "",
        "## Consumers",
        "Those that a [consumer](../how-to/consume.md#metrics) exports in its own process.",
        "",
        "| metric | type | labels | description |",
        "| --- | --- | --- | --- |",
        *map(_metric, METRICS),
        "",
        "## Relays",
        "Those that a relay exports in its own process, of an outbox or a capture. Several relays "
        "of one outbox count the same rows.",
        "",
        "| metric | type | labels | description |",
        "| --- | --- | --- | --- |",
        *map(_metric, RELAY_METRICS),
    ]
    return "\n".join(lines) + "\n"


def _metric(metric: Described) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {_cell(metric.text)} |"


def _errors() -> str:
    lines = [
        "# Errors",
        "",
        "Over HTTP an error is `{\"error\": {\"code\", \"message\", …}}` with the status below; "
        "in a session it is a `Failure` with the code. If the call can be retried unchanged, the "
        "answer has `Retry-After`. A call of a frame that cannot be decoded gets `bad_request`; "
        "any other undecodable frame gets a `Failure` for call 0 and ends the session. Over HTTP "
        "the header `Txb-Error` has the code too.",
        "",
        "| code | status | retry? | description |",
        "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for code, kind in sorted(request_errors().items(), key=lambda item: (item[1].status, item[0])):
        again = "yes" if kind.retryable else "no"
        text = " ".join(
            line.strip() for line in (kind.__doc__ or "").partition("\n\n")[0].split("\n")
        )
        lines.append(f"| `{code}` | {kind.status} | {again} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference"))
