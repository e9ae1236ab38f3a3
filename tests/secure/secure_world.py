"""One Kafka with every way to log in, and the settings that go with each."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from msgspec import structs

from tests.kit.kafka import KafkaHarness
from tests.tls.tls_files import HOSTS, Authority, Pair
from txbroker.config.settings import Settings, load_settings
from txbroker.embedded import EmbeddedKafka
from txbroker.kafka import KafkaDoor, KafkaSettings
from txbroker.kafka.client.acls import Right
from txbroker.kafka.client.login import NoLogin, SettingsLogin

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
        self.client = self.authority.sign(USER)
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
            given["kafka_ssl_ca_file"] = self.authority.cert
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
                "kafka_oauth_ca_file": self.authority.cert,
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
        hosts = {"ELSEWHERE": "DNS:kafka.example.org"}.get(name, HOSTS)
        days = -1 if name == "EXPIRED" else 2
        given: dict[str, str] = {}
        if LISTENERS[name].endswith("SSL"):
            store = _keystore(self.authority.sign(f"of-{name.lower()}", hosts, days=days))
            given |= {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(store)}
        if name == "MUTUAL":
            given |= {
                "ssl.client.auth": "required",
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self.authority.cert),
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


def _keystore(pair: Pair) -> Path:
    """Return a file with both, as Kafka's PEM keystores are."""
    both = pair.cert.with_suffix(".store")
    both.write_text(pair.key.read_text() + pair.cert.read_text())
    return both


def _under(listener: str, properties: Mapping[str, str]) -> dict[str, str]:
    return {f"listener.name.{listener.lower()}.{key}": text for key, text in properties.items()}


def _jaas(mechanism: str) -> str:
    if mechanism == "PLAIN":
        quoted = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
        return f'{_LOGIN_MODULES}.plain.PlainLoginModule required user_{USER}="{quoted}";'
    if mechanism == "OAUTHBEARER":
        return f"{_LOGIN_MODULES}.oauthbearer.OAuthBearerLoginModule required;"
    return f"{_LOGIN_MODULES}.scram.ScramLoginModule required;"


# --- tokens --------------------------------------------------------------------------------------

AUDIENCE = "kafka"
_KEY_ID = "one"
_TOKENS = itertools.count()


class Issuer:
    """Signs tokens; `keys` is the file by which they are verified."""

    def __init__(self, folder: Path) -> None:
        self._key = folder / "issuer.key"
        self.keys = folder / "jwks.json"
        bits = ("-pkeyopt", "rsa_keygen_bits:2048")
        _signed("genpkey", "-algorithm", "RSA", *bits, "-out", str(self._key))
        output = _signed("rsa", "-in", str(self._key), "-noout", "-modulus").decode().strip()
        modulus = bytes.fromhex(output.removeprefix("Modulus="))
        key = {"kty": "RSA", "kid": _KEY_ID, "use": "sig", "alg": "RS256", "e": "AQAB"}
        self.keys.write_text(json.dumps({"keys": [{**key, "n": _coded(modulus)}]}))

    def token(self, user: str, life_s: float = 3600.0) -> str:
        now = int(time.time())
        head = {"alg": "RS256", "kid": _KEY_ID, "typ": "JWT"}
        claims: dict[str, str | int] = {
            "sub": user,
            "aud": AUDIENCE,
            "iat": now - 60,
            "exp": int(now + life_s),
        }
        claims["jti"] = str(next(_TOKENS))
        payload = ".".join(_coded(json.dumps(part).encode()) for part in (head, claims))
        signed = _signed("dgst", "-sha256", "-sign", str(self._key), given=payload.encode())
        return f"{payload}.{_coded(signed)}"


def _coded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _signed(*arguments: str, given: bytes = b"") -> bytes:
    done = subprocess.run(["openssl", *arguments], input=given, capture_output=True, check=True)
    return done.stdout


# --- a user with some rights ---------------------------------------------------------------------

_NUMBERS = itertools.count()
_USERS_PASSWORD = "a-password-of-a-user"
_OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Create": AclOperation.CREATE,
    "Describe": AclOperation.DESCRIBE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
    "AlterConfigs": AclOperation.ALTER_CONFIGS,
}
_RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional-id": ResourceType.TRANSACTIONAL_ID,
}


class AllowedWorld(KafkaHarness):
    """Doors log in as a user of this test's; the test itself may do everything."""

    def __init__(self, kafka: SecureKafka, way: str = "CLEAR") -> None:
        super().__init__(kafka.inside)
        self.user = f"user-{next(_NUMBERS)}"
        kafka.add_user(self.user, _USERS_PASSWORD)
        password = kafka.folder / f"{self.user}.password"
        password.write_text(_USERS_PASSWORD)
        self.login: Settings = kafka.settings(
            way,
            kafka_sasl_username=self.user,
            kafka_sasl_password_file=password,
            topic_prefix=self.prefix,
        )

    def settings(self, instance_id: str = "one", **changes: Any) -> KafkaSettings:
        """Settings that log in, and wait for nothing for long."""
        given: dict[str, Any] = {
            "bootstrap_servers": (self.login.kafka,),
            "login": partial(SettingsLogin, self.login),
            # As KafkaSettings.from_configuration names it.
            "group_id": self.prefix,
            "watermark_timeout_s": 5.0,
        }
        return super().settings(instance_id, **{**given, **changes})

    async def make_topics(self) -> None:
        """Create txbroker's topics, as an authorized user."""
        settings = structs.replace(
            self.settings(partitions=1), bootstrap_servers=(self.bootstrap,), login=NoLogin
        )
        door = KafkaDoor(settings)
        try:
            await door.apply(await door.plan())
            await door.start()  # which remembers how they were made
        finally:
            await door.close()

    async def allow(self, rights: Iterable[Right]) -> None:
        """Grant rights."""
        bindings = [one for right in rights for one in self._bindings(right, right.operations)]
        await asyncio.to_thread(self._wait, lambda admin: admin.create_acls(bindings))

    async def take(self, right: Right, operation: str) -> None:
        """Take an operation of a right away."""
        (one,) = self._bindings(right, [operation])
        matching = AclBindingFilter(
            one.restype,
            one.name,
            one.resource_pattern_type,
            one.principal,
            one.host,
            one.operation,
            one.permission_type,
        )
        (found,) = await asyncio.to_thread(self._wait, lambda admin: admin.delete_acls([matching]))
        assert len(found) == 1

    def _wait(self, change: Callable[[AdminClient], Mapping[Any, Any]]) -> list[Any]:
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        return [future.result(ADMIN_TIMEOUT_S) for future in change(admin).values()]

    def _bindings(self, right: Right, operations: Iterable[str]) -> list[AclBinding]:
        pattern = ResourcePatternType.PREFIXED if right.prefixed else ResourcePatternType.LITERAL
        return [
            AclBinding(
                _RESOURCES[right.resource],
                right.name,
                pattern,
                f"User:{self.user}",
                "*",
                _OPERATIONS[operation],
                AclPermissionType.ALLOW,
            )
            for operation in operations
        ]
