"""Random half and operation logs, drawn so that most markers are nearly right."""

from hypothesis import strategies as st

from tests.kit.logs import (
    PARTITION,
    START_MS,
    Logs,
    apply_all,
    half_of,
    id_of,
    marker_of,
    message,
    new_ledger,
)
from txbroker.core.ledger import Ledger
from txbroker.core.records import CheckPolicy, Half, MarkerKind, Record

POLICY = CheckPolicy(after_s=6.0, interval_s=30.0, attempts_max=3, timeout_s=5.0)
PAUSES_MS = st.sampled_from([0, 0, 1, 500, 1000, 5000, 6000, 30_000, 60_000, 119_999, 130_000])
VALUES = st.sampled_from(["v", "w"])
GROUPS = st.sampled_from(["g", "g", "g", "h"])


@st.composite
def histories(draw: st.DrawFn, steps_max: int = 40) -> Logs:
    """Return the logs of a partition; nothing of them is certain to be legal."""
    logs, ledger, now_ms = Logs(), new_ledger(), START_MS
    halves: dict[str, Half] = {}
    for number in range(draw(st.integers(1, steps_max))):
        now_ms += draw(PAUSES_MS)
        at_ms = now_ms - draw(st.sampled_from([0, 0, 0, 700]))  # brokers' clocks differ
        action = draw(st.sampled_from("PPPMMMMMMMMMCGX"))
        if action == "P" or not halves:
            half = _half(draw, halves, number, now_ms)
            halves.setdefault(half.id, half)
            logs.prepare(half, at_ms)
        elif action == "M":
            _mark(draw, logs, ledger, draw(st.sampled_from(sorted(halves))), at_ms)
        elif action == "C":
            half = halves[draw(st.sampled_from(sorted(halves)))]
            topic = draw(st.sampled_from(["t", "t", "other"]))
            contents = [message(draw(VALUES), topic) for _ in half.messages]
            logs.commit_with(half, contents, at_ms)
        elif action == "G":
            _mark(draw, logs, ledger, id_of(900 + number, now_ms), at_ms)
        else:
            garbage = Record(draw(st.binary(max_size=5)), draw(st.none() | st.binary(max_size=5)))
            draw(st.sampled_from([logs.half, logs.op])).append([garbage], at_ms)
        apply_all(ledger, logs, len(logs.half.records), len(logs.op.records))
    return logs


def _half(draw: st.DrawFn, halves: dict[str, Half], number: int, now_ms: int) -> Half:
    again = halves and draw(st.booleans())
    if again:
        id = draw(st.sampled_from(sorted(halves)))
    else:
        skew_ms = draw(st.sampled_from([0, 0, 0, 0, -130_000, 130_000]))
        partition = draw(st.sampled_from([PARTITION, PARTITION, PARTITION, PARTITION + 1]))
        id = id_of(number, now_ms + skew_ms, partition)
    messages = [message(draw(VALUES)) for _ in range(draw(st.integers(1, 2)))]
    dedup_key = draw(st.sampled_from([None, None, "d", "e"]))
    return half_of(id, *messages, group=draw(GROUPS), dedup_key=dedup_key, policy=POLICY)


def _mark(draw: st.DrawFn, logs: Logs, ledger: Ledger, id: str, at_ms: int) -> None:
    transaction = ledger.index.get(id)
    round_, number = (
        (1, 0) if transaction is None else (transaction.checks.round, transaction.checks.number)
    )
    kind = draw(
        st.sampled_from(
            ["check"] * 5 + ["commit", "rollback", "returned", "later", "park", "revive"]
        )
    )
    reason = draw(st.sampled_from(["due", "due", "asked"])) if kind == "check" else ""
    if kind == "check":
        number += 1
    logs.mark(
        marker_of(
            MarkerKind(kind),
            id,
            group=draw(GROUPS) if kind in ("commit", "rollback") else "",
            round=round_ + draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1])),
            number=number + draw(st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1])),
            reason=reason,
            later_s=float(draw(st.sampled_from([0, 10, 7200]))),
            previous=draw(st.sampled_from(["", "unknown"])),
        ),
        at_ms,
    )
