"""Certificates of a test authority, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

PBES2, PBES1 = ("-v2", "aes-256-cbc"), ("-v1", "PBE-SHA1-3DES")


class Authority:
    """Signs certificates; everything is kept as PEM in one folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = _key(folder / f"{name}.key")
        self.file = folder / f"{name}.pem"
        _openssl(
            "req", "-x509", "-new", "-key", self._key, "-subj", f"/CN={name}", "-days", "2",
            "-out", self.file,
        )  # fmt: skip

    def certificate(
        self,
        name: str,
        hosts: str = "",
        *,
        days: int = 2,
        password: str = "",
        cipher: tuple[str, str] = PBES2,
    ) -> tuple[Path, Path]:
        """Make a certificate and its key; return their files.

        Args:
            name: of the authority and its files.
            hosts: for whom it is, as in `IP:127.0.0.1`.
            days: how long it holds; negative: it has expired.
            password: encrypts the key, if given, by `cipher`.
        """
        key, cert = _key(self._folder / f"{name}.key"), self._folder / f"{name}.pem"
        request, more = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        more.write_text(f"subjectAltName={hosts}\n" if hosts else "basicConstraints=CA:FALSE\n")
        _openssl("req", "-new", "-key", key, "-subj", f"/CN={name}", "-out", request)
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self._key,
            "-CAcreateserial", "-days", str(days), "-extfile", more, "-out", cert,
        )  # fmt: skip
        if password:
            plain = key.rename(key.with_suffix(".plain"))
            _openssl(
                "pkcs8", "-topk8", *cipher, "-in", plain, "-out", key,
                "-passout", f"pass:{password}",
            )  # fmt: skip
        return cert, key


def keystore(cert: Path, key: Path) -> Path:
    """Return a file with both, as Kafka's PEM keystores are."""
    both = cert.with_suffix(".store")
    both.write_text(key.read_text() + cert.read_text())
    return both


def _key(path: Path) -> Path:
    # In PKCS#8, the only form that Java reads.
    _openssl(
        "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", path
    )  # fmt: skip
    return path


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
