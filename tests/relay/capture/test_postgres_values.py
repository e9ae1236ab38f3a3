"""Values of every type, compared with what the database itself returns."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import closing
from typing import Any

import msgspec
import psycopg
import pytest

from tests.kit.database_servers import PostgresServer
from tests.kit.until import unique
from tests.relay.capture.deliveries import read, read_until, rows_as_records
from tests.relay.capture.pg_world import PgWorld, captured, take
from txbroker.databases.database import DatabaseUnavailable
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.postgres import PostgresSource

LIKE_SELECT = (
    "SET timezone = 'UTC'",
    "SET datestyle = 'ISO'",
    "SET intervalstyle = 'iso_8601'",
    "SET search_path = ''",
    "SET lc_monetary = 'C'",
    "SET bytea_output = 'hex'",
    "SET quote_all_identifiers = off",
    "SET extra_float_digits = 3",
)


def _float(text: str) -> Any:
    number = float(text)
    return text if text in ("NaN", "Infinity", "-Infinity") else number


TEXT = ("format('%%s', {})", str)
JSON = ("to_json({})::text", msgspec.json.decode)
"""How to ask the database for a value, and how to read its answer."""
SIMPLE = ("{}::text", str)
ASKED: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    **dict.fromkeys(("smallint", "integer", "bigint", "oid"), ("{}::text", int)),
    **dict.fromkeys(("real", "float8"), ("{}::text", _float)),
    "boolean": JSON,
    "money": ("{}::numeric::text", str),
    "bytea": ("encode({}, 'hex')", lambda text: base64.b64encode(bytes.fromhex(text)).decode()),
    **dict.fromkeys(("json", "jsonb"), ("{}::text", msgspec.json.decode)),
    **dict.fromkeys(("timestamp", "timestamptz"), JSON),
    "timetz": ("{}::text || ':00'", str),
}
"""Types that are not text as the database writes it."""
VALUES: Mapping[str, list[str]] = {
    "smallint": ["0", "-32768", "32767"],
    "integer": ["0", "-2147483648", "2147483647"],
    "bigint": ["0", "-9223372036854775808", "9223372036854775807"],
    "oid": ["0", "4294967295"],
    "real": ["0", "-0", "1.1", "3.4028235e38", "1e-45", "NaN", "Infinity", "-Infinity"],
    "float8": ["0", "0.1", "1.7976931348623157e308", "5e-324", "NaN", "Infinity", "-Infinity"],
    "numeric": ["0", "1.10", "-0.000", "NaN", "Infinity", "1e1000", "1e-1000"],
    "numeric(10,2)": ["0", "99999999.99"],
    "money": ["0", "-0.05", "1234.56", "92233720368547758.07", "-92233720368547758.08"],
    "boolean": ["t", "f"],
    "text": ["", " ", "schön 🥾", "tab\tline\nquote\"'\\", "x" * 3000],
    "varchar(5)": ["", "ab"],
    "char(5)": ["", "ab"],
    '"char"': ["", "a"],
    "name": ["", "n" * 63],
    "bytea": ["", "\\x00", "\\x00ff7f"],
    "bit(3)": ["000", "101"],
    "varbit": ["", "1"],
    "json": ["{}", ' {"a" : 1, "a": 2}', "null", "1e300", '"\\u0000"', "[]"],
    "jsonb": ["{}", '{"a": [1, null, 12345678901234567890.5]}', "null"],
    "xml": ["", "<a/>", '<?xml version="1.0" encoding="LATIN1"?><a>x</a>'],
    "date": ["2026-11-27", "0044-03-15 BC", "infinity", "-infinity", "99999-01-01"],
    "time": ["00:00", "24:00", "23:59:59.999999"],
    "timetz": ["00:00+00", "12:00-08", "24:00:00+15"],
    "timestamp": ["2026-11-27 00:57:50.5", "0044-03-15 01:02:03 BC", "infinity", "99999-01-01"],
    "timestamptz": ["2026-11-27 00:57:50+05:30", "0044-03-15 BC", "-infinity", "1890-01-01"],
    "interval": ["0", "1 day 02:03:04", "-1 year 3 days", "178000000 years", "1 microsecond ago"],
    "uuid": ["00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "inet": ["0.0.0.0", "10.1.2.3/8", "::ffff:1.2.3.4", "::1/64"],
    "cidr": ["10.0.0.0/8", "::/0"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "point": ["(1.5,-0)"],
    "box": ["(1,1),(0,0)"],
    "path": ["((0,0),(1,1))"],
    "tsvector": ["", "a:1 b:2"],
    "pg_lsn": ["0/0", "FFFFFFFF/FFFFFFFF"],
    "regclass": ["pg_class", "public.orders"],
    "int[]": ["{}", "{1,NULL,3}", "[0:1]={1,2}", "{{1},{2}}"],
    "text[]": ["{}", '{"",NULL,"NULL","a,b","\\"q\\\\"}'],
    "timestamptz[]": ['{"2026-11-27 00:57:50+05",infinity}'],
    "interval[]": ["{1 day}"],
    "bytea[]": ['{"\\\\x00ff"}'],
    "money[]": ["{1234.56,NULL}"],
    "int4range": ["empty", "[1,5)", "(,)"],
    "tstzrange": ['["2026-01-01 00:00+05",infinity)'],
    "datemultirange": ["{}", "{[2026-01-01,2026-02-01)}"],
    "public.mood": ["", "it's ok"],
    "public.small": ["1", "5"],
    "public.pair": ["(,)", '(1,"a b")'],
}


async def test_values_of_every_type_are_those_of_the_database(pg: PgWorld) -> None:
    pg.execute(
        "CREATE TYPE mood AS ENUM ('', 'it''s ok')",
        "CREATE DOMAIN small AS int CHECK (value < 10)",
        "CREATE TYPE pair AS (a int, b text)",
        f"CREATE TABLE typed (id int PRIMARY KEY, "
        f"{', '.join(f'c{n} {each}' for n, each in enumerate(VALUES))})",
        "ALTER TABLE typed REPLICA IDENTITY FULL",
    )
    ((name,),) = pg.execute("SELECT current_database()")
    pg.admin(
        f"ALTER DATABASE {name} SET timezone = 'Asia/Tokyo'",
        f"ALTER DATABASE {name} SET datestyle = 'German'",
        f"ALTER DATABASE {name} SET bytea_output = 'escape'",
        f"ALTER DATABASE {name} SET intervalstyle = 'sql_standard'",
        f"ALTER DATABASE {name} SET extra_float_digits = 0",
        f"ALTER DATABASE {name} SET quote_all_identifiers = on",
    )
    pg.mapping.tables = (captured("typed", before=True),)
    source = await pg.started()
    count = max(map(len, VALUES.values()))
    with closing(psycopg.connect(pg.url)) as connection:
        for statement in LIKE_SELECT:
            connection.execute(statement)
        for row in range(count):
            given = [values[row] if row < len(values) else None for values in VALUES.values()]
            marks = ", ".join(f"CAST(%s AS {each})" for each in VALUES)
            connection.execute(f"INSERT INTO public.typed VALUES ({row}, {marks})", given)
        questions = ", ".join(
            f"CASE WHEN num_nulls(c{n}) = 0 THEN {ASKED.get(each, TEXT)[0].format(f'c{n}')} END"
            for n, each in enumerate(VALUES)
        )
        rows = connection.execute(
            f"SELECT {questions} FROM public.typed ORDER BY id", ()
        ).fetchall()
        connection.commit()
        read_now = rows_as_records(f'name = "{pg.mapping.name}"\ndatabase = "{pg.url}"', "typed")
        connection.execute("DELETE FROM public.typed")
        connection.commit()
    got = (await read_until(source, 2 * count)).values
    for number, texts in enumerate(rows):
        expected = {
            f"c{n}": None if text is None else ASKED.get(each, TEXT)[1](text)
            for (n, each), text in zip(enumerate(VALUES), texts, strict=True)
        }
        assert got[number]["after"] == {"id": number, **expected}
        assert got[count + number]["before"] == got[number]["after"]
    # As the audit of a capture reads them.
    assert read_now == [got[number]["after"] for number in range(count)]


@pytest.fixture
async def latin(postgres_server: PostgresServer) -> AsyncIterator[Callable[[str], PgWorld]]:
    """Worlds of databases with another encoding."""
    worlds = []

    def create(encoding: str) -> PgWorld:
        name = unique(f"in_{encoding.lower()}").replace("-", "_")
        with closing(psycopg.connect(postgres_server.admin_url, autocommit=True)) as admin:
            admin.execute(
                f"CREATE DATABASE {name} OWNER txbroker TEMPLATE template0 "
                f"ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
            )
        worlds.append(PgWorld(postgres_server, postgres_server.url(name)))
        return worlds[-1]

    yield create
    for world in worlds:
        await world.close()


async def test_text_of_other_encodings(latin: Callable[[str], PgWorld]) -> None:
    pg = latin("LATIN1")
    source = await pg.started()
    text = "".join(map(chr, (*range(1, 128), *range(160, 256))))
    with closing(psycopg.connect(pg.url, autocommit=True)) as connection:
        connection.execute("INSERT INTO orders VALUES (1, %s)", (text,))
    assert (await take(source))[0]["after"]["item"] == text


async def read_undelivered(source: PostgresSource) -> None:
    """Read until the stream ends."""
    while True:
        await read(source, deliver=False)


async def test_text_without_an_equivalent_stops_it(latin: Callable[[str], PgWorld]) -> None:
    pg = latin("EUC_JP")
    source = await pg.started()
    pg.execute(
        "INSERT INTO orders VALUES (1, convert_from('\\xb4c1', 'EUC_JP'))",
        "INSERT INTO orders VALUES (2, convert_from('\\xfefe', 'EUC_JP'))",
        "INSERT INTO orders VALUES (3, 'c')",
    )
    with pytest.raises(DatabaseUnavailable, match="no equivalent"):
        await read_undelivered(source)
    await source.resume(None)
    first = await read(source)
    assert first.values[0]["after"]["item"] == "漢"
    with pytest.raises(ConfigurationError, match=r"cannot send as UTF-8.*--on-gap skip") as error:
        await read(source)
    await source.close()
    statement = str(error.value).partition("transaction out, ")[2].partition(", then")[0]
    pg.execute(statement)
    skipping = await pg.source(first.position, on_gap="skip")
    assert (await take(skipping))[0]["after"]["item"] == "c"
