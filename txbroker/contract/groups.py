"""Answers about producer groups, as the HTTP API encodes and its clients decode them."""

from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from txbroker.core.records import Decision, Source, State


class AnswerBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of an answer; fields with their default are omitted."""


SCHEMAS = "#/components/schemas/{name}"
"""The place of a schema in the OpenAPI document."""


def _name_of(kind: type[StrEnum]) -> Meta:
    """Return the schema of a name; readers take and show one that only a newer proxy knows."""
    return Meta(extra_json_schema={"$ref": SCHEMAS.format(name=kind.__name__)})


DecisionName: TypeAlias = Annotated[str, _name_of(Decision)]
SourceName: TypeAlias = Annotated[str, _name_of(Source)]
StateName: TypeAlias = Annotated[str, _name_of(State)]
NAMED = (Decision, Source, State)


class ErrorFields(AnswerBody, frozen=True):
    """An error: a code for programs, a message for people, and the object concerned."""

    code: str
    message: str
    id: str | None = None
    path: str | None = None


class GroupAnswer(AnswerBody, frozen=True):
    """A registered group, and its number of checkable sessions at this proxy.

    The query of the check URL is hidden. `problem`: why this proxy cannot use the policy.
    """

    group: str
    sessions: int
    check_url: str | None = None
    secret_ref: str | None = None
    check_after_s: float | None = None
    check_interval_s: float | None = None
    attempts_max: int | None = None
    timeout_s: float | None = None
    parallel: int | None = None
    answer_bytes_max: int | None = None
    signed_answers: bool | None = None
    problem: str | None = None


class GroupsBody(AnswerBody, frozen=True):
    """All registered groups by name."""

    groups: list[GroupAnswer]


class RemovedBody(AnswerBody, frozen=True):
    """The group is no longer registered."""

    group: str
    removed: bool


TestSignature: TypeAlias = Annotated[
    str, Meta(extra_json_schema={"enum": ["accepted", "refused", "unknown"]})
]


class TestedBody(AnswerBody, frozen=True):
    """The result of a test call to a group; `why` is the problem, if any.

    `status` is the HTTP status of a check URL, null without an answer. `answer` is the decision of
    a connected instance. `signature` is missing if no secret is registered, "unknown" if the answer
    does not show whether it was accepted. `took_ms` is the time until the answer.
    """

    __test__ = False  # pytest takes the name for that of a test

    group: str
    answered: bool
    endpoint: str = ""
    status: int | None = None
    why: str = ""
    answer: DecisionName | None = None
    signature: TestSignature | None = None
    took_ms: float = 0.0
