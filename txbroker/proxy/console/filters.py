"""Which transactions a page is about: what its form or link says, checked like the API's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from txbroker.contract.service import ListRequest
from txbroker.core.records import State
from txbroker.errors import BadRequest
from txbroker.proxy.console.formatting import age
from txbroker.proxy.http.bodies import By, ListQuery, Reason, RequestBody
from txbroker.proxy.http.context import plain_id

PAGE_ROWS = 50
PAGE_ROWS_MAX = 250
"""A page is rendered in one go, while others wait."""
_TAKEN = ("state", "group", "topic", "limit", "cursor")
_KNOWN = frozenset({*_TAKEN, "older", "id", "find", "reason", "by", "covered"})
"""What links and forms may say. Anything else may be meant for a filter, as the API's
`older_than_s`, and without it an action would be for more than was meant."""
_OLDER = re.compile(r"(\d{1,10}(?:\.\d{1,3})?)\s*([smhd]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SAID = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<field>.*)`)?$", re.DOTALL)

T = TypeVar("T", bound=RequestBody)


class AuditNote(RequestBody, frozen=True):
    """Why and who, for the record."""

    reason: Reason = ""
    by: By = ""


@dataclass(frozen=True)
class Filter:
    """Transactions to list or to act on.

    Attributes:
        ids: these very ones, or () for all that the rest says.
        older_s: prepared at least so many seconds ago.
    """

    state: State | None = None
    group: str | None = None
    topic: str | None = None
    older_s: float | None = None
    ids: tuple[str, ...] = ()

    def query(self) -> dict[str, str]:
        """Return the fields of a link or form that say the same."""
        fields = {
            "id": ",".join(self.ids),
            "state": str(self.state or ""),
            "group": self.group or "",
            "topic": self.topic or "",
            "older": "" if self.older_s is None else _shortest(self.older_s),
        }
        return {name: value for name, value in fields.items() if value}

    def words(self) -> str:
        """Return the same in words."""
        if self.ids:
            return "this one" if len(self.ids) == 1 else "these"
        parts = [] if self.state is None else [f"{self.state.replace('_', ' ')}"]
        if self.group is not None:
            parts.append(f"of group {self.group}")
        if self.topic is not None:
            parts.append(f"with a message to topic {self.topic}")
        if self.older_s is not None:
            parts.append(f"prepared more than {age(self.older_s)} ago")
        return ", ".join(parts) or "all that are not settled"

    def request(
        self, *, limit: int, cursor: str | None = None, state: State | None = None
    ) -> ListRequest:
        """Return the call that lists them; `state` for those of one state only."""
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


def read_listing(asked: Mapping[str, str]) -> Listing:
    """Return what a link or form asks for; fields that are left blank say nothing.

    Raises:
        BadRequest, BadId: says what is wrong.
    """
    unknown = sorted(set(asked) - _KNOWN)
    if unknown:
        raise BadRequest(f"there is no filter {unknown[0][:40]!r} here", path=unknown[0][:40])
    given = {name: text.strip() for name, text in asked.items() if text.strip()}
    fields: dict[str, object] = {name: given[name] for name in _TAKEN if name in given}
    fields.update(_older(given.get("older")))
    query = convert(fields, ListQuery)
    ids = tuple(plain_id(id.strip()) for id in given.get("id", "").split(",") if id.strip())
    if len(ids) > PAGE_ROWS_MAX:
        raise BadRequest(f"at most {PAGE_ROWS_MAX} ids are taken at once")
    chosen = Filter(query.state, query.group, query.topic, query.older_than_s, ids)
    limit = min(query.limit, PAGE_ROWS_MAX) if "limit" in fields else PAGE_ROWS
    return Listing(chosen, limit, query.cursor)


def _older(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    match = _OLDER.fullmatch(text)
    if match is None:
        raise BadRequest("older than: give a number and s, m, h or d, such as 10m", path="older")
    return {"older_than_s": float(match[1]) * _SECONDS[match[2]]}


def _shortest(seconds: float) -> str:
    """Return a duration as a person would fill it in, such as `10m`."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def convert(fields: Mapping[str, object], kind: type[T]) -> T:
    """Return fields of a form as what they are declared to be.

    Raises:
        BadRequest: says which is wrong, and how.
    """
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        match = _SAID.match(str(error))
        what, field = (match["what"], match["field"]) if match else (str(error), None)
        if "regex" in what:
            what = "No control characters are taken"
        raise BadRequest(f"{field}: {what}" if field else what, path=field) from None
