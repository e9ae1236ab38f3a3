"""Checks of the proxies and of the producer groups."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from txbroker.cli.doctor.findings import CheckLevel, CheckRegistry, Finding, Section, fine, judged
from txbroker.cli.doctor.proxies import NotAllowed, RegisteredGroup, TestCall, Unavailable
from txbroker.cli.doctor.subject import Subject
from txbroker.cli.output import duration
from txbroker.contract.service import GroupOverview, PartitionState

TESTS_PARALLEL = 8
"""Test calls in flight, few enough not to overload a group."""
TESTS_S = 12.0
"""Time for all test calls; those not made in time are reported."""
_DENIED = frozenset({401, 403})

proxies_book = CheckRegistry(Section.PROXIES, needs=("proxies-ready",))
groups_book = CheckRegistry(Section.GROUPS, needs=("proxies-ready",))


@proxies_book.check(
    "the proxies are ready",
    hint="A proxy's log and `/readyz` have the reason; it needs Kafka, its topics and its "
    "partitions. Name proxies by --url and --proxy.",
    doc="docs/runbooks/TxBrokerNotReady.md",
)
async def proxies_ready(subject: Subject) -> Finding:
    """Whether every known proxy answers and has caught up on its partitions."""
    named = subject.proxies.named
    problems: dict[str, str] = {}
    answers = await asyncio.gather(
        *(subject.proxies.ready(url) for url in named), return_exceptions=True
    )
    for url, answer in zip(named, answers, strict=True):
        if isinstance(answer, BaseException):
            if not isinstance(answer, Unavailable):
                raise answer
            problems[url] = str(answer)
        elif not answer.ready:
            problems[url] = f"{url} is not ready: {_why(answer.partitions, answer.problems)}"
    if len(problems) == len(named):
        return judged(CheckLevel.FAILS, "none is", list(problems.values()))
    for proxy in (await subject.overview()).proxies:
        if proxy.url in problems or proxy.url in named:
            continue
        if not proxy.reached:
            problems[proxy.url] = f"{proxy.url} does not answer: {proxy.why}"
        elif not proxy.ready:
            why = "; ".join(proxy.problems) or "it has not caught up"
            problems[proxy.url] = f"{proxy.url} is not ready: {why}"
    if problems:
        return judged(CheckLevel.FAILS, f"{len(problems)} are not", list(problems.values()))
    # A named proxy may report another URL.
    proxies = (await subject.overview()).proxies
    if remarks := [f"{one.url}: {why}" for one in proxies for why in one.problems]:
        return judged(CheckLevel.WARNING, "they are, with problems", remarks)
    count = len(proxies)
    return fine(f"{count} {'proxy' if count == 1 else 'proxies'}")


def _why(partitions: dict[str, str], problems: list[str]) -> str:
    settled = (PartitionState.OWNED, PartitionState.ELSEWHERE)
    waiting = [f"partition {p} is {state}" for p, state in partitions.items() if state not in
               settled]  # fmt: skip
    return "; ".join([*problems, *waiting]) or "without a reason"


@proxies_book.check(
    "every half partition is owned by exactly one proxy",
    hint="If one has no owner, start a proxy or find out why the claim fails; if two seem to own "
    "it, repeat the check: only one can write.",
    doc="docs/how-to/run-several-proxies.md",
)
async def proxies_owners(subject: Subject) -> Finding:
    """Whether each half partition has its owner, and only one."""
    overview = await subject.overview()
    owners: dict[int, list[str]] = defaultdict(list)
    for proxy in overview.proxies:
        for number in proxy.partitions:
            owners[number].append(proxy.url)
    lines = [
        f"partition {number} is claimed by {' and '.join(sorted(urls))}"
        for number, urls in sorted(owners.items())
        if len(urls) > 1
    ]
    lines += [
        f"partition {one.partition} is {one.state}{f' ({one.why})' if one.why else ''}, owner "
        f"{one.owner or 'none'}"
        for one in overview.partitions
        if one.state != PartitionState.OWNED
    ]
    if lines:
        return judged(CheckLevel.FAILS, "some are not", lines)
    if not overview.partitions:
        return judged(CheckLevel.FAILS, "the proxies report no half partition")
    return fine(f"{len(overview.partitions)} partitions")


@proxies_book.check(
    "there is a half partition for every proxy",
    hint="Run fewer proxies or `workers`, or migrate to more half partitions, as their number "
    "is fixed.",
    doc="docs/operate/partition-count.md",
)
async def proxies_partitions(subject: Subject) -> Finding:
    """Whether proxies, including `workers`, are idle for lack of half partitions."""
    overview = await subject.overview()
    proxies, partitions = len(overview.proxies), len(overview.partitions)
    if proxies > partitions:
        idle = [f"{one.url} owns none" for one in overview.proxies if not one.partitions]
        return judged(
            CheckLevel.WARNING, f"{proxies} proxies share {partitions} half partitions", idle
        )
    return fine(f"{partitions} half partitions for {proxies} proxies")


@proxies_book.check(
    "all proxies run the same version",
    hint="Finish the upgrade, or return to one version on all.",
)
async def proxies_version(subject: Subject) -> Finding:
    """Whether an upgrade is incomplete."""
    by_version: dict[str, list[str]] = defaultdict(list)
    for proxy in (await subject.overview()).proxies:
        if proxy.reached:
            by_version[proxy.version].append(proxy.url)
    if len(by_version) > 1:
        lines = [f"{version}: {', '.join(urls)}" for version, urls in sorted(by_version.items())]
        return judged(CheckLevel.WARNING, f"{len(by_version)} versions run", lines)
    return fine(next(iter(by_version), "none reported"))


# --- groups ----------------------------------------------------------------------------------


@groups_book.check(
    "every producer group can be checked",
    hint="Start an instance of the group with a check function, or correct the registered check "
    "URL: address, certificate, secret. `txbroker groups show NAME` shows it.",
    doc="docs/runbooks/TxBrokerGroupUnreachable.md",
)
async def groups_reachable(subject: Subject) -> Finding:
    """Whether each group has a connected instance or answers a test call, which is no check."""
    groups = {one.group: one for one in await subject.groups()}
    seen = {one.group: one for one in (await subject.overview()).groups}
    tested = await _test_calls(subject, [one for one in groups.values() if one.check_url])
    fails: list[str] = []
    remarks: list[str] = []
    untested: list[str] = []
    for name in sorted(groups.keys() | seen.keys()):
        connected = _sessions(groups.get(name), seen.get(name))
        call = tested.get(name)
        if isinstance(call, NotAllowed):
            failing = seen.get(name)
            if failing is not None and failing.unreachable_since_ms is not None:
                since = _since(failing, subject.now_s())
                remarks.append(f"{name}: its check URL fails{since}: {failing.unreachable_why}")
            untested.append(f"{name}: its check URL was not tested: {call}")
        elif call is not None and not call.answered:
            line = f"{name}: {call.endpoint or 'its check URL'}: {call.why}"
            (fails if not connected and _no_use(call) else remarks).append(line)
        elif call is None and not connected:
            undecided = seen[name].pending if name in seen else 0
            why = _since(seen.get(name), subject.now_s())
            line = (
                f"{name}: no instance with a check function is connected and no check URL is "
                f"registered{why}"
            )
            (fails if undecided else remarks).append(line)
    total = len(groups.keys() | seen.keys())
    if fails:
        return judged(
            CheckLevel.FAILS, f"{len(fails)} of {total} cannot", fails + remarks + untested
        )
    if remarks:
        return judged(
            CheckLevel.WARNING, f"{len(remarks)} of {total} need a look", remarks + untested
        )
    return judged(CheckLevel.OK, f"{total} group{'s' * (total != 1)}", untested)


async def _test_calls(
    subject: Subject, groups: list[RegisteredGroup]
) -> dict[str, TestCall | NotAllowed]:
    """Make a test call to each check URL, a few in parallel, within a time limit."""
    slots = asyncio.Semaphore(TESTS_PARALLEL)
    made: dict[str, TestCall | NotAllowed] = {
        one.group: TestCall(one.group, False, why="not tested in time") for one in groups
    }

    async def make(group: RegisteredGroup) -> None:
        timeout_s = group.timeout_s or subject.settings.check_timeout_s
        async with slots:
            try:
                made[group.group] = await subject.proxies.test_group(group.group, timeout_s)
            except NotAllowed as error:
                made[group.group] = error
            except Unavailable as error:
                made[group.group] = TestCall(group.group, False, why=str(error))

    try:
        async with asyncio.timeout(TESTS_S):
            await asyncio.gather(*(make(group) for group in groups))
    except TimeoutError:
        pass
    return made


@groups_book.check(
    "the proxies can use every group's registration",
    hint="Correct the registration as its details require, or allow it on every proxy: "
    "`secrets_dir`, `secret_env_allow`, `check_url_allow`.",
    doc="docs/how-to/write-a-check.md",
)
async def groups_usable(subject: Subject) -> Finding:
    """Whether the settings allow each group's check URL and secret reference."""
    groups = await subject.groups()
    lines = [f"{one.group}: {one.problem}" for one in groups if one.problem]
    if lines:
        return judged(CheckLevel.FAILS, f"{len(lines)} of {len(groups)} cannot be used", lines)
    return fine(f"{len(groups)} registered")


def _no_use(call: TestCall) -> bool:
    """Return True if a check would fail, too; other statuses may depend on the check's body."""
    return call.status is None or call.status in _DENIED or call.status in (404, 405)


def _sessions(group: RegisteredGroup | None, seen: GroupOverview | None) -> int:
    return max(group.sessions if group else 0, seen.sessions if seen else 0)


def _since(seen: GroupOverview | None, now_s: float) -> str:
    if seen is None or seen.unreachable_since_ms is None:
        return ""
    return f", for {duration(now_s - seen.unreachable_since_ms / 1000)}"
