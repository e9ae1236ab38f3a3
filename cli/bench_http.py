"""The HTTP calls of `txbroker bench`: one connection, one call at a time, as little work as can be.

A load that itself took most of the machine would measure nothing.
"""

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from txbroker.errors import TxbrokerError
from txbroker.tls import ClientTls, TlsFiles

ANSWER_TIMEOUT_S = 30.0
_HEADERS_END = b"\r\n\r\n"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


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
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        """Close it."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def post(self, path: str, body: object) -> Any:
        """Return the answer to a POST.

        Raises:
            TxbrokerError: the proxy refuses, or does not answer.
        """
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status, raw = await self._exchange(path, _encode(body))
            answer = _decode(raw)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            self.close()
            what = str(error) or type(error).__name__
            raise TxbrokerError(f"no answer to an HTTP call: {what}") from None
        if status >= 400:
            told = answer.get("error", {}) if isinstance(answer, dict) else {}
            raise TxbrokerError(f"{told.get('message', status)} ({told.get('code', status)})")
        return answer

    async def _exchange(self, path: str, body: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            context = self._tls.context() if self._secure else None
            self._streams = await asyncio.open_connection(self._host, self._port, ssl=context)
        reader, writer = self._streams
        head = f"POST {self._base}{path}{self._headers}{len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(_HEADERS_END)).lower()
        _, _, rest = answer.partition(b"\r\ncontent-length:")
        return int(answer[9:12]), await reader.readexactly(int(rest[: rest.index(b"\r\n")]))


def _path(given: str | None) -> Path | None:
    return Path(given) if given else None
