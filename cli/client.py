"""Calls of the HTTP API from the command line, without modules that are slow to import."""

import copy
import getpass
import http.client
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlencode, urlsplit

import click
import msgspec

from txbroker.cli.contexts import (
    DEFAULT_URL,
    FILE_HELP,
    NO_CREDENTIALS,
    CredentialFiles,
    check_url,
    complete_contexts,
    target_of,
)
from txbroker.cli.options import FILE, env_option, with_options
from txbroker.cli.output import printable
from txbroker.cli.run import CommandFailed, usage_errors
from txbroker.contract.transactions import PageBody, TransactionBody
from txbroker.errors import request_errors
from txbroker.net.tls import ClientTls, TlsFiles, tls_trouble

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
P = TypeVar("P", bound=PageBody)

TIMEOUT_S = 60.0
"""Longer than a proxy takes for any call."""
_IDLE_S = 20.0
"""A connection idle for longer, as while the user reads a question, is not reused: the proxy or a
load balancer may have closed it."""
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0)
"""Pauses between retries: their sum, 20 s, outlasts the take-over of a half partition, of which the
silence of a killed owner takes 10 s, and the replay a few."""
RETRYABLE = frozenset(code for code, kind in request_errors().items() if kind.retryable)
"""Codes of errors after which the same call can succeed."""
_PAGE = 1000
_BY_CHARS_MAX = 200
_TOKEN_CHARS_MAX = 4096

_REMEDIES = {
    "unauthorized": "Name the file with the token by --token-file.",
    "certificate_required": "Name one by --client-cert-file and --client-key-file.",
    "admin_only": "Name the admin address by --url, and its token by --token-file.",
    "not_permitted": "Use a principal with that right: name its token file by --token-file.",
    "already_decided": "Nothing was changed; `txbroker tx show` shows who decided and when.",
    "wrong_group": "Name the right --group, or no group to decide as an operator.",
    "unknown_topic": "Create the topic, or run the proxy with --create-target-topics.",
    "not_pending": "`txbroker tx show` shows its state.",
    "body_lost": "Roll it back, and send the messages again from your business data.",
}


class ApiError(CommandFailed):
    """The proxy did not carry out a call.

    Attributes:
        code: as in docs/reference/errors.md; "" without an answer of a proxy.
        sentence: the error without its code and the next step.
        reached: False without any answer: the call may have been carried out.
        slow: True where the timeout passed.
    """

    def __init__(
        self,
        message: str,
        code: str = "",
        sentence: str = "",
        *,
        reached: bool = True,
        slow: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.sentence = sentence or message
        self.reached = reached
        self.slow = slow


class ApiConnection:
    """One HTTP connection to a proxy, reopened after an error or a long idle time."""

    def __init__(
        self, url: str, headers: Mapping[str, str], tls: ClientTls, timeout_s: float
    ) -> None:
        parts = urlsplit(url)
        self._url = url
        self._secure = parts.scheme == "https"
        self._address = parts.hostname or "", parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/")
        self._headers = {"accept": "application/json", **headers}
        self._tls = tls
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._used_at_s = 0.0

    def close(self) -> None:
        """Close the connection, if it is open; a later call opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def exchange(
        self, method: str, path: str, body: bytes | None = None, bytes_max: int | None = None
    ) -> tuple[int, bytes]:
        """Return status and body of the answer, at most `bytes_max` bytes of it."""
        headers = dict(self._headers)
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            connection = self._connected()
            connection.request(method, self._base + path, body, headers)
            response = connection.getresponse()
            answer = response.read(bytes_max)
        except ConnectionRefusedError:
            self.close()
            sentence = f"nothing listens at {self._url}"
            raise ApiError(
                f"{sentence}. Start a proxy, for example with `txbroker dev`, or name a running "
                "one by --url",
                sentence=sentence,
                reached=False,
            ) from None
        except TimeoutError:
            self.close()
            raise ApiError(
                f"{self._url} has not answered within {self._timeout_s:g} s",
                reached=False,
                slow=True,
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            reason = tls_trouble(error, "--ca-file") or getattr(error, "strerror", None)
            reason = reason or str(error) or type(error).__name__
            raise ApiError(f"no answer from {self._url}: {reason}", reached=False) from None
        self._used_at_s = time.monotonic()
        return response.status, answer

    def _connected(self) -> http.client.HTTPConnection:
        if time.monotonic() - self._used_at_s > _IDLE_S:
            self.close()
        if self._connection is None:
            host, port = self._address
            if self._secure:
                self._connection = http.client.HTTPSConnection(
                    host, port, timeout=self._timeout_s, context=self._tls.context()
                )
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        return self._connection


class ApiClient:
    """The API of one proxy; questions name it by `shown`, else by its URL."""

    def __init__(
        self,
        url: str,
        credentials: CredentialFiles = NO_CREDENTIALS,
        *,
        shown: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.url = check_url(url)
        token_file = credentials.token_file
        headers = {}
        if token_file is not None:
            headers["authorization"] = f"Bearer {_read_token(token_file)}"
        self._open = partial(ApiConnection, self.url, headers, tls_of(credentials), timeout_s)
        self._connection = self._open()
        self._shown = shown

    def __str__(self) -> str:
        return self._shown or self.url

    def another(self) -> "ApiClient":
        """Return a client of the same proxy with a separate connection, for another thread."""
        copied = copy.copy(self)
        copied._connection = self._open()
        return copied

    def close(self) -> None:
        """Close the connection, if it is open; a later call opens it again."""
        self._connection.close()

    def get(self, *path: str, **query: Any) -> Any:
        """Return the answer to a GET; values of `query` that are None are left out."""
        given = {name: value for name, value in query.items() if value is not None}
        return self._call("GET", path, query=given)

    def read(self, kind: type[T], *path: str, **query: Any) -> T:
        """Return the answer to a GET as a struct of the contract; errors as in `as_struct`."""
        return self.as_struct(self.get(*path, **query), kind)

    def as_struct(self, answer: Any, kind: type[T]) -> T:
        """Return an answer as a struct of the contract.

        Raises:
            ApiError: a proxy of another version answers what this command cannot read.
        """
        try:
            return msgspec.convert(answer, kind, str_keys=True)
        except msgspec.ValidationError as error:
            raise ApiError(
                f"{self.url} answered what this version cannot read: {printable(str(error))}. Use "
                "a txbroker of the proxy's version"
            ) from None

    def change(self, method: str, *path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer to a call that changes data."""
        given = {name: value for name, value in (body or {}).items() if value is not None}
        return self._call(method, path, body=given)

    def pages(self, kind: type[P], *path: str, **query: Any) -> Iterator[P]:
        """Yield the pages of a list; while a proxy takes over, the next one is asked for again."""
        cursor: str | None = None
        while True:
            page = self._page(kind, path, query, cursor)
            yield page
            cursor = page.next_cursor
            if cursor is None:
                return

    def _page(
        self, kind: type[P], path: tuple[str, ...], query: dict[str, Any], cursor: str | None
    ) -> P:
        for pause_s in (*PAUSES_S, None):
            try:
                return self.read(kind, *path, **query, cursor=cursor)
            except ApiError as error:
                if cursor is None or pause_s is None or error.code not in RETRYABLE:
                    raise
            time.sleep(pause_s)
        raise AssertionError

    def transactions(self, limit: int | None, **query: Any) -> Iterator[TransactionBody]:
        """Return transactions, read page by page, at most `limit`."""
        size = _PAGE if limit is None else min(limit, _PAGE)
        pages = self.pages(PageBody, "transactions", **query, limit=size)
        return islice((row for page in pages for row in page.transactions), limit)

    def _call(
        self,
        method: str,
        path: tuple[str, ...],
        query: dict[str, Any] | None = None,
        body: dict[str, Any] | None = None,
    ) -> Any:
        try:
            target = "/".join(("/v1", *(quote(part, safe="") for part in path)))
            if query:
                target += f"?{urlencode(query)}"
            sent = None if body is None else _json(body)
        except UnicodeEncodeError:
            raise click.UsageError("arguments have to be UTF-8; --file sends any bytes") from None
        status, raw = self._connection.exchange(method, target, sent)
        try:
            answer = json.loads(raw)
        except ValueError:
            raise ApiError(
                f"{self.url} answered with {status} and no JSON: is it a txbroker proxy?"
            ) from None
        if status >= 400:
            raise self._error(status, answer)
        return answer

    def _error(self, status: int, answer: Any) -> ApiError:
        error = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(error, dict):
            return ApiError(f"{self.url} answered with {status}: is it a txbroker proxy?")
        code = printable(str(error.get("code", status)))
        message = printable(str(error.get("message", "")))
        remedy = _REMEDIES.get(code, "")
        return ApiError(
            f"{message} ({code}){'. ' if remedy else ''}{remedy}".strip(), code, message
        )


def who() -> str:
    """Return the caller for the record: user and machine, as the system names them."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = "somebody"
    name = f"{user}@{platform.node() or 'somewhere'}"
    return "".join(char for char in name if char.isprintable())[:_BY_CHARS_MAX]


def client_of(context: click.Context, timeout_s: float = TIMEOUT_S) -> ApiClient:
    """Return the client of a command with `client_options`."""
    target = target_of(context)
    return ApiClient(target.url, target.credentials, shown=str(target), timeout_s=timeout_s)


def client_options(function: F) -> F:
    """Give a command the options that choose the proxy; the function gets a `client`."""

    @wraps(function)
    def with_client(*args: Any, **options: Any) -> Any:
        for name in ("url", "context", *CredentialFiles._fields):
            del options[name]  # `client_of` reads them with their sources
        return function(*args, client=client_of(click.get_current_context()), **options)

    return _CLIENT_OPTIONS(cast(F, with_client))


_CLIENT_OPTIONS: Callable[[F], F] = with_options(
    env_option(
        "--url",
        "Address of the proxy.",
        section="Proxy",
        metavar="URL",
        shown=f"the current context's, else {DEFAULT_URL}",
    ),
    *(
        env_option(
            f"--{name.replace('_', '-')}",
            text,
            section="Proxy",
            brief=True,
            metavar="FILE",
            type=FILE,
        )
        for name, text in FILE_HELP.items()
    ),
    env_option(
        "--context",
        "The installation to call, one of `txbroker context list`.",
        section="Proxy",
        metavar="NAME",
        shell_complete=complete_contexts,
    ),
)


def tls_of(credentials: CredentialFiles) -> ClientTls:
    """Return the TLS contexts of these files."""
    names = ("--ca-file", "--client-cert-file", "--client-key-file")
    with usage_errors():
        return ClientTls(TlsFiles(*credentials[1:], names))


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
        reason = getattr(error, "strerror", None) or "is not text"
        raise click.UsageError(f"--token-file {path}: {reason}") from None
    if not token or not token.isascii() or not token.isprintable():
        raise click.UsageError(f"--token-file {path} holds no token")
    return token


def for_all(names: Sequence[str], act: Callable[[str], T]) -> list[T]:
    """Call `act` for each name and return the results; failures of several go to stderr."""
    if len(names) == 1:
        return [act(names[0])]
    results = []
    for name in names:
        try:
            results.append(act(name))
        except ApiError as error:
            click.echo(f"{printable(name)}: {error.format_message()}", err=True)
    return results
