"""The settings of a Kafka of one node that is fit for transactions, and of its Java."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Listener(NamedTuple):
    """A further address for clients.

    Attributes:
        name: in capitals; properties of its own begin with `listener.name.` and it in small ones.
        protocol: `SSL`, `SASL_SSL` or `SASL_PLAINTEXT`.
    """

    name: str
    protocol: str
    port: int


_ONE_NODE = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "inter.broker.listener.name": "PLAINTEXT",
    "controller.listener.names": "CONTROLLER",
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "auto.create.topics.enable": "false",
}

# One machine shares its cores with everything else and wants to start fast.
_SMALL = {
    "num.partitions": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "4",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "num.recovery.threads.per.data.dir": "1",
    "background.threads": "2",
    "log.cleaner.threads": "1",
    "log.cleaner.dedupe.buffer.size": str(16 << 20),
    "log.segment.bytes": str(64 << 20),
    "log.index.size.max.bytes": str(1 << 20),
    "log.preallocate": "false",
    "offsets.topic.segment.bytes": str(16 << 20),
    "transaction.state.log.segment.bytes": str(16 << 20),
    "metadata.log.segment.bytes": str(16 << 20),
}

# Waiting that helps clusters of many, but only delays one node.
_PROMPT = {
    # After kill -9 the controller holds the dead broker's place for a session; the broker asks
    # again with doubling pauses. 3 s cost 3 s then, the usual 9 s cost 10.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
}

# The quick compiler only: measured, Kafka starts in 2.4 s instead of 3.4 s and needs half the
# processor time for its first minute under load, while the other one still compiles. From then on
# it answers later: with the other one the proxy's calls take 15 % less time at 1 in flight.
_QUICK_START = "-XX:TieredStopAtLevel=1"
_JAVA_FLAGS = (
    "-XX:+UseSerialGC",
    "-Xshare:auto",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Djava.net.preferIPv4Stack=true",
    "-Dorg.slf4j.simpleLogger.logFile=System.err",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSZ",
)


def server_properties(
    log_dir: str,
    port: int,
    controller_port: int,
    extra: Mapping[str, str],
    listeners: Sequence[Listener] = (),
) -> str:
    """The text of server.properties; `extra` wins over everything here."""
    clients = [Listener("PLAINTEXT", "PLAINTEXT", port), *listeners]
    reached = [f"{one.name}://127.0.0.1:{one.port}" for one in clients]
    protocols = [f"{one.name}:{one.protocol}" for one in clients]
    places = {
        "listeners": ",".join([*reached, f"CONTROLLER://127.0.0.1:{controller_port}"]),
        "advertised.listeners": ",".join(reached),
        "listener.security.protocol.map": ",".join([*protocols, "CONTROLLER:PLAINTEXT"]),
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "log.dirs": log_dir,
    }
    settings = {**_ONE_NODE, **_SMALL, **_PROMPT, **places, **extra}
    return "".join(f"{_escape(key)}={_escape(value)}\n" for key, value in settings.items())


def _escape(text: str) -> str:
    # The format of java.util.Properties: backslash escapes, \uXXXX for what is not Latin-1.
    plain = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    plain = plain.replace("=", "\\=").replace(":", "\\:").replace("#", "\\#").replace("!", "\\!")
    units = plain.encode("utf-16-be")
    codes = [int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2)]
    escaped = "".join(chr(code) if code < 127 else f"\\u{code:04x}" for code in codes)
    return escaped.replace(" ", "\\ ") if escaped.startswith(" ") else escaped


def java_flags(heap_mb: int, *, quick_start: bool = True) -> list[str]:
    """The options of Java for a heap of `heap_mb` MiB; without `quick_start` it compiles as for
    production."""
    quick = [_QUICK_START] if quick_start else []
    return [f"-Xms{heap_mb}m", f"-Xmx{heap_mb}m", *quick, *_JAVA_FLAGS]
