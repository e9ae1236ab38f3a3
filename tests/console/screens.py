"""Take pictures of every page of the console, with 10,000 pending transactions and some trouble,
of audits' reports, and record a session in a terminal.

    .venv/bin/python -m tests.console.screens docs/operate/screens [--every] [--reports]

It runs a proxy on a Kafka in memory and Debian's Chromium (`make tools`). `--every` takes each page
in light, dark and narrow; without it those that the docs show. `--reports`: the reports only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import aiohttp

from tests.console import order_4711
from tests.console.chromium import Browser, browser
from tests.spark import audit_summaries
from txbroker.sdk import Decision
from txbroker.sdk.blocking import BlockingTransactionalProducer
from txbroker.testing.broker import InMemoryBroker

PENDING = 10_000
TOKEN = "only-for-the-picture"
LOOKS: dict[str, dict[str, Any]] = {
    "": {},
    "-dark": {"dark": True},
    "-narrow": {"width": 400, "height": 800},
}
SHOWN = {
    "well", "overview", "overview-dark", "overview-narrow", "transactions", "transactions-dark",
    "transactions-narrow", "transaction", "transaction-dark", "content", "groups", "groups-dark",
    "group", "audit", "preview", "outcome", "login", "find", "audit-clean", "audit-drift",
}  # fmt: skip


async def prepare(url: str, group: str, topic: str, count: int) -> list[str]:
    limit = asyncio.Semaphore(64)

    async def one(http: aiohttp.ClientSession, number: int) -> str:
        message = {
            "topic": topic,
            "key": f"customer-{number % 997}",
            "value_json": {"order": 100_000 + number, "cents": 1999 + number, "currency": "EUR"},
            "headers": {"content-type": "application/json"},
        }
        body = {"group": group, "messages": [message], "order_key": f"order-{100_000 + number}"}
        async with limit, http.post("/v1/transactions", json=body) as answer:
            return str((await answer.json())["id"])

    async with aiohttp.ClientSession(url) as http:
        return list(await asyncio.gather(*(one(http, number) for number in range(count))))


async def call(url: str, method: str, path: str, body: dict[str, Any]) -> None:
    async with (
        aiohttp.ClientSession(url) as http,
        http.request(method, path, json=body) as answer,
    ):
        assert answer.status < 300, await answer.text()


@contextmanager
def traffic(url: str, group: str) -> Iterator[None]:
    """Commit transactions all the time, until the block is left."""
    over = threading.Event()

    async def go_on() -> None:
        async with aiohttp.ClientSession(url) as http:
            while not over.is_set():
                message = {"topic": "orders", "key": "k", "value": "v"}
                body = {"group": group, "messages": [message]}
                async with http.post("/v1/transactions", json=body) as answer:
                    id = (await answer.json())["id"]
                async with http.post(f"/v1/transactions/{id}/commit", json={"group": group}):
                    pass

    thread = threading.Thread(target=lambda: asyncio.run(go_on()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def steady(broker: InMemoryBroker) -> bool:
    with urlopen(f"{broker.url}/v1/overview", timeout=20) as answer:
        rates = [p["rates"] for p in json.load(answer)["partitions"]]
    prepared, promoted = (
        sum(rate[f"{what}_per_s"] for rate in rates) for what in ("prepared", "promoted")
    )
    return bool(0 < prepared < 1.1 * promoted)


def sampled(broker: InMemoryBroker) -> int:
    """Return for how many of the last 300 seconds there is a sample."""
    with urlopen(f"{broker.url}/v1/history?since_s=300", timeout=20) as answer:
        return len(json.load(answer)["points"])


def plant(broker: InMemoryBroker, stack: ExitStack) -> dict[str, str]:
    """Let there be trouble; return what the pages are about."""
    url = broker.url
    for topic in ("orders", "payments", "stock", "invoices"):
        broker.create_topic(topic, 3)
    for number in (1, 2, 3):
        till = BlockingTransactionalProducer(
            url, group="checkout", instance=f"till-berlin-{number}", check=lambda _: Decision.COMMIT
        )
        stack.enter_context(till)
    doubtful = BlockingTransactionalProducer(
        url, group="inventory", instance="stock-keeper-1", check=lambda _: Decision.UNKNOWN
    )
    stack.enter_context(doubtful)
    parked = asyncio.run(prepare(url, "inventory", "stock", 14))
    broker.advance(500)
    for id, why in ((parked[0], "order 17 is not in the database"), (parked[1], "a test order")):
        decided = {"reason": why, "by": "Ada"}
        asyncio.run(call(url, "POST", f"/v1/transactions/{id}/rollback", decided))
    refused = asyncio.run(prepare(url, "billing", "invoices", 3))
    broker.delete_topic("invoices")
    for id in refused:
        asyncio.run(call(url, "POST", f"/v1/transactions/{id}/commit", {"group": "billing"}))
    # A closed port.
    dead = {"check_url": "http://127.0.0.1:9/txbroker/check"}
    asyncio.run(call(url, "PUT", "/v1/groups/payments", dead))
    asyncio.run(prepare(url, "payments", "payments", PENDING))
    broker.advance(1_210)
    asyncio.run(prepare(url, "checkout", "orders", 7))
    return {"parked": parked[3], "refused": refused[0]}


def take(window: Browser, folder: Path, name: str, path: str, *, every: bool) -> None:
    for look, options in LOOKS.items():
        if every or name + look in SHOWN:
            window.look(**options)
            window.open(path)
            window.find("h1")
            window.picture(folder / f"{name}{look}.png")


def take_reports(folder: Path, *, every: bool) -> None:
    """Take pictures of the report of a clean run, and of one with every kind of finding."""
    with TemporaryDirectory() as private, browser(f"file://{private}") as window:
        for name, page in audit_summaries.sample_pages().items():
            (Path(private) / f"{name}.html").write_text(page, encoding="utf-8")
            take(window, folder, name, f"/{name}.html", every=every)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--every", action="store_true")
    arguments.add_argument("--reports", action="store_true")
    given = arguments.parse_args()
    folder, every = given.folder, given.every
    folder.mkdir(parents=True, exist_ok=True)
    take_reports(folder, every=every)
    if not given.reports:
        take_console(folder, every=every)


def take_console(folder: Path, *, every: bool) -> None:
    order_4711.record(folder / "order-4711.svg")
    with ExitStack() as stack:
        broker = stack.enter_context(
            InMemoryBroker(partitions=4, create_target_topics=False, pending_group_max=50_000)
        )
        window = stack.enter_context(browser(broker.url))
        take(window, folder, "well", "/", every=every)
        found = plant(broker, stack)
        stack.enter_context(traffic(broker.url, "checkout"))
        window.open("/")
        window.until(lambda: "Group payments is unreachable" in window.text())
        # Until the rates are those of the traffic alone.
        window.until(lambda: steady(broker))
        for seconds in range(15, 91, 15):
            window.until(lambda least=seconds: sampled(broker) >= least)
        pages = {
            "overview": "/?span=5m",
            "transactions": "/transactions?state=pending&group=payments&older=10m",
            "transaction": f"/transactions/{found['parked']}",
            "refused": f"/transactions/{found['refused']}",
            "content": f"/transactions/{found['refused']}?bodies=1",
            "groups": "/groups",
            "find": "/find?topic=stock&group=inventory",
            "group": "/group?name=checkout&span=5m",
            "audit": "/audit",
            "preview": "/actions/rollback?state=parked&group=inventory",
        }
        for name, path in pages.items():
            take(window, folder, name, path, every=every)
        if every or "outcome" in SHOWN:
            window.look()
            window.open("/actions/revive?state=parked")
            window.fill("#reason", "the group's check is mended")
            window.find("form.confirm button").click()
            window.until(lambda: "Revived" in window.text("h1"))
            window.picture(folder / "outcome.png")
    with TemporaryDirectory() as private:
        token = Path(private) / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        with InMemoryBroker(token_file=token) as guarded, browser(guarded.url) as window:
            take(window, folder, "login", "/login", every=every)


if __name__ == "__main__":
    main()
