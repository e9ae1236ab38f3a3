"""Judge a saved run: `python -m judge FOLDER`.

Ends with 0 where every invariant held, with 1 where one was broken, with 2 where the folder does
not read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .folder import load
from .verdict import Judge


def main() -> int:
    """Judge, and print every violation with its story."""
    parser = argparse.ArgumentParser(prog="judge", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        case = load(folder)
        judge = Judge(case.history, case.topics, case.rows, case.states or None, **case.options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 2
    found = judge.judge()
    for violation in found:
        print(violation)
    print(
        f"{len(case.history.calls)} calls, {len(judge.log)} transactions, "
        f"{len(judge.visible)} visible, {len(found)} violations"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
