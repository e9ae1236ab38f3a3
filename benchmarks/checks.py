"""Throughput of check-backs that are all due: over SDK sessions, and over HTTP.

`--count` undecided transactions are written directly to Kafka, as an owner's appenders would, while
their groups are unreachable. When all are due, the groups appear: SDK producers, or an HTTP server
for check URLs, in a separate process. The time ends when all are committed and promoted; every
transaction must have been checked exactly once.
`python -m benchmarks.checks --help`.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.rig.filler import GROUPS, Filler
from benchmarks.rig.proxy import Proxy, beside, call, cpu_s, make_target, proxy_on
from txbroker.core.records import CheckPolicy
from txbroker.embedded import EmbeddedKafka

AFTER_S = 5.0
DEADLINE_S = 900.0
DEDUP_WINDOW_S = 60.0
POLL_S = 0.2
PARALLEL = 32
"""Checks of one group in flight: eight groups reach a proxy's maximum, 256."""


# --- the answering process ---------------------------------------------------------------------


async def answer_sessions(url: str) -> None:
    """Answer the checks of all groups as SDK producers, until stdin ends."""
    from contextlib import AsyncExitStack

    from txbroker.sdk import CheckRequest, Decision, TransactionalProducer

    async def commit(request: CheckRequest) -> Decision:
        return Decision.COMMIT

    _ready()
    async with AsyncExitStack() as stack:
        for number in range(GROUPS):
            producer = TransactionalProducer(url, group=f"bench-{number}", check=commit)
            await stack.enter_async_context(producer)
        await _until_stdin_ends()


async def answer_http(url: str) -> None:
    """Answer the checks of all groups as an HTTP server, until stdin ends."""
    from aiohttp import web

    async def commit(request: web.Request) -> web.Response:
        question = await request.json()
        return web.json_response({"id": question["id"], "decision": "commit"})

    app = web.Application()
    app.router.add_post("/check", commit)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        _ready()
        for number in range(GROUPS):
            policy = {"check_url": f"http://{host}:{port}/check"}
            await asyncio.to_thread(register, url, number, policy)
        await _until_stdin_ends()
    finally:
        await runner.cleanup()


def _ready() -> None:
    """Report that the groups are reachable, so that Python's start is not measured."""
    print("ready", flush=True)


async def _until_stdin_ends() -> None:
    await asyncio.to_thread(sys.stdin.buffer.read)


ANSWERING = {"sessions": answer_sessions, "http": answer_http}


def register(url: str, number: int, policy: dict[str, Any]) -> None:
    """Register a group."""
    call("PUT", f"{url}/v1/groups/bench-{number}", {"parallel": PARALLEL, **policy})


# --- the measurement ---------------------------------------------------------------------------


def measure(kafka: str, folder: Path, way: str, count: int, rate: float) -> dict[str, Any]:
    """Fill an installation with due transactions, start the groups, and return the figures."""
    with proxy_on(kafka, way, folder, dedup_window_s=DEDUP_WINDOW_S, log_level="error") as proxy:
        for number in range(GROUPS):
            register(proxy.url, number, {})
        filler = Filler(kafka, way, 1024, CheckPolicy(after_s=AFTER_S))
        uvloop.run(filler.fill(proxy, count, "", rate, f"{way}: undecided"))
        proxy.wait_for("pending{", count)
        time.sleep(AFTER_S)
        before_s = cpu_s(proxy.pid)
        with beside(__spec__.name, "--answer", way, "--url", proxy.url) as process:
            began, started_s = time.monotonic(), cpu_s(process.pid)
            settled_at = _watch(proxy, count, began, way)
            client_s = cpu_s(process.pid) - started_s
        outcomes = proxy.metric_by("checks_total{", "outcome")
        del outcomes["unreachable"]  # before the groups appeared, so not a check
        if +outcomes != Counter(commit=count):
            raise SystemExit(f"not every transaction was checked once: {dict(outcomes)}")
        took_s = settled_at - began
        return {
            "way": way,
            "checks": count,
            "seconds": round(took_s, 2),
            "checks_per_s": round(count / took_s, 1),
            "proxy_cpu_s_per_1000": round((cpu_s(proxy.pid) - before_s) / count * 1000, 3),
            "answering_cpu_s_per_1000": round(client_s / count * 1000, 3),
        }


def _watch(proxy: Proxy, count: int, began: float, way: str) -> float:
    """Wait until everything is promoted; return when that was."""
    while True:
        done = proxy.metric("promoted_total{")
        now = time.monotonic()
        print(f"\r{way}: {done:,.0f} of {count:,} promoted", end="", file=sys.stderr, flush=True)
        if done >= count:
            print(file=sys.stderr)
            return now
        if now - began > DEADLINE_S:
            raise SystemExit(f"only {done:,.0f} of {count:,} are promoted after {DEADLINE_S:g} s")
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--ways", nargs="+", choices=sorted(ANSWERING), default=list(ANSWERING))
    parser.add_argument("--rate", type=float, default=12_000.0, help="written a second at most")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--answer", choices=sorted(ANSWERING), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        uvloop.run(ANSWERING[arguments.answer](arguments.url))
        return
    for way in arguments.ways:
        with (
            tempfile.TemporaryDirectory() as folder,
            EmbeddedKafka(Path(folder) / "kafka", for_load=True) as kafka,
        ):
            make_target(kafka.bootstrap)
            found = measure(kafka.bootstrap, Path(folder), way, arguments.count, arguments.rate)
        if arguments.json:
            print(json.dumps(found), flush=True)
        else:
            print(
                f"{way:9} {found['checks_per_s']:8,.1f} checks a second, CPU seconds per 1,000: "
                f"proxy {found['proxy_cpu_s_per_1000']:.3f}, "
                f"who answers {found['answering_cpu_s_per_1000']:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
