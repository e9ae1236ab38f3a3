"""What a database needs for a capture, as a list of steps; the same for each kind of database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

from msgspec import Struct

from txbroker.databases.database import Database
from txbroker.relay.capture.changes import CapturedTable, CaptureMapping, Unshown

D = TypeVar("D", bound=Database, contravariant=True)


class StepState(StrEnum):
    """Whether a step must be taken."""

    DONE = "done"
    TO_DO = "to do"
    REFUSED = "refused"
    """It cannot be taken; the text has the reason and the next step. Nothing is changed then."""
    ADVICE = "advice"
    """The capture works without it; the text has the reason to take it."""
    ACCEPTED = "accepted"
    """Changes are not captured, and the mapping consents."""


class Step(Struct, frozen=True):
    """One thing that a capture needs, or leaves, in the database.

    Attributes:
        text: what it is; of a refused one a sentence with the reason and the next step.
        sql: its statement, or one for an administrator; "" where it is no SQL.
    """

    state: StepState
    text: str
    sql: str = ""


NO_EMITTED = Step(
    StepState.REFUSED, "emitted is for PostgreSQL, which has pg_logical_emit_message: remove it"
)


def refusals(steps: Iterable[Step]) -> list[str]:
    """Return why steps cannot be taken, as sentences with the next step."""
    return [each.text for each in steps if each.state is StepState.REFUSED]


class Gap(Struct, frozen=True):
    """Changes of a captured table that its database's log does not show.

    Attributes:
        kind: consent in the mapping's `accept`.
        problem: which changes are missing and why, without a full stop.
        remedy: how to change the database so that they are shown.
    """

    table: CapturedTable
    kind: Unshown
    problem: str
    remedy: str

    @property
    def accepted(self) -> bool:
        """Whether the mapping consents."""
        return self.kind in self.table.accept

    @property
    def step(self) -> Step:
        """The step of a plan: refused without consent."""
        name = f"table {self.table.schema}.{self.table.table}: {self.problem}"
        if self.accepted:
            return Step(StepState.ACCEPTED, f'{name}: accept = ["{self.kind}"]')
        return Step(
            StepState.REFUSED,
            f"{name}: {self.remedy}; if those changes may be missing, add "
            f'accept = ["{self.kind}"] to the table in the mapping',
        )


class CaptureSetup(Protocol[D]):
    """The functions of the modules `postgres_setup`, `mariadb_setup` and `sqlite`.

    Except for `keys`, the tables of the mapping have their keys.

    Raises:
        DatabaseUnavailable
        ConfigurationError: a right is missing even to look.
    """

    async def keys(
        self, mapping: CaptureMapping, database: D
    ) -> Mapping[tuple[str, str], Sequence[str]]:
        """Return the columns of the primary key by schema and table, () without one, of those
        tables of the mapping that exist."""

    async def plan(self, mapping: CaptureMapping, database: D) -> list[Step]:
        """Return what `apply` would do; change nothing."""

    async def apply(self, mapping: CaptureMapping, database: D) -> list[Step]:
        """Take the steps that are to do, and return all; if one is refused, change nothing."""

    async def remove(self, mapping: CaptureMapping, database: D) -> list[Step]:
        """Remove what `apply` created, and return the steps."""
