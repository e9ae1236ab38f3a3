"""Without OpenTelemetry, without a provider and with one that fails, everything else works; the
example of docs/how-to/tracing.md runs unchanged in a separate process."""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider

from tests.tracing.conftest import SetProvider, Spans
from txbroker import tracing
from txbroker.core.records import Message
from txbroker.sdk import Decision, TransactionalProducer
from txbroker.testing.broker import InMemoryBroker
from txbroker.tracing import TraceContext

ROOT = Path(__file__).parents[2]
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
import txbroker.sdk, txbroker.proxy.process
from txbroker import tracing
from txbroker.core.records import Message
from txbroker.tracing import TraceContext
parent = TraceContext(%r)
with tracing.step("prepare", [Message("a")], {}) as first:
    with tracing.continued("prepare", [Message("a")], {}, parent=parent) as second:
        found = first, second, tracing.is_on(), tracing.current_context()
tracing.record("promote", [], {}, kind="producer", parent=parent, since_ns=1)
print(found, tracing.incoming({"traceparent": parent.parent}))
"""


def test_nothing_needs_opentelemetry() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT % PARENT],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout.strip() == "(None, None, False, None) None"


def test_one_file_only_imports_it() -> None:
    names = re.compile(r"^\s*(?:from|import) opentelemetry", re.MULTILINE)
    culprits = {
        path.relative_to(ROOT).as_posix()
        for folder in ("txbroker", "checkers", "cli", "spark")
        for path in (ROOT / folder).rglob("*.py")
        if names.search(path.read_text())
    }
    assert culprits == {"txbroker/tracing.py"}


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as running:
        yield running


async def test_without_a_provider_messages_stay_as_they_are(broker: InMemoryBroker) -> None:
    assert not tracing.is_on()
    body = {"group": "g", "messages": [{"topic": "payments", "value": "x"}]}
    request = urllib.request.Request(
        broker.url + "/v1/transactions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "traceparent": PARENT},
    )
    with urllib.request.urlopen(request) as answer:
        id = json.load(answer)["id"]
    async with TransactionalProducer(broker.url, group="g") as producer:
        await producer.commit(id)
        async with producer.transaction(Message("payments", value=b"y")):
            pass
    await broker.async_wait_until_settled()
    assert [message.headers for message in broker.messages("payments")] == [(), ()]


class Failing(SpanProcessor):
    """A processor that raises whenever it is called."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        raise RuntimeError("no")

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("no")


class FailingAtTheEnd(Failing):
    """The same, at the end of a span only."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Do nothing."""


@pytest.mark.parametrize("processor", [Failing(), FailingAtTheEnd()])
async def test_a_provider_that_fails_harms_nothing_else(
    processor: SpanProcessor,
    broker: InMemoryBroker,
    set_provider: SetProvider,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracing._complain.cache_clear()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    set_provider(provider)
    tracing.look_again()
    own = Message("payments", headers=(("traceparent", PARENT.encode()),))
    async with TransactionalProducer(
        broker.url, group="g", check=lambda _: Decision.COMMIT
    ) as producer:
        async with producer.transaction(own):
            pass
        await producer.prepare(own)
        await broker.async_advance(7.0)
        await broker.async_wait_until_settled()
    assert len(broker.messages("payments")) == 2
    assert caplog.text.count("the tracer provider fails with RuntimeError") == 1


def test_a_trace_is_not_begun_below_one_that_nobody_records(spans: Spans) -> None:
    unrecorded = TraceContext(PARENT[:-1] + "0")
    with tracing.continued("prepare", [Message("a")], {}, parent=unrecorded) as step:
        assert step is None
    with tracing.continued("prepare", [Message("a")], {}, parent=None) as step:
        assert step is None
    with tracing.continued("prepare", [Message("a")], {}, parent=TraceContext(PARENT)) as step:
        assert step is not None


def test_a_provider_that_is_set_later_is_seen(
    set_provider: SetProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracing.look_again()
    assert not tracing.is_on()
    set_provider(TracerProvider(shutdown_on_exit=False))
    monkeypatch.setattr(tracing, "LOOK_S", 0.0)
    assert tracing.is_on()


PAGE = ROOT / "docs/how-to/tracing.md"


def spans_of(printed: str) -> list[dict[str, object]]:
    """Return the spans that a console exporter has printed one after another."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(printed.rstrip()):
        span, at = decoder.raw_decode(printed, at)
        at += len(printed[at:]) - len(printed[at:].lstrip())
        found.append(span)
    return found


def test_the_example_prints_one_trace() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with InMemoryBroker() as broker:
        done = subprocess.run(
            [sys.executable, "-c", example.replace("http://127.0.0.1:8470", broker.url)],
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        )
        broker.wait_until_settled()
        (message,) = broker.messages("payments")
    spans = spans_of(done.stdout)
    traces = {str(span["context"]["trace_id"]) for span in spans}  # type: ignore[index]
    ((name, value),) = message.headers

    assert [span["name"] for span in spans] == [
        "prepare payments",
        "commit payments",
        "place order",
    ]
    assert len(traces) == 1
    assert name == "traceparent"
    assert (value or b"").decode().split("-")[1] == traces.pop().removeprefix("0x")
