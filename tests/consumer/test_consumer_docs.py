"""The examples of the how-to pages on consumers, run as they stand there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from txbroker.consumer import Consumer
from txbroker.sdk import BlockingTransactionalProducer, Message
from txbroker.testing.broker import InMemoryBroker

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
TOPICS = ("orders", "temperatures", "mails", "prices")
VALUES = [b"book", b"", b"pen"]
_POLL_S = 0.01

ONE_DEAD = {"handled": 2, "failed": 1, "dead": 1}
ALL, ALL_AFTER_A_FAILURE = {"handled": 3}, {"handled": 3, "failed": 1}
RESULTS = {
    "consume": [ONE_DEAD, ALL_AFTER_A_FAILURE, ALL_AFTER_A_FAILURE, ALL, ALL],
    "consume-at-least-once": [ALL],
    "consume-at-most-once": [ALL],
    "consume-concurrently": [ALL],
    "consume-in-order": [ALL_AFTER_A_FAILURE],
    "consume-broadcast": [ALL],
    "consume-exactly-once": [ALL, ALL, {"handled": 3}, ALL],
}
"""What happens to the messages, by page and example."""


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)


def example_of_readme() -> str:
    text = (PAGES.parents[1] / "README.md").read_text()
    return text.partition("## Consume topics")[2].split("```")[1]


class Service:
    """The functions that the examples call."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self._refused: set[bytes] = set()

    def _fails(self, value: bytes) -> bool:
        """Return whether to refuse an empty message, once."""
        if value or value in self._refused:
            return False
        self._refused.add(value)
        return True

    async def book(self, key: bytes, value: bytes) -> None:
        if self._fails(value):
            raise ValueError("empty")
        self.done.append(value)

    async def insert(self, messages: list[Any]) -> list[Exception | None]:
        failed: list[Exception | None] = [
            ValueError("empty") if self._fails(each.value) else None for each in messages
        ]
        pairs = zip(messages, failed, strict=True)
        self.done += [each.value for each, error in pairs if error is None]
        return failed

    async def note(self, _key: object, value: bytes) -> None:
        self.done.append(value)

    def names(self) -> dict[str, Any]:
        async def true(_key: bytes) -> bool:
            return True

        async def false(_key: bytes) -> bool:
            return False

        return {
            "book": self.book,
            "insert": self.insert,
            "in_stock": true,
            "is_busy": false,
            "book_blocking": lambda _key, value: self.done.append(value),
            **dict.fromkeys(("upsert", "show", "send_mail"), self.note),
        }


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as running:
        for topic in TOPICS:
            running.create_topic(topic)
        running.create_topic("priced")
        with BlockingTransactionalProducer(running.url, group="shop") as producer:
            for topic in TOPICS:
                for number, value in enumerate(VALUES):
                    with producer.transaction(Message(topic, key=b"%d" % number, value=value)):
                        pass
        running.wait_until_settled()
        yield running


def run_example(
    code: str,
    broker: InMemoryBroker,
    expected: Mapping[str, int],
    monkeypatch: pytest.MonkeyPatch,
    other_names: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[dict[str, Any], Service]:
    """Run an example until its consumer has these counts; return its names and the service."""
    service = Service()

    class Sample(Consumer):
        def __init__(self, kafka: str, **options: Any) -> None:
            assert kafka == "kafka:9092"
            super().__init__(broker, **options)

        async def start(self) -> None:
            await super().start()
            self._watching = asyncio.create_task(self._watch())

        async def _watch(self) -> None:
            while not self.statistics().counts.items() >= expected.items():
                await asyncio.sleep(_POLL_S)
            self.stop()

        async def aclose(self) -> None:
            await super().aclose()
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
            assert self.statistics().counts == expected

    for module in ("txbroker.consumer", "txbroker.consumer.blocking"):
        monkeypatch.setattr(f"{module}.Consumer", Sample)
    names = {"__name__": "example", **service.names(), **other_names}
    exec(compile(code, "example", "exec"), names)
    return names, service


@pytest.mark.parametrize(
    ("page", "number"),
    [(page, n) for page, results in RESULTS.items() for n in range(len(results))],
)
def test_example_works(
    page: str,
    number: int,
    broker: InMemoryBroker,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    if page == "consume-exactly-once":
        with contextlib.closing(sqlite3.connect("shop.db")) as shop:
            shop.execute("CREATE TABLE booked (value BLOB)")
    code, expected = examples(page)[number], RESULTS[page][number]
    names, service = run_example(code, broker, expected, monkeypatch)
    done = names.get("cache", {}).values() or service.done
    if "stock" in names:
        done = [value for (value,) in names["stock"].execute("SELECT value FROM booked")]
        check_fence(names)
    assert sorted(set(done) or exactly_once(names, broker)) == sorted(
        VALUES if expected.get("dead") is None else [b"book", b"pen"]
    )


def exactly_once(names: Mapping[str, Any], broker: InMemoryBroker) -> list[bytes]:
    """Return the values that an example stored with its positions, and empty ones it left out."""
    if "price" in names:
        places = range(len(broker._kafka.topics["priced"].partitions))
        priced = [one for place in places for one in broker._kafka.visible("priced", place)]
        return [b"", *((record.value or b"").removesuffix(b" 10 EUR") for record in priced)]
    if "InFolder" in names:
        files = [json.loads(path.read_text()) for path in Path("booked").glob("*.json")]
        return [value.encode() for _positions, values in files for value in values]
    with contextlib.closing(sqlite3.connect("shop.db")) as shop:
        return [value for (value,) in shop.execute("SELECT value FROM booked")]


def test_example_of_readme_works(broker: InMemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:

    def book(_key: bytes, value: bytes) -> None:
        booked.append(value)

    booked: list[bytes] = []
    names = {"in_stock": lambda _key: True, "book": book}
    run_example(example_of_readme(), broker, ONE_DEAD, monkeypatch, names)
    assert booked == [b"book", b"pen"]


def check_fence(names: Mapping[str, Any]) -> None:
    """An owner with a lower token writes nothing."""
    stock = names["stock"]
    ((place, token),) = stock.execute("SELECT place, token FROM fence")
    topic, partition = place.split("/")
    late = SimpleNamespace(topic=topic, partition=partition, token=token - 1, id="x", value=b"x")
    with pytest.raises(names["Fenced"], match=f"newest is {token}"):
        asyncio.run(names["handle"](late))
    assert stock.execute("SELECT count(*) FROM booked WHERE id = 'x'").fetchone() == (0,)
    stock.close()


def test_all_examples_are_run() -> None:
    pages = [path.stem for path in sorted(PAGES.glob("consume*.md"))]
    assert {page: len(examples(page)) for page in pages} == {
        page: len(results) for page, results in RESULTS.items()
    }
