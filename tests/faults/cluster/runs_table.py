"""Prints what the fault runs of a results file came to, as a table in Markdown.

Run as `python tests/faults/cluster/runs_table.py faults-results.jsonl`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return a line for each kind of fault, and one for all runs together."""
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
    lines = [
        "| fault | times | runs | prepared meanwhile | violations in these runs |",
        "| --- | --: | --: | --: | --: |",
    ]
    lines += [
        f"| {kind} | {times[kind]} | {in_runs[kind]} | {transactions[kind]:,} "
        f"| {violations[kind]} |"
        for kind in sorted(times)
    ]
    lines.append(
        f"| **{len(times)} kinds** | {times.total()} | {len(runs)} "
        f"| {sum(run['transactions'] for run in runs):,} "
        f"| {sum(run['violations'] for run in runs)} |"
    )
    return "\n".join(lines)


def main() -> int:
    """Print the table of the file that is named."""
    text = Path(sys.argv[1]).read_text()
    print(table([json.loads(line) for line in text.splitlines()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
