"""The doctor on a real Kafka with a real proxy, and with trouble that was planted there."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from tests.kit.cli import TXBROKER, Dev, Result
from tests.kit.doctor import settings
from tests.kit.secret_files import secret_file
from txbroker.cli.doctor.findings import DoctorResult
from txbroker.cli.doctor.report import CHECKS, examine
from txbroker.cli.doctor.subject import HttpProxies, Subject
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.tools.examination import KafkaExamination, OpenTransaction
from txbroker.sdk import is_test_call, verify_webhook

BODY, QUERY = "b0dy-of-a-message", "qu3ry-of-a-url"
SECRETS = "secrets"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    """One `txbroker dev` with a transaction that was promoted, and one that is pending."""
    folder = tmp_path_factory.mktemp("doctor")
    secrets = folder / SECRETS
    secrets.mkdir()
    running = Dev(folder / "data", "--check-after-s", "3600", "--secrets-dir", str(secrets))
    running.start()
    for decision in ("commit", "none"):
        done = cli(running, "send", "payments", BODY, "--decision", decision, "--group", "shop")
        assert done.code == 0, done
    yield running
    running.process.kill()
    running.process.communicate()


def cli(dev: Dev, *arguments: object) -> Result:
    """Run a command in a child process, for this proxy and its Kafka."""
    command = [TXBROKER, *map(str, arguments), "--url", dev.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


def doctor(dev: Dev, *arguments: object) -> Result:
    """Run the doctor for this proxy and its Kafka."""
    return cli(dev, "doctor", "--kafka", dev.kafka, *arguments)


def shown(result: Result) -> dict[str, dict[str, Any]]:
    """Return the doctor's JSON results, by check."""
    return {one["name"]: one for one in result.json["checks"]}


async def look(dev: Dev, ahead_s: float, names: Sequence[str]) -> dict[str, DoctorResult]:
    """Run some checks in this process, by a clock that is ahead so that no limit is waited for."""
    given = settings(kafka=dev.kafka)
    async with KafkaExamination(KafkaSettings.from_configuration(given)) as kafka:
        proxies = HttpProxies([dev.url], {})
        subject = Subject(given, kafka, proxies, lambda: time.time() + ahead_s)
        report = await examine(subject, [one for one in CHECKS if one.name in names])
        await subject.close()
    return {one.name: one for one in report.outcomes}


def test_healthy_installation_has_no_failures(dev: Dev) -> None:
    done = doctor(dev, "--check-after-s", "3600", "-o", "json")
    found = shown(done)
    levels = {name: one["level"] for name, one in found.items()}
    # The group of the pending transaction has no instance, and no audit has run.
    assert levels.pop("groups-reachable") == "fails"
    assert levels.pop("audit-fresh") == "warning"
    assert set(levels.values()) == {"ok"}, found
    assert len(found) == len(CHECKS)
    assert found["kafka-version"]["found"] == "3.9 or newer"
    assert done.code == 1


@pytest.fixture
def prefix(dev: Dev) -> str:
    """Topics of another installation on the same Kafka, to be broken."""
    name = f"broken{time.time_ns()}"
    done = subprocess.run(
        [TXBROKER, "topics", "apply", "--yes", "--kafka", dev.kafka, "--topic-prefix", name],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done
    return name


def test_unsafe_settings_and_missing_topic_fail(dev: Dev, prefix: str) -> None:
    admin = AdminClient({"bootstrap.servers": dev.kafka, "log_level": 0})
    change = ConfigEntry("retention.ms", "60000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(
        ConfigResource.Type.TOPIC, f"{prefix}.half", incremental_configs=[change]
    )
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(TIMEOUT_S)
    found = shown(
        _until(lambda: doctor(dev, "--topic-prefix", prefix, "-o", "json"), "topics-settings")
    )
    assert found["topics-there"]["level"] == "ok"
    assert any(
        f"{prefix}.half keeps messages for 60 s" in line
        for line in found["topics-settings"]["details"]
    )

    assert found["topics-foreign"]["level"] == "ok"
    producer = Producer({"bootstrap.servers": dev.kafka, "log_level": 0})
    producer.produce(f"{prefix}.parked", b"junk", b"key", partition=1)
    assert producer.flush(TIMEOUT_S) == 0
    found = shown(doctor(dev, "--topic-prefix", prefix, "-o", "json"))
    (line,) = found["topics-foreign"]["details"]
    assert line.startswith(f"{prefix}.parked/1@0: ")
    assert "txbroker repair show" in found["topics-foreign"]["hint"]

    admin.delete_topics([f"{prefix}.op"])[f"{prefix}.op"].result(TIMEOUT_S)
    found = shown(
        _until(lambda: doctor(dev, "--topic-prefix", prefix, "-o", "json"), "topics-there")
    )
    assert found["topics-there"]["details"] == [f"{prefix}.op"]
    assert "topics apply" in found["topics-there"]["hint"]


def _until(ask: Callable[[], Result], check: str, level: str = "fails") -> Result:
    """Ask until a check ends at this level: brokers and proxies hear of changes a moment later."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        result = ask()
        if shown(result)[check]["level"] == level:
            return result
        assert time.monotonic() < deadline, result


def test_dead_proxy_fails(dev: Dev) -> None:
    found = shown(doctor(dev, "--proxy", "http://127.0.0.1:9", "-o", "json"))
    assert found["proxies-ready"]["details"] == ["nothing listens at http://127.0.0.1:9"]
    assert found["parked"]["level"] == "ok"


def test_dead_group_fails_and_answering_one_does_not(dev: Dev) -> None:
    calls: list[tuple[bool, str]] = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = dict(self.headers)
            verify_webhook("s3cret", headers, body)
            calls.append((is_test_call(headers), json.loads(body)["group"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    secrets = dev.data_dir.with_name(SECRETS)
    for group in ("live", "dead"):
        (secrets / group).write_text("s3cret")
    url = f"http://127.0.0.1:{server.server_port}/check?token={QUERY}"
    register = ("groups", "register", "--yes", "--check-url")
    try:
        for group, at in (("live", url), ("dead", "http://127.0.0.1:9/")):
            secret = f"file:{secrets}/{group}"
            assert cli(dev, *register, at, group, "--secret-ref", secret).code == 0
        found = shown(doctor(dev, "-o", "json"))["groups-reachable"]
        names = [line.partition(":")[0] for line in found["details"]]
        assert (found["level"], names) == ("fails", ["dead", "shop"])
        assert calls == [(True, "live")]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        assert cli(dev, "groups", "remove", "--yes", "live", "dead").code == 0


@asynccontextmanager
async def open_transaction(dev: Dev, timestamp_ms: int) -> AsyncIterator[str]:
    """Keep a transaction with one message open, and yield its transactional id."""
    name = f"open-{time.time_ns()}"
    producer = Producer({"bootstrap.servers": dev.kafka, "transactional.id": name, "log_level": 0})
    await asyncio.to_thread(producer.init_transactions, TIMEOUT_S)
    producer.begin_transaction()
    producer.produce("payments", b"never committed", partition=0, timestamp=timestamp_ms)
    assert await asyncio.to_thread(producer.flush, TIMEOUT_S) == 0
    try:
        yield name
    finally:
        await asyncio.to_thread(producer.abort_transaction, TIMEOUT_S)


async def test_a_hanging_transaction(dev: Dev) -> None:
    check = ["hanging-transactions"]
    async with open_transaction(dev, round(time.time() * 1000)) as name:
        young = await look(dev, 0.0, check)
        assert young["hanging-transactions"].level == "ok"
        strict = await look(dev, 3600.0, check)
        found = strict["hanging-transactions"]
        assert found.level == "fails"
        (line,) = found.details
        assert line.startswith(f"payments-0: transactional id {name}, for ")
        assert line.endswith("hides 1 offsets")
    ended = await look(dev, 3600.0, check)
    assert ended["hanging-transactions"].level == "ok"


async def test_examination_describes_open_transactions(dev: Dev) -> None:
    kafka_settings = KafkaSettings.from_configuration(settings(kafka=dev.kafka))
    async with open_transaction(dev, 1000) as name, KafkaExamination(kafka_settings) as kafka:
        (found,) = await kafka.open_transactions(["payments", "txbroker.op"])
    assert isinstance(found, OpenTransaction)
    assert (found.topic, found.partition, found.state) == ("payments", 0, "Ongoing")
    assert found.transactional_id == name
    # By the coordinator's clock, not the record's timestamp.
    assert abs(time.time() - (found.started_ms or 0) / 1000) < TIMEOUT_S
    assert found.last_write_ms == 1000


async def test_clocks_come_from_appended_records(dev: Dev) -> None:
    given = settings(kafka=dev.kafka)
    async with KafkaExamination(KafkaSettings.from_configuration(given)) as kafka:
        cluster = await kafka.cluster(kafka.settings.own_topics)
        newest = await kafka.newest_appends(cluster)
    topics = {topic for topic, _partition in newest}
    # Nothing is parked and no group is registered, but for the layout; claims are everywhere.
    assert topics == {f"txbroker.{name}" for name in ("half", "op", "checkpoint", "groups")}
    assert all(abs(time.time() - at_ms / 1000) < 600 for at_ms in newest.values())
    found = await look(dev, -3600.0, ["kafka-clocks"])
    assert found["kafka-clocks"].level == "fails"


def test_the_doctor_writes_nothing(dev: Dev) -> None:
    before = _ends(dev)
    doctor(dev)
    assert _ends(dev) == before


def _ends(dev: Dev) -> dict[tuple[str, int], int]:
    """Return where txbroker's topics end, but for the one in which proxies show that they live."""
    consumer = Consumer({"bootstrap.servers": dev.kafka, "group.id": "looks", "log_level": 0})
    try:
        topics = consumer.list_topics(timeout=TIMEOUT_S).topics
        return {
            (name, p): consumer.get_watermark_offsets(TopicPartition(name, p), TIMEOUT_S)[1]
            for name, topic in topics.items()
            if name.startswith("txbroker.") and not name.endswith("checkpoint")
            for p in topic.partitions
        }
    finally:
        consumer.close()


def test_real_bundle_has_no_message_and_no_secret(dev: Dev, tmp_path: Path) -> None:
    token = secret_file(tmp_path / "token", "t0ken-in-a-file-of-16")
    url = f"http://127.0.0.1:9/check?token={QUERY}"
    assert cli(dev, "groups", "register", "--yes", "--check-url", url, "leaky").code == 0
    path = tmp_path / "bundle.tar.gz"
    try:
        done = doctor(dev, "--bundle", path, "--token-file", token)
    finally:
        assert cli(dev, "groups", "remove", "--yes", "leaky").code == 0
    assert path.exists(), done
    with tarfile.open(path) as archive:
        contents = [archive.extractfile(member) for member in archive.getmembers()]
        everything = b"\n".join(one.read() for one in contents if one is not None)
    assert b"txbroker_pending" in everything
    assert b"cleanup.policy" in everything
    for secret in (BODY, QUERY, "t0ken-in-a-file"):
        assert secret.encode() not in everything


def test_recently_killed_proxy_fails(dev: Dev, tmp_path: Path) -> None:
    """The doctor learns of an unnamed proxy from the first one, and then of its end."""
    command = [TXBROKER, "proxy", "--kafka", dev.kafka, "--listen", "127.0.0.1:0"]
    command += ["--data-dir", str(tmp_path), "--session-timeout-s", "6"]
    with (tmp_path / "log").open("w") as log:
        second = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert second.stdout is not None
        url = second.stdout.readline().split()[1]
        both = _until(lambda: doctor(dev, "-o", "json"), "proxies-owners", "ok")
        assert shown(both)["proxies-ready"]["found"] == "2 proxies"
        second.kill()
        second.wait()
        found = shown(doctor(dev, "-o", "json"))
        assert found["proxies-ready"]["level"] == found["proxies-owners"]["level"] == "fails"
        (line,) = found["proxies-ready"]["details"]
        assert line.startswith(f"{url} does not answer: ")
        assert all("is unreachable" in line for line in found["proxies-owners"]["details"])
    finally:
        second.kill()
        second.wait()
