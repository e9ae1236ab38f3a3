"""What this process has asked of Spark's Java."""

from __future__ import annotations

from collections import Counter


class Calls(Counter[str]):
    """Numbers of calls, by what they ask for. `characters`: of all of them together; most are
    SQL."""

    characters = 0
