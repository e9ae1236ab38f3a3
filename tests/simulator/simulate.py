"""Try seeds in a simulation, or one of them again:
`python -m tests.simulator.simulate --room ROOM --seed N`.

Without `--seed`, runs a number of seeds of each room from `--first` on, on all cores. Each
failure is reported with its violations. Exits with 0 if none failed, else with 1.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from tests.simulator.sim_loop import simulated_machine
from tests.simulator.sim_room import Report, Room, run_seed

ROOMS = {"proxies": "Proxies", "consumers": "Consumers", "relays": "Relays"}
"""The modules of the rooms, `sim_ROOM`, each with its class."""
STORY_LINES = 60
_CHUNK = 20


def room_of(name: str) -> type[Room]:
    """Return the room of a name. Only then is it imported: a run of one room needs no other."""
    found: type[Room] = getattr(import_module(f"tests.simulator.sim_{name}"), ROOMS[name])
    return found


def describe(report: Report, lines: int = STORY_LINES) -> str:
    """Return what to know of a run that failed: its seed, its faults, the first violations."""
    faults = ", ".join(report.faults) or "none"
    lines_out = [f"{report.room}: seed {report.seed} failed; its faults: {faults}"]
    for violation in report.violations[:3]:
        lines_out += violation.splitlines()[:lines]
    if len(report.violations) > 3:
        lines_out.append(f"and {len(report.violations) - 3} more violations")
    lines_out.append(f"again, with all events: make simulate ROOM={report.room} SEED={report.seed}")
    return "\n".join(lines_out)


def without_most(room: type[Room], seed: int) -> list[str]:
    """Return the kinds of faults that a seed needs to fail; the others were left out."""
    without: set[str] = set()
    for kind in room.kinds:
        if run_seed(room, seed, without=frozenset({*without, kind})).failed:
            without.add(kind)
    return [kind for kind in room.kinds if kind not in without]


def _run_some(part: tuple[str, range]) -> list[Report]:
    name, seeds = part
    room = room_of(name)
    with simulated_machine():
        return [run_seed(room, seed) for seed in seeds]


@contextmanager
def _reports(name: str, seeds: range, jobs: int) -> Iterator[Iterator[Report]]:
    parts = [(name, seeds[at : at + _CHUNK]) for at in range(0, len(seeds), _CHUNK)]
    if jobs == 1:
        yield (report for part in parts for report in _run_some(part))
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield (report for some in pool.imap(_run_some, parts) for report in some)


def try_many(name: str, seeds: range, jobs: int, failures_max: int) -> int:
    """Try seeds of a room; return how many failed, after at most `failures_max` of them."""
    began_s = time.perf_counter()
    tried = failed = work = events = 0
    virtual_s = cpu_s = 0.0
    faults: Counter[str] = Counter()
    with _reports(name, seeds, jobs) as reports:
        for report in reports:
            tried += 1
            work += report.work
            events += report.steps
            virtual_s += report.virtual_s
            cpu_s += report.cpu_s
            faults.update(report.faults)
            if report.failed:
                failed += 1
                print(describe(report), flush=True)
                if failed >= failures_max:
                    break
    took_s = time.perf_counter() - began_s
    print(
        f"{name}: {tried} seeds, {failed} failed; {work} transactions or messages, "
        f"{faults.total()} faults, "
        f"{events} events and {virtual_s:.0f} virtual seconds in {took_s:.1f} s: "
        f"{tried / took_s * 60:.0f} seeds a minute on {jobs} processes, "
        f"{tried / cpu_s * 60:.0f} a minute of one core's time"
    )
    print(", ".join(f"{kind} {count}" for kind, count in faults.most_common()))
    return failed


def replay(room: type[Room], seed: int) -> int:
    """Run one seed and print every event; return 1 if it failed."""
    log: list[str] = []
    with simulated_machine(log.append):
        report = run_seed(room, seed, log=log)
        print("\n".join(log))
        if not report.failed:
            print(f"seed {seed}: all held; faults: {', '.join(report.faults) or 'none'}")
            return 0
        print(describe(report, lines=1000))
    with simulated_machine():
        needed = ", ".join(without_most(room, seed))
        print(f"kinds of faults that it needs: {needed or 'none'}")
    return 1


def digests(room: type[Room], seeds: range) -> None:
    """Print what stands for all events of each seed, to compare machines and versions of Python."""
    for seed in seeds:
        log: list[str] = []
        with simulated_machine(log.append):
            run_seed(room, seed, log=log)
        print(seed, len(log), hashlib.sha256("\n".join(log).encode()).hexdigest())


def main() -> int:
    """Run the seeds of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--room", choices=list(ROOMS), help="this one only, instead of all")
    parser.add_argument("--seed", type=int, help="this one only, with all its events")
    parser.add_argument("--seeds", type=int, default=1000, help="how many of each room")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--failures", type=int, default=3, help="end with a room after this number of failures"
    )
    parser.add_argument("--digests", action="store_true", help="print one for each seed's events")
    given = parser.parse_args()
    failed = 0
    seeds = range(given.first, given.first + given.seeds)
    for name in [given.room] if given.room else ROOMS:
        if given.seed is not None:
            failed += replay(room_of(name), given.seed)
        elif given.digests:
            digests(room_of(name), seeds)
        else:
            failed += try_many(name, seeds, given.jobs, given.failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
