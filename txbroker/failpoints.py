"""Named moments at which the tests of crashes stop a proxy, or lose an answer of Kafka's.

Nothing of txbroker sets `hook`, and no setting reaches it: only a test that starts a proxy by an
entry point of its own does. Without it a moment costs one comparison.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

Hook = Callable[[str], None]

hook: Hook | None = None
"""Called with the name of each moment that is reached; it may raise what Kafka's client would."""


class Point(NamedTuple):
    """A moment in the life of a transaction or of an owner.

    Attributes:
        behind: what has just happened.
        answer: what can be lost here, the answer that has just come or the request that is about
            to go: of an `append`, a `produce`, a `coordinator` or a `read`; "" where there is none.
        times: how often it is reached in one go.
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
        "turn.planned": Point("a turn is planned, nothing of it is sent"),
        "turn.begun": Point("the coordinator knows a turn's partitions", "coordinator"),
        "turn.produced": Point("promoted records and progress are stored, uncommitted", "produce"),
        "turn.ending": Point("a turn's commit is about to be sent", "coordinator"),
        "turn.ended": Point("the coordinator has acknowledged a turn's commit", "coordinator"),
        "turn.committed": Point("the promoter knows that a turn is committed"),
        "turn.visible": Point("readers see a turn, the ledger does not know it"),
        "check.acquired": Point("somebody to ask is found, no marker is written"),
        "check.stored": Point("an attempt's marker is durable and accepted, nobody was asked"),
        "check.asking": Point("the question is about to be handed to the connection"),
        "check.answered": Point("an answer has come, nothing of it is written"),
        "check.taken": Point("what an answer means is written"),
        "park.stored": Point("a transaction is parked, no copy of it is written"),
        "claim.beginning": Point("an owner is about to claim its partition"),
        "claim.fenced": Point("a transactional id is taken, the first one or both", "read", 2),
        "claim.produced": Point("the claim record is stored, uncommitted", "produce"),
        "claim.committed": Point("the claim record's commit is acknowledged", "coordinator"),
        "claim.seen": Point("the claim record can be read, the progress was not read yet", "read"),
        "claim.read": Point("the progress is read", "read"),
        "recover.copies": Point("the copies in the parked topic are read", "read"),
        "recover.replayed": Point("both logs are replayed to their ends", "read"),
        "recover.done": Point("an owner has recovered and is about to begin its work"),
        "reclaim.asked": Point("an owner in doubt has heard that the partition is its own", "read"),
        "reclaim.claimed": Point("it has claimed again and has read nothing yet", "read"),
        "reclaim.done": Point("it has taken over what was committed meanwhile"),
        "snapshots.sending": Point("a part of a snapshot is about to be sent", "append"),
        "snapshots.stored": Point("Kafka has stored a part of a snapshot", "append"),
        "handover.assigned": Point("the group has given this proxy a partition"),
        "handover.suspended": Point("touch with the group is lost, everything is suspended"),
        "handover.dropped": Point("the group has given a partition to another proxy"),
        "handover.closing": Point("an owner is about to let go of its partition"),
        "handover.closed": Point("an owner has let go of its partition"),
    }
)


def failpoint(name: str) -> None:
    """A moment is reached.

    Raises:
        Exception: only under test, what the call before would have raised without its answer.
    """
    if hook is not None:
        hook(name)
