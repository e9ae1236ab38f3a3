"""Speed and memory over ten million transactions.

One proxy on a Kafka with small segments and a short retention of the target, so that the number of
files stays constant. `txbroker bench` generates the load, reads all of it and counts every message;
this script samples memory and disk, and compares the first million with the last.
`python -m benchmarks.endurance --help`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.rig.proxy import TARGET, Proxy, make_target, proxy_on
from txbroker.embedded import EmbeddedKafka

MIB = 1 << 20
LOOK_S = 10.0
SETTINGS = {
    # Half messages are kept for ten minutes, so checks have to end within five.
    "half_retention_s": 600.0,
    "check_after_s": 10.0,
    "check_interval_s": 5.0,
    "check_attempts_max": 3,
    "dedup_window_s": 60.0,
}
RETENTION_MS = 120_000
SEGMENT_BYTES = 64 * MIB
PROPERTIES = {
    "log.segment.bytes": str(SEGMENT_BYTES),
    "log.retention.check.interval.ms": "30000",
    "log.segment.delete.delay.ms": "1000",
}


def look(proxy: Proxy, kafka: EmbeddedKafka, folder: Path) -> dict[str, float]:
    """Return the memory of the proxy and the size of the broker's logs, in MiB."""
    return {
        "proxy_mib": proxy.resident_bytes() / MIB,
        "disk_mib": sum(file.stat().st_size for file in _files(folder)) / MIB,
    }


def _files(folder: Path) -> list[Path]:
    found = []
    for path in folder.rglob("*.log"):
        # Kafka may delete it meanwhile.
        if path.exists():
            found.append(path)
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the load and return the figures."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedKafka(Path(folder) / "kafka", for_load=True, properties=PROPERTIES) as kafka,
        proxy_on(kafka.bootstrap, "endurance", Path(folder), **SETTINGS) as proxy,
    ):
        make_target(
            kafka.bootstrap,
            **{"retention.ms": str(RETENTION_MS), "segment.bytes": str(SEGMENT_BYTES)},
        )
        command = [str(Path(sys.executable).with_name("txbroker")), "bench", "-o", "json"]
        command += ["--url", proxy.url, "--kafka", kafka.bootstrap, "--topic", TARGET]
        command += ["--transactions", str(arguments.transactions), "--read-along", "all"]
        command += ["--in-flight", str(arguments.in_flight)]
        command += ["--warmup-s", str(arguments.warmup_s)]
        result = Path(folder) / "bench.json"
        with result.open("wb") as file:
            load = subprocess.Popen(command, stdout=file)
        looks: list[dict[str, float]] = []
        began = time.monotonic()
        while load.poll() is None:
            time.sleep(LOOK_S)
            found = look(proxy, kafka, Path(folder) / "kafka")
            done = proxy.metric("promoted_total{")
            looks.append({"s": round(time.monotonic() - began, 1), "done": done, **found})
            print(
                f"\r{done:,.0f} promoted, proxy {found['proxy_mib']:,.0f} MiB, "
                f"logs {found['disk_mib']:,.0f} MiB ",
                end="",
                file=sys.stderr,
                flush=True,
            )
        print(file=sys.stderr)
        if load.returncode:
            raise SystemExit(load.returncode)
        return {"looks": looks, "bench": json.loads(result.read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transactions", type=int, default=10_000_000)
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--warmup-s", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments)
    if arguments.json:
        print(json.dumps(found))
        return
    bench, looks = found["bench"], found["looks"]
    tenths = bench["acked_per_s_by_tenth"]
    print(
        f"{bench['transactions']:,} transactions, {bench['acked_per_s']:,.0f} a second, by tenths",
        " ".join(f"{rate:,.0f}" for rate in tenths),
    )
    print(f"last tenth : first tenth {tenths[-1] / tenths[0]:.3f}")
    tenth = max(1, len(looks) // 10)
    for name, what in (("proxy_mib", "memory of the proxy"), ("disk_mib", "logs of the broker")):
        second = mean(each[name] for each in looks[tenth : 2 * tenth] or looks[:1])
        last = mean(each[name] for each in looks[-tenth:])
        print(f"{what}, MiB: second tenth {second:,.0f}, last tenth {last:,.0f}")
    print(
        f"visible {bench['visible']:,}, lost {bench['lost']}, duplicated {bench['duplicated']}, "
        f"calls failed {bench['failed']}"
    )


if __name__ == "__main__":
    main()
