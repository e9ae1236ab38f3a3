"""The kinds of findings: all that judge, stream, tables, reports and metrics know of each.

Only the standard library is imported, as in `judge`.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from txbroker.contract.drift import Severity


class Kind(NamedTuple):
    """A kind of finding.

    `docs/reference/verdicts.md` tells exactly when it is found, by which evidence, and what to do.

    Attributes:
        meaning: one line for people.
        severity: `critical` where consumers may act on wrong or missing messages, `error` where a
            rule was broken without that, `warning` where it may pass.
        by_age: the finding depends on an age alone, so a stream needs no second look.
        persists: later runs repeat the finding until its cause is gone.
        in_target: records in targets are the evidence, and retention may remove it.
        not_visible: of a commit: only that it becomes visible, or is refused, heals the finding.
        compares: several transactions are compared, which a stream does not do.
    """

    name: str
    title: str
    meaning: str
    severity: "Severity" = "critical"
    by_age: bool = False
    persists: bool = False
    in_target: bool = False
    not_visible: bool = False
    compares: bool = False


KINDS = (
    # The gravest first: a row's verdict is its first finding in this order.
    Kind(
        "rolled_back_visible",
        "Rolled back but visible",
        "consumers see a message that was rolled back",
        in_target=True,
    ),
    Kind(
        "visible_without_commit",
        "Visible without a commit",
        "consumers see an undecided message",
        in_target=True,
    ),
    Kind(
        "visible_without_half",
        "Visible without a half message",
        "committed, never prepared",
        in_target=True,
    ),
    Kind("visible_twice", "Visible twice", "a message was promoted more than once", in_target=True),
    Kind(
        "lost",
        "Committed, not visible: lost",
        "a committed message has not become visible",
        by_age=True,
        persists=True,
        not_visible=True,
    ),
    Kind(
        "refused_visible",
        "Refused but visible",
        "consumers see a part of a refused transaction",
        persists=True,
        in_target=True,
    ),
    Kind("half_incomplete", "Half incomplete", "only some of its messages are stored"),
    Kind(
        "not_kept", "Not kept whole", "parked or refused, and the copy is not whole", persists=True
    ),
    Kind(
        "body_changed", "Body changed", "key or value differ from the prepared ones", in_target=True
    ),
    Kind(
        "headers_changed",
        "Headers changed",
        "headers differ from the prepared ones",
        in_target=True,
    ),
    Kind(
        "timestamp_changed",
        "Timestamp changed",
        "the timestamp differs from the prepared one",
        "error",
        in_target=True,
    ),
    Kind(
        "wrong_target",
        "Wrong target",
        "visible in another topic or partition than prepared",
        in_target=True,
    ),
    Kind(
        "out_of_order",
        "Out of order",
        "visible in another order than its key was decided in",
        "error",
        in_target=True,
        compares=True,
    ),
    Kind(
        "too_many_attempts",
        "Too many attempts",
        "checked more often than its policy allows",
        "error",
    ),
    Kind("check_too_early", "Check too early", "checked before its time, unasked", "warning"),
    Kind(
        "contrary_markers",
        "Contrary markers",
        "visible messages follow another than the first",
        "error",
        in_target=True,
    ),
    Kind(
        "marker_without_half",
        "Marker without half",
        "a marker's half message does not exist",
        "error",
    ),
    Kind(
        "late",
        "Committed, not visible: late",
        "not visible although its decision is old",
        "warning",
        by_age=True,
        persists=True,
        not_visible=True,
    ),
    Kind(
        "target_unreadable",
        "Target not readable",
        "committed, but its target was not readable",
        "warning",
        persists=True,
    ),
    Kind(
        "overdue",
        "Overdue, never checked",
        "undecided, and never checked",
        "warning",
        by_age=True,
        persists=True,
    ),
)
"""Every kind of drift of one transaction, the gravest first."""
KIND_NAMES = tuple(kind.name for kind in KINDS)
TOPIC_KINDS = (
    # Not found by judging one transaction. `unreadable` counts records.
    Kind(
        "unreadable",
        "Own record unreadable",
        "unreadable records of txbroker in its own topics",
        "error",
    ),
    Kind(
        "target_missing",
        "Target missing",
        "committed to a topic that does not exist",
        "error",
        persists=True,
    ),
)
"""Kinds of drift that concern topics."""
BUSINESS_KINDS = (
    Kind("message_without_row", "Message without row", "visible, but the business has no row"),
    Kind("row_without_message", "Row without message", "a business row without a visible message"),
)
ALL_KINDS = (*KINDS, *TOPIC_KINDS, *BUSINESS_KINDS)
"""Every kind of drift."""
BY_AGE = frozenset(kind.name for kind in ALL_KINDS if kind.by_age)
PERSISTENT = frozenset(kind.name for kind in ALL_KINDS if kind.persists)
IN_TARGET = tuple(kind.name for kind in ALL_KINDS if kind.in_target)
NOT_VISIBLE = tuple(kind.name for kind in ALL_KINDS if kind.not_visible)
COMPARED = frozenset(kind.name for kind in ALL_KINDS if kind.compares)
