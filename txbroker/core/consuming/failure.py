"""What happens to a message whose handler failed."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from txbroker.core.consuming.queues import Order
from txbroker.errors import ConfigurationError

DELAYS_S = (10, 30, *range(60, 660, 60), 1200, 1800, 3600, 7200)
"""The 16 delays between attempts, seconds: step N is partition N of the retry topic."""
RETRY_INTERVAL_MIN_S, RETRY_INTERVAL_MAX_S = 0.01, 30.0
_WAIT_MAX_S = 60.0
"""The longest pause before another attempt: a corrected handler is called again within it."""
_INTERVAL_S = {Order.NONE: 0.1, Order.PARTITION: 1.0, Order.KEY: 1.0}


class Later(Exception):
    """Raised by a handler: call it again with this message after some seconds. Not a failure.

    Args:
        seconds: at least 0. In order `none` a delay of ten seconds or more is rounded up to a step
            of the retry topic, two hours at most.
    """

    def __init__(self, seconds: float) -> None:
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"Later({seconds}): the delay is a number of seconds, at least 0")
        super().__init__(f"again in {seconds:g} s")
        self.seconds = seconds


class Reject(Exception):
    """Raised by a handler: this message can never be handled. It goes to the dead-letter topic.

    Args:
        reason: for the operator, stored with the message.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = str(reason)


class ProcessEnded(Exception):
    """The process ended while the handler of this message was called, and of no other one that may
    have ended it."""


class OnFailure(StrEnum):
    """What follows after the local attempts.

    RETRY: 16 growing delays in the retry topic, then the dead-letter topic. Order `none` only.
    WAIT: attempts go on for ever, with growing pauses.
    SKIP: dead-letter topic.
    ASIDE: the message and all later ones of its key are kept in order in the aside topic.
    """

    RETRY = "retry"
    WAIT = "wait"
    SKIP = "skip"
    ASIDE = "aside"


class RetryHere(Struct, frozen=True):
    """Call the handler again after `delay_s`; until then the lane waits."""

    delay_s: float


class RetryLater(Struct, frozen=True):
    """Copy it to partition `step` of the retry topic, due after `delay_s`. `failed_step` is the
    last step that a failure led to; `Later` is none."""

    step: int
    delay_s: float
    cause: str
    failed_step: int


class Bury(Struct, frozen=True):
    """Copy it to the dead-letter topic."""

    cause: str


class SetAside(Struct, frozen=True):
    """Copy it to the aside topic, and all later messages of its key."""

    cause: str


class Drop(Struct, frozen=True):
    """Count it and go on."""

    cause: str


Verdict: TypeAlias = RetryHere | RetryLater | Bury | SetAside | Drop


class FailurePolicy(Struct, frozen=True):
    """Decides what happens to a message whose handler failed.

    Attributes:
        on_failure: None: every failed message is dropped (at most once).
        local_attempts_max: calls of the handler before `on_failure` applies.
        interval_s: between them, seconds. `wait` doubles it after them, up to 60.
    """

    on_failure: OnFailure | None
    local_attempts_max: int
    interval_s: float

    def decide(self, error: BaseException, failures: int, step: int | None) -> Verdict:
        """Return what happens to a message.

        Args:
            error: raised by the handler.
            failures: local failures so far, this one included.
            step: the last step of the retry topic that a failure led to, -1 before the first one;
                None: it was not read from the retry topic.
        """
        cause = f"{type(error).__name__}: {_text(error)}"
        if self.on_failure is None:
            return Drop(cause)
        if isinstance(error, Reject):
            return Bury(error.reason)
        if isinstance(error, Later):
            if self.on_failure is not OnFailure.RETRY or error.seconds < DELAYS_S[0]:
                return RetryHere(error.seconds)
            fits = [n for n, delay_s in enumerate(DELAYS_S) if delay_s >= error.seconds]
            later = fits[0] if fits else len(DELAYS_S) - 1
            return RetryLater(later, DELAYS_S[later], cause, -1 if step is None else step)
        if failures < self.local_attempts_max:
            return RetryHere(self.interval_s)
        if self.on_failure is OnFailure.WAIT:
            return self.wait(failures)
        if self.on_failure is OnFailure.ASIDE and step is None:
            return SetAside(cause)
        if self.on_failure is not OnFailure.RETRY or isinstance(error, ProcessEnded):
            return Bury(cause)  # each delay would end the process again
        following = 0 if step is None else step + 1
        if following >= len(DELAYS_S):
            return Bury(cause)
        return RetryLater(following, DELAYS_S[following], cause, following)

    def wait(self, failures: int) -> RetryHere:
        """Return the pause after the local attempts: each is twice the one before, so that messages
        that fail for long take few of the calls."""
        doublings = min(max(0, failures - self.local_attempts_max + 1), 30)
        return RetryHere(min(_WAIT_MAX_S, self.interval_s * 2**doublings))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be read)"


def make_policy(
    order: Order,
    on_failure: str | None,
    local_attempts_max: int,
    interval_s: float | None,
    *,
    drop: bool,
) -> FailurePolicy:
    """Return the policy of a consumer.

    Args:
        on_failure: None: `retry` without order, else `wait`.
        interval_s: None: 0.1 without order, else 1.
        drop: at most once: failed messages are dropped.

    Raises:
        ConfigurationError: the arguments contradict each other or are out of range.
    """
    if local_attempts_max < 1:
        raise ConfigurationError(f"local_attempts_max is {local_attempts_max}: it is at least 1")
    interval_s = _INTERVAL_S[order] if interval_s is None else interval_s
    if not RETRY_INTERVAL_MIN_S <= interval_s <= RETRY_INTERVAL_MAX_S:
        raise ConfigurationError(
            f"retry_interval_s is {interval_s}: it is between {RETRY_INTERVAL_MIN_S} and "
            f"{RETRY_INTERVAL_MAX_S:g} seconds"
        )
    if drop:
        if on_failure is not None:
            raise ConfigurationError(
                "on_failure is for at-least-once: with at-most-once a message whose handler fails "
                "is counted and dropped; leave on_failure out"
            )
        return FailurePolicy(None, 1, interval_s)
    default = OnFailure.RETRY if order is Order.NONE else OnFailure.WAIT
    try:
        chosen = default if on_failure is None else OnFailure(on_failure)
    except ValueError:
        names = ", ".join(OnFailure)
        raise ConfigurationError(f"on_failure {on_failure!r} is not one of {names}") from None
    if chosen is OnFailure.RETRY and order is not Order.NONE:
        raise ConfigurationError(
            "on_failure='retry' gives up the order: use order='none', or wait, skip or aside"
        )
    if chosen is OnFailure.ASIDE and order is Order.NONE:
        raise ConfigurationError(
            "on_failure='aside' keeps the order of a key: use order='key' or 'partition', or retry"
        )
    return FailurePolicy(chosen, local_attempts_max, interval_s)
