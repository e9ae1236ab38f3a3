"""What consumers and relays ask of Kafka beside logs: groups of members, their offsets, and topics.

A group has the two barriers of Kafka's classic protocol, and static members. Its offsets are a
separate log: its leader coordinates the group, and transactions end in it as in any other, so that
offsets of an open transaction are not stable.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from msgspec import Struct

from tests.simulator.sim_kafka import (
    BAD_EPOCH,
    BAD_MAPPING,
    BAD_STATE,
    CONCURRENT,
    NO_COORDINATOR,
    NONE,
    NOT_COORDINATOR,
    Cluster,
    Log,
    Name,
)

LOADING, OLD_GENERATION, UNKNOWN_MEMBER, REBALANCING, EXISTS = 14, 22, 25, 27, 36
ID_REQUIRED, FENCED_INSTANCE, UNSTABLE, NO_SUCH_ID = 79, 82, 88, 105
OFFSETS = "__consumer_offsets"
_WAIT_S = 0.03
"""How often a member that waits for others looks."""
_ALL_RIGHTS = 0xFFF
_GROUP = 0

Offset = tuple[int, str]
"""A committed offset and its metadata."""


class OffsetsLog(Log):
    """The partition of `__consumer_offsets` that holds one group."""

    def __init__(self, leader: int) -> None:
        super().__init__(leader, append_time=True, bytes_max=1 << 20)
        self.offsets: dict[Name, Offset] = {}
        self.staged: dict[int, dict[Name, tuple[int, Offset]]] = {}
        """Of open transactions, by producer, with where they were stored."""
        self._stored: dict[Name, int] = {}

    def commit(self, offsets: dict[Name, Offset]) -> None:
        """Store offsets."""
        self._take({name: (self.end, offset) for name, offset in offsets.items()})
        self.end += 1

    def _take(self, stored: dict[Name, tuple[int, Offset]]) -> None:
        # The later one in the log counts, though its transaction may have ended before.
        for name, (at, offset) in stored.items():
            if self._stored.get(name, -1) < at:
                self._stored[name], self.offsets[name] = at, offset

    def stage(self, producer: int, offsets: dict[Name, Offset]) -> None:
        """Store offsets of an open transaction."""
        self.open.setdefault(producer, self.end)
        stored = {name: (self.end, offset) for name, offset in offsets.items()}
        self.staged.setdefault(producer, {}).update(stored)
        self.end += 1

    def mark(self, producer: int, epoch: int, now_ms: int, *, commit: bool) -> None:
        """End a producer's transaction."""
        self.open.pop(producer, None)
        self.end += 1
        found = self.staged.pop(producer, {})
        if commit:
            self._take(found)


class _Member(Struct):
    instance: str | None
    session_s: float
    metadata: bytes
    heard_s: float
    joined: bool = False
    assignment: bytes = b""


class Group:
    """The members of a group; see `OffsetsLog` for its offsets."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.node = -1
        self.generation = 0
        self.state = "empty"
        self.leader = ""
        self.members: dict[str, _Member] = {}
        self.admitted: set[str] = set()
        """Ids that dynamic members have been given, and have not joined with yet."""
        self.protocol = ""
        self.since_s = 0.0
        """When the generation began to be prepared."""

    def named(self, instance: str | None) -> str | None:
        """Return the id of the member with an instance id."""
        found = (id for id, each in self.members.items() if instance and each.instance == instance)
        return next(found, None)

    def refusal(self, id: str, instance: str | None, generation: int | None = None) -> int:
        """Return the error for a member that does not belong to the group as it is."""
        if instance and self.named(instance) not in (None, id):
            return FENCED_INSTANCE
        if id not in self.members:
            return UNKNOWN_MEMBER
        if generation is not None and generation != self.generation:
            return OLD_GENERATION
        return NONE

    def prepare(self, now_s: float) -> None:
        """Begin a new generation: all members have to join it."""
        if self.state != "joining":
            self.state, self.since_s = "joining", now_s
            for member in self.members.values():
                member.joined = False


class GroupCluster(Cluster):
    """A `Cluster` with groups."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.groups: dict[str, Group] = {}
        self._members = 0
        self._handlers |= {
            "JoinGroupV5": self._join,
            "SyncGroupV3": self._sync,
            "HeartbeatV3": self._beat,
            "LeaveGroupV3": self._leave,
            "DescribeGroupsV4": self._describe,
            "OffsetFetchV7": self._fetch_offsets,
            "OffsetCommitV7": self._commit_offsets,
            "TxnOffsetCommitV3": self._stage_offsets,
            "TxnOffsetCommitV5": self._stage_offsets,
            "AddOffsetsToTxnV0": self._add_group,
            "DescribeTransactionsV0": self._describe_transactions,
            "CreateTopicsV3": self._create_topics,
        }

    def group(self, name: str) -> Group:
        """Return a group; its offsets begin empty."""
        if name not in self.groups:
            found = self.groups[name] = Group(len(self.groups))
            self.logs[OFFSETS, found.number] = OffsetsLog(len(name) % len(self.nodes))
        return self.groups[name]

    def offsets_of(self, name: str) -> OffsetsLog:
        """Return the offsets of a group."""
        log = self.logs[OFFSETS, self.group(name).number]
        assert isinstance(log, OffsetsLog)
        return log

    def _ask(self, node: int, name: str) -> tuple[Group, int]:
        """Return a group as its coordinator knows it now, and the error of a broker that is none.

        A new coordinator begins all sessions again.
        """
        group, log, now_s = self.group(name), self.offsets_of(name), self.loop.time()
        if log.leader != node:
            return group, NOT_COORDINATOR
        if now_s < log.learns[0]:
            return group, LOADING
        if group.node != node:
            group.node = node
            for member in group.members.values():
                member.heard_s = now_s
        late = {
            id
            for id, each in group.members.items()
            if each.heard_s + each.session_s < now_s
            or (
                group.state == "joining"
                and not (each.joined or each.instance)
                and group.since_s + each.session_s < now_s
            )
        }
        self._remove(group, late)
        if group.state == "joining" and all(each.joined for each in group.members.values()):
            self._begin(group)
        return group, NONE

    def _remove(self, group: Group, ids: Iterable[str]) -> None:
        for id in sorted(ids):
            self.note(f"group: {id} is out")
            del group.members[id]
            group.prepare(self.loop.time())

    def _begin(self, group: Group) -> None:
        """Begin the generation that all members have joined."""
        group.state = "syncing" if group.members else "empty"
        group.generation += 1
        if group.leader not in group.members:
            group.leader = next(iter(group.members), "")
        self.note(f"group: generation {group.generation} of {', '.join(group.members)}")

    # --- members ---------------------------------------------------------------------------------

    def _join(self, node: int, request: Any) -> Any:
        group, code = self._ask(node, request.group)
        id, instance = request.member_id, request.group_instance_id
        awaited = getattr(request, "awaited", None)
        if code == NONE and awaited is None:
            id, code = self._admit(group, id, instance, request)
            request.member_id = id
            if code == NONE and group.state == "joining":
                awaited = request.awaited = group.generation + 1
                group = self._ask(node, request.group)[0]
        if code == NONE:
            code = group.refusal(id, instance)
        if code == NONE:
            group.members[id].heard_s = self.loop.time()
            if awaited is not None and group.generation < awaited:
                return _WAIT_S
        joined: list[tuple[str, str | None, bytes]] = []
        if code == NONE and id == group.leader and group.state == "syncing":
            joined = [(each, m.instance, m.metadata) for each, m in group.members.items()]
        return SimpleNamespace(
            error_code=code,
            generation_id=group.generation if code == NONE else -1,
            group_protocol=group.protocol,
            leader_id=group.leader if joined or id != group.leader else "",
            member_id=id,
            members=joined,
        )

    def _admit(self, group: Group, id: str, instance: str | None, request: Any) -> tuple[str, int]:
        """Let a member join the next generation, or the one that it belongs to; return its id."""
        now_s, ((group.protocol, metadata),) = self.loop.time(), request.protocols
        if not id:
            before = group.named(instance)
            self._members += 1
            id = f"{instance or 'member'}-{self._members}"
            if instance is None:
                group.admitted.add(id)
                return id, ID_REQUIRED
            if before is not None:
                # It takes the place of the process before, in the generation as it stands.
                member = group.members[id] = group.members.pop(before)
                group.leader = id if group.leader == before else group.leader
                if group.state == "stable":
                    member.metadata, member.heard_s = metadata, now_s
                    return id, NONE
        elif id not in group.admitted and (code := group.refusal(id, instance)):
            return id, code
        group.admitted.discard(id)
        known = group.members.get(id)
        if known is None:
            session_s = request.session_timeout_ms / 1000
            known = group.members[id] = _Member(instance, session_s, metadata, now_s)
            group.prepare(now_s)
        elif known.metadata != metadata or (group.state == "stable" and id == group.leader):
            group.prepare(now_s)
        known.metadata, known.joined, known.heard_s = metadata, True, now_s
        return id, NONE

    def _sync(self, node: int, request: Any) -> Any:
        group, code = self._ask(node, request.group)
        id = request.member_id
        code = code or group.refusal(id, request.group_instance_id, request.generation_id)
        if code == NONE and group.state == "joining":
            code = REBALANCING
        if code == NONE:
            group.members[id].heard_s = self.loop.time()
            if group.state == "syncing":
                if id != group.leader:
                    return _WAIT_S
                shares = dict(request.assignments)
                for each, member in group.members.items():
                    member.assignment = shares.get(each, b"")
                group.state = "stable"
        assignment = group.members[id].assignment if code == NONE else b""
        return SimpleNamespace(error_code=code, member_assignment=assignment)

    def _beat(self, node: int, request: Any) -> Any:
        name, generation, id, instance = request.values
        group, code = self._ask(node, name)
        code = code or group.refusal(id, instance, generation)
        if code == NONE:
            group.members[id].heard_s = self.loop.time()
            if group.state == "joining":
                code = REBALANCING
        return SimpleNamespace(error_code=code)

    def _leave(self, node: int, request: Any) -> Any:
        name, leaving = request.values
        group, code = self._ask(node, name)
        if code == NONE:
            self._remove(group, {id for id, _ in leaving} & group.members.keys())
        return SimpleNamespace(error_code=code, members=[])

    def _describe(self, node: int, request: Any) -> Any:
        (name,) = request.values[0]
        group, code = self._ask(node, name)
        members = [
            (id, each.instance, "", "/host", each.metadata, each.assignment)
            for id, each in group.members.items()
        ]
        found = (code, name, group.state, "consumer", group.protocol, members, 0)
        return SimpleNamespace(groups=[found])

    def _find_coordinator(self, node: int, request: Any) -> Any:
        if request.kind != _GROUP:
            return super()._find_coordinator(node, request)
        leader = self.offsets_of(request.key).leader
        code = NONE if leader >= 0 else NO_COORDINATOR
        return SimpleNamespace(error_code=code, coordinator_id=leader)

    # --- offsets ---------------------------------------------------------------------------------

    def _fetch_offsets(self, node: int, request: Any) -> Any:
        name, topics, stable = request.values
        code, log = self._ask(node, name)[1], self.offsets_of(name)
        open_ = {at for staged in log.staged.values() for at in staged} if stable else set()

        def found(at: Name) -> tuple[int, int, int, str, int]:
            offset, metadata = log.offsets.get(at, (-1, ""))
            return at[1], offset, -1, metadata, UNSTABLE if at in open_ else NONE

        answer = [(topic, [found((topic, n)) for n in numbers]) for topic, numbers in topics]
        return SimpleNamespace(topics=answer if code == NONE else [], error_code=code)

    def _commit_offsets(self, node: int, request: Any) -> Any:
        name, generation, id, instance, topics = request.values
        group, code = self._ask(node, name)
        code = code or group.refusal(id, instance, generation)
        if code == NONE and group.state == "syncing":
            code = REBALANCING
        if code == NONE:
            self.offsets_of(name).commit(_offsets(topics))
        return _answers(topics, code)

    def _stage_offsets(self, node: int, request: Any) -> Any:
        id, name, producer, epoch, generation, member, instance, topics = request.values
        group, code = self._ask(node, name)
        code = code or group.refusal(member, instance, generation)
        known, at = self.ids.get(id), (OFFSETS, group.number)
        if code == NONE and (known is None or known.producer != producer):
            code = BAD_MAPPING
        if code == NONE:
            assert known is not None
            if known.epoch != epoch:
                code = BAD_EPOCH
            elif known.state.startswith("prepare"):
                code = CONCURRENT
            elif request.API_VERSION >= 5:  # it adds the group
                self._open(id, known, [at])
            elif known.state != "ongoing" or at not in known.partitions:
                code = BAD_STATE
        if code == NONE:
            self.offsets_of(name).stage(producer, _offsets(topics))
        self.note(f"offsets of {id} code {code}")
        return _answers(topics, code)

    def _add_group(self, node: int, request: Any) -> Any:
        code = self._refusal(node, request)
        known = self.ids.get(request.transactional_id)
        if code == NONE:
            assert known is not None
            if known.state.startswith("prepare"):
                code = CONCURRENT
            else:
                at = (OFFSETS, self.group(request.group_id).number)
                self._open(request.transactional_id, known, [at])
        return SimpleNamespace(error_code=code)

    def _describe_transactions(self, node: int, request: Any) -> Any:
        (id,) = request.values[0]
        known = self.ids.get(id)
        code = NOT_COORDINATOR if self.coordinator(id) != node else NONE if known else NO_SUCH_ID
        producer, epoch = (-1, -1) if known is None else (known.producer, known.epoch)
        return SimpleNamespace(transaction_states=[(code, id, "", 0, 0, producer, epoch, [])])

    # --- topics ----------------------------------------------------------------------------------

    def _create_topics(self, _: int, request: Any) -> Any:
        errors = []
        for name, partitions, _replication, _replicas, _configs in request.topics:
            code = EXISTS if (name, 0) in self.logs else NONE
            if code == NONE:
                self.create(name, partitions, append_time=False)
            errors.append((name, code, ""))
        return SimpleNamespace(topic_errors=errors)

    def _topic_metadata(self, node: int, request: Any) -> Any:
        answer = super()._topic_metadata(node, request)
        answer.topics = [(*topic, _ALL_RIGHTS) for topic in answer.topics]
        return answer


def _offsets(topics: Any) -> dict[Name, Offset]:
    return {
        (topic, number): (offset, metadata)
        for topic, partitions in topics
        for number, offset, _epoch, metadata in partitions
    }


def _answers(topics: Any, code: int) -> Any:
    answers = [(topic, [(each[0], code) for each in parts]) for topic, parts in topics]
    return SimpleNamespace(topics=answers)
