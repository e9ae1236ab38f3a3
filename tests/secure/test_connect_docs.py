"""The page about connecting: each config file in it is one with which txbroker logs in."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.kit.command_lines import parsed
from tests.kit.secret_files import secret_file
from tests.secure.secure_world import KEY_PASSWORD
from tests.tls.tls_files import Authority
from txbroker.config.settings import SECRET_SETTINGS, load_settings
from txbroker.kafka.client.login import SettingsLogin
from txbroker.spark.access import login_options

PAGE = (Path(__file__).parents[2] / "docs/how-to/connect-to-kafka.md").read_text()
CONFIGS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Path:
    """The files that the page names, below a folder."""
    folder = tmp_path_factory.mktemp("root")
    cert, key = authority.sign("of-the-page", password=KEY_PASSWORD)
    content = {
        "etc/txbroker/ca.pem": authority.cert.read_text(),
        "etc/txbroker/login-ca.pem": authority.cert.read_text(),
        "etc/txbroker/client.pem": cert.read_text(),
        "etc/txbroker/client.key": key.read_text(),
        "etc/txbroker/client-key-password": KEY_PASSWORD,
        "etc/txbroker/kafka-password": "secret",
        "etc/txbroker/client-secret": "secret",
        "var/run/secrets/kafka/token": "token",
    }
    for name, text in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        secret_file(path, text)
    return folder


@pytest.mark.parametrize("number", range(len(CONFIGS)))
async def test_each_config_logs_in(number: int, root: Path, tmp_path: Path) -> None:
    file = tmp_path / "txbroker.toml"
    file.write_text(re.sub(r'_file = "', f'_file = "{root}', CONFIGS[number]))
    settings = load_settings(config=file, environ={})
    given = SettingsLogin(settings).arguments()
    assert given["security_protocol"] == settings.kafka_security_protocol
    assert given.get("sasl_mechanism", "none") in (settings.kafka_sasl_mechanism, "none")
    assert login_options(settings)["kafka.security.protocol"] == given["security_protocol"]


def test_page_shows_every_login() -> None:
    assert len(CONFIGS) == 4
    for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "SSL"):
        assert mechanism in PAGE
    for name in SECRET_SETTINGS:
        assert f"| `{name}_file` | `TXBROKER_{name.upper()}` |" in PAGE


def test_commands_of_page_exist() -> None:
    lines = re.findall(r"^txbroker (.*)$", PAGE, re.MULTILINE)
    assert [parsed(shlex.split(line))[0] for line in lines] == ["topics plan", "topics plan"]
