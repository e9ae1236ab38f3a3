"""The broker: one proxy's owners, and every call's way to the right one."""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median_low

import structlog
from msgspec import structs

from txbroker.checkers.groups import Groups
from txbroker.config import Settings
from txbroker.contract import (
    DecideRequest,
    ListRequest,
    Page,
    PrepareRequest,
    Readiness,
    Standing,
    TransactionView,
)
from txbroker.core.ids import dedup_randomness, make_id, parse_id
from txbroker.core.placement import dedup_hash, order_hash
from txbroker.core.records import CheckPolicy, Half, Message
from txbroker.core.states import SETTLED
from txbroker.core.transaction import Transaction
from txbroker.door import Door, Fenced
from txbroker.errors import (
    BadId,
    BadRequest,
    BadSchedule,
    BadTarget,
    IdExpired,
    KafkaUnavailable,
    OwnerUnavailable,
    TooLarge,
)
from txbroker.proxy.checkback import Runner, placed_like
from txbroker.proxy.clock import LogTime
from txbroker.proxy.owner import Owner, OwnerEvents, OwnerSettings, standing
from txbroker.proxy.targets import check_timestamps, examine_all, place, verdict
from txbroker.proxy.views import summary, view

REOPEN_S = 1.0
"""A partition that could not be opened is tried again after this, seconds."""

KAFKA_TOPICS = frozenset(
    {"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"}
)
"""What Kafka keeps for itself."""

log = structlog.get_logger()


class Broker:
    """Everything that one proxy does, whichever way it is asked: a `txbroker.contract.Service`.

    Args:
        door: the way to Kafka.
        settings: the proxy's configuration.
        groups: the registered groups, for their check policies.
        runner: carries out checks.
        events: told what happens on every partition.

    `url` is this proxy's own URL, as others are told it; it is set once the server listens.
    """

    def __init__(
        self,
        door: Door,
        settings: Settings,
        groups: Groups,
        runner: Runner,
        events: OwnerEvents,
    ) -> None:
        self._door = door
        self._settings = settings
        self._groups = groups
        self._runner = runner
        self._events = events
        self.url = settings.advertise
        self._owners: dict[int, Owner] = {}
        self._status: dict[int, str] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changed: list[Callable[[], None]] = []
        self._clock = LogTime(round(time.time() * 1000))
        self._joined = False

    # --- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the other proxies; partitions are opened as they are assigned.

        The door must be started and the groups loaded.
        """
        await self._door.membership.join(self._assigned)
        self._joined = True

    async def close(self) -> None:
        """Hand everything over and stop."""
        for task in self._opening.values():
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        owners, self._owners = list(self._owners.values()), {}
        await asyncio.gather(*[owner.close() for owner in owners], *self._closing)
        await self._door.membership.leave()

    def on_owners(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever partitions come or go."""
        self._changed.append(listener)

    def _assigned(self, partitions: frozenset[int]) -> None:
        """Our partitions are these now."""
        for partition in set(self._status) - partitions:
            self._drop(partition)
        for partition in partitions - set(self._status):
            self._status[partition] = "claiming"
            self._opening[partition] = asyncio.create_task(self._open(partition))
        self._tell()

    def _drop(self, partition: int) -> None:
        self._status.pop(partition, None)
        task = self._opening.pop(partition, None)
        if task is not None:
            task.cancel()
        owner = self._owners.pop(partition, None)
        if owner is not None:
            closing = asyncio.create_task(owner.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._tell()

    async def _open(self, partition: int) -> None:
        """Make this proxy the owner of a partition, however long that takes."""
        while True:
            owner = self._make_owner(partition)
            started = time.monotonic()
            try:
                await owner.open()
            except Fenced:
                self._events.fenced()
                await owner.close()
                if self._opens(partition):
                    self._status[partition] = "elsewhere"
                return
            except KafkaUnavailable as error:
                log.warning("partition not opened", partition=partition, why=str(error))
                self._events.kafka_failed("claim")
                await owner.close()
                await asyncio.sleep(REOPEN_S * (0.5 + random.random()))
            except Exception as error:
                await owner.close()
                if self._opens(partition):
                    self._stopped(partition, error)
                return
            except BaseException:
                await asyncio.shield(owner.close())
                raise
            else:
                break
        self._owners[partition] = owner
        self._status[partition] = "owned"
        self._opening.pop(partition, None)
        self._clock = LogTime(owner.id_ms())
        took_s = time.monotonic() - started
        self._events.recovered(took_s)
        log.info(
            "owned",
            partition=partition,
            transactions=len(owner.ledger.transactions),
            undecided=owner.ledger.undecided_count,
            seconds=round(took_s, 3),
        )
        self._tell()

    def _opens(self, partition: int) -> bool:
        """Say whether it is for this task to open a partition: it may have been taken away by the
        very call that asked whether it is still ours, and given back since."""
        return self._opening.get(partition) is asyncio.current_task()

    def _make_owner(self, partition: int) -> Owner:
        settings = self._settings
        owner = Owner(
            self._door.partition(partition),
            self._door.targets,
            self._runner,
            self._events,
            OwnerSettings(
                dedup_window_ms=round(settings.dedup_window_s * 1000),
                pending_max=settings.pending_max,
                settled_max=settings.settled_max,
                half_retention_ms=round(settings.half_retention_s * 1000),
            ),
            (settings.instance, self.url),
            lambda: self._door.membership.still_ours(partition),
            lambda error: self._owner_stopped(owner, error),
        )
        return owner

    def _owner_stopped(self, owner: Owner, error: Exception) -> None:
        """An owner cannot go on: give the partition up, or begin anew where that can help."""
        partition = owner.partition
        if self._owners.get(partition) is not owner:
            # It was closed before, and the partition may have another owner object by now.
            return
        del self._owners[partition]
        closing = asyncio.create_task(owner.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        if isinstance(error, KafkaUnavailable):
            log.warning("partition begins anew", partition=partition, why=str(error))
            self._status[partition] = "claiming"
            self._opening[partition] = asyncio.create_task(self._open(partition))
        elif isinstance(error, Fenced):
            self._events.fenced()
            self._status[partition] = "elsewhere"
        else:
            self._stopped(partition, error)
        self._tell()

    def _stopped(self, partition: int, error: Exception) -> None:
        """Stop one partition and keep the rest: something that must hold does not."""
        log.error(
            "partition stopped", partition=partition, error=type(error).__name__, why=str(error)
        )
        self._status[partition] = f"stopped: {error}"

    def _tell(self) -> None:
        for listener in self._changed:
            listener()

    # --- where -----------------------------------------------------------------------------

    def owners(self) -> tuple[str, ...]:
        """Return the URL of each half partition's owner, "" where none is known."""
        return tuple([self.url if p in self._owners else "" for p in range(self._door.partitions)])

    def now_ms(self) -> int:
        """Return the clock by which sessions make ids, ms: of all partitions the middle one, so
        that one broker whose clock is astray misleads nobody else's ids."""
        if not self._owners:
            return self._clock.now_ms()
        return median_low([owner.id_ms() for owner in self._owners.values()])

    def clock_at_least(self, now_ms: int) -> None:
        """The brokers' clock says so by now: a broker whose clock is put forward for tests tells
        it, everybody else's is seen in append times."""
        self._clock.at_least(now_ms)
        for owner in self._owners.values():
            owner.clock_at_least(now_ms)

    def readiness(self) -> Readiness:
        """Say whether calls can be taken: everything that is ours is caught up."""
        status = {p: self._status.get(p, "elsewhere") for p in range(self._door.partitions)}
        problems = [
            f"partition {partition}: {text}"
            for partition, text in status.items()
            if text not in ("owned", "elsewhere")
        ]
        if not self._joined:
            problems.append("not yet a member of the proxies' group")
        return Readiness(not problems, status, tuple(problems))

    def _owner(self, partition: int, id: str | None = None) -> Owner:
        owner = self._owners.get(partition)
        if owner is None:
            status = self._status.get(partition, "elsewhere")
            advice = (
                "see /readyz and the proxy's log" if status.startswith("stopped") else "try again"
            )
            raise OwnerUnavailable(
                f"half partition {partition} has no owner here ({status}): {advice}", id=id
            )
        return owner

    def _owner_of(self, id: str) -> Owner:
        try:
            partition = parse_id(id).partition
        except ValueError as error:
            raise BadId(f"{id!r} is no transaction id: {error}") from None
        if partition >= self._door.partitions:
            raise BadId(f"the id names partition {partition}; there are {self._door.partitions}")
        return self._owner(partition, id)

    # --- prepare ---------------------------------------------------------------------------

    async def prepare(self, request: PrepareRequest) -> Standing:
        """Store a half message; see `txbroker.contract.Service`."""
        if not request.messages:
            raise BadRequest("a transaction holds at least one message")
        self._check_free(request.messages)
        owner = self._prepare_owner(request)
        known = owner.standing_prepare(
            request.id, request.group, request.dedup_key, request.messages
        )
        if known is not None:
            return known
        policy = self._policy(request)
        id = request.id or self._new_id(owner, request)
        try:
            facts = await examine_all(
                self._door.targets,
                {message.topic for message in request.messages},
                create=self._settings.create_target_topics,
            )
        except KafkaUnavailable as error:
            raise OwnerUnavailable(f"Kafka does not answer: {error}", id=id) from None
        half = Half(
            id,
            request.group,
            place(request.messages, facts, owner.now_ms()),
            request.order_key,
            request.dedup_key,
            policy,
        )
        try:
            try:
                return await owner.prepare(half, request.instance)
            except IdExpired:
                if request.id is not None:
                    raise
                # The id was ours, by a clock that the half topic's broker has left: now we know.
                id = self._new_id(owner, request)
                return await owner.prepare(structs.replace(half, id=id), request.instance)
        except OwnerUnavailable as error:
            # The id goes back to the caller, who sends it again and so never counts twice.
            error.details.setdefault("id", id)
            raise

    def _prepare_owner(self, request: PrepareRequest) -> Owner:
        """Return the owner of the half partition that a transaction belongs into.

        Raises:
            BadId: the id names another partition than its order key.
            OwnerUnavailable: nobody owns it now.
        """
        first = request.messages[0]
        order = order_hash(request.order_key, first.topic, first.key)
        if request.order_key is None and request.dedup_key is not None:
            # Before the message's key: the same dedup_key must meet its earlier use.
            order = dedup_hash(request.group, request.dedup_key)
        partition = None if order is None else order % self._door.partitions
        if request.id is not None:
            owner = self._owner_of(request.id)
            if partition is not None and partition != owner.partition:
                raise BadId(
                    f"the id names half partition {owner.partition}, its order key {partition}",
                    id=request.id,
                )
            return owner
        if partition is not None:
            return self._owner(partition)
        if not self._owners:
            raise OwnerUnavailable("this proxy owns no half partition now: try again")
        return random.choice(list(self._owners.values()))

    def _new_id(self, owner: Owner, request: PrepareRequest) -> str:
        if request.dedup_key is None:
            randomness = secrets.randbits(64)
        else:
            randomness = dedup_randomness(request.group, request.dedup_key)
        return make_id(owner.partition, owner.id_ms(), randomness)

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
        group = self._groups.get(request.group)
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

    def _check_free(self, messages: Sequence[Message]) -> None:
        """Refuse topics in which a client's message would be taken for one of our records.

        Raises:
            BadTarget: a target is one of txbroker's own topics, or of Kafka's.
        """
        for message in messages:
            if message.topic in self._settings.own_topics | KAFKA_TOPICS:
                keeper = "Kafka" if message.topic in KAFKA_TOPICS else "txbroker"
                raise BadTarget(f"topic {message.topic} is {keeper}'s own: it is no target")

    async def decide(self, request: DecideRequest) -> Standing:
        """Write a deciding marker; see `txbroker.contract.Service`."""
        owner = self._owner_of(request.id)
        if request.messages is not None:
            transaction = await owner.get(request.id)
            messages = await self._replacing(owner, transaction, request.messages)
            request = structs.replace(request, messages=messages)
        return await owner.decide(request)

    async def _replacing(
        self, owner: Owner, transaction: Transaction, messages: Sequence[Message]
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
        if transaction.decision is not None:
            return placed
        try:
            topics = {message.topic for message in placed}
            facts = await examine_all(self._door.targets, topics, create=False)
        except KafkaUnavailable as error:
            raise OwnerUnavailable(str(error), id=transaction.id) from None
        check_timestamps(placed, owner.now_ms())
        for message in placed:
            cause = verdict(message, facts[message.topic])
            # Only what the caller can change is refused here. What is wrong with the target
            # itself can pass, so the commit stands and the transaction is refused or deferred.
            if cause is not None and cause.code == "too_large":
                raise TooLarge(cause.message, id=transaction.id)
        return placed

    async def check(self, id: str, *, by: str = "", reason: str = "") -> Standing:
        """Pull the next attempt forward; see `txbroker.contract.Service`."""
        owner = self._owner_of(id)
        transaction = await owner.get(id)
        owner.checks.ask(transaction)
        log.info("check asked for", id=id, by=by, reason=reason)
        return standing(transaction)

    async def revive(self, id: str, *, by: str = "", reason: str = "") -> Standing:
        """Begin a new round, or retry a refused one; see `txbroker.contract.Service`."""
        return await self._owner_of(id).revive(id, by, reason)

    # --- look ------------------------------------------------------------------------------

    async def find(self, id: str, *, bodies: bool = False) -> TransactionView:
        """Return all that is known of a transaction."""
        return view(await self._owner_of(id).get(id), bodies=bodies)

    async def list(self, request: ListRequest) -> Page:
        """Return transactions, oldest first.

        Raises:
            OwnerUnavailable: not every partition has an owner here; a shorter list would lie.
            BadRequest: the cursor is none of ours.
        """
        for partition in range(self._door.partitions):
            self._owner(partition)
        after = _decode_cursor(request.cursor)
        chosen = sorted(
            (t for t in self._matching(request) if (t.prepared_at_ms, t.id) > after),
            key=lambda t: (t.prepared_at_ms, t.id),
        )
        page = chosen[: request.limit]
        more = len(chosen) > len(page)
        return Page(
            tuple([summary(transaction) for transaction in page]),
            f"{page[-1].prepared_at_ms}.{page[-1].id}" if more else None,
        )

    def _matching(self, request: ListRequest) -> Iterator[Transaction]:
        for owner in self._owners.values():
            before_ms = owner.now_ms() - round((request.older_than_s or 0) * 1000)
            for transaction in owner.ledger:
                if request.state is None:
                    if transaction.state in SETTLED:
                        continue
                elif transaction.state is not request.state:
                    continue
                if request.group is not None and transaction.half.group != request.group:
                    continue
                if request.older_than_s is not None and transaction.prepared_at_ms > before_ms:
                    continue
                if request.topic is not None and request.topic not in {
                    message.topic for message in transaction.messages
                }:
                    continue
                yield transaction

    def unsettled(self) -> Iterator[tuple[Owner, Transaction]]:
        """Yield every transaction that is not settled, with its owner, for the gauges."""
        for owner in self._owners.values():
            for transaction in owner.ledger:
                if transaction.state not in SETTLED:
                    yield owner, transaction

    def ledgers(self) -> Sequence[Owner]:
        """Return the owners of what is this proxy's and caught up, for the gauges."""
        return tuple(self._owners.values())

    def topic_problems(self) -> Sequence[str]:
        """Return what is wrong with txbroker's own topics: nothing that a start would not see."""
        return ()


def _decode_cursor(cursor: str | None) -> tuple[int, str]:
    if cursor is None:
        return (-1, "")
    at_ms, _, id = cursor.partition(".")
    try:
        parse_id(id)
        return (int(at_ms), id)
    except ValueError:
        raise BadRequest("the cursor is not one that a list has given") from None
