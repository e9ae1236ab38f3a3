"""Class 1: callers without a valid credential get one answer, and no call of Kafka is made."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.security.installation import TABLES, TOKENS, Answer, Installation
from txbroker.config.settings import load_settings
from txbroker.contract import frames as wire
from txbroker.errors import Unauthorized
from txbroker.principals import digest_of
from txbroker.proxy.http.api import operations
from txbroker.proxy.http.guards import Credential, Guard

CLASS = 1
ID = "0" * 26
CREDENTIALS: dict[str, dict[str, str]] = {
    "none": {},
    "empty": {"authorization": ""},
    "no token": {"authorization": "Bearer"},
    "wrong": {"authorization": "Bearer the-token-of-nobody"},
    "prefix of a right one": {"authorization": f"Bearer {TOKENS['shop'][:-1]}"},
    "right one and more": {"authorization": f"Bearer {TOKENS['shop']}x"},
    "digest of a right one": {"authorization": f"Bearer {digest_of(TOKENS['shop'])}"},
    "other scheme": {"authorization": f"Basic {TOKENS['shop']}"},
    "expired": {"authorization": f"Bearer {TOKENS['expired']}"},
    "revoked": {"authorization": f"Bearer {TOKENS['revoked']}"},
    "very long": {"authorization": f"Bearer {'x' * 8000}"},
    "not ASCII": {"authorization": "Bearer \udcff\udcfe"},
    "peer secret as token": {"authorization": "Bearer the-secret-of-the-proxies"},
    "peer header": {"txb-peer-secret": "the-secret-of-the-proxies"},
}


@contextmanager
def without_kafka(site: Installation) -> Iterator[None]:
    """Take Kafka away, so that a call that needs it cannot be answered as if it did not."""
    site.world.kafka.go_down()
    try:
        yield
    finally:
        site.world.kafka.come_up()


def shown(answer: Answer) -> tuple[Any, ...]:
    """Return all of an answer that a caller can compare."""
    headers = {name: value for name, value in answer.headers.items() if name != "date"}
    return answer.status, answer.body, headers


@pytest.mark.parametrize("credential", CREDENTIALS)
async def test_every_call(site: Installation, credential: str, record_property: Any) -> None:
    site.allow(*(name for name in TABLES if name != "revoked"))
    first = None
    with without_kafka(site):
        for url in site.urls:
            for operation in operations():
                if operation.open:
                    continue
                path = operation.path.format(id=ID, group="shop")
                answer = await site.call(
                    operation.method,
                    path,
                    {} if operation.changes else None,
                    at=url,
                    headers=CREDENTIALS[credential],
                )
                first = first or shown(answer)
                assert shown(answer) == first, operation.name
                assert answer.outcome == "401 unauthorized"
    record_property("result", "401 unauthorized, the same bytes for every call, no call of Kafka")


@pytest.mark.parametrize("credential", CREDENTIALS)
async def test_sessions(site: Installation, credential: str, record_property: Any) -> None:
    site.allow(*(name for name in TABLES if name != "revoked"))
    with without_kafka(site):
        for url in site.urls:
            async with aiohttp.ClientSession() as http:
                headers = CREDENTIALS[credential]
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await http.ws_connect(f"{url}/v1/session", headers=headers)
            assert refused.value.status == 401
    record_property("result", "401 at the upgrade, no call of Kafka")


async def test_session_of_a_revoked_principal(site: Installation) -> None:
    """The open session is cut off, and a new one gets 401; sessions of others stay."""
    site.allow(*TABLES)
    for url in site.urls:
        async with site.socket("shop", url) as shop, site.socket("bank", url) as bank:
            assert isinstance(await shop.hello("shop"), wire.Welcome)
            assert isinstance(await bank.hello("bank"), wire.Welcome)
            site.allow(*(name for name in TABLES if name != "shop"))
            assert await shop.ended()
            # The others stay.
            answer = await bank.ask(wire.AskEarly(1, ID))
            assert isinstance(answer, wire.Failure)
        path = f"/v1/transactions/{ID}"
        assert (await site.get(path, by="shop", at=url)).status == 401
        site.allow(*TABLES)


async def test_hello_of_principal_revoked_after_the_upgrade(site: Installation) -> None:
    """The hello gets unauthorized; no session begins."""
    site.allow(*TABLES)
    for url in site.urls:
        async with site.socket("shop", url) as shop:
            site.allow(*(name for name in TABLES if name != "shop"))
            refused = await shop.hello("shop")
            assert isinstance(refused, wire.Failure)
            assert refused.code == "unauthorized"
            assert await shop.ended()
        site.allow(*TABLES)


async def test_session_of_a_principal_that_loses_its_group(site: Installation) -> None:
    """The open session is cut off; a new hello for the group gets not_permitted."""
    site.allow(*TABLES)
    for url in site.urls:
        async with site.socket("shop", url) as shop:
            assert isinstance(await shop.hello("shop"), wire.Welcome)
            narrower = TABLES["shop"].replace('"shop", "shop-*"', '"shop-2"')
            site.principals.write_text("\n".join([narrower, TABLES["operator"]]))
            assert await shop.ended()
        async with site.socket("shop", url) as shop:
            refused = await shop.hello("shop")
            assert isinstance(refused, wire.Failure)
            assert refused.code == "not_permitted"
        site.allow(*TABLES)


async def unread(site: Installation) -> set[str]:
    """Return the settings whose files each proxy reports as unusable, in both places."""
    found = set()
    overview = await site.get("/v1/overview", by="operator")
    for proxy in overview.body["proxies"]:
        metrics = (await site.get("/metrics", by="operator", at=proxy["url"])).body
        shown = set(re.findall(r'^txbroker_files_not_read{setting="(\w+)"} 1.0$', metrics, re.M))
        assert shown == set(re.findall(r"the file of (\w+)", "\n".join(proxy["problems"])))
        assert proxy["ready"]
        found |= shown
    return found


BROKEN: dict[str, tuple[str, str | None, int]] = {
    "principals with a role that is none": ("principals.toml", "[principals.a]\nrole = 'b'", 0o600),
    "principals of one null character": ("principals.toml", "\0", 0o600),
    "principals cut short": ("principals.toml", "[principals", 0o600),
    "principals that their group may write": ("principals.toml", None, 0o660),
    "principals that every user may write": ("principals.toml", None, 0o606),
    "empty peer secret": ("peer-secret", "", 0o600),
    "peer secret that every user may read": ("peer-secret", None, 0o644),
}
"""The file, its content, None for the same as before, and its mode."""


@pytest.mark.parametrize("case", BROKEN)
async def test_broken_credential_file(site: Installation, case: str, record_property: Any) -> None:
    name, rubbish, mode = BROKEN[case]
    site.allow(*TABLES)
    path, good = site.folder / name, site.folder / "good"
    setting = {"principals.toml": "principals_file", "peer-secret": "peer_secret_file"}[name]
    assert await unread(site) == set()
    content = path.read_text()
    path.rename(good)
    assert setting in await unread(site)
    path.write_text(content if rubbish is None else rubbish)
    path.chmod(mode)
    for url in site.urls:
        assert (await site.get("/v1/groups", by="operator", at=url)).status == 200
    assert setting in await unread(site)
    good.rename(path)  # a file that was read before
    assert await unread(site) == set()
    record_property("result", "The last content stays in force; overview and metric name the file")


def test_time_of_a_look_up_reveals_no_tokens(tmp_path: Path) -> None:
    """The look-up alone is timed: wrong, expired, revoked differ by less than a factor of two."""
    path = tmp_path / "principals.toml"
    path.write_text("\n".join(TABLES[name] for name in ("shop", "expired")))
    guard = Guard(load_settings({"principals_file": path}, environ={}))
    tries = {
        name: Credential(digest_of(TOKENS[name]), ()) for name in ("bank", "expired", "revoked")
    }
    took: dict[str, list[int]] = {name: [] for name in tries}
    for _ in range(2000):
        for name, credential in tries.items():
            began = time.perf_counter_ns()
            with pytest.raises(Unauthorized):
                guard.known(credential)
            took[name].append(time.perf_counter_ns() - began)
    medians = [statistics.median(each) for each in took.values()]
    assert max(medians) < 2 * min(medians), medians
