"""An identity provider that signs tokens (RFC 7519)."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import time
from pathlib import Path

AUDIENCE = "kafka"
_KEY_ID = "one"
_NUMBERS = itertools.count()


class Issuer:
    """Signs tokens; `keys` is the file by which they are verified."""

    def __init__(self, folder: Path) -> None:
        self._key = folder / "issuer.key"
        self.keys = folder / "jwks.json"
        bits = ("-pkeyopt", "rsa_keygen_bits:2048")
        _openssl("genpkey", "-algorithm", "RSA", *bits, "-out", str(self._key))
        output = _openssl("rsa", "-in", str(self._key), "-noout", "-modulus").decode().strip()
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
        claims["jti"] = str(next(_NUMBERS))
        payload = ".".join(_coded(json.dumps(part).encode()) for part in (head, claims))
        signed = _openssl("dgst", "-sha256", "-sign", str(self._key), given=payload.encode())
        return f"{payload}.{_coded(signed)}"


def _coded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _openssl(*arguments: str, given: bytes = b"") -> bytes:
    done = subprocess.run(["openssl", *arguments], input=given, capture_output=True, check=True)
    return done.stdout
