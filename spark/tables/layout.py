"""The tables that audits keep below their output folder, for a data team's own queries.

Rows are keyed, and a later run replaces a row by one with the same keys. So a run that is repeated
leaves each row once. Times are timestamps in UTC, by the brokers' clocks; columns that end in `_ms`
are durations in milliseconds. `day` partitions every table and never changes in a row: the date of
the time in a transaction's id, of an attempt, of a finding's first opening, of the minute, or of a
run's now.

Columns keep their names, types and meanings. A newer version may add columns at the end, which are
null in rows of earlier versions; anything else raises `TABLES_VERSION`.
"""

from typing import NamedTuple

TABLES_VERSION = 1
"""Version of all tables of an output folder, in its `tables.json`."""

_LATENCY = (
    "struct<count: bigint, p50_ms: double, p95_ms: double, p99_ms: double, "
    "sketch: map<int, bigint>>"
)


class Table(NamedTuple):
    """A table.

    Attributes:
        name: its folder, and its name in SQL.
        ddl: the columns, as Spark DDL.
        keys: the columns that identify a row within an installation.
    """

    name: str
    ddl: str
    keys: tuple[str, ...]


TRANSACTIONS = Table(
    "transactions",
    """
    day date, installation string, id string, grp string, topics array<string>, messages int,
    state string, verdict string, findings array<string>, why string,
    decision string, source string, attempts int,
    prepared_at timestamp, decided_at timestamp, visible_at timestamp, visible_estimated boolean,
    observed_at timestamp, decide_ms bigint, visible_ms bigint,
    half_partition int, half_offset bigint, op_offset bigint,
    places array<struct<topic: string, partition: int, offset: bigint, seq: int>>,
    run string
    """,
    ("id",),
)
"""One row for each transaction that no later record changes without a fault.

`source`: who decided. `attempts`: check-backs of the last round, without returned ones.
`visible_at`: append time of the last message to become visible. Targets with the users' timestamps
do not show it: there it is an estimate, the append time of the deciding marker, and
`visible_estimated` is true. `observed_at`: the begin of the run that found the transaction so.
`decide_ms`: prepare to decision; `visible_ms`: prepare to visible. `run`: the run that judged it.
"""

ATTEMPTS = Table(
    "attempts",
    """
    day date, installation string, id string, grp string, round int, number int,
    at timestamp, reason string, outcome string, partition int, offset bigint, run string
    """,
    ("id", "partition", "offset"),
)
"""One row for each check-back of a transaction that `transactions` holds.

`reason`: `due` or `asked`. `outcome`: `returned` (no instance took it), `later` ("not yet"),
`decided` (the next decision was a checker's), `parked`, or `none`. `partition`, `offset`: of the
check marker in the operation topic.
"""

DRIFT = Table(
    "drift",
    """
    day date, installation string, id string, kind string, severity string, grp string,
    topic string, partition int, offset bigint, why string, state string,
    opened_at timestamp, opened_run string, seen_at timestamp, seen_run string, times bigint,
    closed_at timestamp, closed_run string,
    acknowledged_at timestamp, acknowledged_by string, acknowledged_why string,
    acknowledged_until timestamp, acknowledged_run string
    """,
    ("id", "kind"),
)
"""One row for each finding.

`id`: the transaction; of an unreadable record its position, `TOPIC-PARTITION@OFFSET`. `topic`,
`partition`, `offset`: where the evidence is: the first visible message, else the deciding marker,
else the half message. `state`: `open`, `healed` (judged again, and the fault is gone) or `expired`
(the topics no longer hold the evidence). `times`: number of runs that found it. A finding that
opens again keeps `opened_at` of the first time.
"""

RUNS = Table(
    "runs",
    """
    day date, installation string, run string, mode string, version string,
    began_at timestamp, started_at timestamp, took_s double, transactions bigint,
    states map<string, bigint>, drift map<string, bigint>, records map<string, bigint>,
    carried bigint, quarantined bigint, taken bigint,
    checks array<struct<name: string, severity: string, value: double, limit: double, ok: boolean>>,
    cost map<string, bigint>
    """,
    ("run",),
)
"""One row for each run.

`began_at`: the run's now, by the brokers' clocks; `started_at`: by the auditing machine's.
`version`: of txbroker. `drift`: number of findings of each kind in this run. `checks`: the
thresholds. `cost`: counts of Spark: `shuffle_bytes`, `spill_bytes`, `input_bytes`, `cpu_ms`,
`tasks`, `jobs`; none over Spark Connect.
"""

LATENCY = Table(
    "latency",
    f"""
    day date, installation string, minute timestamp, grp string, topic string,
    transactions bigint, estimated bigint, undecided bigint, parked bigint,
    decide {_LATENCY}, visible {_LATENCY}
    """,
    ("minute", "grp", "topic"),
)
"""One row for each minute of prepares, group and target topic; a transaction with several topics
counts in each.

`transactions`: those that `transactions` holds. `estimated`: how many of them have an estimated
`visible_at`, which `visible` leaves out. `undecided`, `parked`: those that were neither decided
nor parked, or parked, in the newest run. `decide`, `visible`: prepare to decision, and prepare to
visible. A sketch counts values by bucket `i`, from 1.02^(i-1) to 1.02^i ms (bucket 0: up to 1 ms).
Sketches merge by adding up their counts; percentiles are exact to 1 % (DDSketch: Masson, Rim and
Lee, VLDB 2019).
"""

TABLES = (TRANSACTIONS, ATTEMPTS, DRIFT, RUNS, LATENCY)
"""Every table."""
