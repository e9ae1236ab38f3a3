"""Topics restored to different moments, as in docs/operate/backup-restore.md.

A partition of a topic that is restored from an older backup ends earlier. One that could not be
restored at all is recreated empty.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.kit.memory import MemoryHarness
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from txbroker.core.records import Message
from txbroker.errors import NotFound, RequestError

OWN = ("half", "op", "checkpoint", "parked")


class Installation(Service):
    """One proxy with one half partition, whose topics can be put back to how they were."""

    def __init__(self, desk: FakeEndpoint) -> None:
        super().__init__(MemoryHarness(), desk, partitions=1)
        self._target = ""

    async def begin(self) -> str:
        """Start, and return a target topic."""
        await self.start()
        self._target = await self.topic()
        return self._target

    def ends(self) -> dict[str, int]:
        """Return where every topic ends now: what a backup of this moment holds."""
        names = [self.world.name(topic) for topic in OWN]
        return {name: self._log(name).end for name in [*names, self._target]}

    def restore(self, backup: dict[str, int], *topics: str) -> None:
        """Put topics back to a backup; `target` is the target topic."""
        for topic in topics:
            name = self._target if topic == "target" else self.world.name(topic)
            self.kafka.truncate(name, end=backup[name])

    def lose(self, topic: str) -> None:
        """Recreate a topic, as `topics apply` does for a missing one."""
        self.kafka.recreate_topic(self.world.name(topic))

    @property
    def kafka(self) -> Any:
        """The Kafka in memory."""
        return self.world.kafka  # type: ignore[union-attr]

    def _log(self, name: str) -> Any:
        return self.kafka.topics[name].partitions[0]

    async def _ready(self) -> bool:
        """Return whether the state of its partition is known."""
        state = (await self.get("/readyz"))["partitions"]["0"]
        return not state.startswith(("claiming", "replaying", "none"))

    async def partition(self) -> str:
        """Return how its partition stands."""
        return str((await self.get("/readyz"))["partitions"]["0"])


@pytest.fixture(scope="module")
async def desk() -> AsyncIterator[FakeEndpoint]:
    async with FakeEndpoint().serve() as running:
        yield running


@pytest.fixture
async def service(desk: FakeEndpoint) -> AsyncIterator[Installation]:
    made = Installation(desk)
    yield made
    await made.stop()
    await made.world.close()


async def committed(service: Service, topic: str, value: bytes) -> str:
    id = await service.prepare(Message(topic, None, value))
    await service.commit(id)
    return id


# --- all of one moment -----------------------------------------------------------------------


async def test_consistent_backup_restores_its_moment(service: Installation) -> None:
    topic = await service.begin()
    group = await service.group({"decision": "commit"}, check_after_s=600)
    await committed(service, topic, b"before")
    open_then = await service.prepare(Message(topic, None, b"open then"), group=group)
    backup = service.ends()
    await service.commit(open_then, group=group)
    later = await committed(service, topic, b"after")
    await service.stop()
    service.restore(backup, *OWN, "target")
    await service.start()
    assert await service.partition() == "owned"
    assert await service.values(topic) == [b"before"]
    # Undecided again: the group is asked again, and its database still knows.
    assert await service.state(open_then) == "pending"
    await service.act(open_then, "check")
    await service.reaches(open_then, "promoted")
    assert await service.values(topic) == [b"before", b"open then"]
    # Transactions after the backup are lost, though acknowledged.
    with pytest.raises(NotFound):
        await service.show(later)


# --- topics of different moments -------------------------------------------------------------


@pytest.mark.parametrize("older", ["half", "op"])
async def test_log_older_than_checkpoint_stops_partition(service: Installation, older: str) -> None:
    topic = await service.begin()
    backup = service.ends()
    await committed(service, topic, b"once")
    await service.stop()
    service.restore(backup, older)
    await service.start()
    assert (await service.partition()).startswith("truncated")
    assert await service.values(topic) == [b"once"]


async def test_older_checkpoint_promotes_again(service: Installation) -> None:
    """txbroker's topics do not show it; the audit finds the duplicates."""
    topic = await service.begin()
    await committed(service, topic, b"before")
    backup = service.ends()
    await committed(service, topic, b"since")
    await service.stop()
    service.restore(backup, "checkpoint")
    await service.start()
    assert await service.partition() == "owned"
    await until(lambda: _seen(service, topic, [b"before", b"since", b"since"]))


async def test_older_targets_stay_unchanged(service: Installation) -> None:
    topic = await service.begin()
    backup = service.ends()
    id = await committed(service, topic, b"promoted")
    await service.stop()
    service.restore(backup, "target")
    await service.start()
    assert await service.state(id) == "promoted"
    assert await service.values(topic) == []
    await committed(service, topic, b"new")
    assert await service.values(topic) == [b"new"]


async def test_newer_targets_receive_duplicates(service: Installation) -> None:
    topic = await service.begin()
    group = await service.group({"decision": "commit"}, check_after_s=600)
    id = await service.prepare(Message(topic, None, b"twice"), group=group)
    backup = service.ends()
    await service.commit(id, group=group)
    await service.stop()
    service.restore(backup, *OWN)
    await service.start()
    await service.act(id, "check")
    await service.reaches(id, "promoted")
    assert await service.values(topic) == [b"twice", b"twice"]


# --- topics that are gone --------------------------------------------------------------------


async def test_lost_checkpoint_stops_partition(service: Installation) -> None:
    topic = await service.begin()
    await committed(service, topic, b"once")
    await service.stop()
    service.lose("checkpoint")
    for _ in range(2):
        await service.start()
        assert (await service.partition()).startswith("truncated: the checkpoint topic")
        await service.stop()
    assert await service.values(topic) == [b"once"]
    await service.start()


async def test_lost_groups_are_registered_again(service: Installation) -> None:
    topic = await service.begin()
    group = await service.group({"decision": "commit"}, check_after_s=600)
    id = await service.prepare(Message(topic, None, b"v"), group=group)
    await service.stop()
    service.lose("groups")
    await service.start()
    assert await service.partition() == "owned"
    with pytest.raises(RequestError, match="not registered"):
        await service.call("GET", f"/v1/groups/{group}")
    await service.call(
        "PUT", f"/v1/groups/{group}", {"check_url": f"{service.desk.url}/check/{group}"}
    )
    await service.act(id, "check")
    await service.reaches(id, "promoted")


async def test_lost_parked_topic_keeps_messages_still_in_half(service: Installation) -> None:
    topic = await service.begin()
    group = await service.group({"decision": "unknown"}, attempts_max=1)
    id = await service.prepare(Message(topic, None, b"kept"), group=group)
    await service.reaches(id, "parked")
    await service.stop()
    service.lose("parked")
    await service.start()
    assert await service.state(id) == "parked"
    await service.commit(id, group=group)
    assert await service.values(topic) == [b"kept"]


async def test_lost_parked_topic_reports_deleted_messages_lost(service: Installation) -> None:
    topic = await service.begin()
    group = await service.group({"decision": "unknown"}, attempts_max=1)
    id = await service.prepare(Message(topic, None, b"gone"), group=group)
    await service.reaches(id, "parked")
    await until(lambda: _has(service, "snapshot_entries", 1))
    await service.stop()
    service.lose("parked")
    service.kafka.truncate(service.world.name("half"), before=1)
    await service.start()
    assert await service.partition() == "owned"
    assert await service.metric("lost_undecided_total") == 1
    assert await service.state(id) == "parked"


async def test_lost_parked_topic_stops_partition_with_refused(service: Installation) -> None:
    """Only its copy shows that a refused transaction was not promoted."""
    topic = await service.begin()
    id = await service.prepare(Message(topic, None, b"refused"))
    await service.delete_topic(topic)
    await service.act(id, "commit")
    await service.reaches(id, "refused")
    await service.stop()
    service.lose("parked")
    await service.start()
    assert (await service.partition()).startswith("truncated: the parked topic")


async def _has(service: Service, metric: str, value: float) -> bool:
    return await service.metric(metric) == value


async def _seen(service: Service, topic: str, values: list[bytes]) -> bool:
    return await service.values(topic) == values
