"""Try seeds in a simulation, or one of them again: `python -m tests.simulator.simulate --seed N`.

Without `--seed`, runs a number of seeds from `--first` on, on all cores. Each
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

from tests.simulator.sim_faults import KINDS
from tests.simulator.sim_loop import simulated_machine
from tests.simulator.sim_world import Report, run_seed

STORY_LINES = 60
_CHUNK = 20


def describe(report: Report, lines: int = STORY_LINES) -> str:
    """Return what to know of a run that failed: its seed, its faults, the first violations."""
    lines_out = [f"seed {report.seed} failed; its faults: {', '.join(report.faults) or 'none'}"]
    for violation in report.violations[:3]:
        lines_out += violation.splitlines()[:lines]
    if len(report.violations) > 3:
        lines_out.append(f"and {len(report.violations) - 3} more violations")
    lines_out.append(f"again, with all events: make simulate SEED={report.seed}")
    return "\n".join(lines_out)


def without_most(seed: int) -> list[str]:
    """Return the kinds of faults that a seed needs to fail; the others were left out."""
    without: set[str] = set()
    for kind in KINDS:
        if run_seed(seed, without=frozenset({*without, kind})).failed:
            without.add(kind)
    return [kind for kind in KINDS if kind not in without]


def _run_some(seeds: range) -> list[Report]:
    with simulated_machine():
        return [run_seed(seed) for seed in seeds]


@contextmanager
def _reports(seeds: range, jobs: int) -> Iterator[Iterator[Report]]:
    parts = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    if jobs == 1:
        yield (report for part in parts for report in _run_some(part))
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield (report for some in pool.imap(_run_some, parts) for report in some)


def try_many(seeds: range, jobs: int, failures_max: int) -> int:
    """Try seeds; return how many failed, after at most `failures_max` of them."""
    began_s = time.perf_counter()
    tried = failed = transactions = events = 0
    virtual_s = cpu_s = 0.0
    faults: Counter[str] = Counter()
    with _reports(seeds, jobs) as reports:
        for report in reports:
            tried += 1
            transactions += report.transactions
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
        f"{tried} seeds, {failed} failed; {transactions} transactions, {faults.total()} faults, "
        f"{events} events and {virtual_s:.0f} virtual seconds in {took_s:.1f} s: "
        f"{tried / took_s * 60:.0f} seeds a minute on {jobs} processes, "
        f"{tried / cpu_s * 60:.0f} a minute of one core's time"
    )
    print(", ".join(f"{kind} {count}" for kind, count in faults.most_common()))
    return failed


def replay(seed: int) -> int:
    """Run one seed and print every event; return 1 if it failed."""
    log: list[str] = []
    with simulated_machine(log.append):
        report = run_seed(seed, log=log)
        print("\n".join(log))
        if not report.failed:
            print(f"seed {seed}: all held; faults: {', '.join(report.faults) or 'none'}")
            return 0
        print(describe(report, lines=1000))
    with simulated_machine():
        print(f"kinds of faults that it needs: {', '.join(without_most(seed)) or 'none'}")
    return 1


def digests(seeds: range) -> int:
    """Print what stands for all events of each seed, to compare machines and versions of Python."""
    for seed in seeds:
        log: list[str] = []
        with simulated_machine(log.append):
            run_seed(seed, log=log)
        print(seed, len(log), hashlib.sha256("\n".join(log).encode()).hexdigest())
    return 0


def main() -> int:
    """Run the seeds of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="this one only, with all its events")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--failures", type=int, default=3, help="stop after this number of failures"
    )
    parser.add_argument("--digests", action="store_true", help="print one for each seed's events")
    given = parser.parse_args()
    if given.seed is not None:
        return replay(given.seed)
    seeds = range(given.first, given.first + given.seeds)
    if given.digests:
        return digests(seeds)
    return 1 if try_many(seeds, given.jobs, given.failures) else 0


if __name__ == "__main__":
    sys.exit(main())
