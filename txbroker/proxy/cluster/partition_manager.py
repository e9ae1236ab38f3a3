"""Which half partitions this proxy works on: opened, kept, suspended and dropped as the group says.

The group's callbacks only post what happened; whatever takes time runs in a task of its own. A
partition that stays ours through a change of the group is neither claimed nor read again.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping

from txbroker.config.settings import Settings
from txbroker.contract.service import PartitionState, Readiness
from txbroker.core.encoding import installation_headers
from txbroker.core.records import LOG_VERSION, RECORD_VERSION
from txbroker.core.segment import SEGMENT_VERSION
from txbroker.core.telling import safe_repr, user_message, where_raised
from txbroker.door.protocols import Assignment, Door, Fenced, Hanging, LogTruncated, Targets
from txbroker.errors import ConfigurationError, KafkaUnavailable, NewerRecord, OwnerUnavailable
from txbroker.failpoints import failpoint
from txbroker.principals import Directory, no_principals
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.partition.checkback import Runner
from txbroker.proxy.partition.clock import TxnLimiter
from txbroker.proxy.partition.context import OwnerSettings, PartitionEvents
from txbroker.proxy.partition.owner import PartitionOwner

REOPEN_S = 1.0
"""A partition that could not be opened is tried again after this, seconds."""
REJOIN_S = 5.0
"""A proxy that left because it was stuck stays away for this long at least, seconds: time for the
others to share out what it had, and to claim it."""
STUCK_LOOK_S = 1.0
HANGING_KNOWN_S = 5.0
"""A claim that a hanging transaction hides says so after its own time, as long as that after which
a proxy leaves. By then it must be known, seconds: other proxies would fare no better."""
LEAVE_AGAIN_MAX_S = 600.0
"""What is stuck for everybody would have the proxies leave in turn for ever, each time with all of
their other partitions: so each time they wait twice as long, up to this."""
TOPICS_LOOK_S = 60.0

STOPPED = (PartitionState.TRUNCATED, PartitionState.NEWER, PartitionState.STOPPED)

log = get_logger(__name__)


class PartitionSlot:
    """A half partition that is this proxy's, from when it was assigned until it is dropped."""

    def __init__(self) -> None:
        self.owner: PartitionOwner | None = None
        """Once it is caught up, until it is dropped or cannot go on."""
        self.opening: asyncio.Task[None] | None = None
        self.candidate: PartitionOwner | None = None
        """The one that is being opened."""
        self.since = time.monotonic()
        """When opening began, or went on after the group was out of touch."""
        self.state = PartitionState.CLAIMING
        self.why = ""
        self.checkpoint_end: int | None = None
        """Where the checkpoint topic ended when the partition stopped."""

    def shown(self) -> tuple[PartitionState, str]:
        """Return what is going on, and what more there is to say."""
        if self.owner is not None:
            return self.owner.phase, ""
        phase = None if self.candidate is None else self.candidate.phase
        if phase is None or (self.hanging and phase is PartitionState.CLAIMING):
            return self.state, self.why
        return phase, self.why

    @property
    def hanging(self) -> bool:
        """True while a transaction that nobody ends has hidden the progress at the last try."""
        return self.state is PartitionState.HANGING

    @property
    def stopped(self) -> bool:
        """True while it stands still and nothing of ours will change that."""
        return self.opening is None and self.owner is None and self.state in STOPPED

    def owners(self) -> list[PartitionOwner]:
        """Return the one that works or is being opened, if any."""
        return [owner for owner in (self.owner, self.candidate) if owner is not None]

    def stuck_s(self) -> float:
        """Return for how long a claim or a turn has not come through, seconds; 0 where all is
        well, and where nobody else would fare better."""
        if self.owner is not None:
            return self.owner.stuck_since_s()
        if self.opening is None or self.shown()[0] is not PartitionState.CLAIMING:
            return 0.0
        return max(0.0, time.monotonic() - self.since - HANGING_KNOWN_S)


class PartitionManager:
    """Opens and closes the owners of this proxy's half partitions.

    Args:
        door: the way to Kafka, started.
        targets: what is known of target topics.
        settings: the proxy's configuration.
        runner: carries out checks.
        events: told what happens on every partition.
        principals: returns the principals as they are now.
        rejoin_s: how long a stuck proxy stays out of the group, seconds.

    `url` is this proxy's own URL, `own_peer_url` where it takes other proxies' calls and
    `own_admin_url` operators', "" for there too; all are set before `join`.
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
        self._door = door
        self._targets = targets
        self._settings = settings
        self._runner = runner
        self._events = events
        self._principals = principals
        self._pace = TxnLimiter()
        self._rejoin_s = rejoin_s
        self._slots: dict[int, PartitionSlot] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._watching: list[asyncio.Task[None]] = []
        self._listeners: list[Callable[[], None]] = []
        self._assignment = Assignment(frozenset(), (), (), RECORD_VERSION)
        self._generation = 0
        self._member = False
        """False while we are out of the group on purpose; what it says then is not for us."""
        self._in_touch = asyncio.Event()
        self._strangers: list[str] = []
        """Other proxies that were there before this one, which has no peer identity."""
        self._out_because = "not yet a member of the proxies' group"
        self._topic_problems: tuple[str, ...] = ()
        self._leave_after_s = settings.stuck_after_s

    # --- life --------------------------------------------------------------------------------

    async def join(self) -> None:
        """Join the other proxies; partitions are opened as they are assigned.

        Raises:
            ConfigurationError: there are others, and this proxy cannot prove to be one of them.
        """
        await self._join()
        watchers = (self._watch_stuck, self._watch_stopped, self._watch_topics)
        self._watching = [asyncio.create_task(watch()) for watch in watchers]

    async def close(self) -> None:
        """Close all owners, then leave the group, so that others take over at once."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._leave("this proxy is going away")

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
                f"this proxy has no peer identity, so it cannot join the others ({others}): give "
                "all proxies of the installation the same peer_secret_file, or name their "
                "certificates with peer_names"
            )

    async def _leave(self, why: str) -> None:
        """Close everything before anybody else hears that it is to be had."""
        self._member = False
        self._in_touch.clear()
        self._out_because = why
        for partition in list(self._slots):
            self._drop(partition, leaving=True)
        self._tell()
        if self._closing:
            # Not `gather`: whoever gives up leaving must not leave owners half closed.
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
            OwnerUnavailable: it is not this proxy's, or not caught up, or suspended: then it may
                be another one's by now, and what this one remembers is not how it stands.
        """
        slot = self._slots.get(partition)
        owner = None if slot is None else slot.owner
        if owner is not None and owner.gate.is_set():
            return owner
        state, why = self._state(partition)
        advice = "see /readyz and the proxy's log" if state in STOPPED else "try again"
        raise OwnerUnavailable(
            f"half partition {partition} has no owner here ({_words(state, why)}): {advice}", id=id
        )

    def check_in_touch(self, id: str | None = None) -> None:
        """Raise if others may have had our partitions for a while without our noticing, as after
        a long sleep of this process: then what is remembered is not how it stands.

        Raises:
            OwnerUnavailable: the last word of the group is older than a session.
        """
        if not self._door.membership.in_touch():
            raise OwnerUnavailable(
                "this proxy has not heard of the others lately: try again", id=id
            )

    def assigned(self) -> tuple[str, ...]:
        """Return the URL of each half partition's proxy, as the group says, "" where none is
        known."""
        known = self._assignment.owners[: self._door.partitions]
        return (*known, *[""] * (self._door.partitions - len(known)))

    def proxies(self) -> tuple[str, ...]:
        """Return the URLs of all proxies of the group, this one's included."""
        return self._assignment.proxies

    def peer_url(self, url: str) -> str:
        """Return where the proxy at `url` takes other proxies' calls."""
        return self._assignment.peer_urls.get(url, url)

    def admin_url(self, url: str) -> str:
        """Return where the proxy at `url` takes operators' calls."""
        return self._assignment.admin_urls.get(url, url)

    def owners(self) -> tuple[str, ...]:
        """Return the URL of each half partition's owner, "" where none is known, or where it is
        ours and cannot take calls yet."""
        shown = list(self.assigned())
        for number, url in enumerate(shown):
            if url == self.url or number in self._slots:
                slot = self._slots.get(number)
                ready = slot is not None and slot.owner is not None
                shown[number] = self.url if ready else ""
        return tuple(shown)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever partitions or proxies come or go."""
        self._listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    # --- how it stands -----------------------------------------------------------------------

    def topic_problems(self) -> tuple[str, ...]:
        """Return what has happened to txbroker's own topics that it cannot work with."""
        return self._topic_problems

    def readiness(self) -> Readiness:
        """Say what is done with each half partition; ready where everything of ours can take
        calls."""
        shown = {p: self._state(p) for p in range(self._door.partitions)}
        problems = [
            f"partition {number}: {_words(*self._state(number))}"
            for number in sorted(self._slots)
            if self._state(number)[0] is not PartitionState.OWNED
        ]
        if not self._in_touch.is_set():
            problems.insert(0, self._out_because)  # the cause of all the others
        states = {number: _words(*state) for number, state in shown.items()}
        return Readiness(not problems, states, (*problems, *self._topic_problems))

    def _state(self, partition: int) -> tuple[PartitionState, str]:
        slot = self._slots.get(partition)
        if slot is not None:
            return slot.shown()
        url = self.assigned()[partition]
        if url and url != self.url:
            return PartitionState.ELSEWHERE, ""
        return PartitionState.NONE, ""

    # --- what the group says -----------------------------------------------------------------

    def _assigned(self, assignment: Assignment) -> None:
        """A generation of the group has begun."""
        if not self._member:
            return
        others = tuple(url for url in assignment.proxies if url != self.url)
        if others and self._settings.guarded and not self._settings.peer_identity:
            if self._generation == 0:
                self._strangers.extend(others)
                return
            # It was here first: the other one does not stay, unless it is set up differently.
            log.error("no peer identity", others=list(others))
        self._assignment = assignment
        self._generation += 1
        was_out = not self._in_touch.is_set()
        self._in_touch.set()
        for partition in self._slots.keys() - assignment.mine:
            if was_out:
                # Given away while we were gone: whoever has it has fenced us, or will.
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
        self._tell()

    def _lost(self, why: str) -> None:
        """Nobody knows what is ours: keep it all, and write nothing."""
        if not self._member:
            return
        log.warning("out of touch with the group", why=why)
        self._in_touch.clear()
        self._out_because = f"out of touch with the proxies' group: {why}"
        for slot in self._slots.values():
            for owner in slot.owners():
                owner.suspend()
        self._tell()

    async def _still_ours(self, partition: int) -> bool:
        while True:
            generation = self._generation
            ours = await self._door.membership.still_ours(partition)
            # A no of the generation before says nothing of what has been assigned since.
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
        """Make this proxy the owner of a partition, however long that takes."""
        while True:
            await self._in_touch.wait()
            owner = slot.candidate = self._make_owner(partition, slot)
            started = time.monotonic()
            try:
                await owner.open()
            except Fenced:
                self._events.fenced()
                # First of all: assigned again while this one closes, it is to be opened anew.
                self._give_up(partition, slot)
                self._until_done(asyncio.create_task(owner.close()))
                return
            except KafkaUnavailable as error:
                log.warning("partition not opened", partition=partition, why=str(error))
                self._events.kafka_failed("claim")
                slot.why = str(error)
                hanging = isinstance(error, Hanging)
                slot.state = PartitionState.HANGING if hanging else PartitionState.CLAIMING
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
            undecided=owner.ledger.undecided_count,
            seconds=round(took_s, 3),
        )
        self._tell()

    def _make_owner(self, partition: int, slot: PartitionSlot) -> PartitionOwner:
        settings = self._settings
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
            identity=(settings.instance, self.url),
            still_ours=lambda: self._still_ours(partition),
            stopped=lambda error: self._owner_stopped(partition, slot, owner, error),
            bodies_share=lambda: self._share(settings.bodies_bytes_max),
            settled_share=lambda: self._share(settings.settled_bytes_max),
            segment_version=min(SEGMENT_VERSION, self._assignment.record_version),
            record_version=lambda: min(LOG_VERSION, self._assignment.record_version),
            pace=self._pace,
            principals=self._principals,
        )
        return owner

    def _share(self, whole: int) -> int:
        """Return what each of our partitions may take of something that the proxy has."""
        return whole // max(1, len(self._slots))

    # --- closing -----------------------------------------------------------------------------

    def _drop(self, partition: int, *, leaving: bool = False) -> None:
        """A partition is another proxy's now, or with `leaving` the next one's that comes."""
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
                "partition not closed cleanly", error=safe_repr(error), where=where_raised(error)
            )

    def _give_up(self, partition: int, slot: PartitionSlot) -> None:
        """Another proxy has claimed a partition and it is not ours any more. The next assignment
        says what is; until then claiming it would only fence its owner."""
        log.warning("taken over by another proxy", partition=partition)
        if self._slots.get(partition) is slot:
            del self._slots[partition]
            self._tell()

    def _owner_stopped(
        self, partition: int, slot: PartitionSlot, owner: PartitionOwner, error: Exception
    ) -> None:
        """An owner cannot go on: give the partition up, or begin anew where that can help."""
        if self._slots.get(partition) is not slot or slot.owner is not owner:
            # It was closed before, and the partition may have another owner object by now.
            return
        slot.owner = None
        self._until_done(asyncio.create_task(owner.close()))
        if isinstance(error, KafkaUnavailable):
            log.warning("partition begins anew", partition=partition, why=str(error))
            self._begin(partition)
        elif isinstance(error, Fenced):
            self._events.fenced()
            self._give_up(partition, slot)
        else:
            self._stopped(partition, slot, error)
        self._tell()

    def _stopped(self, partition: int, slot: PartitionSlot, error: Exception) -> None:
        """Stop one partition and keep the rest: something that must hold does not."""
        log.error(
            "partition stopped",
            partition=partition,
            error=safe_repr(error),
            where=where_raised(error),
        )
        slot.candidate = slot.opening = None
        slot.state, slot.why = _state_after(error), user_message(error)

    # --- beside the work ---------------------------------------------------------------------

    async def _watch_stuck(self) -> None:
        """Leave the group when a partition does not come through: another proxy may fare
        better."""
        while True:
            await asyncio.sleep(STUCK_LOOK_S)
            worst_s = max((each.stuck_s() for each in self._slots.values()), default=0.0)
            if worst_s == 0.0 and self.readiness().ready:
                self._leave_after_s = self._settings.stuck_after_s
            if self._should_leave(worst_s):
                self._leave_after_s = min(self._leave_after_s * 2, LEAVE_AGAIN_MAX_S)
                await self._leave_and_join(worst_s)

    def _should_leave(self, stuck_s: float) -> bool:
        """Say whether another proxy should get its turn: there must be one."""
        others = any(url != self.url for url in self.proxies())
        return others and self._in_touch.is_set() and stuck_s >= self._leave_after_s

    async def _leave_and_join(self, stuck_s: float) -> None:
        log.error("stuck, leaving the group", seconds=round(stuck_s))
        await self._leave("left the proxies' group: a claim or a turn did not come through")
        while True:
            await asyncio.sleep(self._rejoin_s * (1 + random.random()))
            try:
                await self._join()
            except Exception as error:
                # Whatever it is, a group that is full say: nobody else would ever try again.
                log.error("not joined again", error=safe_repr(error), where=where_raised(error))
            else:
                return

    async def _watch_stopped(self) -> None:
        """Begin again with what has stopped once an operator has decided to pass over what stopped
        it: nobody else writes to its checkpoint topic."""
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
        """Return where the checkpoint topic of a stopped partition ends; None if nobody answers."""
        door = self._door.partition(partition)
        try:
            return await door.checkpoint_end()
        except KafkaUnavailable:
            return None
        finally:
            await door.close()

    async def _watch_topics(self) -> None:
        """See whether anybody changed txbroker's own topics under us."""
        while True:
            await asyncio.sleep(TOPICS_LOOK_S)
            await self.look_at_topics()

    async def look_at_topics(self) -> None:
        """Look once whether txbroker's own topics are still as they must be."""
        try:
            found = tuple(await self._door.check_topics())
        except KafkaUnavailable as error:
            log.warning("topics not looked at", why=str(error))
            return
        if found != self._topic_problems:
            self._topic_problems = found
            if found:
                log.error("topics changed", problems=list(found))
            else:
                log.info("topics well")


def _state_after(error: Exception) -> PartitionState:
    if isinstance(error, LogTruncated):
        return PartitionState.TRUNCATED
    if isinstance(error, NewerRecord):
        return PartitionState.NEWER
    return PartitionState.STOPPED


def _words(state: PartitionState, why: str) -> str:
    return f"{state}: {why}" if why else str(state)
