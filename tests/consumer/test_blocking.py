"""Consumers of code that blocks, against a broker in another thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.until import unique
from txbroker.consumer import BlockingConsumer, ReceivedMessage
from txbroker.errors import ConfigurationError
from txbroker.sdk import BlockingTransactionalProducer, Message
from txbroker.testing.broker import InMemoryBroker


@pytest.fixture(scope="module")
def shared() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as broker:
        yield broker


@pytest.fixture
def broker(shared: InMemoryBroker) -> Iterator[InMemoryBroker]:
    before = threading.active_count()
    yield shared
    assert threading.active_count() <= before + 2, "no thread is left"


def topic_with(broker: InMemoryBroker, count: int) -> str:
    name = unique("orders")
    broker.create_topic(name, 1)
    with BlockingTransactionalProducer(broker.url, group="orders") as producer:
        for number in range(count):
            producer.send_in_transaction(Message(name, value=b"%d" % number), lambda _: None)
    return name


def consumer(broker: InMemoryBroker, topic: str, **options: Any) -> BlockingConsumer:
    given = {"group": topic, "topics": [topic], "retry_interval_s": 0.01, "drain_s": 1.0, **options}
    return BlockingConsumer(broker, **given)


def test_handlers_run_in_threads_until_stop(broker: InMemoryBroker) -> None:
    topic = topic_with(broker, 5)
    seen: list[bytes | None] = []
    with consumer(broker, topic) as one:

        def handle(message: ReceivedMessage) -> None:
            assert threading.current_thread().name.startswith("txbroker-handler")
            seen.append(message.value)
            if len(seen) == 1:
                raise ValueError("bug")
            if len(seen) == 6:
                one.stop()

        one.run(handle)
        assert one.statistics().in_flight == 0
    assert seen == [b"0", *(b"%d" % number for number in range(5))]


def test_iteration_and_batches(broker: InMemoryBroker) -> None:
    topic = topic_with(broker, 10)
    with consumer(broker, topic, order="none") as one:
        for number, message in enumerate(one):
            assert message.id.endswith("/0")
            message.done()
            if number == 3:
                break
    seen = []
    with consumer(broker, topic, order="none") as one:
        for messages in one.batches(4, 0.05):
            for message in messages:
                seen.append(message)
                message.done()
            if len(seen) == 6:
                one.stop()
    assert sorted(message.value for message in seen if message.value) == [
        b"%d" % number for number in range(4, 10)
    ]
    seen[0].done()  # after the close
    seen[0].failed(ValueError("late"))


def test_iterator_after_close(broker: InMemoryBroker) -> None:
    topic = topic_with(broker, 2)
    with consumer(broker, topic) as one:
        messages = iter(one)
        message = next(messages)
    message.done()
    with pytest.raises(ConfigurationError, match="not started"):
        next(messages)
    messages.close()  # type: ignore[attr-defined]


def test_stop_from_another_thread(broker: InMemoryBroker) -> None:
    topic = topic_with(broker, 0)
    with consumer(broker, topic) as one:
        threading.Timer(0.1, one.stop).start()
        one.run(lambda _message: None)
        assert list(one) == []
    one.stop()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_exit_in_a_handler_reaches_the_caller(broker: InMemoryBroker, error: BaseException) -> None:
    topic = topic_with(broker, 1)

    def handle(_message: ReceivedMessage) -> None:
        raise error

    with consumer(broker, topic) as one, pytest.raises(type(error)):
        one.run(handle)


def test_interruption_of_the_caller_cancels(broker: InMemoryBroker) -> None:
    topic = topic_with(broker, 0)
    with consumer(broker, topic) as one:
        threading.Timer(
            0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        ).start()
        with pytest.raises(KeyboardInterrupt):
            one.run(lambda _message: None)


def test_use_at_the_wrong_time(broker: InMemoryBroker) -> None:
    topic = topic_with(broker, 1)
    one = consumer(broker, topic)
    for use in (one.suspend, one.statistics, lambda: one.run(print), lambda: next(iter(one))):
        with pytest.raises(ConfigurationError, match="not started"):
            use()
    one.close()
    with one, pytest.raises(ConfigurationError, match="started already"):
        one.start()

    with consumer(broker, topic) as two:
        found: list[BaseException] = []

        async def handle(_message: ReceivedMessage) -> None:
            try:
                two.statistics()
            except ConfigurationError as error:
                found.append(error)
            two.stop()

        two.run(handle)
    assert found, "it would wait for itself"


def test_start_that_fails_ends_its_thread(broker: InMemoryBroker) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        consumer(broker, "nowhere").start()
    assert "txbroker-consumer" not in {thread.name for thread in threading.enumerate()}


def test_suspension(broker: InMemoryBroker) -> None:
    topic = topic_with(broker, 1)
    seen: list[bytes | None] = []
    with consumer(broker, topic) as one:
        one.suspend(topic)
        threading.Timer(0.2, one.resume, (topic,)).start()

        def handle(message: ReceivedMessage) -> None:
            seen.append(message.value)
            one.stop()

        one.run(handle)
    assert seen == [b"0"]
