"""Calls of the HTTP API from the command line, with nothing that takes long to import."""

import http.client
import json
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import click

from txbroker.cli.run import Failed

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_URL = "http://127.0.0.1:8470"
TIMEOUT_S = 60.0
"""Longer than a proxy takes for any call; who has not answered by then will not."""
_PAGE = 1000
_TOKEN_CHARS_MAX = 4096

_REMEDIES = {
    "unauthorized": "Name the file that holds the token with --token-file.",
    "already_decided": "Nothing was changed; `txbroker tx show` tells who decided and when.",
    "wrong_group": "Name the right --group, or none to decide as an operator.",
    "unknown_topic": "Create the topic, or run the proxy with --create-target-topics.",
    "not_pending": "`txbroker tx show` tells its state.",
}


class ApiError(Failed):
    """The proxy did not carry a call out.

    Attributes:
        code: the error's code, as in docs/reference/errors.md; "" where there was no answer of a
            proxy.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class Client:
    """One proxy's API.

    Args:
        url: where it listens.
        token_file: holds the token that it wants, if any.

    Raises:
        click.UsageError: the URL is none, or the token cannot be read.
    """

    def __init__(self, url: str, token_file: Path | None = None) -> None:
        try:
            parts = urlsplit(url)
            self._address = parts.hostname or "", parts.port
        except ValueError as error:
            raise click.UsageError(f"--url {url!r} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not self._address[0] or parts.query:
            raise click.UsageError(f"--url {url!r} is no URL like {DEFAULT_URL}")
        self.url = url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._base = parts.path.rstrip("/")
        self._headers = {"accept": "application/json"}
        if token_file is not None:
            self._headers["authorization"] = f"Bearer {_read_token(token_file)}"
        self._connection: http.client.HTTPConnection | None = None

    def get(self, *path: str, **query: Any) -> Any:
        """Return the answer to a GET; `query` leaves out what is None.

        Raises:
            ApiError: says why not, and what to do.
        """
        given = {name: value for name, value in query.items() if value is not None}
        return self._call("GET", path, query=given)

    def change(self, method: str, *path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer to a call that changes something.

        Raises:
            ApiError: says why not, and what to do.
        """
        given = {name: value for name, value in (body or {}).items() if value is not None}
        return self._call(method, path, body=given)

    def transactions(self, limit: int | None, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield transactions page by page, at most `limit`.

        Raises:
            ApiError
        """
        cursor, left = None, limit
        while left is None or left > 0:
            size = _PAGE if left is None else min(left, _PAGE)
            page = self.get("transactions", **query, limit=size, cursor=cursor)
            yield from page["transactions"]
            left = None if left is None else left - len(page["transactions"])
            cursor = page.get("next_cursor")
            if cursor is None:
                return

    def _call(
        self,
        method: str,
        path: tuple[str, ...],
        query: dict[str, Any] | None = None,
        body: dict[str, Any] | None = None,
    ) -> Any:
        try:
            target = "/".join((f"{self._base}/v1", *(quote(part, safe="") for part in path)))
            if query:
                target += f"?{urlencode(query)}"
            sent = None if body is None else _json(body)
        except UnicodeEncodeError:
            raise click.UsageError("what is sent has to be UTF-8; --file sends any bytes") from None
        status, raw = self._exchange(method, target, sent)
        try:
            answer = json.loads(raw)
        except ValueError:
            raise ApiError(
                f"{self.url} answered with {status} and no JSON: is it a txbroker proxy?"
            ) from None
        if status >= 400:
            raise self._error(status, answer)
        return answer

    def _exchange(self, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        headers = dict(self._headers)
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            connection = self._connected()
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except ConnectionRefusedError:
            raise ApiError(
                f"nothing listens at {self.url}. Start a proxy, with `txbroker dev` for one, or "
                "say where it is with --url"
            ) from None
        except TimeoutError:
            raise ApiError(f"{self.url} has not answered within {TIMEOUT_S:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            what = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ApiError(f"no answer from {self.url}: {what}") from None

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            self._connection = kind(*self._address, timeout=TIMEOUT_S)
        return self._connection

    def _error(self, status: int, answer: Any) -> ApiError:
        error = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(error, dict):
            return ApiError(f"{self.url} answered with {status}: is it a txbroker proxy?")
        code, message = str(error.get("code", status)), str(error.get("message", ""))
        remedy = _REMEDIES.get(code, "")
        return ApiError(f"{message} ({code}){'. ' if remedy else ''}{remedy}".strip(), code)


def client_options(function: F) -> F:
    """Give a command `--url` and `--token-file`; the function gets a `client`."""

    @wraps(function)
    def with_client(*args: Any, url: str, token_file: Path | None, **options: Any) -> Any:
        return function(*args, client=Client(url, token_file), **options)

    decorated: Any = with_client
    for option in (
        click.option(
            "--token-file",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            envvar="TXBROKER_TOKEN_FILE",
            help="The file that holds the proxy's token. [env: TXBROKER_TOKEN_FILE]",
        ),
        click.option(
            "--url",
            default=DEFAULT_URL,
            metavar="URL",
            envvar="TXBROKER_URL",
            help=f"Where the proxy is. [env: TXBROKER_URL; default: {DEFAULT_URL}]",
        ),
    ):
        decorated = option(decorated)
    result: F = decorated
    return result


def _json(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise
    except ValueError:
        raise click.UsageError("a number has to be finite") from None


def _read_token(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            token = file.read(_TOKEN_CHARS_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "is not text"
        raise click.UsageError(f"--token-file {path}: {what}") from None
    if not token or not token.isascii() or not token.isprintable():
        raise click.UsageError(f"--token-file {path} holds no token")
    return token
