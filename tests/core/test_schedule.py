"""The schedule: each id at its last time, once, oldest first."""

from hypothesis import given
from hypothesis import strategies as st

from tests.core.core_fuzz import fuzz
from txbroker.core.index import Schedule

STEPS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(0, 20))
    | st.tuples(st.just("pop"), st.integers(0, 20)),
    max_size=300,
)


@fuzz
@given(STEPS)
def test_it_is_a_sorted_dictionary(steps: list[tuple[str, int | None]]) -> None:
    schedule, model = Schedule(), dict[str, int]()
    for id, at_ms in steps:
        if id == "pop" and at_ms is not None:
            due = sorted((at, each) for each, at in model.items() if at <= at_ms)
            assert list(schedule.pop_due(at_ms)) == [each for _, each in due]
            for _, each in due:
                del model[each]
        else:
            schedule.set(id, at_ms)
            model.pop(id, None)
            if at_ms is not None:
                model[id] = at_ms
        assert len(schedule) == len(model)
        assert schedule.next_ms() == min(model.values(), default=None)


@fuzz
@given(STEPS, st.data())
def test_waiter_learns_of_every_earlier_time(
    steps: list[tuple[str, int | None]], data: st.DataObject
) -> None:
    schedule, model, waits_for = Schedule(), dict[str, int](), None
    for id, at_ms in steps:
        if id == "pop" and at_ms is not None:
            for each in schedule.pop_due(at_ms):
                del model[each]
            waits_for = schedule.next_ms()
            continue
        earlier = schedule.set(id, at_ms)
        model.pop(id, None)
        if at_ms is not None:
            model[id] = at_ms
        # The waiter asks again if notified, and sometimes without a reason.
        if earlier or data.draw(st.booleans()):
            waits_for = schedule.next_ms()
        assert not model or (waits_for is not None and waits_for <= min(model.values()))


def test_an_id_may_be_set_again_while_the_due_ones_are_taken() -> None:
    schedule = Schedule()
    for id in "ab":
        schedule.set(id, 1)
    taken = []
    for id in schedule.pop_due(5):
        taken.append(id)
        schedule.set(id, 6)
    assert taken == ["a", "b"]
    assert list(schedule.pop_due(6)) == ["a", "b"]


def test_moving_one_id_for_ever_takes_no_memory() -> None:
    schedule = Schedule()
    for at_ms in range(10_000):
        schedule.set("a", at_ms)
    assert len(schedule._heap) < 100
