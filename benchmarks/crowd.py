"""Cost of idle connected producers: the same load with and without them.

`txbroker bench` measures one proxy alternately alone, and with `--producers` idle SDK producers of
`--groups` groups, each with a session, and with as many registered groups that are unreachable.
`python -m benchmarks.crowd --help`.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.rig.proxy import beside, call, make_target, proxy_on
from txbroker.embedded import EmbeddedKafka
from txbroker.sdk import TransactionalProducer

AT_ONCE = 50
"""Sessions opened in parallel."""
KINDS = ("alone", "beside")


async def stand_by(url: str, producers: int, groups: int) -> None:
    """Keep `producers` connected until stdin ends."""
    room = asyncio.Semaphore(AT_ONCE)
    async with AsyncExitStack() as stack:

        async def connect(number: int) -> None:
            async with room:
                producer = TransactionalProducer(url, group=f"idle-{number % groups}")
                await stack.enter_async_context(producer)

        await asyncio.gather(*map(connect, range(producers)))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)


@contextmanager
def registered(url: str, groups: int) -> Iterator[None]:
    """Register groups without instances for the block."""
    policy = {"check_url": "http://127.0.0.1:9/check"}
    urls = [f"{url}/v1/groups/silent-{number}" for number in range(groups)]
    for each in urls:
        call("PUT", each, policy)
    try:
        yield
    finally:
        for each in urls:
            call("DELETE", each)


def bench(url: str, kafka: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run `txbroker bench` once, and return its figures."""
    command = [str(Path(sys.executable).with_name("txbroker")), "bench", "-o", "json"]
    command += ["--url", url, "--kafka", kafka, "--in-flight", str(arguments.in_flight)]
    command += ["--warmup-s", str(arguments.warmup_s), "--duration-s", str(arguments.duration_s)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of every round, by kind."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    sizes = ["--producers", str(arguments.producers), "--groups", str(arguments.groups)]
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedKafka(Path(folder) / "kafka", for_load=True) as kafka,
        proxy_on(kafka.bootstrap, "crowd", Path(folder)) as proxy,
    ):
        make_target(kafka.bootstrap)
        for number in range(arguments.rounds):
            found["alone"].append(bench(proxy.url, kafka.bootstrap, arguments))
            with (
                registered(proxy.url, arguments.groups),
                beside(__spec__.name, "--stand-by", proxy.url, *sizes),
            ):
                found["beside"].append(bench(proxy.url, kafka.bootstrap, arguments))
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--producers", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--warmup-s", type=float, default=30.0)
    parser.add_argument("--duration-s", type=float, default=15.0)
    parser.add_argument("--stand-by", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stand_by:
        uvloop.run(stand_by(arguments.stand_by, arguments.producers, arguments.groups))
        return
    found = measure(arguments)
    rates = {kind: [each["acked_per_s"] for each in found[kind]] for kind in KINDS}
    took = {kind: [each["cpu_s_per_1000"]["proxy"] for each in found[kind]] for kind in KINDS}
    for kind in KINDS:
        shown = " ".join(f"{rate:,.0f}" for rate in rates[kind])
        print(
            f"{kind:7} {median(rates[kind]):8,.0f} transactions a second ({shown}), "
            f"proxy {median(took[kind]):.3f} CPU seconds per 1,000, "
            f"{found[kind][-1]['memory_mib']['proxy'][1]:,.0f} MiB"
        )
    ratio = median(rates["beside"]) / median(rates["alone"])
    print(f"{arguments.producers:,} producers of {arguments.groups} groups beside: {ratio:.2f}")


if __name__ == "__main__":
    main()
