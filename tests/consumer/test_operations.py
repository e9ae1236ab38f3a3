"""What operators do with many dead letters, and with the steps of the retry topic."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from msgspec import structs

from txbroker.consumer.operations import copies
from txbroker.consumer.operations.copies import dead_letters, send_back
from txbroker.consumer.operations.groups import ConsumerGroups
from txbroker.consumer.settings import group_topics
from txbroker.core.consuming.copies import (
    Failed,
    GroupTopics,
    LeftOut,
    MessageSource,
    make_copy,
    read_copy,
)
from txbroker.core.consuming.position import Metadata, StoredOffset, encode_metadata
from txbroker.core.records import Record
from txbroker.door.writing import Copy
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.testing.consuming import MemoryConsumingDoor
from txbroker.testing.memory import MemoryKafka

NAMES = GroupTopics.of("txbroker", "stock")


class Operator:
    """A group whose consumers do not run, with dead letters.

    Attributes:
        stored_max: transactions before Kafka is down.
    """

    def __init__(self) -> None:
        self.kafka = MemoryKafka()
        self.kafka.create_topic("orders", 1)
        self.stored_max = 1000
        self.door = FragileDoor(self)
        self.groups = ConsumerGroups(self.door, "txbroker")

    def bury(self, offsets: range) -> None:
        """Write dead letters."""
        for offset in offsets:
            failed = Failed(MessageSource("orders", 0, offset), 3, offset, "no stock")
            copy = make_copy(Record(b"key", b"%d" % offset, (("h", b"1"),), 7), failed)
            self.kafka.write(NAMES.dead, offset % 4, [copy, Record(b"foreign", b"")], None)

    def sent(self) -> list[int]:
        """Return the offsets of messages that were sent back, in order."""
        log = self.kafka.partition(NAMES.retry, 0)
        found = []
        for record in log.read(log.begin, log.stable_end):
            copy = read_copy(record)
            assert copy is not None
            message, failed = copy
            offset = failed.source.offset
            assert message.headers == (("h", b"1"),)
            assert (message.value, message.timestamp_ms) == (b"%d" % offset, 7)
            assert (failed.attempts, failed.due_ms, failed.cause) == (3, 0, "no stock")
            found.append(offset)
        return found


class FragileDoor(MemoryConsumingDoor):
    """A door to a Kafka that stops."""

    def __init__(self, operator: Operator) -> None:
        super().__init__(operator.kafka)
        self._operator = operator

    async def store(self, group: str, copies: Sequence[Copy]) -> None:
        if not self._operator.stored_max:
            raise KafkaUnavailable("down")
        self._operator.stored_max -= 1
        await super().store(group, copies)


@pytest.fixture
async def operator() -> Operator:
    made = Operator()
    await made.door.create(group_topics("txbroker", "stock", aside=True))
    return made


async def test_many_dead_letters_are_sent_back_once(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_STORED_RECORDS", 100)
    monkeypatch.setattr(copies, "_READ_OFFSETS", 50)
    operator.bury(range(1500))
    view = await operator.groups.view("stock")
    newest = await dead_letters(operator.door, view, 5)
    assert [each.failed.source.offset for each in newest] == [1499, 1498, 1497, 1496, 1495]
    assert [each.message.value for each in newest] == [None] * 5

    # Some go back, then Kafka stops within the others; sent ones are not sent again.
    assert await send_back(operator.door, view, newest, "r") == 5
    letters = await dead_letters(operator.door, view, 10_000)
    assert len(letters) == 1495
    operator.stored_max = 7
    with pytest.raises(KafkaUnavailable):
        await send_back(operator.door, view, letters, "r")
    assert len(operator.sent()) == 5 + 7 * 50
    operator.stored_max = 1000
    letters = await dead_letters(operator.door, view, 10_000)
    assert len(letters) == 1495 - 7 * 50
    assert await send_back(operator.door, view, letters, "r") == len(letters)
    assert await dead_letters(operator.door, view, 10_000) == []
    sent = operator.sent()
    assert sorted(sent) == list(range(1500))
    of_one = [offset for offset in sent[5:] if offset % 4 == 1]
    assert of_one == sorted(of_one)


async def test_deleted_dead_letters_are_not_sent(operator: Operator) -> None:
    operator.bury(range(8))
    view = await operator.groups.view("stock")
    letters = await dead_letters(operator.door, view, 100)
    operator.kafka.partition(NAMES.dead, 0).delete_before(2)
    assert await send_back(operator.door, view, letters, "r") == 7
    assert 0 not in operator.sent()


async def test_retry_needs_the_retry_topic(operator: Operator) -> None:
    operator.bury(range(1))
    operator.kafka.delete_topic(NAMES.retry)
    view = await operator.groups.view("stock")
    letters = await dead_letters(operator.door, view, 100)
    with pytest.raises(ConfigurationError, match="start one of its consumers once"):
        await send_back(operator.door, view, letters, "r")


async def test_steps_count_what_waits(operator: Operator) -> None:
    due_ms = round(time.time() * 1000) + 60_000
    waiting = [
        make_copy(Record(b"k", b""), Failed(MessageSource("orders", 0, n), 1, due_ms + n, ""))
        for n in range(5)
    ]
    operator.kafka.write(NAMES.retry, 2, waiting, None)
    operator.kafka.write(NAMES.retry, 15, waiting[:1], None)
    text, _left_out = encode_metadata(1, Metadata(1, ranges=((2, 3),)))
    operator.kafka.group("stock").offsets[NAMES.retry, 2] = StoredOffset(1, text)
    steps = await operator.groups.steps(await operator.groups.view("stock"))
    assert [(each.step, each.delay_s, each.messages, each.due_ms) for each in steps] == [
        (2, 60, 3, due_ms + 1),
        (15, 7200, 1, due_ms),
    ]


@pytest.mark.parametrize("obstacle", ["", "deleted", "other", "small"])
async def test_dead_letter_that_lacks_its_value(operator: Operator, obstacle: str) -> None:
    """It is sent back with what its first place has, or a sentence gives the reason."""
    original = Record(b"key", b"x" * 5000, (("h", b"1"),), 7)
    if obstacle == "other":  # the topic was created again
        original = structs.replace(original, value=b"y")
    operator.kafka.write("orders", 0, [original], None)
    message = structs.replace(original, value=None)
    failed = Failed(
        MessageSource("orders", 0, 0), 3, 5, "no stock", left_out=LeftOut("value", 5000)
    )
    operator.kafka.write(NAMES.dead, 0, [make_copy(message, failed)], None)
    view = await operator.groups.view("stock")
    (letter,) = await dead_letters(operator.door, view, 1)
    assert letter.size == 5000
    if obstacle == "deleted":
        operator.kafka.partition("orders", 0).delete_before(1)
    if obstacle == "small":
        operator.kafka.set_message_bytes_max(NAMES.retry, 1000)
    if obstacle:
        raised = f"raise max.message.bytes of {NAMES.retry}"
        match = raised if obstacle == "small" else "was deleted"
        with pytest.raises(KafkaUnavailable, match=match):
            await send_back(operator.door, view, [letter], "r")
        assert await dead_letters(operator.door, view, 1) == [letter]
        return
    assert await send_back(operator.door, view, [letter], "r") == 1
    log = operator.kafka.partition(NAMES.retry, 0)
    (copy,) = map(read_copy, log.read(log.begin, log.stable_end))
    assert copy is not None
    assert (copy[0].value, copy[0].headers) == (b"x" * 5000, (("h", b"1"),))
    assert copy[1].left_out is None
