"""The places of an audit's files that tests compare: the same folder, reached in several ways."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PLACES = ("", "file://", "viewfs://store")
"""What precedes a path; see `conftest.SPARK_CONF`."""
LOCAL, _, STORE = PLACES


class Place(NamedTuple):
    """A folder and how it is reached."""

    prefix: str
    folder: Path

    @property
    def uri(self) -> str:
        return f"{self.prefix}{self.folder}"

    @property
    def is_local(self) -> bool:
        return self.prefix != STORE
