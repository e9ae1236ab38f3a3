"""The services of `docs/how-to/use-other-languages.md` settle every order, crashes included."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.kit.http_calls import listening
from tests.kit.secret_files import secret_file
from tests.kit.until import free_ports, until
from txbroker.contract.signing import secret_key, sign
from txbroker.testing.broker import InMemoryBroker

PAGE = Path(__file__).parents[2] / "docs/how-to/use-other-languages.md"
SECRET = "whsec_c2VjcmV0IG9mIHRoZSBvcmRlcnM="
CHECKS_S = 60.0
END_S = 10.0
LANGUAGES = {
    "go": ("orders.go", ["go", "build", "-o", "orders", "orders.go"], ["./orders"]),
    "js": ("orders.mjs", ["node", "--check", "orders.mjs"], ["node", "orders.mjs"]),
    "java": ("Orders.java", ["javac", "-Xlint:all", "-Werror", "Orders.java"], ["java", "Orders"]),
}
Hook = Callable[[], Awaitable[None]]


class Shop:
    """A service of the page, which can be killed, and the part between it and the proxy.

    Attributes:
        on_prepared: called once before the answer to a prepare is passed on.
        on_decision: called once before a decision is passed on.
    """

    def __init__(self, command: list[str], folder: Path, table: Path, proxy: str) -> None:
        self.url = ""
        self.on_prepared: Hook | None = None
        self.on_decision: Hook | None = None
        self._command = command
        self._folder = folder
        self._table = table
        self._proxy = proxy
        self._port = free_ports(1)[0]
        self._process: asyncio.subprocess.Process | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Shop]:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._pass_on)
        async with listening(app) as url, aiohttp.ClientSession() as self._http:
            self.url, self._relay = f"http://127.0.0.1:{self._port}", url
            try:
                await self.start()
                yield self
            finally:
                await self.kill()

    async def start(self) -> None:
        environment = {"TXBROKER_URL": self._relay, "CHECK_SECRET": SECRET}
        environment |= {"TABLE": str(self._table), "PORT": str(self._port)}
        self._process = await asyncio.create_subprocess_exec(
            *self._command, cwd=self._folder, env={**os.environ, **environment}
        )

        async def answers() -> bool:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.close()
                return True
            return False

        await until(answers)

    def rows(self) -> list[str]:
        return sorted(path.read_text() for path in self._table.iterdir())

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
            await asyncio.wait_for(self._process.wait(), END_S)

    async def post(self, path: str, body: bytes = b"", **headers: str) -> int:
        async with self._http.post(self.url + path, data=body, headers=headers) as response:
            return response.status

    async def _pass_on(self, request: web.Request) -> web.Response:
        body, path = await request.read(), request.match_info["path"]
        if path.endswith(("/commit", "/rollback")) and self.on_decision is not None:
            hook, self.on_decision = self.on_decision, None
            await hook()
            raise web.HTTPBadGateway
        headers = {"content-type": request.content_type}
        async with self._http.post(f"{self._proxy}/{path}", data=body, headers=headers) as response:
            answer = web.Response(
                status=response.status, body=await response.read(), content_type="application/json"
            )
        if path == "v1/transactions" and self.on_prepared is not None:
            hook, self.on_prepared = self.on_prepared, None
            await hook()
        return answer


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("go", marks=pytest.mark.needs_tool("go")),
        pytest.param("js", marks=pytest.mark.needs_tool("node")),
        pytest.param("java", marks=pytest.mark.needs_tool("javac")),
    ],
)
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Path]:
    """The command of a service and its folder, compiled from the page."""
    name, compile_it, command = LANGUAGES[request.param]
    folder = tmp_path_factory.mktemp("service")
    (code,) = re.findall(rf"^```{request.param}\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (folder / name).write_text(code)
    subprocess.run(compile_it, cwd=folder, check=True, timeout=100)
    return command, folder


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """The folder with the group's secret."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    secret_file(folder / "orders", SECRET)
    return folder


@pytest.fixture
def broker(secrets: Path) -> Iterator[InMemoryBroker]:
    """A txbroker that finds the secret."""
    with InMemoryBroker(secrets_dir=secrets) as running:
        yield running


@pytest.fixture
async def shop(
    service: tuple[list[str], Path], broker: InMemoryBroker, secrets: Path, tmp_path: Path
) -> AsyncIterator[Shop]:
    """The running service, registered with its check URL, which answers test calls."""
    table = tmp_path / "table"
    table.mkdir()
    async with Shop(*service, table, broker.url).running() as running:
        group = {"check_url": f"{running.url}/txbroker/check"}
        group["secret_ref"] = f"file:{secrets}/orders"
        async with aiohttp.ClientSession(broker.url, raise_for_status=True) as http:
            await http.put("/v1/groups/orders", json=group)
            async with http.post("/v1/groups/orders/test", json={}) as answer:
                tested = await answer.json()
                assert (tested["answered"], tested["status"]) == (True, 200), tested
        yield running


async def test_service_settles_every_order(shop: Shop, broker: InMemoryBroker) -> None:
    async def visible() -> list[tuple[bytes | None, bytes | None]]:
        await broker.async_advance(CHECKS_S)
        await broker.async_wait_until_settled()
        return [(each.key, each.value) for each in broker.messages("payments")]

    async def fail() -> None:
        pass

    assert await shop.post("/orders/1/10") == 201
    expected: list[tuple[bytes | None, bytes | None]] = [(b"1", b"10")]
    assert await visible() == expected

    shop.on_prepared = shop.kill  # before the local transaction
    with pytest.raises(aiohttp.ClientError):
        await shop.post("/orders/2/20")
    await shop.start()
    assert await visible() == expected

    shop.on_decision = shop.kill  # after it
    with pytest.raises(aiohttp.ClientError):
        await shop.post("/orders/3/30")
    await shop.start()
    expected.append((b"3", b"30"))
    assert await visible() == expected

    shop.on_decision = fail  # the check repeats the row
    assert await shop.post("/orders/4/40") == 201
    expected.append((b"4", b"40"))
    assert await visible() == expected

    shop.on_prepared = lambda: broker.async_advance(CHECKS_S)  # a check is faster
    assert await shop.post("/orders/5/50") == 409
    assert await visible() == expected
    assert shop.rows() == ["commit 1 10", "commit 3 30", "commit 4 40", "rollback", "rollback"]


async def test_check_with_wrong_signature_is_refused(shop: Shop) -> None:
    body, now_s = b'{"id":"00000000000000000000000000"}', int(time.time())
    key = secret_key(SECRET)

    async def status(at_s: int, signature: str) -> int:
        headers = {"webhook-id": "1", "webhook-timestamp": str(at_s)}
        headers |= {"webhook-signature": signature} if signature else {}
        return await shop.post("/txbroker/check", body, **headers)

    assert await status(now_s, sign(key, "1", now_s, body)) == 200
    assert await status(now_s, "") == 401
    assert await status(now_s, sign(b"another secret", "1", now_s, body)) == 401
    assert await status(now_s, sign(key, "2", now_s, body)) == 401
    assert await status(now_s, sign(key, "1", now_s, b"another body")) == 401
    assert await status(now_s - 400, sign(key, "1", now_s - 400, body)) == 401
