"""The stream's state in Spark: a bucket's texts in the state store, and its alarm clock."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from txbroker.spark.stream_state import Bucket, Drift, Fact, Heard, StreamTerms

OUTPUT = (
    "what string, name string, number bigint, id string, grp string, why string, "
    "first_seen_ms bigint, at_ms bigint"
)
"""What comes out: new findings (`what` is `told`, `name` the kind), changes of counts (`what` and
`name` as in `Heard.counts`), names of targets that are not read (`what` is `target`), and some of
the records that do not read (`what` is `set_aside`, `why` a `schema.SetAside` as JSON)."""
BROKEN, TICK = "broken", "tick"
"""Tables of rows that are no facts: records that do not read, and the stream's own clock."""
SET_ASIDE_MAX = 20
"""Records that do not read, of which more than the number is told."""
_PIECE_CHARS = 8_192


class Texts:
    """A bucket's texts, in Spark's state store, in pieces.

    What Python hands to Java's side at once must be short: Spark 4.0 fails on some hundred KiB. A
    piece that is full has another one behind it.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    def read(self, name: str) -> str | None:
        pieces: list[str] = []
        while (found := self._state.getValue(_key(name, len(pieces)))) is not None:
            pieces.append(str(found[0]))
            if len(pieces[-1]) != _PIECE_CHARS:
                break
        return "".join(pieces) if pieces else None

    def write(self, name: str, text: str | None) -> None:
        starts = () if text is None else range(0, len(text) + 1, _PIECE_CHARS)
        for number, start in enumerate(starts):
            self._state.updateValue(
                _key(name, number), ((text or "")[start : start + _PIECE_CHARS],)
            )
        number = len(starts)
        while self._state.containsKey(_key(name, number)):
            self._state.removeKey(_key(name, number))
            number += 1


def _key(name: str, number: int) -> tuple[str]:
    return (f"{number} {name}" if number else name,)


class TransactionProcessor(StatefulProcessor):
    """Takes a bucket's new records in, and looks again when something is due."""

    def __init__(self, terms: StreamTerms) -> None:
        self._terms = terms

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Begin work on a partition of the state."""
        self._handle = handle
        self._texts = handle.getMapState("texts", "name string", "text string")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        """Take new records in."""
        import json

        facts: list[Fact] = []
        broken: list[dict[str, Any]] = []
        for some in rows:
            columns = (some[name].tolist() for name in ("table", "id", "facts"))
            for table, id, text in zip(*columns, strict=True):
                if table == BROKEN:
                    broken.append(json.loads(text))
                elif table != TICK:
                    facts.append(Fact(table, id, json.loads(text)))
        heard = self._look(facts, timerValues)
        own = [each for each in broken if each["own"]]
        heard.counts["quarantined", "records"] += len(broken)
        heard.counts["drift", "unreadable"] += len(own)
        heard.drift.extend(_unreadable(each, self._moment_ms(timerValues)) for each in own)
        ours_first = sorted(broken, key=lambda each: not each["own"])[:SET_ASIDE_MAX]
        yield from _frames(heard, [json.dumps(each) for each in ours_first])

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[pd.DataFrame]:
        """Look at what is due."""
        yield from _frames(self._look([], timerValues))

    def _look(self, facts: list[Fact], timers: Any) -> Heard:
        moment_ms = self._moment_ms(timers)
        heard = Bucket(Texts(self._texts), self._terms, moment_ms).look(facts)
        if heard.due_ms is not None:
            self._handle.registerTimer(heard.due_ms)
        return heard

    def _moment_ms(self, timers: Any) -> int:
        return max(int(timers.getCurrentWatermarkInMs()), 0)

    def close(self) -> None:
        """End work on a partition of the state."""


def _unreadable(record: dict[str, Any], moment_ms: int) -> Drift:
    """Return the finding of a record of ours that does not read; its place stands for an id."""
    place = f"{record['topic']}-{record['partition']}@{record['offset']}"
    return Drift(place, "unreadable", "", record["why"], moment_ms, moment_ms)


def _frames(heard: Heard, set_aside: Sequence[str] = ()) -> Iterator[pd.DataFrame]:
    rows = [("told", each.kind, 1, *_told(each)) for each in heard.drift]
    rows += [(what, name, by, *_NOTHING) for (what, name), by in heard.counts.items() if by]
    rows += [("target", topic, 1, *_NOTHING) for topic in sorted(heard.targets)]
    rows += [("set_aside", "", 1, "", "", text, 0, 0) for text in set_aside]
    if rows:
        names = ["what", "name", "number", "id", "grp", "why", "first_seen_ms", "at_ms"]
        yield pd.DataFrame(rows, columns=names)


_NOTHING = ("", "", "", 0, 0)


def _told(drift: Drift) -> tuple[str, str, str, int, int]:
    return drift.id, drift.group, drift.why, drift.first_seen_ms, drift.at_ms
