"""What happens to a failed message."""

from __future__ import annotations

import math
from typing import Any

import pytest

from txbroker.core.consuming.failure import (
    DELAYS_S,
    Bury,
    Drop,
    Later,
    OnFailure,
    Reject,
    RetryHere,
    RetryLater,
    SetAside,
    Verdict,
    make_policy,
)
from txbroker.core.consuming.queues import Order
from txbroker.errors import ConfigurationError

BUG = ValueError("bug")
CAUSE = "ValueError: bug"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_delays() -> None:
    minutes = [60 * number for number in range(1, 11)]
    assert list(DELAYS_S) == [10, 30, *minutes, 20 * 60, 30 * 60, 3600, 7200]
    assert len(DELAYS_S) == 16


@pytest.mark.rule(37)
@pytest.mark.parametrize(
    ("order", "on_failure", "error", "failures", "step", "verdict"),
    [
        ("none", None, BUG, 1, None, RetryHere(0.1)),
        ("none", None, BUG, 2, None, RetryHere(0.1)),
        ("none", None, BUG, 3, None, RetryLater(0, 10, CAUSE, 0)),
        ("none", None, BUG, 2, 0, RetryHere(0.1)),
        *(
            ("none", None, BUG, 3, n, RetryLater(n + 1, DELAYS_S[n + 1], CAUSE, n + 1))
            for n in range(15)
        ),
        ("none", None, BUG, 3, 15, Bury(CAUSE)),
        ("none", None, Later(9.5), 0, None, RetryHere(9.5)),
        ("none", None, Later(10), 0, None, RetryLater(0, 10, "Later: again in 10 s", -1)),
        ("none", None, Later(11), 0, 7, RetryLater(1, 30, "Later: again in 11 s", 7)),
        ("none", None, Later(90_000), 0, None, RetryLater(15, 7200, "Later: again in 90000 s", -1)),
        ("none", "skip", BUG, 3, None, Bury(CAUSE)),
        ("none", "skip", Later(60), 0, None, RetryHere(60)),
        ("none", "wait", BUG, 1000, None, RetryHere(60)),
        ("partition", None, BUG, 1000, None, RetryHere(60)),
        *(
            ("key", None, BUG, number, None, RetryHere(pause_s))
            for number, pause_s in enumerate((1, 1, 2, 4, 8, 16, 32, 60, 60), 1)
        ),
        ("key", "skip", BUG, 2, None, RetryHere(1)),
        ("key", "skip", BUG, 3, None, Bury(CAUSE)),
        ("key", "aside", BUG, 3, None, SetAside(CAUSE)),
        ("key", "aside", BUG, 3, 0, Bury(CAUSE)),
        ("key", "aside", Later(60), 9, None, RetryHere(60)),
        ("key", "aside", Reject("empty"), 1, None, Bury("empty")),
        ("key", "wait", Reject("empty"), 1, None, Bury("empty")),
        ("none", None, Reject("empty"), 1, 3, Bury("empty")),
        ("key", "skip", Mute(), 3, None, Bury("Mute: (its text cannot be read)")),
    ],
)
def test_decision(
    order: str,
    on_failure: str | None,
    error: BaseException,
    failures: int,
    step: int | None,
    verdict: Verdict,
) -> None:
    policy = make_policy(Order(order), on_failure, 3, None, drop=False)
    assert policy.decide(error, failures, step) == verdict


@pytest.mark.parametrize("error", [BUG, Later(60), Reject("empty")])
def test_at_most_once_drops(error: BaseException) -> None:
    policy = make_policy(Order.KEY, None, 3, None, drop=True)
    assert isinstance(policy.decide(error, 1, None), Drop)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attempts": 0}, "local_attempts_max is 0: it is at least 1"),
        ({"interval": 0.001}, "between 0.01 and 30 seconds"),
        ({"interval": 31.0}, "between 0.01 and 30 seconds"),
        ({"interval": math.nan}, "between 0.01 and 30 seconds"),
        ({"on_failure": "explode"}, "'explode' is not one of retry, wait, skip, aside"),
        ({"on_failure": "retry"}, "on_failure='retry' gives up the order"),
        ({"on_failure": "aside", "order": "none"}, "on_failure='aside' keeps the order"),
        ({"on_failure": "skip", "drop": True}, "on_failure is for at-least-once"),
    ],
)
def test_contradictions(changes: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {
        "order": "key",
        "on_failure": None,
        "attempts": 3,
        "interval": None,
        "drop": False,
    }
    given |= changes
    with pytest.raises(ConfigurationError, match=says):
        make_policy(
            Order(given["order"]),
            given["on_failure"],
            given["attempts"],
            given["interval"],
            drop=given["drop"],
        )


@pytest.mark.parametrize("seconds", [-1, math.inf, math.nan])
def test_later_needs_a_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="a number of seconds"):
        Later(seconds)


def test_on_failure_names() -> None:
    assert [str(each) for each in OnFailure] == ["retry", "wait", "skip", "aside"]
