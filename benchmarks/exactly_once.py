"""Figures of exactly-once consumers, against their aims: `python -m benchmarks.exactly_once PART`.

Contenders process the same records in interleaved rounds, and a ratio is that of their medians. The
exit code is 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.consumers import done_rows, inbox, kafka_to_kafka, ratios, takeover
from benchmarks.consumers.rounds import Bound, Ratio

PARTS: dict[str, Callable[[int], Iterator[Ratio | Bound]]] = {
    "kafka": kafka_to_kafka.ratios,
    "database": ratios.ratios,
    "takeover": takeover.bounds,
    "rows": done_rows.bounds,
    "inbox": inbox.bounds,
}
"""By name, what measures a part with so many rounds."""


def main() -> int:
    """Measure, and print; return 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    missed = 0
    for part in given.parts:
        for ratio in PARTS[part](given.rounds):
            missed += not ratio.met
            print(json.dumps(_fields(ratio)) if given.json else ratio, flush=True)
    return 1 if missed else 0


def _fields(ratio: Ratio | Bound) -> dict[str, Any]:
    return {**ratio._asdict(), "figure": ratio.figure, "met": ratio.met}


if __name__ == "__main__":
    sys.exit(main())
