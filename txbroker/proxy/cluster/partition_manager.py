"""Opens, suspends and closes this proxy's half partitions as the group of proxies assigns them.

Callbacks of the group never block: everything slow runs in a separate task. A partition that stays
assigned through a rebalance is neither claimed nor read again.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping

from txbroker.config.settings import Settings
from txbroker.contract.service import HalfPartitionState, Readiness
from txbroker.core.encoding import installation_headers
from txbroker.core.records import RECORD_VERSION
from txbroker.door.protocols import Assignment, Door, Hanging, LogTruncated, Targets
from txbroker.door.writing import Fenced
from txbroker.error_text import raised_at, safe_repr, user_message
from txbroker.errors import ConfigurationError, KafkaUnavailable, NewerRecord, OwnerUnavailable
from txbroker.failpoints import failpoint
from txbroker.principals import Directory, no_principals
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.partition.checkback import Runner
from txbroker.proxy.partition.context import OwnerSettings, PartitionEvents, ProxyContext
from txbroker.proxy.partition.owner import PartitionOwner

REOPEN_S = 1.0
"""Pause before the next attempt to open a partition, seconds."""
REJOIN_S = 5.0
"""Minimum time that a stuck proxy stays out of the group, seconds: the others need it to rebalance
and claim its partitions."""
STUCK_LOOK_S = 1.0
HANGING_KNOWN_S = 5.0
"""Grace time of a claim before it counts as stuck, seconds. Where a hanging transaction hides the
checkpoint the claim reports that within this time; another proxy would fail in the same way."""
LEAVE_AGAIN_MAX_S = 600.0
"""Longest time that a partition may be stuck before the proxy leaves, seconds. If every proxy is
stuck they would leave in turn for ever, each time dropping their other partitions; so the time
doubles with each departure."""
TOPICS_LOOK_S = 60.0

STOPPED = (HalfPartitionState.TRUNCATED, HalfPartitionState.NEWER, HalfPartitionState.STOPPED)

log = get_logger(__name__)


class PartitionSlot:
    """A half partition that is assigned to this proxy, until it is dropped."""

    def __init__(self) -> None:
        self.owner: PartitionOwner | None = None
        """Set while it is caught up and works."""
        self.opening: asyncio.Task[None] | None = None
        self.candidate: PartitionOwner | None = None
        """The owner that is being opened."""
        self.since = time.monotonic()
        """When opening began, or resumed after the contact with the group was lost."""
        self.state = HalfPartitionState.CLAIMING
        self.why = ""
        self.checkpoint_end: int | None = None
        """Where the checkpoint topic ended when the partition stopped."""

    def shown(self) -> tuple[HalfPartitionState, str]:
        if self.owner is not None:
            return self.owner.phase, ""
        phase = None if self.candidate is None else self.candidate.phase
        if phase is None or (self.hanging and phase is HalfPartitionState.CLAIMING):
            return self.state, self.why
        return phase, self.why

    @property
    def hanging(self) -> bool:
        """Whether a hanging transaction hid the checkpoint at the last claim."""
        return self.state is HalfPartitionState.HANGING

    @property
    def stopped(self) -> bool:
        """Whether the partition stopped and only an operator can make it continue."""
        return self.opening is None and self.owner is None and self.state in STOPPED

    def owners(self) -> list[PartitionOwner]:
        return [owner for owner in (self.owner, self.candidate) if owner is not None]

    def stuck_s(self) -> float:
        """Return for how long a claim or a promotion transaction has failed, seconds; 0 if none
        does, or if it would fail on another proxy too."""
        if self.owner is not None:
            return self.owner.stuck_since_s()
        if self.opening is None or self.shown()[0] is not HalfPartitionState.CLAIMING:
            return 0.0
        return max(0.0, time.monotonic() - self.since - HANGING_KNOWN_S)


class PartitionManager:
    """Opens and closes the owners of this proxy's half partitions.

    Attributes:
        url: this proxy's URL; like the next two set before `join`.
        own_peer_url: where it takes calls of other proxies, "" if at `url`.
        own_admin_url: where it takes calls of operators, "" if at `url`.
        topic_problems: what makes txbroker's own topics unusable.
        actions: what operators did, as far as the owners here know.
    """

    def __init__(
        self,
        door: Door,
        targets: Targets,
        settings: Settings,
        runner: Runner,
        events: PartitionEvents,
        *,
        principals: Callable[[], Directory] = no_principals,
        rejoin_s: float = REJOIN_S,
    ) -> None:
        self.url = settings.advertise
        self.own_peer_url = settings.peer_advertise
        self.own_admin_url = ""
        self.topic_problems: tuple[str, ...] = ()
        self._door = door
        self._targets = targets
        self._settings = settings
        self._runner = runner
        self._events = events
        self._rejoin_s = rejoin_s
        self._slots: dict[int, PartitionSlot] = {}
        self._proxy = ProxyContext(
            settings.instance,
            self,
            self._slots,
            settings.bodies_bytes_max,
            settings.settled_bytes_max,
            principals,
        )
        self.actions = self._proxy.actions
        self._closing: set[asyncio.Task[None]] = set()
        self._watching: list[asyncio.Task[None]] = []
        self._listeners: list[Callable[[], None]] = []
        self._assignment = Assignment(frozenset(), (), (), RECORD_VERSION)
        self._generation = 0
        self._member = False
        """False after leaving on purpose; callbacks of the group are ignored then."""
        self._in_touch = asyncio.Event()
        self._strangers: list[str] = []
        """The other members, if this proxy joined them without a peer identity."""
        self._out_because = "not yet a member of the proxies' group"
        self._leave_after_s = settings.stuck_after_s

    # --- life --------------------------------------------------------------------------------

    async def join(self) -> None:
        """Join the other proxies; partitions are opened as they are assigned."""
        await self._join()
        watchers = (self._watch_stuck, self._watch_stopped, self._watch_topics)
        self._watching = [asyncio.create_task(watch()) for watch in watchers]

    async def close(self) -> None:
        """Close all owners, then leave the group, so that other proxies take over at once."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._leave("this proxy is stopping")

    async def _join(self) -> None:
        self._member = True
        self._strangers.clear()
        await self._door.membership.join(
            self.url,
            self._assigned,
            self._lost,
            peer_url=self.own_peer_url,
            admin_url=self.own_admin_url,
        )
        if self._strangers:
            others = ", ".join(self._strangers)
            await self._leave("left the proxies' group: this proxy has no peer identity")
            raise ConfigurationError(
                f"this proxy has no peer identity, so it cannot join the other proxies ({others}): "
                "give all proxies of the installation the same peer_secret_file, or name their "
                "certificates with peer_names"
            )

    async def _leave(self, why: str) -> None:
        """Close all partitions before another proxy can be assigned one."""
        self._member = False
        self._in_touch.clear()
        self._out_because = why
        for partition in list(self._slots):
            self._drop(partition, leaving=True)
        self._notify()
        if self._closing:
            # Not `gather`: a cancelled `_leave` must not leave owners half closed.
            await asyncio.wait(self._closing)
        await self._door.membership.leave()

    # --- where -------------------------------------------------------------------------------

    def open(self) -> Mapping[int, PartitionOwner]:
        """Return the owners that are caught up, suspended ones included, by half partition."""
        return {
            number: slot.owner for number, slot in self._slots.items() if slot.owner is not None
        }

    def owner(self, partition: int, id: str | None = None) -> PartitionOwner:
        """Return the owner of a half partition.

        Raises:
            OwnerUnavailable: this proxy does not own it, it is not caught up, or it is suspended:
                then another proxy may own it by now, and the memory here is out of date.
        """
        slot = self._slots.get(partition)
        owner = None if slot is None else slot.owner
        if owner is not None and owner.gate.is_set():
            return owner
        state, why = self._state(partition)
        advice = "see /readyz and the proxy's log" if state in STOPPED else "retry"
        raise OwnerUnavailable(
            f"this proxy cannot serve half partition {partition} ({_words(state, why)}): {advice}",
            id=id,
        )

    def check_in_touch(self, id: str | None = None) -> None:
        """Raise if other proxies may own our partitions without our noticing, as after this
        process was paused: then the memory here is out of date."""
        if not self._door.membership.in_touch():
            raise OwnerUnavailable(
                "this proxy lost contact with the group coordinator; partition ownership is "
                "unknown: retry",
                id=id,
            )

    def assigned(self) -> tuple[str, ...]:
        """Return the URL of the proxy that each half partition is assigned to, whether it takes
        calls yet or not; "" where none is known."""
        known = self._assignment.owners[: self._door.partitions]
        return (*known, *[""] * (self._door.partitions - len(known)))

    def proxies(self) -> tuple[str, ...]:
        return self._assignment.proxies

    def peer_url(self, url: str) -> str:
        return self._assignment.peer_urls.get(url, url)

    def admin_url(self, url: str) -> str:
        return self._assignment.admin_urls.get(url, url)

    def owners(self) -> tuple[str, ...]:
        shown = list(self.assigned())
        for number, url in enumerate(shown):
            if url == self.url or number in self._slots:
                slot = self._slots.get(number)
                ready = slot is not None and slot.owner is not None
                shown[number] = self.url if ready else ""
        return tuple(shown)

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    # --- state -------------------------------------------------------------------------------

    def readiness(self) -> Readiness:
        """Return the state of each half partition; ready if all of ours take calls."""
        shown = {p: self._state(p) for p in range(self._door.partitions)}
        problems = [
            f"partition {number}: {_words(*self._state(number))}"
            for number in sorted(self._slots)
            if self._state(number)[0] is not HalfPartitionState.OWNED
        ]
        if not self._in_touch.is_set():
            problems.insert(0, self._out_because)  # the cause of all others
        states = {number: _words(*state) for number, state in shown.items()}
        return Readiness(not problems, states, (*problems, *self.topic_problems))

    def _state(self, partition: int) -> tuple[HalfPartitionState, str]:
        slot = self._slots.get(partition)
        if slot is not None:
            return slot.shown()
        url = self.assigned()[partition]
        if url and url != self.url:
            return HalfPartitionState.ELSEWHERE, ""
        return HalfPartitionState.NONE, ""

    # --- callbacks of the group --------------------------------------------------------------

    def _assigned(self, assignment: Assignment) -> None:
        if not self._member:
            return
        others = tuple(url for url in assignment.proxies if url != self.url)
        if others and self._settings.guarded and not self._settings.peer_identity:
            if self._generation == 0:
                self._strangers.extend(others)
                return
            # This proxy was here first: the newcomer leaves, unless it is configured differently.
            log.error("no peer identity", others=list(others))
        self._assignment = assignment
        self._proxy.limit_version(assignment.record_version)
        self._generation += 1
        was_out = not self._in_touch.is_set()
        self._in_touch.set()
        for partition in self._slots.keys() - assignment.mine:
            if was_out:
                # Assigned to another proxy during our absence: it has fenced us, or will.
                self._events.fenced()
            self._drop(partition)
        for partition in sorted(assignment.mine):
            slot = self._slots.get(partition)
            if slot is None:
                self._begin(partition)
            else:
                if was_out:
                    slot.since = time.monotonic()
                for owner in slot.owners():
                    owner.resume()
        self._notify()

    def _lost(self, why: str) -> None:
        """Suspend all partitions: ownership is unknown, so keep the state and write nothing."""
        if not self._member:
            return
        log.warning("out of touch with the group", why=why)
        self._in_touch.clear()
        self._out_because = f"lost contact with the proxies' group: {why}"
        for slot in self._slots.values():
            for owner in slot.owners():
                owner.suspend()
        self._notify()

    async def still_ours(self, partition: int) -> bool:
        """Return, after a fresh heartbeat, whether this proxy still owns a partition.

        Raises:
            KafkaUnavailable: the group does not answer.
        """
        while True:
            generation = self._generation
            ours = await self._door.membership.still_ours(partition)
            # A negative answer of an older generation is void after a new assignment.
            if ours or generation == self._generation:
                return ours
            if partition not in self._assignment.mine:
                return False

    # --- opening -----------------------------------------------------------------------------

    def _begin(self, partition: int) -> None:
        failpoint("handover.assigned")
        slot = self._slots[partition] = PartitionSlot()
        slot.opening = asyncio.create_task(self._open(partition, slot))

    async def _open(self, partition: int, slot: PartitionSlot) -> None:
        """Open the owner of a partition; retry without limit while Kafka does not answer."""
        while True:
            await self._in_touch.wait()
            owner = slot.candidate = self._make_owner(partition, slot)
            started = time.monotonic()
            try:
                await owner.open()
            except Fenced:
                self._events.fenced()
                # Before anything else: if the partition is assigned again while this owner
                # closes, a new one must be opened.
                self._give_up(partition, slot)
                self._until_done(asyncio.create_task(owner.close()))
                return
            except KafkaUnavailable as error:
                log.warning("partition not opened", partition=partition, why=str(error))
                self._events.kafka_failed("claim")
                slot.why = str(error)
                hanging = isinstance(error, Hanging)
                slot.state = HalfPartitionState.HANGING if hanging else HalfPartitionState.CLAIMING
                slot.candidate = None
                await owner.close()
                await asyncio.sleep(REOPEN_S * (0.5 + random.random()))
            except Exception as error:
                await owner.close()
                slot.checkpoint_end = await self._checkpoint_end(partition)
                self._stopped(partition, slot, error)
                return
            except BaseException:
                await asyncio.shield(owner.close())
                raise
            else:
                break
        slot.owner, slot.candidate, slot.opening = owner, None, None
        took_s = time.monotonic() - started
        self._events.recovered(took_s)
        log.info(
            "owned",
            partition=partition,
            undecided=owner.ledger.index.undecided_count,
            seconds=round(took_s, 3),
        )
        self._notify()

    def _make_owner(self, partition: int, slot: PartitionSlot) -> PartitionOwner:
        settings = self._settings
        self._proxy.url = self.url
        owner = PartitionOwner(
            self._door.partition(partition),
            self._targets,
            self._runner,
            self._events,
            OwnerSettings(
                dedup_window_ms=round(settings.dedup_window_s * 1000),
                pending_max=settings.pending_max,
                pending_group_max=settings.pending_group_max,
                half_retention_ms=round(settings.half_retention_s * 1000),
                snapshot_records_min=settings.snapshot_records_min,
                installation=installation_headers(settings.topic_prefix),
            ),
            self._proxy,
            lambda error: self._owner_stopped(partition, slot, owner, error),
        )
        return owner

    # --- closing -----------------------------------------------------------------------------

    def _drop(self, partition: int, *, leaving: bool = False) -> None:
        """Close a partition that was assigned to another proxy; with `leaving`, to none yet."""
        failpoint("handover.dropped")
        slot = self._slots.pop(partition)
        if slot.opening is not None:
            self._until_done(slot.opening)
            slot.opening.cancel()
        if slot.owner is not None:
            closing = self._hand_over(partition, slot.owner, leaving)
            self._until_done(asyncio.create_task(closing))

    async def _hand_over(self, partition: int, owner: PartitionOwner, leaving: bool) -> None:
        await owner.close(last_snapshot=leaving)
        log.info("handed over", partition=partition)

    def _until_done(self, task: asyncio.Task[None]) -> None:
        self._closing.add(task)
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error(
                "partition not closed cleanly", error=safe_repr(error), where=raised_at(error)
            )

    def _give_up(self, partition: int, slot: PartitionSlot) -> None:
        """Drop a partition that another proxy has claimed, until the next assignment: claiming it
        again would only fence its owner."""
        log.warning("taken over by another proxy", partition=partition)
        if self._slots.get(partition) is slot:
            del self._slots[partition]
            self._notify()

    def _owner_stopped(
        self, partition: int, slot: PartitionSlot, owner: PartitionOwner, error: Exception
    ) -> None:
        """Drop, reopen or stop the partition of an owner that failed, depending on the error."""
        if self._slots.get(partition) is not slot or slot.owner is not owner:
            # Closed before; the slot may have another owner object by now.
            return
        slot.owner = None
        self._until_done(asyncio.create_task(owner.close()))
        if isinstance(error, Fenced):
            self._events.fenced()
            self._give_up(partition, slot)
        elif isinstance(error, KafkaUnavailable):
            log.warning("partition begins anew", partition=partition, why=str(error))
            self._begin(partition)
        else:
            self._stopped(partition, slot, error)
        self._notify()

    def _stopped(self, partition: int, slot: PartitionSlot, error: Exception) -> None:
        """Stop one partition and keep the others: an invariant is violated."""
        log.error(
            "partition stopped",
            partition=partition,
            error=safe_repr(error),
            where=raised_at(error),
        )
        slot.candidate = slot.opening = None
        slot.state, slot.why = _state_after(error), user_message(error)

    # --- in the background -------------------------------------------------------------------

    async def _watch_stuck(self) -> None:
        """Leave the group when a partition is stuck: another proxy may reach its brokers."""
        while True:
            await asyncio.sleep(STUCK_LOOK_S)
            worst_s = max((slot.stuck_s() for slot in self._slots.values()), default=0.0)
            if worst_s == 0.0 and self.readiness().ready:
                self._leave_after_s = self._settings.stuck_after_s
            if self._should_leave(worst_s):
                self._leave_after_s = min(self._leave_after_s * 2, LEAVE_AGAIN_MAX_S)
                await self._leave_and_join(worst_s)

    def _should_leave(self, stuck_s: float) -> bool:
        """Return whether this proxy should leave: only if there is another one."""
        others = any(url != self.url for url in self.proxies())
        return others and self._in_touch.is_set() and stuck_s >= self._leave_after_s

    async def _leave_and_join(self, stuck_s: float) -> None:
        log.error("stuck, leaving the group", seconds=round(stuck_s))
        await self._leave("left the proxies' group: a claim or promotion transaction is stuck")
        while True:
            await asyncio.sleep(self._rejoin_s * (1 + random.random()))
            try:
                await self._join()
            except Exception as error:
                # Any error, such as a full group: no other task would ever retry.
                log.error("not joined again", error=safe_repr(error), where=raised_at(error))
            else:
                return

    async def _watch_stopped(self) -> None:
        """Reopen a stopped partition once an operator has marked a record to be skipped: only that
        is written to the checkpoint topic of a stopped partition."""
        while True:
            await asyncio.sleep(STUCK_LOOK_S)
            for partition, slot in list(self._slots.items()):
                if slot.stopped and self._in_touch.is_set():
                    await self._look_at_stopped(partition, slot)

    async def _look_at_stopped(self, partition: int, slot: PartitionSlot) -> None:
        end = await self._checkpoint_end(partition)
        if end is None or self._slots.get(partition) is not slot or not slot.stopped:
            return
        if slot.checkpoint_end is None:
            slot.checkpoint_end = end
        elif end != slot.checkpoint_end:
            log.info("stopped partition begins again", partition=partition)
            self._begin(partition)

    async def _checkpoint_end(self, partition: int) -> int | None:
        door = self._door.partition(partition)
        try:
            return await door.checkpoint_end()
        except KafkaUnavailable:
            return None
        finally:
            await door.close()

    async def _watch_topics(self) -> None:
        while True:
            await asyncio.sleep(TOPICS_LOOK_S)
            await self.look_at_topics()

    async def look_at_topics(self) -> None:
        """Check once that txbroker's own topics are as required."""
        try:
            problems = tuple(await self._door.check_topics())
        except KafkaUnavailable as error:
            log.warning("topics not looked at", why=str(error))
            return
        if problems != self.topic_problems:
            self.topic_problems = problems
            if problems:
                log.error("topics changed", problems=list(problems))
            else:
                log.info("topics well")


def _state_after(error: Exception) -> HalfPartitionState:
    if isinstance(error, LogTruncated):
        return HalfPartitionState.TRUNCATED
    if isinstance(error, NewerRecord):
        return HalfPartitionState.NEWER
    return HalfPartitionState.STOPPED


def _words(state: HalfPartitionState, why: str) -> str:
    return f"{state}: {why}" if why else str(state)
