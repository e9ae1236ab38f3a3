"""The HTTP calls of `txbroker bench`: one connection, one call at a time.

Parsed by httptools without a client library, whose CPU time would reduce the measured throughput.
"""

import asyncio
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from txbroker.errors import TxbrokerError
from txbroker.net.tls import ClientTls, TlsFiles

ANSWER_TIMEOUT_S = 30.0
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class _Stream(asyncio.Protocol):
    """An open connection and the answer in flight."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._has_length = False
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    def ask(self, request: bytes) -> "asyncio.Future[tuple[int, bytes]]":
        """Send a request; the future returns status and body of the answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self._body, self._has_length = b"", False
        if self._transport is None:
            self._fail(ConnectionError("the connection was closed"))
        else:
            self._transport.write(request)
        return self._answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ValueError(str(error)))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length = self._has_length or name.lower() == b"content-length"

    def on_headers_complete(self) -> None:
        """Refuse an answer without a length, which would end with the connection only."""
        if not self._has_length:
            self._fail(ValueError("the answer has no content-length"))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), self._body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(exc or ConnectionError("the connection was closed"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


class BenchConnection:
    """A connection that is reused, and reopened after an error; its files are as for the SDK."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        ca_file: str | None = None,
        client_cert_file: str | None = None,
        client_key_file: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        self._host, self._secure = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/")
        files = (ca_file, client_cert_file, client_key_file)
        ca, cert, key = (Path(name) if name else None for name in files)
        self._tls = ClientTls(TlsFiles(ca, cert, key))
        authorization = f"authorization: Bearer {token}\r\n" if token else ""
        self._headers = (
            f" HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
            f"{authorization}content-length: "
        )
        self._stream: _Stream | None = None

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def post(self, path: str, body: object) -> Any:
        """Return the answer to a POST."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status, raw = await self._exchange(path, _encode(body))
            answer = _decode(raw)
        except (OSError, ValueError, TimeoutError) as error:
            self.close()
            reason = str(error) or type(error).__name__
            raise TxbrokerError(f"no answer to an HTTP call: {reason}") from None
        except asyncio.CancelledError:
            self.close()  # else the next call would get this call's answer
            raise
        if status >= 400:
            refusal = answer.get("error", {}) if isinstance(answer, dict) else {}
            raise TxbrokerError(f"{refusal.get('message', status)} ({refusal.get('code', status)})")
        return answer

    async def _exchange(self, path: str, body: bytes) -> tuple[int, bytes]:
        stream = self._stream or await self._open()
        head = f"POST {self._base}{path}{self._headers}{len(body)}\r\n\r\n"
        return await stream.ask(head.encode() + body)

    async def _open(self) -> _Stream:
        context = self._tls.context() if self._secure else None
        _, self._stream = await asyncio.get_running_loop().create_connection(
            _Stream, self._host, self._port, ssl=context
        )
        return self._stream
