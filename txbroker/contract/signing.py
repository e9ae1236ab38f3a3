"""Signatures of check-backs: Standard Webhooks, symmetric, version 1."""

import base64
import binascii
import hashlib
import hmac

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"
TEST_HEADER = "txbroker-test"
"""On a test call, with the value `1`: only an answer with a status of 2xx is expected."""
SECRET_PREFIX = "whsec_"
"""The prefix of a secret that is base64 of the key, as Standard Webhooks writes it."""


def secret_key(secret: str | bytes) -> bytes:
    """Return the signing key: base64 after `whsec_`, else the secret itself.

    Raises:
        ValueError: the secret is empty, or what follows `whsec_` is not base64.
    """
    key = secret.encode() if isinstance(secret, str) else bytes(secret)
    if key.startswith(SECRET_PREFIX.encode()):
        try:
            key = base64.b64decode(key[len(SECRET_PREFIX) :], validate=True)
        except binascii.Error as error:
            raise ValueError(f"what follows {SECRET_PREFIX} is not base64: {error}") from None
    if not key:
        raise ValueError("a secret must not be empty")
    return key


def sign(secret: bytes, id: str, timestamp_s: int, body: bytes) -> str:
    """Return the `webhook-signature` of a call: `v1,` and base64 of HMAC-SHA256.

    Args:
        secret: the shared key.
        id: the `webhook-id`, another one for each call.
        timestamp_s: the `webhook-timestamp`, seconds since 1970.
        body: the request body, byte for byte.
    """
    signed = f"{id}.{timestamp_s}.".encode() + body
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()
