"""The secret of a series of audits, in its data folder; without Spark."""

import hashlib
import re
import secrets

from txbroker.errors import ConfigurationError
from txbroker.spark.storage.folder import DataFolder

SECRET_FILE = "audit.secret"
SECRET = "txb-audit-secret:[0-9a-f]{64}"
"""The form of a secret, by which Spark leaves it out of the plans that it shows and logs."""


def secret_in(folder: DataFolder) -> str:
    """Return the secret of a data folder, drawn by the first call; the caller holds
    `DataFolder.alone`.

    Raises:
        ConfigurationError: the file is damaged, or cannot be read or written.
    """
    content = folder.read(SECRET_FILE)
    if content is None:
        content = f"txb-audit-secret:{secrets.token_hex(32)}".encode()
        folder.write(SECRET_FILE, content)
    text = content.decode(errors="replace")
    if not re.fullmatch(SECRET, text):
        raise ConfigurationError(
            f"the secret {folder.path}/{SECRET_FILE} is damaged: restore it, or remove it and run "
            "a full audit (--full)"
        )
    return text


def mark_of(secret: str) -> str:
    """Return a text that is the same for the same secret, and reveals nothing else of it."""
    return hashlib.sha256(f"mark {secret}".encode()).hexdigest()[:16]
