"""Enumerates crashes on a real Kafka, heals, and lets the judge look at everything.

Each case is one moment (`txbroker.failpoints`), what happens there (the proxy is killed, or stops
and wakes up when others have taken its place, or an answer is lost) and how the transactions end.
Run as `python -m tests.faults.crash_run`; words choose the cases that hold one of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.faults import judge
from tests.faults.crash_cases import RESTARTED, Case, all_cases, chosen_cases
from tests.faults.forks import Forge
from tests.faults.judge import Asked
from tests.kit.fleet import listed, owned_by
from tests.kit.http_calls import GIVE_UP_S, Caller, listening
from tests.kit.proxies import ProxyProcess
from tests.kit.topic_reader import Along, read_all
from tests.kit.until import unique, until
from tests.kit.workload import Recorder
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import AlreadyDecided, RequestError

PARTITIONS = 2
SESSION_S = 2.0
CALL_S = 1.0
"""Timeout of a call, seconds; then the client retries."""
HEAL_S = GIVE_UP_S
_PAUSE_S = 0.15
FINAL = ("promoted", "rolled_back", "parked")


class FailingProxy(ProxyProcess):
    """A proxy whose moments can be armed."""

    def __init__(self, bootstrap: str, forge: Forge, armed: Path, **settings: Any) -> None:
        super().__init__(bootstrap, **settings)
        self._forge = forge
        self._armed = armed
        self.pids: set[int] = set()
        """Process ids of all its starts: one that took a step may have ended since."""

    async def _spawn(self, environment: Mapping[str, str]) -> Any:
        fork = await self._forge.fork([str(self._armed), "proxy"], environment)
        self.pids.add(fork.pid)
        return fork

    async def owned(self) -> list[int]:
        """Return the partitions that it reports as owned; none without an answer."""
        try:
            async with asyncio.timeout(CALL_S):
                return await owned_by(self)
        except TimeoutError:
            return []


class Pair:
    """Two proxies, the clients of both, and what these did."""

    def __init__(self, bootstrap: str, forge: Forge, folder: Path) -> None:
        self.bootstrap = bootstrap
        self.prefix = unique("crash")
        self.armed = folder / f"{self.prefix}.armed"
        self.fired = self.armed.with_suffix(".fired")
        self.recorder = Recorder()
        self.decisions: dict[str, str] = {}
        """Answers to check-backs, by token; unknown by default."""
        self._stack = contextlib.AsyncExitStack()
        self.rows: list[str] = []
        self.topics: list[str] = []
        self.gave_up: list[str] = []
        self._arms = itertools.count()
        self.proxies = [
            FailingProxy(
                bootstrap,
                forge,
                self.armed,
                instance=f"proxy-{number}",
                topic_prefix=self.prefix,
                partitions=PARTITIONS,
                session_timeout_s=SESSION_S,
                check_after_s=0.3,
                check_interval_s=0.3,
                check_attempts_max=3,
                check_timeout_s=1.0,
                snapshot_records_min=20,
                log_level="warning",
            )
            for number in range(2)
        ]

    # --- life ----------------------------------------------------------------------------

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/check", self._check)
        url = await self._stack.enter_async_context(listening(app))
        for proxy in self.proxies:
            await proxy.launch()
        await self.whole()
        first = self.proxies[0]
        self.topics = [await first.topic(2), await first.topic(1)]
        await first.call("PUT", "/v1/groups/shop", {"check_url": f"{url}/check"})

    async def close(self) -> None:
        """End both; their terminals must be clean."""
        await self._stack.aclose()
        for proxy in self.proxies:
            await proxy.close()

    async def whole(self) -> None:
        """Wait until both are ready, and own all partitions, each one its own."""

        async def owned() -> bool:
            ready = [await proxy.is_ready() for proxy in self.proxies]
            found = [await proxy.owned() for proxy in self.proxies]
            return all(ready) and [len(each) for each in found] == [1, 1]

        await until(owned, HEAL_S)

    async def _check(self, request: web.Request) -> web.Response:
        asked = await request.json()
        token = dict(asked["messages"][0]["headers"])["token"]
        decision = self.decisions.get(token, "unknown")
        answered = Asked(asked["id"], time.time(), decision, asked["attempt"])
        self.recorder.history.asked.append(answered)
        return web.json_response({"id": asked["id"], "decision": decision})

    # --- trouble -------------------------------------------------------------------------

    def arm(self, *steps: tuple[str, int, str]) -> None:
        """Arm moments, one after the other: name, how often it is passed before, action."""
        self.fired.unlink(missing_ok=True)
        steps = [
            {"point": point, "skip": skip, "action": action, "token": str(next(self._arms))}
            for point, skip, action in steps
        ]
        new = self.armed.with_suffix(".new")
        new.write_text(json.dumps(steps))
        new.rename(self.armed)

    async def went_off(self, count: int) -> FailingProxy:
        """Wait until `count` steps were taken; return the proxy that took the last."""

        async def done() -> list[str]:
            with contextlib.suppress(FileNotFoundError):
                lines = self.fired.read_text().splitlines()
                return lines if len(lines) >= count else []
            return []

        lines = await until(done, HEAL_S)
        step = json.loads(lines[-1])
        self.recorder.note(step["action"], f"{step['point']} {step['pid']}")
        return next(proxy for proxy in self.proxies if step["pid"] in proxy.pids)

    def mend(self) -> None:
        """Disarm, and wake paused proxies."""
        self.armed.unlink(missing_ok=True)
        for proxy in self.proxies:
            with contextlib.suppress(AssertionError, ProcessLookupError):
                proxy.resume()

    def other(self, proxy: FailingProxy) -> FailingProxy:
        return next(each for each in self.proxies if each is not proxy)

    async def taken_over(self, by: FailingProxy) -> None:
        async def all_of_it() -> bool:
            return len(await by.owned()) == PARTITIONS

        await until(all_of_it, HEAL_S)


class Client:
    """One transaction of a service without the SDK."""

    def __init__(self, pair: Pair, http: aiohttp.ClientSession, token: str, outcome: str) -> None:
        self._pair = pair
        urls = [proxy.url for proxy in pair.proxies]
        self._caller = Caller(http, urls, pair.recorder, random.Random(token))
        self.token = token
        self.outcome = outcome
        self.id = ""

    async def prepare(self, *topics: str, business: bool = False) -> None:
        token = self.token
        self.id = await self._caller.prepare(
            token, "shop", *topics, business=business, dedup_key=token
        )
        if business and self.outcome == "commit":
            self._pair.rows.append(self.id)

    async def decide(self, *, by_operator: bool = False) -> None:
        """Send commit or rollback; without a decision the check decides."""
        if self.outcome != "unknown":
            group = "" if by_operator else "shop"
            await self._caller.decide(self.outcome, self.token, self.id, group)

    async def contradict(self) -> None:
        """Send the contrary decision, which every proxy must refuse."""
        what = "rollback" if self.outcome == "commit" else "commit"
        with contextlib.suppress(AlreadyDecided):
            await self._caller.decide(what, self.token, self.id, "shop")

    async def ends(self, *states: str) -> None:
        end = time.monotonic() + GIVE_UP_S
        while True:
            shown = await self._caller.until_answered("show", self.token, self.id, None)
            if shown["state"] in states:
                return
            assert time.monotonic() < end, f"{self.token} stays {shown}"
            await asyncio.sleep(_PAUSE_S)


# --- a case ----------------------------------------------------------------------------------

NEIGHBOURS = 4
CROWD = 24
"""Neighbours enough for a snapshot of each partition (`snapshot_records_min` of the pair)."""
PAIRS = 3


class Crash:
    """One case on a pair of proxies that is whole."""

    def __init__(self, pair: Pair, case: Case) -> None:
        self._pair = pair
        self._case = case
        self._name = unique(case.name)

    async def run(self) -> None:
        pair, case = self._pair, self._case
        await self._before()
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            clients = self._clients(http)
            steps = self._steps()
            pair.arm(*steps)
            working = asyncio.gather(*[self._work(client) for client in clients])
            try:
                await self._provoke(clients)
                await self._heal(await pair.went_off(len(steps)))
                pair.recorder.note("healed")
                await working
            finally:
                working.cancel()
        await pair.whole()
        pair.recorder.note("quiet")
        assert not pair.armed.exists(), f"{case.name} is armed still"

    def _steps(self) -> list[tuple[str, int, str]]:
        case = self._case
        mine = (case.point, case.skip, case.action)
        # Only an owner in doubt claims again.
        return [("turn.ended", 0, "timeout"), mine] if case.step == "reclaim" else [mine]

    # --- load ----------------------------------------------------------------------------

    def _clients(self, http: aiohttp.ClientSession) -> list[Client]:
        """A client that decides, one that is checked, and neighbours with certain outcomes."""
        outcome = self._case.outcome
        roles = {"direct": outcome, "asked": outcome, "parked": outcome}
        for number in range(CROWD if self._case.step == "snapshots" else NEIGHBOURS):
            roles[f"neighbour-{number}"] = "rollback" if number % 4 == 3 else "commit"
        return [
            Client(self._pair, http, f"{self._name}/{role}", ends) for role, ends in roles.items()
        ]

    async def _work(self, client: Client) -> None:
        try:
            await self._live(client)
        except RequestError as error:
            # No other client can settle it; the judge reports any fault.
            self._pair.gave_up.append(f"{client.token} {client.id}: {error!r}")

    async def _live(self, client: Client) -> None:
        pair = self._pair
        role = client.token.rpartition("/")[2]
        if role == "parked":
            # Undecided until it is parked; then an operator decides.
            await client.prepare(pair.topics[1])
            await client.ends("parked")
            await client.decide(by_operator=True)
            await client.ends(*FINAL if client.outcome == "unknown" else FINAL[:2])
            return
        if role == "asked":
            pair.decisions[client.token] = client.outcome
            await client.prepare(pair.topics[0], business=True)
        else:
            await client.prepare(*pair.topics, business=True)
            await client.decide()
            if role == "neighbour-0":
                await client.contradict()
        await client.ends(*FINAL)

    # --- trouble -------------------------------------------------------------------------

    async def _before(self) -> None:
        """A partition moves only to a proxy that comes back."""
        pair, (first, second) = self._pair, self._pair.proxies
        if self._moves:
            assert await second.stop() == 0
            await pair.taken_over(first)

    @property
    def _moves(self) -> bool:
        return self._case.step == "handover" and self._case.point != "handover.suspended"

    async def _provoke(self, clients: Sequence[Client]) -> None:
        """Bring about what load alone does not."""
        pair, (first, second) = self._pair, self._pair.proxies
        if self._moves:
            await second.launch()
        elif self._case.step in RESTARTED:
            await until(lambda: all(client.id for client in clients), HEAL_S)
            await first.again()
        elif self._case.point == "handover.suspended":
            first.pause()
            pair.recorder.note("pause", "to lose touch")
            await pair.taken_over(second)
            first.resume()

    async def _heal(self, failed: FailingProxy) -> None:
        pair, action = self._pair, self._case.action
        if action == "kill":
            await failed.again()
        elif action == "pause":
            await pair.taken_over(pair.other(failed))
            failed.resume()
            pair.recorder.note("woken", failed.url)


# --- many -------------------------------------------------------------------------------------


@dataclass
class Result:
    """The results of the cases of one pair: the seconds of each by name, and the failures."""

    took: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    transactions: int = 0


async def run_pair(
    bootstrap: str, forge: Forge, cases: asyncio.Queue[Case], folder: Path, *, loud: bool = False
) -> Result:
    """Run cases on one pair until none is left or one fails; judge them together."""
    result = Result()
    pair = Pair(bootstrap, forge, folder)
    try:
        await pair.start()
        along = Along(bootstrap, pair.topics)
        while not cases.empty() and not result.failed:
            case = cases.get_nowait()
            began = time.monotonic()
            try:
                await Crash(pair, case).run()
            except Exception as error:
                output = [line for proxy in pair.proxies for line in proxy.stderr[-15:]]
                result.failed.append("\n".join([f"{case.name}: {error!r}", *output]))
                if loud:
                    print(result.failed[-1], file=sys.stderr, flush=True)
                pair.mend()
            result.took[case.name] = time.monotonic() - began
            if loud:
                print(f"{result.took[case.name]:6.1f} s  {case.name}", file=sys.stderr, flush=True)
        await _judge(pair, along, folder, result)
    except (AssertionError, OSError, ValueError) as error:
        result.failed.append(f"{pair.prefix}: {error!r}")
    finally:
        await pair.close()
    return result


async def _judge(pair: Pair, along: Along, folder: Path, result: Result) -> None:
    """Judge all cases of a pair. Where one failed nothing is at rest, and it is only kept."""
    seen = await asyncio.to_thread(along.end)
    lists = [] if result.failed else [await listed(proxy) for proxy in pair.proxies]
    read = await asyncio.to_thread(read_all, pair.bootstrap, pair.prefix, pair.topics)
    read.along = seen
    states = lists[0] if lists else {}
    judge.save(judge.Case(pair.recorder.history, read, pair.rows, states), folder / pair.prefix)
    looking = judge.Judge(pair.recorder.history, read, pair.rows, states)
    result.transactions = len(looking.log)
    if result.failed:
        return
    result.failed += [str(violation) for violation in looking.judge()]
    result.failed += pair.gave_up
    for each in lists:
        if each != looking.unsettled():
            result.failed.append(f"{pair.prefix}: a proxy lists {each}, not {looking.unsettled()}")


async def run_cases(
    bootstrap: str, cases: Sequence[Case], folder: Path, pairs: int, *, loud: bool = False
) -> list[Result]:
    queue: asyncio.Queue[Case] = asyncio.Queue()
    for case in cases:
        queue.put_nowait(case)
    results: list[Result] = []

    async def lane() -> None:
        while not queue.empty():
            results.append(await run_pair(bootstrap, forge, queue, folder, loud=loud))

    forge = Forge(folder)
    try:
        await asyncio.gather(*[lane() for _ in range(min(pairs, len(cases)))])
    finally:
        forge.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases that hold one of these")
    parser.add_argument("--chosen", action="store_true", help="only those of every test run")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of proxies at once")
    parser.add_argument("--folder", type=Path, help="keep the histories there")
    given = parser.parse_args()
    cases = [
        case
        for case in (chosen_cases() if given.chosen else all_cases())
        if not given.words or any(word in case.name for word in given.words)
    ]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, EmbeddedKafka() as kafka:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = asyncio.run(run_cases(kafka.bootstrap, cases, folder, given.pairs, loud=True))
    failed = [why for result in results for why in result.failed]
    done = sum(len(result.took) for result in results)
    transactions = sum(result.transactions for result in results)
    for why in failed:
        print(why)
    print(
        f"{done} of {len(cases)} cases, {transactions} transactions, "
        f"{time.monotonic() - began:.0f} s, {len(failed)} wrong"
    )
    return 1 if failed or done < len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
