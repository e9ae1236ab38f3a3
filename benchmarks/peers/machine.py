"""The machine of a measurement."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 1.0


@dataclass(frozen=True)
class Machine:
    """The description of a machine in a report."""

    processor: str
    cores: int
    memory_gib: float
    system: str

    @classmethod
    def here(cls) -> Machine:
        """Return this machine."""
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return cls(
            _processor(),
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1,
            round(pages * size / 2**30, 1),
            f"{platform.system()} {platform.release()}",
        )

    def __str__(self) -> str:
        return f"{self.cores} cores ({self.processor}), {self.memory_gib:g} GiB, {self.system}"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def busy_share() -> float | None:
    """Return the share of all cores that other processes use; None if unknown."""
    before = _ticks()
    time.sleep(_LOOK_S)
    after = _ticks()
    if before is None or after is None:
        return None
    idle, total = (new - old for new, old in zip(after, before, strict=True))
    return round(1 - idle / max(total, 1), 3)


def _ticks() -> tuple[int, int] | None:
    """Return the idle ticks of all cores, and all ticks."""
    with suppress(OSError):
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        ticks = [int(field) for field in fields]
        return ticks[3] + ticks[4], sum(ticks)
    return None
