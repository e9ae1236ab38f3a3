"""Load on three proxies and a Kafka of three nodes while all of it breaks; the judge at the end.

Run as `python -m tests.faults.cluster.soak_faults --minutes 10 --seed 1`. It prints how often each
fault was met, how many transactions there were and what the judge found, and adds a line of JSON to
the file of `--results`. The seed fixes which faults come when and on what; what happens in between
is up to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from tests.faults.cluster.hostile import (
    CALL_S,
    KINDS,
    SMALL_BYTES,
    EvilChecks,
    Rough,
    group_of,
    leave_to_checks,
)
from tests.faults.cluster.linked_fleet import PROTOCOLS, LinkedFleet
from tests.faults.cluster.nemesis import FAULTS, HOLD_MAX_S, HOLD_MIN_S, OVER, Field, Nemesis
from tests.faults.cluster.services import GROUP, LIMITS, BulkLoad, MortalProducer, Spec, add
from tests.faults.cluster.three_nodes import ThreeNodes
from tests.faults.judge import Case, History, Judge, Seen, Topics, save
from tests.kit.fleet import listed, web_load
from tests.kit.http_calls import Caller, calling
from tests.kit.proxies import ProxyProcess
from tests.kit.topic_reader import Along, read_all
from tests.kit.workload import Recorder, Shop, answering
from txbroker.embedded.server import DEFAULT_VERSION
from txbroker.errors import RequestError
from txbroker.sdk import TransactionalProducer

PROXIES = 3
WEB_LANES, ROUGH_LANES, EVIL_LANES, MORTALS = 3, 3, 3, 2
REST_S = 300.0
"""Maximum wait for all transactions to settle; the judge decides whether it was too long."""
REPORT_EVERY_S = 20.0
SHOWN_MAX, STORIES_MAX = 10, 20
DISK_MB, DISK_MB_A_MINUTE = 512, 80


@dataclass
class Verdict:
    """The results of a run."""

    seed: int
    minutes: float
    kafka: str
    protocol: int
    """The version of Kafka's transaction protocol that is spoken."""
    faults: dict[str, int] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    """The kinds of faults that were chosen; empty: all."""
    hold_max_s: float | None = None
    """Maximum duration of a fault, seconds; None: the default of the nemesis."""
    late_ends: dict[str, int] = field(default_factory=dict)
    """Requests to end a Kafka transaction that came late or were not answered, by what became of
    them; `overtaken`: the proxy had gone on with the same transactional id when one arrived."""
    transactions: int = 0
    during: dict[str, int] = field(default_factory=dict)
    """Transactions that were prepared while a fault of a kind lasted."""
    groups: dict[str, int] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    rest_s: float = 0.0
    judge_s: float = 0.0
    memory_mb: int = 0
    """The most that the run and its judge needed, without Kafka, proxies and clients."""
    violations: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Soak:
    """One run.

    Args:
        folder: where records and history are kept.
    """

    def __init__(
        self, kafka: ThreeNodes, fleet: LinkedFleet, folder: Path, given: argparse.Namespace
    ) -> None:
        self._kafka = kafka
        self._fleet = fleet
        self._folder = folder
        self._given = given
        self._seed: int = given.seed
        self._shop = Shop(folder / "shop.db")
        self._recorder = Recorder()
        self._over = asyncio.Event()
        self._evil = EvilChecks(self._recorder)
        self._counts: Counter[str] = Counter()
        self._read = Topics()
        self._lists: list[dict[str, str]] = []
        self._rows: list[str] = []
        self._broken_off = False
        self.verdict = Verdict(
            given.seed,
            given.minutes,
            given.kafka,
            spoken(given.kafka, given.protocol),
            only=given.only or [],
            hold_max_s=given.hold_max_s,
        )

    async def run(self) -> None:
        """Run it, and read everything; `judge` looks at it."""
        create = self._kafka.create
        topics = [
            await asyncio.to_thread(create, f"target-{number}", parts)
            for number, parts in enumerate((3, 1))
        ]
        small = await asyncio.to_thread(
            create, "small", 1, max_message_bytes=str(SMALL_BYTES), retention_ms="-1"
        )
        targets = [*topics, small]
        await self._kafka.whole()
        along = Along(self._kafka.bootstrap, targets)
        await self._evil.start()
        mortals = [
            MortalProducer(
                f"mortal-{n}", self._fleet.urls, topics, self._folder / "shop.db", self._folder
            )
            for n in range(MORTALS)
        ]
        given = self._given
        bulk = BulkLoad(
            Spec(
                self._fleet.urls,
                topics,
                str(self._folder / "bulk.db"),
                given.lanes,
                given.pause_s,
                self._seed,
            ),
            self._folder,
        )
        field = Field(self._kafka, self._fleet, self._recorder, along, topics, mortals)
        try:
            for each in (*mortals, bulk):
                await each.launch()
            async with contextlib.AsyncExitStack() as stack:
                await self._under_load(stack, field, bulk, small)
                await self._mortals_over(stack, mortals)
                await self._rest()
        except Exception as error:
            self.broke_off(error)
        finally:
            await self._load_over(bulk)
            for mortal in mortals:
                await mortal.kill()
                add(self._recorder.history, mortal.history())
            await self._evil.close()
            self.verdict.wrong += field.wrong
        # Only records follow: millions of objects that stay, so collecting garbage is useless.
        gc.freeze()
        gc.disable()
        seen = await asyncio.to_thread(along.end)
        read = await asyncio.to_thread(
            read_all, self._kafka.bootstrap, self._fleet.proxies[0].prefix, targets
        )
        read.along = shared(seen, read)
        with_deleted(read, field.deleted)
        self._read = read
        self._lists = [await listed(proxy) for proxy in self._fleet.proxies]
        self._rows = [*self._shop.rows(), *bulk.rows()]

    def broke_off(self, error: Exception) -> None:
        self._broken_off = True
        traceback.print_exception(error)
        self.verdict.wrong.append(f"broke off: {error!r}")

    async def _under_load(
        self, stack: contextlib.AsyncExitStack, field: Field, bulk: BulkLoad, small: str
    ) -> None:
        topics = field.topics
        await self._register()
        nemesis = Nemesis(
            field,
            self._seed,
            self._given.only or list(FAULTS),
            self._given.hold_max_s or HOLD_MAX_S,
        )
        self._counts = nemesis.counts
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for n in range(WEB_LANES):
                    name = f"web-{n}"
                    urls, fate = self._fleet.urls, self._fate(name)
                    load = web_load(name, urls, topics[1], self._recorder, fate, over=self._over)
                    group.create_task(load)
                for n in range(ROUGH_LANES):
                    name = f"rough-{n}"
                    caller = await self._caller(stack, name)
                    rough = Rough(name, caller, (topics[0], small), self._fate(name))
                    group.create_task(rough.run(self._over))
                for n in range(EVIL_LANES):
                    name = f"evil-{n}"
                    caller = await self._caller(stack, name)
                    group.create_task(leave_to_checks(caller, name, topics[0], self._over))
                await nemesis.run(time.monotonic() + self._given.minutes * 60)
                self._recorder.note("healed")
                self._over.set()
                bulk.no_more()
                for mortal in field.mortals:
                    mortal.no_more()
                self._evil.good = True
        finally:
            watching.cancel()
            ends = sum((link.ghosts for link in self._kafka.links.values()), Counter[str]())
            self.verdict.late_ends = dict(sorted(ends.items()))
            self.verdict.faults = dict(sorted(nemesis.counts.items()))

    # --- load ------------------------------------------------------------------------------

    def _fate(self, name: str) -> random.Random:
        return random.Random(f"{self._seed}/{name}")

    async def _caller(self, stack: contextlib.AsyncExitStack, name: str) -> Caller:
        fate = self._fate(f"{name}/caller")
        return await stack.enter_async_context(
            calling(self._fleet.urls, self._recorder, fate, CALL_S)
        )

    async def _register(self) -> None:
        for kind in KINDS:
            group = group_of(kind)
            body = {"check_url": f"{self._evil.url}/{kind}"}
            await self._fleet.proxies[0].call("PUT", f"/v1/groups/{group}", body)

    async def _watch(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            # The history only grows: collecting garbage is useless.
            gc.freeze()
            calls = self._recorder.history.calls
            answered = sum(call.result == "ok" for call in calls)
            newest = [note.what for note in self._recorder.history.notes[-3:]]
            progress(
                f"{time.monotonic() - began:5.0f} s: {answered} of {len(calls)} calls answered, "
                f"{sum(self._counts.values())} faults, last: {', '.join(newest)}"
            )

    async def _load_over(self, bulk: BulkLoad) -> None:
        """Take over what the load did, also of a run that broke off."""
        try:
            add(self._recorder.history, await bulk.ended())
        except Exception as error:
            self.broke_off(error)
        finally:
            await bulk.kill()

    async def _mortals_over(
        self, stack: contextlib.AsyncExitStack, mortals: Sequence[MortalProducer]
    ) -> None:
        """Wait until killed producers have ended; another instance of their
        group answers for their transactions."""
        await stack.enter_async_context(
            TransactionalProducer(
                self._fleet.urls,
                group=GROUP,
                check=answering(self._shop, self._recorder),
                limits=LIMITS,
            )
        )
        for mortal in mortals:
            await mortal.ended()

    # --- rest ------------------------------------------------------------------------------

    async def _rest(self) -> None:
        began = time.monotonic()
        first = self._fleet.proxies[0]
        try:
            async with asyncio.timeout(REST_S):
                await self._kafka.whole(REST_S)
                progress(f"Kafka is healthy {time.monotonic() - began:.1f} s after the last fault")
                while not await self._owned():
                    await asyncio.sleep(0.2)
                progress(f"the proxies are healthy {time.monotonic() - began:.1f} s after it")
                while not await self._settled(first):
                    await asyncio.sleep(0.5)
        except TimeoutError:
            self.verdict.wrong.append(f"no rest within {REST_S:.0f} s")
        self._recorder.note("quiet")
        self.verdict.rest_s = round(time.monotonic() - began, 1)

    async def _owned(self) -> bool:
        """Whether the proxies are healthy; who has ended is started again."""
        self.verdict.wrong += await self._fleet.supervise()
        return await self._fleet.is_whole()

    async def _settled(self, first: ProxyProcess) -> bool:
        """Whether nothing is in flight. A prepare stored without an answer has no client: none
        knows its id, so it is rolled back here."""
        with contextlib.suppress(RequestError, aiohttp.ClientError, TimeoutError):
            pending = await _in_state(first, "pending")
            for left in pending:
                if left["group"] in ("web", "rough"):
                    await first.act(left["id"], "rollback")
            return not pending and not await _in_state(first, "committed")
        return False

    # --- results ---------------------------------------------------------------------------

    def judge(self) -> None:
        """Judge the records; the processes of the run may have ended."""
        began = time.monotonic()
        history, read = self._recorder.history, self._read
        # An interrupted run has unsettled transactions.
        judge = Judge(history, read, self._rows, settled=not self._broken_off)
        found = judge.judge()
        self.verdict.judge_s = round(time.monotonic() - began, 1)
        held = judge.unsettled()
        for proxy, each in zip(self._fleet.proxies, self._lists, strict=False):
            if each != held:
                apart = sorted(set(each.items()) ^ set(held.items()))[:5]
                self.verdict.wrong.append(f"{proxy.url} lists something else: {apart}")
        self.verdict.transactions = len(judge.log)
        self.verdict.during = during(history)
        self.verdict.groups = dict(sorted(Counter(tx.group for tx in judge.log.values()).items()))
        self.verdict.states = dict(Counter(tx.state for tx in judge.log.values()))
        self.verdict.calls = dict(
            sorted(Counter(f"{call.what} {call.result}" for call in history.calls).items())
        )
        self.verdict.violations = [f"{v.invariant} {v.id}: {v.why}" for v in found]
        if self._given.folder or found or self.verdict.wrong:
            kept = self._folder / "history"
            states = self._lists[0] if self._lists else {}
            options = {"settled": not self._broken_off}
            save(Case(history, read, self._rows, states, options), kept)
            (kept / "violations.txt").write_text("\n".join(map(str, found[:STORIES_MAX])))
            for number, proxy in enumerate(self._fleet.proxies):
                (kept / f"proxy-{number}.log").write_text("\n".join(proxy.stderr))
            progress(f"records and history are in {kept}")


async def _in_state(proxy: ProxyProcess, state: str) -> list[dict[str, Any]]:
    path = f"/v1/transactions?state={state}&limit=1000"
    return list((await proxy.call("GET", path))["transactions"])


def with_deleted(read: Topics, deleted: dict[tuple[str, int], int]) -> None:
    """Add records that the concurrent reader saw and that were deleted since."""
    there = {(r.topic, r.partition, r.offset) for r in read.targets}
    for seen in read.along or ():
        record = seen.record
        gone = record.offset < deleted.get((record.topic, record.partition), 0)
        if gone and (record.topic, record.partition, record.offset) not in there:
            read.targets.append(record)


def during(history: History) -> dict[str, int]:
    """Count the transactions that were prepared while a fault lasted, by its kind."""
    prepared = sorted(
        call.began for call in history.calls if call.what == "prepare" and call.result == "ok"
    )
    counts: Counter[str] = Counter()
    began: dict[tuple[str, str], float] = {}
    for note in history.notes:
        kind = note.what.removeprefix(OVER)
        if kind == note.what:
            began[kind, note.who] = note.at
        elif (since := began.pop((kind, note.who), None)) is not None:
            counts[kind] += bisect_left(prepared, note.at) - bisect_left(prepared, since)
    return dict(sorted(counts.items()))


def shared(seen: Sequence[Seen], read: Topics) -> list[Seen]:
    """Return the concurrent reader's records, as the same objects as those read after the run."""
    known = {record: record for record in read.targets}
    return [Seen(known.get(each.record, each.record), each.at) for each in seen]


def spoken(kafka: str, newest: int) -> int:
    """Return the version of the transaction protocol that proxies of at most `newest` speak with a
    version of Kafka; the second came with 4.0."""
    return newest if int(kafka.partition(".")[0]) >= 4 else PROTOCOLS[0]


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(verdict: Verdict, results: Path) -> bool:
    print("| fault | times | prepared meanwhile |\n| --- | --: | --: |")
    for kind, times in verdict.faults.items():
        print(f"| {kind} | {times} | {verdict.during.get(kind, 0)} |")
    total = sum(verdict.faults.values())
    print(f"| {len(verdict.faults)} kinds | {total} | |\n")
    print("groups: " + ", ".join(f"{name} {n}" for name, n in verdict.groups.items()))
    print("calls: " + ", ".join(f"{name} {n}" for name, n in verdict.calls.items()))
    ends = ", ".join(f"{how} {n}" for how, n in verdict.late_ends.items()) or "none"
    print(f"ends of turns that were late or unanswered: {ends}")
    print("transactions: " + ", ".join(f"{name} {n}" for name, n in verdict.states.items()))
    broken = dict(Counter(text.split()[0] for text in verdict.violations))
    for invariant, times in broken.items():
        print(f"BROKEN: {invariant} {times} times")
    for violation in verdict.violations[:SHOWN_MAX]:
        print(f"BROKEN: {violation}")
    for wrong in verdict.wrong:
        print(f"WRONG: {wrong}")
    print(f"judged in {verdict.judge_s} s, with {verdict.memory_mb} MB")
    print(
        f"seed {verdict.seed}, {verdict.minutes:g} min, Kafka {verdict.kafka}, "
        f"protocol {verdict.protocol}: "
        f"{verdict.transactions} transactions, {total} faults of {len(verdict.faults)} kinds, "
        f"rest after {verdict.rest_s} s, {len(verdict.violations)} violations"
    )
    line = asdict(verdict)
    line["violations"] = len(verdict.violations)
    line["broken"] = broken
    with results.open("a") as file:
        file.write(json.dumps({"at": time.strftime("%Y-%m-%d %H:%M"), **line}) + "\n")
    return not verdict.violations and not verdict.wrong and verdict.transactions > 0


async def soak(folder: Path, given: argparse.Namespace) -> Verdict:
    """Run on a dedicated Kafka; SIGTERM ends the run in order."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    names = [f"proxy-{number}" for number in range(PROXIES)]
    size_mb = round(DISK_MB + DISK_MB_A_MINUTE * given.minutes)
    with tempfile.TemporaryDirectory(prefix="txbroker-faults-") as temporary:
        kafka = ThreeNodes(
            Path(temporary), names, seed=given.seed, disk_mb=size_mb, version=given.kafka
        )
        try:
            await kafka.start()
            progress("Kafka is up")
            fleet = LinkedFleet(kafka, names, protocol=given.protocol)
            run = Soak(kafka, fleet, folder, given)
            try:
                await fleet.start()
                await run.run()
            except Exception as error:
                run.broke_off(error)
            finally:
                run.verdict.wrong += await fleet.end()
            await kafka.kill()
            run.judge()
            if run.verdict.violations or run.verdict.wrong:
                kafka.keep(folder / "kafka")
        finally:
            await kafka.close()
    run.verdict.memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return run.verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--kafka", default=DEFAULT_VERSION, help="Kafka's version")
    parser.add_argument("--lanes", type=int, default=300, help="of the SDK's load")
    parser.add_argument("--pause-s", type=float, default=0.2, help="of a lane, on average")
    parser.add_argument(
        "--protocol",
        type=int,
        choices=PROTOCOLS,
        default=PROTOCOLS[-1],
        help="the newest version of Kafka's transaction protocol that proxies speak",
    )
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), help="only these faults")
    parser.add_argument(
        "--hold-max-s",
        type=float,
        help=f"for how long a draw of faults lasts at most, {HOLD_MIN_S:g} or more; "
        f"default: {HOLD_MAX_S:g}",
    )
    parser.add_argument("--folder", type=Path, help="folder for records and history")
    parser.add_argument("--results", type=Path, default=Path("faults-results.jsonl"))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    folder = given.folder or Path(tempfile.mkdtemp(prefix="txbroker-history-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty: an older run would be judged with this one")
    verdict = uvloop.run(soak(folder, given))
    well = report(verdict, given.results)
    if well and not given.folder:
        shutil.rmtree(folder)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
