"""The samples of `docs/how-to/databases.md` run as they stand, on a real PostgreSQL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.databases.places import Place, django_alias
from tests.kit.until import unique
from txbroker.core.records import Decision

PAGE = Path(__file__).parents[2] / "docs/how-to/databases.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.full
async def test_the_page_runs(postgres_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import connections

    code = "\n".join(BLOCK.findall(PAGE.read_text()))
    rest = postgres_place.url.partition("://")[2]
    names: dict[str, Any] = {}
    exec(compile(code.replace("shop@db/shop", rest), str(PAGE), "exec"), names)
    alias = django_alias(postgres_place)
    monkeypatch.setitem(connections.settings, "default", connections.settings[alias])
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    id = unique("page")

    names["place_order"](f"{id}-0", f"{id}-0")
    names["place_with_session"](f"{id}-1", f"{id}-1")
    await names["place_with_asyncpg"](f"{id}-2", f"{id}-2")
    names["place_with_django"](f"{id}-3", f"{id}-3")
    connections["default"].close()
    placed = [row[0] for row in postgres_place.select("SELECT id FROM orders ORDER BY id")]
    assert [each for each in placed if each.startswith(id)] == [f"{id}-{n}" for n in range(4)]
    assert {names["barrier"].check(f"{id}-{n}") for n in range(4)} == {Decision.COMMIT}

    postgres_place.execute("CREATE TABLE stock (booked integer)")
    postgres_place.execute("INSERT INTO stock VALUES (0)")
    for offset in (7, 7, 8):
        names["book"](id, 0, offset, [])
    assert postgres_place.select("SELECT booked FROM stock") == [(2,)]
    names["clean"]()
