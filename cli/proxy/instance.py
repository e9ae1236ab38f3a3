"""The instance id of a proxy: stable over restarts, and used by one process at a time.

`data_dir/instances` has a file for each listen address, which holds the proxy's id, and a lock for
each id, which the kernel releases when the process ends.
"""

import contextlib
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from txbroker.cli.run import CommandFailed
from txbroker.config.settings import Settings
from txbroker.errors import ConfigurationError

_NAME_BYTES = 4


class _Taken(Exception):
    """Another process holds the lock of an id; the message names it."""


@contextmanager
def named(settings: Settings) -> Iterator[Settings]:
    """Yield the settings with a stable instance id, locked until the block ends.

    Raises:
        ConfigurationError: another process uses the id.
        CommandFailed: the data directory cannot store the id, or its file is damaged.
    """
    with contextlib.ExitStack() as held:
        if settings.instance:
            _hold_given(settings, held)
            yield settings
        else:
            yield settings.model_copy(update={"instance": _own_name(settings, held)})


def _hold_given(settings: Settings, held: contextlib.ExitStack) -> None:
    try:
        held.enter_context(_held(_folder(settings), settings.instance))
    except _Taken as taken:
        raise _in_use(settings, settings.instance, taken) from None
    except OSError:
        # A data directory that takes no files, such as a read-only disk, has no locks of others.
        return


def _own_name(settings: Settings, held: contextlib.ExitStack) -> str:
    try:
        return _kept_name(settings, held)
    except OSError as error:
        raise CommandFailed(
            f"the proxy's name cannot be stored and locked in {settings.data_dir}: "
            f"{error.strerror}. Give another --data-dir, on a file system with locks, or the name "
            "as --instance"
        ) from None


def _kept_name(settings: Settings, held: contextlib.ExitStack) -> str:
    """Return the id for the listen address, with its lock held.

    With port 0 several proxies have the same address: each takes the first free id.
    """
    folder = _folder(settings)
    address = re.sub(r"[^A-Za-z0-9.-]", "_", settings.listen)
    slot = 0
    with _locked(folder / "lock"):
        while True:
            file = folder / (f"{address}-{slot}.id" if slot else f"{address}.id")
            name = _read(file)
            if not name:
                return _new_name(settings, folder, file, held)
            try:
                held.enter_context(_held(folder, name))
            except _Taken as taken:
                if settings.listen_address.port:
                    raise _in_use(settings, name, taken) from None
                slot += 1
            else:
                return name


def _new_name(settings: Settings, folder: Path, file: Path, held: contextlib.ExitStack) -> str:
    """Return a locked and stored id: the one of an older version's file if it is free, else a new
    one."""
    older = settings.local_dir / "instance"
    if name := _read(older):
        with contextlib.suppress(_Taken):
            held.enter_context(_held(folder, name))
            older.replace(file)
            return name
    name = f"proxy-{secrets.token_hex(_NAME_BYTES)}"
    held.enter_context(_held(folder, name))
    file.write_text(f"{name}\n", encoding="utf-8")
    return name


def _in_use(settings: Settings, name: str, taken: _Taken) -> ConfigurationError:
    return ConfigurationError(
        f"{taken} already runs as instance {name} in {settings.data_dir}: stop it, or give this "
        "proxy another --listen, --instance or --data-dir"
    )


def _folder(settings: Settings) -> Path:
    folder = settings.local_dir / "instances"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise CommandFailed(
            f"{path} should hold the proxy's name but is not UTF-8 text ({error.reason}). Write "
            "the name into it, delete it for a new name, or give the name as --instance"
        ) from None


@contextmanager
def _locked(path: Path, flags: int = fcntl.LOCK_EX) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, flags)
        yield file
    finally:
        os.close(file)


@contextmanager
def _held(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock of an id, or raise `_Taken`."""
    path = folder / f"{quote(name, safe='')}.lock"
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(_locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            holder = path.read_text(encoding="utf-8", errors="replace")
            raise _Taken(holder or "another process") from None
        os.truncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
