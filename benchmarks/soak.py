"""Load on three proxies, one of them killed every 20 s, with a balance of all transactions.

Prepared = committed + rolled back + parked + pending; committed = visible + refused; no message is
visible twice. The counts come from the topics, by code that imports nothing of txbroker, and the
tests' judge examines every transaction. Run `make soak MINUTES=10`.

In addition to the usual load (SDK with check-backs on a database, and HTTP to any proxy) some
producers always answer `unknown`, so that their transactions are parked, and some topics are
missing temporarily or permanently, so that transactions are refused.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.judge import Case, Judge, Seen, Topics, read_log, save
from tests.kit.evidence import listed
from tests.kit.fleet import Fleet, Web
from tests.kit.proxies import ProxyProcess
from tests.kit.readers import Along
from tests.kit.topic_reader import read_all
from tests.kit.until import until
from tests.kit.workload import Lane, LocalFailure, Recorder, Shop, answering
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import RequestError
from txbroker.sdk import Decision, Limits, Message, TransactionalProducer

KILL_EVERY_S = 20.0
LANES = 24
WEB_LANES = 4
REFUSED = 20


class Soak:
    """One run.

    Args:
        fleet: the proxies.
        shop: the business database.
        seconds: duration of the load.
        seed: of all random choices.
        folder: for the history, to judge it again; None: not kept.
    """

    def __init__(
        self, fleet: Fleet, shop: Shop, seconds: float, seed: int, folder: Path | None
    ) -> None:
        self._fleet = fleet
        self._shop = shop
        self._seconds = seconds
        self._seed = seed
        self._folder = folder
        self._end = 0.0
        self._recorder = Recorder()
        self._killed_at: list[float] = []
        self._memory: list[int] = []

    async def run(self) -> bool:
        """Run, print the result, and return True if everything adds up."""
        first = self._fleet.proxies[0]
        topics = [await first.topic(3), await first.topic(1)]
        along = Along(first.bootstrap, topics)
        gone, back = await first.topic(), await first.topic()
        stuck = [*await self._committed_later(gone), *await self._committed_later(back)]
        await first.delete_topic(gone)
        await first.delete_topic(back)
        for id in stuck:
            await first.tell(id, "commit")
        self._end = time.monotonic() + self._seconds
        async with contextlib.AsyncExitStack() as stack:
            producers = [
                await stack.enter_async_context(self._producer(number, group))
                for number, group in enumerate(("orders", "orders", "bills"))
            ]
            unsure = await stack.enter_async_context(self._producer(0, "unsure"))
            watching = asyncio.create_task(self._watch())
            try:
                await asyncio.gather(
                    self._kill(),
                    *[self._lane(n, producers[n % 3], topics) for n in range(LANES)],
                    *[self._web(n, topics[1]) for n in range(WEB_LANES)],
                    self._unsure(unsure, topics[0]),
                    self._bring_back(back),
                )
            finally:
                watching.cancel()
            await self._settle()
        read = await asyncio.to_thread(read_all, first.bootstrap, first.prefix, [*topics, back])
        # The topic that came back was not read during the load.
        seen = await asyncio.to_thread(along.end)
        read.along = [*seen, *(Seen(r, time.time()) for r in read.targets if r.topic == back)]
        lists = [await listed(proxy) for proxy in self._fleet.proxies]
        return self._report(read, lists)

    def _producer(self, number: int, group: str) -> TransactionalProducer:
        urls = self._fleet.urls
        check = answering(self._shop, self._recorder)
        return TransactionalProducer(
            [*urls[number:], *urls[:number]],
            group=group,
            check=(lambda request: Decision.UNKNOWN) if group == "unsure" else check,
            limits=Limits(answer_timeout_s=3, heartbeat_s=3),
        )

    # --- load ------------------------------------------------------------------------------

    async def _lane(self, number: int, producer: TransactionalProducer, topics: list[str]) -> None:
        fate = random.Random(f"{self._seed}/{number}")
        lane = Lane(f"lane-{number}", producer, self._shop, self._recorder, topics, fate)
        while time.monotonic() < self._end:
            await lane.run(1)
            await asyncio.sleep(fate.uniform(0.1, 0.3))

    async def _web(self, number: int, topic: str) -> None:
        fate = random.Random(f"{self._seed}/web/{number}")
        round_ = 0
        while time.monotonic() < self._end:
            round_ += 1
            name = f"web-{number}-{round_}"
            await Web(name, self._fleet.urls, topic, self._recorder).run(5, fate)
            await asyncio.sleep(fate.uniform(0.2, 1.0))

    async def _unsure(self, producer: TransactionalProducer, topic: str) -> None:
        """Prepare transactions whose checks always answer `unknown`."""
        for number in range(max(1, round(self._seconds / 5))):
            token = f"unsure/{number}"
            message = Message(topic, value=b"?", headers=(("token", token.encode()),))
            self._recorder.means(token, [message], business=False)
            with contextlib.suppress(LocalFailure, RequestError):
                with self._recorder.call("prepare", token) as call:
                    block = producer.transaction(message)
                    transaction = await block.__aenter__()
                    call.id = transaction.id
                error = LocalFailure("always unknown")
                await block.__aexit__(LocalFailure, error, None)
            await asyncio.sleep(1)

    async def _committed_later(self, topic: str) -> list[str]:
        """Prepare transactions for a topic that is deleted before they are committed."""
        ids = []
        for number in range(REFUSED):
            token = f"{topic}/{number}"
            headers = (("token", token.encode()),)
            self._recorder.means(token, [Message(topic, None, b"v", headers)], business=False)
            world = self._fleet.proxies[number % len(self._fleet.proxies)]
            body = {"topic": topic, "value": "v", "headers": {"token": token}}
            with self._recorder.call("prepare", token) as call:
                call.id = await world.prepare(body, group="refused", check_after_s=3000)
            ids.append(call.id)
        return ids

    async def _bring_back(self, topic: str) -> None:
        await asyncio.sleep(self._seconds * 0.7)
        await self._fleet.proxies[0].create_again(topic)

    # --- faults ----------------------------------------------------------------------------

    async def _kill(self) -> None:
        fate = random.Random(f"{self._seed}/kill")
        while True:
            await asyncio.sleep(min(KILL_EVERY_S, max(0.0, self._end - time.monotonic())))
            if time.monotonic() >= self._end:
                return
            proxy = fate.choice(self._fleet.proxies)
            self._memory.append(_resident_mib(proxy))
            await proxy.kill()
            self._killed_at.append(time.time())
            # Half of the outages outlast the session, so that other proxies take over.
            await asyncio.sleep(fate.choice([0, 9]))
            await proxy.launch()

    async def _watch(self) -> None:
        """Print the progress."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(KILL_EVERY_S)
            answered = sum(call.result == "ok" for call in self._recorder.history.calls)
            print(
                f"{time.monotonic() - began:5.0f} s: {answered} calls answered, "
                f"{len(self._killed_at)} kills, {len(self._shop.rows())} orders",
                file=sys.stderr,
                flush=True,
            )

    def _outages_s(self) -> list[float]:
        """Return the duration of the longest call at each kill."""
        until_s = [*self._killed_at[1:], float("inf")]
        return [
            max(
                (
                    call.ended - call.began
                    for call in self._recorder.history.calls
                    if call.ended > killed and call.began < over
                ),
                default=0.0,
            )
            for killed, over in zip(self._killed_at, until_s, strict=False)
        ]

    async def _settle(self) -> None:
        first = self._fleet.proxies[0]
        await self._fleet.whole(self._fleet.proxies)
        for left in await first.unsettled("web"):
            # Stored without an answer: no client knows the id.
            await first.tell(left["id"], "rollback")
        for group in ("orders", "bills", "unsure", "web"):
            await first.all_settled(group)

        async def only_gone_left() -> bool:
            return len(await first.unsettled("refused")) == REFUSED

        await until(only_gone_left)
        self._memory.extend(_resident_mib(proxy) for proxy in self._fleet.proxies)

    # --- result ----------------------------------------------------------------------------

    def _report(self, read: Topics, lists: list[dict[str, str]]) -> bool:
        sums = _sums(read)
        calls = Counter(f"{c.what} {c.result}" for c in self._recorder.history.calls)
        print(f"{self._seconds:.0f} s, {len(self._killed_at)} kills, seed {self._seed}")
        print("calls: " + ", ".join(f"{name} {n}" for name, n in sorted(calls.items())))
        print(", ".join(f"{name} {n}" for name, n in sums.items()))
        print(f"prepared {sums['prepared'] / self._seconds:.1f} transactions/s")
        outages_s = self._outages_s()
        print("longest call at each kill, s: " + " ".join(f"{s:.1f}" for s in outages_s))
        print(f"memory of a proxy at its peak: {max(self._memory)} MiB at most")
        settled = sums["visible"] + sums["rolled back"]
        kept = sums["parked"] + sums["refused"] + sums["pending"]
        whole = sums["prepared"] == settled + kept and sums["doubled"] == 0
        whole = whole and sums["committed"] == sums["visible"] + sums["refused"]
        print("adds up" if whole else "DOES NOT ADD UP")
        judge = Judge(self._recorder.history, read, self._shop.rows())
        found = judge.judge()
        for violation in found[:10]:
            print(violation)
        if self._folder is not None:
            save(Case(self._recorder.history, read, self._shop.rows()), self._folder)
        same = all(each == judge.unsettled() for each in lists)
        print(
            "every proxy lists " + ("what" if same else "SOMETHING ELSE THAN") + " the topics hold"
        )
        return whole and same and not found


def _sums(read: Topics) -> dict[str, int]:
    """Return the number of transactions in the topics, by state."""
    log = read_log(read)
    states = Counter(tx.state for tx in log.values())
    copies: dict[bytes | None, Any] = {}
    for record in sorted(read.parked, key=lambda record: (record.partition, record.offset)):
        copies[record.key] = record
    refused = {
        record.header("txb-id")
        for record in copies.values()
        if record.value is not None and '"refused"' in str(record.header("txb-kept"))
    }
    visible = Counter(
        (record.header("txb-id"), record.header("txb-seq")) for record in read.targets
    )
    return {
        "prepared": len(log),
        "committed": states["committed"],
        "rolled back": states["rolled_back"],
        "parked": states["parked"],
        "pending": states["pending"],
        "visible": len({id for id, _ in visible}),
        "refused": len(refused),
        "doubled": sum(count - 1 for count in visible.values()),
    }


def _resident_mib(proxy: ProxyProcess) -> int:
    status = Path(f"/proc/{proxy.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


async def soak(minutes: float, seed: int, kept: Path | None = None) -> bool:
    """Run on a new Kafka."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedKafka() as kafka:
        fleet = Fleet(kafka.bootstrap, 3, check_attempts_max=6, log_level="warning")
        shop = Shop(Path(folder) / "shop.db")
        try:
            await fleet.start()
            return await Soak(fleet, shop, minutes * 60, seed, kept).run()
        finally:
            # `close` prints the proxies' logs; stdout is for the result.
            with contextlib.redirect_stdout(sys.stderr):
                await fleet.close()


def main() -> int:
    """Run, and return 1 if anything does not add up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--folder", type=Path, help="keep the history there")
    given = parser.parse_args()
    return 0 if asyncio.run(soak(given.minutes, given.seed, given.folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
