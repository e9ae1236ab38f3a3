"""Copies of disks, as in docs/operate/backup-restore.md, on a real Kafka."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.kit.kafka import KafkaHarness
from tests.kit.service import FakeEndpoint, Service
from txbroker.core.records import Message
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import NotFound

pytestmark = pytest.mark.long

TOPIC = "volumes"


class Restored(Service):
    """A proxy with one half partition, in any known state."""

    async def partition(self) -> str:
        """Return how the half partition stands."""
        return str((await self.get("/readyz"))["partitions"]["0"])

    async def _ready(self) -> bool:
        return not (await self.partition()).startswith(("claiming", "replaying", "none"))


@asynccontextmanager
async def running(folder: Path, desk: FakeEndpoint, prefix: str) -> AsyncIterator[Restored]:
    """Run Kafka on a folder, and a proxy of one installation on it, until the block is left."""
    kafka = EmbeddedKafka(folder)
    await asyncio.to_thread(kafka.start)
    try:
        world = KafkaHarness(kafka.bootstrap)
        world.prefix = prefix
        service = Restored(world, desk, partitions=1)
        await service.start()
        try:
            yield service
        finally:
            await service.stop()
            await world.close()
    finally:
        await asyncio.to_thread(kafka.stop)


def logs_of(folder: Path, topic: str) -> list[Path]:
    """Return the folders of a topic's partitions."""
    found = [path for path in folder.rglob(f"{topic}-[0-9]*") if path.is_dir()]
    assert found, f"{folder} has no {topic}"
    return found


def put_back(backup: Path, folder: Path, topic: str) -> None:
    """Put one topic's partitions back, and leave everything else as it is."""
    for path in logs_of(backup, topic):
        here = folder / path.relative_to(backup)
        shutil.rmtree(here)
        shutil.copytree(path, here)


async def test_volume_snapshots_of_one_and_two_moments(tmp_path: Path) -> None:
    folder, backup, second = tmp_path / "kafka", tmp_path / "backup", tmp_path / "second"
    prefix = "volumes"
    async with FakeEndpoint().serve() as desk:
        async with running(folder, desk, prefix) as service:
            topic = await service.world.create_topic(TOPIC)
            group = await service.group({"decision": "commit"}, check_after_s=600)
            await service.commit(await service.prepare(Message(topic, None, b"before")))
            left = await service.prepare(Message(topic, None, b"open"), group=group)
        shutil.copytree(folder, backup)

        async with running(folder, desk, prefix) as service:
            await service.commit(left, group=group)
            late = await service.prepare(Message(topic, None, b"after"))
            await service.commit(late)
            assert await service.values(topic) == [b"before", b"open", b"after"]
        shutil.copytree(folder, second)

        # Only the checkpoint is older: later promotions are repeated.
        put_back(backup, folder, f"{prefix}.checkpoint")
        async with running(folder, desk, prefix) as service:
            await service.reaches(late, "promoted")
            seen = await service.values(topic)
            assert sorted(seen, key=str) == sorted(
                [b"before", b"open", b"after", b"open", b"after"], key=str
            )

        # Half alone is older: nothing is promoted any more.
        shutil.rmtree(folder)
        shutil.copytree(second, folder)
        put_back(backup, folder, f"{prefix}.half")
        async with running(folder, desk, prefix) as service:
            assert (await service.partition()).startswith("truncated")

        # All disks as of one moment.
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)
        async with running(folder, desk, prefix) as service:
            assert await service.values(topic) == [b"before"]
            assert await service.state(left) == "pending"
            with pytest.raises(NotFound):
                await service.show(late)
            await service.act(left, "check")
            await service.reaches(left, "promoted")
            assert await service.values(topic) == [b"before", b"open"]
