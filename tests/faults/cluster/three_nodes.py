"""A Kafka of three nodes (KRaft, broker and controller in one) on this machine, whose every link
goes through a relay: from each client to each broker, and from each broker to each other."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ClusterMetadata
from confluent_kafka.cimpl import NewTopic

from tests.faults.cluster.links import Link, Relay
from tests.kit.proxies import die_with_parent
from tests.kit.until import free_ports
from txbroker.embedded.datadir import new_cluster_id, server_properties
from txbroker.embedded.jars import ensure_jars
from txbroker.embedded.java import find_java, java_flags
from txbroker.embedded.server import DEFAULT_VERSION, is_ready

NODES = (1, 2, 3)
REPLICATION, MIN_ISR = 3, 2
HEAP_MB = 256
START_S = 300.0
STOP_S = 40.0
_POLL_S = 0.2
_HOST = "127.0.0.1"

_CLUSTER = {
    "default.replication.factor": str(REPLICATION),
    "min.insync.replicas": str(MIN_ISR),
    "offsets.topic.replication.factor": str(REPLICATION),
    "transaction.state.log.replication.factor": str(REPLICATION),
    "transaction.state.log.min.isr": str(MIN_ISR),
    "share.coordinator.state.topic.replication.factor": str(REPLICATION),
    "share.coordinator.state.topic.min.isr": str(MIN_ISR),
    "unclean.leader.election.enable": "false",
    # All share two cores: a node that waits for one must not count as failed.
    "broker.session.timeout.ms": "6000",
    "broker.heartbeat.interval.ms": "1000",
    "controller.quorum.fetch.timeout.ms": "4000",
    "controller.quorum.election.timeout.ms": "2000",
    "num.network.threads": "1",
    "num.io.threads": "2",
}


class Node:
    """One of the three.

    Args:
        folder: for its output and settings.
        data: for its data; may be a small disk.
    """

    def __init__(self, number: int, folder: Path, data: Path, command: Sequence[str]) -> None:
        self.number = number
        self.data = data
        self.port = 0
        self._folder = folder
        self._command = list(command)
        self._cluster_id = ""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """Whether its process is there, even if it hangs."""
        return self._process is not None and self._process.returncode is None

    async def format(self, cluster_id: str, properties: str) -> None:
        self._cluster_id = cluster_id
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "server.properties").write_text(properties, encoding="ascii")
        tool = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", "server.properties"]
        process = await self._spawn(tool)
        assert await process.wait() == 0, self.output()

    async def launch(self) -> None:
        """Start it, without waiting for anything."""
        assert not self.running
        self._process = await self._spawn(["kafka.Kafka", "server.properties"])

    async def ready(self) -> None:
        end = time.monotonic() + START_S
        while not await asyncio.to_thread(is_ready, self.port, self._cluster_id, 2.0):
            assert self.running, self.output()
            assert time.monotonic() < end, f"node {self.number} does not start\n{self.output()}"
            await asyncio.sleep(_POLL_S)

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Let it end in order; by force after a while."""
        await self._end(signal.SIGTERM)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def ended(self, timeout_s: float) -> bool:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), timeout_s)
        return not self.running

    def knows(self, topic: str) -> bool:
        """Whether it, and not only some other broker, has heard of a topic; blocks."""
        return topic in self._metadata().topics

    def led_by(self, topic: str) -> int:
        """The node that, as far as it has heard, leads a topic's first partition; -1: none, or the
        topic is not known; blocks."""
        found = self._metadata().topics.get(topic)
        return int(found.partitions[0].leader) if found is not None and found.partitions else -1

    def _metadata(self) -> ClusterMetadata:
        # What a new client asks first can only go to the one broker that it has heard of.
        admin = AdminClient({"bootstrap.servers": f"{_HOST}:{self.port}", "log_level": 0})
        return admin.list_topics(timeout=START_S)

    def output(self) -> str:
        lines = (self._folder / "kafka.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-20:])

    def _signal(self, how: signal.Signals) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(how)

    async def _end(self, how: signal.Signals) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _spawn(self, arguments: Sequence[str]) -> asyncio.subprocess.Process:
        with (self._folder / "kafka.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self._command,
                *arguments,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )


class SmallDisk:
    """A dedicated file system in memory that can be filled. Needs root."""

    def __init__(self, folder: Path, size_mb: int) -> None:
        self.folder = folder
        self._filler = folder / "filler"
        folder.mkdir(parents=True)
        options = ["-t", "tmpfs", "-o", f"size={size_mb}m", "txbroker-test", str(folder)]
        self.mounted = (
            os.geteuid() == 0
            and subprocess.run(["mount", *options], capture_output=True, check=False).returncode
            == 0
        )

    def fill(self) -> None:
        block = bytes(1 << 20)
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                if file.write(block) < len(block):
                    block = bytes(1 << 12)

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)


class ThreeNodes:
    """The whole.

    Args:
        folder: for everything; node 3 has a small disk in it where root allows one.
        clients: names of clients with their own links to the brokers.
        seed: of the links' random choices.
        disk_mb: how large the small disk is.
    """

    def __init__(
        self,
        folder: Path,
        clients: Sequence[str],
        *,
        seed: int = 0,
        disk_mb: int = 1024,
        version: str = DEFAULT_VERSION,
    ) -> None:
        self._folder = folder
        self._clients = list(clients)
        jars = ensure_jars(version)
        command = [str(find_java().path), "-cp", os.pathsep.join(map(str, jars))]
        command += java_flags(HEAP_MB)
        self.disk = SmallDisk(folder / "small", disk_mb)
        data = {number: folder / f"data-{number}" for number in NODES}
        if self.disk.mounted:
            data[NODES[-1]] = self.disk.folder / "data"
        self.nodes = {
            number: Node(number, folder / f"node-{number}", data[number], command)
            for number in NODES
        }
        self.links: dict[tuple[str, int], Link] = {}
        for source in (*self._clients, *map(str, NODES), "0"):
            asked: Counter[bytes] = Counter()
            for number in NODES:
                fate = random.Random(f"{seed}/{source}/{number}")
                self.links[source, number] = Link(f"{source}>{number}", fate, asked)
        self._relays: dict[tuple[int, str], Relay] = {}

    # --- life ----------------------------------------------------------------------------

    async def start(self) -> None:
        for number in NODES:
            for name in ("INTERNAL", "CONTROLLER", *self._listeners):
                relay = Relay(functools.partial(self._link_of, number, name))
                await relay.start()
                self._relays[number, name] = relay
        cluster_id = new_cluster_id()
        async with asyncio.TaskGroup() as group:
            for number, node in self.nodes.items():
                group.create_task(node.format(cluster_id, self._properties(number)))
        for node in self.nodes.values():
            await node.launch()
        for node in self.nodes.values():
            await node.ready()

    async def kill(self) -> None:
        for node in self.nodes.values():
            await node.kill()

    def keep(self, folder: Path) -> None:
        for number, node in self.nodes.items():
            shutil.copytree(node.data, folder / f"node-{number}")

    async def close(self) -> None:
        await self.kill()
        for relay in self._relays.values():
            await relay.close()
        self.disk.close()
        for node in self.nodes.values():
            shutil.rmtree(node.data, ignore_errors=True)

    async def whole(self, timeout_s: float = START_S) -> None:
        """Wait until every partition has all its replicas in step."""
        end = time.monotonic() + timeout_s
        while lagging := await asyncio.to_thread(self.lagging):
            assert time.monotonic() < end, f"not in sync: {lagging[:5]}"
            await asyncio.sleep(_POLL_S)

    def lagging(self) -> list[str]:
        """Return the partitions without all replicas in sync; "?" without an answer."""
        try:
            found = self._admin.list_topics(timeout=5)
        except KafkaException:
            return ["?"]
        return [
            f"{name}-{number}"
            for name, topic in found.topics.items()
            for number, part in topic.partitions.items()
            if len(part.isrs) < REPLICATION or part.leader < 0
        ]

    # --- places --------------------------------------------------------------------------

    @property
    def bootstrap(self) -> str:
        """For the test itself: past all relays."""
        return ",".join(f"{_HOST}:{node.port}" for node in self.nodes.values())

    def bootstrap_of(self, client: str) -> str:
        """For a client: through its own links."""
        name = self._listener(client)
        return ",".join(f"{_HOST}:{self._relays[number, name].port}" for number in NODES)

    def links_of(self, source: str) -> list[Link]:
        """From a client, or a node by its number, to all brokers but itself."""
        return [self.links[source, number] for number in NODES if str(number) != source]

    def links_to(self, number: int) -> list[Link]:
        """From the other nodes to this one."""
        return [self.links[str(other), number] for other in NODES if other != number]

    # --- topics: these block, and need the relays to go on meanwhile ----------------------

    def leader(self, topic: str, partition: int) -> int:
        """The node that leads a partition; -1: none."""
        return int(self._admin.list_topics(topic, 5).topics[topic].partitions[partition].leader)

    def create(self, name: str, partitions: int = 1, **configs: str) -> str:
        """Create a topic with all replicas, and wait until every broker knows it; in configs `_`
        stands for `.`."""
        config = {key.replace("_", "."): value for key, value in configs.items()}
        config.setdefault("retention.ms", "-1")
        new = NewTopic(name, partitions, REPLICATION, config=config)
        self._admin.create_topics([new])[name].result(30)
        end = time.monotonic() + START_S
        # Created is decided by the controller; the brokers hear of it a little later.
        for node in self.nodes.values():
            while not node.knows(name):
                assert time.monotonic() < end, f"node {node.number} does not hear of {name}"
        return name

    def delete_records(self, before: Mapping[tuple[str, int], int]) -> None:
        """Delete what lies before these offsets.

        Raises:
            KafkaException: a request failed.
        """
        parts = [TopicPartition(topic, number, to) for (topic, number), to in before.items()]
        for done in self._admin.delete_records(parts, request_timeout=10).values():
            done.result(15)

    @functools.cached_property
    def _admin(self) -> AdminClient:
        # Results are lost with the client that they come to.
        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

    # --- settings ------------------------------------------------------------------------

    @property
    def _listeners(self) -> list[str]:
        return [self._listener(client) for client in self._clients]

    def _listener(self, client: str) -> str:
        return f"VIA{self._clients.index(client)}"

    def _link_of(self, number: int, listener: str, source: int) -> Link:
        if listener.startswith("VIA"):
            return self.links[self._clients[int(listener.removeprefix("VIA"))], number]
        return self.links[str(source if source in NODES else 0), number]

    def _properties(self, number: int) -> str:
        names = ["PLAINTEXT", "INTERNAL", "CONTROLLER", *self._listeners]
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.nodes[number].port = ports["PLAINTEXT"]
        reached = {"PLAINTEXT": ports["PLAINTEXT"]}
        for name in names[1:]:
            relay = self._relays[number, name]
            relay.target_port = ports[name]
            reached[name] = relay.port
        del reached["CONTROLLER"]
        voters = [f"{n}@{_HOST}:{self._relays[n, 'CONTROLLER'].port}" for n in NODES]
        extra = {
            **_CLUSTER,
            "node.id": str(number),
            "listeners": ",".join(f"{name}://{_HOST}:{port}" for name, port in ports.items()),
            "advertised.listeners": ",".join(f"{n}://{_HOST}:{p}" for n, p in reached.items()),
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in names),
            "inter.broker.listener.name": "INTERNAL",
            "controller.quorum.voters": ",".join(voters),
        }
        data = str(self.nodes[number].data)
        return server_properties(data, ports["PLAINTEXT"], ports["CONTROLLER"], extra)
