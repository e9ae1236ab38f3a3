"""Settings of a single-node Kafka with transactions, and of its Java."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Listener(NamedTuple):
    """An additional listener for clients.

    Attributes:
        name: in capitals; its properties begin with `listener.name.` and the name in lower case.
        protocol: `SSL`, `SASL_SSL` or `SASL_PLAINTEXT`.
        port: on 127.0.0.1.
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

# The machine's cores are shared, and the start should be fast.
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

# Delays that help clusters, but not a single node.
_PROMPT = {
    # After kill -9 the controller keeps the dead broker registered for a session, and the broker
    # retries with doubling pauses: 3 s take 3 s, the default of 9 s takes 10.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
}

# Only the C1 compiler: as measured, Kafka starts in 2.4 s instead of 3.4 s and takes half the CPU
# in its first minute under load, in which C2 still compiles. After that, C2 is faster: the proxy's
# calls take 15 % less time with 1 in flight.
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
    """Return the text of server.properties; `extra` overrides all other properties."""
    clients = [Listener("PLAINTEXT", "PLAINTEXT", port), *listeners]
    addresses = [f"{listener.name}://127.0.0.1:{listener.port}" for listener in clients]
    protocols = [f"{listener.name}:{listener.protocol}" for listener in clients]
    network = {
        "listeners": ",".join([*addresses, f"CONTROLLER://127.0.0.1:{controller_port}"]),
        "advertised.listeners": ",".join(addresses),
        "listener.security.protocol.map": ",".join([*protocols, "CONTROLLER:PLAINTEXT"]),
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "log.dirs": log_dir,
    }
    settings = {**_ONE_NODE, **_SMALL, **_PROMPT, **network, **extra}
    return "".join(f"{_escape(key)}={_escape(value)}\n" for key, value in settings.items())


def _escape(text: str) -> str:
    # The format of java.util.Properties: backslash escapes, \uXXXX outside of ASCII.
    plain = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    plain = plain.replace("=", "\\=").replace(":", "\\:").replace("#", "\\#").replace("!", "\\!")
    units = plain.encode("utf-16-be")
    codes = [int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2)]
    escaped = "".join(chr(code) if code < 127 else f"\\u{code:04x}" for code in codes)
    return escaped.replace(" ", "\\ ") if escaped.startswith(" ") else escaped


def java_flags(heap_mb: int, *, quick_start: bool = True) -> list[str]:
    """Return Java's options for a heap of `heap_mb` MiB; without `quick_start` it uses C2, too."""
    quick = [_QUICK_START] if quick_start else []
    return [f"-Xms{heap_mb}m", f"-Xmx{heap_mb}m", *quick, *_JAVA_FLAGS]
