"""Text of MariaDB's character sets.

Python's codecs differ from them in single characters: its cp1252 lacks five bytes that `latin1` of
MariaDB has, others map differently. So the server is asked what each sequence of bytes means.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeAlias

Decode: TypeAlias = Callable[[bytes], str]
Ask: TypeAlias = Callable[[str], str]
"""Executes an SQL query, and returns its one value."""

_UNICODE = {
    "utf8mb3": "utf-8",
    "utf8mb4": "utf-8",
    "ucs2": "utf-16-be",
    "utf16": "utf-16-be",
    "utf16le": "utf-16-le",
    "utf32": "utf-32-be",
}
"""Python's codecs of those that hold the whole of Unicode; without a byte order mark."""
_WIDEST = {"big5": 2, "cp932": 2, "euckr": 2, "gb2312": 2, "gbk": 2, "sjis": 2} | {
    "eucjpms": 3,
    "ujis": 3,
}
"""Bytes of a character in those that have more than one."""
_UNDEFINED = "\ufffe"
"""The character that `codecs.charmap_decode` takes for undefined."""
_END = b"\n"
"""The same byte in all of these sets, and no part of a longer character."""


class Charsets:
    """Decodes text by the number of its collation, as the log has it.

    Args:
        names: of character sets, by the numbers of their collations.
        ask: of the server that wrote the log.
    """

    def __init__(self, names: Mapping[int, str], ask: Ask) -> None:
        self._names = names
        self._ask = ask
        self._decoders: dict[str, Decode] = {}

    def name(self, collation: int) -> str:
        """Return the name of a character set; "" if the server does not know the collation."""
        return self._names.get(collation, "")

    def decoder(self, collation: int) -> Decode | None:
        """Return what decodes text; it raises ValueError for bytes that stand for no character.

        Returns: None for binary values, and where the collation is unknown.
        """
        name = self.name(collation)
        if name in ("", "binary"):
            return None
        if name not in self._decoders:
            self._decoders[name] = self._find(name)
        return self._decoders[name]

    def _find(self, name: str) -> Decode:
        codec = _UNICODE.get(name)
        if codec is not None:
            return partial(_by_codec, name, partial(str, encoding=codec))
        width = _WIDEST.get(name, 1)
        sequences = list(_sequences(width))
        joined = _END.join(sequences).hex()
        shown = self._ask(f"SELECT HEX(CONVERT(CONVERT(x'{joined}' USING {name}) USING utf8mb4))")
        texts = bytes.fromhex(shown).decode().split("\n")
        table = {
            each: text
            for each, text in zip(sequences, texts, strict=True)
            if len(text) == 1 and (text != "?" or each == b"?")
        }
        table[_END] = "\n"
        if width > 1:
            return partial(_by_table, name, table, width)
        every = "".join(table.get(bytes((byte,)), _UNDEFINED) for byte in range(256))
        return partial(_by_codec, name, lambda raw: codecs.charmap_decode(raw, "strict", every)[0])


def _sequences(width: int) -> Iterator[bytes]:
    """Yield what may stand for a character: of one byte, or longer ones."""
    for first in range(256):
        if first != _END[0]:
            yield bytes((first,))
    if width > 1:
        for first in range(0x80, 256):
            for second in range(0x30, 256):
                yield bytes((first, second))
    if width > 2:  # the third plane of EUC
        for second in range(0xA1, 0xFF):
            for third in range(0xA1, 0xFF):
                yield bytes((0x8F, second, third))


def _by_codec(name: str, decode: Decode, raw: bytes) -> str:
    try:
        text = decode(raw)
    except UnicodeDecodeError:
        raise _no_text(name, raw) from None
    if name == "ucs2" and len(text) * 2 != len(raw):  # it has no pairs of surrogates
        raise _no_text(name, raw)
    return text


def _by_table(name: str, table: Mapping[bytes, str], width: int, raw: bytes) -> str:
    found = []
    at = 0
    while at < len(raw):
        for end in range(at + 1, at + width + 1):
            text = table.get(raw[at:end])
            if text is not None:
                found.append(text)
                at = end
                break
        else:
            raise _no_text(name, raw)
    return "".join(found)


def _no_text(name: str, raw: bytes) -> ValueError:
    return ValueError(f"its bytes {raw[:20].hex(' ')} are no text in {name}")
