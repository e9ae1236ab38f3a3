"""The broker: what one proxy answers of its own half partitions, whichever way it is asked."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median_low

from msgspec import structs

from txbroker import tracing
from txbroker.batching import Sticky
from txbroker.checkers.groups import Groups
from txbroker.config.settings import Settings
from txbroker.contract.service import (
    Answer,
    DecideRequest,
    ListRequest,
    Overview,
    PrepareRequest,
    Readiness,
    Run,
    TransactionPage,
    TransactionStatus,
    TransactionView,
    alone,
)
from txbroker.core.encoding import headers_bytes, installation_headers
from txbroker.core.lifecycle import SETTLED
from txbroker.core.records import Cause, CheckPolicy, Half, Message, Place
from txbroker.core.routing import home, partition_of
from txbroker.core.trace_context import carried_over
from txbroker.core.transaction import Transaction
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
from txbroker.proxy.cluster.listing import page_of
from txbroker.proxy.cluster.partition_manager import PartitionManager
from txbroker.proxy.cluster.views import view
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.overview import GroupStatus, local_overview
from txbroker.proxy.observe.tracing import deciding
from txbroker.proxy.partition.checkback import Runner, placed_like
from txbroker.proxy.partition.clock import LogTime
from txbroker.proxy.partition.context import PartitionEvents
from txbroker.proxy.partition.owner import PartitionOwner
from txbroker.proxy.partition.partition_api import check_group, standing
from txbroker.proxy.partition.targets import (
    PermittedTargets,
    TargetPartitioner,
    examine_all,
    examine_final,
)

LAST_CALLS_S = 5.0
"""How long calls under way may take when the proxy stops, seconds. Kafka's answer to an append
takes less; whoever waits for a target without a leader gives up."""

log = get_logger(__name__)


class _Calls:
    """The calls under way.

    Args:
        check_open: raises where no more are taken.
    """

    def __init__(self, check_open: Callable[[], None]) -> None:
        self.count = 0
        self.over = asyncio.Event()
        self.over.set()
        self._check_open = check_open

    @contextmanager
    def take(self, count: int = 1) -> Iterator[None]:
        """Count so many while the block lasts.

        Raises:
            OwnerUnavailable: no more are taken.
        """
        self._check_open()
        self.count += count
        self.over.clear()
        try:
            yield
        finally:
            self.count -= count
            if not self.count:
                self.over.set()


class Broker:
    """What one proxy does with its own half partitions: a `txbroker.contract.service.Service`.

    Calls for other proxies' partitions are refused; `Cluster` hands those on.

    Args:
        door: the way to Kafka.
        settings: the proxy's configuration.
        groups: the registered groups, for their check policies.
        runner: carries out checks.
        events: told what happens on every partition.
        around: what is known beside transactions, for overviews.
        principals: returns the principals as they are now.

    `url` is this proxy's own URL, as others are told it; it is set before `start`.
    """

    def __init__(
        self,
        door: Door,
        settings: Settings,
        groups: Groups,
        runner: Runner,
        events: PartitionEvents,
        around: GroupStatus = GroupStatus(),  # noqa: B008 - frozen
        principals: Callable[[], Directory] = no_principals,
    ) -> None:
        self._door = door
        self._settings = settings
        self._beside = headers_bytes(installation_headers(settings.topic_prefix))
        self._placing = TargetPartitioner(self._beside)
        self._keyless: Sticky[int] = Sticky()
        self._groups = groups
        self._around = around
        self._clock = LogTime(round(time.time() * 1000))
        self._targets = PermittedTargets(
            door.targets, settings.own_topics, settings.reserved_topics
        )
        self._manager = PartitionManager(
            door, self._targets, settings, runner, events, principals=principals
        )
        self._manager.on_change(self._keep_time)
        self._stopping = False
        self._calls = _Calls(self.check_open)

    # --- life ------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """This proxy's own URL."""
        return self._manager.url

    @url.setter
    def url(self, url: str) -> None:
        self._manager.url = url

    def called_by_peers_at(self, url: str) -> None:
        """Set where this proxy takes other proxies' calls, if not at `url`; before `start`."""
        self._manager.own_peer_url = url

    def called_by_operators_at(self, url: str) -> None:
        """Set where this proxy takes operators' calls, if not at `url`; before `start`."""
        self._manager.own_admin_url = url

    async def start(self) -> None:
        """Join the other proxies; partitions are opened as they are assigned.

        The door must be started and the groups loaded.
        """
        await self._manager.join()

    async def close(self) -> None:
        """Take no more calls, end those under way, hand everything over and stop."""
        self._stopping = True
        try:
            async with asyncio.timeout(LAST_CALLS_S):
                await self._calls.over.wait()
        except TimeoutError:
            log.warning("calls given up", calls=self._calls.count)
        await self._manager.close()

    def check_open(self) -> None:
        """Raise if this proxy is going away.

        Raises:
            OwnerUnavailable: it is.
        """
        if self._stopping:
            raise OwnerUnavailable("this proxy is going away: another one takes over in a moment")

    def on_owners(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever partitions or proxies come or go."""
        self._manager.on_change(listener)

    # --- where -----------------------------------------------------------------------------

    def owners(self) -> tuple[str, ...]:
        """Return the URL of each half partition's owner, "" where none is known."""
        return self._manager.owners()

    def assigned(self) -> tuple[str, ...]:
        """Return the URL of each half partition's proxy, whether it can take calls or not, ""
        where none is known."""
        return self._manager.assigned()

    def peer_url(self, url: str) -> str:
        """Return where the proxy at `url` takes other proxies' calls."""
        return self._manager.peer_url(url)

    def admin_url(self, url: str) -> str:
        """Return where the proxy at `url` takes operators' calls."""
        return self._manager.admin_url(url)

    def mine(self) -> frozenset[int]:
        """Return the half partitions that are this proxy's and can take calls."""
        return frozenset(self._manager.open())

    def proxies(self) -> tuple[str, ...]:
        """Return the URLs of all proxies of the group, this one's included."""
        return self._manager.proxies()

    def knows(self, url: str) -> bool:
        """Say whether the proxy at `url` is one of this one's group."""
        return url in self._manager.proxies()

    def now_ms(self) -> int:
        """Return the clock by which ids are made, ms: of all partitions the middle one, so that
        one broker whose clock is astray misleads nobody else's ids."""
        times = [owner.id_ms() for owner in self._manager.open().values()]
        return median_low(times) if times else self._clock.now_ms()

    def _keep_time(self) -> None:
        """Remember the brokers' clock for when nothing is ours."""
        self._clock = LogTime(self.now_ms())

    def clock_at_least(self, now_ms: int) -> None:
        """The brokers' clock says so by now: a broker whose clock is put forward for tests tells
        it, everybody else's is seen in append times."""
        self._clock.at_least(now_ms)
        for owner in self._manager.open().values():
            owner.clock_at_least(now_ms)

    def readiness(self) -> Readiness:
        """Say whether calls can be taken: everything that is ours is caught up."""
        found = self._manager.readiness()
        if self._stopping:
            return Readiness(False, found.partitions, (*found.problems, "going away"))
        return found

    def _owner_of(self, id: str) -> PartitionOwner:
        return self._manager.owner(partition_of(id, self._door.partitions), id)

    # --- runs ------------------------------------------------------------------------------

    def runs(self, requests: Sequence[PrepareRequest | DecideRequest]) -> Sequence[Run]:
        """Return the operations of one group as runs: one for each log that they go to, and of
        prepares for each set of topics that Kafka is asked about."""
        prepares: dict[tuple[int, frozenset[str]], tuple[list[int], list[PrepareRequest]]] = {}
        decides: dict[int, tuple[list[int], list[DecideRequest]]] = {}
        owners: dict[int, PartitionOwner] = {}
        examined: dict[str, bool] = {}
        runs: list[Run] = []
        partitions, traced = self._door.partitions, tracing.active
        for number, request in enumerate(requests):
            try:
                if isinstance(request, PrepareRequest):
                    partition = self._home(request)
                else:
                    partition = partition_of(request.id, partitions)
                owner = owners.get(partition)
                if owner is None:
                    owner = owners[partition] = self._manager.owner(partition, request.id)
            except RequestError as error:
                runs.append(Run((number,), _refused(error)))
                continue
            # What waits for more than its log must not hold the others up: prepares form a run for
            # each topic that Kafka is asked about. A decision goes alone whose messages are to be
            # examined, which waits to be visible, or whose id is to be looked up.
            if traced:
                runs.append(Run((number,), alone(self, request)))
            elif isinstance(request, PrepareRequest):
                asked: list[str] = []
                for message in request.messages:
                    topic = message.topic
                    if topic not in examined:
                        facts = self._targets.known(topic)
                        examined[topic] = isinstance(facts, TargetFacts)
                    if not examined[topic]:
                        asked.append(topic)
                key = partition, frozenset(asked)
                numbers, prepared = prepares.setdefault(key, ([], []))
                numbers.append(number)
                prepared.append(request)
            elif (
                request.wait
                or request.messages is not None
                or request.id not in owner.ledger.transactions
            ):
                runs.append(Run((number,), alone(self, request)))
            else:
                numbers, decided = decides.setdefault(partition, ([], []))
                numbers.append(number)
                decided.append(request)
        for (partition, _), (numbers, prepared) in prepares.items():
            runs.append(Run(numbers, self._prepare(owners[partition], prepared)))
        for partition, (numbers, decided) in decides.items():
            runs.append(Run(numbers, self._decide(owners[partition], decided)))
        return runs

    # --- prepare ---------------------------------------------------------------------------

    async def prepare(self, request: PrepareRequest) -> TransactionStatus:
        """Store a half message; see `txbroker.contract.service.Service`."""
        self.check_open()
        owner = self._manager.owner(self._home(request), request.id)
        return _only(await self._prepare(owner, (request,)))

    async def _prepare(
        self, owner: PartitionOwner, requests: Sequence[PrepareRequest]
    ) -> Sequence[Answer]:
        """Store half messages of one group in one half partition."""
        answers: list[Answer | None] = [None] * len(requests)
        halves: list[tuple[Half, tuple[Place, ...]]] = []
        numbers: list[int] = []
        with self._calls.take(len(requests)):
            known = owner.api.standing_prepares(requests)
            new = [each for number, each in enumerate(requests) if number not in known]
            facts = await self._facts(new)
            now_ms, id_ms = owner.now_ms(), owner.id_ms()
            policies: dict[tuple[float | None, float | None], CheckPolicy] = {}
            for number, request in enumerate(requests):
                id = request.id
                if number in known:
                    answers[number] = known[number]
                    continue
                try:
                    times = request.check_after_s, request.check_interval_s
                    policy = policies.get(times)
                    if policy is None:
                        policy = policies[times] = self._policy(request)
                    if id is None:
                        id = new_id(request, owner.partition, id_ms)
                    if isinstance(facts, OwnerUnavailable):
                        raise OwnerUnavailable(str(facts), id=id)
                    messages, where = self._placing.place(request.messages, facts, now_ms)
                except RequestError as error:
                    answers[number] = error
                    continue
                half = Half(
                    id, request.group, messages, request.order_key, request.dedup_key, policy
                )
                halves.append((half, where))
                numbers.append(number)
            if halves:
                stored = await owner.api.prepare(halves, requests[0].instance)
                for number, (half, where), answer in zip(numbers, halves, stored, strict=True):
                    request = requests[number]
                    if isinstance(answer, IdExpired) and request.id is None:
                        # The id was ours, by a clock that the half topic's broker has left: now
                        # we know.
                        id = new_id(request, owner.partition, owner.id_ms())
                        half = structs.replace(half, id=id)
                        [answer] = await owner.api.prepare(((half, where),), request.instance)
                    if isinstance(answer, OwnerUnavailable):
                        # The id goes back to the caller, who sends it again and so never counts
                        # twice.
                        answer.details.setdefault("id", half.id)
                    answers[number] = answer
        return [each for each in answers if each is not None]

    async def _facts(
        self, requests: Sequence[PrepareRequest]
    ) -> dict[str, TargetFacts | Cause] | OwnerUnavailable:
        """Return what is known of all topics of these, or that Kafka does not say."""
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
        """Return the half partition that a transaction belongs into.

        Raises:
            BadRequest: it holds no message.
            BadId: the id names another partition than its order key.
            OwnerUnavailable: it may go into any, and none is ours now.
        """
        if not request.messages:
            raise BadRequest("a transaction holds at least one message")
        partition = home(request, self._door.partitions)
        if partition is not None:
            return partition
        owners = self._manager.open()
        if not owners:
            raise OwnerUnavailable("this proxy owns no half partition now: try again")
        able = [n for n, each in owners.items() if each.gate.is_set()]
        return self._keyless.choose(able or list(owners))

    def _policy(self, request: PrepareRequest) -> CheckPolicy:
        """Return when this transaction is checked: the request's word, else its group's.

        Raises:
            BadSchedule: the checks would not be over while the half message is kept.
        """
        settings = self._settings
        default = CheckPolicy(
            settings.check_after_s,
            settings.check_interval_s,
            settings.check_attempts_max,
            settings.check_timeout_s,
        )
        group = self._groups.policies.get(request.group)
        policy = default if group is None else group.checks(default)
        if request.check_after_s is not None:
            policy = structs.replace(policy, after_s=float(request.check_after_s))
        if request.check_interval_s is not None:
            policy = structs.replace(policy, interval_s=float(request.check_interval_s))
        window_s = policy.after_s + (policy.attempts_max - 1) * policy.interval_s + policy.timeout_s
        if window_s > settings.half_retention_s / 2:
            raise BadSchedule(
                f"the last check would end {window_s:g} s after prepare; half messages are kept "
                f"{settings.half_retention_s:g} s and checks must be over within half of that"
            )
        return policy

    # --- decide, check, revive -------------------------------------------------------------

    async def decide(self, request: DecideRequest) -> TransactionStatus:
        """Write a deciding marker; see `txbroker.contract.service.Service`."""
        self.check_open()
        owner = self._owner_of(request.id)
        with deciding(request, owner.ledger.transactions.get(request.id)):
            return _only(await self._decide(owner, (request,)))

    async def _decide(
        self, owner: PartitionOwner, requests: Sequence[DecideRequest]
    ) -> Sequence[Answer]:
        """Write deciding markers of one half partition.

        One that replaces messages, or waits until they are visible, is alone in its run.
        """
        with self._calls.take(len(requests)):
            first = requests[0]
            if first.messages is not None:
                try:
                    transaction = await owner.api.get(first.id)
                    messages = await self._replacing(owner, transaction, first.messages)
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

    async def _replacing(
        self, owner: PartitionOwner, transaction: Transaction, messages: Sequence[Message]
    ) -> tuple[Message, ...]:
        """Return final messages, placed like the prepared ones.

        Raises:
            BadRequest: other topics or another number of messages.
            TooLarge, BadTarget, UnknownTopic: a target would not take them.
        """
        prepared = transaction.half.messages
        if [m.topic for m in messages] != [m.topic for m in prepared]:
            raise BadRequest(
                "final messages have the topics of the prepared ones, in the same order: "
                + ", ".join(m.topic for m in prepared),
                id=transaction.id,
            )
        placed = placed_like(prepared, tuple(messages))
        if tracing.is_on():
            placed = carried_over(prepared, placed)
        if transaction.decision is not None:
            return placed
        try:
            await examine_final(self._targets, placed, owner.now_ms(), self._beside)
        except KafkaUnavailable as error:
            raise OwnerUnavailable(str(error), id=transaction.id) from None
        except TooLarge as error:
            error.details.setdefault("id", transaction.id)
            raise
        return placed

    async def check(
        self, id: str, *, by: str = "", reason: str = "", group: str = ""
    ) -> TransactionStatus:
        """Pull the next attempt forward; see `txbroker.contract.service.Service`."""
        with self._calls.take():
            owner = self._owner_of(id)
            transaction = await owner.api.get(id)
            check_group(transaction, group)
            owner.checks.ask(transaction, by, reason)
            log.debug("check asked for", id=id, by=by, reason=reason)
            return standing(transaction)

    async def revive(self, id: str, *, by: str = "", reason: str = "") -> TransactionStatus:
        """Begin a new round, or retry a refused one; see `txbroker.contract.service.Service`."""
        with self._calls.take():
            return await self._owner_of(id).api.revive(id, by, reason)

    # --- look ------------------------------------------------------------------------------

    async def find(self, id: str, *, bodies: bool = False) -> TransactionView:
        """Return all that is known of a transaction.

        Raises:
            OwnerUnavailable: it is not ours, or may be another's by now: what is remembered of it
                may be long out of date.
        """
        with self._calls.take():
            owner = self._owner_of(id)
            transaction = await owner.api.find(id)
            if bodies:
                await owner.bodies.show(transaction)
            self._manager.check_in_touch(id)
            found = view(transaction, bodies=bodies)
            return structs.replace(found, waiting=self._waiting(found, owner.now_ms()))

    def _waiting(self, found: TransactionView, now_ms: int) -> str:
        """Return why a check that is due is not made, "" where it is none or will be made."""
        seconds = self._around.unreachable_for_s().get(found.group)
        if seconds is None or found.next_check_at_ms is None or found.next_check_at_ms > now_ms:
            return ""
        why = self._around.unreachable().get(found.group, "")
        asked = f"Nobody of its group can be asked for {round(seconds)} s{': ' if why else ''}{why}"
        return f"{asked}. No attempt is used up meanwhile."

    async def list(self, request: ListRequest) -> TransactionPage:
        """Return transactions of `request.partitions` (None: of all), oldest first.

        Raises:
            OwnerUnavailable: a partition is not ours; a shorter list would lie.
            BadRequest: the cursor is none of ours, or there is no such partition.
        """
        wanted = range(self._door.partitions) if request.partitions is None else request.partitions
        if any(not 0 <= partition < self._door.partitions for partition in wanted):
            raise BadRequest(f"half partitions are 0 to {self._door.partitions - 1}")
        with self._calls.take():
            owners = [self._manager.owner(partition) for partition in wanted]
            pages = [await page_of(owner.ledger, request, owner.now_ms()) for owner in owners]
            for owner in owners:
                if self._manager.owner(owner.partition) is not owner:
                    raise OwnerUnavailable(f"half partition {owner.partition} moved: try again")
            self._manager.check_in_touch()
        return merge(pages, request.limit)

    async def overview(self) -> Overview:
        """Return how this proxy's own part stands; of other partitions nothing is said."""
        return local_overview(
            self.url,
            self.readiness(),
            self.ledgers(),
            self._around,
            self.now_ms(),
            self._manager.own_admin_url,
        )

    def unsettled(self) -> Iterator[tuple[PartitionOwner, Transaction]]:
        """Yield every transaction that is not settled, with its owner."""
        for owner in self._manager.open().values():
            for transaction in owner.ledger:
                if transaction.state not in SETTLED:
                    yield owner, transaction

    def ledgers(self) -> Sequence[PartitionOwner]:
        """Return the owners of what is this proxy's and caught up, for the gauges.

        Suspended ones are left out: they may be another proxy's by now, which shows them itself.
        """
        owners = self._manager.open().values()
        return tuple(owner for owner in owners if owner.gate.is_set())

    def topic_problems(self) -> Sequence[str]:
        """Return what has happened to txbroker's own topics that it cannot work with."""
        return self._manager.topic_problems()


async def _refused(error: RequestError) -> Sequence[Answer]:
    return (error,)


def _only(answers: Sequence[Answer]) -> TransactionStatus:
    """Return what became of a run of one.

    Raises:
        RequestError: it was not carried out.
    """
    [answer] = answers
    if isinstance(answer, RequestError):
        raise answer
    return answer
