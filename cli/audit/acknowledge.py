"""Acknowledges findings of audits until a date, in the journal."""

import difflib
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import click
import msgspec

from txbroker.cli.client import who
from txbroker.cli.output import TableColumn, clock, printable, show_rows
from txbroker.cli.run import CommandFailed
from txbroker.core.routing import parse_id
from txbroker.spark.journal import Journal
from txbroker.spark.judge.kinds import ALL_KINDS
from txbroker.spark.schema import Acknowledgement

WHY_MAX = 500
_KINDS = tuple(kind.name for kind in ALL_KINDS)
_PLACE = re.compile(r"[a-zA-Z0-9._-]{1,249}-[0-9]{1,10}@[0-9]{1,19}")
_COLUMNS = (
    TableColumn("ID", keep=True),
    TableColumn("GROUP", lambda row: row["grp"], keep=True),
    TableColumn("KIND", keep=True),
    TableColumn("UNTIL", lambda row: clock(row["until_ms"])),
    TableColumn("OVER", lambda row: "yes" if row["until_ms"] <= time.time() * 1000 else ""),
    TableColumn("BY"),
    TableColumn("WHY", text=True),
)


def show(journal: Journal, what: Sequence[str], asked: Mapping[str, Any], output: str) -> None:
    """Write all acknowledgements to stdout, those that end first at the top."""
    if what or any(asked.values()):
        raise click.UsageError("--list takes no ID, no KIND and no other option")
    rows = [msgspec.to_builtins(one) for one in journal.acknowledged()]
    show_rows(rows, _COLUMNS, output, f"There is no acknowledgement in {journal.path}.")


def change(
    journal: Journal,
    what: Sequence[str],
    *,
    group: str | None,
    until: str | None,
    why: str | None,
    by: str | None,
    remove: bool,
) -> None:
    """Store or remove acknowledgements; see `txbroker audit ack --help`."""
    id, kinds = ("", what) if group else (_first_id(what), what[1:])
    _check_kinds(kinds)
    subject = f"group {group}" if group else id
    if remove:
        if until or why or by:
            raise click.UsageError("--remove takes no --until, no --why and no --by")
        if not journal.withdraw(id, group or "", kinds):
            raise CommandFailed(
                f"{printable(subject)} has no such acknowledgement in {journal.path}: "
                "`txbroker audit ack --list` lists all"
            )
        click.echo(f"Removed for {printable(subject)}; the next run counts it again.", err=True)
        return
    if not kinds:
        raise click.UsageError(f"name the kinds of findings, some of {', '.join(_KINDS)}")
    if not until or not (why or "").strip():
        raise click.UsageError("--until DATE and --why TEXT are needed")
    now_ms, until_ms = round(time.time() * 1000), _end_ms(until)
    if until_ms <= now_ms:
        raise click.UsageError(f"--until {until} is over: name a later day")
    given = {"by": by or who(), "why": (why or "").strip()[:WHY_MAX]}
    journal.acknowledge(
        Acknowledgement(id=id, grp=group or "", kind=kind, at_ms=now_ms, until_ms=until_ms, **given)
        for kind in kinds
    )
    click.echo(
        f"Acknowledged for {printable(subject)} until {clock(until_ms)}: {', '.join(kinds)}. "
        "It counts from the next run on.",
        err=True,
    )
    unseen = [] if group else sorted(set(kinds) - journal.shown_findings(id))
    if unseen:
        click.echo(
            f"No example of a run in {journal.path} shows {', '.join(unseen)} of {id}; the journal "
            "has a few examples of each kind only.",
            err=True,
        )


def _first_id(what: Sequence[str]) -> str:
    if not what:
        raise click.UsageError("name an ID and kinds of findings, or --group NAME and kinds")
    return finding_id(what[0])


def finding_id(id: str) -> str:
    """Return the argument of a command, if it can be the id of a finding."""
    if not _PLACE.fullmatch(id):
        try:
            parse_id(id)
        except ValueError as error:
            raise click.UsageError(
                f"{printable(id)[:80]!r} is no transaction id ({printable(str(error))[:120]}), nor "
                "a position TOPIC-PARTITION@OFFSET"
            ) from None
    return id


def _check_kinds(kinds: Sequence[str]) -> None:
    for kind in kinds:
        if kind not in _KINDS:
            near = difflib.get_close_matches(kind, _KINDS, 1)
            known = f"did you mean {near[0]}?" if near else f"the kinds are {', '.join(_KINDS)}"
            raise click.UsageError(f"there is no kind of finding {printable(kind)[:80]!r}: {known}")


def _end_ms(until: str) -> int:
    """Return the end of a day, or a time; milliseconds since 1970."""
    try:
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", until, re.ASCII):
            end = datetime.combine(date.fromisoformat(until), datetime.min.time(), UTC)
            return round((end + timedelta(days=1)).timestamp() * 1000)
        moment = datetime.fromisoformat(until)
        zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return round(zoned.timestamp() * 1000)
    except (ValueError, OverflowError):
        raise click.UsageError(
            f"--until {printable(until)[:40]!r} is no date: give one such as 2026-01-31, or a time "
            "such as 2026-01-31T18:00"
        ) from None
