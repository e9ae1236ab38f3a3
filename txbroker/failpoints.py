"""Fail points: named places where crash tests stop a process or lose an answer of Kafka.

txbroker never sets `hook`, and no setting can: only tests that start a process by a separate entry
point do. Without a hook a fail point costs one comparison.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

Hook = Callable[[str], None]

hook: Hook | None = None
"""Called with the name of each fail point reached; it may raise what Kafka's client would."""


class Point(NamedTuple):
    """A place in the life of a transaction, of an owner or of a consumer.

    Attributes:
        behind: what has just happened.
        answer: the answer or request that can be lost here: of an `append`, a `produce`, a
            `coordinator` or a `read`; "" if none.
        times: how often it is reached in one run.
    """

    behind: str
    answer: str = ""
    times: int = 1


POINTS: Mapping[str, Point] = MappingProxyType(
    {
        "prepare.received": Point("a prepare has arrived and is about to be queued"),
        "half.sending": Point("a batch of half messages is about to be sent", "append"),
        "half.stored": Point("Kafka has stored a batch of half messages", "append"),
        "prepare.applied": Point("the ledger holds a half message, its client knows nothing"),
        "decide.received": Point("a decision has arrived, and it is the first one"),
        "op.sending": Point("a batch of markers is about to be sent", "append"),
        "op.stored": Point("Kafka has stored a batch of markers", "append"),
        "decide.applied": Point("the ledger has applied a decision, its client knows nothing"),
        "turn.planned": Point("a promotion transaction is planned, nothing of it is sent"),
        "turn.begun": Point("the coordinator knows the partitions of a promotion", "coordinator"),
        "turn.produced": Point("records and checkpoint are stored, uncommitted", "produce"),
        "turn.ending": Point("the commit of a promotion is about to be sent", "coordinator"),
        "turn.ended": Point("the coordinator has acknowledged a commit", "coordinator"),
        "turn.committed": Point("the promoter knows that a promotion is committed"),
        "turn.visible": Point("readers see a promotion, the ledger does not know it"),
        "check.acquired": Point("an endpoint to ask is chosen, no marker is written"),
        "check.stored": Point("an attempt's marker is durable and accepted, no endpoint was asked"),
        "check.asking": Point("the check request is about to be sent"),
        "check.answered": Point("an answer has arrived, nothing of it is written"),
        "check.taken": Point("the marker of an answer is written"),
        "park.stored": Point("a transaction is parked, no copy of it is written"),
        "claim.beginning": Point("an owner is about to claim its partition"),
        "claim.fenced": Point("a transactional id is taken, the first one or both", "read", 2),
        "claim.produced": Point("the claim record is stored, uncommitted", "produce"),
        "claim.committed": Point("the claim record's commit is acknowledged", "coordinator"),
        "claim.seen": Point("the claim record can be read, the checkpoint is not read", "read"),
        "claim.read": Point("the checkpoint is read", "read"),
        "recover.copies": Point("the copies in the parked topic are read", "read"),
        "recover.replayed": Point("both logs are replayed to their ends", "read"),
        "recover.done": Point("an owner has recovered and is about to begin its work"),
        "reclaim.asked": Point("the partition is still assigned to an owner in doubt", "read"),
        "reclaim.claimed": Point("it has claimed again and has read nothing yet", "read"),
        "reclaim.done": Point("it has applied what was committed meanwhile"),
        "snapshots.sending": Point("a part of a snapshot is about to be sent", "append"),
        "snapshots.stored": Point("Kafka has stored a part of a snapshot", "append"),
        "handover.assigned": Point("the group has given this proxy a partition"),
        "handover.suspended": Point("contact with the group is lost, everything is suspended"),
        "handover.dropped": Point("the group has given a partition to another proxy"),
        "handover.closing": Point("an owner is about to let go of its partition"),
        "handover.closed": Point("an owner has let go of its partition"),
        "consumer.loaded": Point("a consumer has read the positions of partitions assigned to it"),
        "consumer.claimed": Point("higher tokens are stored, nothing of the partitions is read"),
        "consumer.result_committing": Point("a handler's result is to be committed in a database"),
        "consumer.result_committed": Point("it is committed, the consumer has taken no note of it"),
        "consumer.outputs_collected": Point("a handler has returned, its outputs are not stored"),
        "consumer.committing": Point("positions, with copies or without, are about to be stored"),
        "consumer.copied": Point("copies are stored, uncommitted, the positions are not"),
        "consumer.ending": Point("the commit of copies and positions is about to be sent"),
        "consumer.committed": Point("positions are stored, the consumer has taken no note of it"),
        "consumer.drained": Point("no message of a revoked partition is in flight any more"),
        "consumer.flushed": Point("the positions of revoked partitions are stored"),
        "consumer.released": Point("the next join gives revoked partitions to others"),
        "consumer.key_handled": Point("copies of a released key are done, no clearance is stored"),
        "relay.fenced": Point("a relay has its transactional id, no claim record is written"),
        "relay.claimed": Point("the claim record is committed, the position is not read"),
        "relay.resumed": Point("the source has applied the position, nothing is selected"),
        "relay.written": Point("the last messages of a delivery are to be written with a position"),
        "relay.ending": Point("messages and position are stored, uncommitted", "coordinator"),
        "relay.ended": Point("the coordinator has acknowledged a delivery's commit", "coordinator"),
        "relay.committed": Point("the relay knows of the commit, the source does not"),
        "relay.delivered": Point("the source has marked or acknowledged a delivery"),
    }
)


def failpoint(name: str) -> None:
    """Reach a fail point.

    Raises:
        Exception: only under test: what the previous call raises if its answer is lost.
    """
    if hook is not None:
        hook(name)
