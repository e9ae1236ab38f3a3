"""Class 12: an unsafe configuration is refused at start, with the next step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kit.cli import Result
from tests.kit.secret_files import secret_file
from tests.secure.secret_proxy import call, words_of
from tests.tls.tls_files import Authority, Pair, locked
from txbroker.config.settings import load_settings
from txbroker.errors import ConfigurationError
from txbroker.kafka.door.door import KafkaDoor
from txbroker.proxy.process import run_proxy

CLASS = 12
TOKEN, OTHER_TOKEN = "planted-token-of-producers", "planted-token-of-operators"
PASSWORD = "planted-password"
NO_KAFKA = "127.0.0.1:9"

pytestmark = pytest.mark.needs_tool("openssl")

Json = dict[str, Any]


class Place(NamedTuple):
    """Files for the configurations of a test."""

    folder: Path
    pair: Pair
    other: Pair
    ca: Path

    def token(self, text: str = TOKEN, mode: int = 0o600, name: str = "token") -> Path:
        return secret_file(self.folder / name, text, mode)

    def open_key(self, mode: int = 0o644) -> Path:
        """Return the pair's key in a file that others can read."""
        return secret_file(self.folder / "open.key", self.pair.key.read_text(), mode)


@pytest.fixture(scope="session")
def _signed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Pair, Path]:
    authority = Authority(tmp_path_factory.mktemp("authority"), "ours")
    return authority.sign("proxy"), authority.sign("other"), authority.cert


@pytest.fixture
def place(_signed: tuple[Pair, Pair, Path], tmp_path: Path) -> Place:
    """A folder of the test's own, and certificates."""
    return Place(tmp_path, *_signed)


def tls(place: Place, **more: Any) -> Json:
    """Return sound settings of a listener with TLS, and changes to them."""
    return {"tls_cert_file": place.pair.cert, "tls_key_file": place.pair.key, **more}


def sasl(place: Place, **more: Any) -> Json:
    """Return sound settings of a login by password, and changes to them."""
    password = secret_file(place.folder / "password", PASSWORD)
    return {
        "kafka_security_protocol": "SASL_SSL",
        "kafka_sasl_username": "shop",
        "kafka_sasl_password_file": password,
        **more,
    }


def kafka_tls(place: Place, **more: Any) -> Json:
    """Return sound settings of TLS with Kafka, and changes to them."""
    return {
        "kafka_security_protocol": "SSL",
        "kafka_ssl_cert_file": place.pair.cert,
        "kafka_ssl_key_file": place.pair.key,
        **more,
    }


def oauth(place: Place, url: str, **more: Any) -> Json:
    """Return settings of tokens that are fetched from a URL."""
    secret = secret_file(place.folder / "client-secret", PASSWORD)
    return {
        "kafka_security_protocol": "SASL_SSL",
        "kafka_sasl_mechanism": "OAUTHBEARER",
        "kafka_oauth_token_url": url,
        "kafka_oauth_client_id": "shop",
        "kafka_oauth_client_secret_file": secret,
        **more,
    }


class Case(NamedTuple):
    """A configuration, and its refusal.

    Attributes:
        settings: made of the test's files.
        expected: part of the message.
        code: how `txbroker proxy` exits.
    """

    settings: Callable[[Place], Json]
    expected: str
    code: int = 2


OPEN_MODES = {
    "token readable by all users": 0o604,
    "token readable by all users, as umask leaves it": 0o644,
    "token writable by all users": 0o602,
    "token writable by the group": 0o660,
}
CASES: dict[str, Case] = {
    # --- who may call
    "public address without a credential": Case(
        lambda _: {"listen": "10.1.2.3:8470"}, "so any client could decide transactions: set"
    ),
    "every address without a credential": Case(
        lambda _: {"listen": "0.0.0.0:8470", "advertise": "http://proxy-1:8470"},
        "so any client could decide transactions: set",
    ),
    "public IPv6 address without a credential": Case(
        lambda _: {"listen": "[fd00::1]:8470"}, "so any client could decide transactions"
    ),
    "public admin address without a credential": Case(
        lambda _: {"admin_listen": "10.1.2.3:8471"}, "admin_listen 10.1.2.3:8471 can be reached"
    ),
    "admin address equal to the other": Case(
        lambda _: {"listen": "127.0.0.1:8470", "admin_listen": "127.0.0.1:8470"},
        "is the address of listen: choose another port",
    ),
    "admin token without an admin address": Case(
        lambda place: {"admin_token_file": place.token()}, "admin_token_file needs admin_listen"
    ),
    "every address advertised": Case(
        lambda place: {
            "listen": "0.0.0.0:8470",
            "advertise": "http://0.0.0.0:8470",
            "token_file": place.token(),
        },
        "is not an address that clients can call: name this machine",
    ),
    "every address without advertise": Case(
        lambda place: {"listen": "0.0.0.0:8470", "token_file": place.token()},
        "set advertise to the URL at which they reach this proxy",
    ),
    "advertised with a password": Case(
        lambda _: {"advertise": f"http://shop:{PASSWORD}@proxy-1:8470"},
        "advertise must not hold a user name or password",
    ),
    "advertised with a password and no such port": Case(
        lambda _: {"advertise": f"http://shop:{PASSWORD}@proxy-1:99999"},
        "advertise must not hold a user name or password",
    ),
    "plain text advertised for TLS": Case(
        lambda place: tls(place, advertise="http://proxy-1:8470"), "it must begin with https://"
    ),
    # --- token files
    **{
        name: Case(
            lambda place, mode=mode: {"token_file": place.token(mode=mode)},
            f"is open to other users of this machine (mode {mode:04o}): run `chmod 600",
        )
        for name, mode in OPEN_MODES.items()
    },
    "admin token readable by all users": Case(
        lambda place: {"admin_listen": "127.0.0.1:0", "admin_token_file": place.token(mode=0o644)},
        "is open to other users of this machine (mode 0644)",
    ),
    "token of 15 characters": Case(
        lambda place: {"token_file": place.token("x" * 15 + "\n")},
        "holds a token of 15 characters, which can be guessed: at least 16 are needed. Make one "
        "with `openssl rand -hex 32`",
    ),
    "token that is empty": Case(lambda place: {"token_file": place.token("\n")}, "is empty"),
    "token file that is missing": Case(
        lambda place: {"token_file": place.folder / "none"}, "No such file or directory"
    ),
    "one token for both roles": Case(
        lambda place: {
            "admin_listen": "127.0.0.1:0",
            "token_file": place.token(),
            "admin_token_file": place.token(f"{TOKEN}\n", name="admin"),
        },
        "hold the same secret",
    ),
    "peer secret equal to the token": Case(
        lambda place: {"token_file": place.token(), "peer_secret_file": place.token(name="peers")},
        "hold the same secret",
    ),
    "peer secret readable by all users": Case(
        lambda place: {"peer_secret_file": place.token(mode=0o644)},
        "is open to other users of this machine",
    ),
    "peer secret that is short": Case(
        lambda place: {"peer_secret_file": place.token("short")}, "of 5 characters"
    ),
    "principals writable by all users": Case(
        lambda place: {"principals_file": place.token("", mode=0o646)}, "can be written by other"
    ),
    "principals writable by their group": Case(
        lambda place: {"principals_file": place.token("", mode=0o664)}, "can be written by other"
    ),
    # --- TLS of the listener
    "key readable by all users": Case(
        lambda place: tls(place, tls_key_file=place.open_key()),
        "is open to other users of this machine (mode 0644): run `chmod 600",
        1,
    ),
    "key writable by the group": Case(
        lambda place: tls(place, tls_key_file=place.open_key(0o660)),
        "is open to other users of this machine (mode 0660)",
        1,
    ),
    "key with a passphrase": Case(
        lambda place: tls(place, tls_key_file=locked(place.pair, place.folder)),
        "holds a key with a passphrase: use one without",
        1,
    ),
    "key of another certificate": Case(
        lambda place: tls(place, tls_key_file=place.other.key), "is not the key of tls_cert_file", 1
    ),
    "key without a certificate": Case(
        lambda place: {"tls_key_file": place.pair.key},
        "tls_cert_file and tls_key_file belong together",
    ),
    "certificate without a key": Case(
        lambda place: {"tls_cert_file": place.pair.cert},
        "tls_cert_file and tls_key_file belong together",
    ),
    "client authority without TLS": Case(
        lambda place: {"tls_client_ca_file": place.ca},
        "tls_client_ca_file needs tls_cert_file and tls_key_file",
    ),
    "names of proxies without a client authority": Case(
        lambda place: tls(place, peer_names=("proxy-*",)), "peer_names needs tls_client_ca_file"
    ),
    # --- Kafka
    "password for Kafka without a login": Case(
        lambda place: sasl(place, kafka_security_protocol="PLAINTEXT"),
        "need kafka_security_protocol SASL_SSL or SASL_PLAINTEXT",
    ),
    "certificate for Kafka in plain text": Case(
        lambda place: kafka_tls(place, kafka_security_protocol="PLAINTEXT"),
        "needs kafka_security_protocol SSL or SASL_SSL",
    ),
    "login without a password": Case(
        lambda place: sasl(place, kafka_sasl_password_file=None),
        "needs kafka_sasl_username and kafka_sasl_password_file",
    ),
    "password for Kafka that is empty": Case(
        lambda place: sasl(
            place, kafka_sasl_password_file=secret_file(place.folder / "empty", "\n")
        ),
        "is empty",
    ),
    "key for Kafka readable by all users": Case(
        lambda place: kafka_tls(place, kafka_ssl_key_file=place.open_key()),
        "is open to other users of this machine (mode 0644)",
        1,
    ),
    "client secret over plain http": Case(
        lambda place: oauth(place, "http://login.example.org/token"),
        "would send the client's secret unencrypted: use https",
    ),
    "password in the token URL": Case(
        lambda place: oauth(place, f"https://shop:{PASSWORD}@login.example.org/token"),
        "must not have a user, query or fragment",
    ),
    "token for Kafka from two places": Case(
        lambda place: oauth(
            place,
            "https://login.example.org/token",
            kafka_oauth_token_file=secret_file(place.folder / "jwt", PASSWORD),
        ),
        "exclude each other",
    ),
}


async def start(settings: Json) -> None:
    """Start a proxy, as far as it comes without a Kafka."""
    given = load_settings({"listen": "127.0.0.1:0", "kafka": NO_KAFKA, **settings}, environ={})
    async with run_proxy(KafkaDoor.from_configuration(given), given):
        pass


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_unsafe_configuration_is_refused(case: Case, place: Place) -> None:
    """Refused at start, in a sentence that names the setting."""
    with pytest.raises(ConfigurationError) as caught:
        await start(case.settings(place))
    message = str(caught.value)
    assert case.expected in message
    assert "\n" not in message
    for secret in (TOKEN, OTHER_TOKEN, PASSWORD, "PRIVATE KEY"):
        assert secret not in message


def proxy(*words: object) -> Result:
    """Call `txbroker proxy` on a Kafka that is away."""
    return call(["proxy", "--kafka", NO_KAFKA, "--wait-for-kafka-s", "0", *words])


COMMANDS = (
    "public address without a credential",
    "token readable by all users",
    "token of 15 characters",
    "one token for both roles",
    "key readable by all users",
    "key for Kafka readable by all users",
    "client authority without TLS",
    "password in the token URL",
)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_exits_before_any_action(name: str, place: Place) -> None:
    """The command exits at once, with the sentence."""
    case = CASES[name]
    ended = proxy(*words_of(case.settings(place)))
    assert (ended.code, ended.out) == (case.code, ""), ended.err
    assert case.expected in ended.err
    assert "Traceback" not in ended.err
    assert '"event": "listening"' not in ended.err
    for secret in (TOKEN, OTHER_TOKEN, PASSWORD):
        assert secret not in ended.err


SECRETS = ("kafka_sasl_password", "kafka_oauth_client_secret", "kafka_ssl_key_password")


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("where", ["config file", "option"])
def test_exposed_secret_is_refused(name: str, where: str, tmp_path: Path) -> None:
    """Refused at start."""
    if where == "option":
        ended = proxy(f"--{name.replace('_', '-')}", PASSWORD)
        assert "No such option" in ended.err
    else:
        config = tmp_path / "txbroker.toml"
        config.write_text(f'{name} = "{PASSWORD}"\n')
        ended = proxy("--config", config)
        assert f"{name} is a secret, which config files do not keep" in ended.err
    assert (ended.code, ended.out) == (2, "")
    assert PASSWORD not in ended.err


def test_safe_configuration_reaches_kafka(place: Place) -> None:
    """The cases above are only refused for their unsafe part."""
    settings = {
        **tls(place, tls_key_file=secret_file(place.folder / "key", place.pair.key.read_text())),
        "token_file": place.token(mode=0o440),
        "admin_listen": "127.0.0.1:0",
        "admin_token_file": place.token(OTHER_TOKEN, name="admin"),
        "listen": "127.0.0.1:0",
    }
    ended = proxy(*words_of(settings))
    assert ended.code == 1
    assert f"no connection to Kafka at {NO_KAFKA}" in ended.err
