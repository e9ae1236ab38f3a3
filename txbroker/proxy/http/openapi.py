"""Generate the OpenAPI 3.1 document from the declared operations."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from txbroker import __version__
from txbroker.errors import RequestError
from txbroker.proxy.http.bodies import (
    HEADER_VALUE_SCHEMA,
    MESSAGE_SCHEMA,
    ErrorBody,
    TransactionId,
)
from txbroker.proxy.http.operations import JSON, Operation

_REF = "#/components/schemas/{name}"
_PATH_SCHEMAS: dict[str, dict[str, Any]] = {
    "id": msgspec.json.schema(TransactionId),
    "group": {"type": "string", "minLength": 1, "description": "The name of a producer group."},
}


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the OpenAPI document of these operations."""
    kinds = dict.fromkeys(
        kind
        for operation in operations
        for kind in (operation.body, *operation.answers.values(), ErrorBody)
        if kind is not None
    )
    _, schemas = msgspec.json.schema_components(list(kinds), ref_template=_REF)
    schemas["Message"] = MESSAGE_SCHEMA
    schemas["HeaderValue"] = HEADER_VALUE_SCHEMA
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for operation in operations:
        paths[operation.path][operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "txbroker",
            "version": __version__,
            "description": "Transactional messages for Apache Kafka. Calls that change state need "
            "`content-type: application/json`. SDK sessions are WebSockets at `/v1/session`.",
        },
        "servers": [{"url": "/"}],
        "paths": dict(paths),
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "If the proxy has a `token_file`.",
                },
                "certificate": {
                    "type": "mutualTLS",
                    "description": "If the proxy has a `tls_client_ca_file`.",
                },
            },
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": [*_path_parameters(operation.path), *_query_parameters(operation)],
        "responses": _responses(operation),
    }
    if operation.admin:
        described["description"] = (
            "An operator's call: if the proxy has an `admin_listen` address, it is only accepted "
            "there."
        )
    if operation.body is not None:
        described["requestBody"] = {
            "required": not operation.body_optional,
            "content": {JSON: {"schema": {"$ref": _REF.format(name=operation.body.__name__)}}},
        }
    if not operation.open:
        described["security"] = [{"token": []}, {}]
    return described


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [
        {"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]}
        for name in names
    ]


def _query_parameters(operation: Operation) -> list[dict[str, Any]]:
    _, schemas = msgspec.json.schema_components([operation.query], ref_template=_REF)
    parameters = []
    for name, schema in schemas[operation.query.__name__]["properties"].items():
        # A query has no null: unused fields are omitted.
        variants = [kind for kind in schema.get("anyOf", [schema]) if kind != {"type": "null"}]
        (shown,) = [schemas[v["$ref"].rpartition("/")[2]] if "$ref" in v else v for v in variants]
        described = {"name": name, "in": "query", "required": False, "schema": shown}
        parameters.append(described)
    return parameters


def _responses(operation: Operation) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in operation.answers.items():
        schema = {} if kind is None else {"schema": {"$ref": _REF.format(name=kind.__name__)}}
        responses[str(status)] = {
            "description": _first_line(kind.__doc__) if kind else operation.summary,
            "content": {operation.media: schema},
        }
    by_status: dict[int, list[type[RequestError]]] = defaultdict(list)
    for error in operation.all_errors:
        by_status[error.status].append(error)
    for status, errors in sorted(by_status.items()):
        if str(status) in responses:
            continue
        responses[str(status)] = {
            "description": " ".join(f"`{e.code}`: {_first_line(e.__doc__)}" for e in errors),
            "content": {JSON: {"schema": {"$ref": _REF.format(name="ErrorBody")}}},
        }
    return responses


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
