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
from pathlib import Path

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
        """The cluster id of the folder.

        Raises:
            DataDirError: the id cannot be read.
        """
        text = (self.path / self.LOGS / "meta.properties").read_text(encoding="latin-1")
        match = re.search(r"^cluster\.id=(.+)$", text, re.MULTILINE)
        if match is None:
            raise DataDirError(
                f"{self.path / self.LOGS} has no cluster id in meta.properties: restore it, or "
                "choose another data directory"
            )
        return match[1].strip()

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
