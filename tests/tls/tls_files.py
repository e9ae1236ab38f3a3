"""Authorities and certificates for tests, made by openssl."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

_CONFIG = """\
[req]
distinguished_name = subject
prompt = no
[subject]
CN = {name}
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectAltName = {names}
"""
HOSTS = "DNS:localhost, IP:127.0.0.1"
PBES2, PBES1 = ("-v2", "aes-256-cbc"), ("-v1", "PBE-SHA1-3DES")


class Pair(NamedTuple):
    """A certificate and its private key."""

    cert: Path
    key: Path

    def copy_to(self, other: Pair) -> None:
        """Replace another pair by this one, as a renewal does."""
        for mine, theirs in zip(self, other, strict=True):
            fresh = theirs.with_suffix(".new")
            fresh.write_bytes(mine.read_bytes())
            fresh.chmod(mine.stat().st_mode)
            os.replace(fresh, theirs)


class Authority:
    """Signs certificates. The same name with another key is another authority."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.name = name
        self._pair = self._request(name, "")
        csr, config = self._pair.cert.with_suffix(".csr"), self._pair.cert.with_suffix(".cnf")
        _openssl("x509", "-req", "-in", csr, "-key", self._pair.key, "-days", "30", "-out",
                 self._pair.cert, "-extfile", config, "-extensions", "ca")  # fmt: skip

    @property
    def cert(self) -> Path:
        """Its own certificate, by which it is trusted."""
        return self._pair.cert

    def sign(
        self,
        name: str,
        hosts: str = HOSTS,
        *,
        days: int = 30,
        password: str = "",
        cipher: tuple[str, str] = PBES2,
    ) -> Pair:
        """Return a certificate for these hosts; one for less than no days has expired.

        Args:
            password: encrypts the key, if given, by `cipher`.
        """
        pair = self._request(name, hosts)
        csr, config = pair.cert.with_suffix(".csr"), pair.cert.with_suffix(".cnf")
        _openssl("x509", "-req", "-in", csr, "-CA", self.cert, "-CAkey", self._pair.key, "-days",
                 str(days), "-out", pair.cert, "-extfile", config, "-extensions", "leaf",
                 "-CAcreateserial")  # fmt: skip
        if password:
            plain = pair.key.rename(pair.key.with_suffix(".plain"))
            _openssl("pkcs8", "-topk8", *cipher, "-in", plain, "-out", pair.key, "-passout",
                     f"pass:{password}")  # fmt: skip
        return pair

    def _request(self, name: str, hosts: str) -> Pair:
        folder = self._folder / f"{self.name}-{name}"
        folder.mkdir(exist_ok=True)
        pair = Pair(folder / "tls.crt", folder / "tls.key")
        config = folder / "tls.cnf"
        config.write_text(_CONFIG.format(name=name, names=hosts or "DNS:none"))
        _openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
                 "-nodes", "-keyout", pair.key, "-out", folder / "tls.csr", "-config",
                 config)  # fmt: skip
        return pair


def locked(pair: Pair, folder: Path) -> Path:
    """Return a file with the pair's key under a passphrase."""
    path = folder / "locked.key"
    _openssl("ec", "-in", pair.key, "-aes256", "-passout", "pass:secret", "-out", path)
    return path


def _openssl(*words: str | Path) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
