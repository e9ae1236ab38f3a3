"""What an accepted message costs while the inbox grows: with 1,000,000 rows, relative to 1,000.

Rounds on both tables alternate, each in a separate database of one server. A transaction accepts
one id that is new. Ids are random, or rise with the offset, as those of a consumed topic do.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.consumers.places import Place, places
from benchmarks.consumers.rounds import Bound
from txbroker.databases.inbox import Inbox
from txbroker.databases.tables import INBOX

FEW, MANY = 1_000, 1_000_000
AIM = 1.2
_CALLS = 200
_CHUNK = 10_000

Ids = Callable[[int], str]
"""Returns the id with a number."""


def random_id(_number: int) -> str:
    return uuid.uuid4().hex


def offset_id(number: int) -> str:
    return f"orders/{number % 8}/{number // 8:012d}"


KINDS: dict[str, Ids] = {"random": random_id, "by offset": offset_id}


def bounds(rounds: int) -> Iterator[Bound]:
    """Measure each database."""
    names = ("sqlite", "postgresql", "mariadb")
    for kind, ids in KINDS.items():
        with (
            tempfile.TemporaryDirectory() as few,
            tempfile.TemporaryDirectory() as many,
            places(names, Path(few)) as small,
            places(names, Path(many)) as large,
        ):
            for pair in zip(small, large, strict=True):
                yield growth(pair, kind, ids, rounds)


def growth(pair: tuple[Place, Place], kind: str, ids: Ids, rounds: int) -> Bound:
    """Compare a small table and a large one."""
    took: tuple[list[float], list[float]] = ([], [])
    numbers = []
    for place, count in zip(pair, (FEW, MANY), strict=True):
        place.prepare()
        fill(place, ids, count)
        numbers.append(itertools.count(count))
    for number in range(rounds + 1):
        for place, found, counter in zip(pair, took, numbers, strict=True):
            took_s = accept(place, [ids(next(counter)) for _ in range(_CALLS)])
            if number:  # the first round warms up
                found.append(took_s / _CALLS)
    few, many = map(statistics.median, took)
    what = f"inbox on {pair[0].name}, ids {kind}: cost with {MANY:,} rows, times that with {FEW:,}"
    costs = {"few_us": round(few * 1e6), "many_us": round(many * 1e6), "rounds": rounds}
    return Bound(what, AIM, round(many / few, 3), costs)


def fill(place: Place, ids: Ids, count: int) -> None:
    """Store `count` ids."""
    print(f"inbox on {place.name}: {count:,} rows", file=sys.stderr, flush=True)
    sql = f"INSERT INTO {INBOX} (consumer, id, at_s) VALUES ('', {place.mark}, 0)"
    stored = sorted(ids(number) for number in range(count))  # the table is the same, sooner
    with closing(place.connect()) as connection:
        for first in range(0, count, _CHUNK):
            rows = [(each,) for each in stored[first : first + _CHUNK]]
            cursor = connection.cursor()
            cursor.executemany(sql, rows)
            cursor.close()
            connection.commit()


def accept(place: Place, ids: list[str]) -> float:
    """Accept new ids, each in a transaction; return the seconds."""
    inbox = Inbox(place.database)
    connection: Any
    with closing(place.connect()) as connection:
        begun = time.perf_counter()
        for each in ids:
            if place.name == "sqlite":
                connection.execute("BEGIN IMMEDIATE")
            if not inbox.accept(connection, each):
                raise SystemExit(f"{place.name}: {each} was accepted before")
            connection.commit()
        return time.perf_counter() - begun
