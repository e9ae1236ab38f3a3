"""Renew the parts of docs/reference/verdicts.md that code decides: names, titles and severities of
findings, and what closes them. When a kind is found, by which evidence, and what to do about it,
stands on the page alone. `python docs/verdicts.py`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill

from txbroker.diagnosis.limits import span
from txbroker.spark.judge.kinds import ALL_KINDS, BUSINESS_KINDS, Kind
from txbroker.spark.schema import Terms

PAGE = Path(__file__).parent / "reference" / "verdicts.md"
_BEGIN, _END = "\n## Findings\n", "\n## Drift that is not found\n"
_SECTION = re.compile(r"^### `(\w+)`\n.*\n\n((?:.+\n)+)", re.MULTILINE)
_CLOSES = re.compile(r"^- Closes:.*\n(?:  .*\n)*", re.MULTILINE)
_NEW = "- Found: …\n- Evidence: …\n- Closes:\n- To do: …\n"
_WIDTH = 100

_HEAD = """\
All of them are drift: exit code 4, and counted in `txbroker_audit_drift{{kind}}`. The gravest
first. *critical*: consumers may act on wrong or missing messages. *error*: a rule was broken
without that. *warning*: it may pass.

Ages are options of a run; by default `--late-after-s` is {late}, `--lost-after-s` {lost},
`--overdue-after-s` {overdue}.

| finding | severity | means | later runs |
| --- | --- | --- | --- |
"""

_OF_TRANSACTIONS = "When the transaction is judged again without it, or is `gone`."
_OF_RECORDS = (
    "When the transaction is judged again without it, with its targets readable, or is `gone`; "
    "and when the record is no longer in the target."
)
_NOT_VISIBLE = (
    "When the messages are visible, or the transaction is refused or `gone`. Other options of a "
    "later run do not close it."
)
_BUSINESS = (
    "When a run with `--business` that compares its group does not find it again, or the "
    "transaction is `gone`."
)
_OTHERS = {
    "late": f"{_NOT_VISIBLE} Also when it becomes `lost`.",
    "refused_visible": "When the transaction is no longer refused, or the record no longer in the "
    "target.",
    "out_of_order": f"{_OF_RECORDS} A run of a part compares too few transactions to close it.",
    "unreadable": "When a full run does not find it again.",
    "target_missing": "When the transaction is judged again and its topic can be read, or the half "
    "topic no longer has its half message.",
}
"""What closes these; the others are alike by what `tables.findings` asks of their kind."""


def verdicts_page() -> str:
    """Return the text of the page; a new kind has `…` where sentences are missing."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    findings, _, after = rest.partition(_END)
    return "".join([before, _BEGIN, *_findings(dict(_SECTION.findall(findings))), _END, after])


def _findings(sections: Mapping[str, str]) -> Iterator[str]:
    terms = Terms(0)
    ages_ms = terms.late_after_ms, terms.lost_after_ms, terms.overdue_after_ms
    late, lost, overdue = (span(ms / 1000) for ms in ages_ms)
    yield _HEAD.format(late=late, lost=lost, overdue=overdue)
    for kind in ALL_KINDS:
        again = "find it again until its cause is gone" if kind.persists else ""
        yield f"| [`{kind.name}`](#{kind.name}) | {kind.severity} | {kind.meaning} | {again} |\n"
    for kind in ALL_KINDS:
        yield f"\n### `{kind.name}`\n*{kind.title}*, {kind.severity}.\n\n"
        # Code stays in one piece.
        item = re.sub(r"`.*?`", lambda code: code[0].replace(" ", "\0"), _closes(kind))
        closes = fill(f"- Closes: {item}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        yield _CLOSES.sub(closes.replace("\0", " ") + "\n", sections.get(kind.name, _NEW))


def _closes(kind: Kind) -> str:
    if kind.name in _OTHERS:
        return _OTHERS[kind.name]
    if kind.not_visible:
        return _NOT_VISIBLE
    if kind in BUSINESS_KINDS:
        return _BUSINESS
    return _OF_RECORDS if kind.in_target else _OF_TRANSACTIONS


if __name__ == "__main__":
    PAGE.write_text(verdicts_page())
