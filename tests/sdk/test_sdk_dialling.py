"""An unexpected error of a connection is logged and retried after a pause."""

from __future__ import annotations

import logging

import pytest

from txbroker.errors import OwnerUnavailable
from txbroker.sdk.limits import Limits
from txbroker.sdk.router import Router
from txbroker.sdk.session import Session


async def test_unexpected_connect_error_is_logged_and_paused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "txbroker.sdk")
    dialled: list[str] = []

    async def dial(address: str) -> Session:
        dialled.append(address)
        raise AttributeError("unexpected")

    router = Router(["http://127.0.0.1:1"], dial, Limits())
    try:
        with pytest.raises(OwnerUnavailable, match="AttributeError"):
            await router.start(0.5)
    finally:
        await router.close()
    assert 1 <= len(dialled) < 20
    assert len(caplog.records) == len(dialled)
