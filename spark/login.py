"""What Spark's Kafka client, which is Java's, is told about TLS and the login.

It takes no files for secrets, so they are in these options. Spark and the client itself strike
them out of what they log.
"""

from __future__ import annotations

from pathlib import Path

from txbroker.config.settings import Settings
from txbroker.errors import ConfigurationError

_MODULES = "org.apache.kafka.common.security"
_PREFIX = "kafka."


def login_options(settings: Settings) -> dict[str, str]:
    """Return options of Spark's Kafka source, by their names there.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    protocol = settings.kafka_security_protocol
    options = {"security.protocol": str(protocol)}
    if protocol.endswith("SSL"):
        options |= _tls(settings)
    if protocol.startswith("SASL"):
        mechanism = settings.kafka_sasl_mechanism
        options["sasl.mechanism"] = mechanism
        options |= _by_token(settings) if mechanism == "OAUTHBEARER" else _by_password(settings)
    return {f"{_PREFIX}{name}": text for name, text in options.items()}


def _tls(settings: Settings) -> dict[str, str]:
    options: dict[str, str] = {}
    if settings.kafka_ssl_ca_file is not None:
        options["ssl.truststore.type"] = "PEM"
        options["ssl.truststore.certificates"] = _text(settings.kafka_ssl_ca_file)
    if settings.kafka_ssl_cert_file is not None and settings.kafka_ssl_key_file is not None:
        options["ssl.keystore.type"] = "PEM"
        options["ssl.keystore.certificate.chain"] = _text(settings.kafka_ssl_cert_file)
        options["ssl.keystore.key"] = _text(settings.kafka_ssl_key_file)
        if password := settings.kafka_secret("kafka_ssl_key_password"):
            options["ssl.key.password"] = password
    return options


def _by_password(settings: Settings) -> dict[str, str]:
    kind = "plain.Plain" if settings.kafka_sasl_mechanism == "PLAIN" else "scram.Scram"
    password = settings.kafka_secret("kafka_sasl_password")
    return _jaas(f"{kind}LoginModule", username=settings.kafka_sasl_username, password=password)


def _by_token(settings: Settings) -> dict[str, str]:
    handler = f"{_MODULES}.oauthbearer.OAuthBearerLoginCallbackHandler"
    options = {"sasl.login.callback.handler.class": handler}
    name = "oauthbearer.OAuthBearerLoginModule"
    if settings.kafka_oauth_token_file is not None:
        # Read once: where Spark runs for longer than the token is valid, fetch tokens instead.
        url = settings.kafka_oauth_token_file.absolute().as_uri()
        return {**options, "sasl.oauthbearer.token.endpoint.url": url, **_jaas(name)}
    given = {
        "clientId": settings.kafka_oauth_client_id,
        "clientSecret": settings.kafka_secret("kafka_oauth_client_secret"),
    }
    if settings.kafka_oauth_scope:
        given["scope"] = settings.kafka_oauth_scope
    if settings.kafka_oauth_ca_file is not None:
        given["ssl.truststore.type"] = "PEM"
        given["ssl.truststore.certificates"] = _text(settings.kafka_oauth_ca_file)
    return {
        **options,
        "sasl.oauthbearer.token.endpoint.url": settings.kafka_oauth_token_url,
        # As RFC 6749 wants it, and as the proxies do it.
        "sasl.oauthbearer.header.urlencode": "true",
        **_jaas(name, **given),
    }


def _jaas(module: str, **given: str) -> dict[str, str]:
    written = "".join(f' {name}="{_quoted(text)}"' for name, text in given.items())
    return {"sasl.jaas.config": f"{_MODULES}.{module} required{written};"}


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
