"""Consumers in all modes on a real Kafka, under load, while everything breaks; then the judge.

Run as `python -m tests.faults.consuming.soak`. Every kind of fault strikes each case `--times`
times; `--real` takes a session of 60 s, a lease of 30 s, and stops of 40 and 90 s. Prints one line
a case, and each violation; exit code 1 if there is one. A run adds lines to `--results`.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from tests.faults.consuming.exact_fleet import ExactFleet, Servers
from tests.faults.consuming.fleet import Case, Fleet, Timing
from tests.faults.consuming.nemesis import STOPS_S, Broken, Damage, Nemesis
from tests.kit.database_servers import DatabaseServer, MariaServer, PostgresServer
from txbroker.embedded import EmbeddedKafka

CASES = (
    Case("key", "aside"),
    Case("none", "retry"),
    Case("key", "skip", static=True),
    Case("partition", "wait"),
    Case("key", None),
    Case("partition", "aside"),
    Case("key", "wait"),
    Case("none", "skip", static=True),
    Case("key", "aside", store="sqlite"),
    Case("partition", "wait", store="sqlite", batch=20),
    Case("key", "aside", store="postgresql", later=2, coroutine=True),
    Case("none", "retry", store="postgresql"),
    Case("partition", "wait", store="postgresql", coroutine=True),
    Case("key", "skip", store="mariadb", batch=20),
    Case("none", "retry", store="mariadb", later=1),
    Case("key", "aside", store="mariadb"),
    Case("key", "aside", store="kafka"),
    Case("key", "aside", store="kafka", later=1),
    Case("none", "retry", store="kafka", later=2),
)
CONNECTIONS = 400
"""Two cases at once, and what killed consumers leave, take more than the servers' defaults."""
_RATES = {"sqlite": 0.4}
"""Of messages, relative to others: an SQLite file has one writer at a time."""
AT_ONCE = 2
REAL = Timing(60.0, 30.0, 3.0)
REAL_STOPS_S = (40.0, 90.0)
SHOWN = 20


@dataclass
class Result:
    """The results of a case."""

    case: str
    seed: int
    at: str = ""
    real: bool = False
    seconds: float = 0.0
    messages: int = 0
    calls: int = 0
    copies: int = 0
    late: int = 0
    """Effects after a takeover, of a process that was stopped; its token is refused."""
    faults: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


async def run_case(fleet: Fleet, nemesis: Nemesis, kinds: list[str], seed: int) -> Result:
    """Run one case with these faults, and judge it."""
    began = time.monotonic()
    result = Result(fleet.case.name, seed, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    await fleet.start()
    try:
        await nemesis.run(kinds)
        await fleet.settle()
    finally:
        await fleet.close()
    history, topics, violations = await fleet.judged()
    result.seconds = round(time.monotonic() - began)
    result.messages, result.calls = len(topics.source), len(history.tries)
    result.copies = len(topics.retry) + len(topics.dead) + len(topics.aside)
    result.faults = dict(nemesis.counts)
    result.violations = [str(violation) for violation in violations]
    result.wrong = fleet.wrong
    return result


def shuffled(nemesis: Nemesis, case: Case, seed: int, times: int) -> list[str]:
    """Return all kinds of faults, each as often, in random order."""
    kinds = nemesis.kinds() * times
    random.Random(f"{seed}/{case.name}" if case.store else seed).shuffle(kinds)
    return kinds


class Brokers:
    """Restarts the Kafka of several cases: only once at a time."""

    def __init__(self, kafka: EmbeddedKafka, fate: random.Random) -> None:
        self._kafka = kafka
        self._fate = fate
        self._lock = asyncio.Lock()
        self.fleets: list[Fleet] = []

    async def restart(self) -> None:
        """Kill the broker or stop it, and start it again."""
        async with self._lock:
            begin = time.monotonic()
            how = self._kafka.kill if self._fate.random() < 0.5 else self._kafka.stop
            await asyncio.to_thread(how)
            await asyncio.to_thread(self._kafka.start)
            for fleet in self.fleets:  # the others see it, too
                fleet.note("brokers restarted", "", begin, time.monotonic() + 6)


class Databases:
    """The servers of several cases; each is broken by one case at a time."""

    def __init__(self, servers: Servers, fate: random.Random) -> None:
        self.servers = servers
        self._fate = fate
        self._lock = asyncio.Lock()

    def damage(self, case: Case) -> Damage | None:
        """Return what breaks the server of a case."""
        server = self.servers.of(case)
        return partial(self._damage, server) if server is not None else None

    async def _damage(self, server: DatabaseServer, kind: str) -> None:
        async with self._lock:
            if kind == "database paused":
                await asyncio.to_thread(server.pause)
                await asyncio.sleep(self._fate.choice(STOPS_S))
                await asyncio.to_thread(server.resume)
                return
            await asyncio.to_thread(server.kill if kind == "database killed" else server.stop)
            await asyncio.sleep(self._fate.choice((0.0, 3.0)))
            await asyncio.to_thread(server.start)


@contextlib.contextmanager
def servers_for(cases: Sequence[Case]) -> Iterator[Servers]:
    """Run the servers that cases need."""
    stores = {case.store for case in cases}
    with contextlib.ExitStack() as stack:
        yield Servers(
            stack.enter_context(PostgresServer(max_connections=CONNECTIONS))
            if "postgresql" in stores
            else None,
            stack.enter_context(MariaServer(max_connections=CONNECTIONS))
            if "mariadb" in stores
            else None,
        )


async def soak(
    kafka: EmbeddedKafka, servers: Servers, given: argparse.Namespace, folder: Path
) -> list[Result]:
    """Run all chosen cases, several at once."""
    brokers = Brokers(kafka, random.Random(given.seed))
    databases = Databases(servers, random.Random(given.seed))
    room = asyncio.Semaphore(given.at_once)

    async def one(case: Case) -> Result:
        async with room:
            fleet = fleet_of(kafka.bootstrap, case, folder, servers, given)
            brokers.fleets.append(fleet)
            stops_s = STOPS_S
            if given.real:
                fleet.timing, stops_s = REAL, REAL_STOPS_S
            restart: Broken | None = brokers.restart if not given.real else None
            nemesis = Nemesis(fleet, restart, stops_s, databases.damage(case))
            kinds = shuffled(nemesis, case, given.seed, given.times)
            if given.faults:
                kinds = [kind for kind in kinds if any(word in kind for word in given.faults)]
            result = await run_case(fleet, nemesis, kinds, given.seed)
            brokers.fleets.remove(fleet)
            result.real = given.real
            show(result)
            with given.results.open("a") as file:
                counts = {"violations": len(result.violations), "wrong": len(result.wrong)}
                file.write(json.dumps({**asdict(result), **counts}) + "\n")
            return result

    return await asyncio.gather(*(one(case) for case in chosen(given)))


def chosen(given: argparse.Namespace) -> list[Case]:
    """Return the cases to run: by name, or all of a store."""
    return [
        case
        for case in CASES
        if not given.only or {case.name, case.store or "at-least-once"} & set(given.only)
    ]


def fleet_of(
    bootstrap: str, case: Case, folder: Path, servers: Servers, given: argparse.Namespace
) -> Fleet:
    """Return the fleet of a case."""
    rate = given.rate * _RATES.get(case.store, 1.0)
    if not case.store:
        return Fleet(bootstrap, case, folder / case.name, given.seed, rate=rate)
    server = servers.of(case)
    return ExactFleet(bootstrap, case, folder / case.name, given.seed, server, rate=rate)


def show(result: Result) -> None:
    """Print a case."""
    faults = sum(count for kind, count in result.faults.items() if kind != "moment not reached")
    print(
        f"{result.case}: {result.messages} messages, {result.calls} calls, {result.copies} copies, "
        f"{faults} faults in {result.seconds:.0f} s, {len(result.violations)} violations",
        flush=True,
    )
    print(f"    {dict(sorted(result.faults.items()))}", flush=True)
    for line in (*result.violations[:SHOWN], *result.wrong[:SHOWN]):
        print(f"    BROKEN: {line}", flush=True)


def main() -> int:
    """Run the cases; return 1 if something is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=2, help="of each kind of fault")
    parser.add_argument("--rate", type=float, default=150.0, help="messages a second")
    parser.add_argument("--at-once", type=int, default=AT_ONCE)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--only", nargs="+", help="names of cases, or of stores")
    parser.add_argument("--faults", nargs="+", help="only kinds that hold one of these words")
    parser.add_argument("--folder", type=Path, help="keeps histories and logs")
    parser.add_argument("--results", type=Path, default=Path("consumer-faults.jsonl"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        with (
            servers_for(chosen(given)) as servers,
            EmbeddedKafka(Path(scratch) / "kafka") as kafka,
        ):
            results = asyncio.run(soak(kafka, servers, given, folder))
    faults = sum((Counter(result.faults) for result in results), Counter[str]())
    broken = sum(len(result.violations) + len(result.wrong) for result in results)
    missed = faults.pop("moment not reached", 0)
    print(
        f"{sum(result.messages for result in results)} messages, {faults.total()} faults of "
        f"{len(faults)} kinds ({missed} moments not reached), {broken} broken"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
