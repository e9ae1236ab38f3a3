"""`txbroker top`: the state of an installation, refreshed."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import click
from msgspec import Struct

from txbroker.cli.client import ApiClient, ApiError, client_options
from txbroker.cli.options import SectionedCommand
from txbroker.cli.output import (
    Row,
    TableColumn,
    clock,
    duration,
    json_text,
    object_output_option,
    printable,
    show_data,
    shown_columns,
    since,
    table,
    width_of,
)
from txbroker.cli.run import is_utf8
from txbroker.cli.watching import EVERY_MIN_S, EVERY_S, draw_again, draws, write_again
from txbroker.contract.service import (
    GroupOverview,
    History,
    Overview,
    PartitionOverview,
    ProxyOverview,
    Rates,
)
from txbroker.diagnosis.table import problems_of

GROUPS_SHOWN = 15
PAST_S = (900, 300)
"""What sparklines show, seconds: the second if the proxies have run no longer."""
BARS = ("▁▂▃▄▅▆▇█", "_.:-=+*#")
"""The heights of a sparkline, and those of a terminal without UTF-8."""
BARS_MAX = 30


def _age(row: GroupOverview | PartitionOverview) -> str:
    age_s = row.oldest_pending_age_s
    return "" if age_s is None else duration(age_s)


def _rate(row: PartitionOverview, rate: Callable[[Rates], float]) -> str:
    return _shown_rate(rate(row.rates)) if _current(row) else ""


def _shown_rate(rate: float) -> str:
    return f"{rate:,.1f}" if 0 < rate < 10 else f"{rate:,.0f}"


def _current(row: PartitionOverview) -> bool:
    """Return whether the counts of a half partition are those of now."""
    return row.pending is not None and row.as_of_ms is None


def _count(name: str, rank: int = 1, *, partial: bool = False) -> TableColumn:
    return TableColumn(name.upper(), lambda row: _least(getattr(row, name), partial), rank=rank)


def _least(value: int | None, partial: bool) -> str:
    """Return a count; with `partial`, when other parts of it are unknown, as a lower bound."""
    if value is None or (partial and not value):
        return ""
    return f"{value:,}+" if partial else f"{value:,}"


def _as_of(row: Any) -> str:
    return clock(getattr(row, "as_of_ms", None))[11:19]


def _connected(row: GroupOverview) -> str:
    return "URL" if not row.sessions and row.check_url else str(row.sessions)


def _trouble(row: GroupOverview) -> str:
    """Return why a group is unreachable, and the last answer if its checks fail."""
    trouble = []
    if row.unreachable_since_ms is not None:
        since_text = since(row.unreachable_since_ms)
        trouble.append(f"unreachable for {since_text}: {row.unreachable_why}")
    counts, last = row.checks.counts, row.checks.undecided
    if counts.failing:
        answer = "" if last is None else last.answer
        trouble.append(f"{counts.undecided:,} checks bring no decision: {answer}")
    return "; ".join(trouble)


def _groups(partial: bool) -> tuple[TableColumn, ...]:
    return (
        TableColumn("GROUP", keep=True),
        TableColumn("AS OF", _as_of, rank=0),
        _count("pending", partial=partial),
        _count("parked", partial=partial),
        TableColumn("OLDEST", _age, rank=1),
        TableColumn("CONNECTED", _connected),
        TableColumn("TROUBLE", _trouble, text=True),
    )


PARTITIONS = (
    TableColumn("HALF", lambda row: row.partition, keep=True),
    TableColumn("OWNER", lambda row: row.owner.partition("://")[2], rank=3),
    TableColumn("STATE", rank=0),
    TableColumn("AS OF", _as_of, rank=0),
    _count("pending"),
    _count("parked"),
    _count("refused", rank=2),
    _count("committed", rank=3),
    TableColumn("OLDEST", _age, rank=1),
    TableColumn("PREP/S", lambda row: _rate(row, lambda rates: rates.prepared_per_s)),
    TableColumn("DEC/S", lambda row: _rate(row, lambda rates: rates.decided_per_s), wide=True),
    TableColumn("PROM/S", lambda row: _rate(row, lambda rates: rates.promoted_per_s)),
    TableColumn("WHY", text=True),
)
PROXIES = (
    TableColumn("PROXY", lambda row: row.url, keep=True),
    TableColumn("STATE", lambda row: _proxy_state(row), rank=1),
    TableColumn("VERSION", rank=4),
    TableColumn("PARTITIONS", lambda row: len(row.partitions), rank=3),
    TableColumn("PROBLEMS", lambda row: "; ".join(row.problems) or row.why, text=True),
)


class Look(NamedTuple):
    """An installation at one moment, and its past of `span_s` seconds, if that is known."""

    overview: Overview
    past: History | None
    span_s: int


@click.command("top", cls=SectionedCommand)
@click.option("--once", is_flag=True, help="Show the state once.")
@click.option(
    "--every-s",
    type=click.FloatRange(min=EVERY_MIN_S),
    default=EVERY_S,
    metavar="SECONDS",
    help=f"Interval. [default: {EVERY_S:g}]",
)
@object_output_option
@client_options
def command(client: ApiClient, output: str, once: bool, every_s: float) -> None:
    """Show the state of an installation, refreshed until Ctrl-C.

    Shows rates over the last ten seconds; the names of the alerts whose reason is there; the last
    quarter of an hour as sparklines; groups, those that need an operator first; half partitions
    with their owners; proxies. Without a terminal the output is appended; with -o json it is one
    line each time, without sparklines.
    """

    def look() -> Look:
        return Look(client.read(Overview, "overview"), *_past(client))

    def lines(found: Look) -> list[str]:
        return list(_lines(found, str(client), output == "wide"))

    if output in ("json", "yaml"):
        _show_data(lambda: dict(client.get("overview")), output, once, every_s)
    elif once:
        click.echo("\n".join(lines(look())))
    elif draws(output):
        draw_again(look, lines, every_s)
    else:
        write_again(look, lambda found: _write("\n".join([*lines(found), ""])), every_s)


def _show_data(query: Callable[[], Row], output: str, once: bool, every_s: float) -> None:
    def write(overview: Row) -> None:
        if output == "json":
            _write(json_text(overview))
        else:
            _write("---")
            show_data(overview, output)

    if once:
        show_data(query(), output)
    else:
        write_again(query, write, every_s)


def _write(text: str) -> None:
    click.echo(text)
    sys.stdout.flush()


def _lines(found: Look, where: str, wide: bool) -> Iterator[str]:
    overview, width = found.overview, width_of(sys.stdout)
    partitions, proxies, partial = overview.partitions, overview.proxies, overview.partial
    yield f"txbroker at {printable(where)}, {_of(proxies)} ready"
    for proxy in proxies:
        if proxy.kafka_silent_since_ms is not None:
            whom = "this proxy" if len(proxies) == 1 else proxy.url
            at, why = clock(proxy.kafka_silent_since_ms)[11:19], proxy.kafka_why
            yield f"Kafka has not answered {printable(whom)} since {at} UTC" + (
                f": {printable(why)}" if why else ""
            )
    counts = [
        f"{name} {_sum([getattr(row, name) for row in partitions], partial)}"
        for name in ("pending", "parked", "refused", "committed")
    ]
    as_of = [] if overview.as_of_ms is None else [f"as of {clock(overview.as_of_ms)[11:19]} UTC"]
    yield from _packed("now     ", [*counts, _oldest(partitions), *as_of], width)
    rates = [
        f"{what} {_sum_of_rates(partitions, what)}" for what in ("prepared", "decided", "promoted")
    ]
    yield from _packed("rates   ", rates, width)
    yield from _sparklines(found, width)
    if overview.refused_topics:
        shown = [f"by {printable(name)} {n:,}" for name, n in overview.refused_topics.items()]
        yield from _packed("refused ", shown, width)
    trouble = list(dict.fromkeys(words for words, _group in problems_of(overview)))
    if trouble:
        yield from _packed("trouble ", trouble, width)
    yield ""
    shown_groups = overview.groups if wide else overview.groups[:GROUPS_SHOWN]
    left_out: dict[str, None] = {}
    tables: tuple[tuple[Sequence[Struct], Sequence[TableColumn]], ...] = (
        (shown_groups, _groups(partial)),
        (partitions, PARTITIONS),
        (proxies, PROXIES),
    )
    for rows, columns in tables:
        fitting = [one for one in columns if one.title != "AS OF" or any(map(_as_of, rows))]
        named = shown_columns(fitting, "wide" if wide else "table")
        fitted = table(rows, named, sys.stdout, fit=not wide)
        left_out |= dict.fromkeys(fitted.left_out)
        yield from fitted.lines
        left = len(overview.groups) - len(shown_groups) + overview.groups_left_off
        if rows is shown_groups and left:
            yield f"… and {left:,} more groups"
        if rows:
            yield ""
    if left_out:
        yield f"Left out on this narrow terminal: {', '.join(left_out)}. -o wide shows them."


def _packed(head: str, parts: Sequence[str], width: int) -> Iterator[str]:
    """Yield lines of at most `width` with these parts, the first after `head`."""
    line = head
    for part in filter(None, parts):
        if len(line) > len(head) and len(line) + len(part) > width:
            yield line.rstrip()
            line = " " * len(head)
        line += part + "  "
    yield line.rstrip()


# --- the last quarter of an hour -----------------------------------------------------------------


def _past(client: ApiClient) -> tuple[History | None, int]:
    """Return the history and its seconds; None if the proxy has none, as an older one."""
    try:
        past = client.read(History, "history", since_s=PAST_S[0])
        points = past.points
        if points and points[-1].at_ms - points[0].at_ms >= PAST_S[1] * 1000:
            return past, PAST_S[0]
        return client.read(History, "history", since_s=PAST_S[1]), PAST_S[1]
    except ApiError:
        return None, 0


def _sparklines(found: Look, width: int) -> Iterator[str]:
    past, span_s = found.past, found.span_s
    if past is None or not past.points:
        return
    points, step_s = past.points, past.step_s
    yield f"the last {span_s // 60} minutes"
    promoted = [p.promoted / step_s or (None if p.pending is None else 0.0) for p in points]
    oldest = [None if p.pending is None else p.oldest_pending_age_s or 0.0 for p in points]
    rows: list[tuple[str, list[float | None], Callable[[float], str]]] = [
        ("promoted", promoted, lambda v: f"{_shown_rate(v)}/s"),
        ("pending", [p.pending for p in points], lambda v: f"{v:,.0f}"),
        ("oldest", oldest, duration),
        ("failing", [p.checks.undecided / step_s for p in points], lambda v: f"{_shown_rate(v)}/s"),
    ]
    slots = min(BARS_MAX, max(5, width - 40))
    for name, values, shown in rows:
        known = [value for value in values if value is not None]
        if not known or (name == "failing" and not any(known)):
            continue
        placed = _placed([p.at_ms for p in points], values, slots, span_s)
        # The present values are above: the newest step here may be seconds older.
        yield f"{name:<8}  {_bars(placed)}  at most {shown(max(known))}"


def _placed(
    times: list[int], values: list[float | None], slots: int, span_s: int
) -> list[float | None]:
    """Return the greatest value of each part of the time, None where nothing is known."""
    placed: list[float | None] = [None] * slots
    part_ms = span_s * 1000 / slots
    for at_ms, value in zip(times, values, strict=True):
        number = slots - 1 - int((times[-1] - at_ms) / part_ms)
        if number >= 0 and value is not None:
            placed[number] = max(value, placed[number] or 0.0)
    return placed


def _bars(values: list[float | None]) -> str:
    bars = BARS[0] if is_utf8(sys.stdout) else BARS[1]
    most = max((value for value in values if value is not None), default=0.0) or 1.0
    last = len(bars) - 1
    return "".join(" " if value is None else bars[round(value / most * last)] for value in values)


def _sum(counts: Sequence[int | None], partial: bool) -> str:
    known = [count for count in counts if count is not None]
    total = sum(known) if known else None
    if total is None or (partial and not total):
        return "-"
    return f"at least {total:,}" if partial else f"{total:,}"


def _sum_of_rates(partitions: Sequence[PartitionOverview], what: str) -> str:
    """Return the rate of the half partitions whose present is known."""
    rates = [getattr(row.rates, f"{what}_per_s") for row in partitions if _current(row)]
    if not rates or (len(rates) < len(partitions) and not sum(rates)):
        return "-"
    return ("at least " if len(rates) < len(partitions) else "") + f"{sum(rates):,.1f}/s"


def _of(proxies: Sequence[ProxyOverview]) -> str:
    ready = sum(proxy.ready for proxy in proxies)
    return f"{ready} of {len(proxies)} {'proxy' if len(proxies) == 1 else 'proxies'}"


def _oldest(partitions: Sequence[PartitionOverview]) -> str:
    ages = [row.oldest_pending_age_s for row in partitions if row.oldest_pending_age_s]
    return f"oldest pending {duration(max(ages))}" if ages else ""


def _proxy_state(row: ProxyOverview) -> str:
    if not row.reached:
        return "no answer"
    return "ready" if row.ready else "not ready"
