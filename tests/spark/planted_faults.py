"""Everything that an audit calls drift, each planted on purpose; see `planted_cases`."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec

from tests.spark.planting import (
    AT_ONCE,
    HOUR_MS,
    ONE_ATTEMPT,
    TWO_ATTEMPTS,
    Planting,
    now_by,
    park,
    partition_of,
)
from txbroker.core.encoding import encode_half, encode_kept, encode_marker
from txbroker.core.records import (
    RECORD_VERSION,
    CheckPolicy,
    Marker,
    MarkerKind,
    ParkedCopy,
    Record,
    State,
)


async def decided_otherwise(p: Planting) -> None:
    """Visible without a commit."""
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
    """A message is there twice, in one turn or in two."""
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
    """Only some records of a half message are stored."""
    three = p.make(*(p.message() for _ in range(3)))
    records = encode_half(three)
    await p.append_half(partition_of(three), records[:2])
    p.expect(three.id, "2 of 3 are stored", "void", "half_incomplete")
    headless = p.make(p.message(), p.message())
    await p.append_half(partition_of(headless), encode_half(headless)[1:])
    p.expect(headless.id, "the first is missing", "void", "half_incomplete")


async def changed(p: Planting) -> None:
    """Visible, but not as it was prepared."""
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
    """Visible elsewhere."""
    for label, topic, partition in (("partition", p.orders, 2), ("topic", p.bills, 1)):
        half = await p.prepare(p.message(partition=1))
        moved = msgspec.structs.replace(half.messages[0], topic=topic, partition=partition)
        p.promote(half, await p.commit(half), [moved])
        p.expect(half.id, f"promoted to another {label}", "promoted", "wrong_target")


async def out_of_order(p: Planting) -> None:
    """Decided before another, visible after it."""
    shared = p.message(key=b"out of order", partition=2)
    first, second = await p.prepare(shared, partition=1), await p.prepare(shared, partition=1)
    stamps = await p.commit(first), await p.commit(second)
    p.promote(second, stamps[1])
    p.promote(first, stamps[0])
    p.expect(first.id, "visible after a later one", "promoted", "out_of_order")
    p.expect(second.id, "visible before an earlier one", "promoted")


async def checked_wrongly(p: Planting) -> None:
    """Asked too often or too early."""
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
    """Both decisions were stored."""
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
    """Parked, and not kept as it should be."""
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
    """Refused, and not kept as it should be, or visible."""
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
    """Markers of nothing."""
    for kind in (MarkerKind.COMMIT, MarkerKind.ROLLBACK, MarkerKind.CHECK):
        half = p.make()
        await p.mark(half, kind, round=1, number=1, reason="due", group=half.group)
        p.expect(half.id, f"a {kind} of nothing", "void", "marker_without_half")
    shown = p.make()
    p.promote(shown, await p.commit(shown))
    findings = ("visible_without_half", "marker_without_half")
    p.expect(shown.id, "committed and visible, never prepared", "void", *findings)


async def several(p: Planting) -> None:
    """More than one thing is wrong with one transaction."""
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
    """Records that do not read, among those that do."""
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
