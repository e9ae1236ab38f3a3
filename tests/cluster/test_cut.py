"""A proxy that cannot reach Kafka, while SDKs and the other proxies reach it well."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kit.fleet import PARTITIONS, SESSION_S, Fleet, judged, owned_by, reached
from tests.kit.proxies import ProxyProcess
from tests.kit.relays import Relay
from tests.kit.until import unique, until
from tests.kit.workload import Recorder, Shop
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import OwnerUnavailable

LONG = bool(os.environ.get("TXBROKER_TEST_LONG"))
TRANSACTIONS = 4000 if LONG else 800


class CutFleet(Fleet):
    """Two proxies, each with a separate relay to Kafka."""

    def __init__(self, bootstrap: str, relays: list[Relay]) -> None:
        super().__init__(bootstrap, 0)
        self.relays = relays
        prefix = unique("cut")
        self.proxies = [
            ProxyProcess(
                bootstrap,
                kafka=relay.address,
                instance=f"proxy-{number}",
                topic_prefix=prefix,
                partitions=PARTITIONS,
                session_timeout_s=SESSION_S,
                check_after_s=1.0,
                check_interval_s=1.0,
            )
            for number, relay in enumerate(relays)
        ]


@pytest.fixture
async def fleet(kafka: EmbeddedKafka) -> AsyncIterator[CutFleet]:
    relays = [await Relay(kafka.bootstrap).start() for _ in range(2)]
    made = CutFleet(kafka.bootstrap, relays)
    try:
        await made.start()
        yield made
    finally:
        for relay in relays:
            relay.heal()
        try:
            await made.close()
        finally:
            for relay in relays:
                await relay.close()


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

            async def taken() -> bool:
                return len(await owned_by(other)) == PARTITIONS

            async def known() -> bool:
                return not await owned_by(lonely) and not await lonely.is_ready()

            await until(taken)
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
