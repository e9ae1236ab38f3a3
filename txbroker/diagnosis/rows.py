"""The rows of the table of diagnoses."""

import re
from typing import Any

from msgspec import Struct

from txbroker.contract.service import GroupOverview, Overview
from txbroker.diagnosis.overview import Finder


class Wording(Struct, frozen=True):
    """A sentence about one, and about several; facts stand in braces."""

    one: str
    several: str = ""

    def text(self, number: int = 1, **facts: str) -> str:
        """Return the sentence about a number of something."""
        return (self.one if number == 1 or not self.several else self.several).format(**facts)


class Diagnosis(Struct, frozen=True, kw_only=True):
    """One condition.

    Attributes:
        alert: its alert and runbook, without the prefix; conditions may share one.
        critical: whether calls fail or messages are missing: the alert pages an operator, the
            doctor's check fails. Otherwise it can wait for the morning, and the check warns.
        manual: whether only an operator ends it, although it is not critical.
        section: the group of its alert rule.
        expr: the expression of the rule, in PromQL; "" without a rule.
        after: for how long it must hold; "" fires at once.
        scope: distinguishes the rules of one alert.
        fires: completes "fires when".
        summary: the title of what Prometheus sends; "" is `title`, its facts are labels.
        description: its text; it may use `$labels` and `$value`.
        remark: why the rule is as it is.
        find: finds it in an overview; None if no proxy knows it.
        of_proxy: whether it stays with a proxy when half partitions move.
        headline: whether it explains the others.
        title: the problem.
        todo: the next step.
        show: the command that shows more.
        holds: the title of the doctor's check: what should be the case. "" without one.
    """

    alert: str
    critical: bool = False
    manual: bool = False
    section: str = ""
    expr: str = ""
    after: str = ""
    scope: str = ""
    fires: str = ""
    summary: str = ""
    description: str = ""
    remark: str = ""
    find: Finder | None = None
    of_proxy: bool = False
    headline: bool = False
    title: Wording = Wording("")
    todo: str = ""
    show: str = ""
    holds: str = ""

    @property
    def name(self) -> str:
        """The name of its alert."""
        return f"TxBroker{self.alert}"

    @property
    def runbook(self) -> str:
        """The path of its runbook."""
        return f"docs/runbooks/{self.name}.md"

    @property
    def act(self) -> bool:
        """Whether calls fail or an operator must act; otherwise it may resolve itself."""
        return self.critical or self.manual

    @property
    def words(self) -> str:
        """Its name in words, the same as long as it lasts."""
        if self.headline:
            return "Kafka does not answer"
        return re.sub("(?<!^)([A-Z])", r" \1", self.alert).capitalize()

    def parts(self, overview: Overview) -> tuple[Any, ...]:
        """Return the parts of an overview to which it applies."""
        return () if self.find is None else tuple(self.find(overview))


class Occurrence(Struct, frozen=True):
    """A condition that applies, and the parts of the overview to which it applies."""

    diagnosis: Diagnosis
    parts: tuple[Any, ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """The producer groups that it is about."""
        return tuple(part.group for part in self.parts if isinstance(part, GroupOverview))
