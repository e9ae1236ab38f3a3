"""Private PostgreSQL and MariaDB servers, each in a temporary folder and on a free port.

They are the programs that Debian packages (`make tools`), never a service of the system. They write
commits to the disk as in production. As root, they run as the user `nobody`. All calls block.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import psycopg
import pymysql
from psycopg import sql

from tests.kit.until import free_ports, unique

PROGRAMS = ("mariadbd", "postgres")
"""What the servers run, as `TOOLS` of the Makefile has it."""
USER = "txbroker"
"""Owns every database."""
PASSWORD = "only-for-tests"
_SUPERVISOR = Path(__file__).with_name("database_supervisor.py")
_UNPRIVILEGED = "nobody"
_READY_S = 60.0
_POLL_S = 0.02
_CONNECT_S = 5
_STARTS_MAX = 4  # another process may take a free port before the server binds it
_PORT_TAKEN = "Address already in use"
_LOG_LINES = 20


def program(name: str) -> str:
    """Return the path of a server's program."""
    debian = Path("/usr/lib/postgresql").glob("*/bin")
    newest_first = sorted(debian, key=lambda path: float(path.parent.name), reverse=True)
    places = [os.environ.get("PATH", os.defpath), "/usr/sbin", *map(str, newest_first)]
    found = shutil.which(name, path=os.pathsep.join(places))
    assert found is not None, f"{name} is missing: `make tools` installs it"
    return os.path.realpath(found)


class DatabaseServer:
    """A server that one test process runs; it ends with that process, however that one ends.

    Args:
        settings: of the server's configuration file, beside those that make it small.
    """

    name: ClassVar[str]
    _end_signal: ClassVar[str]

    def __init__(self, **settings: str | int) -> None:
        self.port = 0
        self._settings = settings
        self._guard = threading.Lock()
        self._supervisor: subprocess.Popen[str] | None = None
        self.folder = Path(tempfile.mkdtemp(prefix=f"txbroker-{self.name}-"))
        self._user = _UNPRIVILEGED if os.geteuid() == 0 else ""
        if self._user:
            entry = pwd.getpwnam(self._user)
            os.chown(self.folder, entry.pw_uid, entry.pw_gid)

    @property
    def pid(self) -> int:
        """The server's process id, 0 if it does not run."""
        return self._call("status") if self._supervisor is not None else 0

    @property
    def admin_url(self) -> str:
        """The URL of the server's own database, as the administrator."""
        raise NotImplementedError

    def url(self, database: str) -> str:
        """Return the URL of a database, as its owner."""
        raise NotImplementedError

    def create_database(self, name: str | None = None) -> str:
        """Create a database, of a unique name if none is given; return its URL.

        `name` may have letters, digits and `_`.
        """
        name = name or unique("database").replace("-", "_")
        self._create(name)
        return self.url(name)

    def start(self) -> None:
        """Start the server and return once it takes connections; does nothing while it runs.

        It keeps its data and its port from one start to the next.
        """
        try:
            if self._supervisor is None:
                self._prepare()
                self._supervise()
                self._first_start()
            elif not self.pid:
                self._call("start")
                self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """Shut the server down; keep its data."""
        self._call("stop")

    def kill(self) -> None:
        """Kill the server and its children, like kill -9; keep its data."""
        self._call("kill")

    def pause(self) -> None:
        """Stop the server and its children where they are (SIGSTOP)."""
        self._call("pause")

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT)."""
        self._call("resume")

    def save(self) -> None:
        """Copy the data of a server that is shut down, for `put_back`."""
        self._run("cp", "-a", "data", "copy")

    def put_back(self) -> None:
        """Put the data of a server that is shut down back to its copy."""
        self._run("rm", "-rf", "data")
        self._run("mv", "copy", "data")

    def close(self) -> None:
        """End the server, and remove its data."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- what each kind does its way ----------------------------------------------------------

    def _prepare(self) -> None:
        """Create the server's files."""
        raise NotImplementedError

    def _command(self) -> Sequence[str]:
        raise NotImplementedError

    def _configure(self) -> None:
        """Write the configuration, with the port."""
        raise NotImplementedError

    def _connect(self) -> Any:
        """Return a connection of the administrator, in autocommit mode."""
        raise NotImplementedError

    def _folder_of(self, connection: Any) -> str:
        """Return the folder with the data of the connected server."""
        raise NotImplementedError

    def _create_user(self) -> None:
        raise NotImplementedError

    def _create(self, name: str) -> None:
        raise NotImplementedError

    # --- the process --------------------------------------------------------------------------

    def _run(self, *command: str) -> None:
        """Run a command that creates files, as the server's user."""
        drop: dict[str, Any] = {}
        if self._user:
            drop = {"user": self._user, "group": self.folder.stat().st_gid, "extra_groups": []}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={"PATH": f"{os.defpath}:/usr/sbin", "LC_ALL": "C", "HOME": str(self.folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            **drop,
        )
        assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout}{done.stderr}"

    def _supervise(self) -> None:
        supervisor = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), self._user]
        # A separate session keeps a terminal's Ctrl-C from the server.
        self._supervisor = subprocess.Popen(
            [*supervisor, str(self.folder), self._end_signal, *self._command()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _call(self, command: str) -> int:
        supervisor = self._supervisor
        assert supervisor is not None, "the server was not started: call start() first"
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        with self._guard:
            supervisor.stdin.write(f"{command}\n")
            supervisor.stdin.flush()
            return int(supervisor.stdout.readline())

    def _first_start(self) -> None:
        for attempt in range(1, _STARTS_MAX + 1):
            (self.port,) = free_ports(1)
            self._configure()
            self._call("start")
            try:
                self._wait_until_ready()
            except AssertionError:
                if self.pid or attempt == _STARTS_MAX or _PORT_TAKEN not in self._log():
                    raise
            else:
                break
        self._create_user()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        while True:
            # Another server may have taken the port.
            with (
                suppress(psycopg.OperationalError, pymysql.OperationalError),
                closing(self._connect()) as connection,
            ):
                if Path(self._folder_of(connection)) == self.folder / "data":
                    return
            assert self.pid, f"{self.name} ended while starting:\n{self._log()}"
            assert time.monotonic() < deadline, f"{self.name} does not start:\n{self._log()}"
            time.sleep(_POLL_S)

    def _log(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])


class PostgresServer(DatabaseServer):
    """A private PostgreSQL."""

    name = "postgres"
    _end_signal = "SIGINT"  # ends sessions; SIGTERM would wait for them

    @property
    def admin_url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def url(self, database: str) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def _prepare(self) -> None:
        self._run(
            str(Path(program("postgres")).with_name("initdb")),
            f"--pgdata={self.folder / 'data'}",
            "--no-sync",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--username=postgres",
        )

    def _command(self) -> Sequence[str]:
        return [program("postgres"), "-D", str(self.folder / "data")]

    def _configure(self) -> None:
        settings: dict[str, str | int] = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "shared_buffers": "16MB",
            **self._settings,
        }
        lines = [f"{name} = '{value}'\n" for name, value in settings.items()]
        (self.folder / "data/postgresql.auto.conf").write_text("".join(lines))

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(self.admin_url, autocommit=True, connect_timeout=_CONNECT_S)

    def _folder_of(self, connection: Any) -> str:
        return str(connection.execute("SHOW data_directory").fetchone()[0])

    def _create_user(self) -> None:
        with closing(self._connect()) as connection:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(USER)))

    def _create(self, name: str) -> None:
        create = sql.SQL("CREATE DATABASE {} OWNER {}")
        with closing(self._connect()) as connection:
            connection.execute(create.format(sql.Identifier(name), sql.Identifier(USER)))


class MariaServer(DatabaseServer):
    """A private MariaDB."""

    name = "mariadb"
    _end_signal = "SIGTERM"

    @property
    def admin_url(self) -> str:
        return f"mariadb://root@127.0.0.1:{self.port}/mysql"

    def url(self, database: str) -> str:
        return f"mariadb://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def _prepare(self) -> None:
        program("mariadbd")
        install = shutil.which("mariadb-install-db")
        assert install is not None, "mariadb-install-db is missing: `make tools` installs it"
        self._run(
            install,
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            f"--tmpdir={self.folder}",  # see `_configure`
            "--innodb-log-file-size=16M",
            "--innodb-flush-method=nosync",
        )

    def _command(self) -> Sequence[str]:
        return [program("mariadbd"), f"--defaults-file={self.folder / 'my.cnf'}"]

    def _configure(self) -> None:
        settings: dict[str, str | int] = {
            "datadir": str(self.folder / "data"),
            "bind_address": "127.0.0.1",
            "port": self.port,
            # Relative to the data: the path of a socket must be short.
            "socket": "socket",
            # A server that starts deletes the temporary tables in its folder, also another one's.
            "tmpdir": str(self.folder),
            "pid_file": "pid",
            "innodb_buffer_pool_size": "32M",
            "innodb_log_file_size": "16M",
            # The kernel limits asynchronous I/O of all servers together.
            "innodb_use_native_aio": 0,
            **self._settings,
        }
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        (self.folder / "my.cnf").write_text("".join(["[mariadbd]\n", *lines]))

    def _connect(self) -> pymysql.Connection:
        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user="root",
            autocommit=True,
            connect_timeout=_CONNECT_S,
            read_timeout=_CONNECT_S,
        )

    def _folder_of(self, connection: Any) -> str:
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@datadir")
            return str(cursor.fetchone()[0])

    def _create_user(self) -> None:
        self._execute(f"CREATE USER `{USER}`@`127.0.0.1` IDENTIFIED BY '{PASSWORD}'")

    def _create(self, name: str) -> None:
        self._execute(
            f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4",
            f"GRANT ALL ON `{name}`.* TO `{USER}`@`127.0.0.1`",
        )

    def _execute(self, *statements: str) -> None:
        with closing(self._connect()) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
