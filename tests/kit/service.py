"""A running proxy as the service suite sees it, on a Kafka in memory or on a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from tests.kit.http_calls import HttpCalls, Json, listening
from tests.kit.kafka import KafkaHarness
from tests.kit.memory import MemoryHarness
from tests.kit.until import unique, until
from txbroker.config.settings import Settings
from txbroker.contract.json import message_to_json
from txbroker.core.records import Message, Record
from txbroker.door.protocols import Door
from txbroker.errors import UnknownGroup
from txbroker.proxy.process import Proxy, run_proxy
from txbroker.sdk import TransactionalProducer

_PARTITIONS = 2


class FakeEndpoint:
    """Serves check URLs from a list of answers per group; the last repeats. A number is the status
    of an error."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: dict[str, list[Json | int]] = {}
        self.calls: dict[str, list[Json]] = {}
        self.held: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeEndpoint]:
        """Listen until the block is left."""
        app = web.Application()
        app.router.add_post("/check/{group}", self._answer)
        async with listening(app) as self.url:
            yield self

    async def _answer(self, request: web.Request) -> web.Response:
        group = request.match_info["group"]
        asked = await request.json()
        self.calls.setdefault(group, []).append(asked)
        held = self.held.get(group)
        if held is not None:
            await held.wait()
        answers = self.answers[group]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, int):
            return web.Response(status=answer, text="out of\norder")
        return web.json_response({"id": asked.get("id"), **answer})


class Service(HttpCalls):
    """One proxy, its Kafka, and the calls that tests make.

    Args:
        instance: the proxy's name among others on the same Kafka.
        partitions: half partitions to create.
        settings: of the proxy, beside those that tests need.
    """

    def __init__(
        self,
        world: KafkaHarness | MemoryHarness,
        desk: FakeEndpoint,
        instance: str = "one",
        partitions: int = _PARTITIONS,
        **settings: Any,
    ) -> None:
        self.world = world
        self.desk = desk
        self.instance = instance
        self.proxy: Proxy
        self.door: Door
        self._partitions = partitions
        self._settings = settings
        self._listen = "127.0.0.1:0"
        self._stack = AsyncExitStack()
        self._http: aiohttp.ClientSession

    # --- life ----------------------------------------------------------------------------

    async def start(self, *, ready: bool = True) -> None:
        """Run a proxy on a new door, and wait until it can take calls."""
        if isinstance(self.world, KafkaHarness):
            self.door = self.world.closed_door(
                self.instance, partitions=self._partitions, facts_ttl_s=0.2
            )
        else:
            self.door = self.world.closed_door(
                self.instance, half_partitions=self._partitions, facts_ttl_s=0.2
            )
        given: Json = {"listen": self._listen, "instance": self.instance, "check_timeout_s": 2.0}
        settings = Settings(**{**given, **self._settings})
        self.proxy = await self._stack.enter_async_context(run_proxy(self.door, settings))
        self._http = await self._stack.enter_async_context(aiohttp.ClientSession(self.proxy.url))
        self._listen = self.proxy.url.removeprefix("http://")
        if ready:
            await until(self._ready)

    async def _ready(self) -> bool:
        return (await self.get("/readyz"))["ready"] is True

    async def stop(self) -> None:
        await self._stack.aclose()

    async def __aenter__(self) -> Service:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def restart(self) -> None:
        """End the proxy and start another one at the same address, on the same Kafka."""
        await self.stop()
        await self.start()

    async def owned(self) -> frozenset[int]:
        """Return the half partitions that this proxy can answer for."""
        states = (await self.get("/readyz"))["partitions"]
        return frozenset(int(number) for number, text in states.items() if text == "owned")

    async def owns(self, count: int) -> None:
        """Wait until this proxy can answer for `count` half partitions."""

        async def owned() -> bool:
            return len(await self.owned()) == count

        await until(owned)

    # --- calls ---------------------------------------------------------------------------

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, Json]:
        async with self._http.request(method, path, json=body) as response:
            return response.status, await response.json()

    call = HttpCalls.checked

    async def get(self, path: str) -> Json:
        """Return the answer to a GET, with any status."""
        return (await self.request("GET", path))[1]

    async def prepare(self, *messages: Message, group: str = "orders", **fields: Any) -> str:
        """Prepare a new transaction and return its id."""
        status, answer = await self.send(*messages, group=group, **fields)
        assert (status, answer["state"]) == (201, "pending")
        return str(answer["id"])

    async def send(
        self, *messages: Message, group: str = "orders", **fields: Any
    ) -> tuple[int, Json]:
        shown = [message_to_json(message) for message in messages]
        body = {"group": group, "messages": shown, **fields}
        return await self.call("POST", "/v1/transactions", body)

    async def commit(self, id: str, **fields: Any) -> Json:
        """Commit and wait until consumers can see it."""
        return await self.act(id, "commit", wait="promoted", **fields)

    async def state(self, id: str) -> str:
        return str((await self.show(id))["state"])

    async def listed(self, **query: Any) -> list[Json]:
        return list((await self.page(**query))["transactions"])

    async def page(self, **query: Any) -> Json:
        text = "&".join(f"{name}={value}" for name, value in query.items())
        return (await self.call("GET", f"/v1/transactions?{text}"))[1]

    async def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric, 0 where it has none."""
        async with self._http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        for line in lines:
            head, _, value = line.rpartition(" ")
            found, _, inner = head.partition("{")
            if found == f"txbroker_{name}" and wanted <= set(inner.rstrip("}").split(",")):
                return float(value)
        return 0.0

    async def counts(self, name: str, least: float, **labels: str) -> None:
        """Wait until a metric has reached a value."""

        async def counted() -> bool:
            return await self.metric(name, **labels) >= least

        await until(counted)

    # --- groups --------------------------------------------------------------------------

    async def group(self, *answers: Json | int, **policy: Any) -> str:
        """Register a group whose endpoint gives these answers; return its name. It is asked at
        once, then ten times a second, and each call may take two seconds."""
        name = unique("group")
        self.desk.answers[name] = list(answers)
        given = {
            "check_url": f"{self.desk.url}/check/{name}",
            "check_after_s": 0,
            "check_interval_s": 0.1,
            **policy,
        }
        await self.call("PUT", f"/v1/groups/{name}", given)
        return name

    async def knows(self, group: str) -> None:
        """Wait until a group that was registered through another proxy is known to this one."""

        async def there() -> bool:
            try:
                await self.call("GET", f"/v1/groups/{group}")
            except UnknownGroup:
                return False
            return True

        await until(there)

    def asked(self, group: str) -> list[Json]:
        return self.desk.calls.get(group, [])

    async def asked_times(self, group: str, count: int) -> list[Json]:
        """Wait until a group's endpoint has received `count` check-backs."""

        await until(lambda: len(self.asked(group)) >= count)
        return self.asked(group)

    def producer(self, group: str, **options: Any) -> TransactionalProducer:
        return TransactionalProducer(self.proxy.url, group=group, **options)

    # --- topics --------------------------------------------------------------------------

    async def topic(self, partitions: int = 1, **configs: str) -> str:
        """Create a topic of the test's own."""
        return await self.world.create_topic(unique("topic"), partitions, **configs)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic, and drop the proxy's cached facts about it."""
        await self.world.delete_topic(topic)
        self.door.targets.forget(topic)

    async def set_max_message_bytes(self, topic: str, size: int) -> None:
        await self.world.set_max_message_bytes(topic, size)

    async def create_again(self, topic: str) -> None:
        """Create a deleted topic again, by its full name."""
        await self.world.create_topic(topic.removeprefix(self.world.name("")))

    async def visible(self, topic: str, partition: int = 0) -> list[Record]:
        return await self.world.visible(topic, partition)

    async def sees(self, topic: str, count: int) -> list[Record]:
        """Wait until a `read_committed` consumer sees at least `count` records; return them."""

        async def seen() -> list[Record] | None:
            records = await self.visible(topic)
            return records if len(records) >= count else None

        return await until(seen)

    async def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        return [record.value for record in await self.visible(topic, partition)]


class HttpClient:
    """A client without the SDK."""

    def __init__(self, service: Service, group: str) -> None:
        self.group = group
        self._service = service

    async def prepare(self, *messages: Message, **options: Any) -> str:
        return await self._service.prepare(*messages, group=self.group, **options)

    async def commit(self, id: str, messages: Iterable[Message] | None = None) -> str:
        fields: Json = {"group": self.group}
        if messages is not None:
            fields["messages"] = [message_to_json(message) for message in messages]
        return str((await self._service.commit(id, **fields))["state"])

    async def rollback(self, id: str) -> str:
        answer = await self._service.act(id, "rollback", group=self.group)
        return str(answer["state"])


class SdkClient:
    """The same through the SDK's session."""

    def __init__(self, producer: TransactionalProducer) -> None:
        self.group = producer.group
        self._producer = producer

    async def prepare(self, *messages: Message, **options: Any) -> str:
        return await self._producer.prepare(*messages, **options)

    async def commit(self, id: str, messages: Iterable[Message] | None = None) -> str:
        return str((await self._producer.commit(id, messages, wait="promoted")).state)

    async def rollback(self, id: str) -> str:
        return str((await self._producer.rollback(id)).state)


Client = HttpClient | SdkClient
