"""No share takes all the room of a half partition."""

from __future__ import annotations

import pytest

from tests.rules.harness import WINDOW_MS, Harness, commit, message, prepare, roll_back, until
from txbroker.core import settled
from txbroker.core.promotion import PromotionLimits
from txbroker.core.segment import SEGMENT_BYTES
from txbroker.errors import Overloaded
from txbroker.principals import Directory, Patterns, Principal, Role
from txbroker.proxy.partition.owner import PartitionOwner


def directory(*names: str) -> Directory:
    """Return producers that may act for the groups that begin with their names."""
    return Directory(Principal(name, Role.PRODUCER, Patterns((f"{name}*",))) for name in names)


async def refused(harness: Harness, owner: PartitionOwner, group: str) -> str:
    with pytest.raises(Overloaded) as caught:
        await prepare(owner, harness.half(group=group))
    assert caught.value.details["group"] == group
    return str(caught.value)


async def test_groups_of_one_principal_share_one_limit(harness: Harness) -> None:
    harness.proxy.principals = lambda: directory("shop", "bank")
    owner = await harness.owner(pending_group_max=3)
    ids = [await harness.prepared(owner, group=f"shop-{number}") for number in range(3)]
    assert "the principal of group 'shop-9'" in await refused(harness, owner, "shop-9")
    await harness.prepared(owner, group="bank")
    await roll_back(owner, ids[0])
    await harness.prepared(owner, group="shop-9")
    # The next owner counts the same, from the logs.
    again = await harness.restarted(owner, pending_group_max=3)
    await refused(harness, again, "shop-10")
    await harness.prepared(again, group="bank")
    # By another file each group is its own share; and it is back.
    harness.proxy.principals = lambda: Directory()
    await until(lambda: again.ledger.index.unsettled.of("shop-9") == 1)
    await harness.prepared(again, group="shop-10")
    harness.proxy.principals = lambda: directory("shop")
    await until(lambda: again.ledger.index.unsettled.of("shop-9") == 0)
    await refused(harness, again, "shop-11")


@pytest.mark.parametrize("trouble", ["no leader", "refused"])
async def test_refused_transactions_count_in_share(harness: Harness, trouble: str) -> None:
    harness.proxy.principals = lambda: directory("shop", "bank")
    owner = await harness.owner(pending_group_max=3)
    ids = [await harness.prepared(owner, group=f"shop-{number}") for number in range(3)]
    if trouble == "refused":
        harness.kafka.delete_topic("t")
    else:
        harness.kafka.set_leaderless("t", 0)
    for id in ids:
        await commit(owner, id)
    if trouble == "refused":
        await until(lambda: len(owner.ledger.index.refused) == 3)
    assert owner.ledger.index.undecided_count == 0
    await refused(harness, owner, "shop-9")
    await harness.prepared(owner, message("other", topic="u"), group="bank")


async def test_one_share_cannot_fill_deferred_list(harness: Harness) -> None:
    harness.proxy.principals = lambda: directory("shop", "bank")
    owner = await harness.owner(turns=PromotionLimits(deferred_max=5))
    harness.kafka.set_leaderless("t", 0)
    for number in range(4):
        await harness.committed(owner, group=f"shop-{number}")
    await until(lambda: owner._promoter.waiting.total == 4)
    assert "wait for target partitions" in await refused(harness, owner, "shop-9")
    visible = await harness.committed(owner, message("goes", topic="u"), group="bank")
    await until(lambda: visible in harness.events.promotions)
    harness.kafka.set_leaderless("t")
    await until(lambda: len(harness.events.promotions) == 5)
    await until(lambda: not owner._promoter.waiting.total)
    await harness.prepared(owner, group="shop-9")


async def test_one_share_cannot_fill_settled_memory(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settled, "SEGMENT_ENTRIES", 2)
    harness.proxy.principals = lambda: directory("shop", "bank")
    harness.proxy.settled = 2 * SEGMENT_BYTES + 600
    owner = await harness.owner()
    for number in range(4):
        await roll_back(owner, await harness.prepared(owner, group=f"shop-{number}"))
    assert "bytes of settled transactions" in await refused(harness, owner, "shop-9")
    await harness.prepared(owner, group="bank")
    # Half's log clock may stand still: by our time they are past.
    harness.advance(WINDOW_MS / 1000 + 1)
    await harness.prepared(owner, group="shop-9")
