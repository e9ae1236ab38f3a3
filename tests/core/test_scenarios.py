"""The life of a transaction, record by record, as tables.

A line is a record of the half topic (`half`), a marker of the operation topic (any other word),
or a `tick`: a look at the schedule. Left of the arrow: the append time in seconds, the record,
the transaction and what the record says (`1.2` is round 1, attempt 2). Right of the arrow: what
applying it did, the state of the transaction after it, and any number of facts:

    attempts   that count in this round        decided   when the decision was made, s
    next       when a check is due next, s     park      when parking is allowed, s

A tick says `wait`, `check`, `park` (what is due now), or `never`.
"""

from collections.abc import Callable

import pytest

from tests.kit.logs import START_MS, WINDOW_MS, Logs, half_of, id_of, marker_of, message, new_ledger
from txbroker.core.index import due_ms
from txbroker.core.ledger import ApplyResult, Ledger
from txbroker.core.records import CheckPolicy, State
from txbroker.core.transaction import Transaction

SCENARIOS = {
    "fifteen attempts, then it is parked": """
       0  half     T                 -> applied  pending    attempts=0 next=6
       5  check    T 1.1   due       -> illegal  pending    attempts=0
       6  check    T 1.1   due       -> applied  pending    attempts=1
      36  check    T 1.2   due       -> applied  pending    attempts=2
      66  check    T 1.3   due       -> applied  pending    attempts=3
      96  check    T 1.4   due       -> applied  pending    attempts=4
     126  check    T 1.5   due       -> applied  pending    attempts=5
     156  check    T 1.6   due       -> applied  pending    attempts=6
     186  check    T 1.7   due       -> applied  pending    attempts=7
     216  check    T 1.8   due       -> applied  pending    attempts=8
     246  check    T 1.9   due       -> applied  pending    attempts=9
     276  check    T 1.10  due       -> applied  pending    attempts=10
     306  check    T 1.11  due       -> applied  pending    attempts=11
     336  check    T 1.12  due       -> applied  pending    attempts=12
     366  check    T 1.13  due       -> applied  pending    attempts=13
     396  check    T 1.14  due       -> applied  pending    attempts=14
     426  park     T 1               -> illegal  pending    attempts=14
     426  check    T 1.15  due       -> applied  pending    attempts=15 park=431
     430  park     T 1               -> illegal  pending
     431  tick     T                 -> park
     431  park     T 1               -> applied  parked
     456  check    T 1.16  due       -> illegal  parked     attempts=15
     456  tick     T                 -> never
    """,
    "spacing: no attempt comes before its time": """
       0  half     T                 -> applied  pending    next=6
       5  tick     T                 -> wait
       6  tick     T                 -> check
       9  check    T 1.1   due       -> applied  pending    next=39
      38  check    T 1.2   due       -> illegal  pending    attempts=1
      39  check    T 1.2   due       -> applied  pending    next=69
    """,
    "numbers: no attempt twice, none left out, none of another round": """
       0  half     T                 -> applied  pending
       6  check    T 1.2   due       -> illegal  pending    attempts=0
       6  check    T 2.1   due       -> illegal  pending    attempts=0
       6  check    T 1.1   due       -> applied  pending    attempts=1
      36  check    T 1.1   due       -> illegal  pending    attempts=1
      36  check    T 1.2   guess     -> illegal  pending    attempts=1
    """,
    "an attempt that reached nobody is given back, once, and its number is gone": """
       0  half     T                 -> applied  pending
       6  check    T 1.1   due       -> applied  pending    attempts=1
       7  returned T 1.1             -> applied  pending    attempts=0 next=6
       7  returned T 1.1             -> illegal  pending    attempts=0
       8  check    T 1.1   due       -> illegal  pending    attempts=0
       8  check    T 1.2   due       -> applied  pending    attempts=1
       9  returned T 1.1             -> illegal  pending    attempts=1
    """,
    "not yet: asked again after that time, no attempt used": """
       0  half     T                 -> applied  pending
       6  check    T 1.1   due       -> applied  pending    attempts=1
       7  later    T 1.1   later=100 -> applied  pending    attempts=0 next=107
      40  tick     T                 -> wait
     106  check    T 1.2   due       -> illegal  pending
     107  check    T 1.2   due       -> applied  pending    attempts=1 next=137
     108  later    T 1.2   later=9e9 -> applied  pending    attempts=0 next=3708
     108  later    T 1.2   later=5   -> illegal  pending    next=3708
    """,
    "asked: pulled forward, a second apart, never the last": """
       0  half     T       max=3     -> applied  pending
       1  check    T 1.1   asked     -> applied  pending    attempts=1 next=31
     1.9  check    T 1.2   asked     -> illegal  pending    attempts=1
       2  check    T 1.2   asked     -> applied  pending    attempts=2 next=32
      31  check    T 1.3   asked     -> illegal  pending    attempts=2
      32  check    T 1.3   due       -> applied  pending    attempts=3 park=37
    """,
    "asked goes before a deliberate not yet": """
       0  half     T                 -> applied  pending
       6  check    T 1.1   due       -> applied  pending
       7  later    T 1.1   later=600 -> applied  pending    next=607
      10  check    T 1.2   asked     -> applied  pending    attempts=1 next=40
    """,
    "revived: a new round of attempts": """
       0  half     T       max=1     -> applied  pending
       6  check    T 1.1   due       -> applied  pending    park=11
      11  park     T 2               -> illegal  pending
      11  park     T 1               -> applied  parked
      20  revive   T 2               -> illegal  parked
      20  revive   T 1               -> applied  pending    attempts=0 next=26
      21  revive   T 2               -> illegal  pending
      26  check    T 1.2   due       -> illegal  pending
      26  check    T 2.1   due       -> applied  pending    attempts=1 park=31
      27  returned T 1.1             -> illegal  pending    attempts=1
      31  park     T 1               -> illegal  pending
      31  park     T 2               -> applied  parked
    """,
    "commit after park": """
       0  half     T       max=1     -> applied  pending
       6  check    T 1.1   due       -> applied  pending
      11  park     T 1               -> applied  parked
    9999  commit   T                 -> applied  committed  decided=9999
    9999  revive   T 1               -> illegal  committed
    """,
    "rollback after park": """
       0  half     T       max=1     -> applied  pending
       6  check    T 1.1   due       -> applied  pending
      11  park     T 1               -> applied  parked
      12  rollback T                 -> applied  rolled_back
      13  commit   T                 -> conflict rolled_back decided=12
    """,
    "the first decision wins for ever": """
       0  half     T                 -> applied  pending
       1  commit   T                 -> applied  committed  decided=1
       2  commit   T                 -> repeated committed  decided=1
       3  rollback T                 -> conflict committed  decided=1
       6  check    T 1.1   due       -> illegal  committed  attempts=0
       6  tick     T                 -> never
    """,
    "commit after rollback": """
       0  half     T                 -> applied  pending
       1  rollback T                 -> applied  rolled_back
       2  commit   T                 -> conflict rolled_back
       3  rollback T                 -> repeated rolled_back decided=1
    """,
    "an answer in flight arrives after a decision": """
       0  half     T                 -> applied  pending
       6  check    T 1.1   due       -> applied  pending
       7  rollback T                 -> applied  rolled_back
       8  returned T 1.1             -> illegal  rolled_back
       8  later    T 1.1   later=9   -> illegal  rolled_back
    """,
    "marker before half": """
       1  commit   T                 -> waiting  -
       1  half     T                 -> applied  committed  decided=1
       2  rollback T                 -> conflict committed  decided=1
    """,
    "markers before half are applied in their order": """
       1  rollback T                 -> waiting  -
       1  commit   T                 -> waiting  -
       1  half     T                 -> applied  rolled_back
    """,
    "another group decides nothing": """
       0  half     T                 -> applied  pending
       1  commit   T       group=x   -> illegal  pending
       2  commit   T       group=g   -> applied  committed  decided=2
       3  rollback T       group=x   -> illegal  committed
    """,
    "the same prepare again is one transaction, another content is not": """
       0  half     T                 -> applied  pending
       1  half     T                 -> repeated pending    next=6
       2  half     T       value=w   -> conflict pending    next=6
       3  commit   T                 -> applied  committed
       4  half     T                 -> repeated committed
    """,
    "a prepare far from its id's time is void": """
       0  half     T                 -> applied  pending
     121  half     U                 -> expired  -
     121  commit   U                 -> illegal  -
     121  half     T                 -> repeated pending
    """,
    "a client's own key holds for the window, after any outcome": """
       0  half     T       dedup=d   -> applied  pending
       1  half     U       dedup=d   -> repeated -
       2  rollback T                 -> applied  rolled_back
     119  half     V       dedup=d   -> repeated -
     119  half     W       dedup=e   -> applied  pending
    """,
    "a foreign partition's transaction changes nothing": """
       0  half     F                 -> void     -
       0  commit   F                 -> void     -
    """,
    "replaced content: once, for the same topics, and another is a conflict": """
       0  half     T                 -> applied  pending
       1  contents T       topic=x   -> illegal  pending
       2  contents T       value=w   -> applied  committed  decided=2
       3  contents T       value=w   -> repeated committed  decided=2
       4  contents T       value=v   -> conflict committed  decided=2
       5  commit   T                 -> repeated committed  decided=2
    """,
    "replaced content that is the prepared one is no other": """
       0  half     T                 -> applied  pending
       1  commit   T                 -> applied  committed
       2  contents T       value=v   -> repeated committed
       3  contents T       value=w   -> conflict committed
    """,
    "the log clock never goes back": """
      10  half     T                 -> applied  pending    next=16
      16  commit   U                 -> waiting  -
      12  check    T 1.1   due       -> applied  pending    next=46
    """,
}
IDS = {name: id_of(number) for number, name in enumerate("TUVW")} | {
    "F": id_of(9, START_MS, partition=4)
}


class Play:
    """One scenario: its logs and the ledger that reads them as they are written."""

    def __init__(self) -> None:
        self.logs = Logs()
        self.ledger = new_ledger()

    def run(self, line: str) -> None:
        """Play one line and compare."""
        left, right = (side.split() for side in line.split("->"))
        at_s, what, name, *said = left
        at_ms = START_MS + round(float(at_s) * 1000)
        transaction = self.ledger.index.get(IDS[name])
        if what == "tick":
            assert transaction is not None
            assert self.tick(transaction, at_ms) == right[0], line
            return
        outcome = self.write(what, IDS[name], said, at_ms)
        transaction = self.ledger.index.get(IDS[name])
        state = "-" if transaction is None else transaction.state
        assert [outcome.effect, state] == right[:2], f"{line.strip()}: {outcome.why}"
        for fact in right[2:]:
            key, _, value = fact.partition("=")
            assert transaction is not None
            assert FACTS[key](transaction) == float(value), line

    def tick(self, transaction: Transaction, now_ms: int) -> str:
        """Say what is due."""
        due = due_ms(transaction)
        if due is None:
            return "never"
        if now_ms < due:
            return "wait"
        return "check" if transaction.park_ms() is None else "park"

    def write(self, what: str, id: str, said: list[str], at_ms: int) -> ApplyResult:
        """Append one record or batch, and let the ledger read it."""
        options = dict(word.split("=") for word in said if "=" in word)
        words = [word for word in said if "=" not in word]
        content = message(options.get("value", "v"), options.get("topic", "t"))
        policy = CheckPolicy(attempts_max=int(options.get("max", 15)))
        half = half_of(id, content, dedup_key=options.get("dedup"), policy=policy)
        if what == "half":
            self.logs.prepare(half, at_ms)
        elif what == "contents":
            self.logs.commit_with(half, [content], at_ms)
        else:
            round_, _, number = (words.pop(0) if words else "0").partition(".")
            fields = {"round": int(round_), "number": int(number or 0)}
            reason = words[0] if words else ""
            group, later_s = options.get("group", ""), float(options.get("later", 0))
            self.logs.mark(
                marker_of(what, id, reason=reason, group=group, later_s=later_s, **fields), at_ms
            )
        return read_on(self.ledger, self.logs)


def read_on(ledger: Ledger, logs: Logs) -> ApplyResult:
    """Let the ledger read what is new and return the last outcome."""
    outcomes = [ledger.apply_half(r) for r in logs.half.records[ledger.half_position :]]
    outcomes += [ledger.apply_op(r) for r in logs.op.records[ledger.op_position :]]
    return outcomes[-1]


def seconds(ms: int | None) -> float | None:
    return None if ms is None else (ms - START_MS) / 1000


FACTS: dict[str, Callable[[Transaction], float | None]] = {
    "attempts": lambda t: len(t.checks.counted_ms),
    "next": lambda t: seconds(t.next_check_ms()),
    "park": lambda t: seconds(t.park_ms()),
    "decided": lambda t: seconds(t.verdict.at_ms),
}


@pytest.mark.rule(21, 22)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    play = Play()
    lines = [line for line in SCENARIOS[name].splitlines() if line.strip()]
    for line in lines:
        play.run(line)
    assert len(play.logs.half.records) + len(play.logs.op.records) > 0


def test_a_clients_own_key_is_free_after_the_window() -> None:
    logs, ledger = Logs(), new_ledger()
    late_ms = START_MS + WINDOW_MS + 1
    logs.prepare(half_of(id_of(1), dedup_key="d"), START_MS)
    logs.prepare(half_of(id_of(2, late_ms), dedup_key="d"), late_ms)
    read_on(ledger, logs)
    held = ledger.index.by_dedup_key("g", "d")
    assert held is not None
    assert held.id == id_of(2, late_ms)
    first = ledger.index.get(id_of(1))
    assert first is not None
    assert first.state is State.PENDING
