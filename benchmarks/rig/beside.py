"""A helper process of a measurement, and calls of the proxy."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

END_S = 30.0


@contextmanager
def beside(script: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module, and wait for its `ready` on stdout; it ends when its stdin does."""
    process = subprocess.Popen(
        [sys.executable, "-m", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != b"ready\n":
            raise SystemExit(f"{script} {' '.join(arguments)} did not start")
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def call(method: str, url: str, body: dict[str, Any] | None = None) -> None:
    """Make a call that must succeed."""
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        method=method,
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()
