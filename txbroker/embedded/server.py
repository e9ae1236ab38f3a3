"""A real single-node Apache Kafka in a child process, for development and tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from io import BufferedRWPair
from pathlib import Path
from types import TracebackType
from typing import IO

from txbroker.embedded.datadir import DataDir, Listener, new_cluster_id, server_properties
from txbroker.embedded.errors import (
    DataDirError,
    EmbeddedKafkaError,
    KafkaStartError,
    StartCancelledError,
)
from txbroker.embedded.jars import Progress, ensure_jars
from txbroker.embedded.java import find_java, java_flags

DEFAULT_VERSION = "4.2.1"

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_READY_TIMEOUT_S = 90.0  # about 3 s on an idle machine; a busy one may need ten times as long
_STOP_TIMEOUT_S = 20.0
_FORMAT_TIMEOUT_S = 60.0
_POLL_S = 0.05
_LOG_LINES = 6
_PORT_ATTEMPTS = 4  # another process may take a free port before Kafka binds it
_PORT_TAKEN = "Address already in use"
_API_VERSIONS, _METADATA = 18, 3  # keys of requests
_NOT_STARTED = "The embedded Kafka was not started: call start() first"


class EmbeddedKafka:
    """A real Kafka (KRaft, combined broker and controller) on free ports of 127.0.0.1.

    All calls block, and may come from any thread.

    Args:
        data_dir: kept, and used by one Kafka at a time. None: a temporary folder, removed by
            `stop()` or when this process ends.
        version: of Kafka.
        port: of clients, on 127.0.0.1. None: that of the last start on this `data_dir` if it is
            free, else any.
        properties: added to server.properties.
        listeners: additional listeners for clients: name in capitals and security protocol.
            `properties` set their keystores and logins.
        for_load: doubles the heap to 1 GiB and enables the C2 compiler, which pays off after half a
            minute of load.
        progress: receives the progress of the download, once per version and user.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        version: str = DEFAULT_VERSION,
        port: int | None = None,
        properties: Mapping[str, str] | None = None,
        listeners: Mapping[str, str] | None = None,
        for_load: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.version = version
        self._port = port
        self._kept = data_dir is not None
        self._data = DataDir(data_dir.absolute()) if data_dir is not None else None
        self._properties = dict(properties or {})
        self._listeners = dict(listeners or {})
        self._java_flags = java_flags(1024 if for_load else 512, quick_start=not for_load)
        self._progress = progress
        self._ports = self._no_ports
        self._java_pid: int | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._cancelled = threading.Event()
        self._guard = threading.RLock()

    @property
    def bootstrap(self) -> str:
        """The bootstrap server, "127.0.0.1:PORT"; raises EmbeddedKafkaError before `start()`."""
        if self._ports[0] == 0:
            raise EmbeddedKafkaError(_NOT_STARTED)
        return f"127.0.0.1:{self._ports[0]}"

    def address(self, listener: str) -> str:
        """Return the address of one of `listeners`, "127.0.0.1:PORT".

        Raises:
            EmbeddedKafkaError: before `start()`.
            KeyError: there is no such listener.
        """
        if self._ports[0] == 0:
            raise EmbeddedKafkaError(_NOT_STARTED)
        return f"127.0.0.1:{dict(zip(self._listeners, self._ports[2:], strict=True))[listener]}"

    @property
    def _no_ports(self) -> tuple[int, ...]:
        return (0, 0, *(0 for _ in self._listeners))

    @property
    def running(self) -> bool:
        """Whether the started Kafka is alive."""
        return self._supervisor is not None and self._supervisor.poll() is None

    @property
    def pid(self) -> int | None:
        """Java's process id while it runs, for tests that pause it."""
        return self._java_pid if self.running else None

    @property
    def data_dir(self) -> Path:
        """The data directory; raises EmbeddedKafkaError if there is none."""
        if self._data is None:
            raise EmbeddedKafkaError(_NOT_STARTED)
        return self._data.path

    @property
    def log_path(self) -> Path:
        """Kafka's log file; raises EmbeddedKafkaError if there is none."""
        return self.data_dir / "kafka.log"

    def start(self) -> None:
        """Start Kafka and return once it takes requests; does nothing while it runs.

        After `kill()` it uses the same data and, if still free, the same ports.

        Raises:
            EmbeddedKafkaError: a subclass; nothing is left running.
        """
        with self._guard:
            if self.running:
                return
            self._cancelled.clear()
            java = find_java().path
            jars = ensure_jars(self.version, self._progress, self._cancelled)
            command = [str(java), "-cp", os.pathsep.join(map(str, jars))]
            if self._data is None:
                self._data = DataDir(Path(tempfile.mkdtemp(prefix="txbroker-kafka-")))
            try:
                self._start_locked(self._data, command)
            except BaseException as error:
                path = self._data.path
                self._end("kill")
                self._remove_temporary()
                if isinstance(error, OSError):
                    raise DataDirError(
                        f"The data directory {path} cannot be used: {error}"
                    ) from error
                raise

    def stop(self) -> None:
        """Stop Kafka, by force after 20 s; remove a temporary data directory.

        A concurrent `start()` fails with StartCancelledError.
        """
        self._cancelled.set()
        with self._guard:
            # A temporary directory needs no graceful stop.
            self._end("stop" if self._kept else "kill")
            self._remove_temporary()

    def kill(self) -> None:
        """Kill Kafka, like kill -9; keep its data for the next `start()`."""
        self._cancelled.set()
        with self._guard:
            self._end("kill")

    def __enter__(self) -> EmbeddedKafka:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_locked(self, data: DataDir, command: Sequence[str]) -> None:
        lock = data.lock()
        try:
            data.rotate_log()
            preferred = self._port or self._ports[0] or data.last_port
            self._ports = (preferred, *self._ports[1:])
            if not data.is_formatted:
                self._format(data, command, lock)
            for attempt in range(1, _PORT_ATTEMPTS + 1):
                self._ports = _free_ports(self._ports)
                if self._port not in (None, self._ports[0]):
                    raise KafkaStartError(
                        f"Port {self._port} of 127.0.0.1 is in use: stop the process that listens "
                        "there, or give Kafka another port"
                    )
                self._launch(data, command, lock)
                if self._wait_until_ready(data):
                    return
                if attempt == _PORT_ATTEMPTS or _PORT_TAKEN not in _read(data.log_path):
                    raise KafkaStartError(self._failure(data))
                self._end("kill")
                data.rotate_log()
                self._ports = self._no_ports
        finally:
            # From now on only the supervisor and Java hold the lock.
            os.close(lock)

    def _format(self, data: DataDir, command: Sequence[str], lock: int) -> None:
        data.begin_format()
        self._write_properties(
            data, data.FORMATTING, tuple(range(9092, 9094 + len(self._listeners)))
        )
        tool = [*command, *self._java_flags, "kafka.tools.StorageTool", "format"]
        tool += ["-t", new_cluster_id(), "-c", data.PROPERTIES]
        with open(data.log_path, "ab") as log:
            code = _run(tool, data.path, log, lock)
        if code != 0:
            raise KafkaStartError(
                f"Kafka {self.version} could not prepare {data.path}: {_tail(data.log_path)}"
            )
        data.finish_format()

    def _write_properties(self, data: DataDir, log_dir: str, ports: tuple[int, ...]) -> None:
        listeners = [
            Listener(name, protocol, port)
            for (name, protocol), port in zip(self._listeners.items(), ports[2:], strict=True)
        ]
        text = server_properties(log_dir, ports[0], ports[1], self._properties, listeners)
        (data.path / data.PROPERTIES).write_text(text, encoding="ascii")

    def _launch(self, data: DataDir, command: Sequence[str], lock: int) -> None:
        self._write_properties(data, data.LOGS, self._ports)
        remove = "" if self._kept else str(data.path)
        supervisor = [sys.executable, "-I", "-S", str(_SUPERVISOR)]
        arguments = [str(os.getpid()), str(lock), str(data.log_path), remove]
        java = [*command, *self._java_flags, "kafka.Kafka", data.PROPERTIES]
        # A separate session keeps a terminal's Ctrl-C from Kafka: the parent stops it in order.
        with open(data.log_path, "ab") as log:
            self._supervisor = subprocess.Popen(
                [*supervisor, *arguments, *java],
                cwd=data.path,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,
            )
        assert self._supervisor.stdout is not None
        line = self._supervisor.stdout.readline()
        if not line:
            raise KafkaStartError(f"Java did not start: {_tail(data.log_path)}")
        self._java_pid = int(line)

    def _wait_until_ready(self, data: DataDir) -> bool:
        """Return True once Kafka is ready, False if it failed; raise on timeout."""
        cluster_id = data.cluster_id
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._cancelled.is_set():
                raise StartCancelledError
            # Kafka takes seconds to exit after a failed bind.
            if not self.running or _PORT_TAKEN in _read(data.log_path):
                return False
            if is_ready(self._ports[0], cluster_id, timeout_s=2.0) and self.running:
                return True
            self._cancelled.wait(_POLL_S)
        raise KafkaStartError(
            f"Kafka {self.version} did not answer within {_READY_TIMEOUT_S:.0f} s: "
            f"{_tail(data.log_path)}"
        )

    def _failure(self, data: DataDir) -> str:
        code = self._supervisor.returncode if self._supervisor else None
        how = "found its port taken" if code is None else f"ended (exit code {code})"
        return f"Kafka {self.version} {how} while starting: {_tail(data.log_path)}"

    def _end(self, command: str) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        with contextlib.suppress(OSError):
            os.write(supervisor.stdin.fileno(), f"{command}\n".encode())
        try:
            supervisor.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.write(supervisor.stdin.fileno(), b"kill\n")
            self._wait_or_kill(supervisor)
        finally:
            supervisor.stdin.close()
            supervisor.stdout.close()
            self._java_pid = None

    def _wait_or_kill(self, supervisor: subprocess.Popen[bytes]) -> None:
        try:
            supervisor.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            supervisor.send_signal(signal.SIGKILL)  # Java dies with it
            supervisor.wait()

    def _remove_temporary(self) -> None:
        if not self._kept and self._data is not None:
            shutil.rmtree(self._data.path, ignore_errors=True)
            self._data = None


def _run(command: Sequence[str], cwd: Path, log: IO[bytes], lock: int) -> int:
    try:
        return subprocess.run(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[lock],  # keeps the folder locked until it ends, even if we are killed
            timeout=_FORMAT_TIMEOUT_S,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return -1


def _free_ports(preferred: tuple[int, ...]) -> tuple[int, ...]:
    """Return free ports of 127.0.0.1, the preferred ones if possible."""
    with contextlib.ExitStack() as stack:
        return tuple(_bind(stack, port) for port in preferred)


def _bind(stack: contextlib.ExitStack, port: int) -> int:
    probe = stack.enter_context(socket.socket())
    # Like Kafka, so that connections of a Kafka that has just ended do not matter.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        probe.bind(("127.0.0.1", 0))
    return int(probe.getsockname()[1])


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _tail(log_path: Path) -> str:
    lines = [line.strip() for line in _read(log_path).splitlines()]
    shown = [line for line in lines if line and not line.startswith(("at ", "SLF4J"))]
    last = "\n  ".join(shown[-_LOG_LINES:]) or "the log is empty"
    return f"the last lines of {log_path.name} are\n  {last}"


# --- readiness -------------------------------------------------------------------------------


def is_ready(port: int, cluster_id: str, timeout_s: float) -> bool:
    """Return whether the broker at 127.0.0.1:`port` answers and is in service.

    False for a broker of another cluster, which may have taken the port first. Sends ApiVersions 0
    and Metadata 2 (https://kafka.apache.org/protocol): unlike a client library this needs no event
    loop and cannot hang.
    """
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection,
            connection.makefile("rwb") as stream,
        ):
            (error_code,) = struct.unpack_from(">h", _ask(stream, _API_VERSIONS, 0, b""))
            if error_code != 0:
                return False
            no_topics = struct.pack(">i", 0)
            return _is_served(_ask(stream, _METADATA, 2, no_topics), port, cluster_id)
    except (OSError, ValueError, struct.error):
        return False


def _ask(stream: BufferedRWPair, api_key: int, api_version: int, body: bytes) -> bytes:
    """Return the answer after the correlation id; incomplete if the broker closes before."""
    client_id = b"txbroker-embedded"
    header = struct.pack(">hhih", api_key, api_version, 1, len(client_id)) + client_id
    stream.write(struct.pack(">i", len(header) + len(body)) + header + body)
    stream.flush()
    (size,) = struct.unpack(">i", stream.read(4))
    if size < 0:
        raise ValueError(f"an answer of {size} bytes: no Kafka broker")
    return stream.read(size)[4:]


def _is_served(metadata: bytes, port: int, cluster_id: str) -> bool:
    (brokers,) = struct.unpack_from(">i", metadata)
    at = 4
    ports = []
    for _ in range(brokers):
        (host_size,) = struct.unpack_from(">h", metadata, at + 4)
        at += 6 + host_size
        (broker_port, rack_size) = struct.unpack_from(">ih", metadata, at)
        ports.append(broker_port)
        at += 6 + max(rack_size, 0)
    (id_size,) = struct.unpack_from(">h", metadata, at)
    at += 2
    answered_id = metadata[at : at + max(id_size, 0)].decode("ascii", "replace")
    (controller_id,) = struct.unpack_from(">i", metadata, at + max(id_size, 0))
    return port in ports and answered_id == cluster_id and controller_id >= 0
