"""The transactions that a form or link selects, validated like the API's queries."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from txbroker.contract.service import ListRequest
from txbroker.core.records import State
from txbroker.errors import BadRequest
from txbroker.proxy.admission import plain_id
from txbroker.proxy.console.formatting import age
from txbroker.proxy.http.bodies import By, ListQuery, Reason, RequestBody

PAGE_ROWS = 50
PAGE_ROWS_MAX = 250
"""Rendering a page blocks the event loop."""
_TAKEN = ("state", "group", "topic", "limit", "cursor")
_KNOWN = frozenset({*_TAKEN, "older", "id", "reason", "by", "covered"})
"""Fields of links and forms. An unknown field may be meant as a filter, such as the API's
`older_than_s`; ignoring it would make an action cover too much."""
_OLDER = re.compile(r"(\d{1,10}(?:\.\d{1,3})?)\s*([smhd]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_ERROR = re.compile(r"^(?P<problem>.*?)(?: - at `\$\.?(?P<field>.*)`)?$", re.DOTALL)

T = TypeVar("T", bound=RequestBody)


class AuditNote(RequestBody, frozen=True):
    """Reason and author of an action."""

    reason: Reason = ""
    by: By = ""


@dataclass(frozen=True)
class Filter:
    """Transactions to list or to act on.

    Attributes:
        ids: only these, or () for all that the other fields select.
        older_s: minimum time since the prepare, seconds.
    """

    state: State | None = None
    group: str | None = None
    topic: str | None = None
    older_s: float | None = None
    ids: tuple[str, ...] = ()

    def query(self) -> dict[str, str]:
        """Return the fields of a link or form for this filter."""
        fields = {
            "id": ",".join(self.ids),
            "state": str(self.state or ""),
            "group": self.group or "",
            "topic": self.topic or "",
            "older": "" if self.older_s is None else _shortest(self.older_s),
        }
        return {name: value for name, value in fields.items() if value}

    def words(self) -> str:
        """Describe this filter in words."""
        if self.ids:
            return "this transaction" if len(self.ids) == 1 else "these transactions"
        parts = [] if self.state is None else [self.state.replace("_", " ")]
        if self.group is not None:
            parts.append(f"of group {self.group}")
        if self.topic is not None:
            parts.append(f"with a message to topic {self.topic}")
        if self.older_s is not None:
            parts.append(f"prepared more than {age(self.older_s)} ago")
        return ", ".join(parts) or "all unsettled"

    def request(
        self, *, limit: int, cursor: str | None = None, state: State | None = None
    ) -> ListRequest:
        """Return the list request; `state` overrides the filter's."""
        return ListRequest(
            state=state or self.state,
            group=self.group,
            topic=self.topic,
            older_than_s=self.older_s,
            limit=limit,
            cursor=cursor,
        )


@dataclass(frozen=True)
class Listing:
    """One page of a list."""

    filter: Filter
    limit: int = PAGE_ROWS
    cursor: str | None = None


def read_listing(fields: Mapping[str, str]) -> Listing:
    """Return the listing that a link or form selects; blank fields are ignored."""
    unknown = sorted(set(fields) - _KNOWN)
    if unknown:
        raise BadRequest(
            f"there is no filter {unknown[0][:40]!r}: remove it from the link", path=unknown[0][:40]
        )
    given = {name: text.strip() for name, text in fields.items() if text.strip()}
    queried: dict[str, object] = {name: given[name] for name in _TAKEN if name in given}
    if "older" in given:
        queried["older_than_s"] = read_age_s(given["older"], "older")
    query = convert(queried, ListQuery)
    ids = tuple(plain_id(id.strip()) for id in given.get("id", "").split(",") if id.strip())
    if len(ids) > PAGE_ROWS_MAX:
        raise BadRequest(f"{len(ids)} ids: select at most {PAGE_ROWS_MAX} at once")
    chosen = Filter(query.state, query.group, query.topic, query.older_than_s, ids)
    limit = min(query.limit, PAGE_ROWS_MAX) if "limit" in queried else PAGE_ROWS
    return Listing(chosen, limit, query.cursor)


def read_age_s(text: str, field: str) -> float:
    """Return an age such as `10m`, seconds."""
    match = _OLDER.fullmatch(text)
    if match is None:
        raise BadRequest(
            "cannot read the age: give a number and s, m, h or d, such as 10m", path=field
        )
    return float(match[1]) * _SECONDS[match[2]]


def _shortest(seconds: float) -> str:
    """Return a duration in its shortest form, such as `10m`."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def convert(fields: Mapping[str, object], kind: type[T]) -> T:
    """Return the fields of a form as a struct; the error of a wrong field names it."""
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        match = _ERROR.match(str(error))
        problem, field = (match["problem"], match["field"]) if match else (str(error), None)
        if "regex" in problem:
            problem = "Control characters are not allowed"
        raise BadRequest(f"{field}: {problem}" if field else problem, path=field) from None
