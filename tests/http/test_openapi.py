"""The OpenAPI document says what the API does: a fuzzer reads the one and calls the other."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

import jsonschema_rs
import pytest
import schemathesis
from http_api import Api, running_api
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from txbroker.core.message_json import MessageError, message_from_json
from txbroker.errors import request_errors
from txbroker.proxy.http.api import operations
from txbroker.proxy.http.bodies import NoQuery
from txbroker.proxy.http.openapi import describe

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
def url() -> Iterator[str]:
    """A server in a thread with its own event loop, because the fuzzer blocks."""
    started = threading.Event()
    found: list[str] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with running_api() as api:
            found.append(api.url)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert started.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def fuzzed() -> list[tuple[str, GenerationMode]]:
    """Return every operation with what fits it, and where anything can be wrong, what does not."""
    declared = operations()
    wrong = [one for one in declared if one.body or one.query is not NoQuery or "{id}" in one.path]
    positive = [(operation.name, GenerationMode.POSITIVE) for operation in declared]
    return positive + [(operation.name, GenerationMode.NEGATIVE) for operation in wrong]


@pytest.mark.parametrize(("operation", "mode"), fuzzed())
def test_fuzzer_finds_no_difference(url: str, operation: str, mode: GenerationMode) -> None:
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
    def fuzz(case: schemathesis.Case) -> None:
        headers = {} if case.method == "GET" else JSON
        statuses[case.call_and_validate(headers=headers, checks=CHECKS).status_code] += 1

    fuzz()
    if mode is GenerationMode.NEGATIVE:
        assert statuses.keys() <= {400, 404, 405, 415}
    assert statuses


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
def test_document_takes_the_very_messages_that_the_parser_takes(message: object) -> None:
    schemas = describe(operations())["components"]["schemas"]
    document = {"$ref": "#/components/schemas/Message", "components": {"schemas": schemas}}
    try:
        message_from_json(message)
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
