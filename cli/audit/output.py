"""The output of `txbroker audit`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec

from txbroker.cli.output import Row, TableColumn, clock, duration, printable, show_data, show_rows
from txbroker.spark.checks import failed_of, limit_in_words, value_in_words
from txbroker.spark.judge.kinds import ALL_KINDS, Kind
from txbroker.spark.schema import Acknowledgement, CheckResult, Example, RunSummary

STATES = {
    "settled": "visible as committed, or rolled back and not visible",
    "promoted": "committed and visible",
    "rolled_back": "rolled back and not visible",
    "committed": "committed, and still within its time to become visible",
    "pending": "undecided",
    "parked": "undecided after the last attempt, kept whole",
    "refused": "committed, but its target does not accept it",
    "gone": "not known: retention or compaction removed its records",
    "void": "does not count: too far from its id's time, or its key belongs to another",
}
"""The meaning of the states, in the order of the output."""

_MEANINGS = {kind.name: kind.meaning for kind in ALL_KINDS}
EXAMPLES_SHOWN = 10
HELD_SHOWN = 5

RUNS = (
    TableColumn("RUN", keep=True),
    TableColumn("MODE"),
    TableColumn("STARTED", lambda row: clock(row["started_ms"])),
    TableColumn("TOOK", lambda row: duration(row["took_s"])),
    TableColumn("TRANSACTIONS"),
    TableColumn("PENDING", lambda row: row["states"].get("pending", 0), rank=1),
    TableColumn("DRIFT", lambda row: sum(row["drift"].values()), rank=1),
    TableColumn("KINDS", lambda row: ", ".join(row["drift"]), text=True),
    TableColumn("CARRIED", wide=True),
    TableColumn("QUARANTINED", wide=True),
    TableColumn("TAKEN", lambda row: sum(row["taken"].values()), wide=True),
)
ONE = (
    TableColumn("WHAT", keep=True),
    TableColumn("COUNT", keep=True),
    TableColumn("DRIFT", rank=1),
    TableColumn("MEANS", text=True),
)
EXAMPLES = (
    TableColumn("ID", keep=True),
    TableColumn("GROUP", lambda row: row["grp"]),
    TableColumn("FINDINGS", lambda row: ", ".join(row["findings"]), text=True),
    TableColumn("ACKNOWLEDGED", text=True),
    TableColumn("WHY", text=True),
)
CHECKS = (
    TableColumn("CHECK", keep=True),
    TableColumn("RESULT", keep=True),
    TableColumn("SEVERITY"),
    TableColumn("VALUE"),
    TableColumn("LIMIT"),
    TableColumn("OF", text=True),
)

SET_ASIDE = (
    TableColumn("TOPIC", keep=True),
    TableColumn("PARTITION", keep=True),
    TableColumn("OFFSET", keep=True),
    TableColumn("OURS", lambda row: "yes" if row["own"] else ""),
    TableColumn("WHY", text=True),
)
UNREAD = (
    TableColumn("TARGET NOT READABLE", lambda row: row["topic"], keep=True),
    TableColumn("WHY", text=True),
)
MISSING = (
    TableColumn("MISSING TARGET", lambda row: row["topic"], keep=True),
    TableColumn("COMMITTED", lambda row: row["transactions"]),
)


def show_runs(runs: Sequence[RunSummary], output: str, empty: str) -> None:
    """Write runs to stdout."""
    show_rows([as_row(run) for run in runs], RUNS, output, empty)


def show_run(
    run: RunSummary,
    output: str,
    acknowledged: Sequence[Acknowledgement] = (),
    *,
    heading: bool = False,
) -> None:
    """Write one run to stdout; as a table its counts and examples, after a `heading`.

    Args:
        acknowledged: marks the examples that they cover.
    """
    if output in ("json", "yaml"):
        show_data(as_row(run), output)
        return
    if heading:
        print(f"{clock(run.started_ms)}  {drift_in_words(run)}\n")
    show_rows(list(_counts(run)), ONE, output, "There was no transaction.")
    most = None if output == "wide" else EXAMPLES_SHOWN
    missing = [{"topic": topic, "transactions": n} for topic, n in run.missing_targets.items()]
    unread = [{"topic": topic, "why": why} for topic, why in run.unread_targets.items()]
    examples = [_example(example, acknowledged) for example in run.examples[:most]]
    parts = [
        ([_check(check) for check in run.checks], CHECKS),
        (examples, EXAMPLES),
        (missing, MISSING),
        (unread, UNREAD),
        (msgspec.to_builtins(run.set_aside[:most]), SET_ASIDE),
    ]
    show_parts(parts, output)


def show_parts(parts: Iterable[tuple[Sequence[Row], Sequence[TableColumn]]], output: str) -> None:
    """Write the tables that have rows to stdout, each after an empty line."""
    for rows, columns in parts:
        if rows:
            click.echo()
            show_rows(rows, columns, output, "")


def show_result(
    run: RunSummary,
    output: str,
    acknowledged: Sequence[Acknowledgement],
    unpublished: Sequence[RunSummary],
) -> None:
    """Write the result of a run that has just ended: the run to stdout, sentences to stderr."""
    show_run(run, output, acknowledged)
    for earlier in unpublished:
        click.echo(unpublished_in_words(earlier), err=True)
    click.echo(drift_in_words(run), err=True)


def as_row(run: RunSummary) -> dict[str, Any]:
    """Return a run as JSON data."""
    row: dict[str, Any] = msgspec.to_builtins(run)
    return row


def _counts(run: RunSummary) -> Iterator[Row]:
    known = [name for name in STATES if name in run.states]
    for name in (*known, *sorted(run.states.keys() - STATES.keys())):
        yield count_row(name, run.states[name], STATES.get(name, ""))
    for name, count in _by_gravity(run.drift, ALL_KINDS):
        left = run.open_drift.get(name, 0)
        drift = "yes" if left == count else f"{left:,}" if left else "acknowledged"
        yield count_row(name, count, _MEANINGS.get(name, ""), drift)
    for name, count in run.business.items():
        yield count_row(name, count, _MEANINGS.get(name, "business rows"))
    if run.quarantined:
        yield count_row("quarantined", run.quarantined, "unreadable records, set aside")
    for topic, count in run.taken.items():
        yield count_row("taken", count, f"offsets of {topic} that retention removed before any run")


def count_row(what: str, count: int, means: str, drift: str = "") -> Row:
    """Return a row of a table with the columns `ONE`."""
    return {"what": what, "count": count, "means": means, "drift": drift}


def _example(example: Example, acknowledged: Sequence[Acknowledgement]) -> Row:
    known = [
        f"{one.kind} until {clock(one.until_ms)} by {one.by}: {one.why}"
        for one in acknowledged
        if one.covers(example.id, example.grp) and one.kind in example.findings
    ]
    return {**msgspec.to_builtins(example), "acknowledged": "; ".join(known)}


def _check(check: CheckResult) -> Row:
    return {
        "check": check.name,
        "result": {True: "ok", False: "FAILED", None: "nothing to compare"}[check.ok],
        "severity": check.severity,
        "value": value_in_words(check),
        "limit": limit_in_words(check),
        "of": check.of,
    }


def _by_gravity(drift: Mapping[str, int], kinds: Sequence[Kind]) -> list[tuple[str, int]]:
    """Return the number of findings by kind, the gravest first, unknown kinds last."""
    order = {kind.name: place for place, kind in enumerate(kinds)}
    return sorted(drift.items(), key=lambda item: order.get(item[0], len(order)))


def drift_in_words(run: RunSummary) -> str:
    """Return a run's result in a few sentences."""
    pending = run.states.get("pending", 0)
    text = (
        f"Run {run.run} ({run.mode}): {run.transactions:,} transactions in "
        f"{duration(run.took_s)}, {pending:,} pending."
    )
    if run.taken:
        text += (
            f" Retention removed up to {sum(run.taken.values()):,} records before any run read "
            "them: audit more often, or raise the topics' retention."
        )
    text += _begun_later(run) + _held(run)
    if run.quarantined:
        text += f" {run.quarantined:,} records are unreadable and were set aside{_own(run)}."
    if run.missing_targets:
        named = ", ".join(map(printable, run.missing_targets))
        text += f" Targets that do not exist: {named}."
    if run.unread_targets:
        reasons = [f"{topic} ({why})" for topic, why in run.unread_targets.items()]
        text += f" Targets not readable: {', '.join(map(printable, reasons))}."
    if failed := failed_of(run):
        text += f" Failed checks: {'; '.join(map(_failed, failed))}."
    if run.acknowledged:
        text += f" Acknowledged findings: {kinds_in_words(run.acknowledged)}."
    still_open = _still_open(run)
    text += still_open
    if not run.open_drift:
        which = "other " if run.acknowledged else "new " if still_open else ""
        return f"{text} No {which}drift."
    return f"{text} Drift! {kinds_in_words(run.open_drift)}."


def _still_open(run: RunSummary) -> str:
    """Return the open findings in the tables that this run has not found again."""
    left = {kind: n - run.drift.get(kind, 0) for kind, n in run.open_findings.items()}
    earlier = {kind: number for kind, number in left.items() if number > 0}
    if not earlier:
        return ""
    return (
        f" Findings of earlier runs that are still open: {kinds_in_words(earlier)}. This run did "
        "not judge their transactions again."
    )


def _failed(check: CheckResult) -> str:
    of = f" of {printable(check.of)}" if check.of else ""
    value, limit = value_in_words(check), limit_in_words(check)
    return f"{check.name} ({check.severity}), {value}{of}, {limit}"


def _own(run: RunSummary) -> str:
    """Return how many unreadable records are txbroker's."""
    own = run.drift.get("unreadable", 0)
    return f", {own:,} of them ours" if own else ""


def _begun_later(run: RunSummary) -> str:
    """Return which part of the topics a full run could not read."""
    if run.mode != "full" or run.cut is None:
        return ""
    cut = run.cut
    reads = (cut.half, cut.op, cut.parked, *cut.targets)
    begun_later = sum(any(read.starts) for read in reads)
    if not begun_later:
        return ""
    return (
        f" Retention had removed the beginning of {begun_later:,} of {len(reads):,} topics, "
        "which was not judged."
    )


def _held(run: RunSummary) -> str:
    """Return the target partitions that end in an open transaction."""
    held = () if run.cut is None else run.cut.held
    if not held:
        return ""
    named = ", ".join(map(printable, held[:HELD_SHOWN])) + (", …" if held[HELD_SHOWN:] else "")
    ended = "1 partition of a target ends" if len(held) == 1 else f"{len(held):,} partitions end"
    return (
        f" {ended} in an open transaction, of another producer or a hanging one ({named}): "
        "consumers see no record after it, and a missing record there is `late`, never `lost`."
    )


def unpublished_in_words(run: RunSummary) -> str:
    """Return the drift of an earlier run that was not published then."""
    kinds = kinds_in_words(run.open_drift)
    return f"Run {run.run} ({run.mode}) had not been published to the proxies: Drift! {kinds}."


def kinds_in_words(drift: Mapping[str, int], kinds: Sequence[Kind] = ALL_KINDS) -> str:
    """Return the number of findings of each kind of drift, the gravest first."""
    titles = {kind.name: kind.title for kind in kinds}
    return ", ".join(
        printable(f"{titles.get(name, name)}: {count:,}")
        for name, count in _by_gravity(drift, kinds)
    )
