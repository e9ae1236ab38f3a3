"""Shares: whose use of the pools of one half partition is counted to whom."""

from __future__ import annotations

import pytest

from tests.kit.logs import START_MS, Logs, apply_all, half_of, id_of, marker_of, new_ledger
from txbroker.core import settled
from txbroker.core.ledger import Ledger
from txbroker.core.records import Cause
from txbroker.core.segment import SEGMENT_BYTES
from txbroker.core.settled import ShareUse, share_max

GROUPS = ("shop-1", "shop-2", "bank")


def by_team(group: str) -> str:
    return group.partition("-")[0]


def used(ledger: Ledger, *shares: str) -> list[int]:
    return [ledger.index.unsettled.of(share) for share in shares]


def prepared(count: int) -> Logs:
    """Return logs with so many transactions of each group."""
    logs = Logs()
    for number in range(count * len(GROUPS)):
        group = GROUPS[number % len(GROUPS)]
        logs.prepare(half_of(id_of(number), group=group), START_MS + number)
    return logs


@pytest.mark.parametrize(("pool", "part"), [(1, 1), (2, 1), (10, 8), (250_000, 200_000)])
def test_one_share_may_use_four_fifths(pool: int, part: int) -> None:
    assert share_max(pool) == part


def test_what_is_given_back_leaves_nothing() -> None:
    use = ShareUse([("a", 2), ("b", 1), ("a", 1)])
    assert (use.total, use.of("a"), use.of("b"), use.of("c")) == (4, 3, 1, 0)
    use.add("a", -3)
    use.add("b", -1)
    assert (use.total, use._of) == (0, {})


def test_what_is_undecided_committed_or_refused_is_counted_until_it_is_settled() -> None:
    logs, ledger = prepared(3), new_ledger()
    ledger.index.share_by(by_team)
    apply_all(ledger, logs, 9, 0)
    assert used(ledger, "shop", "bank", "shop-1") == [6, 3, 0]
    for number, kind in ((0, "rollback"), (1, "commit"), (2, "commit"), (3, "park")):
        logs.mark(marker_of(kind, id_of(number), round=1), START_MS + 100)
    apply_all(ledger, logs, 9, 4)
    assert used(ledger, "shop", "bank") == [5, 3]
    ledger.refuse(id_of(1), Cause("too_large", "", "t", 0))
    assert used(ledger, "shop", "bank") == [5, 3]
    ledger.promote_run([ledger.index.transactions[id_of(number)] for number in (1, 2)])
    assert used(ledger, "shop", "bank") == [4, 2]
    assert ledger.index.unsettled.total == len(ledger.index.transactions)
    # The same counts where they are made at once, as after another principals file.
    ledger.index.share_by(str)
    assert used(ledger, *GROUPS, "shop") == [2, 2, 2, 0]
    ledger.index.share_by(by_team)
    assert used(ledger, "shop", "bank") == [4, 2]


def test_settled_ones_are_counted_for_the_dedup_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled, "SEGMENT_ENTRIES", 3)
    logs, ledger = prepared(4), new_ledger()
    ledger.index.share_by(by_team)
    for number in range(12):
        logs.mark(marker_of("rollback", id_of(number)), START_MS + number)
    apply_all(ledger, logs, 12, 12)
    window = ledger.index.settled
    # Each has a third of its segment, a row and its group's shape.
    shop, bank = SEGMENT_BYTES // 3 + 35 + 13, SEGMENT_BYTES // 3 + 35 + 11
    counted = [window.recent_of(share, START_MS) for share in ("shop", "bank", "else")]
    assert counted == [8 * shop, 4 * bank, 0]
    assert window.size == sum(counted)
    ledger.index.share_by(str)
    counted = [window.recent_of(group, START_MS) for group in GROUPS]
    assert counted == [4 * shop, 4 * shop, 4 * bank]
    ledger.index.share_by(by_team)
    # Segments end with the half messages 2, 5, 8 and 11.
    assert window.recent_of("shop", START_MS + 6) == 4 * shop
    assert window.recent_of("shop", START_MS + 9) == 2 * shop
    again = new_ledger()
    again.index.share_by(by_team)
    for segment in window.segments:
        again.index.add_segment(segment)
    assert [again.index.settled.recent_of(share, START_MS) for share in ("shop", "bank")] == [
        8 * shop,
        4 * bank,
    ]
    assert again.index.settled.recent_of("shop", START_MS + 12) == 0


def test_an_id_of_the_future_prolongs_only_its_own_groups_count() -> None:
    logs, ledger = Logs(), new_ledger()
    for number, group in enumerate(("bank", "shop", "bank")):
        time_ms = START_MS + (100_000 if group == "shop" else 0)
        logs.prepare(half_of(id_of(number, time_ms), group=group), START_MS)
        logs.mark(marker_of("rollback", id_of(number, time_ms)), START_MS)
    apply_all(ledger, logs, 3, 3)
    ledger.index.settled.seal()
    for since_ms, counts in ((0, [681, 1046]), (1, [0, 1046]), (100_001, [0, 0])):
        asked = [
            ledger.index.settled.recent_of(group, START_MS + since_ms) for group in ("bank", "shop")
        ]
        assert asked == counts
