"""A web server with a test's answers, as of a slow, overloaded or failing proxy."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from txbroker.core.routing import make_id, parse_id

Reply = tuple[int, Any]
"""Status and body of an answer: JSON data, or bytes as they are; status 0: no answer."""


class Asked(NamedTuple):
    """One call that came in."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    authorization: str


EMPTY = {
    "at_ms": 0, "complete": True, "proxies": [], "partitions": [], "groups": [],
    "groups_left_off": 0, "refused_topics": {},
}  # fmt: skip
"""An overview without anything."""


class Stub:
    """The received calls; set `answer` for other answers."""

    def __init__(self) -> None:
        self.calls: list[Asked] = []
        self.rows: dict[str, dict[str, Any]] = {}
        self.answer: Callable[[Asked], Reply | None] = lambda asked: None
        self.hangs_up = False
        """Close each connection after an answer, without announcing it."""
        self.url = ""
        self._lock = threading.Lock()

    def add(self, count: int, *, partitions: int = 1, state: str = "parked") -> list[str]:
        """Add `count` transactions; return their ids, oldest first."""
        ids = []
        for number in range(len(self.rows), len(self.rows) + count):
            partition = number % partitions
            id = make_id(partition, 1_700_000_000_000 + number, number)
            self.rows[id] = {
                "id": id,
                "group": "orders",
                "state": state,
                "partition": partition,
                "half_offset": number,
                "prepared_at_ms": 1_700_000_000_000 + number,
                "messages": [{"topic": "t", "partition": 0}],
                "round": 1,
                "attempts": 15,
                "attempts_max": 15,
            }
            ids.append(id)
        return ids

    def posts(self) -> list[Asked]:
        """Return the calls that change something."""
        return [call for call in self.calls if call.method == "POST"]

    def take(self, asked: Asked) -> Reply:
        """Answer one call."""
        with self._lock:
            self.calls.append(asked)
        return self.answer(asked) or self._usual(asked)

    def _usual(self, asked: Asked) -> Reply:
        parts = asked.path.removeprefix("/v1/").split("/")
        if parts == ["transactions"]:
            wanted = asked.query.get("state")
            rows = [row for row in self.rows.values() if wanted in (None, row["state"])]
            return 200, {"transactions": rows, "next_cursor": None}
        if parts == ["overview"]:
            counts = {"pending": 0, "parked": len(self.rows), "refused": 0, "committed": 0}
            half = {"partition": 0, "owner": self.url, "state": "owned", "settled": 7} | counts
            return 200, EMPTY | {"partitions": [half]}
        row = self.rows[parts[1]]
        if asked.method == "POST":
            row["state"] = {"commit": "promoted", "rollback": "rolled_back"}.get(
                parts[2], "pending"
            )
        return 200, row


def partition_of(asked: Asked) -> int:
    """Return the half partition of the transaction that a call names, -1 for none."""
    parts = asked.path.split("/")
    return parse_id(parts[3]).partition if len(parts) > 3 else -1


def error(status: int, code: str) -> Reply:
    """Return the answer to a call that was not carried out."""
    return status, {"error": {"code": code, "message": f"it is {code}"}}


@contextmanager
def stub() -> Iterator[Stub]:
    """Run one."""
    made = Stub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            """Answer."""
            parts = urlsplit(self.path)
            length = int(self.headers.get("content-length") or 0)
            status, answer = made.take(
                Asked(
                    self.command,
                    parts.path,
                    {name: values[0] for name, values in parse_qs(parts.query).items()},
                    json.loads(self.rfile.read(length)) if length else None,
                    self.headers.get("authorization", ""),
                )
            )
            if status == 0:  # no answer at all
                self.close_connection = True
                return
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = made.hangs_up

        do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
