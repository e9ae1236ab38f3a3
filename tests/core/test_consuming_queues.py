"""Queues against a model with random schedules, and their single rules."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from txbroker.core.consuming.queues import (
    TURN,
    Lane,
    Order,
    PartitionQueue,
    Queues,
    StopReason,
    lane_key_of,
)


class Item:
    def __init__(self, partition: int, offset: int, key: bytes | None, order: Order) -> None:
        self.partition = partition
        self.offset = offset
        self.key = key
        self.lane: Lane | None = None
        self.lane_key = lane_key_of(order, key)

    @property
    def name(self) -> tuple[int, object]:
        return self.partition, self.offset if self.lane_key is None else self.lane_key

    def __repr__(self) -> str:
        return f"{self.partition}@{self.offset}:{self.key!r}"


class World:
    """Queues, and what must hold of everything that they give out."""

    def __init__(self, order: Order, partitions: int = 1) -> None:
        self.order = order
        self.queues: Queues[Item] = Queues()
        self.partitions = [PartitionQueue[Item](number) for number in range(partitions)]
        self.flying: dict[Item, object] = {}
        self.left: dict[tuple[int, object], list[Item]] = {}
        """Messages of each lane that are neither in flight nor done, in order."""
        self.offsets = itertools.count()
        self.suspended: set[tuple[int, str]] = set()
        self.keys: set[tuple[int, bytes]] = set()
        self.delayed: dict[tuple[int, object], float] = {}

    def add(self, partition: int, *keys: bytes | None) -> list[Item]:
        items = [Item(partition, next(self.offsets), key, self.order) for key in keys]
        for item in items:
            self.left.setdefault(item.name, []).append(item)
        self.queues.add(self.partitions[partition], items)
        return items

    def takeable(self, item: Item, holder: object) -> bool:
        flying = [(other, by) for other, by in self.flying.items() if other.name == item.name]
        return (
            all(holder is not None and by is holder for _other, by in flying)
            and not any(number == item.partition for number, _why in self.suspended)
            and (item.partition, item.key) not in self.keys
            and item.name not in self.delayed
        )

    def take(self, holder: object = None) -> Item | None:
        item = self.queues.take(holder)
        if item is not None:
            self.taken(item, holder)
        return item

    def taken(self, item: Item, holder: object) -> None:
        assert self.takeable(item, holder)
        assert self.left[item.name].pop(0) is item, "the first of its lane"
        self.flying[item] = holder

    def take_more(self, after: Item, count: int) -> list[Item]:
        queue, holder = self.partitions[after.partition], self.flying[after]
        items = self.queues.take_more(queue, holder, after, count)
        for item in items:
            self.taken(item, holder)
        return items

    def take_all(self, holder: object = None) -> list[Item]:
        return list(iter(lambda: self.take(holder), None))

    def settle(self, item: Item) -> None:
        del self.flying[item]
        self.queues.settle(self.partitions[item.partition], (item,))

    def settle_all(self, items: list[Item]) -> None:
        for item in items:
            del self.flying[item]
        self.queues.settle(self.partitions[items[0].partition], items)

    def put_back(self, item: Item, due_s: float | None = None) -> None:
        del self.flying[item]
        self.left[item.name].insert(0, item)
        if due_s is None:
            self.queues.put_back(self.partitions[item.partition], item)
        else:
            self.delayed[item.name] = due_s
            self.queues.delay(self.partitions[item.partition], item, due_s)

    def wake(self, now_s: float) -> None:
        due = self.queues.wake(now_s)
        self.delayed = {name: at for name, at in self.delayed.items() if at > now_s}
        assert due == min(self.delayed.values(), default=None)

    def suspend(self, partition: int, why: str) -> None:
        self.suspended.add((partition, why))
        self.queues.stop(self.partitions[partition], StopReason.SUSPENDED, why)

    def resume(self, partition: int, why: str) -> None:
        self.suspended.discard((partition, why))
        self.queues.go_on(self.partitions[partition], StopReason.SUSPENDED, why)

    def suspend_key(self, partition: int, key: bytes) -> None:
        self.keys.add((partition, key))
        self.queues.suspend_key(self.partitions[partition], key)

    def resume_key(self, partition: int, key: bytes) -> None:
        self.keys.discard((partition, key))
        self.queues.resume_key(self.partitions[partition], key)

    def followed(self, item: Item) -> bool:
        """Return whether its holder has other messages of its lane."""
        return any(other.name == item.name and other is not item for other in self.flying)

    def missed(self) -> list[Item]:
        """Messages that can be given out and were not."""
        heads = [items[0] for items in self.left.values() if items]
        return [item for item in heads if self.takeable(item, None)]


KEYS = [b"a", b"b", b"c", b"", None]


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("seed", range(20))
def test_random_schedules(order: Order, seed: int) -> None:
    rng, world, now_s = random.Random(seed), World(order, 3), 0.0
    for _ in range(400):
        step, partition = rng.randrange(10), rng.randrange(3)
        key = rng.choice((b"a", b"b", b""))
        flying = rng.choice(list(world.flying)) if world.flying else None
        if step == 0:
            world.add(partition, *rng.choices(KEYS, k=rng.randrange(8)))
        elif step in (1, 2, 3):
            holder = rng.choice((None, "one", "two"))
            if (item := world.take(holder)) is None:
                assert not world.missed()
            elif holder is not None:
                assert len(world.take_more(item, step)) <= step
        elif step in (4, 5) and flying is not None:
            world.settle(flying)
        elif step == 6 and flying is not None and not world.followed(flying):
            world.put_back(flying, rng.choice((None, now_s + rng.randrange(5))))
        elif step == 7:
            now_s += rng.random()
            world.wake(now_s)
        elif step == 8:
            rng.choice((world.suspend, world.resume))(partition, rng.choice("xy"))
        elif order is Order.KEY:
            rng.choice((world.suspend_key, world.resume_key))(partition, key)
    for partition, why in list(world.suspended):
        world.resume(partition, why)
    for partition, key in list(world.keys):
        world.resume_key(partition, key)
    world.wake(now_s + 10)
    while world.flying or world.take() is not None:
        world.take_all()
        world.settle(next(iter(world.flying)))
    assert not any(world.left.values()), "nothing is lost"
    assert not any(queue.lanes for queue in world.partitions), "no lane is left"


@pytest.mark.parametrize("order", Order)
def test_offset_order_while_nothing_is_busy(order: Order) -> None:
    world = World(order)
    items = world.add(0, b"a", b"b", b"a", None, b"c", b"a", None)
    for item in items:
        assert world.take() is item
        world.settle(item)
    assert world.take() is None
    assert not world.queues.has_more()


@pytest.mark.parametrize(
    ("order", "in_flight"), [(Order.NONE, 6), (Order.PARTITION, 1), (Order.KEY, 4)]
)
def test_lanes(order: Order, in_flight: int) -> None:
    """A message without a key is alone in its lane."""
    world = World(order)
    world.add(0, b"a", b"a", b"b", None, None, b"a")
    assert len(world.take_all()) == in_flight


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_no_key_starves(workers: int) -> None:
    """A key with a long backlog waits for the others after every message."""
    world = World(Order.KEY)
    world.add(0, *[b"hot"] * 500, *[b"%d" % number for number in range(50)])
    served = Counter[bytes | None]()
    while items := [item for _ in range(workers) if (item := world.take()) is not None]:
        for item in items:
            served[item.key] += 1
            world.settle(item)
        if workers > 1 and sum(served.values()) >= 60 * workers:
            assert len(served) == 51
    assert served[b"hot"] == 500


class Load:
    """A consumer under load: keys that always fail and are due at once, busy keys that never end,
    and good messages, whose waits are measured.

    Args:
        calls_max: messages in flight.
    """

    def __init__(self, order: Order, partitions: int, calls_max: int) -> None:
        self.rng = random.Random(1)
        self.world = World(order, partitions)
        self.calls_max = calls_max
        self.ends: dict[Item, int] = {}
        """When the call of each message in flight ends, in steps."""
        self.takes = 0
        self.bounds: dict[Item, int] = {}
        """The number of takes by which each good message that can be taken has been."""
        self.good = 0

    def add(self, partition: int, kind: bytes) -> None:
        keys = [b"%s%d" % (kind, self.rng.randrange(20)) for _ in range(10)]
        for item in self.world.add(partition, *keys):
            if kind == b"good":
                self.measure(item)

    def measure(self, item: Item) -> None:
        """Note the bound of a message if it can be taken: one of four in its partition is of its
        kind, and all others have their turn before this one."""
        queue = self.world.partitions[item.partition]
        is_new = item in queue.buffer
        ahead = queue.buffer.index(item) if is_new else len(queue.continued)
        if self.world.left[item.name][0] is item and self.world.takeable(item, None):
            turns = TURN * (len(self.world.partitions) - 1) + 1
            self.bounds[item] = self.takes + 4 * (ahead + 2) * turns

    def step(self, number: int) -> None:
        for partition, queue in enumerate(self.world.partitions):
            if len(queue.buffer) < 20:
                self.add(partition, self.rng.choice((b"bad", b"busy", b"good")))
        while len(self.world.flying) < self.calls_max and (item := self.world.take()):
            self.takes += 1
            self.good += self.bounds.pop(item, None) is not None
            self.ends[item] = number + self.rng.randrange(4)
        for item in [item for item, at in self.ends.items() if at <= number]:
            del self.ends[item]
            if (item.key or b"").startswith(b"bad"):
                self.world.put_back(item, float(number))
                continue
            self.world.settle(item)
            if (item.key or b"").startswith(b"good") and self.world.order is Order.KEY:
                for following in self.world.left[item.name][:1]:
                    self.measure(following)
        self.world.wake(float(number))
        late = [item for item, bound in self.bounds.items() if self.takes > bound]
        assert not late, f"{late} after {self.takes} messages"


@pytest.mark.rule(33)
@pytest.mark.parametrize("calls_max", [1, 64])
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("order", [Order.KEY, Order.NONE])
def test_good_messages_wait_for_one_round(order: Order, partitions: int, calls_max: int) -> None:
    """Also while others fail and arrive."""
    load = Load(order, partitions, calls_max)
    for number in range(6000 // calls_max):
        load.step(number)
    assert load.good > 20


@pytest.mark.rule(33)
def test_lanes_that_continue_leave_turns_to_new_messages() -> None:
    world = World(Order.KEY)
    world.add(0, *[b"a"] * 50, *[b"b"] * 50)
    for item in world.take_all():
        world.settle(item)
    (new,) = world.add(0, b"new")
    for _ in range(2):
        if (taken := world.take()) is not new and taken is not None:
            world.settle(taken)
    assert taken is new


@pytest.mark.rule(33)
@pytest.mark.parametrize("slow", ["retries", "partition"])
def test_slow_messages_leave_places_to_others(slow: str) -> None:
    """All places are taken by retries, or by a partition: others get those that become free."""
    world = World(Order.KEY, 2)
    world.add(0, *[b"slow%d" % number for number in range(500)])
    while (item := world.take()) and slow == "retries":
        world.put_back(item, 1.0)
    for other in list(world.flying):
        world.settle(other)
    world.add(0, *[b"more%d" % number for number in range(500 if slow == "partition" else 0)])
    world.wake(1.0)
    flying = [item for _ in range(64) if (item := world.take()) is not None]
    others = world.add(0 if slow == "retries" else 1, *[b"%d" % n for n in range(200)])
    world.settle(flying[0])
    taken: list[Item] = []
    while len(taken) < 200 and (item := world.take()) is not None:
        taken.append(item)
        world.settle(item)
    assert sum(item in others for item in taken) > 190


@pytest.mark.rule(33)
def test_partitions_take_turns() -> None:
    world = World(Order.NONE, 2)
    world.add(0, *[None] * 500)
    world.add(1, *[None] * 500)
    taken: list[int] = []
    while len(taken) < 200 and (item := world.take()) is not None:
        taken.append(item.partition)
        world.settle(item)
    assert 60 <= taken.count(1) <= 140


def test_holder_takes_several_of_a_lane() -> None:
    world, one, two = World(Order.KEY), object(), object()
    a1, b1, a2, a3 = world.add(0, b"a", b"b", b"a", b"a")
    assert [world.take(one), world.take(one), world.take(one)] == [a1, b1, a2]
    assert world.take(two) is None, "the rest of the lane waits for its holder"
    assert world.take(one) is None, "and is in order"
    for item in (a1, a2):
        world.settle(item)
    assert world.take(two) is a3


@pytest.mark.parametrize("holders", [1, 2, 8])
@pytest.mark.parametrize("order", Order)
def test_batch_comes_from_one_partition(order: Order, holders: int) -> None:
    """Also while other holders take batches, of partitions that are busy, too."""
    world = World(order, 8)
    for partition in range(8):
        world.add(partition, *[b"%d" % number for number in range(500)])
    while any(world.left.values()):
        batches: list[list[Item]] = []
        for holder in map(str, range(holders)):
            first = world.take(holder)
            assert first is not None
            batches.append([first, *world.take_more(first, 99)])
        for batch in batches:
            assert len(batch) == 100
            assert len({item.partition for item in batch}) == 1
            world.settle_all(batch)


@pytest.mark.parametrize("order", Order)
def test_removed_partition_gives_nothing(order: Order) -> None:
    world = World(order, 2)
    world.add(0, b"a", b"a", b"b", b"c", b"d")
    flying = world.take_all()
    world.put_back(flying.pop(), due_s=1.0)
    if flying:
        world.put_back(flying.pop())
    world.suspend(0, "x")
    assert world.take() is None
    world.queues.remove(world.partitions[0])
    world.resume(0, "x")
    world.queues.wake(2.0)
    assert world.queues.take() is None
    assert world.queues.delayed == 0
    for item in flying:
        world.settle(item)
    assert world.queues.take() is None
    (other,) = world.add(1, b"a")
    assert world.take() is other


def test_heads() -> None:
    world = World(Order.KEY)
    a1, _a2, b1, c1, _c2 = world.add(0, b"a", b"a", b"b", b"c", b"c")
    assert world.partitions[0].heads() == [a1]
    assert world.take() is a1
    assert world.take() is b1
    world.put_back(b1, due_s=1.0)
    assert {item.key for item in world.partitions[0].heads()} == {b"a", b"b", b"c"}
    assert c1 in world.partitions[0].heads()


def test_heads_of_messages_that_are_alone() -> None:
    world = World(Order.NONE)
    first, second = world.add(0, b"a", b"a")
    assert world.take() is first
    assert world.take() is second
    for _ in range(2):
        world.put_back(first, due_s=1.0)
        assert world.partitions[0].heads() == [first]
        world.wake(1.0)
        world.suspend(0, "x")
        assert world.take() is None
        assert world.partitions[0].heads() == [first]
        world.resume(0, "x")
        assert world.take() is first
        assert world.partitions[0].heads() == []
