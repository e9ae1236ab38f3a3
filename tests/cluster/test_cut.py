"""A proxy that cannot reach Kafka, while SDKs and the other proxies reach it well."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.kit.fleet import Fleet, judged, owned_by, reached
from tests.kit.relays import Relay
from tests.kit.until import until
from tests.kit.workload import Recorder, Shop
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import OwnerUnavailable

LONG = bool(os.environ.get("TXBROKER_TEST_LONG"))
TRANSACTIONS = 4000 if LONG else 800


class CutFleet(Fleet):
    """Two proxies, each with a separate relay to Kafka."""

    def __init__(self, bootstrap: str, relays: list[Relay]) -> None:
        super().__init__(bootstrap, len(relays), [relay.address for relay in relays])
        self.relays = relays


@pytest.fixture
async def fleet(kafka: EmbeddedKafka) -> AsyncIterator[CutFleet]:
    async with AsyncExitStack() as stack:
        relays = [await Relay(kafka.bootstrap).start() for _ in range(2)]
        for relay in relays:
            stack.push_async_callback(relay.close)
        made = await stack.enter_async_context(CutFleet(kafka.bootstrap, relays))
        for relay in relays:
            stack.callback(relay.heal)
        yield made


@pytest.mark.parametrize("reset", [False, *([True] if LONG else [])])
async def test_proxy_cut_off_from_kafka_yields_and_returns(
    fleet: CutFleet, tmp_path: Path, reset: bool
) -> None:
    """Its requests arrive late, after its successor's claim (`reset`: never)."""

    async def cut(_: Fleet, recorder: Recorder, fate: random.Random) -> None:
        await reached(recorder, TRANSACTIONS // 8)
        number = fate.randrange(2)
        lonely, other = fleet.proxies[number], fleet.proxies[1 - number]
        relay = fleet.relays[number]
        topic = await other.topic()
        relay.cut()
        try:

            async def known() -> bool:
                return not await owned_by(lonely) and not await lonely.is_ready()

            await fleet.taken_over(other)
            await until(known)
            await reached(recorder, recorder.finished + 50)
            # It knows no proxy to forward a call to.
            with pytest.raises(OwnerUnavailable):
                await lonely.prepare({"topic": topic, "value": "v"}, group="web")
        finally:
            if reset:
                relay.reset()
            relay.heal()
        await fleet.whole(fleet.proxies)

    await judged(fleet, Shop(tmp_path / "shop.db"), cut, TRANSACTIONS)
