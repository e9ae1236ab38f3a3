"""The broker: serves the calls for the half partitions that this proxy owns."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from statistics import median_low
from typing import Any, NamedTuple

from msgspec import structs

from txbroker import tracing
from txbroker.batching import Sticky
from txbroker.checkers.groups import Groups
from txbroker.config.settings import Settings
from txbroker.contract.service import (
    Answer,
    DecideRequest,
    History,
    HistoryRequest,
    ListRequest,
    Overview,
    PrepareRequest,
    Readiness,
    Request,
    Run,
    SearchPage,
    SearchRequest,
    SubmitRequest,
    TransactionPage,
    TransactionStatus,
    TransactionView,
)
from txbroker.core.encoding import headers_bytes, installation_headers
from txbroker.core.records import Cause, CheckPolicy, Half, Message, Place, Source, attributes_of
from txbroker.core.routing import home, partition_of
from txbroker.door.protocols import Door, TargetFacts
from txbroker.errors import (
    BadRequest,
    BadSchedule,
    IdExpired,
    KafkaUnavailable,
    OwnerUnavailable,
    RequestError,
    TooLarge,
)
from txbroker.principals import Directory, no_principals
from txbroker.proxy.cluster.forwarding import merge, new_id
from txbroker.proxy.cluster.partition_manager import PartitionManager
from txbroker.proxy.cluster.searcher import Searcher
from txbroker.proxy.cluster.views import LogNames, page_of, view_of
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.overview import local_overview, unobserved
from txbroker.proxy.observe.tracing import deciding
from txbroker.proxy.partition.checkback import Runner
from txbroker.proxy.partition.clock import LogTime
from txbroker.proxy.partition.context import PartitionEvents
from txbroker.proxy.partition.owner import PartitionOwner
from txbroker.proxy.partition.partition_api import check_group, standing
from txbroker.proxy.partition.targets import (
    PermittedTargets,
    TargetPartitioner,
    accept_replacement,
    examine_all,
    place_like,
)

LAST_CALLS_S = 5.0
"""How long the proxy waits for calls in flight when it stops, seconds. Kafka answers an append in
less; a call that waits for a target partition without a leader is given up."""

log = get_logger(__name__)


class _RunOperations(NamedTuple):
    """The operations of one run, with their numbers in the request."""

    owner: PartitionOwner
    numbers: list[int]
    requests: list[Request]


class _Calls:
    """Counts the calls in flight."""

    def __init__(self) -> None:
        self.count = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.stopping = False

    def check_open(self) -> None:
        """Raise `OwnerUnavailable` if the proxy stops."""
        if self.stopping:
            raise OwnerUnavailable(
                "this proxy is stopping; another one takes over its half partitions: retry"
            )

    @contextmanager
    def take(self, count: int = 1) -> Iterator[None]:
        """Count calls as in flight for the duration of the block."""
        self.check_open()
        self.count += count
        self.idle.clear()
        try:
            yield
        finally:
            self.count -= count
            if not self.count:
                self.idle.set()


class Broker:
    """Serves this proxy's own half partitions: a `txbroker.contract.service.Service`.

    It refuses calls for other proxies' partitions; `Cluster` forwards those.

    `partitions` holds the half partitions, and the addresses of all proxies; this proxy's own
    addresses are set there before `start`. `observed` is what operators see of this proxy."""

    def __init__(
        self,
        door: Door,
        settings: Settings,
        groups: Groups,
        runner: Runner,
        events: PartitionEvents,
        principals: Callable[[], Directory] = no_principals,
    ) -> None:
        self._door = door
        self._settings = settings
        self._overhead_bytes = headers_bytes(installation_headers(settings.topic_prefix))
        self._placing = TargetPartitioner(self._overhead_bytes)
        self._keyless: Sticky[int] = Sticky()
        prefix = settings.topic_prefix
        self._logs = LogNames(f"{prefix}.half", f"{prefix}.op")
        self._groups = groups
        self.observed = unobserved(self)
        self._clock = LogTime(round(time.time() * 1000))
        self._targets = PermittedTargets(
            door.targets, settings.topic_prefix, settings.reserved_topics
        )
        self.partitions = PartitionManager(
            door, self._targets, settings, runner, events, principals=principals
        )
        self.searcher = Searcher(door, self.partitions, self._logs, self._targets)
        self.partitions.on_change(self._keep_time)
        self._calls = _Calls()
        self.check_open = self._calls.check_open

    # --- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the other proxies; partitions are opened as they are assigned.

        The door must be started and the groups loaded.
        """
        await self.partitions.join()

    async def close(self) -> None:
        """Refuse new calls, wait for those in flight, hand the partitions over and stop."""
        self._calls.stopping = True
        try:
            await asyncio.wait_for(self._calls.idle.wait(), LAST_CALLS_S)
        except TimeoutError:
            log.warning("calls given up", calls=self._calls.count)
        await self.partitions.close()

    def on_owners(self, listener: Callable[[], None]) -> None:
        self.partitions.on_change(listener)

    # --- where -----------------------------------------------------------------------------

    def owners(self) -> tuple[str, ...]:
        return self.partitions.owners()

    def mine(self) -> frozenset[int]:
        return frozenset(self.partitions.open())

    def knows(self, url: str) -> bool:
        return url in self.partitions.proxies()

    def now_ms(self) -> int:
        """Return the clock by which ids are made, ms: the median of all partitions, so that one
        broker with a wrong clock does not affect ids of other partitions."""
        times = [owner.id_clock.now_ms() for owner in self.partitions.open().values()]
        return median_low(times) if times else self._clock.now_ms()

    def _keep_time(self) -> None:
        self._clock = LogTime(self.now_ms())

    def readiness(self) -> Readiness:
        """Return whether this proxy takes calls: all its partitions are caught up."""
        readiness = self.partitions.readiness()
        if self._calls.stopping:
            return Readiness(False, readiness.partitions, (*readiness.problems, "stopping"))
        return readiness

    def _owner_of(self, id: str) -> PartitionOwner:
        return self.partitions.owner(partition_of(id, self._door.partitions), id)

    # --- runs ------------------------------------------------------------------------------

    def runs(self, requests: Sequence[Request]) -> Sequence[Run]:
        """Split the operations of one group into runs: of one kind, half partition and thing that
        they wait for besides its log."""
        groups: dict[tuple[int, type[Request], object], _RunOperations] = {}
        owners: dict[int, PartitionOwner] = {}
        examined: dict[str, bool] = {}
        runs: list[Run] = []
        partitions, alone = self._door.partitions, tracing.active or len(requests) == 1
        for number, request in enumerate(requests):
            prepare = request.prepare if isinstance(request, SubmitRequest) else request
            try:
                if isinstance(prepare, PrepareRequest):
                    partition = self._home(prepare)
                else:
                    partition = partition_of(prepare.id, partitions)
                owner = owners.get(partition)
                if owner is None:
                    owner = owners[partition] = self.partitions.owner(partition, prepare.id)
            except RequestError as error:
                runs.append(Run((number,), _refusal(error)))
                continue
            # An operation that waits for more than its log must not delay the others: prepares
            # form one run for each set of topics to look up. A decision runs alone if its messages
            # are to be examined, it waits for visibility, or its id is to be looked up.
            waits_for: object = number
            if alone or (isinstance(request, SubmitRequest) and request.wait):
                pass
            elif isinstance(prepare, PrepareRequest):
                asked: list[str] = []
                for message in prepare.messages:
                    topic = message.topic
                    if topic not in examined:
                        facts = self._targets.known(topic)
                        examined[topic] = isinstance(facts, TargetFacts)
                    if not examined[topic]:
                        asked.append(topic)
                waits_for = frozenset(asked)
            elif not (
                prepare.wait
                or prepare.messages is not None
                or prepare.id not in owner.ledger.index.transactions
            ):
                waits_for = None
            key = partition, type(request), waits_for
            group = groups.get(key)
            if group is None:
                group = groups[key] = _RunOperations(owner, [], [])
            group.numbers.append(number)
            group.requests.append(request)
        for owner, numbers, grouped in groups.values():
            runs.append(Run(numbers, self._run(owner, grouped)))
        return runs

    def _run(self, owner: PartitionOwner, requests: Sequence[Any]) -> Awaitable[Sequence[Answer]]:
        """Start operations of one kind: prepare them, decide them, or both."""
        first = requests[0]
        if isinstance(first, PrepareRequest):
            return self._prepare(owner, requests)
        if isinstance(first, SubmitRequest):
            return self._submit(owner, requests)
        if tracing.active and len(requests) == 1:
            return _in_span(self._decide(owner, requests), owner, first)
        return self._decide(owner, requests)

    async def _submit(
        self, owner: PartitionOwner, requests: Sequence[SubmitRequest]
    ) -> Sequence[Answer]:
        """Prepare transactions of one half partition, then decide those that are stored."""
        answers = [*await self._prepare(owner, [request.prepare for request in requests])]
        stored = {
            number: requests[number].decide(answer.id)
            for number, answer in enumerate(answers)
            if not isinstance(answer, RequestError)
        }
        if stored:
            decided = await self._decide(owner, [*stored.values()])
            for number, answer in zip(stored, decided, strict=True):
                if isinstance(answer, RequestError):
                    # The caller retries with this id, so the transaction never counts twice.
                    answer.details.setdefault("id", stored[number].id)
                answers[number] = answer
        return answers

    # --- prepare ---------------------------------------------------------------------------

    async def _prepare(
        self, owner: PartitionOwner, requests: Sequence[PrepareRequest]
    ) -> Sequence[Answer]:
        answers: list[Answer | None] = [None] * len(requests)
        halves: list[tuple[Half, tuple[Place, ...]]] = []
        numbers: list[int] = []
        with self._calls.take(len(requests)):
            known = owner.api.standing_prepares(requests)
            new = [request for number, request in enumerate(requests) if number not in known]
            facts = await self._facts(new)
            now_ms, id_ms = owner.clock.now_ms(), owner.id_clock.now_ms()
            policies: dict[_OwnChecks, CheckPolicy] = {}
            for number, request in enumerate(requests):
                id = request.id
                if number in known:
                    answers[number] = known[number]
                    continue
                try:
                    checks = _own_checks(request)
                    policy = policies.get(checks)
                    if policy is None:
                        policy = policies[checks] = self._policy(request)
                    if id is None:
                        id = new_id(request, owner.partition, id_ms)
                    if isinstance(facts, OwnerUnavailable):
                        raise OwnerUnavailable(str(facts), id=id)
                    messages, where = self._placing.place(request.messages, facts, now_ms)
                except RequestError as error:
                    answers[number] = error
                    continue
                half = Half(id, request.group, messages, attributes_of(request), policy)
                halves.append((half, where))
                numbers.append(number)
            if halves:
                stored = await owner.api.prepare(halves, requests[0].instance)
                for number, (half, where), answer in zip(numbers, halves, stored, strict=True):
                    request = requests[number]
                    if isinstance(answer, IdExpired) and request.id is None:
                        # This proxy made the id by a clock that lags the half topic's broker; the
                        # owner's clock is right by now.
                        id = new_id(request, owner.partition, owner.id_clock.now_ms())
                        half = structs.replace(half, id=id)
                        [answer] = await owner.api.prepare(((half, where),), request.instance)
                    if isinstance(answer, OwnerUnavailable):
                        # The caller retries with this id, so the prepare never counts twice.
                        answer.details.setdefault("id", half.id)
                    answers[number] = answer
        return [answer for answer in answers if answer is not None]

    async def _facts(
        self, requests: Sequence[PrepareRequest]
    ) -> dict[str, TargetFacts | Cause] | OwnerUnavailable:
        topics: dict[str, None] = {}
        for request in requests:
            for message in request.messages:
                topics[message.topic] = None
        try:
            return await examine_all(
                self._targets, topics, create=self._settings.create_target_topics
            )
        except KafkaUnavailable as error:
            return OwnerUnavailable(f"Kafka does not answer: {error}")

    def _home(self, request: PrepareRequest) -> int:
        """Return the half partition of a new transaction.

        Raises:
            BadRequest: it holds no message.
            BadId: the id names another partition than its order key.
            OwnerUnavailable: it may go into any, and this proxy owns none now.
        """
        partition = home(request, self._door.partitions)
        if partition is not None:
            return partition
        owners = self.partitions.open()
        if not owners:
            raise OwnerUnavailable("this proxy owns no half partition now: retry")
        running = [number for number, owner in owners.items() if owner.gate.is_set()]
        return self._keyless.choose(running or list(owners))

    def _policy(self, request: PrepareRequest) -> CheckPolicy:
        """Return the check policy of a transaction: the request's values, else its group's."""
        settings = self._settings
        default = CheckPolicy(
            settings.check_after_s,
            settings.check_interval_s,
            settings.check_attempts_max,
            settings.check_timeout_s,
        )
        group = self._groups.policies.get(request.group)
        policy = default if group is None else group.checks(default)
        after_s, interval_s, attempts_max, timeout_s = _own_checks(request)
        policy = CheckPolicy(
            policy.after_s if after_s is None else float(after_s),
            policy.interval_s if interval_s is None else float(interval_s),
            policy.attempts_max if attempts_max is None else attempts_max,
            policy.timeout_s if timeout_s is None else float(timeout_s),
        )
        window_s = policy.after_s + (policy.attempts_max - 1) * policy.interval_s + policy.timeout_s
        if window_s > settings.half_retention_s / 2:
            raise BadSchedule(
                f"the last check would end {window_s:g} s after prepare, but checks must end "
                f"within half of half_retention_s ({settings.half_retention_s:g} s): check sooner, "
                "more often or fewer times"
            )
        return policy

    # --- decide, check, revive -------------------------------------------------------------

    async def _decide(
        self, owner: PartitionOwner, requests: Sequence[DecideRequest]
    ) -> Sequence[Answer]:
        """Write deciding markers of one half partition.

        A decision that replaces messages, or waits for visibility, is alone in its run.
        """
        with self._calls.take(len(requests)):
            first = requests[0]
            if first.messages is not None:
                try:
                    messages = await self._final_messages(owner, first.id, first.messages)
                except RequestError as error:
                    return (error,)
                requests = (structs.replace(first, messages=messages),)
            answers = await owner.api.decide(requests)
            if first.wait:
                try:
                    answers = [await owner.api.visible_by(first, answers[0])]
                except RequestError as error:
                    return (error,)
            return answers

    async def _final_messages(
        self, owner: PartitionOwner, id: str, messages: Sequence[Message]
    ) -> tuple[Message, ...]:
        """Return final messages with the partitions of the prepared ones."""
        transaction = await owner.api.get(id)
        prepared = transaction.half.messages
        try:
            if transaction.verdict.decision is not None:
                return place_like(prepared, messages)
            return await accept_replacement(
                prepared, messages, self._targets, owner.clock.now_ms(), self._overhead_bytes
            )
        except KafkaUnavailable as error:
            raise OwnerUnavailable(str(error), id=transaction.id) from None
        except (BadRequest, TooLarge) as error:
            error.details.setdefault("id", transaction.id)
            raise

    async def check(
        self, id: str, *, by: str = "", reason: str = "", group: str = ""
    ) -> TransactionStatus:
        with self._calls.take():
            owner = self._owner_of(id)
            transaction = await owner.api.get(id)
            check_group(transaction, group)
            # Only a producer's session names its group.
            source = Source.PRODUCER if group else Source.OPERATOR
            owner.checks.ask(transaction, by, reason, source)
            log.debug("check asked for", id=id, by=by, reason=reason)
            return standing(transaction)

    async def revive(self, id: str, *, by: str = "", reason: str = "") -> TransactionStatus:
        with self._calls.take():
            return await self._owner_of(id).api.revive(id, by, reason)

    # --- look ------------------------------------------------------------------------------

    async def find(
        self, id: str, *, bodies: bool = False, trace: bool = False, brief: bool = False
    ) -> TransactionView:
        """Return a transaction with its checks and history.

        Raises:
            OwnerUnavailable: this proxy does not own it, or may have lost it without noticing, so
                that its memory may be out of date.
        """
        with self._calls.take():
            owner = self._owner_of(id)
            account = await owner.api.find(id, trace=trace, brief=brief)
            if bodies:
                await owner.bodies.show(account.transaction)
            self.partitions.check_in_touch(id)
            shown = view_of(account, self._logs, bodies=bodies)
            return structs.replace(shown, waiting=self._waiting(shown, owner.clock.now_ms()))

    async def search(self, request: SearchRequest) -> SearchPage:
        """Return a page of a search: of this proxy's half partition that the cursor names.

        Raises:
            OwnerUnavailable: this proxy does not own it.
        """
        if request.record is not None:
            return await self.searcher.record_page(request.record, request, self.find)
        with self._calls.take():
            return await self.searcher.page(request)

    def _waiting(self, shown: TransactionView, now_ms: int) -> str:
        """Return why a due check is not made, "" where none is due or it will be made."""
        seconds = self.observed.unreachable_for_s().get(shown.group)
        if seconds is None or shown.next_check_at_ms is None or shown.next_check_at_ms > now_ms:
            return ""
        why = self.observed.unreachable().get(shown.group, "")
        silence = (
            f"No instance of its group has been reachable for {round(seconds)} s"
            f"{': ' if why else ''}{why}"
        )
        return f"{silence}. Attempts are not used up meanwhile."

    async def list(self, request: ListRequest) -> TransactionPage:
        """Return transactions of `request.partitions` (None: of all) by time of preparation.

        Raises:
            OwnerUnavailable: this proxy does not own a partition; a shorter list would mislead.
            BadRequest: the cursor is invalid, or there is no such partition.
        """
        count = self._door.partitions
        numbers = range(count) if request.partitions is None else request.partitions
        if any(not 0 <= partition < count for partition in numbers):
            raise BadRequest(f"half partitions are numbered from 0 to {count - 1}")
        with self._calls.take():
            owners = [self.partitions.owner(partition) for partition in numbers]
            pages = [await page_of(owner.ledger, request, owner.clock.now_ms()) for owner in owners]
            for owner in owners:
                if self.partitions.owner(owner.partition) is not owner:
                    raise OwnerUnavailable(f"half partition {owner.partition} moved: retry")
            self.partitions.check_in_touch()
        return merge(pages, request.limit, newest=request.newest)

    async def overview(self) -> Overview:
        return local_overview(self.observed)

    async def history(self, request: HistoryRequest) -> History:
        return await self.observed.past.history(request)

    def ledgers(self) -> Sequence[PartitionOwner]:
        """Return the owners that are caught up, for the gauges.

        Suspended owners are left out: another proxy may own the partition by now and show it.
        """
        owners = self.partitions.open().values()
        return tuple(owner for owner in owners if owner.gate.is_set())


async def _in_span(
    answers: Awaitable[Sequence[Answer]], owner: PartitionOwner, request: DecideRequest
) -> Sequence[Answer]:
    with deciding(request, owner.ledger.index.transactions.get(request.id)):
        [answer] = await answers
        if isinstance(answer, RequestError):
            raise answer
        return (answer,)


async def _refusal(error: RequestError) -> Sequence[Answer]:
    return (error,)


_OwnChecks = tuple[float | None, float | None, int | None, float | None]
_own_checks: Callable[[PrepareRequest], _OwnChecks] = attrgetter(
    "check_after_s", "check_interval_s", "check_attempts_max", "check_timeout_s"
)
"""Returns a transaction's own check policy; None is its group's."""
