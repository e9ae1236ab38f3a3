"""Calls of the HTTP API from the command line, with nothing that takes long to import."""

import copy
import getpass
import http.client
import json
import platform
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import click

from txbroker.cli.contexts import (
    DEFAULT_URL,
    NO_CREDENTIALS,
    CredentialFiles,
    check_url,
    complete_contexts,
    target_of,
)
from txbroker.cli.output import printable
from txbroker.cli.run import CommandFailed
from txbroker.errors import ConfigurationError
from txbroker.net.tls import ClientTls, TlsFiles, tls_trouble

F = TypeVar("F", bound=Callable[..., Any])

TIMEOUT_S = 60.0
"""Longer than a proxy takes for any call; who has not answered by then will not."""
_IDLE_S = 20.0
"""A connection that lay idle for longer, while somebody read a question, is not used again: a proxy
or what is between may have closed it."""
_PAGE = 1000
_BY_CHARS_MAX = 200
_TOKEN_CHARS_MAX = 4096

_REMEDIES = {
    "unauthorized": "Name the file that holds the token with --token-file.",
    "certificate_required": "Name one with --client-cert-file and --client-key-file.",
    "admin_only": "Name that address with --url, and its token with --token-file.",
    "not_permitted": "Use a principal with that right: name its token with --token-file.",
    "already_decided": "Nothing was changed; `txbroker tx show` tells who decided and when.",
    "wrong_group": "Name the right --group, or none to decide as an operator.",
    "unknown_topic": "Create the topic, or run the proxy with --create-target-topics.",
    "not_pending": "`txbroker tx show` tells its state.",
    "body_lost": "Roll it back, and send the messages again from the business's own data.",
}


class ApiError(CommandFailed):
    """The proxy did not carry a call out.

    Attributes:
        code: the error's code, as in docs/reference/errors.md; "" where there was no answer of a
            proxy.
        sentence: what is wrong, without code and remedy.
        reached: False where no answer came at all, so that nobody knows what became of the call.
        slow: True where that was waited for until the end.
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


class ApiClient:
    """One proxy's API.

    Args:
        url: where it listens.
        papers: the files by which it and we know one another.
        shown: what people read where something is done there; "" for the URL.
        timeout_s: for one call.

    Raises:
        click.UsageError: the URL is none, or a file cannot be read.
    """

    def __init__(
        self,
        url: str,
        papers: CredentialFiles = NO_CREDENTIALS,
        *,
        shown: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.url = check_url(url)
        parts = urlsplit(self.url)
        self._address = parts.hostname or "", parts.port
        self._secure = parts.scheme == "https"
        self._base = parts.path.rstrip("/")
        self._headers = {"accept": "application/json"}
        if papers.token_file is not None:
            self._headers["authorization"] = f"Bearer {_read_token(papers.token_file)}"
        self._tls = tls_of(papers)
        self._shown = shown
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._used_at_s = 0.0

    def __str__(self) -> str:
        return self._shown or self.url

    def another(self) -> "ApiClient":
        """Return a client for the same proxy with a connection of its own, for another thread."""
        copied = copy.copy(self)
        copied._connection = None
        return copied

    def close(self) -> None:
        """Close the connection, if there is one; a later call makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

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
            answer = response.read()
        except ConnectionRefusedError:
            self.close()
            raise ApiError(
                f"nothing listens at {self.url}. Start a proxy, with `txbroker dev` for one, or "
                "say where it is with --url",
                reached=False,
            ) from None
        except TimeoutError:
            self.close()
            raise ApiError(
                f"{self.url} has not answered within {self._timeout_s:g} s",
                reached=False,
                slow=True,
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            what = tls_trouble(error, "--ca-file") or getattr(error, "strerror", None) or str(error)
            what = what or type(error).__name__
            raise ApiError(f"no answer from {self.url}: {what}", reached=False) from None
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

    def _error(self, status: int, answer: Any) -> ApiError:
        error = answer.get("error") if isinstance(answer, dict) else None
        if not isinstance(error, dict):
            return ApiError(f"{self.url} answered with {status}: is it a txbroker proxy?")
        code, message = (
            printable(str(error.get("code", status))),
            printable(str(error.get("message", ""))),
        )
        remedy = _REMEDIES.get(code, "")
        return ApiError(
            f"{message} ({code}){'. ' if remedy else ''}{remedy}".strip(), code, message
        )


def who() -> str:
    """Return who calls, for the record: the user and the machine, as the system has them."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = "somebody"
    name = f"{user}@{platform.node() or 'somewhere'}"
    return "".join(char for char in name if char.isprintable())[:_BY_CHARS_MAX]


def client_of(context: click.Context, timeout_s: float = TIMEOUT_S) -> ApiClient:
    """Return the client of a command with `client_options`.

    Raises:
        click.UsageError: what is said of the proxy contradicts itself, or cannot be read.
    """
    target = target_of(context)
    return ApiClient(target.url, target.papers, shown=str(target), timeout_s=timeout_s)


def client_options(function: F) -> F:
    """Give a command `--url`, `--context` and the options of files that go along; the function
    gets a `client`."""

    @wraps(function)
    def with_client(*args: Any, **options: Any) -> Any:
        for name in ("url", "context", *CredentialFiles._fields):
            del options[name]  # `client_of` reads them, and where they come from
        return function(*args, client=client_of(click.get_current_context()), **options)

    decorated: Any = with_client
    for option in (
        click.option(
            "--context",
            metavar="NAME",
            envvar="TXBROKER_CONTEXT",
            shell_complete=complete_contexts,
            help="The installation to call, one of `txbroker context list`. "
            "[env: TXBROKER_CONTEXT]",
        ),
        _file_option(
            "client_key_file",
            "Its private key (PEM), unless it is in the same file.",
        ),
        _file_option(
            "client_cert_file",
            "The certificate to show where the proxy asks for one (PEM).",
        ),
        _file_option(
            "ca_file",
            "Certificates of the authorities that may sign the proxy's (PEM); without it those "
            "that the system trusts.",
        ),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            envvar="TXBROKER_TOKEN_FILE",
            help="The file that holds the proxy's token. [env: TXBROKER_TOKEN_FILE]",
        ),
        click.option(
            "--url",
            metavar="URL",
            envvar="TXBROKER_URL",
            help="Where the proxy is. [env: TXBROKER_URL; default: the current context's, else "
            f"{DEFAULT_URL}]",
        ),
    ):
        decorated = option(decorated)
    result: F = decorated
    return result


def tls_of(papers: CredentialFiles) -> ClientTls:
    """Return whom to trust, and what to show.

    Raises:
        click.UsageError: a file cannot be read, or they do not fit together.
    """
    names = ("--ca-file", "--client-cert-file", "--client-key-file")
    try:
        return ClientTls(TlsFiles(*papers[1:], names))
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None


def _file_option(name: str, text: str) -> Callable[[F], F]:
    variable = f"TXBROKER_{name.upper()}"
    return click.option(
        f"--{name.replace('_', '-')}",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        envvar=variable,
        help=f"{text} [env: {variable}]",
    )


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
