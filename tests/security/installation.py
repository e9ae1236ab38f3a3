"""An installation with two teams, a viewer and an operator, on a Kafka in memory."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from tests.kit.memory import MemoryHarness
from tests.kit.until import until
from tests.kit.ws_client import Producer
from txbroker.config.settings import load_settings
from txbroker.contract import frames as wire
from txbroker.principals import Role, digest_of, format_principal
from txbroker.proxy.process import Proxy, run_proxy

Json = dict[str, Any]

TOPICS = ("shop.orders", "bank.payments", "closed")
TOKENS = {
    name: f"the-token-of-{name}"
    for name in ("shop", "bank", "viewer", "operator", "expired", "revoked")
}
PEER_SECRET = "the-secret-of-the-proxies"
PARTITIONS = 4


def table(name: str, role: Role, *, until: datetime | None = None, **patterns: list[str]) -> str:
    """Return a principal's table with the token that `TOKENS` has for it."""
    return format_principal(
        name,
        role,
        digest=digest_of(TOKENS[name]),
        certificates=(),
        patterns=patterns,
        expires=until,
    )


TABLES = {
    "shop": table("shop", Role.PRODUCER, groups=["shop", "shop-*"], topics=["shop.*"]),
    "bank": table(
        "bank",
        Role.PRODUCER,
        groups=["bank*"],
        deny_groups=["bank-closed"],
        topics=["bank.*", "closed"],
        deny_topics=["closed"],
    ),
    "viewer": table("viewer", Role.VIEWER),
    "operator": table("operator", Role.OPERATOR),
    "expired": table(
        "expired", Role.OPERATOR, until=datetime.fromisoformat("2020-01-01T00:00:00+00:00")
    ),
    "revoked": table("revoked", Role.OPERATOR),
}


class Answer(NamedTuple):
    """An answer."""

    status: int
    body: Any
    headers: dict[str, str]

    @property
    def code(self) -> str:
        """The error's code, "" for none."""
        return str(self.body["error"]["code"]) if "error" in (self.body or {}) else ""

    @property
    def outcome(self) -> str:
        """Status and code as the table of results shows them."""
        return f"{self.status} {self.code}".strip()


class Installation:
    """Proxies that share everything, and the calls that tests make."""

    def __init__(self, world: MemoryHarness, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self.principals = folder / "principals.toml"
        self.proxies: list[Proxy] = []
        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        self._stack = AsyncExitStack()
        self._numbers = 0

    # --- life ----------------------------------------------------------------------------

    async def start(self, count: int, **settings: Any) -> None:
        """Start `count` proxies and wait until each of them owns something."""
        self.allow(*TABLES)
        secret = self.folder / "peer-secret"
        secret.write_text(PEER_SECRET)
        secret.chmod(0o600)
        for topic in TOPICS:
            self.world.kafka.create_topic(topic, 2)
        given = {
            "listen": "127.0.0.1:0",
            "principals_file": self.principals,
            "peer_secret_file": secret,
            **settings,
        }
        for number in range(count):
            instance = f"proxy-{number}"
            door = self.world.closed_door(instance, half_partitions=PARTITIONS, facts_ttl_s=0.2)
            loaded = load_settings({"instance": instance, **given}, environ={})
            proxy = await self._stack.enter_async_context(run_proxy(door, loaded))
            self.proxies.append(proxy)
        await until(self._shared)

    async def _shared(self) -> bool:
        views = {proxy.broker.owners() for proxy in self.proxies}
        return len(views) == 1 and set(views.pop()) == {proxy.url for proxy in self.proxies}

    async def close(self) -> None:
        await self._http.close()
        await self._stack.aclose()

    def allow(self, *names: str) -> None:
        """Replace the principals file by one with these principals."""
        new = self.principals.with_suffix(".new")
        new.write_text("\n".join(TABLES[name] for name in names))
        new.replace(self.principals)

    # --- calls ---------------------------------------------------------------------------

    @property
    def urls(self) -> list[str]:
        return [proxy.url for proxy in self.proxies]

    async def call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        by: str = "",
        at: str = "",
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Call a proxy.

        Args:
            by: the principal whose token goes along, "" for none.
            at: its URL, "" for the first one's.
        """
        sent = dict(headers or {})
        if by:
            sent["authorization"] = f"Bearer {TOKENS[by]}"
        async with self._http.request(
            method, (at or self.urls[0]) + path, json=body, headers=sent
        ) as answer:
            raw = await answer.read()
            json = answer.content_type == "application/json"
            content = await answer.json() if json else raw.decode(errors="replace")
            return Answer(answer.status, content, {k.lower(): v for k, v in answer.headers.items()})

    async def get(self, path: str, **options: Any) -> Answer:
        """Read by GET, as `call` does."""
        return await self.call("GET", path, **options)

    async def post(self, path: str, body: Json, **options: Any) -> Answer:
        """Change by POST, as `call` does."""
        return await self.call("POST", path, body, **options)

    async def put(self, path: str, body: Json, **options: Any) -> Answer:
        """Change by PUT, as `call` does."""
        return await self.call("PUT", path, body, **options)

    def prepare_body(self, group: str, topic: str = "", **fields: Any) -> Json:
        """Return a prepare with a key that no other has, so that ids lie in every partition."""
        self._numbers += 1
        key = str(self._numbers)
        value = base64.b64encode(b"the body of " + group.encode()).decode()
        topic = topic or ("shop.orders" if group.startswith("shop") else "bank.payments")
        return {
            "group": group,
            "messages": [{"topic": topic, "key": key, "value_base64": value}],
            **fields,
        }

    async def prepared(self, team: str, **fields: Any) -> str:
        """Prepare a transaction of a team and return its id."""
        body = self.prepare_body(team) | fields
        answer = await self.call("POST", "/v1/transactions", body, by=team)
        assert answer.status == 201, answer
        return str(answer.body["id"])

    async def view(self, id: str, *, bodies: bool = False) -> Json:
        """Return a transaction as the operator sees it."""
        path = f"/v1/transactions/{id}{'?bodies=true' if bodies else ''}"
        answer = await self.call("GET", path, by="operator")
        assert answer.status == 200, answer
        return dict(answer.body)

    async def reaches(self, id: str, state: str) -> None:
        """Wait until a transaction is in a state."""

        async def there() -> bool:
            return bool((await self.view(id))["state"] == state)

        await until(there)

    @asynccontextmanager
    async def socket(self, by: str, at: str = "") -> AsyncIterator[Socket]:
        """Open a session's connection as a principal, without a hello."""
        headers = {"authorization": f"Bearer {TOKENS[by]}"} if by else {}
        url = (at or self.urls[0]) + "/v1/session"
        async with self._http.ws_connect(url, headers=headers) as socket:
            yield Socket(socket)


class Socket(Producer):
    """The producer's side of a session, without clocks and owners."""

    async def hello(self, group: str, instance: str = "worker") -> wire.FromProxy:
        return await self.ask(wire.Hello(wire.SESSION_VERSION, group, instance))

    async def ask(self, operation: wire.FromProducer) -> wire.FromProxy:
        """Send an operation and return the next answer."""
        await self.send(operation)
        return await self.next()

    async def next(self) -> wire.FromProxy:
        """Return the next operation that is no clock and no owners."""
        while isinstance(operation := await super().next(), wire.ClockUpdate | wire.Owners):
            pass
        return operation

    async def ended(self) -> bool:
        """Wait until the proxy has ended the connection."""
        while True:
            message = await asyncio.wait_for(self.socket.receive(), 10)
            if message.type is not aiohttp.WSMsgType.BINARY:
                return True
