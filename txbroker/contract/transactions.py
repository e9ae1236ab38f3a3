"""Answers about transactions, as the HTTP API encodes and its clients decode them."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from txbroker.contract.groups import AnswerBody, DecisionName, StateName
from txbroker.contract.service import TransactionView


class StandingBody(AnswerBody, frozen=True):
    """The status of a transaction."""

    id: str
    state: StateName
    decision: DecisionName | None = None


class PlacedBody(AnswerBody, frozen=True):
    """A message of a transaction and, once promoted, its place. Content only on demand."""

    topic: str
    partition: int
    offset: int | None = None
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    value: str | UnsetType | None = UNSET
    value_base64: str | UnsetType = UNSET
    headers: list[tuple[str, str | dict[str, str] | None]] | UnsetType = UNSET
    timestamp_ms: int | UnsetType = UNSET


class TransactionBody(TransactionView, frozen=True, kw_only=True, omit_defaults=True):
    """One transaction. Times are milliseconds since 1970.

    `attempts_known`: absent if true; if false, `round`, `attempts` and `attempts_max` are null.
    """

    messages: list[PlacedBody]  # type: ignore[assignment]  # flat, its content only on demand
    round: int | None  # type: ignore[assignment]  # null if unknown
    attempts: int | None  # type: ignore[assignment]
    attempts_max: int | None  # type: ignore[assignment]
    waiting: Annotated[
        str, Meta(description="Why a due check is not made. Only of a single transaction.")
    ] = ""


class PageBody(AnswerBody, frozen=True):
    """One page of a list; `next_cursor` is null on the last page."""

    transactions: list[TransactionBody]
    next_cursor: str | None


class SearchBody(PageBody, frozen=True):
    """One page of a search, often without a match; `next_cursor` is null on the last page.

    `done`: the part of the topics that is read, from 0 to 1. `records`: read for this page.
    `unread`: more transactions that may match and could not be read; older proxies leave it out. A
    transaction may be on several pages.
    """

    done: float
    records: int
    unread: int | UnsetType = UNSET
