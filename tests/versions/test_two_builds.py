"""Two builds side by side: one whose record version is one higher, made here from the sources.

While both are there, nobody writes what the older one does not understand. What the newer one
wrote alone stops the older one's partition, visibly; nothing of it is dropped, and the newer one
takes it up again.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import txbroker
from tests.faults.judge import Rec
from tests.kit.proxies import ProxyProcess
from tests.kit.until import unique, until
from txbroker.core.records import LOG_VERSION, RECORD_VERSION
from txbroker.core.routing import parse_id
from txbroker.embedded import EmbeddedKafka

_NEWER = RECORD_VERSION + 1
_LINES = {
    f"RECORD_VERSION = {RECORD_VERSION}\n": f"RECORD_VERSION = {_NEWER}\n",
    f"LOG_VERSION = {LOG_VERSION}\n": f"LOG_VERSION = {_NEWER}\n",
}
_MAIN = "from txbroker.cli.main import main; main()"
PARTITIONS = 2


@pytest.fixture(scope="module")
def newer_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this build that writes and understands the next record version."""
    folder = tmp_path_factory.mktemp("newer")
    source = Path(txbroker.__file__).parent
    shutil.copytree(source, folder / "txbroker", ignore=shutil.ignore_patterns("__pycache__"))
    records = folder / "txbroker" / "core" / "records.py"
    text = records.read_text()
    for line, newer in _LINES.items():
        assert text.count(line) == 1
        text = text.replace(line, newer)
    records.write_text(text)
    return folder


class Fleet:
    """Proxies of either build on one installation."""

    def __init__(self, bootstrap: str, newer_build: Path) -> None:
        self._bootstrap = bootstrap
        self._newer_build = newer_build
        self.prefix = unique("builds")
        self._made: list[ProxyProcess] = []

    async def proxy(self, instance: str, *, newer: bool = False) -> ProxyProcess:
        """Start a proxy; it need not become ready."""
        world = ProxyProcess(
            self._bootstrap,
            instance=instance,
            topic_prefix=self.prefix,
            partitions=PARTITIONS,
            check_after_s=600,
        )
        if newer:
            # -P: not the build in the folder where the tests run.
            world.program = (sys.executable, "-P", "-c", _MAIN)
            world.environment = {"PYTHONPATH": str(self._newer_build)}
        self._made.append(world)
        await world.launch()
        await until(world.is_alive)
        return world

    async def close(self) -> None:
        for world in self._made:
            await world.kill()


@pytest.fixture
async def fleet(kafka: EmbeddedKafka, newer_build: Path) -> AsyncIterator[Fleet]:
    made = Fleet(kafka.bootstrap, newer_build)
    yield made
    await made.close()


def versions(records: list[Rec]) -> set[str]:
    return {str(record.header("txb-v")).split()[0] for record in records}


async def logs(world: ProxyProcess) -> list[Rec]:
    """All that lies in the half and operation topics, in one order."""
    records = [*await world.own("half"), *await world.own("op")]
    return sorted(records, key=lambda record: (record.topic, record.partition, record.offset))


def ids_of(records: list[Rec]) -> list[str]:
    return sorted(str(record.header("txb-id")) for record in records)


async def states(world: ProxyProcess) -> dict[str, str]:
    _, answer = await world.request("GET", "/readyz")
    return {str(p): str(text) for p, text in answer["partitions"].items()}


async def shares(world: ProxyProcess, count: int) -> None:
    """Wait until a proxy owns a number of partitions."""

    async def owns() -> bool:
        return sum(text == "owned" for text in (await states(world)).values()) == count

    await until(owns)


async def fill(world: ProxyProcess, topic: str) -> list[str]:
    """Prepare transactions of different keys until each partition has one, at least eight."""
    ids: list[str] = []
    while len(ids) < 8 or len({parse_id(id).partition for id in ids}) < PARTITIONS:
        ids.append(await world.prepare({"topic": topic, "key": str(len(ids)), "value": "v"}))
    return ids


async def test_old_build_understands_all_written_records(fleet: Fleet) -> None:
    older = await fleet.proxy("older")
    await older.ready()
    newer = await fleet.proxy("newer", newer=True)
    await shares(older, PARTITIONS // 2)
    await shares(newer, PARTITIONS // 2)
    topic = await older.topic()
    ids = [*await fill(older, topic), *await fill(newer, topic)]
    for number, id in enumerate(ids):
        await (older, newer)[number % 2].act(id, "commit", wait="promoted")
    assert versions(await newer.own("half")) == {str(LOG_VERSION), str(RECORD_VERSION)}
    # Each can take over everything from the other.
    waiting = await fill(newer, topic)
    await newer.kill()
    await shares(older, PARTITIONS)
    for id in waiting:
        await older.act(id, "commit", wait="promoted")
    assert ids_of(await older.visible(topic)) == sorted(ids + waiting)


async def test_newer_records_are_kept_and_alarmed(fleet: Fleet) -> None:
    newer = await fleet.proxy("newer", newer=True)
    await newer.ready()
    topic = await newer.topic()
    ids = await fill(newer, topic)
    assert versions(await newer.own("half")) == {str(_NEWER)}
    held = await logs(newer)

    older = await fleet.proxy("older")

    async def alarmed() -> bool:
        return any(text.startswith("newer") for text in (await states(older)).values())

    await until(alarmed)
    assert not await older.is_ready()
    assert any("newer" in line and "partition" in line for line in older.stderr)
    stopped = [p for p, text in (await states(older)).items() if text.startswith("newer")]
    metric = f'txbroker_partitions{{state="newer"}} {float(len(stopped))}'
    assert metric in await older.text("/metrics")
    # A call for such a partition gets a retryable error at any proxy.
    lost = next(id for id in ids if str(parse_id(id).partition) in stopped)
    for world in (older, newer):
        status, answer = await world.request("POST", f"/v1/transactions/{lost}/commit", {})
        assert (status, answer["error"]["code"]) == (503, "owner_unavailable")
    assert await logs(newer) == held

    await older.stop()
    await shares(newer, PARTITIONS)
    for id in ids:
        await newer.act(id, "commit", wait="promoted")
    assert ids_of(await newer.visible(topic)) == sorted(ids)
