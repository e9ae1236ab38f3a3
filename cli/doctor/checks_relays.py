"""Checks of an outbox and its relays."""

from __future__ import annotations

from txbroker.cli.doctor.findings import CheckLevel, CheckRegistry, Finding, Section, fine, judged
from txbroker.cli.doctor.subject import Subject
from txbroker.databases.outbox.rows import MESSAGE_BYTES_MAX
from txbroker.databases.outbox.table import LOCAL_COMMIT, MESSAGE_ERROR, UNKNOWN
from txbroker.relay.capture.setup import StepState

_PACKET_BYTES_MIN = 2 * MESSAGE_BYTES_MAX

book = CheckRegistry(Section.RELAYS, needs=("relays-tables",))
capture_book = CheckRegistry(Section.RELAYS)
kafka_book = CheckRegistry(Section.RELAYS, needs=("kafka-reachable",))


@book.check(
    "the outbox has its tables",
    hint="Create them with `txbroker outbox create URL`, or correct what it names.",
)
async def relays_tables(subject: Subject) -> Finding:
    outbox = await subject.outbox()
    return fine(f"outbox {outbox.relay} in {outbox.database}")


@book.check(
    "a relay runs for each shard",
    hint="Start one with `txbroker outbox relay URL`, or `Relay` in a service.",
    doc="docs/runbooks/TxBrokerRelayStalled.md",
)
async def relays_running(subject: Subject) -> Finding:
    """Whether every shard has an owner; with rows that wait for one it fails."""
    outbox = await subject.outbox()
    free = [lease.shard for lease in outbox.leases if lease.left_ms <= 0]
    missing = set(range(outbox.shards)) - {lease.shard for lease in outbox.leases}
    if missing:
        lines = [f"shard {shard} has no row in txbroker_relay" for shard in sorted(missing)]
        return judged(CheckLevel.FAILS, "the table of shards was changed", lines)
    if not free:
        return fine(f"{outbox.shards} of {outbox.shards} shards have an owner")
    lines = [f"shard {shard}: {outbox.waiting.get(shard, 0):,} rows wait" for shard in free]
    waits = any(outbox.waiting.get(shard) for shard in free)
    level = CheckLevel.FAILS if waits else CheckLevel.WARNING
    return judged(level, f"{len(free)} of {outbox.shards} shards have no owner", lines)


@book.check(
    "committed rows are delivered",
    hint="Correct what the causes name; without one, read the relay's log.",
    doc="docs/runbooks/TxBrokerRelayStalled.md",
)
async def relays_waiting(subject: Subject) -> Finding:
    outbox = await subject.outbox()
    count, age_s = outbox.counts.get(LOCAL_COMMIT, (0, 0.0))
    found = f"{count:,} rows wait" + (f", the oldest for {age_s:.0f} s" if count else "")
    lines = [f"topic {topic}: {cause}" for topic, cause in outbox.causes]
    if age_s > subject.limits.relay_s:
        return judged(CheckLevel.FAILS, found, lines)
    if lines:
        return judged(CheckLevel.WARNING, f"{found}; Kafka refuses some", lines)
    return fine(found)


@book.check(
    "prepared rows are decided",
    hint="Give the relay a `check` or `check_url`, or decide them with `txbroker outbox decide`.",
)
async def relays_undecided(subject: Subject) -> Finding:
    count, age_s = (await subject.outbox()).counts.get(UNKNOWN, (0, 0.0))
    found = f"{count:,} rows are undecided"
    if age_s <= subject.limits.undecided_s:
        return fine(found)
    return judged(CheckLevel.WARNING, f"{found}, the oldest for {age_s:.0f} s")


@book.check(
    "no row is given up",
    hint="`txbroker outbox list URL --state MESSAGE_ERROR` shows the causes; then `txbroker outbox "
    "retry`.",
    doc="docs/runbooks/TxBrokerRelayErrors.md",
)
async def relays_errors(subject: Subject) -> Finding:
    count, _age_s = (await subject.outbox()).counts.get(MESSAGE_ERROR, (0, 0.0))
    if count:
        return judged(CheckLevel.WARNING, f"{count:,} rows are in the state {MESSAGE_ERROR}")
    return fine("none")


@book.check(
    "no row is in an impossible state",
    hint="Correct the named rows with SQL, and find out which program writes such rows.",
)
async def relays_states(subject: Subject) -> Finding:
    problems = (await subject.outbox()).problems
    if problems:
        return judged(CheckLevel.FAILS, "relays leave these rows alone", problems)
    return fine("none")


@book.check(
    "the server takes the largest message",
    hint=f"Set max_allowed_packet to {_PACKET_BYTES_MIN >> 20} MiB, MariaDB's default, or more.",
)
async def relays_packet(subject: Subject) -> Finding:
    packet = (await subject.outbox()).packet_bytes
    if packet is None:
        return fine("this database has no such limit")
    found = f"max_allowed_packet is {packet:,} bytes"
    return fine(found) if packet >= _PACKET_BYTES_MIN else judged(CheckLevel.WARNING, found)


@capture_book.check(
    "the database is prepared for the capture",
    hint="`txbroker capture apply FILE` takes the steps to do; a refused one names its next step.",
    doc="docs/how-to/capture.md",
)
async def relays_capture(subject: Subject) -> Finding:
    """Whether server settings, rights, limits and objects of a capture are as it needs them."""
    steps = await subject.capture_steps()
    open_ = [step for step in steps if step.state is not StepState.DONE]
    lines = [f"{step.state}: {step.text}" for step in open_]
    if any(step.state is not StepState.ADVICE for step in open_):
        return judged(CheckLevel.FAILS, "steps are missing", lines)
    return judged(CheckLevel.WARNING if lines else CheckLevel.OK, f"{len(steps)} steps", lines)


@kafka_book.check(
    "the topic of positions keeps every relay's position",
    hint="Set cleanup.policy=compact on it, and no other. With several partitions, stop all relays "
    "first: their positions are in partition 0.",
)
async def relays_topic(subject: Subject) -> Finding:
    name, topic = await subject.positions_topic()
    if topic is None:
        return judged(CheckLevel.WARNING, f"{name} does not exist: a relay creates it at its start")
    policy = topic.configs.get("cleanup.policy")
    problems = []
    if topic.partitions != 1:
        problems.append(f"it has {topic.partitions} partitions instead of one")
    if policy != "compact":
        problems.append(f"cleanup.policy is {policy}: Kafka deletes positions")
    return judged(CheckLevel.FAILS, name, problems) if problems else fine(name)
