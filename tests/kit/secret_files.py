"""Files with secrets, as txbroker takes them."""

from __future__ import annotations

from pathlib import Path


def secret_file(path: Path, text: str, mode: int = 0o600) -> Path:
    """Write a secret to a file with mode 0600, and return its path."""
    path.write_text(text)
    path.chmod(mode)
    return path
