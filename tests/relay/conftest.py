"""What the tests of relays share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.databases.places import Place
from tests.relay.shops import emptied
from txbroker.relay.outbox import Outbox


@pytest.fixture
def outbox(kind: Place) -> Iterator[Outbox]:
    """The outbox of each kind of database, without rows."""
    with emptied(kind) as outbox:
        yield outbox
