"""Prints the page of what fault runs came to, from a file of their results.

Run as `python -m tests.faults.cluster.runs_table docs/reference/fault-runs.jsonl`; runs of
consumers are read from `consumer-fault-runs.jsonl` in the same folder. With `--compact` it prints
the lines of the file again, without fields that the page does not show. `note`, written by hand,
explains a run with violations.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]

NOT_REACHED = "moment not reached"
SOAK = "python -m tests.faults.cluster.soak_faults"
_KEPT = (
    *("at", "seed", "minutes", "kafka", "protocol", "only", "hold_max_s"),
    *("faults", "during", "late_ends"),
    *("transactions", "states", "rest_s", "violations", "broken", "wrong", "note"),
)
_INTRODUCTION = f"""\
# Fault runs
What runs of [soak txbroker while everything breaks](../how-to/soak-with-faults.md) came to that
were made on the way to this version: three proxies on a real Kafka of three nodes, under load,
while brokers, proxies and links break; then all is healed, everything is read, and the independent
[judge](history.md#what-is-judged) looks at every transaction. Left out are runs that broke off, as
where the machine was too busy to start a broker. Simulated runs and
[crashes at named moments](failpoints.md) are not counted here.

Made by `python -m tests.faults.cluster.runs_table docs/reference/fault-runs.jsonl`. Any row of the
second table can be run again with the command in it, after `{SOAK}`.
"""


def table(runs: Sequence[Run]) -> str:
    times: Counter[str] = Counter()
    in_runs: Counter[str] = Counter()
    transactions: Counter[str] = Counter()
    violations: Counter[str] = Counter()
    for run in runs:
        for kind, count in run["faults"].items():
            times[kind] += count
            in_runs[kind] += 1
            transactions[kind] += run["during"].get(kind, 0)
            violations[kind] += run["violations"]
    rows = [
        (kind, times[kind], in_runs[kind], f"{transactions[kind]:,}", violations[kind])
        for kind in sorted(times)
    ]
    transactions_all, violations_all = (
        sum(run[word] for run in runs) for word in ("transactions", "violations")
    )
    last = f"{transactions_all:,} in all"
    rows.append((f"**{len(times)} kinds**", times.total(), len(runs), last, violations_all))
    head = ("fault", "times", "runs", "prepared meanwhile", "violations in these runs")
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with the first column aligned to the left."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def together(runs: Sequence[Run]) -> str:
    transactions, violations = (
        sum(run[word] for run in runs) for word in ("transactions", "violations")
    )
    faults = sum((Counter(run["faults"]) for run in runs), Counter[str]())
    minutes = sum(run["minutes"] for run in runs)
    return (
        f"{transactions:,} transactions in {len(runs)} runs of {minutes:g} minutes, "
        f"{faults.total():,} faults of {len(faults)} kinds, {violations} violations"
    )


def command(run: Run) -> str:
    words = [f"--seed {run['seed']} --minutes {run['minutes']:g}", f"--kafka {run['kafka']}"]
    words += [f"--protocol {run['protocol']}"] if run["protocol"] == 1 else []
    hold_max_s = run.get("hold_max_s")
    words += [f"--hold-max-s {hold_max_s:g}"] if hold_max_s else []
    words += ["--only", *(f'"{kind}"' for kind in run["only"])] if run["only"] else []
    return " ".join(words)


def each_run(runs: Sequence[Run]) -> str:
    rows = [
        (
            f"`{command(run)}`",
            f"{run['transactions']:,}",
            sum(run["faults"].values()),
            len(run["faults"]),
            f"{run['rest_s']:.0f} s",
            run["violations"],
        )
        for run in runs
    ]
    head = ("run", "transactions", "faults", "kinds", "rest after", "violations")
    notes = [f"Seed {run['seed']}: {run['note']}" for run in runs if run.get("note")]
    return "\n\n".join([markdown(head, rows), *notes])


def late_ends(runs: Sequence[Run]) -> str:
    found: dict[int, Counter[str]] = {1: Counter(), 2: Counter()}
    for run in runs:
        found[run["protocol"]].update(run["late_ends"])
    ways = ("late", "late and reset", "unanswered", "overtaken")
    rows = [
        (name, *[f"{found[version][way]:,}" for way in ways])
        for version, name in ((1, "first"), (2, "second"))
    ]
    return markdown(("protocol", "late", "late, connection reset", *ways[2:]), rows)


def page(runs: Sequence[Run]) -> str:
    return f"""\
{_INTRODUCTION}
Together: {together(runs)}.

## By fault
A transaction counts with every fault that lasted while it was prepared.

{table(runs)}

## By run
{each_run(runs)}

## Late ends of Kafka transactions
In both versions of Kafka's transaction protocol. Overtaken: the request arrived when its proxy had
gone on with the same transactional id.

{late_ends(runs)}
"""


def consumers(runs: Sequence[Run]) -> str:
    """Return the section of runs with consumers."""
    kinds: dict[str, Counter[str]] = {}
    cases: dict[str, Counter[str]] = {}
    notes: list[str] = []
    for run in runs:
        faults = {kind: n for kind, n in run["faults"].items() if kind != NOT_REACHED}
        for kind, count in faults.items():
            kinds.setdefault(kind, Counter())["times"] += count
        broken = run["violations"] + run["wrong"]
        notes += [f"`{run['case']}`, seed {run['seed']}: {run['note']}"] if "note" in run else []
        sums = {"runs": 1, "faults": sum(faults.values()), "broken": broken}
        sums |= {word: run[word] for word in ("messages", "calls", "copies", "seconds")}
        cases.setdefault(run["case"], Counter()).update(sums)
    rows = [
        (
            f"`{case}`",
            *(f"{sums[word]:,}" for word in ("runs", "messages", "calls", "copies", "faults")),
            f"{sums['seconds']:,} s",
            sums["broken"],
        )
        for case, sums in sorted(cases.items())
    ]
    head = ("case", "runs", "messages", "calls", "copies", "faults", "duration", "violations")
    times = [(kind, counts["times"]) for kind, counts in sorted(kinds.items())]
    paragraphs = "".join(f"{note}\n\n" for note in notes)
    return f"""
## Consumers
Groups of three [consumers](../how-to/consume.md) as processes, made by
`python -m tests.faults.consuming.soak`; a case is a store if there is one for exactly once, an
order, a failure policy, and whether members are static, messages come in batches, stages follow and
the handler is a coroutine. More calls than messages: attempts of messages that failed, and repeats
after a crash.
Requests of a consumer that was cut off arrive afterwards.

{markdown(head, rows)}

{paragraphs}{markdown(("fault", "times"), times)}
"""


def main() -> int:
    *options, name = sys.argv[1:]
    runs = [json.loads(line) for line in Path(name).read_text().splitlines()]
    if options == ["--compact"]:
        for run in runs:
            kept = {key: run[key] for key in _KEPT if key in run}
            print(json.dumps(kept, separators=(",", ":")))
    else:
        others = Path(name).with_name("consumer-fault-runs.jsonl").read_text().splitlines()
        print(page(runs) + consumers([json.loads(line) for line in others]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
