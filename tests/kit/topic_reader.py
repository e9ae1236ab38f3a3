"""Reads whole topics with librdkafka, and makes them: another make of client than txbroker's."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.faults.judge import End, Header, Rec, Seen, Topics

_READ_TIMEOUT_S = 15.0
_CLOSE_S = 30.0
_POLL_S = 0.1
ADMIN_TIMEOUT_S = 60.0
"""A Kafka that was stopped for a moment may take longer than ten seconds over its first answer."""
_KNOWN_MAX = 10_000
_known: dict[Header, Header] = {}


@cache
def admin_of(bootstrap: str) -> AdminClient:
    """Return a client of a Kafka, always the same one: results are lost with the client."""
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})


def create_topic(bootstrap: str, name: str, partitions: int = 1, **configs: str) -> str:
    """Create a topic with settings (`_` for `.`), and wait until it is there."""
    admin = admin_of(bootstrap)
    config = {key.replace("_", "."): value for key, value in configs.items()}
    new = NewTopic(name, partitions, 1, config=config)
    try:
        admin.create_topics([new])[name].result(ADMIN_TIMEOUT_S)
    except KafkaException as error:  # the answer of an earlier attempt may be lost
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise
    deadline = time.monotonic() + ADMIN_TIMEOUT_S
    # Created is decided by the controller; the broker hears of it a little later.
    while _exists(admin, name) is not True:
        assert time.monotonic() < deadline, f"{name} does not appear"
    return name


def delete_topic(bootstrap: str, name: str) -> None:
    admin = admin_of(bootstrap)
    admin.delete_topics([name])[name].result(ADMIN_TIMEOUT_S)
    deadline = time.monotonic() + ADMIN_TIMEOUT_S
    while _exists(admin, name) is not False:
        assert time.monotonic() < deadline, f"{name} does not go away"


def _exists(admin: AdminClient, name: str) -> bool | None:
    """Return whether a broker knows a topic; None if its connection ended."""
    try:
        return name in admin.list_topics(timeout=ADMIN_TIMEOUT_S).topics
    except KafkaException as error:
        if error.args[0].code() != KafkaError._TRANSPORT:
            raise
        return None  # librdkafka repeats requests of producers and consumers, but not this one


def read_topics(bootstrap: str, names: Iterable[str], *, committed: bool = True) -> list[Rec]:
    """Return every record of these topics, from begin to end."""
    consumer, parts = assigned(
        bootstrap, names, committed=committed, **{"enable.partition.eof": True}
    )
    try:
        return list(_poll_all(consumer, len(parts)))
    finally:
        consumer.close()


def _poll_all(consumer: Consumer, open_partitions: int) -> Iterable[Rec]:
    while open_partitions:
        message = consumer.poll(_READ_TIMEOUT_S)
        assert message is not None, "Kafka does not answer"
        error = message.error()
        if error is not None:
            assert error.code() == KafkaError._PARTITION_EOF, error
            open_partitions -= 1
            continue
        yield record_of(message)


def record_of(message: Any) -> Rec:
    """Return what librdkafka gives as the judge takes it."""
    return Rec(
        sys.intern(str(message.topic())),
        int(message.partition() or 0),
        int(message.offset() or 0),
        int(message.timestamp()[1]),
        message.key(),
        message.value(),
        _headers(message.headers()),
    )


def _headers(found: Any) -> tuple[Header, ...]:
    """What librdkafka gives, which its types describe too widely; the same ones are one object, as
    most are the same in every record of a long run."""
    if len(_known) > _KNOWN_MAX:
        _known.clear()
    return tuple(_known.setdefault(each, each) for each in found or ())


def assigned(
    bootstrap: str, names: Iterable[str], *, committed: bool = True, **settings: Any
) -> tuple[Consumer, list[TopicPartition]]:
    """Return a consumer that reads all partitions of these topics from their begin."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "judge",
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 20,
            "log_level": 0,
            **settings,
        }
    )
    known = consumer.list_topics(timeout=_READ_TIMEOUT_S).topics
    parts = [TopicPartition(name, p, 0) for name in names for p in known[name].partitions]
    consumer.assign(parts)
    return consumer, parts


def read_ends(bootstrap: str, names: Sequence[str]) -> list[End]:
    """Return where each partition ends, and how far read_committed readers get."""
    high, parts = assigned(bootstrap, names, committed=False)
    stable, _ = assigned(bootstrap, names)
    try:
        return [
            End(
                part.topic,
                part.partition,
                high.get_watermark_offsets(part, timeout=_READ_TIMEOUT_S)[1],
                stable.get_watermark_offsets(part, timeout=_READ_TIMEOUT_S)[1],
            )
            for part in parts
        ]
    finally:
        high.close()
        stable.close()


def read_all(bootstrap: str, prefix: str, targets: Sequence[str]) -> Topics:
    """Return what the judge needs of one installation."""
    return Topics(
        half=read_topics(bootstrap, [f"{prefix}.half"], committed=False),
        op=read_topics(bootstrap, [f"{prefix}.op"], committed=False),
        parked=read_topics(bootstrap, [f"{prefix}.parked"]),
        checkpoint=read_topics(bootstrap, [f"{prefix}.checkpoint"]),
        targets=read_topics(bootstrap, targets),
        ends=read_ends(bootstrap, [*targets, f"{prefix}.checkpoint", f"{prefix}.parked"]),
    )


class Along:
    """Reads as a consumer does that is there all the time: read_committed, and assigned."""

    def __init__(self, bootstrap: str, topics: Sequence[str]) -> None:
        self._consumer, _ = assigned(bootstrap, topics)
        self._seen: list[Seen] = []
        self._over = threading.Event()
        self._wrong: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.is_set():
            message = self._consumer.poll(_POLL_S)
            if message is None:
                continue
            error = message.error()
            if error is None:
                self._seen.append(Seen(record_of(message), time.time()))
            elif error.fatal():
                self._wrong.append(str(error))

    def read_to(self) -> dict[tuple[str, int], int]:
        """Return the offset after the last record read, for each partition."""
        found: dict[tuple[str, int], int] = {}
        for seen in tuple(self._seen):
            record = seen.record
            found[record.topic, record.partition] = record.offset + 1
        return found

    def end(self) -> list[Seen]:
        self._over.set()
        self._thread.join(_CLOSE_S)
        # The client library does not always return from this after broken connections.
        closing = threading.Thread(target=self._consumer.close, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        assert not self._wrong, self._wrong
        return self._seen
