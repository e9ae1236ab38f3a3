"""From where to where the audit reads: last stable offsets, retention, topics that are no more."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.kit.topic_reader import create_topic
from txbroker.config.settings import load_settings
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import ConfigurationError
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.tools.audit_access import kept_ms
from txbroker.spark.access import AuditError, AuditKafka, TopicEnds, access_from
from txbroker.spark.facts.bounds import gone, held, read_on, read_target, renewed, to_end
from txbroker.spark.schema import SnapshotBounds, TopicNames, TopicRead

NAMES = TopicNames.of("no")


def access_to(bootstrap: str, write_timeout_s: float = 0.3) -> AuditKafka:
    """Return an access that gives up soon."""
    settings = KafkaSettings(
        bootstrap_servers=(bootstrap,), instance_id="audit", write_timeout_s=write_timeout_s
    )
    return AuditKafka(settings)


def new_topic(kafka: EmbeddedKafka, partitions: int = 2, **configs: str) -> str:
    name = f"cut-{uuid.uuid4().hex[:12]}"
    create_topic(kafka.bootstrap, name, partitions, **configs)
    return name


def produce(kafka: EmbeddedKafka, topic: str, *partitions: int) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for partition in partitions:
        producer.produce(topic, b"v", partition=partition)
    assert producer.flush(30) == 0


def test_only_what_stays_open_at_one_place_is_held() -> None:
    at_cut = TopicEnds("t", (0, 0, 0), (5, 5, 5), open=(0, 1))
    read = read_on(at_cut, None)
    assert read.open == (0, 1)
    assert to_end(read, TopicEnds("t", (0, 0, 0), (9, 9, 9))).open == (0, 1)
    # One now has another open transaction, one is new.
    later = TopicEnds("t", (0, 0, 0), (5, 7, 5), open=(0, 1, 2))
    assert held([read], {"t": later}) == ("t-0",)
    assert held([read], {"t": TopicEnds("t", (0, 0, 0), (9, 9, 9))}) == ()
    assert held([read], {}) == ()


def test_ends_are_asked_for_by_partition(kafka: EmbeddedKafka) -> None:
    topic = new_topic(kafka, retention_ms="5000", message_timestamp_type="LogAppendTime")
    other = new_topic(kafka, 1, cleanup_policy="compact,delete", retention_ms="5000")
    produce(kafka, topic, 0, 0, 1)
    found = access_to(kafka.bootstrap).ends([topic, other, "there-is-no-such-topic"])
    ids = {name: each.id for name, each in found.items()}
    assert len(set(ids.values()) - {""}) == 2
    assert found == {
        topic: TopicEnds(topic, (0, 0), (2, 1), kept_ms=5000, id=ids[topic]),
        other: TopicEnds(other, (0,), (0,), compacted=True, append_time=False, id=ids[other]),
    }


def test_for_how_long_a_topic_keeps_a_record_at_least() -> None:
    configs = {"cleanup.policy": "delete", "retention.bytes": "-1", "retention.ms": "9000"}
    assert kept_ms(configs) == 9000
    assert kept_ms({**configs, "retention.ms": "-1"}) == 0
    assert kept_ms({**configs, "retention.bytes": "1000000"}) == 0
    assert kept_ms({**configs, "cleanup.policy": "compact,delete"}) == 0
    assert kept_ms({}) == 0


async def test_ends_can_be_asked_for_inside_an_event_loop(kafka: EmbeddedKafka) -> None:
    topic = await asyncio.to_thread(new_topic, kafka, 1)
    assert access_to(kafka.bootstrap).ends([topic])[topic].ends == (0,)


def test_an_end_is_where_the_last_transaction_ended(kafka: EmbeddedKafka) -> None:
    topic = new_topic(kafka, 1)
    access = access_to(kafka.bootstrap)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"v", partition=0)
    producer.flush(30)
    found = access.ends([topic])[topic]
    assert (found.ends, found.open) == ((0,), (0,))
    read = read_on(found, None)
    assert held([read], {topic: found}) == (f"{topic}-0",)
    producer.commit_transaction(30)
    # Acknowledged is not yet visible.
    deadline = time.monotonic() + 30
    while access.ends([topic])[topic].ends != (2,):
        assert time.monotonic() < deadline, "the transaction does not end"


def test_records_removed_by_retention_are_counted(kafka: EmbeddedKafka) -> None:
    topic = new_topic(kafka)
    produce(kafka, topic, 0, 0, 0, 1)
    access = access_to(kafka.bootstrap)
    first = read_on(access.ends([topic])[topic], None)
    assert (first.begins, first.ends, first.taken) == ((0, 0), (3, 1), 0)
    assert first.kept_ms == 604_800_000
    produce(kafka, topic, 0, 0)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    place = TopicPartition(topic, 0, 4)
    admin.delete_records([place])[place].result(30)
    now = access.ends([topic])[topic]
    reported = first.kept_ms, first.id
    read = TopicRead(topic, (4, 0), (4, 1), (5, 1), 1, False, (), *reported)
    assert read_on(now, first) == read
    whole = msgspec.structs.replace(read, begins=(4, 0))
    # Records removed before the first run are unknown.
    assert read_on(now, None) == msgspec.structs.replace(whole, taken=0)
    assert read_on(now, None, first) == whole


def test_removed_records_count_from_the_last_run() -> None:
    last = TopicRead("t", (0, 0, 0), (0, 0, 0), (9, 3, 5))
    now = TopicEnds("t", (10, 2), (12, 9))
    assert read_on(now, None, last) == TopicRead("t", (10, 2), (10, 2), (12, 9), taken=1)
    old = TopicEnds("t", (5_000_000_000,), (5_000_000_007,))
    assert read_on(old, None).taken == read_on(old, gone("t")).taken == 0


def test_time_comes_from_the_broker(kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = new_topic(kafka, 1, message_timestamp_type="LogAppendTime")
    access = access_to(kafka.bootstrap, write_timeout_s=30.0)
    before_ms = round(time.time() * 1000)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    names = msgspec.structs.replace(NAMES, op=topic, audit=topic)
    first, second = access.now_ms(names), access.now_ms(names)
    monkeypatch.undo()
    assert before_ms <= first <= second <= round(time.time() * 1000)


def test_topic_without_append_times_is_refused(kafka: EmbeddedKafka) -> None:
    access = access_to(kafka.bootstrap, write_timeout_s=30.0)
    stamped = new_topic(kafka, 1, message_timestamp_type="LogAppendTime")
    topic = new_topic(kafka, 1)
    for op, audit in ((stamped, topic), (topic, stamped)):
        written = msgspec.structs.replace(NAMES, op=op, audit=audit)
        with pytest.raises(
            ConfigurationError, match=rf"{topic} must have message\.timestamp\.type"
        ):
            access.now_ms(written)
    missing = msgspec.structs.replace(NAMES, op=stamped)
    with pytest.raises(ConfigurationError, match=r"no\.audit does not exist: create it with"):
        access.now_ms(missing)
    # With a wrong prefix no topic is to be made.
    with pytest.raises(AuditError, match=r"topic no\.op does not exist: check"):
        access.now_ms(NAMES)
    with pytest.raises(AuditError, match="cannot be read from Kafka"):
        access_to("127.0.0.1:1").now_ms(NAMES)


def test_a_new_partition_is_read_from_its_start() -> None:
    before = TopicRead("t", (0,), (0,), (7,))
    assert read_on(TopicEnds("t", (0, 2), (9, 5)), before) == TopicRead(
        "t", (0, 2), (7, 2), (9, 5), taken=2
    )


@pytest.mark.parametrize("ends", [(6, 3), (7,)])
def test_a_topic_that_was_truncated_asks_for_a_full_audit(ends: tuple[int, ...]) -> None:
    before = TopicRead("t", (0, 0), (0, 0), (7, 3))
    with pytest.raises(AuditError, match=r"topic t ends before .* Run a full audit"):
        read_on(TopicEnds("t", (0,) * len(ends), ends), before)


def test_recreated_topic_longer_than_old_one_is_refused() -> None:
    before = TopicRead("t", (0,), (0,), (7,), id="one")
    assert read_on(TopicEnds("t", (0,), (9,), id="one"), before).begins == (7,)
    recreated = TopicEnds("t", (8,), (9,), id="two")
    # Of one that held nothing, nothing was read.
    assert read_on(recreated, TopicRead("t", (0,), (0,), (0,), id="one")).begins == (8,)
    assert read_on(recreated, TopicRead("t", (0, 0), (0, 0), (0, 0), id="one")).begins == (8,)
    with pytest.raises(AuditError, match=r"topic t is not the topic .* Run a full audit"):
        read_on(recreated, before)
    # A full run does not count records that are gone from it.
    assert read_on(recreated, None, before) == TopicRead("t", (8,), (8,), (9,), taken=0, id="two")
    assert read_on(recreated, msgspec.structs.replace(before, id="")).taken == 1
    assert read_on(recreated, gone("t")).begins == (8,)


@pytest.mark.parametrize(
    ("ends", "id", "renews"),
    [
        ((9, 3), "one", False),
        ((9, 3), "two", True),
        ((6, 3), "one", True),
        ((7,), "one", True),
        (None, "", True),
    ],
)
def test_a_target_that_is_another_one_is_read_from_its_start(
    ends: tuple[int, ...] | None, id: str, renews: bool
) -> None:
    before = TopicRead("t", (0, 0), (0, 0), (7, 3), id="one", since="1")
    now = None if ends is None else TopicEnds("t", (0,) * len(ends), ends, id=id)
    for last in ((before, before), (None, before)):  # a run that continues, and a full one
        read = read_target("t", now, *last, "2")
        assert (read.ends, read.taken) == (ends or (), 0)
        assert (read.since, not any(read.begins)) == (
            ("2", True) if renews else ("1", last[0] is None)
        )
    # Unless a full run without the right to read it was in between, which knows its id alone.
    unread = read_target("t", TopicEnds("t", (), (), unread="no right"), None, before, "2")
    later = read_target("t", now, unread, unread, "3")
    assert (later.since, any(later.begins)) == ("1" if id == "one" else "3", False)
    cuts = [SnapshotBounds(before, before, before, (each,), (), ()) for each in (before, read)]
    assert renewed(*cuts) == ({"t"} if renews else set())
    if ends is None:  # and is there again
        again = read_target("t", TopicEnds("t", (0,), (3,), id="two"), read, read, "3")
        assert (again.begins, again.since) == ((0,), "2")
        back = SnapshotBounds(before, before, before, (again,), (), ())
        assert renewed(cuts[1], back) == {"t"}


def test_a_read_goes_on_to_where_the_topic_ends_now() -> None:
    read = TopicRead("t", (1, 0), (2, 0), (7, 3), taken=1)
    later = to_end(read, TopicEnds("t", (5, 0), (9, 3)))
    assert later == TopicRead("t", (1, 0), (2, 0), (9, 3), taken=1)
    with pytest.raises(AuditError, match="partitions were added"):
        to_end(read, TopicEnds("t", (0, 0, 0), (9, 3, 0)))
    with pytest.raises(AuditError, match="t was deleted and created again while it was read"):
        to_end(read, TopicEnds("t", (5, 0), (9, 3), id="another"))


def test_a_topic_that_is_gone_has_no_partitions() -> None:
    assert gone("t") == TopicRead("t", (), (), ())
    # Made again since, it is read from its start.
    assert read_on(TopicEnds("t", (0,), (3,)), gone("t")).begins == (0,)


def test_missing_own_topic_is_one_sentence(kafka: EmbeddedKafka) -> None:
    with pytest.raises(AuditError, match=r"topic missing\.half does not exist: check"):
        access_to(kafka.bootstrap).own_ends("missing.half")


def test_unavailable_kafka_is_one_sentence() -> None:
    with pytest.raises(AuditError, match="topics cannot be read from Kafka: no connect"):
        access_to("127.0.0.1:1").ends(["t"])


def test_spark_gets_login_options(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text('pass"word\\\n')
    secret.chmod(0o600)
    settings = load_settings(
        {
            "kafka": "b1:9092, b2:9092",
            "kafka_security_protocol": "SASL_PLAINTEXT",
            "kafka_sasl_mechanism": "SCRAM-SHA-256",
            "kafka_sasl_username": "audit",
            "kafka_sasl_password_file": str(secret),
        },
        environ={},
    )
    assert access_from(settings).options == {
        "kafka.bootstrap.servers": "b1:9092,b2:9092",
        "kafka.fetch.max.wait.ms": "20",
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "SCRAM-SHA-256",
        "kafka.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule "
        'required username="audit" password="pass\\"word\\\\";',
    }


def test_contradictory_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no bootstrap servers"):
        AuditKafka(KafkaSettings(bootstrap_servers=(), instance_id="audit")).ends(["t"])
