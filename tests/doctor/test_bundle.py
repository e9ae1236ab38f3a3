"""The bundle for support: complete, and without secrets."""

from __future__ import annotations

import json
import stat
import tarfile
from pathlib import Path
from typing import Any

import click
import pytest
from pydantic import SecretStr

from tests.kit.doctor import METRICS, ONE, TWO, World, settings
from tests.kit.secret_files import secret_file
from txbroker.cli.doctor.bundle import STRUCK_OUT, Redactor, known_secrets, pack, settings_shown
from txbroker.cli.doctor.subject import Unavailable
from txbroker.config.settings import Settings
from txbroker.errors import KafkaUnavailable

TOKEN, PASSWORD, QUERY, USER = 't0ken-é"x-of-16-or-more', "pa55word", "qu3ry", "us3r"


def unpacked(path: Path) -> dict[str, str]:
    """Return the content of a bundle."""
    with tarfile.open(path) as archive:
        files = {}
        for member in archive.getmembers():
            content = archive.extractfile(member)
            assert content is not None
            files[member.name.removeprefix("txbroker-doctor/")] = content.read().decode()
        return files


@pytest.fixture
def planted(world: World, tmp_path: Path) -> World:
    """An installation with secrets in all its texts."""
    token = secret_file(tmp_path / "token", f"{TOKEN}\n")
    password = secret_file(tmp_path / "password", PASSWORD)
    world.settings = settings(
        token_file=token,
        kafka_security_protocol="SASL_PLAINTEXT",
        kafka_sasl_username=USER,
        kafka_sasl_password_file=password,
        advertise=f"http://{USER}:{PASSWORD}@proxy/?k={QUERY}",
    )
    url = f"https://{USER}:{PASSWORD}@web.example/check?key={QUERY}#{QUERY}"
    world.proxies.proxy(TWO, reached=False, why=f"{TOKEN} is refused at {url}")
    world.proxies.group("web", unreachable_why=f"refused ({url})")
    page = f'# {TOKEN} {PASSWORD}\ntxbroker_x{{url="{url}"}} 1.0\n'
    world.proxies.pages = {ONE: METRICS + page, TWO: Unavailable(f"no {url}")}
    world.kafka.configure("half", x=PASSWORD)
    return world


async def test_bundle_has_no_secret(planted: World, tmp_path: Path) -> None:
    report = await planted.examine()
    path = tmp_path / "bundle.tar.gz"
    subject = planted.subject()
    await pack(path, subject, report, known_secrets(planted.settings, TOKEN))
    files = unpacked(path)
    everything = "\n".join(files.values())
    for secret in ("t0ken", PASSWORD, QUERY, USER):
        assert secret not in everything, secret
    assert STRUCK_OUT in everything
    assert "https://<struck-out>@web.example/check?<struck-out>" in everything
    assert json.loads(files["settings.json"])["kafka_sasl_username"] == STRUCK_OUT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_bundle_has_all_files(world: World, tmp_path: Path) -> None:
    world.proxies.partition(2, parked=3)
    report = await world.examine()
    path = tmp_path / "bundle.tar.gz"
    named = await pack(path, world.subject(), report, [])
    files = unpacked(path)
    assert sorted(files) == named
    assert set(named) >= {
        "versions.json",
        "settings.json",
        "topics.json",
        "doctor.json",
        "overview.json",
        "proxies/01/url.txt",
        "proxies/01/readyz.json",
        "proxies/01/metrics.txt",
        "proxies/02/metrics.txt",
    }
    topics = json.loads(files["topics.json"])
    assert topics["txbroker.half"]["settings"]["cleanup.policy"] == "delete"
    assert topics["txbroker.half"]["copies"]["0"]["in_sync"] == [1, 2, 3]
    assert json.loads(files["overview.json"])["partitions"][2]["parked"] == 3
    assert json.loads(files["versions.json"])["brokers"][0]["node"] == 1
    assert json.loads(files["settings.json"])["check_attempts_max"] == 15
    assert json.loads(files["doctor.json"])["checks"]
    assert 'promoted_total{topic="payments"} 3.0' in files["proxies/01/metrics.txt"]


async def test_bundle_is_packed_without_any_answer(world: World, tmp_path: Path) -> None:
    world.kafka.failure = KafkaUnavailable("no broker")
    world.proxies.gone()
    report = await world.examine()
    await pack(tmp_path / "bundle", world.subject(), report, [])
    files = unpacked(tmp_path / "bundle")
    assert json.loads(files["topics.json"]) == {"error": "no broker"}
    assert "nothing listens" in files["proxies/01/error.txt"]
    assert json.loads(files["doctor.json"])["healthy"] is False


async def test_bundle_overwrites_no_file(world: World, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("mine")
    report = await world.examine()
    with pytest.raises(click.ClickException, match="cannot be written"):
        await pack(path, world.subject(), report, [])
    assert path.read_text() == "mine"


def test_secret_typed_settings_are_struck_out() -> None:
    class Hiding(Settings):
        kafka_oauth_client_secret: SecretStr = SecretStr("")
        kafka_ssl_key_passphrase: str = ""

    given: dict[str, Any] = {
        "kafka_oauth_client_secret": SecretStr("h1dden"),
        "kafka_ssl_key_passphrase": "phr4se",
    }
    hiding = Hiding(**given)
    assert {"h1dden", "phr4se"} <= set(known_secrets(hiding, ""))
    shown = settings_shown(hiding)
    assert shown["kafka_oauth_client_secret"] == shown["kafka_ssl_key_passphrase"] == STRUCK_OUT
    assert settings_shown(settings())["kafka_sasl_username"] == ""


SECRETS = [
    name
    for name, field in Settings.model_fields.items()
    if field.annotation == Path | None
    and not name.endswith(("_ca_file", "_cert_file", "principals_file", "_dir"))
]


@pytest.mark.parametrize("name", SECRETS)
def test_content_of_secret_files_is_known(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    path.write_text("wh4t it holds\n")
    assert known_secrets(settings(**{name: path}), "") == ["wh4t it holds"]


def test_tokens_and_peer_secret_are_secrets() -> None:
    wanted = {"token_file", "admin_token_file", "peer_secret_file", "tls_key_file"}
    assert set(SECRETS) >= wanted | {"kafka_ssl_key_file", "kafka_oauth_token_file"}


def test_secrets_of_groups_are_struck_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bank").mkdir()
    (tmp_path / "bank" / "new").write_text("b4nk")
    (tmp_path / "shop").write_text("sh0p")
    monkeypatch.setenv("BANK_SECRET", "0f one group")
    monkeypatch.setenv("SHOP_SECRET", "fr0m the environment")
    given = settings(
        secrets_dir=tmp_path, secret_env_allow=("SHOP_SECRET", "bank:BANK_SECRET", "NO")
    )
    held = ["b4nk", "sh0p", "fr0m the environment", "0f one group"]
    assert known_secrets(given, "") == held
    shown = settings_shown(given)
    assert shown["secrets_dir"] == str(tmp_path)
    assert "SHOP_SECRET" in shown["secret_env_allow"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://one:8470/x", "http://one:8470/x"),
        ("http://u:p@one/x?a=b c", "http://<struck-out>@one/x?<struck-out> c"),
        ("see http://one/?t=1, then", "see http://one/?<struck-out>, then"),
        ('"http://one/#t"', '"http://one/?<struck-out>"'),
        ("http://u:p?q@one/x", "http://<struck-out>@one/x"),
        ("what? a@b", "what? a@b"),
        ("abcabcd", "<struck-out>"),
        ("", ""),
    ],
)
def test_redactor_strikes_secrets_out(text: str, expected: str) -> None:
    assert Redactor(["abc", "abcabcd", ""])(text) == expected
