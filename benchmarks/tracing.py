"""Cost of tracing: off, on without sampling, on with all spans recorded.

`python -m benchmarks.tracing [--transactions N]`: a single step, then transactions through SDK and
proxy with Kafka in memory, alternating, so that the machine affects all alike. Measures the CPU
time of the process, with SDK and proxy together, because other work affects it least.
"""

import argparse
import asyncio
import time
from collections.abc import Callable

import opentelemetry.trace
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from txbroker import tracing
from txbroker.core.records import Message
from txbroker.sdk import Limits, TransactionalProducer
from txbroker.testing.broker import InMemoryBroker

STEPS = 20_000
ROUNDS = 5
IN_FLIGHT = 64
MESSAGE = Message("payments", key=b"42", value=b"x" * 1024)


class Nowhere(SpanExporter):
    """Discards spans."""

    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def provider(sampler: Sampler) -> TracerProvider:
    """Return a provider with this sampler."""
    made = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    made.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=1 << 16))
    return made


KINDS: dict[str, Callable[[], TracerProvider | None]] = {
    "no provider": lambda: None,
    "nothing sampled": lambda: provider(ALWAYS_OFF),
    "all recorded": lambda: provider(ALWAYS_ON),
}


def use(made: TracerProvider | None) -> None:
    """Replace the provider of this process; OpenTelemetry itself allows one only."""
    opentelemetry.trace._TRACER_PROVIDER = made
    tracing.look_again()


def one_step_ns() -> float:
    """Return the CPU time of one step in ns."""
    messages, attributes = (MESSAGE,), {"a": "b"}
    began = time.process_time_ns()
    for _ in range(STEPS):
        with tracing.step("prepare", messages, attributes, kind="producer"):
            pass
    return (time.process_time_ns() - began) / STEPS


async def transaction_us(url: str, count: int) -> float:
    """Return the CPU time of a transaction in µs."""
    left = iter(range(count))

    async def some(producer: TransactionalProducer) -> None:
        for _ in left:
            async with producer.transaction(MESSAGE):
                pass

    async with TransactionalProducer(url, group="bench", limits=Limits()) as producer:
        began = time.process_time()
        await asyncio.gather(*[some(producer) for _ in range(IN_FLIGHT)])
        return (time.process_time() - began) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=1000)
    count = parser.parse_args().transactions
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    made = {name: make() for name, make in KINDS.items()}
    steps: dict[str, list[float]] = {name: [] for name in KINDS}
    whole: dict[str, list[float]] = {name: [] for name in KINDS}
    with InMemoryBroker(settled_bytes_max=1 << 30) as broker:
        asyncio.run(transaction_us(broker.url, count))
        for _ in range(ROUNDS):
            for name in KINDS:
                use(made[name])
                steps[name].append(one_step_ns())
                whole[name].append(asyncio.run(transaction_us(broker.url, count)))
    use(None)
    base = min(whole["no provider"])
    for name in KINDS:
        print(
            f"{name:16} a step {min(steps[name]):8.0f} ns   "
            f"a transaction {min(whole[name]):6.0f} µs   {min(whole[name]) / base:5.2f} of without"
        )


if __name__ == "__main__":
    main()
