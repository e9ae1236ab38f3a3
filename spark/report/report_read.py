"""The end of the audit's report: what was read, what was not, and by which terms it was judged."""

from collections.abc import Iterator

from txbroker.spark.report.figures import count, duration, moment, plural
from txbroker.spark.report.html import Child, Html, join, table, tag
from txbroker.spark.schema import RunSummary, SnapshotBounds, TopicRead

PARTITIONS_SHOWN = 200
TOPICS_SHOWN = 100

_READ = {
    "half": "half messages",
    "op": "markers",
    "visible": "visible messages",
    "parked": "parked copies",
}
_SCOPES = {
    "full": "A full run: everything that the topics still hold.",
    "incremental": "An incremental run: what came since the run before it, and what that one found "
    "not finished.",
    "stream": "A stream: everything since it began, judged as it comes.",
}


def what_was_read(summary: RunSummary) -> Html:
    """Return the section on what was read of which topics."""
    kinds = ", ".join(
        f"{count(number)} {_READ.get(kind, kind)}" for kind, number in summary.records.items()
    )
    aside = (
        f"{plural(summary.quarantined, 'record', 'records')} did not read and "
        f"{'was' if summary.quarantined == 1 else 'were'} set aside."
        if summary.quarantined
        else "Every record could be read."
    )
    return tag(
        "section",
        tag("h2", "What was read"),
        tag("p", f"Read were {kinds}. {aside}" if kinds else aside, class_="lead"),
        *(() if summary.cut is None else _topics(summary.cut, summary.taken)),
        _set_aside(summary),
        class_="long",
    )


def _set_aside(summary: RunSummary) -> Child:
    if not summary.set_aside:
        return None
    rows = [
        tag(
            "tr",
            tag("th", tag("code", each.topic), class_="any", scope="row"),
            tag("td", count(each.partition), class_="n", data_name="Partition"),
            tag("td", count(each.offset), class_="n", data_name="Offset"),
            tag("td", "ours" if each.own else "another's", data_name="Whose"),
            tag("td", each.why, class_="any why"),
        )
        for each in summary.set_aside
    ]
    return join(
        tag("h3", "Records that do not read"),
        table(("Topic", "Partition", "Offset", "Whose", "Why"), rows, (1, 2), "stack"),
        _more(summary.quarantined - len(rows), "records"),
    )


def _topics(cut: SnapshotBounds, taken: dict[str, int]) -> Iterator[Html]:
    reads = [
        ("half messages", cut.half),
        ("markers", cut.op),
        ("parked copies", cut.parked),
        *(("target", read) for read in cut.targets),
    ]
    rows = [
        tag(
            "tr",
            tag("th", tag("code", read.topic), class_="any", scope="row"),
            tag("td", role),
            tag("td", count(len(read.ends)), class_="n", data_name="Partitions"),
            tag("td", count(_width(read)), class_="n", data_name="Offsets read"),
            tag(
                "td",
                count(max(read.taken, taken.get(read.topic, 0))),
                class_="n",
                data_name="Taken by retention",
            ),
        )
        for role, read in reads[:TOPICS_SHOWN]
    ]
    heads = ("Topic", "What", "Partitions", "Offsets read", "Taken by retention")
    yield table(heads, rows, (2, 3, 4), "stack")
    yield _more(len(reads) - TOPICS_SHOWN, "topics")
    yield _by_partition([read for _role, read in reads])


def _width(read: TopicRead) -> int:
    return sum(max(0, end - begin) for begin, end in zip(read.begins, read.ends, strict=False))


def _by_partition(reads: list[TopicRead]) -> Html:
    places = [
        (read.topic, number, *offsets)
        for read in reads
        for number, offsets in enumerate(zip(read.starts, read.begins, read.ends, strict=False))
    ]
    rows = [
        tag(
            "tr",
            tag("th", tag("code", topic), class_="any", scope="row"),
            *(tag("td", count(number), class_="n") for number in numbers),
        )
        for topic, *numbers in places[:PARTITIONS_SHOWN]
    ]
    heads = ("Topic", "Partition", "First kept", "Read from", "Read to, not including")
    return tag(
        "details",
        tag("summary", "Offsets by partition"),
        table(heads, rows, (1, 2, 3, 4)),
        _more(len(places) - PARTITIONS_SHOWN, "partitions"),
    )


def _more(number: int, what: str) -> Html:
    return tag("p", f"{count(number)} more {what}.", class_="muted") if number > 0 else Html("")


def how_judged(summary: RunSummary) -> Html:
    """Return the section on the rules and terms of the judgement."""
    return tag(
        "section",
        tag("h2", "How it was judged"),
        tag("p", _SCOPES.get(summary.mode, "")),
        tag(
            "p",
            "Only the topics were asked, read committed and without any proxy. The first deciding "
            "marker of a transaction counts, as it does for proxies. The topics were read one "
            "after the other: that a committed message is missing is judged only where its "
            "decision was stored before the targets were read, and what is visible without a "
            "decision only with all decisions that were stored until after that. So what was just "
            "under way is no drift.",
        ),
        tag("p", "Messages are compared by 64-bit hashes of key, value and headers."),
        _terms(summary),
        _business(summary),
        class_="long",
    )


def _terms(summary: RunSummary) -> Child:
    terms = summary.terms
    if terms is None:
        return None
    rows = (
        ("Judged as of", moment(terms.now_ms)),
        ("A commit that is not visible is late after", duration(terms.late_after_ms)),
        ("and lost after", duration(terms.lost_after_ms)),
        ("A first check that is not made is overdue after", duration(terms.overdue_after_ms)),
        ("Half messages count only so near to their id's time", duration(terms.dedup_window_ms)),
    )
    return tag(
        "table",
        tag("caption", "Terms"),
        tag(
            "tbody",
            *(tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in rows),
        ),
    )


def _business(summary: RunSummary) -> Child:
    if not summary.business:
        return None
    told = ", ".join(f"{name.replace('_', ' ')} {count(n)}" for name, n in summary.business.items())
    return join(tag("h3", "Compared with the business"), tag("p", told))
