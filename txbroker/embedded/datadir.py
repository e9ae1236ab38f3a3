"""The data directory of a Kafka: used by one process at a time, formatted exactly once.

lock                an flock, and the process id of its holder as text
server.properties   written at each start, because the ports change
kafka/              Kafka's data
formatting/         an incomplete format, discarded
kafka.log           Kafka's log since the last start; kafka.log.1 since the previous one
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from txbroker.embedded.errors import DataDirError, DataDirInUseError

# A killed Kafka needs a moment until it releases the lock: seconds to wait for it.
_RELEASE_ALIVE_S = 2.0  # the process that started it is alive, so it is probably in use
_RELEASE_DEAD_S = 15.0
_POLL_S = 0.05


class DataDir:
    """Paths and lock of one data directory."""

    LOGS = "kafka"
    FORMATTING = "formatting"
    PROPERTIES = "server.properties"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log_path = path / "kafka.log"

    def lock(self) -> int:
        """Lock the folder; return the lock's file descriptor, to be closed or passed on.

        Raises:
            DataDirInUseError: another process uses it.
            DataDirError: the folder cannot be used.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise DataDirError(
                f"The data directory {self.path} cannot be used: {error.strerror}"
            ) from error
        try:
            self._wait_for(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def _wait_for(self, descriptor: int) -> None:
        started = time.monotonic()
        while True:
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            timeout_s = _RELEASE_ALIVE_S if _is_alive(owner) else _RELEASE_DEAD_S
            if time.monotonic() - started > timeout_s:
                raise DataDirInUseError(
                    f"The data directory {self.path} is in use by a Kafka of process "
                    f"{owner or 'unknown'}: stop that one, or choose another directory"
                )
            time.sleep(_POLL_S)

    @property
    def is_formatted(self) -> bool:
        """Whether Kafka's folder exists; it gets its name once it is complete."""
        return (self.path / self.LOGS / "meta.properties").exists()

    @property
    def cluster_id(self) -> str:
        """The cluster id of the folder."""
        text = (self.path / self.LOGS / "meta.properties").read_text(encoding="latin-1")
        match = re.search(r"^cluster\.id=(.+)$", text, re.MULTILINE)
        if match is None:
            raise DataDirError(
                f"{self.path / self.LOGS} has no cluster id in meta.properties: restore it, or "
                "choose another data directory"
            )
        return match[1].strip()

    @property
    def last_port(self) -> int:
        """The clients' port of the last start; 0 if there was none."""
        with contextlib.suppress(OSError):
            text = (self.path / self.PROPERTIES).read_text(encoding="latin-1")
            match = re.search(
                r"^listeners=PLAINTEXT\\://127\.0\.0\.1\\:(\d{1,5}),", text, re.MULTILINE
            )
            return int(match[1]) if match and self.is_formatted else 0
        return 0

    def begin_format(self) -> None:
        """Create the folder of a format, discarding an incomplete one."""
        shutil.rmtree(self.path / self.FORMATTING, ignore_errors=True)
        (self.path / self.FORMATTING).mkdir()

    def finish_format(self) -> None:
        """Rename the formatted folder to its final name, atomically."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / self.LOGS).rmdir()  # only if empty: data is never removed
        os.replace(self.path / self.FORMATTING, self.path / self.LOGS)

    def rotate_log(self) -> None:
        """Start a new log and keep the previous one."""
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.log_path, self.log_path.with_suffix(".log.1"))
        self.log_path.touch()


def _is_alive(process_id: str) -> bool:
    if not process_id.isdigit():
        return False
    try:
        os.kill(int(process_id), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def new_cluster_id() -> str:
    """Return a random id in Kafka's format: 16 bytes in base64, not beginning with -."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
        if not text.startswith("-"):
            return text


# --- server.properties -----------------------------------------------------------------------


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
