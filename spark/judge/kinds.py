"""The kinds of findings: all that judge, stream, tables, reports and metrics know of each.

Only the standard library is imported, as in `judge`.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from txbroker.contract.drift import Severity


class Kind(NamedTuple):
    """A kind of finding.

    `found`, `evidence` and `todo` are sentences of `docs/reference/verdicts.md`, in Markdown.

    Attributes:
        meaning: one line for people.
        severity: `critical` where consumers may act on wrong or missing messages, `error` where a
            rule was broken without that, `warning` where it may pass.
        found: exactly when it is found.
        evidence: what must be in the topics, so that it is found.
        todo: what most often caused it, and the next step.
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
    found: str = ""
    evidence: str = ""
    todo: str = ""
    by_age: bool = False
    persists: bool = False
    in_target: bool = False
    not_visible: bool = False
    compares: bool = False


_COPIED = (
    "Most often another client copied records, mirrored a topic into itself, or wrote with "
    "txbroker's headers: [record ownership](../how-to/audit.md#record-ownership). Notify the "
    "owners of the consumers."
)
_REWRITTEN = (
    "Look for a tool that rewrote the target, or another client that writes with txbroker's "
    "headers. `txbroker tx show ID --bodies` shows the prepared messages while they are kept."
)
_CHECKED = (
    "No message is affected. Look for another client that writes to the operation topic, or for "
    "brokers whose clocks differ."
)

KINDS = (
    # The gravest first: a row's verdict is its first finding in this order.
    Kind(
        "rolled_back_visible",
        "Rolled back but visible",
        "consumers see a message that was rolled back",
        found=(
            "The first decision that counts is a rollback, and a target holds a record of the "
            "transaction."
        ),
        evidence=(
            "The rollback marker and the record in the target. Where retention removed the half "
            "message, also a copy in the parked topic; or all markers of the transaction, with no "
            "other decision of another group among them."
        ),
        todo=(
            "Notify the owners of the consumers, and look for another client that writes with "
            "txbroker's headers."
        ),
        in_target=True,
    ),
    Kind(
        "visible_without_commit",
        "Visible without a commit",
        "consumers see an undecided message",
        found=(
            "A target holds a record of a transaction that is undecided, or whose half message "
            "does not count; or, in a target with LogAppendTime, a record more than 2 s older than "
            "its commit."
        ),
        evidence=(
            "The record in the target. Of an undecided transaction whose half message or copy is "
            "there, also that retention cannot have removed a marker."
        ),
        todo=_COPIED,
        in_target=True,
    ),
    Kind(
        "visible_without_half",
        "Visible without a half message",
        "committed, never prepared",
        found=(
            "The transaction is committed and visible, but its half message does not exist or is "
            "incomplete. `marker_without_half` or `half_incomplete` is found with it."
        ),
        evidence=(
            "The commit marker and the record in the target, and that retention cannot have "
            "removed the half message."
        ),
        todo=_COPIED,
        in_target=True,
    ),
    Kind(
        "visible_twice",
        "Visible twice",
        "a message was promoted more than once",
        found="Targets hold two records of the same message, for any decision.",
        evidence="Both records; no half message is needed.",
        todo=_COPIED,
        in_target=True,
    ),
    Kind(
        "lost",
        "Committed, not visible: lost",
        "a committed message has not become visible",
        found=(
            "A message of a committed transaction is not in its target, and the commit is older "
            "than `--lost-after-s`, as is the newest record of its copy. At any age where an "
            "earlier run has seen the message, in a target that was deleted and created again, or "
            "truncated."
        ),
        evidence=(
            "The commit marker, stored before the targets were read; the prepared messages, or a "
            "whole copy of them; and a target from which retention or compaction cannot have "
            "removed all that is missing."
        ),
        todo=(
            "Most often a target was emptied, replaced or restored to an older state; or its "
            "retention was lengthened, and the records were already removed. Lengthen "
            "`retention.ms` of the half topic, because the messages may still be there: `txbroker "
            "tx show ID --bodies` shows them, to be sent again. Consumers may have read a topic "
            "that was created again."
        ),
        by_age=True,
        persists=True,
        not_visible=True,
    ),
    Kind(
        "refused_visible",
        "Refused but visible",
        "consumers see a part of a refused transaction",
        found=(
            "The parked topic records that a target refuses the transaction, but some of its "
            "messages are visible, and their promotion cannot be in flight any more."
        ),
        evidence=(
            "The copy in the parked topic, the record in the target, and the places without one."
        ),
        todo="Most often the parked topic was emptied, restored or written to by another client.",
        persists=True,
        in_target=True,
    ),
    Kind(
        "half_incomplete",
        "Half incomplete",
        "only some of its messages are stored",
        found=(
            "Only some of the messages that a half message announces are stored, no whole one has "
            "its id, and the parked topic has no copy."
        ),
        evidence="The stored messages, and that retention cannot have removed the others.",
        todo="Look for another client that writes to the half topic, or a tool that restored it.",
    ),
    Kind(
        "not_kept",
        "Not kept whole",
        "parked or refused, and the copy is not whole",
        found=(
            "The transaction is refused, or was parked longer ago than `--lost-after-s`, and its "
            "copy in the parked topic is missing, incomplete, or differs from the prepared "
            "messages and those of the commit."
        ),
        evidence="The half message, and the marker or copy that shows the state.",
        todo=(
            "Most often the parked topic was emptied, restored or written to by another client; or "
            "a partition has had no owner for long, or its promotion transactions are lost."
        ),
        persists=True,
    ),
    Kind(
        "body_changed",
        "Body changed",
        "key or value differ from the prepared ones",
        found=(
            "Key or value of a visible record differ from those of its message, prepared or "
            "brought by the commit."
        ),
        evidence=(
            "The commit marker, the prepared message or its copy, and the record in the target, by "
            "64-bit hashes."
        ),
        todo=_REWRITTEN,
        in_target=True,
    ),
    Kind(
        "headers_changed",
        "Headers changed",
        "headers differ from the prepared ones",
        found=(
            "The user's headers of a visible record, or their order, differ from those of its "
            "message."
        ),
        evidence="As of `body_changed`.",
        todo=_REWRITTEN,
        in_target=True,
    ),
    Kind(
        "timestamp_changed",
        "Timestamp changed",
        "the timestamp differs from the prepared one",
        "error",
        found=(
            "In a target with CreateTime, the timestamp of a visible record is not that of its "
            "message; where the user gave none, not the append time of the commit marker."
        ),
        evidence=(
            "The commit marker, the prepared message or its copy, and the record in the target."
        ),
        todo=_REWRITTEN,
        in_target=True,
    ),
    Kind(
        "wrong_target",
        "Wrong target",
        "visible in another topic or partition than prepared",
        found=(
            "A visible record is in another topic or partition than prepared, or its number is not "
            "one of the prepared messages."
        ),
        evidence="As of `timestamp_changed`.",
        todo=_COPIED,
        in_target=True,
    ),
    Kind(
        "out_of_order",
        "Out of order",
        "visible in another order than its key was decided in",
        "error",
        found=(
            "A message follows, in its target partition, one of the same order key and half "
            "partition that was decided later."
        ),
        evidence=(
            "The half messages, the commits and the visible records of both transactions, neither "
            "refused nor dropped from the parked topic."
        ),
        todo=(
            "Consumers that keep only the newest message of a key may hold an older one: compare "
            "both, named in `why`."
        ),
        in_target=True,
        compares=True,
    ),
    Kind(
        "too_many_attempts",
        "Too many attempts",
        "checked more often than its policy allows",
        "error",
        found=(
            "A check marker follows as many attempts as the policy of the half message allows; "
            "returned ones do not count."
        ),
        evidence="The half message and the check markers.",
        todo=_CHECKED,
    ),
    Kind(
        "check_too_early",
        "Check too early",
        "checked before its time, unasked",
        "warning",
        found=(
            "A check marker without a request was stored more than 1 s before the attempt was due."
        ),
        evidence="The half message and the check markers, by the log clock.",
        todo=_CHECKED,
    ),
    Kind(
        "contrary_markers",
        "Contrary markers",
        "visible messages follow another than the first",
        "error",
        found=(
            "Both decisions were stored, or commits with different messages, and the visible "
            "messages do not follow the first. Where they do, `why` mentions them, and nothing is "
            "wrong."
        ),
        evidence=(
            "Both markers, and the records in the targets; that none is there counts once the "
            "commit is `late` or `lost`."
        ),
        todo="`why` names both markers. Look for another client that promotes or writes markers.",
        in_target=True,
    ),
    Kind(
        "marker_without_half",
        "Marker without half",
        "a marker's half message does not exist",
        "error",
        found="A marker has neither a half message nor a copy.",
        evidence="The marker, and that retention cannot have removed the half message.",
        todo=(
            "Look for another client that writes to the operation topic, or a half topic that was "
            "emptied or restored."
        ),
    ),
    Kind(
        "late",
        "Committed, not visible: late",
        "not visible although its decision is old",
        "warning",
        found=(
            "As `lost`, but after `--late-after-s`; and in place of `lost` at any later age, where "
            "the partition of each missing message ends in a transaction that was open during the "
            "whole run."
        ),
        evidence="As of `lost`.",
        todo=(
            "Most often promotion lagged: "
            "[TxBrokerPromotionStalled](../runbooks/TxBrokerPromotionStalled.md). Or another "
            "producer's transaction stays open in a target: the run names the partition, and "
            "`kafka-transactions.sh find-hanging` lists transactions that no producer will end."
        ),
        by_age=True,
        persists=True,
        not_visible=True,
    ),
    Kind(
        "target_unreadable",
        "Target not readable",
        "committed, but its target was not readable",
        "warning",
        found=(
            "A committed transaction is not refused, and a message that is not known to be visible "
            "belongs to a topic that could not be read: no right, no leader, or an impossible "
            "name."
        ),
        evidence=(
            "The commit marker and the prepared messages; `unread_targets` of the run has the "
            "reason."
        ),
        todo="Grant Describe and Read, or give the target a leader; then run again.",
        persists=True,
    ),
    Kind(
        "overdue",
        "Overdue, never checked",
        "undecided, and never checked",
        "warning",
        found=(
            "A pending transaction was never checked or parked, and its first check was due longer "
            "ago than `--overdue-after-s`. A copy of a pending transaction changes nothing."
        ),
        evidence=(
            "The half message, or a copy that names the time; and that retention cannot have "
            "removed a marker."
        ),
        todo=(
            "The group was unreachable all the time: "
            "[TxBrokerGroupUnreachable](../runbooks/TxBrokerGroupUnreachable.md). Or no proxy owns "
            "the partition."
        ),
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
        found=(
            "A record of the half, operation or parked topic that [only txbroker "
            "writes](audit-tables.md#unreadable-records) cannot be read. The count is of records."
        ),
        evidence="The record.",
        todo=(
            "Another client wrote to txbroker's own topics, or a tool that changes headers "
            "restored them: `set_aside` of the run lists the records."
        ),
    ),
    Kind(
        "target_missing",
        "Target missing",
        "committed to a topic that does not exist",
        "error",
        found=(
            "A transaction is committed to a topic that does not exist, and not refused; within "
            "`--late-after-s` of the commit only where an earlier run has seen the message. A "
            "stream reports the topic instead, if it has read it before."
        ),
        evidence="The commit marker, and a half message that is still there.",
        todo=(
            "A target was deleted, or its name changed: `missing_targets` of the run names it. "
            "Create it again; `txbroker tx show ID` shows a `refused` transaction."
        ),
        persists=True,
    ),
)
"""Kinds of drift that concern topics."""
BUSINESS_KINDS = (
    Kind(
        "message_without_row",
        "Message without row",
        "visible, but the business has no row",
        found=(
            "A message is visible, its decision is older than `--late-after-s`, and no row of the "
            "business has its id. With `--business`, of the groups of `--group`."
        ),
        evidence="The record in the target, and the rows, which are read after the topics.",
        todo=(
            "Compare `--id-column` and `--group` with the table, and see whether the service "
            "deletes rows or a check answers wrongly."
        ),
    ),
    Kind(
        "row_without_message",
        "Row without message",
        "a business row without a visible message",
        found=(
            "The transaction of a row is rolled back, void, `late` or `lost`, or does not exist, "
            "and is too old to change that. With `--business`."
        ),
        evidence="The row, and topics from which retention cannot have removed its transaction.",
        todo="Compare `--id-column` with the table, and see whether a check answers wrongly.",
    ),
)
ALL_KINDS = (*KINDS, *TOPIC_KINDS, *BUSINESS_KINDS)
"""Every kind of drift."""
BY_AGE = frozenset(kind.name for kind in ALL_KINDS if kind.by_age)
PERSISTENT = frozenset(kind.name for kind in ALL_KINDS if kind.persists)
IN_TARGET = tuple(kind.name for kind in ALL_KINDS if kind.in_target)
NOT_VISIBLE = tuple(kind.name for kind in ALL_KINDS if kind.not_visible)
COMPARED = frozenset(kind.name for kind in ALL_KINDS if kind.compares)
