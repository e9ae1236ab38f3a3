"""Every state and every finding, each planted on purpose; `plant_all` plants them all.

A case stores its transactions and the findings expected of an audit. Messages promoted in a
case becomes visible with the turn that ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from tests.spark import planted_faults
from tests.spark.planting import (
    AT_ONCE,
    HOUR_MS,
    NEVER,
    TWO_ATTEMPTS,
    Planting,
    now_by,
    park,
    partition_of,
)
from txbroker.core.encoding import encode_contents, encode_marker, installation_headers
from txbroker.core.records import (
    RECORD_VERSION,
    Half,
    Marker,
    MarkerKind,
    Message,
    Source,
    State,
)
from txbroker.spark.schema import Terms

Case = Callable[[Planting], Awaitable[None]]

_GAP_MS = 40
"""Delays between lost, late and young transactions."""
_MINUTES_MS = 120_000


# --- nothing is wrong: undecided -------------------------------------------------------------


async def pending(p: Planting) -> None:
    """Undecided, with and without attempts."""
    for attempts in (0, 1, 3):
        half = await p.prepare(policy=AT_ONCE)
        await p.checks(half, attempts)
        p.expect(half.id, f"pending after {attempts} attempts", "pending")
    both = await p.prepare(p.message(), p.message(p.bills))
    p.expect(both.id, "pending, two topics", "pending")


async def given_back(p: Planting) -> None:
    """Unreached attempts do not count: there may be more than the policy allows."""
    half = await p.prepare(policy=TWO_ATTEMPTS)
    for number in range(1, 6):
        await p.check(half, number)
        await p.mark(half, MarkerKind.RETURNED, round=1, number=number)
    await p.check(half, 6)
    p.expect(half.id, "five attempts given back, one counts", "pending")


async def asked(p: Planting) -> None:
    """A requested attempt may come before its time."""
    half = await p.prepare(policy=NEVER)
    await p.check(half, 1, reason="asked")
    p.expect(half.id, "asked for", "pending")


async def illegal(p: Planting) -> None:
    """Markers that the rules do not allow change nothing, and are no drift."""
    half = await p.prepare(policy=AT_ONCE)
    await p.check(half, 7)
    await p.check(half, 1, in_round=4)
    await p.mark(half, MarkerKind.PARK, round=1)
    await p.mark(half, MarkerKind.REVIVE, round=1)
    await p.mark(half, MarkerKind.RETURNED, round=1, number=1)
    await p.commit(half, group="another-group")
    await p.commit(half, [p.message(p.bills)])
    p.expect(half.id, "only illegal markers", "pending")


async def parked(p: Planting) -> None:
    """Undecided after the last attempt, and kept."""
    half = await park(p)
    p.expect(half.id, "parked", "parked")
    cut_out = p.make()
    stored = await p.store(cut_out)
    p.keep(cut_out, stored, State.PENDING)
    p.expect(cut_out.id, "pending, copied before retention takes it", "pending")


async def revived(p: Planting) -> None:
    """A new round of attempts; from it, any end."""
    waits = await park(p)
    await p.mark(waits, MarkerKind.REVIVE, round=1, source=Source.OPERATOR)
    await p.checks(waits, 1, in_round=2)
    p.expect(waits.id, "revived, pending in its second round", "pending")
    again = await park(p)
    await p.mark(again, MarkerKind.REVIVE, round=1, source=Source.OPERATOR)
    await p.checks(again, 1, in_round=2)
    await p.mark(again, MarkerKind.PARK, round=2)
    p.expect(again.id, "parked in its second round", "parked")
    ends = await park(p)
    await p.mark(ends, MarkerKind.REVIVE, round=1, source=Source.OPERATOR)
    await p.check(ends, 1, in_round=2)
    at_ms = await p.commit(ends, source=Source.CHECK)
    p.promote(ends, at_ms)
    p.release(ends)
    p.expect(ends.id, "revived and committed by a check", "promoted")


# --- nothing is wrong: decided ---------------------------------------------------------------


async def promoted(p: Planting) -> None:
    """Committed and visible, for any source of the decision and any messages."""
    now_ms = round(time.time() * 1000)
    odd = (("a", b"1"), ("a", b"1"), ("a", None), ("bin", bytes(range(256))), ("", b""))
    cases: dict[str, tuple[Message, ...]] = {
        "plain": (p.message(),),
        "no key": (p.message(key=None),),
        "empty key and value": (p.message(key=b"", value=b""),),
        "tombstone": (p.message(value=None),),
        "neither key nor value": (p.message(key=None, value=None),),
        "binary": (p.message(key=bytes(range(256)), value=bytes(reversed(range(256))) * 5),),
        "repeated, null, binary, nameless headers": (p.message(headers=odd),),
        "headers like ours": (p.message(headers=(("txb-id", b"x"), ("txb-seq", b"7/9"))),),
        "alone, with a header like one of several": (p.message(headers=(("txb-seq", b"1/2"),)),),
        "one of several, with headers like ours": (
            p.message(headers=(("txb-seq", b"0/2"),)),
            p.message(p.bills, headers=(("txb-id", b""), ("txb-seq", b"0/1"))),
        ),
        "its own timestamp": (p.message(timestamp_ms=now_ms - HOUR_MS),),
        "a broker's timestamp": (p.message(p.stamped, timestamp_ms=now_ms - HOUR_MS),),
        "several topics": (
            p.message(partition=3),
            p.message(partition=3, timestamp_ms=now_ms - 5),
            p.message(p.bills, 1, value=None),
            p.message(p.stamped, 1, headers=odd),
        ),
    }
    for label, messages in cases.items():
        half = await p.prepare(*messages)
        p.promote(half, await p.commit(half))
        p.expect(half.id, f"promoted: {label}", "promoted")
    for source, group in ((Source.CHECK, None), (Source.OPERATOR, "")):
        half = await p.prepare(policy=AT_ONCE)
        await p.checks(half, 2)
        fields = {} if group is None else {"group": group, "by": "someone", "reason": "why not"}
        p.promote(half, await p.commit(half, source=source, **fields))
        p.expect(half.id, f"promoted by {source}", "promoted")
    late = await park(p)
    p.promote(late, await p.commit(late))
    p.release(late)
    p.expect(late.id, "parked, then promoted", "promoted")


async def replaced(p: Planting) -> None:
    """The commit brought other values and headers, which must be visible."""
    half = await p.prepare(p.message(), p.message(p.bills, 1, headers=(("a", b"1"),)))
    contents = [
        msgspec.structs.replace(half.messages[0], key=b"new key", value=None),
        msgspec.structs.replace(half.messages[1], value=b"final", headers=(("b", None),)),
    ]
    p.promote(half, await p.commit(half, contents), contents)
    p.expect(half.id, "replaced contents", "promoted")
    ours = await p.prepare()
    p.promote(ours, await p.commit(ours))
    await p.commit(ours, list(ours.messages))
    p.expect(ours.id, "committed again with the messages that stand", "promoted")


async def rolled_back(p: Planting) -> None:
    """Rolled back and never visible, for any source of the decision."""
    for source in (Source.PRODUCER, Source.CHECK, Source.OPERATOR):
        half = await p.prepare()
        await p.roll_back(half, source=source)
        await p.roll_back(half, source=source)
        p.expect(half.id, f"rolled back by {source}, twice", "rolled_back")
    was_parked = await park(p)
    await p.roll_back(was_parked, source=Source.OPERATOR, group="")
    p.release(was_parked)
    p.expect(was_parked.id, "parked, then rolled back", "rolled_back")


async def refused(p: Planting) -> None:
    """A target did not take it; one is tried again later, when its place in the order is lost."""
    stays = p.make(p.message(), p.message(p.bills))
    stored = await p.store(stays)
    p.keep(stays, stored, State.REFUSED, await p.commit(stays))
    p.expect(stays.id, "refused", "refused")
    shared = p.message(key=b"refused first")
    first = p.make(shared, partition=0)
    stored = await p.store(first)
    at_ms = await p.commit(first)
    p.keep(first, stored, State.REFUSED, at_ms)
    second = await p.prepare(shared, partition=0)
    p.promote(second, await p.commit(second))
    await p.turn()
    p.promote(first, at_ms)
    p.release(first)
    p.expect(first.id, "refused, then promoted after a later one", "promoted")
    p.expect(second.id, "promoted before an earlier one that was refused", "promoted")


async def void(p: Planting) -> None:
    """Half messages that count for nothing."""
    old = await p.prepare(age_ms=HOUR_MS)
    p.expect(old.id, "appended an hour after its id's time", "void")
    ahead = await p.prepare(age_ms=-HOUR_MS)
    p.expect(ahead.id, "appended an hour before its id's time", "void")
    first = await p.prepare(group="shop", dedup_key="order-1", partition=0)
    again = await p.prepare(group="shop", dedup_key="order-1", partition=0)
    other = await p.prepare(group="other", dedup_key="order-1", partition=0)
    p.expect(again.id, "its key is another's", "void")
    p.expect(other.id, "the same key of another group", "pending")
    p.promote(first, await p.commit(first))
    p.expect(first.id, "the first with its key", "promoted")


async def repeated(p: Planting) -> None:
    """A prepare that was stored twice counts once, for any content of the second."""
    half = await p.prepare()
    await p.store(half)
    p.promote(half, await p.commit(half))
    p.expect(half.id, "stored twice", "promoted")
    other = await p.prepare()
    await p.store(msgspec.structs.replace(other, messages=(p.message(value=b"another"),)))
    p.promote(other, await p.commit(other))
    p.expect(other.id, "stored again with another body", "promoted")


async def before_half(p: Planting) -> None:
    """A marker that lies in its log before the half message does in its own."""
    half = p.make()
    at_ms = await p.commit(half)
    await p.store(half)
    p.promote(half, at_ms)
    p.expect(half.id, "its marker was stored first", "promoted")


async def aborted(p: Planting) -> None:
    """What an aborted Kafka transaction wrote was never visible."""
    undecided, back = await p.prepare(), await p.prepare()
    p.promote(undecided, await now_by(p, undecided))
    await p.roll_back(back)
    p.promote(back, await now_by(p, back))
    twice = await p.prepare()
    at_ms = await p.commit(twice)
    p.promote(twice, at_ms)
    p.keep(undecided, (0, 0), State.REFUSED)
    await p.turn(abort=True)
    p.promote(twice, at_ms)
    p.expect(undecided.id, "pending, in a turn that was aborted", "pending")
    p.expect(back.id, "rolled back, in a turn that was aborted", "rolled_back")
    p.expect(twice.id, "promoted, after a turn that was aborted", "promoted")


async def in_order(p: Planting) -> None:
    """One key: visible in the order of decisions, which need not be that of the prepares."""
    shared = p.message(key=b"in order")
    halves = [await p.prepare(shared, partition=0) for _ in range(4)]
    for half in reversed(halves):
        p.promote(half, await p.commit(half))
        p.expect(half.id, "in the order of decisions", "promoted")
    keyed = [await p.prepare(p.message(partition=n), order_key="o", partition=1) for n in (0, 1)]
    stamps = [await p.commit(half) for half in keyed]
    for half, at_ms in reversed(list(zip(keyed, stamps, strict=True))):
        p.promote(half, at_ms)
        p.expect(half.id, "one order key, no partition in common", "promoted")


async def foreign(p: Planting) -> None:
    """Records of a target topic that are none of ours, some of them other installations'."""
    another, of = p.make().id.encode(), installation_headers
    records = (
        (),
        (("x", b"1"),),
        (("x", b"1"), ("txb-id", b"not the first")),
        (*p.installation, ("x", b"1")),
        p.installation,
        (*of("another"), ("txb-id", another)),
        (*of(p.prefix[:-1]), ("txb-id", another)),
        (("x", b"1"), *p.installation, ("txb-id", another)),
        # Of the default prefix, which no header names.
        (("txb-id", another), ("a", b"b")),
        (("txb-id", another), *p.installation),
        (*p.installation, ("txb-id", None)),
        (*p.installation, ("txb-id", b"no id at all")),
        (*p.installation, ("txb-id", b"012-456789ABCDEFGHJKMNPQRS")),
    )
    for headers in records:
        p.put(p.message(), headers, round(time.time() * 1000))
    # The last three bear our header, and do not read.
    p.broken[p.orders] += 3


# --- by age ----------------------------------------------------------------------------------


async def unseen(p: Planting, state: str, *findings: str) -> None:
    """Committed, but nothing of it, or not all, is visible."""
    none, some, replaced = (
        await p.prepare(),
        await p.prepare(p.message(), p.message(p.bills)),
        await p.prepare(),
    )
    await p.commit(none)
    p.promote(some, await p.commit(some), only=[0])
    await p.commit(replaced, [msgspec.structs.replace(replaced.messages[0], value=b"final")])
    for half, label in ((none, "nothing"), (some, "half of it"), (replaced, "nothing, replaced")):
        words = " ".join(findings) or "young"
        p.expect(half.id, f"committed, {label} visible: {words}", state, *findings)


async def torn(p: Planting) -> None:
    """A commit that announces messages which do not follow is no marker."""
    half = await p.prepare()
    marker = Marker(RECORD_VERSION, MarkerKind.COMMIT, half.id, group=half.group, contents=1)
    await p.append_op(partition_of(half), [encode_marker(marker)])
    p.expect(half.id, "its commit is not whole", "pending")
    stray = await p.prepare()
    await p.append_op(partition_of(stray), encode_contents(stray, stray.messages))
    p.expect(stray.id, "contents without a marker", "pending")
    p.broken[p.names.op] += 2


async def unreadable(p: Planting) -> None:
    """Commits to an unreadable target; void half messages name no target."""
    half = await p.prepare(p.message("not/a/topic"))
    await p.commit(half)
    p.expect(half.id, "committed to an impossible name", "committed", "target_unreadable")


RIGHT: tuple[Case, ...] = (
    pending,
    given_back,
    asked,
    illegal,
    parked,
    revived,
    promoted,
    replaced,
    rolled_back,
    refused,
    void,
    repeated,
    before_half,
    aborted,
    torn,
    in_order,
    foreign,
)
WRONG: tuple[Case, ...] = (
    planted_faults.decided_otherwise,
    planted_faults.twice,
    planted_faults.incomplete,
    planted_faults.changed,
    planted_faults.wrong_target,
    planted_faults.out_of_order,
    planted_faults.checked_wrongly,
    planted_faults.contrary,
    planted_faults.refused_badly,
    planted_faults.without_half,
    planted_faults.several,
    planted_faults.broken,
    unreadable,
)


class Planted(NamedTuple):
    """Topics in which everything was planted, and what to judge by."""

    planting: Planting
    terms: Terms


async def plant_all(p: Planting) -> Terms:
    """Plant everything: lost transactions first, then late ones, young ones last;
    the terms separate them."""
    await unseen(p, "committed", "lost")
    overdue = await p.prepare(policy=AT_ONCE)
    p.expect(overdue.id, "never checked", "pending", "overdue")
    await planted_faults.parked_badly(p)
    await p.turn()
    lost_ms = await _later()
    await unseen(p, "committed", "late")
    await p.turn()
    spaced = await _begin_spaced(p)
    for case in RIGHT + WRONG:
        await case(p)
        await p.turn()
    await _end_spaced(p, spaced)
    late_ms = await _later()
    await unseen(p, "committed")
    await p.turn()
    now_ms = await _later()
    return Terms(now_ms, _MINUTES_MS, now_ms - late_ms, now_ms - lost_ms, now_ms - lost_ms)


async def plant_clean(p: Planting) -> Terms:
    """Plant every case without drift."""
    for case in RIGHT:
        await case(p)
        await p.turn()
    return Terms(await _later())


async def _later() -> int:
    """Wait a moment; return a time in its middle, which separates before from after."""
    middle_ms = round(time.time() * 1000) + _GAP_MS // 2
    while time.time() * 1000 < middle_ms + _GAP_MS // 2:
        await asyncio.sleep(0.005)
    return middle_ms


async def _begin_spaced(p: Planting) -> tuple[Half, Half, int]:
    """First attempts, whose next ones have to wait for a second."""
    asked, later = await p.prepare(policy=AT_ONCE), await p.prepare(policy=AT_ONCE)
    await p.check(asked, 1)
    await p.check(later, 1)
    at_ms = await p.mark(later, MarkerKind.LATER, round=1, number=1, later_s=0.1)
    return asked, later, at_ms


async def _end_spaced(p: Planting, spaced: tuple[Half, Half, int]) -> None:
    asked, later, at_ms = spaced
    while time.time() * 1000 <= at_ms + 1000:
        await asyncio.sleep(0.01)
    await p.check(asked, 2, reason="asked")
    await p.check(later, 2)
    p.expect(asked.id, "asked for after a second", "pending")
    p.expect(later.id, 'asked again after "not yet"', "pending")
