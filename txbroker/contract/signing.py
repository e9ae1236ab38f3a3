"""Signatures of check-backs and their answers: Standard Webhooks, symmetric, version 1."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"
TEST_HEADER = "txbroker-test"
"""On a test call, with the value `1`: only an answer with a status of 2xx is expected."""
TOLERANCE_S = 300.0
"""Maximum age of a call or answer, or its lead: allows for clock drift and limits replays."""
SIGNATURES_MAX = 16
"""Signatures that are compared: more than a change of secrets needs."""
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


def headers(secret: bytes, id: str, timestamp_s: int, body: bytes) -> list[tuple[str, str]]:
    """Return the headers that sign a body; see `sign`."""
    return [
        (ID_HEADER, id),
        (TIMESTAMP_HEADER, str(timestamp_s)),
        (SIGNATURE_HEADER, sign(secret, id, timestamp_s, body)),
    ]


def flaw(
    secret: bytes,
    given: Mapping[str, str],
    body: bytes,
    *,
    now_s: float,
    tolerance_s: float = TOLERANCE_S,
) -> str:
    """Return why a body is not signed with `secret` recently; "" if it is.

    Args:
        given: the headers, by their names in lower case.
        now_s: seconds since 1970.
        tolerance_s: how many seconds the timestamp may be before or after `now_s`.
    """
    for name in (ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER):
        if not given.get(name):
            return f"no header {name}"
    timestamp = given[TIMESTAMP_HEADER]
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        return f"{TIMESTAMP_HEADER} is not a number of seconds"
    off_s = now_s - int(timestamp)
    if abs(off_s) > tolerance_s:
        return f"it is {off_s:.0f} s old; {tolerance_s:g} s are allowed"
    try:
        right = sign(secret, given[ID_HEADER], int(timestamp), body).encode()
    except UnicodeEncodeError:
        return f"{ID_HEADER} is not text"
    # Every signature is compared, in constant time, so that timing reveals nothing.
    matches = False
    for signature in given[SIGNATURE_HEADER].split(" ")[:SIGNATURES_MAX]:
        matches |= hmac.compare_digest(signature.encode(errors="replace"), right)
    return "" if matches else "no signature matches the secret"
