"""The HTTP calls of `txbroker bench`: one connection, one call at a time, as little work as can be.

A load that itself took most of the machine would measure nothing.
"""

import asyncio
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from txbroker.errors import TxbrokerError
from txbroker.net.deadlines import Deadlines
from txbroker.net.tls import ClientTls, TlsFiles

ANSWER_TIMEOUT_S = 30.0
_HEADERS_END = b"\r\n\r\n"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class _Stream(asyncio.Protocol):
    """An open connection, and the answer that is waited for on it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    def ask(self, request: bytes) -> "asyncio.Future[tuple[int, bytes]]":
        """Send a request; the future brings the answer's status and body."""
        self._answer = asyncio.get_running_loop().create_future()
        self._received = b""
        if self._transport is None:
            self._fail(ConnectionError("the connection was closed"))
        else:
            self._transport.write(request)
        return self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """A part of an answer, or all of it, has come."""
        self._received += data
        try:
            found = _answer_in(self._received)
        except ValueError as error:
            self._fail(error)
            return
        if found is not None and self._answer is not None and not self._answer.done():
            self._received = b""
            self._answer.set_result(found)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._transport = None
        self._fail(exc or ConnectionError("the connection was closed"))

    def not_answered(self) -> None:
        """The answer takes too long."""
        self._fail(TimeoutError())

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _answer_in(received: bytes) -> tuple[int, bytes] | None:
    """Return status and body of an answer, None while it is not whole.

    Raises:
        ValueError: it is none that says how long it is.
    """
    end = received.find(_HEADERS_END)
    if end < 0:
        return None
    _, _, length = received[:end].lower().partition(b"\r\ncontent-length:")
    begin, size = end + len(_HEADERS_END), int(length.partition(b"\r\n")[0])
    body = received[begin : begin + size]
    return None if len(body) < size else (int(received[9:12]), body)


class HttpConnection:
    """A connection that is kept open, and opened anew where it broke.

    Args:
        url: where the proxy is.
        token: what it knows us by, if anything.
        ca_file, client_cert_file, client_key_file: as for the SDK.

    Raises:
        ConfigurationError: a file is wrong.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        ca_file: str | None,
        client_cert_file: str | None,
        client_key_file: str | None,
    ) -> None:
        parts = urlsplit(url)
        self._host, self._secure = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/")
        self._tls = ClientTls(
            TlsFiles(_path(ca_file), _path(client_cert_file), _path(client_key_file))
        )
        authorization = f"authorization: Bearer {token}\r\n" if token else ""
        self._headers = (
            f" HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
            f"{authorization}content-length: "
        )
        self._stream: _Stream | None = None
        self._deadlines: Deadlines[_Stream] | None = None

    def close(self) -> None:
        """Close it."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._deadlines is not None:
            self._deadlines.close()
            self._deadlines = None

    async def post(self, path: str, body: object) -> Any:
        """Return the answer to a POST.

        Raises:
            TxbrokerError: the proxy refuses, or does not answer.
        """
        try:
            status, raw = await self._exchange(path, _encode(body))
            answer = _decode(raw)
        except (OSError, ValueError, TimeoutError) as error:
            self.close()
            what = str(error) or type(error).__name__
            raise TxbrokerError(f"no answer to an HTTP call: {what}") from None
        if status >= 400:
            told = answer.get("error", {}) if isinstance(answer, dict) else {}
            raise TxbrokerError(f"{told.get('message', status)} ({told.get('code', status)})")
        return answer

    async def _exchange(self, path: str, body: bytes) -> tuple[int, bytes]:
        stream = self._stream or await self._open()
        deadlines = self._deadlines
        assert deadlines is not None
        head = f"POST {self._base}{path}{self._headers}{len(body)}\r\n\r\n"
        deadlines.begin(stream)
        try:
            return await stream.ask(head.encode() + body)
        except asyncio.CancelledError:
            # Its answer would be taken for that of the next call.
            self.close()
            raise
        finally:
            deadlines.end(stream)

    async def _open(self) -> _Stream:
        loop = asyncio.get_running_loop()
        context = self._tls.context() if self._secure else None
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            _, self._stream = await loop.create_connection(
                _Stream, self._host, self._port, ssl=context
            )
        self._deadlines = Deadlines(ANSWER_TIMEOUT_S, _Stream.not_answered)
        return self._stream


def _path(given: str | None) -> Path | None:
    return Path(given) if given else None
