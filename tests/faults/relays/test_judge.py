"""The judge of relays finds each planted fault, and nothing in a run without one."""

from __future__ import annotations

import ast
import base64
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.relays import judge
from tests.faults.relays.judge import Change, Found, Judge, Queued, Rec, Sample, Txn

RELAY = {judge.INSTALLATION: "outbox-1"}


def change(txn: int, number: int, key: str = "k") -> Change:
    id = f"{txn}.{number}"
    return Change(id, txn, number, key, f"{id}|value")


def record(offset: int, of: Change, partition: int = 0) -> Rec:
    headers = {**RELAY, judge.ID: f"id{of.id}"}
    return Rec("orders", partition, offset, of.key, of.value, headers)


CHANGES = [change(1, 0), change(1, 1), change(2, 0), change(3, 0, "other")]
TXNS = [Txn(1, 0.0, 1.0), Txn(2, 2.0, 3.0), Txn(3, 0.5, 2.5)]
RECORDS = [record(offset, of) for offset, of in zip((0, 1, 3, 4), CHANGES, strict=True)]
QUEUED = [
    Queued(position, f"id{of.id}", "GLOBAL_COMMIT", 0, of.value)
    for position, of in enumerate(CHANGES, 1)
]


def position(first: int, last: int) -> str:
    """Return the position of a delivery of adjacent rows."""
    runs = zlib.compress(json.dumps([first, last - first + 1]).encode())
    return json.dumps({"pages": [{"runs": base64.b64encode(runs).decode()}]})


POSITIONS = [position(1, 2), position(3, 4)]
GOOD = Found(CHANGES, TXNS, RECORDS, QUEUED, POSITIONS, samples=[Sample(5, 5), Sample(5, 9)])


def lost(found: Found) -> None:
    found.records = RECORDS[:-1]


def doubled(found: Found) -> None:
    found.records = [*RECORDS, record(5, CHANGES[3])]


def rolled_back(found: Found) -> None:
    found.records = [*RECORDS, record(5, change(4, 0))]


def altered(found: Found) -> None:
    found.records = [RECORDS[0]._replace(value="1.0|other"), *RECORDS[1:]]


def of_another_key(found: Found) -> None:
    found.records = [*RECORDS[:3], RECORDS[3]._replace(key="k2")]


def without_id(found: Found) -> None:
    found.records = [RECORDS[0]._replace(headers=RELAY), *RECORDS[1:]]


def of_another_row(found: Found) -> None:
    found.queued = [QUEUED[0]._replace(id="id9"), *QUEUED[1:]]


def of_two_relays(found: Found) -> None:
    headers = {**RECORDS[0].headers, judge.INSTALLATION: "outbox-2"}
    found.records = [RECORDS[0]._replace(headers=headers), *RECORDS[1:]]


def divided_by_an_end(found: Found) -> None:
    offsets = zip((0, 2, 4, 5), CHANGES, strict=True)
    found.records = [record(offset, of) for offset, of in offsets]


def divided_by_positions(found: Found) -> None:
    found.positions = [position(1, 1), position(2, 4)]


def in_two_positions(found: Found) -> None:
    found.positions = [*POSITIONS, position(4, 4)]


def overtaken(found: Found) -> None:
    order = (CHANGES[2], CHANGES[0], CHANGES[1], CHANGES[3])
    found.records = [record(offset, of) for offset, of in enumerate(order)]


def reordered_within(found: Found) -> None:
    order = (CHANGES[1], CHANGES[0], CHANGES[2], CHANGES[3])
    found.records = [record(offset, of) for offset, of in enumerate(order)]


def visible_but_not_marked(found: Found) -> None:
    found.queued = [*QUEUED[:3], QUEUED[3]._replace(state="LOCAL_COMMIT")]


def marked_but_not_visible(found: Found) -> None:
    lost_one = change(5, 0)
    found.queued = [*QUEUED, Queued(9, "id9", "GLOBAL_COMMIT", 0, lost_one.value)]


def not_in_the_outbox(found: Found) -> None:
    found.queued = QUEUED[:-1]


def acknowledged_first(found: Found) -> None:
    found.samples = [Sample(6, 5)]


def lost_beside_a_restore(found: Found) -> None:
    found.settled, found.records = frozenset({"1.0"}), RECORDS[:-1]


def undone_but_unknown(found: Found) -> None:
    found.undone, found.records = [change(4, 0)], [*RECORDS, record(5, change(5, 0))]


def undone_and_doubled(found: Found) -> None:
    found.undone, found.txns = [change(4, 0)], [*TXNS, Txn(4, 4.0, 5.0)]
    found.records = [*RECORDS, record(5, change(4, 0)), record(6, change(4, 0))]


def settled_but_lost(found: Found) -> None:
    found.settled, found.records = frozenset({"3.0"}), RECORDS[:-1]


def unshown_insert(found: Found) -> None:
    found.mirrored = frozenset({("parts", "1"), ("parts", "2")})
    found.mirror = [("insert", ("parts", "1"))]


def unshown_delete(found: Found) -> None:
    found.mirror = [("insert", ("parts", "1"))]


PLANTED: list[tuple[Callable[[Found], None], str]] = [
    (lost, "R1"),
    (doubled, "R1"),
    (rolled_back, "R2"),
    (altered, "R3"),
    (of_another_key, "R3"),
    (without_id, "R3"),
    (of_another_row, "R3"),
    (of_two_relays, "R3"),
    (divided_by_an_end, "R4"),
    (divided_by_positions, "R4"),
    (in_two_positions, "R4"),
    (overtaken, "R5"),
    (reordered_within, "R5"),
    (visible_but_not_marked, "R6"),
    (marked_but_not_visible, "R6"),
    (not_in_the_outbox, "R6"),
    (acknowledged_first, "R7"),
    (lost_beside_a_restore, "R1"),
    (undone_but_unknown, "R2"),
    (undone_and_doubled, "R1"),
    (settled_but_lost, "R1"),
    (unshown_insert, "R8"),
    (unshown_delete, "R8"),
]


def test_good_run_is_accepted() -> None:
    assert Judge(GOOD).judge() == []
    unmarked = json.dumps({"pages": [json.loads(each)["pages"][0] for each in POSITIONS]})
    assert Judge(replace(GOOD, positions=[POSITIONS[0], unmarked])).judge() == [], "rows are locked"
    assert Judge(replace(GOOD, queued=None, positions=())).judge() == [], "a capture"


@pytest.mark.parametrize(("plant", "rule"), PLANTED)
def test_planted_fault_is_found(plant: Callable[[Found], None], rule: str) -> None:
    found = replace(GOOD)
    plant(found)
    assert rule in {violation.rule for violation in Judge(found).judge()}


def test_a_restore_and_its_operator_are_accepted() -> None:
    undone = change(4, 0)
    gone, kept = ("parts", "1"), ("parts", "2")
    restored = replace(
        GOOD,
        undone=[undone, change(5, 0)],
        txns=[*TXNS, Txn(4, 4.0, 5.0), Txn(5, 4.0, 5.0)],
        records=[*RECORDS, record(6, undone)],
        mirrored=frozenset({kept}),
        mirror=[("insert", gone), ("insert", kept)],
        unshown=frozenset({gone}),
    )
    filled = replace(restored, queued=None, settled=frozenset({"3.0"}), records=RECORDS[:-1])
    assert [Judge(each).judge() for each in (restored, filled)] == [[], []]


def test_transactions_at_the_same_time_have_any_order() -> None:
    overlapping = [TXNS[0]._replace(ended=2.5), *TXNS[1:]]
    found = replace(GOOD, txns=overlapping, shards=2)
    overtaken(found)
    assert Judge(found).judge() == []


def test_judge_imports_nothing_of_txbroker() -> None:
    tree = ast.parse(Path(judge.__file__).read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [
        a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
    ]
    assert not [module for module in modules if (module or "").startswith(("txbroker", "tests"))]
