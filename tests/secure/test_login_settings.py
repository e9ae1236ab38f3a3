"""Settings for logins and TLS: what contradicts itself, and that no secret is ever shown."""

from __future__ import annotations

import re
import shlex
import ssl
from pathlib import Path
from typing import Any

import pytest

from tests.kit.command_lines import parsed
from tests.kit.secret_files import secret_file
from tests.secure.secure_world import CLIENT_SECRET, KEY_PASSWORD, PASSWORD
from tests.tls.tls_files import Authority
from txbroker.cli.doctor.bundle import STRUCK_OUT, known_secrets, settings_shown
from txbroker.cli.main import cli
from txbroker.cli.run import run
from txbroker.config.settings import SECRET_SETTINGS, Settings, load_settings
from txbroker.errors import ConfigurationError
from txbroker.kafka.client.login import SettingsLogin
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.spark.access import login_options

SASL = {"kafka_security_protocol": "SASL_SSL", "kafka_sasl_username": "me"}
OAUTH = {"kafka_security_protocol": "SASL_SSL", "kafka_sasl_mechanism": "OAUTHBEARER"}
BY_URL = {
    **OAUTH,
    "kafka_oauth_token_url": "https://login.example.org/token",
    "kafka_oauth_client_id": "me",
}
IN_ENVIRONMENT = {
    "TXBROKER_KAFKA_SASL_PASSWORD": PASSWORD,
    "TXBROKER_KAFKA_OAUTH_CLIENT_SECRET": CLIENT_SECRET,
    "TXBROKER_KAFKA_SSL_KEY_PASSWORD": KEY_PASSWORD,
}


def refused(options: dict[str, Any], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as raised:
        load_settings(options, environ=environ or {})
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**SASL, "kafka_oauth_scope": "a"}, "kafka_oauth_scope needs kafka_sasl_mechanism"),
        ({"kafka_oauth_scope": "a"}, "kafka_oauth_scope needs kafka_security_protocol SASL_SSL"),
        (OAUTH, "needs kafka_oauth_token_file, or kafka_oauth_token_url"),
        ({**OAUTH, "kafka_sasl_username": "me"}, "is not for kafka_sasl_mechanism OAUTHBEARER"),
        ({**OAUTH, "kafka_oauth_token_file": "/none"}, "kafka_oauth_token_file /none: No such"),
        (BY_URL, "kafka_oauth_client_secret_file"),
        ({"kafka_ssl_key_password_file": "/none"}, "needs kafka_security_protocol SSL or SASL_SSL"),
        (
            {"kafka_security_protocol": "SSL", "kafka_ssl_key_password_file": __file__},
            "kafka_ssl_key_password_file needs kafka_ssl_key_file",
        ),
    ],
)
def test_contradicting_login_settings_are_explained(options: dict[str, Any], words: str) -> None:
    assert words in refused(options)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("login.example.org", "is not a URL"),
        ("https://:443/token", "is not a URL"),
        ("https://[::1/token", "is not a URL"),
        ("https://login.example.org/token?client_secret=secret", "must not have a user"),
    ],
)
def test_unsafe_token_urls_are_refused(url: str, words: str) -> None:
    message = refused(
        {**BY_URL, "kafka_oauth_token_url": url}, {"TXBROKER_KAFKA_OAUTH_CLIENT_SECRET": "x"}
    )
    assert words in message
    assert "secret@" not in message
    assert "=secret" not in message


def test_environment_secrets_are_never_shown() -> None:
    settings = load_settings(SASL, environ={"TXBROKER_KAFKA_SASL_PASSWORD": PASSWORD})
    assert settings.kafka_secret("kafka_sasl_password") == PASSWORD
    assert SettingsLogin(settings).arguments()["sasl_plain_password"] == PASSWORD
    shown = [
        settings,
        settings.model_dump(),
        KafkaSettings.from_configuration(settings),
        settings_shown(settings),
    ]
    assert all(PASSWORD not in text for one in shown for text in (repr(one), str(one)))
    assert settings_shown(settings)["kafka_sasl_password"] == STRUCK_OUT
    assert PASSWORD in known_secrets(settings, "")


def test_empty_variable_is_no_secret() -> None:
    assert "kafka_sasl_password_file" in refused(SASL, {"TXBROKER_KAFKA_SASL_PASSWORD": ""})


def test_secret_has_one_source(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("x")
    options = {**SASL, "kafka_sasl_password_file": file}
    assert "exclude each other" in refused(options, {"TXBROKER_KAFKA_SASL_PASSWORD": PASSWORD})


@pytest.mark.parametrize("name", sorted(SECRET_SETTINGS))
def test_config_file_and_options_take_no_secret(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "txbroker.toml"
    file.write_text(f'{name} = "hunter2"\n')
    with pytest.raises(ConfigurationError, match=f"set TXBROKER_{name.upper()}") as raised:
        load_settings(config=file, environ={})
    assert "hunter2" not in str(raised.value)
    assert run(cli, ["topics", "plan", f"--{name.replace('_', '-')}", "hunter2"]) == 2
    assert "No such option" in capsys.readouterr().err


def test_help_shows_no_secret_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, secret in IN_ENVIRONMENT.items():
        monkeypatch.setenv(variable, secret)
    for command in ("proxy", "topics plan", "doctor", "audit run"):
        assert run(cli, [*command.split(), "--help"]) == 0
    output = "".join(capsys.readouterr())
    assert not [secret for secret in IN_ENVIRONMENT.values() if secret in output]


# --- certificates ----------------------------------------------------------------------------


def tls(authority: Authority, **changes: Any) -> Settings:
    given = {"kafka_security_protocol": "SSL", "kafka_ssl_ca_file": authority.cert}
    return load_settings({**given, **changes}, environ={})


def why(settings: Settings) -> str:
    """Return why the files of settings are refused."""
    with pytest.raises(ConfigurationError) as raised:
        KafkaSettings.from_configuration(settings)
    return str(raised.value)


def test_wrong_tls_files_are_explained(authority: Authority, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    assert f"kafka_ssl_ca_file {empty} contains no certificate" in why(
        tls(authority, kafka_ssl_ca_file=empty)
    )
    cert, key = authority.sign("pair")
    _, other = authority.sign("other")
    of_another = tls(authority, kafka_ssl_cert_file=cert, kafka_ssl_key_file=other)
    assert "is not the key of" in why(of_another)
    no_key = tls(authority, kafka_ssl_cert_file=cert, kafka_ssl_key_file=cert)
    assert "do not contain both" in why(no_key)
    swapped = tls(authority, kafka_ssl_cert_file=key, kafka_ssl_key_file=key)
    assert "do not contain both" in why(swapped)


def test_key_password_is_used(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.sign("locked", password=KEY_PASSWORD)
    given = {"kafka_ssl_cert_file": cert, "kafka_ssl_key_file": key}
    assert "has a password: set kafka_ssl_key_password_file" in why(tls(authority, **given))
    file = tmp_path / "key-password"
    file.write_text("wrong")
    given["kafka_ssl_key_password_file"] = file
    assert f"does not open kafka_ssl_key_file {key}" in why(tls(authority, **given))
    file.write_text(KEY_PASSWORD)
    context = SettingsLogin(tls(authority, **given)).arguments()["ssl_context"]
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_only_configured_authority_is_trusted(authority: Authority) -> None:
    context: ssl.SSLContext = SettingsLogin(tls(authority)).arguments()["ssl_context"]
    assert [one["subject"] for one in context.get_ca_certs()] == [((("commonName", "ca"),),)]


def test_changed_certificates_are_reloaded(authority: Authority, tmp_path: Path) -> None:
    first, second = authority.sign("first"), authority.sign("second")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    cert.write_bytes(first[0].read_bytes())
    key.touch(0o600)
    key.write_bytes(first[1].read_bytes())
    login = SettingsLogin(tls(authority, kafka_ssl_cert_file=cert, kafka_ssl_key_file=key))
    before = login.arguments()["ssl_context"]
    assert login.arguments()["ssl_context"] is before
    cert.write_bytes(second[0].read_bytes())
    # The key is still the old one: what fitted is used until both are there.
    assert login.arguments()["ssl_context"] is before
    key.write_bytes(second[1].read_bytes())
    after = login.arguments()["ssl_context"]
    assert after is not before
    assert login.arguments()["ssl_context"] is after


def test_cluster_audit_takes_no_local_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TXBROKER_KAFKA_SASL_PASSWORD", PASSWORD)
    words = ["--kafka-security-protocol", "SASL_SSL", "--kafka-sasl-username", "me"]
    words += ["--master", "yarn", "--deploy-mode", "cluster", "--out", "hdfs://x/audit"]
    assert run(cli, ["audit", "run", *words]) == 1
    output = capsys.readouterr().err
    assert "TXBROKER_KAFKA_SASL_PASSWORD is not sent to the cluster" in output
    assert "--kafka-sasl-password-file" in output
    assert PASSWORD not in output


# --- the page about connecting -------------------------------------------------------------------

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
