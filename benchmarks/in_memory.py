"""CPU time of a transaction in the proxy and in the SDK, without Kafka.

The proxy of `txbroker.testing`, with Kafka in memory, and the producers run in separate threads.
Linux reports each thread's CPU time, so other work on the machine has little influence; compare the
least of all rounds. The garbage collector is off; in a proxy it runs rarely.
`python -m benchmarks.in_memory --help`.
"""

import argparse
import asyncio
import gc
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import structlog
import uvloop

from txbroker.cli.bench.http import BenchConnection
from txbroker.config.settings import Settings
from txbroker.principals import Role, digest_of, format_principal, make_token
from txbroker.sdk import Limits, Message, TransactionalProducer
from txbroker.testing.broker import InMemoryBroker

PROXY_THREAD = "txbroker-testing"
WARMUP = 3_000
SWITCH_S = 0.02
"""Switch interval of the threads, long because separate processes would not switch."""


def processor_us(thread: int) -> float:
    """Return a thread's CPU time in µs."""
    stat = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii")
    return int(stat.split()[0]) / 1000


def thread_of_proxy() -> int:
    found = [thread.native_id for thread in threading.enumerate() if thread.name == PROXY_THREAD]
    assert found[0] is not None
    return found[0]


@contextmanager
def in_memory_broker(**settings: Any) -> Iterator[InMemoryBroker]:
    """Start a proxy on a Kafka in memory, set up so that rounds of a measurement compare."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    partitions = Settings.model_fields["partitions"].default
    with InMemoryBroker(partitions=partitions, settled_bytes_max=1 << 30, **settings) as broker:
        yield broker


def with_principals(folder: Path) -> tuple[dict[str, Path], str]:
    """Return the settings of a proxy that knows a hundred principals, and the token of one."""
    path, token = folder / "principals.toml", make_token()
    patterns = {"groups": ["bench*"], "topics": ["orders", "pay*"], "deny_topics": ["pay.audit"]}
    path.write_text(
        "\n".join(
            format_principal(
                f"team-{number}",
                Role.PRODUCER,
                digest=digest_of(token if number == 0 else make_token()),
                certificates=(),
                patterns=patterns,
                expires=None,
            )
            for number in range(100)
        ),
        encoding="utf-8",
    )
    return {"principals_file": path}, token


async def transactions(url: str, count: int, in_flight: int, size: int, token: str) -> None:
    """Prepare and commit `count` transactions."""
    numbers = iter(range(count))
    value = b"x" * size

    async def lane(producer: TransactionalProducer) -> None:
        for number in numbers:
            message = Message("payments", key=b"key-%020d" % number, value=value)
            async with producer.transaction(message):
                pass

    limits = Limits(in_flight_max=in_flight)
    async with TransactionalProducer(
        url, group="bench", limits=limits, token=token or None
    ) as producer:
        await asyncio.gather(*[lane(producer) for _ in range(in_flight)])


async def transactions_over_http(url: str, count: int, in_flight: int, size: int) -> None:
    """Prepare and commit `count` transactions.

    Raises:
        TxbrokerError: a call failed.
    """
    numbers, value = iter(range(count)), "x" * size

    async def client() -> None:
        with closing(BenchConnection(url)) as connection:
            for number in numbers:
                message = {"topic": "payments", "key": f"key-{number:020}", "value": value}
                body = {"group": "bench", "messages": [message]}
                prepared = await connection.post("/v1/transactions", body)
                path = f"/v1/transactions/{prepared['id']}/commit"
                await connection.post(path, {"group": "bench"})

    await asyncio.gather(*(client() for _ in range(in_flight)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000, help="transactions of a round")
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=1024, help="bytes of each message")
    parser.add_argument(
        "--principals", action="store_true", help="authenticate and authorize the producers"
    )
    parser.add_argument(
        "--http", action="store_true", help="producers speak plain HTTP, without the SDK"
    )
    given = parser.parse_args()
    if given.http and given.principals:
        parser.error("--http shows no credential: leave out --principals")
    rounds: list[tuple[float, float]] = []
    settings: dict[str, Path] = {}
    token = ""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if given.principals:
            settings, token = with_principals(Path(folder))
        broker = stack.enter_context(in_memory_broker(**settings))
        proxy, client = thread_of_proxy(), threading.get_native_id()

        def load(count: int) -> None:
            asked = broker.url, count, given.in_flight, given.size
            uvloop.run(
                transactions_over_http(*asked) if given.http else transactions(*asked, token)
            )

        load(WARMUP)
        for _ in range(given.rounds):
            before = processor_us(proxy), processor_us(client)
            load(given.count)
            of_proxy, of_client = (
                (processor_us(thread) - earlier) / given.count
                for thread, earlier in zip((proxy, client), before, strict=True)
            )
            rounds.append((of_proxy, of_client))
            print(f"µs a transaction: proxy {of_proxy:.0f}, client {of_client:.0f}", flush=True)
    least = [min(column) for column in zip(*rounds, strict=True)]
    print(f"least: proxy {least[0]:.0f}, client {least[1]:.0f}")


if __name__ == "__main__":
    main()
