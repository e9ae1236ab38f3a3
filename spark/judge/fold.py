"""Fold the markers of a transaction into its state, by the ledger's rules.

Only the standard library and `rows` are imported, as in `judge`. These rules repeat those of
`txbroker.core` on purpose.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from txbroker.spark.judge.rows import Content, HalfFact, MarkerFact

ASK_SPACING_MS = 1000
"""Minimum time between a requested attempt and the attempt before it."""
LATER_MIN_MS, LATER_MAX_MS = 1000, 3_600_000
"""Bounds of the delay that a "not yet" answer sets."""
CLOCKS_APART_MS = 1000
"""Tolerated difference of brokers' clocks: a check that is early by less is no finding."""
EARLY_MS = 2 * CLOCKS_APART_MS
"""Tolerated time by which a record may be older than its decision, by the clocks of two brokers."""
_DECISIONS = frozenset({"commit", "rollback"})


class CopiedMessages(NamedTuple):
    """The messages of a parked copy, whether or not it was dropped later."""

    grp: str
    messages: Sequence[Content]


class TransactionFold:
    """The state of a transaction after its markers.
    Without a half message (`half` is None) only the first decision counts; a copy supplies group
    and messages if there is one."""

    def __init__(self, half: Sequence[HalfFact] | None, kept: CopiedMessages | None = None) -> None:
        self.half = half
        self.grp = half[0].grp if half else None if kept is None else kept.grp
        self.prepared: Sequence[HalfFact | Content] | None = half
        if half is None and kept is not None:
            self.prepared = kept.messages
        self.findings: dict[str, str] = {}
        self.contrary = ""
        """Description of the first decision that contradicts the one that counts."""
        self.others: list[MarkerFact] = []
        """All such decisions."""
        self.parked: MarkerFact | None = None
        self.state = "pending"
        self.decided: MarkerFact | None = None
        self.contents: Sequence[Content] | None = None
        first = None if half is None else half[0]
        self.after_ms = (first and first.after_ms) or 0
        self.interval_ms = (first and first.interval_ms) or 0
        self.attempts_max = (first and first.attempts_max) or 0
        self.timeout_ms = (first and first.timeout_ms) or 0
        self.round = 1
        self.round_started_ms = 0 if half is None else max(row.clock_ms for row in half)
        self.number = 0
        self.counted_ms: list[int] = []
        self.last_check_ms = 0
        self.not_before_ms = 0
        self.last_counts = False
        """Whether the last attempt of this round can still be given back."""

    def apply(self, marker: MarkerFact) -> None:
        """Apply the next marker; an illegal one changes nothing."""
        if marker.contents_count and not _whole(marker):
            return
        if marker.kind in _DECISIONS:
            self._decide(marker)
        elif self.half is None:
            return
        elif marker.kind == "check":
            self._check(marker)
        elif marker.kind == "returned" or marker.kind == "later":
            self._give_back(marker)
        elif marker.kind == "park":
            self._park(marker)
        elif marker.kind == "revive":
            self._revive(marker)

    def _decide(self, marker: MarkerFact) -> None:
        if self.prepared is not None:
            if marker.grp and marker.grp != self.grp:
                return
            contents = None if self.decided is not None else marker.contents
            if contents and not _fits(self.prepared, contents):
                return
        if self.decided is None:
            self.decided = marker
            self.state = "committed" if marker.kind == "commit" else "rolled_back"
            self.contents = in_sequence(marker.contents) if marker.contents else None
        elif marker.kind != self.decided.kind:
            self._contradict(
                marker,
                f"{self.decided.kind} at {self.decided.offset}, {marker.kind} at {marker.offset}",
            )
        elif marker.contents and self._other_contents(marker.contents):
            self._contradict(
                marker,
                f"the commit at {marker.offset} brought other messages than the first decision",
            )

    def _contradict(self, marker: MarkerFact, words: str) -> None:
        self.others.append(marker)
        self.contrary = self.contrary or words

    def _other_contents(self, contents: Sequence[Content]) -> bool:
        standing: Iterable[HalfFact | Content] = self.contents or self.prepared or ()
        return [_content_of(message) for message in in_sequence(contents)] != [
            _content_of(message) for message in standing
        ]

    def _check(self, marker: MarkerFact) -> None:
        if self.decided is not None or marker.round != self.round:
            return
        made, at_ms = len(self.counted_ms), marker.clock_ms
        if marker.number != self.number + 1:
            return
        if made >= self.attempts_max:
            self.findings.setdefault(
                "too_many_attempts",
                f"attempt {marker.number} at {marker.offset} after {made} that count,"
                f" of {self.attempts_max}",
            )
            return
        if marker.reason == "asked":
            if made + 1 >= self.attempts_max or at_ms < self.last_check_ms + ASK_SPACING_MS:
                return
        elif marker.reason != "due":
            return
        elif at_ms < self.next_check_ms():
            early_ms = self.next_check_ms() - at_ms
            if self.state == "pending" and early_ms > CLOCKS_APART_MS:
                self.findings.setdefault(
                    "check_too_early",
                    f"attempt {marker.number} at {marker.offset} came {early_ms} ms early",
                )
            return
        if self.state != "pending":
            return
        self.number = marker.number
        self.counted_ms.append(at_ms)
        self.last_check_ms = at_ms
        self.not_before_ms = 0
        self.last_counts = True

    def next_check_ms(self) -> int:
        """Return when the next attempt is due, ms by the log clock."""
        if self.not_before_ms:
            return self.not_before_ms
        if self.counted_ms:
            return self.counted_ms[-1] + self.interval_ms
        return self.round_started_ms + self.after_ms

    def _give_back(self, marker: MarkerFact) -> None:
        named = (marker.round, marker.number) == (self.round, self.number)
        if self.state != "pending" or not self.last_counts or not named:
            return
        self.counted_ms.pop()
        self.last_counts = False
        if marker.kind == "later":
            delay_ms = min(max(marker.later_ms, LATER_MIN_MS), LATER_MAX_MS)
            self.not_before_ms = marker.clock_ms + delay_ms

    def _park(self, marker: MarkerFact) -> None:
        if self.state != "pending" or marker.round != self.round:
            return
        if len(self.counted_ms) < self.attempts_max:
            return
        if marker.clock_ms >= self.counted_ms[-1] + self.timeout_ms:
            self.state = "parked"
            self.parked = marker

    def _revive(self, marker: MarkerFact) -> None:
        if self.state != "parked" or marker.round != self.round:
            return
        self.state = "pending"
        self.round += 1
        self.round_started_ms = marker.clock_ms
        self.number = 0
        self.counted_ms = []
        self.last_check_ms = self.not_before_ms = 0
        self.last_counts = False


def _whole(marker: MarkerFact) -> bool:
    """Return whether all messages that a marker announces are there."""
    numbers = [content.seq for content in in_sequence(marker.contents or ())]
    # No list of `contents_count` numbers is built: a record may claim any count.
    return len(numbers) == marker.contents_count and numbers == list(range(len(numbers)))


def in_sequence(contents: Sequence[Content]) -> list[Content]:
    """Return messages in order of `seq`."""
    return sorted(contents, key=lambda content: content.seq)


def _fits(prepared: Sequence[HalfFact | Content], contents: Sequence[Content]) -> bool:
    """Return whether messages may replace the prepared ones: same topics, same partitions."""
    return [(content.topic, content.target_partition) for content in in_sequence(contents)] == [
        (row.topic, row.target_partition) for row in prepared
    ]


def _content_of(message: HalfFact | Content) -> tuple[str, int, int, int | None]:
    """Return the content of a message without its partition."""
    return message.topic, message.body, message.headers, message.timestamp_ms
