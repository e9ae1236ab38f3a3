"""The doctor and a proxy's HTTP API understand each other."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from tests.cli.cli_stub import stub
from tests.kit.doctor import World
from tests.kit.http_api import running_api
from tests.kit.secret_files import secret_file
from txbroker.cli.doctor.report import CHECKS, examine
from txbroker.cli.doctor.subject import HttpProxies, NotAllowed, Subject, Unavailable, read_samples
from txbroker.contract.policy import GroupPolicy, encode_policy
from txbroker.principals import Role, digest_of, format_principal


async def test_doctor_reads_every_answer_of_the_api() -> None:
    async with running_api() as api:
        url = "http://127.0.0.1:9/check"
        await api.call("PUT", "/v1/groups/the%20shop", {"check_url": url, "timeout_s": 1})
        # The first proxy that answers is asked; one that does not is no matter.
        proxies = HttpProxies(["http://127.0.0.1:9", f"{api.url}/"], {})
        assert (await proxies.ready(api.url)).ready == api.service.readiness().ready
        overview, took_s = await proxies.overview()
        known = await api.service.overview()
        assert overview == msgspec.structs.replace(known, kafka=api.settings.kafka)
        assert took_s > 0
        (group,) = await proxies.groups()
        assert (group.group, group.check_url, group.timeout_s) == ("the shop", url, 1.0)
        tried = await proxies.test_group("the shop", 5.0)
        assert (tried.group, tried.answered, tried.status) == ("the shop", False, None)
        assert read_samples(await proxies.metrics(api.url))


async def test_doctor_sends_the_token(tmp_path_factory: pytest.TempPathFactory) -> None:
    token = tmp_path_factory.mktemp("token") / "token"
    secret_file(token, "t0ken-of-16-chars")
    async with running_api(token_file=token) as api:
        with pytest.raises(Unavailable, match=r"401: .* \(unauthorized\); .* --token-file"):
            await HttpProxies([api.url], {}).overview()
        overview, _ = await HttpProxies(
            [api.url], {"authorization": "Bearer t0ken-of-16-chars"}
        ).overview()
        known = await api.service.overview()
        assert overview == msgspec.structs.replace(known, kafka=api.settings.kafka)


ROLES = ("producer", "viewer", "operator")


def doctor_of(url: str, role: str) -> HttpProxies:
    return HttpProxies([url], {"authorization": f"Bearer token of the {role}"})


@pytest.fixture
def principals(tmp_path: Path) -> Path:
    """A file with one principal of each role."""
    every = {"groups": ["*"], "topics": ["*"]}
    path = tmp_path / "principals.toml"
    path.write_text(
        "".join(
            format_principal(
                role,
                Role(role),
                digest=digest_of(f"token of the {role}"),
                certificates=(),
                patterns=every,
                expires=None,
            )
            for role in ROLES
        )
    )
    return path


async def test_roles_limit_what_the_doctor_sees(principals: Path) -> None:
    async with running_api(principals_file=principals) as api:
        operator = {"authorization": "Bearer token of the operator"}
        body = {"check_url": "http://127.0.0.1:9/check", "timeout_s": 1}
        status, _ = await api.call("PUT", "/v1/groups/shop", body, **operator)
        assert status == 200
        for role in ("viewer", "operator"):
            doctor = doctor_of(api.url, role)
            assert (await doctor.overview())[0].groups == (await api.service.overview()).groups
            assert [one.group for one in await doctor.groups()] == ["shop"]
            assert read_samples(await doctor.metrics(api.url))
        assert (await doctor_of(api.url, "operator").test_group("shop", 5.0)).group == "shop"
        with pytest.raises(NotAllowed, match=r"\(not_permitted\); .* operator for test calls"):
            await doctor_of(api.url, "viewer").test_group("shop", 5.0)
        producer = doctor_of(api.url, "producer")
        for call in (producer.overview(), producer.groups(), producer.metrics(api.url)):
            with pytest.raises(NotAllowed, match=r"403: .* \(not_permitted\); .* role viewer"):
                await call
        await producer.ready(api.url)  # any role may call it


async def test_registration_no_longer_allowed_is_named(world: World) -> None:
    """Such as one from before `secrets_dir` and `secret_env_allow`: at rest in the topic."""
    async with running_api() as api:
        for group, ref in (("file", "file:/run/secrets/shop"), ("env", "env:SHOP")):
            policy = GroupPolicy(check_url="http://127.0.0.1:9/check", secret_ref=ref)
            await api.store.put(group, encode_policy(policy))
        subject = Subject(world.settings, world.kafka, HttpProxies([api.url], {}))
        check = next(one for one in CHECKS if one.name == "groups-usable")
        found = (await examine(subject, [check])).outcomes[0]
        await subject.close()
    assert (found.level, len(found.details)) == ("fails", 2), found
    env, file = found.details
    assert env.startswith("env: ")
    assert "secret_env_allow" in env
    assert file.startswith("file: ")
    assert "secrets_dir" in file


async def test_anonymous_call_has_no_credential(principals: Path) -> None:
    async with running_api(principals_file=principals) as api:
        for path in ("/v1/overview", "/metrics"):
            assert await doctor_of(api.url, "operator").anonymous(api.url, path) == 401
    async with running_api() as api:
        assert await doctor_of(api.url, "operator").anonymous(api.url, "/metrics") == 200


async def test_producers_doctor_reports_unknown_checks(principals: Path, world: World) -> None:
    async with running_api(principals_file=principals) as api:
        subject = Subject(world.settings, world.kafka, doctor_of(api.url, "producer"))
        report = await examine(subject, [one for one in CHECKS if one.section != "Kafka"])
        await subject.close()
    by_name = {one.name: one for one in report.outcomes}
    for name in ("groups-reachable", "groups-usable", "parked", "access-peers", "access-tls"):
        assert by_name[name].level == "unknown"
    assert "'producer' is a producer" in by_name["parked"].found
    assert not [one for one in report.outcomes if "broken" in one.found]


async def test_other_server_is_reported() -> None:
    with stub() as other:
        page = b"<html>hello</html>"
        other.answer = lambda asked: (200 if asked.path == "/v1/overview" else 404, page)
        proxies = HttpProxies([other.url], {})
        with pytest.raises(Unavailable, match="cannot read"):
            await proxies.overview()
        with pytest.raises(Unavailable, match="404: is it a txbroker proxy"):
            await proxies.ready(other.url)
        with pytest.raises(Unavailable, match="404: is it a txbroker proxy"):
            await proxies.groups()


async def test_missing_answer_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        proxies = HttpProxies([url], {})
        with pytest.raises(Unavailable, match="has not answered within"):
            await proxies._ask(url, "GET", "/readyz", timeout_s=0.1)
    with pytest.raises(Unavailable, match="nothing listens at"):
        await proxies.ready(url)
    with pytest.raises(Unavailable, match="no proxy is named"):
        await HttpProxies([], {}).overview()
