"""Proxies in separate processes, each with its own links to Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.cluster.three_nodes import START_S, ThreeNodes
from tests.kit.fleet import PARTITIONS, Fleet, owned_by
from tests.kit.proxies import ProxyProcess
from tests.kit.until import free_ports, unique

_POLL_S = 0.2
PROTOCOLS = (1, 2)
"""The versions of Kafka's transaction protocol; proxies take the newest that brokers take."""


class PlacedProxy(ProxyProcess):
    """A proxy on a port that is its own, also while it is down."""

    def __init__(self, bootstrap: str, port: int, **settings: Any) -> None:
        super().__init__(bootstrap, listen=f"127.0.0.1:{port}", **settings)
        self.url = f"http://127.0.0.1:{port}"
        self._output_before = (0, 0)

    async def launch(self) -> None:
        self._output_before = (len(self.stdout), len(self.stderr))
        await super().launch()

    @property
    def died(self) -> int | None:
        """The exit code of a proxy that ended unexpectedly; otherwise None."""
        return None if self._process is None else self._process.returncode

    @property
    def found_no_kafka(self) -> bool:
        """Whether it has ended at its start because no broker answered, as it should."""
        return self.died == 1 and self._missed_kafka()

    def stopped_well(self, code: int) -> bool:
        """Whether it may end with this code when it was asked to: with 0, or else while it was
        still starting, before it takes signals, or because no broker answered."""
        was_ready = any(line.startswith("ready ") for line in self.stdout[self._output_before[0] :])
        starting = code == -signal.SIGTERM or (code == 1 and self._missed_kafka())
        return code == 0 or (starting and not was_ready)

    def _missed_kafka(self) -> bool:
        errors = self.stderr[self._output_before[1] :]
        # Unexpected errors are printed with a hint to --debug.
        return (
            bool(errors)
            and re.match(r"Error: .*\b(Kafka|broker \d)", errors[-1]) is not None
            and "txbroker --debug" not in errors[-1]
        )


class LinkedFleet(Fleet):
    """Proxies with their own links to Kafka."""

    def __init__(
        self, kafka: ThreeNodes, names: Sequence[str], *, protocol: int = PROTOCOLS[-1]
    ) -> None:
        prefix = unique("faults")
        self.placed = [
            PlacedProxy(
                kafka.bootstrap_of(name),
                port,
                instance=name,
                topic_prefix=prefix,
                partitions=PARTITIONS,
                session_timeout_s=6.0,
                check_after_s=1.0,
                check_interval_s=1.0,
                check_attempts_max=6,
                snapshot_records_min=2000,
                log_level="info",
            )
            for name, port in zip(names, free_ports(len(names)), strict=True)
        ]
        if protocol != PROTOCOLS[-1]:
            patched = Path(__file__).parents[1] / "patched_proxy.py"
            older = (sys.executable, str(patched), "older", str(protocol))
            for proxy in self.placed:
                proxy.program = older
        self.proxies = list(self.placed)

    async def start(self) -> None:
        for proxy in self.placed:
            await proxy.launch()
        end = time.monotonic() + START_S
        while True:
            wrong = await self.supervise()
            assert not wrong, wrong
            if await self.is_whole():
                return
            assert time.monotonic() < end, f"no owners within {START_S:g} s"
            await asyncio.sleep(_POLL_S)

    async def is_whole(self) -> bool:
        """Whether every partition has one owner, and all proxies are ready."""
        if not all([proxy.died is None and await proxy.is_ready() for proxy in self.placed]):
            return False
        owned = [number for proxy in self.placed for number in await owned_by(proxy)]
        return sorted(owned) == list(range(PARTITIONS))

    async def supervise(self) -> list[str]:
        """Restart proxies that ended unexpectedly, as a supervisor does; return the faults."""
        wrong = []
        for number, proxy in enumerate(self.placed):
            code = proxy.died
            if code is None:
                continue
            if not proxy.found_no_kafka:
                errors = " | ".join(proxy.stderr[-3:])
                wrong.append(f"proxy-{number} ended unexpectedly: {code}: {errors[-300:]}")
            await proxy.again()
        return wrong

    async def end(self) -> list[str]:
        """End all of them; return the faults."""
        wrong = []
        for number, proxy in enumerate(self.proxies):
            try:
                # It prints what the proxy logged; stdout is for the sums.
                with contextlib.redirect_stdout(sys.stderr):
                    await proxy.close()
            except (AssertionError, TimeoutError) as error:
                wrong.append(f"proxy-{number} did not end well: {str(error)[:200]}")
        return wrong
