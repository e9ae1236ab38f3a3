"""A figure, its aim, and its ratio to raw Kafka, as a row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

HEAD = "| measure | figure | times raw Kafka | aim | |\n| --- | ---: | ---: | --- | --- |"


class Figure(NamedTuple):
    """A measured value.

    Attributes:
        aim: what the value is to be, at least or at most; None: there is no aim.
        raw: the same of raw Kafka in the same run.
        note: other values.
    """

    what: str
    value: float
    unit: str
    aim: float | None = None
    at_least: bool = True
    raw: float | None = None
    note: str = ""

    @property
    def missed(self) -> bool:
        """Whether it has an aim and misses it."""
        if self.aim is None:
            return False
        return self.value < self.aim if self.at_least else self.value > self.aim

    def __str__(self) -> str:
        ratio = f"{self.value / self.raw:.3g}" if self.raw else ""
        aim = ""
        if self.aim is not None:
            bound = "at least" if self.at_least else "at most"
            aim = f"{bound} {shown(self.aim)}: {'missed' if self.missed else 'met'}"
        figure = f"{shown(self.value)} {self.unit}"
        return f"| {self.what} | {figure} | {ratio} | {aim} | {self.note} |"


def shown(value: float) -> str:
    """Return a number with three digits or more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def middle(values: Sequence[float], share: float = 0.5) -> float:
    """Return the value below which a share of sorted values is."""
    return values[int(len(values) * share)]
