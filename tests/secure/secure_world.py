"""One Kafka with every way to log in, and the settings that go with each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from tests.secure.certificates import Authority, keystore
from tests.secure.issuer import AUDIENCE, Issuer
from txbroker.config.settings import Settings, load_settings
from txbroker.embedded import EmbeddedKafka

USER = "txbroker"
PASSWORD = "pa\"ss\\word, ='ö %7B"
"""With everything that a login or a JAAS line could trip over."""
WRONG = "wrong-pass-word"
CLIENT_ID, CLIENT_SECRET = "id:of client", "client+secret/%&="
KEY_PASSWORD = "key-pass-word"
SECRETS = (PASSWORD, WRONG, CLIENT_SECRET, KEY_PASSWORD)
REAUTH_MS = 4000
ADMIN_TIMEOUT_S = 60.0

LISTENERS = {
    "LOGIN": "SASL_SSL",
    "CLEAR": "SASL_PLAINTEXT",
    "SHORT": "SASL_SSL",
    "MUTUAL": "SSL",
    "ELSEWHERE": "SSL",
    "EXPIRED": "SSL",
}
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
WAYS = (*MECHANISMS, "OAUTHBEARER-URL", "CLEAR", "MUTUAL")
"""How a proxy may log in."""
_SCRAM = {
    "SCRAM-SHA-256": ScramMechanism.SCRAM_SHA_256,
    "SCRAM-SHA-512": ScramMechanism.SCRAM_SHA_512,
}
_LOGIN_MODULES = "org.apache.kafka.common.security"


class SecureKafka:
    """A Kafka that requires a login, except for the test itself at `inside`."""

    def __init__(self, folder: Path, authority: Authority, issuer: Issuer, token_url: str) -> None:
        self.folder = folder
        self.authority = authority
        self.issuer = issuer
        self.token_url = token_url
        self.client = self.authority.certificate(USER)
        self.server = EmbeddedKafka(properties=self._properties(), listeners=LISTENERS)
        self.password = self._file("password", PASSWORD)
        self.client_secret = self._file("client-secret", CLIENT_SECRET)

    @property
    def inside(self) -> str:
        """Where the test itself needs no login and may do everything."""
        return self.server.bootstrap

    def start(self) -> None:
        url = self.issuer.keys.as_uri()
        allowed = "-Dorg.apache.kafka.sasl.oauthbearer.allowed"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(
                "JAVA_TOOL_OPTIONS", f"{allowed}.urls={url} {allowed}.files={self.issuer.keys}"
            )
            self.server.start()
        self.add_user(USER, PASSWORD)

    def add_user(self, name: str, password: str) -> None:
        """Make a user of SCRAM, or give it a new password."""
        admin = AdminClient({"bootstrap.servers": self.inside, "log_level": 0})
        users = [
            UserScramCredentialUpsertion(
                name, ScramCredentialInfo(mechanism, 4096), password.encode()
            )
            for mechanism in _SCRAM.values()
        ]
        # One user a request: Kafka refuses to change one twice in the same.
        for user in users:
            for future in admin.alter_user_scram_credentials([user]).values():
                future.result(ADMIN_TIMEOUT_S)

    def settings(self, way: str, **changes: Any) -> Settings:
        return load_settings({**self.options(way), **changes}, environ={})

    def options(self, way: str) -> dict[str, Any]:
        """Return the settings of a way to log in, by name."""
        listener = way if way in LISTENERS else "LOGIN"
        given: dict[str, Any] = {
            "kafka": self.server.address(listener),
            "kafka_security_protocol": LISTENERS[listener],
        }
        if given["kafka_security_protocol"].endswith("SSL"):
            given["kafka_ssl_ca_file"] = self.authority.file
        if way == "MUTUAL":
            cert, key = self.client
            return {**given, "kafka_ssl_cert_file": cert, "kafka_ssl_key_file": key}
        if way == "OAUTHBEARER":
            token = self._file("token", self.issuer.token(USER))
            return {**given, "kafka_sasl_mechanism": way, "kafka_oauth_token_file": token}
        if way == "OAUTHBEARER-URL":
            return {
                **given,
                "kafka_sasl_mechanism": "OAUTHBEARER",
                "kafka_oauth_token_url": self.token_url,
                "kafka_oauth_client_id": CLIENT_ID,
                "kafka_oauth_client_secret_file": self.client_secret,
                "kafka_oauth_ca_file": self.authority.file,
                "kafka_oauth_scope": "kafka write",
            }
        if LISTENERS[listener].startswith("SASL"):
            given["kafka_sasl_mechanism"] = way if way in MECHANISMS else "SCRAM-SHA-256"
            given["kafka_sasl_username"] = USER
            given["kafka_sasl_password_file"] = self.password
        return given

    def _file(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.write_text(f"{content}\n", encoding="utf-8")
        return path

    def _properties(self) -> dict[str, str]:
        found = {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:ANONYMOUS;User:{USER};User:CN={USER}",
            "sasl.enabled.mechanisms": "SCRAM-SHA-256",
            "sasl.oauthbearer.jwks.endpoint.url": self.issuer.keys.as_uri(),
            "sasl.oauthbearer.expected.audience": AUDIENCE,
        }
        for name in LISTENERS:
            found |= _under(name, self._listener(name))
        return found

    def _listener(self, name: str) -> dict[str, str]:
        hosts = {"ELSEWHERE": "DNS:kafka.example.org"}.get(name, "IP:127.0.0.1,DNS:localhost")
        days = -1 if name == "EXPIRED" else 2
        given: dict[str, str] = {}
        if LISTENERS[name].endswith("SSL"):
            store = keystore(*self.authority.certificate(f"of-{name.lower()}", hosts, days=days))
            given |= {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(store)}
        if name == "MUTUAL":
            given |= {
                "ssl.client.auth": "required",
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self.authority.file),
            }
        if LISTENERS[name].startswith("SASL"):
            mechanisms = MECHANISMS if name == "LOGIN" else ("SCRAM-SHA-256",)
            given["sasl.enabled.mechanisms"] = ",".join(mechanisms)
            for mechanism in mechanisms:
                given[f"{mechanism.lower()}.sasl.jaas.config"] = _jaas(mechanism)
            if "OAUTHBEARER" in mechanisms:
                handler = f"{_LOGIN_MODULES}.oauthbearer.OAuthBearerValidatorCallbackHandler"
                given["oauthbearer.sasl.server.callback.handler.class"] = handler
        if name == "SHORT":
            given["scram-sha-256.connections.max.reauth.ms"] = str(REAUTH_MS)
        return given


def _under(listener: str, properties: Mapping[str, str]) -> dict[str, str]:
    return {f"listener.name.{listener.lower()}.{key}": text for key, text in properties.items()}


def _jaas(mechanism: str) -> str:
    if mechanism == "PLAIN":
        quoted = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
        return f'{_LOGIN_MODULES}.plain.PlainLoginModule required user_{USER}="{quoted}";'
    if mechanism == "OAUTHBEARER":
        return f"{_LOGIN_MODULES}.oauthbearer.OAuthBearerLoginModule required;"
    return f"{_LOGIN_MODULES}.scram.ScramLoginModule required;"
