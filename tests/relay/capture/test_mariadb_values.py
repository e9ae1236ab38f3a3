"""Values of MariaDB's binary log: each is what the database itself returns."""

from __future__ import annotations

import base64
import ipaddress
import random
import struct
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.relay.capture.deliveries import read_until, rows_as_records
from tests.relay.capture.maria_world import MariaWorld
from txbroker.errors import ConfigurationError

pytestmark = pytest.mark.full
DRAWN = 12
"""Random values of a type beside its extremes."""


# --- types -----------------------------------------------------------------------------------

_random = random.Random(51)


def _drawn(draw: Callable[[], Any]) -> list[str]:
    return [f"'{draw()}'" for _ in range(DRAWN)]


def _whole(bits: int) -> list[str]:
    least, most = -(1 << bits - 1), (1 << bits - 1) - 1
    return ["0", "-1", str(least), str(most), *_drawn(lambda: _random.randint(least, most))]


def _natural(bits: int) -> list[str]:
    most = (1 << bits) - 1
    return ["0", str(most), *_drawn(lambda: _random.randint(0, most))]


def _decimal(whole: int, fraction: int) -> list[str]:
    def draw() -> str:
        sign = _random.choice(("", "-"))
        digits = "".join(_random.choices("0123456789", k=_random.randint(1, whole) if whole else 1))
        part = "".join(_random.choices("0123456789", k=fraction))
        return f"{sign}{digits if whole else 0}.{part}"

    extreme = f"{'9' * whole or 0}.{'9' * fraction or 0}"
    return ["0", "-0.0", "1", f"'{extreme}'", f"'-{extreme}'", "'-0.01'", *_drawn(draw)]


def _moments(fraction: int) -> list[str]:
    def draw() -> str:
        moment = datetime(1970, 1, 2) + timedelta(microseconds=_random.randrange(2 * 10**15))
        return moment.isoformat(" ")

    return [
        "'0000-00-00'",
        "'1970-01-01 00:00:01'",
        "'2038-01-19 03:14:07'",
        f"'2038-01-19 03:14:07.{'9' * fraction}'",
        *_drawn(draw),
    ]


def _times(fraction: int) -> list[str]:
    def draw() -> str:
        seconds = _random.randrange(-3_000_000, 3_000_000)
        sign, seconds = "-" if seconds < 0 else "", abs(seconds)
        clock = f"{seconds // 3600}:{seconds // 60 % 60}:{seconds % 60}"
        return f"{sign}{clock}.{_random.randrange(10**6):06d}"

    return [
        "'00:00:00'",
        f"'838:59:59.{'9' * fraction}'",
        f"'-838:59:59.{'9' * fraction}'",
        "'-00:00:00.000001'",
        "'-00:00:01'",
        "'-00:59:59.25'",
        *_drawn(draw),
    ]


def _bytes(length: int) -> list[str]:
    return ["''", "x'00'", "'a'", f"x'{'ff' * length}'", f"x'{'0041' * (length // 2)}'"]


def _addresses() -> list[str]:
    def draw() -> Any:
        words = [_random.choice((0, 0, 1, 0xFFFF)) for _ in range(8)]
        return ipaddress.IPv6Address(struct.pack(">8H", *words))

    given = ("::", "::1", "::1.2.3.4", "::ffff:1.2.3.4", "1:0:2:3:4:5:6:7", "fe80::")
    return [*(f"'{each}'" for each in given), *_drawn(draw), *_drawn(draw)]


_DATES = ("'0000-00-00'", "'2026-02-00'", "'2026-00-00'", "'0000-02-03'", "'2026-02-31'")
_DAYS = ("'0001-01-01'", "'1000-01-01'", "'9999-12-31'")
_CLOCKS = (
    "'0000-00-00 10:11:12'",
    "'2026-02-00 23:59:59.999999'",
    "'9999-12-31 23:59:59.999999'",
    "'2026-01-02 03:04:05.678901'",
    "'2026-01-02'",
)
_JSON = """'{"a": [1, "é\\\\u20ac", null]}'"""

TYPES: Sequence[tuple[str, Sequence[str]]] = (
    *((f"{name}int", _whole(bits)) for name, bits in (("tiny", 8), ("small", 16), ("medium", 24))),
    *((f"{name}int", _whole(bits)) for name, bits in (("", 32), ("big", 64))),
    *(
        (f"{name}int unsigned", _natural(bits))
        for name, bits in (("tiny", 8), ("small", 16), ("medium", 24), ("", 32), ("big", 64))
    ),
    ("int(5) zerofill", ("0", "42", "123456")),
    ("boolean", ("true", "false")),
    *(
        (f"decimal({whole + part}, {part})", _decimal(whole, part))
        for whole, part in ((15, 5), (0, 5), (35, 30), (65, 0), (9, 9), (10, 10), (1, 0), (27, 38))
    ),
    (
        "float",
        (
            "0",
            "-0.0",
            "0.1",
            "16777216",
            "3.402823466e38",
            "-3.402823466e38",
            "1.17549435e-38",
            "1.4e-45",
            *_drawn(lambda: _random.uniform(-1e6, 1e6)),
        ),
    ),
    (
        "double",
        (
            "0",
            "-0.0",
            "1.1",
            "1.7976931348623157e308",
            "-1.7976931348623157e308",
            "2.2250738585072014e-308",
            "4.9e-324",
            *_drawn(lambda: _random.uniform(-1e300, 1e300)),
        ),
    ),
    *((f"bit({n})", ("0", "1", f"{(1 << n) - 1}", f"{1 << n - 1}")) for n in (1, 8, 10, 64)),
    ("year", ("0", "1901", "2026", "2155")),
    ("date", (*_DATES, *_DAYS)),
    *((f"datetime({n})", (*_DATES, *_DAYS, *_CLOCKS)) for n in range(7)),
    *((f"timestamp({n}) null", _moments(n)) for n in range(7)),
    *((f"time({n})", _times(n)) for n in range(7)),
    ("char(5)", ("''", "'ab'", "'ab  '", "'é€'")),
    ("varchar(300)", ("''", "'  '", "'hé€😀'", "REPEAT('x', 300)", "'a\\0b'")),
    ("varchar(20) collate utf8mb4_uca1400_ai_ci", ("'é'",)),
    ("tinytext", ("''", "'é'")),
    ("longtext", ("''", "'é'", "REPEAT('é', 70000)")),
    ("json", ("'{}'", "'null'", "'\"\"'", _JSON)),
    ("binary(6)", _bytes(6)),
    ("binary(16)", _bytes(16)),
    ("varbinary(6)", _bytes(6)),
    ("varbinary(300)", _bytes(300)),
    *((f"{name}blob", _bytes(20)) for name in ("tiny", "", "medium", "long")),
    ("enum('', 'x', 'é')", ("''", "'x'", "'é'", "'none'")),
    (f"enum({', '.join(repr(f'n{n}') for n in range(300))})", ("'n0'", "'n299'", "'none'")),
    ("enum('x', '') character set latin1", ("'x'", "''")),
    ("set('a', 'é', 'c')", ("''", "'c,a'", "'é'", "'none'")),
    (f"set({', '.join(repr(f'n{n}') for n in range(64))})", ("'n63,n0'", "''")),
    ("inet6", _addresses()),
    ("inet4", ("'0.0.0.0'", "'1.2.3.0'", "'255.255.255.255'")),
    (
        "uuid",
        (
            "'00000000-0000-0000-0000-000000000000'",
            *(f"'123e4567-e89b-{version}2d3-a456-426614174000'" for version in (1, 4, 7)),
            "'ffffffff-ffff-ffff-ffff-ffffffffffff'",
        ),
    ),
    ("point", ("POINT(1, 2)", "ST_GeomFromText('POINT(0 0)', 4326)")),
    ("geometrycollection", ("ST_GeomFromText('GEOMETRYCOLLECTION EMPTY')",)),
    ("int as (id + 1) virtual", ("DEFAULT",)),
    ("int as (id + 1) stored", ("DEFAULT",)),
    ("int invisible default 7", ("DEFAULT", "NULL")),
)
_BINARY = ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob")
_SPATIAL = ("point", "geometrycollection")
_CALENDAR = ("date", "datetime", "timestamp", "time")


def _shown(name: str, kind: str) -> str:
    """Return SQL of the text that stands for a value."""
    if kind in (*_BINARY, *_SPATIAL):
        return f"HEX({name})"
    if kind == "bit":
        return f"BIN({name})"
    # The text of a FLOAT has six digits.
    return f"CAST({name} * 1e0 AS CHAR)" if kind == "float" else f"CAST({name} AS CHAR)"


def _expected(kind: str, length: int, text: str | None) -> Any:
    """Return the value of JSON for what the database shows."""
    if text is None:
        return None
    if kind in (*_BINARY, *_SPATIAL):
        return base64.b64encode(bytes.fromhex(text)).decode()
    if kind == "bit":
        return text.rjust(length, "0")
    if kind == "double":
        return float(text)
    if kind == "float":
        return struct.unpack("<f", struct.pack("<f", float(text)))[0]
    if kind.endswith("int") or kind in ("int", "boolean", "year"):
        return int(text)
    if kind not in _CALENDAR:
        return text
    text, dot, fraction = text.partition(".")
    fraction = fraction.ljust(3 if len(fraction) <= 3 else 6, "0")
    if kind != "time" and not (text + fraction).strip("0-: "):
        return None
    zone = "+00:00" if kind == "timestamp" else ""
    return f"{text.replace(' ', 'T')}{dot}{fraction if dot else ''}{zone}"


async def test_each_value_is_what_the_database_returns(maria: MariaWorld) -> None:
    rows = max(len(values) for _, values in TYPES)
    names = [f"c{number}" for number in range(len(TYPES))]
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in zip(names, TYPES, strict=True))
    maria.execute(
        "DROP TABLE orders",
        f"CREATE TABLE orders (id INT PRIMARY KEY, {columns}) CHARSET utf8mb4",
    )
    source = await maria.started()
    lists = [
        ", ".join(
            [str(row), *(values[row] if row < len(values) else "DEFAULT" for _, values in TYPES)]
        )
        for row in range(rows)
    ]
    mode = "SET sql_mode = 'ALLOW_INVALID_DATES', time_zone = '+00:00'"
    maria.execute(
        mode,
        f"INSERT INTO orders (id, {', '.join(names)}) VALUES ({'), ('.join(lists)})",
        "UPDATE orders SET id = id + 1000 ORDER BY id DESC",
    )
    kinds = [kind.partition(" as ")[0].partition("(")[0].split()[0] for kind, _ in TYPES]
    lengths = [
        int(kind.partition("(")[2].split(")")[0] or 0) if "bit" in kind else 0 for kind, _ in TYPES
    ]
    queried = ", ".join(map(_shown, names, kinds))
    found = maria.execute(mode, f"SELECT {queried} FROM orders ORDER BY id")
    # The update changes the key: a delete and an insert.
    records = (await read_until(source, 3 * rows)).values
    inserted = [each["after"] for each in records[:rows]]
    changed = [each["after"] for each in records[rows:] if each["operation"] == "insert"]
    for row, (texts, one, again) in enumerate(zip(found, inserted, changed[::-1], strict=True)):
        for name, kind, length, (declared, values), text in zip(
            names, kinds, lengths, TYPES, texts, strict=True
        ):
            wanted, got = _expected(kind, length, text), again[name]
            if kind == "float" and got is not None:
                got = struct.unpack("<f", struct.pack("<f", got))[0]
            assert got == wanted, (declared, values[row : row + 1])
            if " as " not in declared:
                assert one[name] == again[name], (declared, values[row : row + 1])
    # As the audit of a capture reads them.
    read_now = rows_as_records(f'name = "shop"\ndatabase = "{maria.url}"', "orders")
    assert read_now == changed[::-1]


# --- character sets --------------------------------------------------------------------------


async def test_text_of_each_character_set_is_what_the_database_returns(maria: MariaWorld) -> None:
    sets = maria.execute(
        "SELECT character_set_name, maxlen FROM information_schema.character_sets "
        "WHERE character_set_name != 'binary'"
    )
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000)]))
    columns = ", ".join(f"{name} LONGTEXT CHARACTER SET {name}" for name, _ in sets)
    maria.execute("DROP TABLE orders", f"CREATE TABLE orders (id INT PRIMARY KEY, {columns})")
    # All bytes that are characters of sets with one byte for each.
    single = {}
    for name, width in sets:
        if width == 1:
            raw = bytes(range(256))
            shown = maria.execute(
                f"SELECT HEX(CONVERT(CONVERT(x'{raw.hex()}' USING {name}) USING utf8mb4))"
            )
            texts = bytes.fromhex(shown[0][0]).decode()
            single[name] = bytes(
                byte
                for byte, text in zip(raw, texts, strict=True)
                if text != "?" or byte == ord("?")
            )
    literals = [f"x'{single.get(name, b'').hex()}'" for name, _ in sets]
    source = await maria.started()
    maria.execute(
        f"SET sql_mode = '', @every = CONVERT(x'{every.encode().hex()}' USING utf8mb4)",
        f"INSERT INTO orders VALUES (1, {', '.join(['@every'] * len(sets))})",
        f"INSERT INTO orders VALUES (2, {', '.join(literals)})",
    )
    queried = ", ".join(f"HEX(CONVERT({name} USING utf8mb4))" for name, _ in sets)
    found = maria.execute(f"SELECT {queried} FROM orders ORDER BY id")
    for row, record in zip(found, (await read_until(source, 2)).values, strict=True):
        for (name, _), shown in zip(sets, row, strict=True):
            assert record["after"][name] == bytes.fromhex(shown).decode(), name


async def test_value_that_cannot_be_shown_is_skipped_alone(maria: MariaWorld) -> None:
    maria.execute(
        "ALTER TABLE orders ADD COLUMN code TEXT CHARACTER SET ascii, "
        "ADD COLUMN far VARCHAR(9) CHARACTER SET hebrew"
    )
    await maria.capture.apply()
    maria.execute(
        "INSERT INTO orders VALUES (1, 'a', '', ''), (2, 'b', x'41ff', x'ff'), (3, 'c', '', '')",
        "DELETE FROM orders WHERE id = 2",
        "INSERT INTO orders VALUES (4, 'd', '', '')",
    )
    gone = r"change (\S+), {} in \S+\.orders \(id = 2\): column code: its bytes 41 ff are no text "
    gone += r"in ascii; column far: .*: change the value or the column; .* run with --skip \1$"
    skip: list[str] = []
    for operation in ("insert", "delete"):
        with pytest.raises(ConfigurationError, match=gone.format(operation)) as caught:
            await read_until(await maria.source(None, skip=skip), 3)
        skip.append(str(caught.value).rpartition(" ")[2])
    source = await maria.source(None, skip=skip)
    taken = await read_until(source, 3)
    assert taken.changes == [("insert", 1, "a"), ("insert", 3, "c"), ("insert", 4, "d")]
    assert source.conversion.left_out == {"skip": 2}
