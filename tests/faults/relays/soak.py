"""Relays on all databases under load, while everything breaks; then the judge.

Run as `python -m tests.faults.relays.soak`. Every kind of fault strikes each case `--times` times.
Prints one line a case, and each violation; exit code 1 if there is one. A run adds lines to
`--results`; `--table` writes the page of all lines instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults.relays.fleet import Case, Fleet, run_case
from tests.kit.database_servers import DatabaseServer, MariaServer, PostgresServer
from tests.relay.capture.maria_world import BINLOG
from txbroker.embedded import EmbeddedKafka

CASES = (
    *(Case(database) for database in ("sqlite", "postgresql", "mariadb")),
    *(Case(database, 2, 4) for database in ("sqlite", "postgresql", "mariadb")),
    *(Case(database, captured=True) for database in ("postgresql", "mariadb")),
)
SHOWN = 20
ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs/reference/relay-fault-runs.jsonl"
PAGE = ROOT / "docs/reference/relay-fault-runs.md"
HEAD = """# Fault runs of relays
What runs of `python -m tests.faults.relays.soak` came to: relays as processes on real databases
and a real Kafka, under load, while they, the database and Kafka break, the server's data are put
back to an earlier moment, tables change unseen, and strangers write positions. Then all is
delivered, and the independent judge (`tests/faults/relays/judge.py`) compares rows with records.
After each fault everything that was committed must become visible before the next one.

Made by `python -m tests.faults.relays.soak --table` from `relay-fault-runs.jsonl`.
"""


def show(result: Mapping[str, Any]) -> None:
    """Print a case."""
    print(
        f"{result['case']}: {result['rows']} rows, {sum(result['faults'].values())} faults in "
        f"{result['seconds']} s, {len(result['wrong'])} wrong",
        flush=True,
    )
    for line in result["wrong"][:SHOWN]:
        print(f"    BROKEN: {line}", flush=True)


@contextlib.contextmanager
def servers_for(cases: Sequence[Case]) -> Iterator[dict[str, DatabaseServer]]:
    """Run the servers that cases need."""
    kinds: dict[str, Callable[[], DatabaseServer]] = {
        # A capture that is stopped has the slot until then.
        "postgresql": lambda: PostgresServer(wal_level="logical", wal_sender_timeout="5s"),
        "mariadb": lambda: MariaServer(**BINLOG),
    }
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(kind())
            for name, kind in kinds.items()
            if name in {case.database for case in cases}
        }


async def soak(
    kafka: EmbeddedKafka,
    servers: Mapping[str, DatabaseServer],
    cases: Sequence[Case],
    given: argparse.Namespace,
    folder: Path,
) -> list[dict[str, Any]]:
    """Run cases one after the other."""
    results = []
    for case in cases:
        server, place = servers.get(case.database), folder / case.name
        place.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{place}/shop.db" if server is None else server.create_database()
        fleet = Fleet(
            kafka.bootstrap,
            case,
            url,
            place,
            given.seed,
            server=server,
            kafka_pid=kafka.pid or 0,
            rate=given.rate,
        )
        kinds = [
            kind
            for kind in fleet.kinds() * given.times
            if not given.faults or any(word in kind for word in given.faults)
        ]
        random.Random(f"{given.seed}/{case.name}").shuffle(kinds)
        began = time.monotonic()
        rows, wrong = await run_case(fleet, kinds)
        result = {
            "case": case.name,
            "seed": given.seed,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(time.monotonic() - began),
            "rows": rows,
            "faults": dict(Counter(kinds)),
            "wrong": wrong,
        }
        show(result)
        with given.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        results.append(result)
    return results


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of runs."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    wrong: Counter[str] = Counter()
    for result in results:
        for kind, count in result["faults"].items():
            counts[kind][result["case"]] += count
            wrong[kind] += len(result["wrong"])
    cases = sorted({result["case"] for result in results})
    total = sum(count for each in counts.values() for count in each.values())
    text = [
        HEAD,
        f"Together: {sum(each['rows'] for each in results):,} rows in {len(results)} runs, "
        f"{total} faults of {len(counts)} kinds, "
        f"{sum(len(each['wrong']) for each in results)} violations.\n",
        f"| fault | {' | '.join(cases)} | violations in these runs |",
        f"| --- |{' --: |' * (len(cases) + 1)}",
    ]
    for kind in sorted(counts):
        numbers = " | ".join(str(counts[kind][case]) for case in cases)
        text.append(f"| {kind} | {numbers} | {wrong[kind]} |")
    return "\n".join(text) + "\n"


def main() -> int:
    """Run the cases; return 1 if something is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=1, help="of each kind of fault")
    parser.add_argument("--rate", type=float, default=60.0, help="transactions a second")
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--faults", nargs="+", help="only kinds that hold one of these words")
    parser.add_argument("--folder", type=Path, help="keeps databases and logs")
    parser.add_argument("--results", type=Path, default=Path("relay-faults.jsonl"))
    parser.add_argument("--table", action="store_true", help="write the page of all runs")
    given = parser.parse_args()
    if given.table:
        PAGE.write_text(page([json.loads(line) for line in RESULTS.open()]))
        return 0
    cases = [case for case in CASES if not given.only or case.name in given.only]
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        with servers_for(cases) as servers, EmbeddedKafka(Path(scratch) / "kafka") as kafka:
            results = asyncio.run(soak(kafka, servers, cases, given, folder))
    return 1 if any(result["wrong"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
