"""Spans that end in memory instead of a collector."""

import time
from collections.abc import Callable, Iterator

import opentelemetry.trace
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from txbroker import tracing

WAIT_S = 20.0


class Spans:
    """The spans that this process has ended so far; SDK and proxy are in it, both."""

    def __init__(self, exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
        self._exporter = exporter
        self.tracer = provider.get_tracer("the user's own")

    def all(self) -> list[ReadableSpan]:
        """Return all of them."""
        return list(self._exporter.get_finished_spans())

    def names(self) -> set[tuple[str, str]]:
        """Return kind and name of each."""
        return {(span.kind.name.lower(), span.name) for span in self.all()}

    def one(self, kind: str, name: str) -> ReadableSpan:
        """Return the span of a kind and name, once it has ended; there must be one only."""
        until_s = time.monotonic() + WAIT_S
        while (kind, name) not in self.names():
            assert time.monotonic() < until_s, f"no {kind} span {name!r} in {self.names()}"
            time.sleep(0.005)
        found = [s for s in self.all() if (s.kind.name.lower(), s.name) == (kind, name)]
        assert len(found) == 1
        return found[0]


SetProvider = Callable[[TracerProvider], None]


@pytest.fixture
def set_provider() -> Iterator[SetProvider]:
    """Set a provider for one test: OpenTelemetry itself lets a process set one only once."""
    patch = pytest.MonkeyPatch()

    def set_one(provider: TracerProvider) -> None:
        patch.setattr(opentelemetry.trace, "_TRACER_PROVIDER", provider)

    yield set_one
    patch.undo()
    tracing.look_again()
    assert not tracing.is_on()


@pytest.fixture
def spans(set_provider: SetProvider) -> Iterator[Spans]:
    """Tracing is on for one test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    set_provider(provider)
    tracing.look_again()
    yield Spans(exporter, provider)
    provider.shutdown()
