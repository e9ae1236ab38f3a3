"""Every state and every finding, each planted on purpose; `plant_all` plants them all.

A case stores its transactions and the findings expected of an audit. Messages promoted in a
case becomes visible with the turn that ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from tests.spark.planting import (
    AT_ONCE,
    HOUR_MS,
    NEVER,
    ONE_ATTEMPT,
    TWO_ATTEMPTS,
    Planting,
    now_by,
    park,
    partition_of,
)
from txbroker.core.encoding import (
    encode_contents,
    encode_half,
    encode_kept,
    encode_marker,
    installation_headers,
)
from txbroker.core.records import (
    RECORD_VERSION,
    CheckPolicy,
    Half,
    Marker,
    MarkerKind,
    Message,
    ParkedCopy,
    Record,
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


# --- something is wrong ----------------------------------------------------------------------


async def decided_otherwise(p: Planting) -> None:
    back = await p.prepare()
    p.promote(back, await p.roll_back(back))
    p.expect(back.id, "rolled back, visible", "rolled_back", "rolled_back_visible")
    never = await p.prepare()
    p.promote(never, await now_by(p, never))
    p.expect(never.id, "undecided, visible", "pending", "visible_without_commit")
    nothing = p.make()
    p.promote(nothing, round(time.time() * 1000))
    p.expect(nothing.id, "visible, nothing else", "void", "visible_without_commit")
    lain = await park(p)
    p.promote(lain, await now_by(p, lain))
    p.expect(lain.id, "parked, visible", "parked", "visible_without_commit")
    old = await p.prepare(age_ms=HOUR_MS)
    p.promote(old, await now_by(p, old))
    p.expect(old.id, "void, visible", "void", "visible_without_commit")
    stranger = await p.prepare()
    p.promote(stranger, await p.commit(stranger, group="another-group"))
    p.expect(stranger.id, "committed by a stranger", "pending", "visible_without_commit")


async def twice(p: Planting) -> None:
    half = await p.prepare(p.message(), p.message(p.bills))
    at_ms = await p.commit(half)
    p.promote(half, at_ms)
    await p.turn()
    p.promote(half, at_ms, only=[1])
    p.expect(half.id, "one of two is visible twice", "promoted", "visible_twice")
    single = await p.prepare()
    at_ms = await p.commit(single)
    p.promote(single, at_ms)
    p.promote(single, at_ms)
    p.expect(single.id, "visible twice", "promoted", "visible_twice")


async def incomplete(p: Planting) -> None:
    three = p.make(*(p.message() for _ in range(3)))
    records = encode_half(three)
    await p.append_half(partition_of(three), records[:2])
    p.expect(three.id, "2 of 3 are stored", "void", "half_incomplete")
    headless = p.make(p.message(), p.message())
    await p.append_half(partition_of(headless), encode_half(headless)[1:])
    p.expect(headless.id, "the first is missing", "void", "half_incomplete")


async def changed(p: Planting) -> None:
    headers = (("a", b"1"), ("b", b""))
    stamp_ms = round(time.time() * 1000) - HOUR_MS
    changes: dict[str, tuple[str, dict[str, object]]] = {
        "another value": ("body_changed", {"value": b"another"}),
        "another key": ("body_changed", {"key": b"another"}),
        "a null value": ("body_changed", {"value": None}),
        "a null key": ("body_changed", {"key": None}),
        "a header less": ("headers_changed", {"headers": headers[:1]}),
        "a header more": ("headers_changed", {"headers": (*headers, ("c", b"1"))}),
        "headers in another order": ("headers_changed", {"headers": headers[::-1]}),
        "a null header": ("headers_changed", {"headers": (("a", b"1"), ("b", None))}),
        "another timestamp": ("timestamp_changed", {"timestamp_ms": stamp_ms + 1}),
    }
    for label, (finding, fields) in changes.items():
        half = await p.prepare(p.message(value=b"", headers=headers, timestamp_ms=stamp_ms))
        wrong = msgspec.structs.replace(half.messages[0], **fields)
        p.promote(half, await p.commit(half), [wrong])
        p.expect(half.id, f"promoted with {label}", "promoted", finding)
    cut = await p.prepare(p.message(key=b"ab", value=b"c"))
    wrong = msgspec.structs.replace(cut.messages[0], key=b"a", value=b"bc")
    p.promote(cut, await p.commit(cut), [wrong])
    p.expect(cut.id, "key and value cut elsewhere", "promoted", "body_changed")
    stamped = await p.prepare()
    p.promote(stamped, await p.commit(stamped) + 1)
    p.expect(stamped.id, "not its marker's append time", "promoted", "timestamp_changed")
    half = await p.prepare()
    contents = [msgspec.structs.replace(half.messages[0], value=b"final")]
    p.promote(half, await p.commit(half, contents))
    p.expect(half.id, "the prepared, not the replaced body", "promoted", "body_changed")
    two = await p.prepare(p.message(), p.message())
    p.promote(two, await p.commit(two), two.messages[::-1])
    p.expect(two.id, "two messages exchanged", "promoted", "body_changed")


async def wrong_target(p: Planting) -> None:
    for label, topic, partition in (("partition", p.orders, 2), ("topic", p.bills, 1)):
        half = await p.prepare(p.message(partition=1))
        moved = msgspec.structs.replace(half.messages[0], topic=topic, partition=partition)
        p.promote(half, await p.commit(half), [moved])
        p.expect(half.id, f"promoted to another {label}", "promoted", "wrong_target")


async def out_of_order(p: Planting) -> None:
    shared = p.message(key=b"out of order", partition=2)
    first, second = await p.prepare(shared, partition=1), await p.prepare(shared, partition=1)
    stamps = await p.commit(first), await p.commit(second)
    p.promote(second, stamps[1])
    p.promote(first, stamps[0])
    p.expect(first.id, "visible after a later one", "promoted", "out_of_order")
    p.expect(second.id, "visible before an earlier one", "promoted")


async def checked_wrongly(p: Planting) -> None:
    often = await p.prepare(policy=TWO_ATTEMPTS)
    await p.checks(often, 3)
    p.expect(often.id, "3 attempts of 2", "pending", "too_many_attempts")
    usual = await p.prepare(policy=AT_ONCE)
    await p.checks(usual, 16)
    p.promote(usual, await p.commit(usual))
    p.expect(usual.id, "the 16th attempt", "promoted", "too_many_attempts")
    early = await p.prepare(policy=CheckPolicy())
    await p.check(early, 1)
    p.expect(early.id, "asked at once, not after 6 s", "pending", "check_too_early")
    soon = await p.prepare(policy=CheckPolicy(after_s=0.0))
    await p.checks(soon, 2)
    p.expect(soon.id, "asked again at once, not after 30 s", "pending", "check_too_early")
    later = await p.prepare(policy=AT_ONCE)
    await p.check(later, 1)
    await p.mark(later, MarkerKind.LATER, round=1, number=1, later_s=600.0)
    await p.check(later, 2)
    p.expect(later.id, "asked again before the time it named", "pending", "check_too_early")


async def contrary(p: Planting) -> None:
    half = await p.prepare()
    at_ms = await p.commit(half)
    await p.roll_back(half)
    p.promote(half, at_ms)
    p.expect(half.id, "committed, then rolled back", "promoted")
    back = await p.prepare()
    await p.roll_back(back)
    await p.commit(back)
    p.expect(back.id, "rolled back, then committed", "rolled_back")
    seen = await p.prepare()
    await p.roll_back(seen)
    p.promote(seen, await p.commit(seen))
    p.expect(
        seen.id,
        "rolled back, then committed, and visible",
        "rolled_back",
        "rolled_back_visible",
        "contrary_markers",
    )
    for label, which, findings in (
        ("first", 0, ()),
        ("second", 1, ("body_changed", "contrary_markers")),
    ):
        other = await p.prepare()
        contents = [
            [msgspec.structs.replace(other.messages[0], value=value)] for value in (b"1", b"2")
        ]
        at_ms = await p.commit(other, contents[0])
        await p.commit(other, contents[1])
        p.promote(other, at_ms, contents[which])
        p.expect(
            other.id, f"committed with other contents, the {label} visible", "promoted", *findings
        )


async def parked_badly(p: Planting) -> None:
    nowhere = await p.prepare(policy=ONE_ATTEMPT)
    await p.checks(nowhere, 1)
    await p.mark(nowhere, MarkerKind.PARK, round=1)
    p.expect(nowhere.id, "parked without a copy", "parked", "not_kept")
    changes: dict[str, dict[str, Any]] = {
        "another key": {"key": b"another"}, "another topic": {"topic": p.bills},
        "another timestamp": {"timestamp_ms": 1},
    }  # fmt: skip
    for label, change in changes.items():
        changed = await park(p)
        wrong = msgspec.structs.replace(changed.messages[0], **change)
        p.keep(msgspec.structs.replace(changed, messages=(wrong,)), (0, 0), State.PARKED)
        p.expect(changed.id, f"parked, {label} is kept", "parked", "not_kept")


async def refused_badly(p: Planting) -> None:
    torn = p.make(p.message(), p.message(p.bills))
    offset, at_ms = await p.store(torn)
    kept = ParkedCopy(torn, offset, at_ms, State.REFUSED, None, await p.commit(torn))
    p.put_parked(partition_of(torn), encode_kept(kept)[:1])
    p.expect(torn.id, "refused, half of it is kept", "refused", "not_kept")
    shown = p.make(p.message(), p.message(p.bills))
    stored = await p.store(shown)
    at_ms = await p.commit(shown)
    p.keep(shown, stored, State.REFUSED, at_ms)
    p.promote(shown, at_ms, only=[0])
    p.expect(shown.id, "refused, half of it is visible", "refused", "refused_visible")


async def without_half(p: Planting) -> None:
    for kind in (MarkerKind.COMMIT, MarkerKind.ROLLBACK, MarkerKind.CHECK):
        half = p.make()
        await p.mark(half, kind, round=1, number=1, reason="due", group=half.group)
        p.expect(half.id, f"a {kind} of nothing", "void", "marker_without_half")
    shown = p.make()
    p.promote(shown, await p.commit(shown))
    findings = ("visible_without_half", "marker_without_half")
    p.expect(shown.id, "committed and visible, never prepared", "void", *findings)


async def several(p: Planting) -> None:
    half = await p.prepare(p.message(headers=(("a", b"1"),)))
    at_ms = await p.commit(half)
    wrong = msgspec.structs.replace(half.messages[0], value=b"another", headers=(), partition=3)
    await p.commit(half, [wrong])
    p.promote(half, at_ms, [wrong])
    p.promote(half, at_ms)
    p.expect(
        half.id,
        "five things at once",
        "promoted",
        "visible_twice",
        "body_changed",
        "headers_changed",
        "wrong_target",
        "contrary_markers",
    )


async def broken(p: Planting) -> None:
    half = p.make(partition=0)
    good = encode_half(half)[0]
    rest = good.headers[1:]
    for headers in ((), (("txb-v", b"1"),), (("txb-v", b"99"), *rest), (("txb-v", None), *rest)):
        await p.append_half(0, [Record(b"k", b"v", headers)])
        p.broken[p.names.half] += 1
    await p.append_half(0, [msgspec.structs.replace(good, headers=_without(good, "txb-seq"))])
    p.broken[p.names.half] += 1
    marker = encode_marker(Marker(RECORD_VERSION, MarkerKind.COMMIT, half.id))
    for value in (None, b"", b"{", b"[]", b'{"v": 1}', (marker.value or b"") + b"}"):
        await p.append_op(0, [Record(marker.key, value)])
        p.broken[p.names.op] += 1
    await p.append_op(0, [Record(b"another key", marker.value)])
    await p.append_op(0, [encode_marker(Marker(99, MarkerKind.COMMIT, half.id))])
    p.broken[p.names.op] += 2
    p.put_parked(0, [Record(key, b"v") for key in (b"no key of ours", b"a/b", b"\xff/0")])
    p.put_parked(0, [Record(f"{half.id}/0".encode(), b"v")])
    p.broken[p.names.parked] += 4
    # Of a version that is known, or under the id of a transaction.
    p.own_broken += Counter({p.names.half: 2, p.names.op: 6, p.names.parked: 1})


def _without(record: Record, name: str) -> tuple[tuple[str, bytes | None], ...]:
    return tuple(header for header in record.headers if header[0] != name)


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
    decided_otherwise,
    twice,
    incomplete,
    changed,
    wrong_target,
    out_of_order,
    checked_wrongly,
    contrary,
    refused_badly,
    without_half,
    several,
    broken,
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
    await parked_badly(p)
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
