"""Signatures of check-backs: Standard Webhooks, symmetric, version 1."""

import base64
import hashlib
import hmac

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"


def sign(secret: bytes, id: str, timestamp_s: int, body: bytes) -> str:
    """Return the `webhook-signature` of a call: `v1,` and base64 of HMAC-SHA256.

    Args:
        secret: what both sides know.
        id: the `webhook-id`, another one for each call.
        timestamp_s: the `webhook-timestamp`, seconds since 1970.
        body: the request body, byte for byte.
    """
    signed = f"{id}.{timestamp_s}.".encode() + body
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()
