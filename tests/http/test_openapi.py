"""The OpenAPI document matches the API: a fuzzer reads the one and calls the other. Also: the
committed reference pages are those that the code makes.

It calls a whole proxy on a Kafka in memory, in which the calls reach ledger, owner and targets.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.kit.http_api import Api
from txbroker.cli.api_reference import pages, write
from txbroker.config.settings import Settings
from txbroker.contract.json import MessageError, decode_messages
from txbroker.core.routing import make_id
from txbroker.errors import request_errors
from txbroker.proxy.http.api import operations
from txbroker.proxy.http.bodies import NoQuery
from txbroker.proxy.http.operations import describe
from txbroker.testing.broker import InMemoryBroker

EXAMPLES = 12
CHECKS: list[CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def proxy_url() -> Iterator[str]:
    """A proxy that makes the topics it is asked for."""
    with InMemoryBroker() as broker:
        yield broker.url


def fuzzed() -> list[tuple[str, GenerationMode]]:
    """Return every operation with valid and, where possible, invalid input."""
    declared = operations()
    wrong = [one for one in declared if one.body or one.query is not NoQuery or "{id}" in one.path]
    positive = [(operation.name, GenerationMode.POSITIVE) for operation in declared]
    return positive + [(operation.name, GenerationMode.NEGATIVE) for operation in wrong]


def fuzz(
    url: str,
    operation: str,
    mode: GenerationMode,
    change: Callable[[schemathesis.Case], None] = lambda case: None,
) -> Counter[int]:
    """Call an operation with input the document allows or forbids; return the statuses."""
    schema = schemathesis.openapi.from_url(f"{url}/v1/openapi.json")
    (found,) = schema.include(operation_id=operation).get_all_operations()
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=found.ok().as_strategy(generation_mode=mode))
    def call(case: schemathesis.Case) -> None:
        change(case)
        headers = {} if case.method == "GET" else JSON
        answer = case.call_and_validate(headers=headers, checks=CHECKS)
        if mode is GenerationMode.NEGATIVE and answer.status_code == 200:
            # The invalid part is not on the wire: an object without fields leaves nothing of
            # itself in a query.
            sent = parse_qs(urlsplit(str(answer.request.url)).query, keep_blank_values=True)
            assert set(case.query or {}) - set(sent)
            return
        statuses[answer.status_code] += 1

    call()
    if mode is GenerationMode.NEGATIVE:
        assert statuses.keys() <= {400, 404, 405, 415}
    assert statuses
    return statuses


class Deeper:
    """Makes four of five cases name something that exists: a topic, group or transaction."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._cases = 0

    def __call__(self, case: schemathesis.Case) -> None:
        """Change a case that fits the document, and leave it one that does."""
        self._cases += 1
        if self._cases % 5 == 0:
            return
        path, body = case.path_parameters or {}, case.body
        if "id" in path:
            path["id"] = self._transaction(self._cases % 5)
        if "group" in path:
            path["group"] = "registered"
            if case.method != "PUT":
                self._call("PUT", "/v1/groups/registered", {"check_url": "http://127.0.0.1:9/"})
        (case.query or {}).pop("cursor", None)
        if isinstance(body, dict):
            body.pop("id", None)
            if body.get("group") is not None:
                body["group"] = "orders"
            for message in body.get("messages") or ():
                message["topic"] = "payments"
                message.pop("partition", None)
                message.pop("timestamp_ms", None)

    def _transaction(self, number: int) -> str:
        """Return an id: of one that is pending, committed, rolled back or not there."""
        if number == 4:
            return make_id(0, time.time_ns() // 1_000_000, self._cases)
        body = {"group": "orders", "messages": [{"topic": "payments", "value": "v"}]}
        id = str(self._call("POST", "/v1/transactions", body)["id"])
        if number > 1:
            decision = "commit" if number == 2 else "rollback"
            self._call("POST", f"/v1/transactions/{id}/{decision}", {})
        return id

    def _call(self, method: str, path: str, body: object) -> Any:
        data = json.dumps(body).encode()
        call = urllib.request.Request(self._url + path, data, JSON, method=method)
        with urllib.request.urlopen(call, timeout=10) as answer:
            return json.load(answer)


EXPECTED_STATUS = {"prepare": 201, "revive": 409}  # none is parked, so there is nothing to revive
"""What some of the cases that fit must be answered with, where that is not 200."""


# It is the proxy's thread that uses it meanwhile.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize(("operation", "mode"), fuzzed())
def test_fuzzer_finds_no_difference_in_a_whole_proxy(
    proxy_url: str, operation: str, mode: GenerationMode
) -> None:
    if mode is GenerationMode.POSITIVE:
        statuses = fuzz(proxy_url, operation, mode, Deeper(proxy_url))
        assert statuses[EXPECTED_STATUS.get(operation, 200)] > 0, statuses
    else:
        fuzz(proxy_url, operation, mode)
    with urllib.request.urlopen(f"{proxy_url}/readyz", timeout=10) as answer:
        assert answer.status == 200


MESSAGES = [
    {"topic": "a", "value": "v"},
    {"topic": "a", "value": None},
    {"topic": "a", "value": None, "value_json": {"a": [1, None]}},
    {"topic": "a", "value_base64": "/w==", "value": None, "key": None, "key_base64": "AAAA"},
    {"topic": "a", "value_json": 0, "partition": 0, "timestamp_ms": 1},
    {"topic": "a", "value": "", "headers": {"h": "1", "n": None, "b": {"base64": ""}}},
    {"topic": "a", "value": "", "headers": [["h", "1"], ["h", None], ["h", {"base64": "AA=="}]]},
    {"topic": "a", "value": "", "headers": None, "partition": None, "timestamp_ms": None},
    {"topic": "a"},
    {"topic": "a", "value_json": None},
    {"topic": "a", "value_base64": None},
    {"topic": "a", "value": "", "value_json": False},
    {"topic": "a", "value": "", "value_base64": ""},
    {"topic": "a", "value": "", "key": "", "key_base64": ""},
    {"topic": "a", "value_base64": "A"},
    {"topic": "a", "value_base64": "AA"},
    {"topic": "a", "value_base64": "A==="},
    {"topic": "a", "value_base64": "-_=="},
    {"topic": "a", "value": 1},
    {"topic": "", "value": ""},
    {"topic": None, "value": ""},
    {"value": ""},
    {"topic": "a", "value": "", "more": 1},
    {"topic": "a", "value": "", "headers": [["h"]]},
    {"topic": "a", "value": "", "headers": [["h", 1]]},
    {"topic": "a", "value": "", "headers": {"h": {"base64": "", "more": 1}}},
    {"topic": "a", "value": "", "headers": {"h": {}}},
    {"topic": "a", "value": "", "headers": "h"},
    {"topic": "a", "value": "", "partition": -1},
    {"topic": "a", "value": "", "partition": 2**31},
    {"topic": "a", "value": "", "timestamp_ms": True},
    [],
]


@pytest.mark.parametrize("message", MESSAGES)
def test_document_and_parser_accept_the_same_messages(message: object) -> None:
    schemas = describe(operations())["components"]["schemas"]
    document = {"$ref": "#/components/schemas/Message", "components": {"schemas": schemas}}
    try:
        decode_messages(json.dumps([message]).encode())
        taken = True
    except MessageError:
        taken = False
    assert jsonschema_rs.Draft202012Validator(document).is_valid(message) is taken


async def test_document_is_served(api: Api) -> None:
    status, document = await api.call("GET", "/v1/openapi.json")
    assert status == 200
    assert document["openapi"] == "3.1.0"
    assert document["paths"].keys() == {operation.path for operation in operations()}


def test_every_error_of_an_operation_is_described() -> None:
    document = describe(operations())
    known = request_errors()
    for operation in operations():
        responses = document["paths"][operation.path][operation.method.lower()]["responses"]
        for error in operation.all_errors:
            assert known[error.code] is error
            if error.status not in operation.answers:
                assert f"`{error.code}`" in responses[str(error.status)]["description"]


def test_names_are_unique() -> None:
    names = [operation.name for operation in operations()]
    assert len(set(names)) == len(names)


# --- reference pages ---------------------------------------------------------------------------


REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", sorted(pages()))
def test_page_is_current(name: str) -> None:
    committed = (REFERENCE / name).read_text(encoding="utf-8")
    assert committed == pages()[name], "run python -m txbroker.cli.api_reference"


def test_reference_is_complete(tmp_path: Path) -> None:
    write(tmp_path / "reference")
    made = {path.name: path.read_text() for path in (tmp_path / "reference").iterdir()}
    assert all(f"`{name}`" in made["settings.md"] for name in Settings.model_fields)
    assert all(f"`{code}`" in made["errors.md"] for code in request_errors())
    assert all(f"{one.method} {one.path}" in made["http.md"] for one in operations())
