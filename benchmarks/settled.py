"""Cost of a settled transaction in a proxy: memory, time, and bytes in a snapshot.

Stores `--count` settled transactions of one half partition, `--rate` per millisecond, some of them
late, and looks up old, late and unknown ids. `python -m benchmarks.settled --help`.
"""

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from txbroker.core.records import Decision, Half, Message, Place, State
from txbroker.core.routing import make_id
from txbroker.core.settled import SettledWindow
from txbroker.core.transaction import Transaction, Verdict

BEGIN_MS = 1_790_000_000_000
RUN = 64
WARM_UP = 200_000
LATE_MS = (31_000, 120_000)
LOOKED_UP = 2000


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Transactions:
    """Creates settled transactions as a ledger does."""

    def __init__(self, rate: int, late_share: float) -> None:
        self._random = random.Random(2)
        self._rate = rate
        self._late_share = late_share
        self.usual: list[str] = []
        self.late: list[str] = []
        """Some of their ids."""

    def run(self, first: int) -> list[Transaction]:
        """Return the next ones."""
        return [self._one(number) for number in range(first, first + RUN)]

    def _one(self, number: int) -> Transaction:
        now_ms = BEGIN_MS + number // self._rate
        late = self._random.random() < self._late_share
        time_ms = now_ms - self._random.randrange(*(LATE_MS if late else (0, 200)))
        id = make_id(1, time_ms, self._random.getrandbits(64))
        if number % (251 if late else 5003) == 0:
            (self.late if late else self.usual).append(id)
        places = (Place("orders", number % 8, 200),)
        return Transaction(
            Half(id, "shop", (Message("orders", partition=number % 8),)),
            number,
            time_ms + 2,
            self._random.randbytes(16),
            places,
            None,
            State.PROMOTED,
            False,
            verdict=Verdict(Decision.COMMIT, 2 * number, now_ms),
        )


def found_us(window: SettledWindow, ids: Sequence[str]) -> float:
    """Return the time to look up one of these ids, in microseconds."""
    ids = ids[:: max(1, len(ids) // LOOKED_UP)]
    began_s = time.process_time()
    for id in ids:
        window.get(id)
    return (time.process_time() - began_s) / max(1, len(ids)) * 1e6


def calls_of(work: Callable[[], None]) -> int:
    """Return the number of Python calls of `work`."""
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    work()
    sys.setprofile(None)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=5, help="settled in a millisecond")
    parser.add_argument("--late-share", type=float, default=0.05)
    arguments = parser.parse_args()
    made, window = Transactions(arguments.rate, arguments.late_share), SettledWindow()
    gc.disable()
    gc.collect()
    spent_s, before, counted = 0.0, 0, 0
    for first in range(0, arguments.count + WARM_UP, RUN):
        if not before and first >= WARM_UP:
            # The newest are not packed, at any number.
            before, counted = resident_bytes(), len(window)
        run = made.run(first)
        began_s = time.process_time()
        window.settle_many(run)
        spent_s += time.process_time() - began_s
    del run
    count = len(window)
    print(f"{count:,} settled, in {len(window.segments)} segments")
    print(
        f"memory {(resident_bytes() - before) / (count - counted):.1f} bytes each, "
        f"counted {window.size / count:.1f}"
    )
    print(f"settle {spent_s / count * 1e6:.2f} us each")
    for name, ids in (("usual", made.usual), ("late", made.late)):
        print(f"find {name} {found_us(window, ids):.1f} us")
    now_ms = BEGIN_MS + count // arguments.rate
    unknown = [make_id(1, now_ms - number % 150, number) for number in range(LOOKED_UP)]
    print(f"miss {found_us(window, unknown):.1f} us")
    window.seal()
    packed = sum([segment.count for segment in window.segments])
    value = sum([len(segment.value) for segment in window.segments])
    print(f"snapshot {value / packed:.1f} bytes each")
    more = [made.run(count + number * RUN) for number in range(640)]
    calls = calls_of(lambda: [window.settle_many(run) for run in more] and None)
    print(f"calls {calls / (640 * RUN):.2f} each")


if __name__ == "__main__":
    main()
