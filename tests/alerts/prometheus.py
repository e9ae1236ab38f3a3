"""A real Prometheus that scrapes a proxy by the rules that are shipped, only quicker."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.kit.until import free_ports, until

_FILES = Path(__file__).parents[2] / "charts/txbroker/files"
RULES = _FILES / "alerts.yaml"
DASHBOARD = _FILES / "dashboard.json"
FASTER = 200
"""Factor by which every time in the rules is shortened."""
_SCRAPE_MS = 250
_EVALUATE_MS = 200
_STARTS_MAX = 3
_START_S = 20.0
_END_S = 5.0
_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000}


def quicker(rules: str, changes: Mapping[str, str]) -> str:
    """Return rules with every duration divided by `FASTER`, and `changes` made to their text, of
    which each must be found."""
    for old, new in changes.items():
        assert old in rules, f"{old} is in no rule any more"
        rules = rules.replace(old, new)
    return re.sub(r"\b(\d+)([smh])\b", _shorter, rules)


def _shorter(found: re.Match[str]) -> str:
    return f"{int(found[1]) * _UNITS_MS[found[2]] // FASTER}ms"


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    http: aiohttp.ClientSession

    async def alerts(self, state: str = "firing") -> dict[str, list[dict[str, Any]]]:
        """Return the alerts in this state by name."""
        async with self.http.get("/api/v1/alerts") as response:
            answer = await response.json()
        found: dict[str, list[dict[str, Any]]] = {}
        for alert in answer["data"]["alerts"]:
            if alert["state"] == state:
                found.setdefault(alert["labels"]["alertname"], []).append(alert)
        return found

    async def fires(self, name: str, **labels: str) -> dict[str, Any]:
        """Wait until an alert of this name and with these labels fires; return it."""

        async def so() -> dict[str, Any] | None:
            return next(iter(await self._matching(name, labels)), None)

        return dict(await until(so))

    async def is_over(self, name: str, **labels: str) -> None:
        """Wait until no alert of this name and with these labels fires."""

        async def so() -> bool:
            return not await self._matching(name, labels)

        await until(so)

    async def _matching(self, name: str, labels: dict[str, str]) -> list[dict[str, Any]]:
        return [
            alert
            for alert in (await self.alerts()).get(name, [])
            if labels.items() <= alert["labels"].items()
        ]

    async def value(self, query: str) -> list[dict[str, Any]]:
        """Return the series that a query finds."""
        return await self._ask("query", query=query)

    async def of_late(self, query: str, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Return the series that a query finds now, or has found of late."""
        now_s = time.time()
        return await self._ask(
            "query_range", query=query, start=str(now_s - seconds), end=str(now_s), step="0.5"
        )

    async def _ask(self, what: str, **asked: str) -> list[dict[str, Any]]:
        async with self.http.get(f"/api/v1/{what}", params=asked) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{asked}: {answer}"
        return list(answer["data"]["result"])


@asynccontextmanager
async def prometheus(target: str, rules: str, folder: Path) -> AsyncIterator[Prometheus]:
    """Run a Prometheus with its files in `folder` that scrapes `target` (host:port), until the
    block is left; however it is left, the process has ended then."""
    (folder / "rules.yaml").write_text(rules)
    config = {
        "global": {
            "scrape_interval": f"{_SCRAPE_MS}ms",
            "scrape_timeout": f"{_SCRAPE_MS}ms",
            "evaluation_interval": f"{_EVALUATE_MS}ms",
        },
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "txbroker", "static_configs": [{"targets": [target]}]}],
    }
    # JSON is YAML too.
    (folder / "prometheus.yml").write_text(json.dumps(config))
    process, url = await _start(folder)
    try:
        async with aiohttp.ClientSession(url) as http:
            yield Prometheus(http)
    finally:
        await _end(process)


async def _start(folder: Path) -> tuple[asyncio.subprocess.Process, str]:
    for _ in range(_STARTS_MAX):
        address = f"127.0.0.1:{free_ports(1)[0]}"
        with (folder / "log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            if await _ready(process, f"http://{address}"):
                return process, f"http://{address}"
        except BaseException:
            await _end(process)
            raise
    raise AssertionError(f"prometheus does not start:\n{(folder / 'log').read_text()}")


async def _ready(process: asyncio.subprocess.Process, url: str) -> bool:
    """Wait until it answers; False: it has ended, for instance because its port was taken."""

    async def answered_or_ended() -> bool:
        if process.returncode is not None:
            return True
        try:
            async with http.get("/-/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async with aiohttp.ClientSession(url) as http:
        await until(answered_or_ended, _START_S)
    return process.returncode is None


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except TimeoutError:
        process.kill()
        await process.wait()
