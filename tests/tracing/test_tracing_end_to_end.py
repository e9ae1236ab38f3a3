"""One trace from prepare through check to promotion, through the SDK and through plain HTTP."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

from tests.tracing.conftest import Spans
from txbroker.core.records import Message
from txbroker.sdk import (
    BlockingTransactionalProducer,
    CheckRequest,
    Commit,
    Decision,
    TransactionalProducer,
)
from txbroker.testing.broker import InMemoryBroker, PromotedMessage

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
PAYMENT = Message("payments", key=b"42", value=b"100 EUR")


@pytest.fixture(scope="module")
def broker() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as running:
        yield running


def trace_id(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"{context.trace_id:032x}"


def below(span: ReadableSpan) -> str:
    """Return the number of the span that this one continues."""
    assert span.parent is not None
    return f"{span.parent.span_id:016x}"


def number(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"{context.span_id:016x}"


def header(message: PromotedMessage | Message, name: str = "traceparent") -> str | None:
    found = [value for header, value in message.headers if header == name]
    assert len(found) <= 1
    return None if not found or found[0] is None else found[0].decode()


def step_of(message: PromotedMessage) -> str:
    """Return trace and step that a message names, without the flags."""
    return (header(message) or "")[3:52]


def visible(broker: InMemoryBroker, id: str) -> PromotedMessage:
    broker.wait_until_settled()
    (found,) = [each for each in broker.messages("payments") if each.transaction_id == id]
    return found


def call(
    broker: InMemoryBroker, path: str, body: dict[str, Any], method: str = "POST", **headers: str
) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        broker.url + path,
        json.dumps(body).encode(),
        {"content-type": "application/json", **headers},
        method=method,
    )
    with urllib.request.urlopen(request) as answer:
        return answer.status, json.load(answer)


async def test_a_block_of_the_sdk_is_one_trace(broker: InMemoryBroker, spans: Spans) -> None:
    async with TransactionalProducer(broker.url, group="orders") as producer:
        with spans.tracer.start_as_current_span("order") as mine:
            async with producer.transaction(PAYMENT) as tx:
                pass
            trace_number = f"{mine.get_span_context().trace_id:032x}"
    message = visible(broker, tx.id)
    prepare = spans.one("producer", "prepare payments")
    order = spans.one("internal", "order")
    promote = spans.one("producer", "promote payments")

    assert {trace_id(span) for span in spans.all()} == {trace_number}
    assert step_of(message) == f"{trace_number}-{number(prepare)}"
    assert below(prepare) == number(order)
    assert below(spans.one("client", "commit payments")) == number(order)
    assert below(spans.one("server", "prepare payments")) == number(prepare)
    assert below(spans.one("server", "commit payments")) == number(prepare)
    assert below(promote) == number(prepare)
    assert promote.attributes == {
        "messaging.system": "kafka",
        "messaging.operation.name": "promote",
        "messaging.operation.type": "send",
        "messaging.destination.name": "payments",
        "messaging.destination.partition.id": "0",
        "messaging.kafka.offset": message.offset,
        "txbroker.transaction.id": tx.id,
        "txbroker.group": "orders",
    }
    assert promote.start_time is not None
    assert promote.end_time is not None
    assert promote.end_time >= promote.start_time


async def test_a_check_by_another_process_continues_the_trace(
    broker: InMemoryBroker, spans: Spans
) -> None:
    """The one that prepared is gone; another proxy, another instance, hours later."""
    asked: list[str] = []

    def check(request: CheckRequest) -> Commit:
        inside = trace.get_current_span().get_span_context()
        asked.append(f"{inside.trace_id:032x}-{inside.span_id:016x}")
        return Commit((Message("payments", key=b"42", value=b"final"),))

    async with TransactionalProducer(broker.url, group="gone") as producer:
        with spans.tracer.start_as_current_span("order") as mine:
            id = await producer.prepare(PAYMENT)
            trace_number = f"{mine.get_span_context().trace_id:032x}"
    broker.restart()
    async with TransactionalProducer(broker.url, group="gone", check=check):
        await broker.async_advance(7.0)
        await broker.async_wait_until_settled()
    message = visible(broker, id)
    prepare = spans.one("producer", "prepare payments")
    asking = spans.one("client", "check payments")
    answering = spans.one("server", "check payments")

    assert {trace_id(span) for span in spans.all()} == {trace_number}
    assert {below(span) for span in (asking, answering)} == {number(prepare)}
    assert asked == [f"{trace_number}-{number(answering)}"]
    assert (asking.attributes or {})["txbroker.check.outcome"] == "commit"
    assert (answering.attributes or {})["txbroker.decision"] == "commit"
    # The check's messages brought no trace: they go on with that of what they replace.
    assert message.value == b"final"
    assert step_of(message) == f"{trace_number}-{number(prepare)}"
    assert below(spans.one("producer", "promote payments")) == number(prepare)


class Service(ThreadingHTTPServer):
    """A service that is checked back over HTTP."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.asked: list[dict[str, str]] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append({name.lower(): value for name, value in self.headers.items()})
                question = json.loads(self.rfile.read(int(self.headers["content-length"])))
                body = json.dumps({"id": question.get("id"), **answer}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/check"


@contextmanager
def service(broker: InMemoryBroker, group: str, **answer: Any) -> Iterator[Service]:
    with Service(answer) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            call(broker, f"/v1/groups/{group}", {"check_url": running.url}, "PUT")
            yield running
        finally:
            running.shutdown()
            thread.join()


def prepare_over_http(broker: InMemoryBroker, group: str, **more: Any) -> dict[str, Any]:
    return {"group": group, "messages": [{"topic": "payments", "value": "100 EUR"}], **more}


def test_plain_http_is_one_trace(broker: InMemoryBroker, spans: Spans) -> None:
    with service(broker, "plain", decision="commit") as running:
        body = prepare_over_http(broker, "plain")
        _, standing = call(
            broker, "/v1/transactions", body, traceparent=PARENT, tracestate="vendor=1"
        )
        broker.advance(7.0)
        message = visible(broker, standing["id"])
    prepare = spans.one("server", "prepare payments")
    check = spans.one("client", "check payments")

    assert {trace_id(span) for span in spans.all()} == {TRACE}
    assert below(prepare) == "b7ad6b7169203331"
    assert header(message) == f"00-{TRACE}-{number(prepare)}-01"
    assert header(message, "tracestate") == "vendor=1"
    assert [(asked["traceparent"], asked["tracestate"]) for asked in running.asked] == [
        (f"00-{TRACE}-{number(check)}-01", "vendor=1")
    ]
    assert below(check) == below(spans.one("producer", "promote payments")) == number(prepare)


def test_a_prepare_that_is_repeated_in_another_trace_is_the_same(
    broker: InMemoryBroker, spans: Spans
) -> None:
    body = prepare_over_http(broker, "twice", dedup_key="order-7")
    first = call(broker, "/v1/transactions", body, traceparent=PARENT)
    again = call(broker, "/v1/transactions", body, traceparent=f"00-{'1' * 32}-{'2' * 16}-01")
    plain = call(broker, "/v1/transactions", body)
    other = prepare_over_http(broker, "twice", dedup_key="order-7")
    other["messages"][0]["headers"] = {"other": "content"}

    assert (first[0], again[0], plain[0]) == (201, 200, 200)
    assert first[1]["id"] == again[1]["id"] == plain[1]["id"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        call(broker, "/v1/transactions", other, traceparent=PARENT)
    assert refused.value.code == 409
    call(broker, f"/v1/transactions/{first[1]['id']}/commit", {"group": "twice"})
    assert (header(visible(broker, first[1]["id"])) or "").startswith(f"00-{TRACE}-")


def test_final_messages_go_on_with_the_trace_and_a_repeated_commit_is_the_same(
    broker: InMemoryBroker, spans: Spans
) -> None:
    body = prepare_over_http(broker, "final")
    _, standing = call(broker, "/v1/transactions", body, traceparent=PARENT)
    final = {"group": "final", "messages": [{"topic": "payments", "value": "final"}]}
    path = f"/v1/transactions/{standing['id']}/commit"
    assert call(broker, path, final)[0] == 200
    assert call(broker, path, final)[0] == 200
    message = visible(broker, standing["id"])

    assert message.value == b"final"
    assert (header(message) or "").startswith(f"00-{TRACE}-")
    promote = spans.one("producer", "promote payments")
    assert trace_id(promote) == TRACE


async def test_a_context_of_the_users_own_is_left_as_it_is(
    broker: InMemoryBroker, spans: Spans
) -> None:
    own = Message("payments", value=b"x", headers=(("traceparent", PARENT.encode()),))
    async with TransactionalProducer(broker.url, group="own") as producer:
        with spans.tracer.start_as_current_span("another trace"):
            id = await producer.prepare(own)
        await producer.commit(id)
    message = visible(broker, id)
    assert message.headers == (("traceparent", PARENT.encode()),)
    assert trace_id(spans.one("producer", "promote payments")) == TRACE


def test_what_nobody_records_makes_no_spans_but_travels(
    broker: InMemoryBroker, spans: Spans
) -> None:
    unrecorded = f"00-{TRACE}-b7ad6b7169203331-00"
    with service(broker, "unrecorded", decision="commit") as running:
        body = prepare_over_http(broker, "unrecorded")
        _, standing = call(broker, "/v1/transactions", body, traceparent=unrecorded)
        broker.advance(7.0)
        message = visible(broker, standing["id"])
    assert header(message) == unrecorded
    assert [asked["traceparent"] for asked in running.asked] == [unrecorded]
    assert spans.all() == []


def test_a_proxy_begins_no_trace(broker: InMemoryBroker, spans: Spans) -> None:
    for odd in ("", "rubbish", f"00-{'0' * 32}-{'2' * 16}-01"):
        body = prepare_over_http(broker, "untraced")
        _, standing = call(broker, "/v1/transactions", body, traceparent=odd)
        call(broker, f"/v1/transactions/{standing['id']}/commit", {"group": "untraced"})
        assert visible(broker, standing["id"]).headers == ()
    assert spans.all() == []


def test_the_blocking_twin_knows_the_callers_span(broker: InMemoryBroker, spans: Spans) -> None:
    def local(_: Any) -> None:
        inside.append(trace.get_current_span())

    inside: list[trace.Span] = []
    with (
        BlockingTransactionalProducer(broker.url, group="blocking") as producer,
        spans.tracer.start_as_current_span("order") as mine,
    ):
        outcome = producer.send_in_transaction(PAYMENT, local)
    broker.wait_until_settled()

    assert outcome.decision is Decision.COMMIT
    assert below(spans.one("producer", "prepare payments")) == number(
        spans.one("internal", "order")
    )
    assert inside == [mine]


async def test_refusal_is_named_by_its_code(broker: InMemoryBroker, spans: Spans) -> None:
    async with TransactionalProducer(broker.url, group="refused") as producer:
        id = await producer.prepare(PAYMENT)
        await producer.rollback(id)
        with pytest.raises(Exception, match="already decided"):
            await producer.commit(id)
    failed = [span for span in spans.all() if span.name.startswith("commit")]
    assert {(span.attributes or {})["error.type"] for span in failed} == {"already_decided"}
    assert {span.status.status_code for span in failed} == {trace.StatusCode.ERROR}
    assert {span.events for span in spans.all()} == {()}
    # The proxy remembers of a settled one that it was rolled back, not what trace it was in.
    assert [span.kind for span in failed] == [trace.SpanKind.CLIENT]


def test_many_at_once_keep_their_traces_apart(broker: InMemoryBroker, spans: Spans) -> None:
    traces = {f"{n:032x}" for n in range(1, 41)}

    def one(trace_number: str) -> tuple[str, str]:
        body = prepare_over_http(broker, "many")
        parent = f"00-{trace_number}-{'3' * 16}-01"
        _, standing = call(broker, "/v1/transactions", body, traceparent=parent)
        call(broker, f"/v1/transactions/{standing['id']}/commit", {"group": "many"})
        return trace_number, standing["id"]

    with ThreadPoolExecutor(8) as pool:
        ids = dict(pool.map(one, traces))
    broker.wait_until_settled()
    by_trace: dict[str, list[ReadableSpan]] = {}
    for span in spans.all():
        by_trace.setdefault(trace_id(span), []).append(span)

    assert by_trace.keys() == traces
    for trace_number, found in by_trace.items():
        assert {(s.attributes or {})["txbroker.transaction.id"] for s in found} == {
            ids[trace_number]
        }
        assert sorted(span.name for span in found) == [
            "commit payments",
            "prepare payments",
            "promote payments",
        ]
