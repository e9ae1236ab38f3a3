"""Judge a saved run: `python -m tests.faults.judge FOLDER`.

Exit code 0: all invariants hold; 1: one is broken; 2: the folder cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .folder import load
from .verdict import Judge


def main() -> int:
    parser = argparse.ArgumentParser(prog="judge", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        case = load(folder)
        judge = Judge(case.history, case.topics, case.rows, case.states or None, **case.options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 2
    violations = judge.judge()
    for violation in violations:
        print(violation)
    print(
        f"{len(case.history.calls)} calls, {len(judge.log)} transactions, "
        f"{len(judge.visible)} visible, {len(violations)} violations"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
