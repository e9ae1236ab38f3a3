"""Checks of an outbox and its relays."""

from __future__ import annotations

from collections.abc import Sequence

from txbroker.cli.doctor.findings import (
    CheckLevel,
    CheckRegistry,
    Finding,
    Section,
    fine,
    judged,
    unknown,
)
from txbroker.cli.doctor.outbox import OutboxFacts
from txbroker.cli.doctor.subject import Subject
from txbroker.databases.outbox.rows import MESSAGE_BYTES_MAX
from txbroker.databases.outbox.table import LOCAL_COMMIT, MESSAGE_ERROR, UNKNOWN
from txbroker.diagnosis import table
from txbroker.diagnosis.limits import LIMITS
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
    "txbroker's tables in the database have this version",
    hint="Migrate older tables with `txbroker databases migrate URL`; for newer ones use the "
    "txbroker that migrated them.",
    doc="docs/how-to/databases.md#migrate",
)
async def relays_versions(subject: Subject) -> Finding:
    problems = await subject.version_problems()
    return _graded(bool(problems), False, f"{len(problems)} sets have another", problems)


@book.check(
    "a relay runs for each shard",
    hint="Start one with `txbroker outbox relay URL`, or `Relay` in a service.",
    doc=table.RELAY_STALLED.runbook,
)
async def relays_running(subject: Subject) -> Finding:
    """Whether every shard has an owner; with rows that wait for one it fails."""
    outbox = await subject.outbox()
    missing = sorted(set(range(outbox.shards)) - {lease.shard for lease in outbox.leases})
    free = [lease.shard for lease in outbox.leases if lease.left_ms <= 0]
    lines = [f"shard {shard} has no row in txbroker_relay" for shard in missing]
    lines += [f"shard {shard}: {outbox.waiting.get(shard, 0):,} rows wait" for shard in free]
    fails = missing or any(outbox.waiting.get(shard) for shard in free)
    return _graded(fails, free, f"{len(free)} of {outbox.shards} shards have no owner", lines)


@book.diagnosis(table.RELAY_STALLED)
async def relays_waiting(subject: Subject) -> Finding:
    outbox = await subject.outbox()
    found, age_s = _rows(outbox, LOCAL_COMMIT, "wait")
    lines = [f"topic {topic}: {cause}" for topic, cause in outbox.causes]
    return _graded(age_s > LIMITS.relay_s, lines, found, lines)


@book.check(
    "prepared rows are decided",
    hint="Give the relay a `check` or `check_url`, or decide them with `txbroker outbox decide`.",
)
async def relays_undecided(subject: Subject) -> Finding:
    found, age_s = _rows(await subject.outbox(), UNKNOWN, "are undecided")
    return _graded(False, age_s > LIMITS.undecided_s, found)


@book.diagnosis(table.RELAY_ERRORS)
async def relays_errors(subject: Subject) -> Finding:
    outbox = await subject.outbox()
    found, _age_s = _rows(outbox, MESSAGE_ERROR, f"are in the state {MESSAGE_ERROR}")
    return _graded(False, MESSAGE_ERROR in outbox.counts, found)


@book.check(
    "no row is in an impossible state",
    hint="Correct the named rows with SQL, and find out which program writes such rows.",
)
async def relays_states(subject: Subject) -> Finding:
    problems = (await subject.outbox()).problems
    return _graded(problems, False, f"relays leave {len(problems)} rows alone", problems)


@book.check(
    "the server takes the largest message",
    hint=f"Set max_allowed_packet to {_PACKET_BYTES_MIN >> 20} MiB, MariaDB's default, or more.",
)
async def relays_packet(subject: Subject) -> Finding:
    packet = (await subject.outbox()).packet_bytes
    if packet is None:
        return fine("this database has no such limit")
    found = f"max_allowed_packet is {packet:,} bytes"
    return _graded(False, packet < _PACKET_BYTES_MIN, found)


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
    missing = any(step.state is not StepState.ADVICE for step in open_)
    return _graded(missing, lines, f"{len(open_)} of {len(steps)} steps are open", lines)


@kafka_book.check(
    "the topic of positions keeps every relay's position",
    hint="Set cleanup.policy=compact on it, and no other. With several partitions, stop all relays "
    "first: their positions are in partition 0.",
)
async def relays_topic(subject: Subject) -> Finding:
    name, topic = await subject.positions_topic()
    if topic is None:
        return _graded(False, True, f"{name} does not exist: a relay creates it at its start")
    policy = topic.configs.get("cleanup.policy")
    problems = []
    if topic.partitions != 1:
        problems.append(f"it has {topic.partitions} partitions instead of one")
    elif not topic.configs:
        return unknown(f"this user may not read the settings of {name}")
    if topic.configs and policy != "compact":
        problems.append(f"cleanup.policy is {policy}: Kafka deletes positions")
    return _graded(problems, False, name, problems)


def _rows(outbox: OutboxFacts, state: str, what: str) -> tuple[str, float]:
    """Return the number of rows in a state as text, and the age of the oldest, seconds."""
    count, age_s = outbox.counts.get(state, (0, 0.0))
    oldest = f", the oldest for {age_s:.0f} s" if count else ""
    return f"{count:,} rows {what}{oldest}", age_s


def _graded(fails: object, warns: object, found: str, lines: Sequence[str] = ()) -> Finding:
    level = CheckLevel.FAILS if fails else CheckLevel.WARNING if warns else CheckLevel.OK
    return judged(level, found, lines)
