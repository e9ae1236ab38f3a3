"""Class 2: what a proxy needs to join others, and where their calls are taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.memory import MemoryHarness
from tests.kit.until import until
from tests.security.installation import PEER_SECRET, TABLES, Installation
from txbroker.config.settings import load_settings
from txbroker.errors import ConfigurationError
from txbroker.proxy.process import Proxy, run_proxy

CLASS = 2


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Installation]:
    """An installation without a proxy yet."""
    world = MemoryHarness()
    made = Installation(world, tmp_path)
    yield made
    await made.close()
    await world.close()


def credentials(folder: Path) -> dict[str, dict[str, Any]]:
    """Return settings by which callers need a credential, by their name."""
    token, principals = folder / "token", folder / "principals-2.toml"
    token.write_text("a token of all producers")
    token.chmod(0o600)
    principals.write_text(TABLES["operator"])
    return {"a token": {"token_file": token}, "principals": {"principals_file": principals}}


@pytest.mark.parametrize("credential", ["a token", "principals"])
async def test_proxy_without_peer_identity_among_others(
    alone: Installation, credential: str, record_property: Any
) -> None:
    await alone.start(1)
    first = alone.proxies[0]
    settings = load_settings(
        {"instance": "other", "listen": "127.0.0.1:0", **credentials(alone.folder)[credential]},
        environ={},
    )
    with pytest.raises(ConfigurationError, match=r"no peer identity.*peer_secret_file.*peer_names"):
        async with run_proxy(alone.world.closed_door("other", half_partitions=4), settings):
            pass
    await until(
        lambda: set(first.broker.owners()) == {first.url} and first.broker.readiness().ready
    )
    record_property("result", "does not start and names the setting; the others go on")


async def test_the_first_of_two_without_peer_identity(alone: Installation) -> None:
    """It goes on alone and serves no peer calls; the second does not start."""
    given = credentials(alone.folder)["principals"] | {"listen": "127.0.0.1:0"}
    doors = [alone.world.closed_door(name, half_partitions=4) for name in ("one", "two")]
    async with run_proxy(doors[0], load_settings({"instance": "one", **given}, environ={})) as one:

        def ready() -> bool:
            return one.broker.readiness().ready and set(one.broker.owners()) == {one.url}

        await until(ready)
        settings = load_settings({"instance": "two", **given}, environ={})
        with pytest.raises(ConfigurationError, match="no peer identity"):
            async with run_proxy(doors[1], settings):
                pass
        await until(ready)
        headers = {"txb-proxy": one.url, "txb-peer-secret": PEER_SECRET}
        answer = await alone.get(
            "/internal/v1/overview", at=one.url, by="operator", headers=headers
        )
        assert answer.outcome == "403 not_a_peer"
        assert "peer_secret_file or peer_names" in answer.body["error"]["message"]


async def test_without_any_credential(alone: Installation) -> None:
    """Proxies that require no credential need no peer identity."""
    proxies: list[Proxy] = []
    stop = asyncio.Event()

    async def run(name: str) -> None:
        settings = load_settings({"instance": name, "listen": "127.0.0.1:0"}, environ={})
        async with run_proxy(alone.world.closed_door(name, half_partitions=4), settings) as proxy:
            proxies.append(proxy)
            await stop.wait()

    tasks = [asyncio.create_task(run(name)) for name in ("one", "two")]

    async def shared() -> bool:
        views = {proxy.broker.owners() for proxy in proxies}
        return len(proxies) == 2 and len(views) == 1 and len(set(views.pop())) == 2

    await until(shared)
    overview = await alone.get("/v1/overview", at=proxies[0].url)
    assert overview.body["complete"] is True
    stop.set()
    await asyncio.gather(*tasks)


async def test_an_address_for_peers(alone: Installation) -> None:
    """Calls of proxies are taken at peer_listen alone, and go there; nothing else does."""
    await alone.start(2, peer_listen="127.0.0.1:0")
    headers = {"txb-peer-secret": PEER_SECRET, "txb-proxy": alone.urls[0]}
    ids = [await alone.prepared("shop") for _ in range(8)]
    for url in alone.urls:
        # Each proxy is asked for what the other one owns.
        for id in ids:
            found = await alone.get(f"/v1/transactions/{id}", by="shop", at=url)
            assert found.status == 200
        public = await alone.get("/internal/v1/overview", at=url, headers=headers)
        assert public.status == 401
        named = await alone.get("/internal/v1/overview", by="operator", at=url, headers=headers)
        assert named.status == 404
        peer_url = alone.proxies[0].broker.partitions.peer_url(url)
        if url != alone.urls[0]:
            assert peer_url != url
            right = await alone.get("/internal/v1/overview", at=peer_url, headers=headers)
            assert right.status == 200
            for path in ("/v1/overview", "/healthz", "/v1/transactions", "/"):
                other = await alone.get(path, by="operator", at=peer_url)
                assert other.status in (403, 404), path
