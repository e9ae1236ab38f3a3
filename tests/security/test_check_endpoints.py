"""Check endpoints that are not who they should be, and calls that cannot show who asks."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkers import check_server
from tests.kit.http_answers import COMMIT, LOOPBACK, Serve, answer_to, answering, response
from tests.kit.http_api import running_api
from tests.kit.memory import MemoryHarness
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from tests.security.installation import Installation
from tests.tls.tls_files import Authority, Pair
from txbroker.checkers.base import Unreached, shortened
from txbroker.checkers.group_secrets import (
    SECRET_BYTES_MAX,
    GroupSecrets,
    SecretRefused,
    SecretUnavailable,
)
from txbroker.checkers.http import HttpChecks
from txbroker.contract.policy import GroupPolicy, encode_policy
from txbroker.core.records import Message
from txbroker.errors import BadRequest
from txbroker.sdk import BadSignature, verify_webhook

CLASS = 8
serve = check_server.serve

ENDPOINTS: dict[str, tuple[Callable[[Authority, Authority], Pair], str]] = {
    "another authority": (lambda ours, others: others.sign("good"), "TLS"),
    "another name": (lambda ours, others: ours.sign("name", "DNS:orders.example"), "TLS"),
    "an address instead of the name": (lambda ours, others: ours.sign("ip", "IP:127.0.0.1"), "TLS"),
    "a wildcard too wide": (lambda ours, others: ours.sign("wild", "DNS:*"), "TLS"),
    "an expired certificate": (lambda ours, others: ours.sign("old", days=-1), "TLS"),
}


@pytest.fixture(scope="session")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """The authority that the proxy trusts, and another one of the same name."""
    folder = tmp_path_factory.mktemp("endpoints")
    (folder / "others").mkdir()
    return Authority(folder, "ours"), Authority(folder / "others", "ours")


@pytest.fixture
def trusted(authorities: tuple[Authority, Authority], monkeypatch: pytest.MonkeyPatch) -> Authority:
    """Make ours the system's only authority."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities[0].cert))
    monkeypatch.setenv("SSL_CERT_DIR", "/nonexistent")
    return authorities[0]


def tls_of(pair: Pair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    return context


def impostor(heard: list[bytes]) -> Any:
    """Answer commit to every call, and record it."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1))
        writer.write(response(COMMIT))

    return handler


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    """A proxy on a Kafka in memory, whose groups' secrets are in `tmp_path`."""
    world, desk = MemoryHarness(), FakeEndpoint()
    settings = {"secrets_dir": tmp_path, "check_after_s": 0.01}
    async with desk.serve(), Service(world, desk, **settings) as service:
        yield service
    await world.close()


async def pending(service: Service, policy: dict[str, Any]) -> str:
    """Register `orders` and prepare a transaction of it; return its id."""
    given = {"check_after_s": 0, "check_interval_s": 0.1, **policy}
    await service.call("PUT", "/v1/groups/orders", given)
    return await service.prepare(Message(await service.topic(), None, b"v"), group="orders")


@pytest.mark.parametrize("case", ENDPOINTS)
async def test_impostor_gets_no_call_and_decides_nothing(
    case: str,
    service: Service,
    serve: Serve,
    trusted: Authority,
    authorities: tuple[Authority, Authority],
) -> None:
    """Unreached: nothing is sent, nothing decided."""
    certificate, words = ENDPOINTS[case]
    heard: list[bytes] = []
    server = await serve(impostor(heard), tls_of(certificate(*authorities)))
    id = await pending(service, {"check_url": server.url})
    _, tried = await service.call("POST", "/v1/groups/orders/test", {})
    assert (tried["answered"], words in tried["why"]) == (False, True), tried["why"]

    async def reported() -> bool:
        return words in str((await service.show(id)).get("waiting"))

    await until(reported)
    shown = await service.show(id)
    assert (shown["state"], shown["attempts"]) == ("pending", 0)
    assert [byte for byte in heard if byte] == []


async def test_the_right_endpoint_decides(
    service: Service, serve: Serve, trusted: Authority
) -> None:
    """The control of the cases above: by name, signed by the authority, for the name."""
    server = await serve(answering(response(COMMIT)), tls_of(trusted.sign("right")))
    id = await pending(service, {"check_url": server.url})
    await service.reaches(id, "promoted")


async def test_endpoint_without_tls_is_no_https_endpoint(serve: Serve, trusted: Authority) -> None:
    """Unreached: nothing is sent."""
    server = await serve(answering(response(b"")))
    async with running_api() as api:
        url = server.url.replace("http:", "https:")
        assert (await api.call("PUT", "/v1/groups/orders", {"check_url": url}))[0] == 200
        _, tried = await api.call("POST", "/v1/groups/orders/test", {})
        assert (tried["answered"], "status" in tried) == (False, False)


# --- who asks --------------------------------------------------------------------------------

SIGNED = {
    "signed with the secret": ("s3cr3t", True),
    "signed with another secret": ("other", False),
    "signed with part of the secret": ("s3cr3", False),
    "not signed, as no secret is registered": (None, False),
}


@pytest.mark.parametrize("case", SIGNED)
async def test_endpoint_can_verify_the_caller(
    case: str, service: Service, serve: Serve, tmp_path: Path
) -> None:
    """It refuses what `verify_webhook` refuses: no answer of it goes to a stranger."""
    secret, taken = SIGNED[case]

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.split(": ", 1) for line in head.strip().split("\r\n")[1:])
        body = await reader.readexactly(int(headers["content-length"]))
        try:
            verify_webhook(b"s3cr3t", headers, body)
            writer.write(answer_to(body, response(COMMIT)))
        except BadSignature:
            writer.write(response(b"", "401 Unauthorized"))

    server = await serve(handler)
    policy: dict[str, Any] = {"check_url": server.url, "attempts_max": 2}
    if secret is not None:
        (tmp_path / "orders").write_text(secret)
        policy["secret_ref"] = f"file:{tmp_path}/orders"
    id = await pending(service, policy)
    await service.reaches(id, "promoted" if taken else "parked")


async def test_missing_secret_prevents_unsigned_checks(
    service: Service, serve: Serve, tmp_path: Path
) -> None:
    """A secret that cannot be read makes no unsigned call of a signed one."""
    heard: list[bytes] = []
    server = await serve(impostor(heard))
    id = await pending(
        service, {"check_url": server.url, "secret_ref": f"file:{tmp_path}/orders/gone"}
    )

    async def reported() -> bool:
        return "cannot be read" in str((await service.show(id)).get("waiting"))

    await until(reported)
    shown = await service.show(id)
    assert (shown["state"], shown["attempts"], heard) == ("pending", 0, [])


# --- secrets of groups ---------------------------------------------------------------------------

PLACES = {
    "a device": ("file:/dev/ptmx", "below the proxy's"),
    "a terminal": ("file:/dev/tty", "below the proxy's"),
    "the process's environment": ("file:/proc/self/environ", "below the proxy's"),
    "a file elsewhere": ("file:/etc/passwd", "below the proxy's"),
    "the folder itself": ("file:{folder}", "below the proxy's"),
    "the folder's neighbour": ("file:{folder}-2/orders", "below the proxy's"),
    "a way up": ("file:{folder}/orders/../../outside", "below the proxy's"),
    "a way up and down": ("file:{folder}/orders/../orders/key", "below the proxy's"),
    "a link to a file outside": ("file:{folder}/orders/to-outside", "link out of it"),
    "a link to a device": ("file:{folder}/orders/to-ptmx", "link out of it"),
    "a file in a linked folder": ("file:{folder}/orders/to-parent/outside", "link out of it"),
    "a folder": ("file:{folder}/orders", "not a regular file"),
    "a named pipe": ("file:{folder}/orders/pipe", "not a regular file"),
    "a socket": ("file:{folder}/orders/socket", "not a regular file"),
    "a file too large": ("file:{folder}/orders/large", "too large for a secret"),
    "the proxy's token": ("file:{folder}/orders/token", "the proxy itself"),
    "a hard link to the token": ("file:{folder}/orders/token-2", "the proxy itself"),
    "another group's file": ("file:{folder}/bank", "a file of group orders"),
    "another group's file, with more slashes": ("file:{folder}//./bank", "a file of group orders"),
    "a file in another group's folder": ("file:{folder}/bank-2/key", "a file of group orders"),
    "the file of a group of a longer name": ("file:{folder}/orders.key", "a file of group orders"),
    "another group's file as Kubernetes has it": (
        "file:{folder}/..data/bank",
        "a file of group orders",
    ),
    "a variable not listed": ("env:HOME", "secret_env_allow"),
    "another group's variable": ("env:BANK_SECRET", "secret_env_allow"),
    "a variable of the proxy": ("env:TXBROKER_KAFKA_SASL_PASSWORD", "the proxy itself"),
    "such a variable in lower case": ("env:txbroker_token", "the proxy itself"),
}
VARIABLES = ("ORDERS_SECRET", "bank:BANK_SECRET", "of:a:team:TEAM_SECRET")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A secrets_dir with everything in it that should not be there."""
    folder = tmp_path / "secrets"
    own = folder / "orders"
    for made in (own / "inner", folder / "bank-2", folder / "..data", tmp_path / "secrets-2"):
        made.mkdir(parents=True)
    (tmp_path / "outside").write_text("outside")
    for name in ("bank", "orders.key", "bank-2/key", "..data/bank", "../secrets-2/orders"):
        (folder / name).write_text("of another owner")
    for name in ("token", "key", "inner/key"):
        (own / name).write_text("whsec_dHdv")
    os.link(own / "token", own / "token-2")
    (own / "to-outside").symlink_to(tmp_path / "outside")
    (own / "to-ptmx").symlink_to("/dev/ptmx")
    (own / "to-parent").symlink_to("../..")
    os.mkfifo(own / "pipe")
    (own / "large").write_bytes(b"x" * (SECRET_BYTES_MAX + 1))
    (own / "largest").write_bytes(b"x" * SECRET_BYTES_MAX)
    os.mknod(own / "socket", 0o140600)
    return folder


@pytest.mark.parametrize("case", PLACES)
async def test_forbidden_secret_place_is_refused_everywhere(case: str, folder: Path) -> None:
    """Refused at registration, and at the call as the groups topic may hold it."""
    ref, words = PLACES[case]
    ref = ref.format(folder=folder)
    secrets = GroupSecrets(folder, VARIABLES, [folder / "orders" / "token"])
    checks = HttpChecks(guard=LOOPBACK, secrets=secrets)
    policy = GroupPolicy(check_url="http://127.0.0.1:9/", secret_ref=ref)

    refused = await checks.refuse("orders", policy)
    called = await checks.acquire_for("orders", policy)
    await checks.close()
    assert refused is not None
    assert words in refused
    assert called == Unreached(shortened(refused))
    with pytest.raises(SecretRefused):
        await secrets.read("orders", ref)


async def test_largest_secret_is_accepted(folder: Path) -> None:
    """Read: 64 KiB are the limit."""
    ref = f"file:{folder}/orders/largest"
    assert len(await GroupSecrets(folder).read("orders", ref)) == SECRET_BYTES_MAX


OWN_FILES = {
    "orders": "orders",
    "orders.eu": "orders.eu",
    "shop/orders": "shop%2Forders",
    "orders of shop": "orders%20of%20shop",
    "100%2F": "100%252F",
    "größe": "gr%C3%B6%C3%9Fe",
    ".": "%2E",
    "..": "%2E.",
    "..data": "%2E.data",
    "%2E": "%252E",
}


@pytest.mark.parametrize("group", OWN_FILES)
async def test_files_belong_to_one_group(tmp_path: Path, group: str) -> None:
    """Any name of a group gives a separate file and a separate folder."""
    secrets = GroupSecrets(tmp_path)
    below = OWN_FILES[group]
    (tmp_path / below).write_text("of the group")
    for other in OWN_FILES:
        ref = f"file:{tmp_path}/{below}"
        if other == group:
            assert await secrets.read(other, ref) == b"of the group"
            assert secrets.refuse(other, f"{ref}/new") is None
        else:
            assert f"a file of group {other}" in str(secrets.refuse(other, ref))
            assert f"a file of group {other}" in str(secrets.refuse(other, f"{ref}/new"))


@pytest.mark.parametrize(
    ("group", "variable", "allowed"),
    [
        ("orders", "ORDERS_SECRET", True),
        ("bank", "ORDERS_SECRET", True),
        ("bank", "BANK_SECRET", True),
        ("bank-2", "BANK_SECRET", False),
        ("orders", "bank:BANK_SECRET", False),
        ("of:a:team", "TEAM_SECRET", True),
        ("team", "TEAM_SECRET", False),
    ],
)
def test_variable_belongs_to_all_groups_or_one(group: str, variable: str, allowed: bool) -> None:
    """Allowed (True) as `secret_env_allow` lists it for this group or for all, else refused."""
    refused = GroupSecrets(None, VARIABLES).refuse(group, f"env:{variable}")
    assert (refused is None) == allowed


@pytest.mark.parametrize("ref", ["file:/etc/passwd", "env:ORDERS_SECRET"])
async def test_no_secret_place_is_allowed_by_default(ref: str) -> None:
    """Refused, with the setting that would allow it."""
    with pytest.raises(SecretRefused, match=r"secrets_dir|secret_env_allow"):
        await GroupSecrets().read("orders", ref)


async def test_link_placed_after_the_check_is_not_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not read where a link replaces the file between look-up and opening."""
    secrets = GroupSecrets(folder)
    inner = folder / "orders" / "inner" / "key"
    real = os.path.realpath

    def exchange(path: str) -> str:
        found = real(path)
        if found == str(inner) and not inner.is_symlink():
            inner.unlink()
            inner.symlink_to("../../../outside")
            # The check a moment ago still saw the file.
            monkeypatch.setattr(os, "stat", lambda *_, **__: os.lstat(folder / "orders" / "key"))
        return found

    monkeypatch.setattr(os.path, "realpath", exchange)
    with pytest.raises(SecretUnavailable, match="cannot be read"):
        await secrets.read("orders", f"file:{inner}")


async def test_hanging_reads_delay_no_other_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are read and calls answered, beside more reads that hang than there are threads."""
    go_on = threading.Event()
    read = GroupSecrets._read

    def hanging(self: GroupSecrets, path: str) -> bytes:
        if "hung" in path:
            go_on.wait(60)
        return read(self, path)

    monkeypatch.setattr(GroupSecrets, "_read", hanging)
    secrets = GroupSecrets(folder, read_s=0.2)
    try:
        results = await asyncio.gather(
            *(secrets.read(f"hung-{n}", f"file:{folder}/hung-{n}") for n in range(40)),
            return_exceptions=True,
        )
        assert all(isinstance(result, SecretUnavailable) for result in results)
        # The event loop's own threads, which recovery uses, are as free as before.
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
        named = [thread for thread in threading.enumerate() if thread.name == "secret"]
        assert 0 < len(named) <= 8
        assert all(thread.daemon for thread in named)
    finally:
        go_on.set()
        await secrets.close()


# --- a whole proxy ---------------------------------------------------------------------------


@pytest.fixture
async def world() -> AsyncIterator[MemoryHarness]:
    world = MemoryHarness()
    yield world
    await world.close()


async def test_groups_with_device_files_stop_no_proxy(
    world: MemoryHarness, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy starts, is ready, takes calls, reports the problem, and ends.

    So it does with those that an older version registered."""
    desk = FakeEndpoint()
    async with desk.serve():
        monkeypatch.setenv("ANY_GROUPS_SECRET", "known")
        variables = ("ANY_GROUPS_SECRET",)
        service = Service(
            world, desk, secrets_dir=folder, secret_env_allow=variables, check_after_s=0.01
        )
        await service.start()
        topic = await service.topic()
        names = [f"bad-{n}" for n in range(10)]
        for name in names:
            with pytest.raises(BadRequest, match="secrets_dir"):
                await service.call("PUT", f"/v1/groups/{name}", {"secret_ref": "file:/dev/ptmx"})
        ids = []
        for name in names:
            policy = GroupPolicy(f"{desk.url}/check/{name}", "file:/dev/ptmx")
            await service.door.groups.put(name, encode_policy(policy))
            await service.knows(name)
            ids.append(await service.prepare(Message(topic, None, b"v"), group=name))
        async with asyncio.timeout(30):
            await service.restart()
        _, shown = await service.call("GET", "/v1/groups/bad-0")
        assert "secrets_dir" in shown["problem"]
        _, tried = await service.call("POST", "/v1/groups/bad-0/test", {})
        assert (tried["answered"], "secrets_dir" in tried["why"]) == (False, True)

        async def reported() -> bool:
            waiting = [(await service.show(id)).get("waiting") or {} for id in ids]
            return all("secrets_dir" in str(one) for one in waiting)

        await until(reported)
        # No attempt was used up, and a group whose secret is fine goes on.
        assert [(await service.show(id))["attempts"] for id in ids] == [0] * len(ids)
        good = await service.group({"decision": "commit"}, secret_ref="env:ANY_GROUPS_SECRET")
        await service.reaches(
            await service.prepare(Message(topic, None, b"v"), group=good), "promoted"
        )
        async with asyncio.timeout(30):
            await service.stop()


@pytest.mark.parametrize(("group", "status"), [("shop", 400), ("bank", 200)])
async def test_team_cannot_sign_with_another_teams_secret(
    world: MemoryHarness, tmp_path: Path, folder: Path, group: str, status: int
) -> None:
    """Only the group whose name the file has can register it."""
    site = Installation(world, tmp_path)
    try:
        await site.start(2, secrets_dir=folder)
        for url in site.urls:
            policy = {"secret_ref": f"file:{folder}/bank"}
            path = f"/v1/groups/{group}"
            answer = await site.put(path, policy, by=group, at=url)
            assert answer.status == status, answer.body
    finally:
        await site.close()
