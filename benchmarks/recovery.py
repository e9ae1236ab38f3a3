"""Restart time, and memory of undecided transactions.

`pending`: the memory of a proxy with a million undecided transactions of 1 KiB, and the time from
start after `kill -9` until it is ready. `settled`: the same with a thousand undecided transactions
after millions of settled ones; the time must not grow with their number.

The records are written directly to Kafka, as an owner's appenders would, while the proxy that owns
the partitions reads them, promotes and writes snapshots. `python -m benchmarks.recovery --help`.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.rig.filler import Filler
from benchmarks.rig.proxy import PARTITIONS, Proxy, make_target, proxy_on
from txbroker.embedded import EmbeddedKafka


def restart(proxy: Proxy, pending: int) -> dict[str, float]:
    """Kill the proxy, start it again, and return what that took."""
    held = proxy.resident_bytes()
    proxy.end(signal.SIGKILL)
    took_s = proxy.start()
    found = proxy.metric("pending{")
    if found != pending:
        raise SystemExit(f"{found:g} are pending after the restart, not {pending}")
    figures = {
        "resident_mib": held / 2**20,
        "restart_s": took_s,
        "resident_after_mib": proxy.resident_bytes() / 2**20,
        **proxy.list_all(),
    }
    if figures["listed"] != pending:
        raise SystemExit(f"{figures['listed']:g} are listed, not {pending}")
    return figures


def measure(
    kafka: str, folder: Path, name: str, pending: int, settled: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Fill an installation, restart its proxy, and return the figures."""
    with proxy_on(kafka, name, folder, dedup_window_s=arguments.dedup_window_s) as proxy:
        small = Filler(kafka, name, arguments.settled_size)
        committed = round(settled * arguments.committed_share)
        if settled:
            rate = arguments.rate
            uvloop.run(small.fill(proxy, settled - committed, "rollback", rate, "rolled back"))
            uvloop.run(small.fill(proxy, committed, "commit", rate, "committed"))
            proxy.wait_for("promoted_total{", committed)
        large = Filler(kafka, name, arguments.size)
        uvloop.run(large.fill(proxy, pending, "", arguments.rate, "pending"))
        proxy.wait_for("pending{", pending)
        time.sleep(arguments.settle_s)
        figures = restart(proxy, pending)
        recovery_s = proxy.metric("recovery_seconds_sum") / PARTITIONS
    found = {"case": name, "pending": pending, "settled": settled, **figures}
    return {**found, "recovery_s": recovery_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pending", type=int, default=1_000_000)
    parser.add_argument("--settled", type=int, nargs="*", default=[1_000_000, 5_000_000])
    parser.add_argument("--pending-behind", type=int, default=1000)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--settled-size", type=int, default=100)
    parser.add_argument("--committed-share", type=float, default=0.01)
    parser.add_argument(
        "--rate", type=float, default=12_000.0, help="transactions a second at most"
    )
    parser.add_argument(
        "--dedup-window-s",
        type=float,
        default=60.0,
        help="with the rate, determines the number of settled transactions kept",
    )
    parser.add_argument("--settle-s", type=float, default=30.0, help="rest before the restart")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = [("pending", arguments.pending, 0)] if arguments.pending else []
    cases += [
        (f"settled-{n}", arguments.pending_behind, settled)
        for n, settled in enumerate(arguments.settled)
    ]
    found = []
    for name, pending, settled in cases:
        with (
            tempfile.TemporaryDirectory() as folder,
            EmbeddedKafka(Path(folder) / "kafka", for_load=True) as kafka,
        ):
            make_target(kafka.bootstrap)
            found.append(measure(kafka.bootstrap, Path(folder), name, pending, settled, arguments))
            show(found[-1:], arguments.json)
    return 0


def show(found: list[dict[str, Any]], as_json: bool) -> None:
    for each in found:
        if as_json:
            print(json.dumps(each), flush=True)
            continue
        print(
            f"{each['pending']:>9,} pending, {each['settled']:>9,} settled: "
            f"{each['resident_mib']:6.0f} MiB, restart {each['restart_s']:5.1f} s "
            f"(recovery of a partition {each['recovery_s']:.1f} s), "
            f"then {each['resident_after_mib']:.0f} MiB; all listed in {each['list_s']:.1f} s, "
            f"a page of 1,000 in {each['page_p50_s']:.3f} s (at most {each['page_max_s']:.3f} s)",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
