"""The rows of the table of diagnoses."""

import re
from typing import Any

from msgspec import Struct

from txbroker.contract.service import GroupOverview
from txbroker.diagnosis.overview import Finder


class AlertRule(Struct, frozen=True, kw_only=True):
    """A rule by which Prometheus detects a condition.

    Attributes:
        group: the group of rules.
        expr: the expression, in PromQL.
        after: for how long it must hold; "" fires at once.
        critical: whether it pages an operator; a warning can wait for the morning.
        scope: distinguishes the rules of one alert.
        fires: completes "fires when".
        description: what Prometheus sends; it may use `$labels` and `$value`.
        summary: its title; "" is that of the condition.
        remark: why the rule is as it is.
    """

    group: str
    expr: str
    after: str = ""
    critical: bool = False
    scope: str = ""
    fires: str
    description: str
    summary: str = ""
    remark: str = ""

    @property
    def severity(self) -> str:
        """The label of its severity."""
        return "critical" if self.critical else "warning"


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
        rules: the rules of the alert.
        find: finds it in an overview; None if no proxy knows it.
        act: whether calls fail or an operator must act; otherwise it may resolve itself.
        of_proxy: whether it stays with a proxy when half partitions move.
        headline: whether it explains the others.
        title: the problem.
        todo: the next step.
        show: the command that shows more.
        holds: the title of the doctor's check: what should be the case. "" without one.
    """

    alert: str
    rules: tuple[AlertRule, ...] = ()
    find: Finder | None = None
    act: bool = False
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

    def summary(self, rule: AlertRule) -> str:
        """Return the title of a rule; the facts of the condition's title are its labels."""
        return rule.summary or re.sub(r"{(\w+)}", r"{{ $labels.\1 }}", self.title.one)

    @property
    def words(self) -> str:
        """Its name in words, the same as long as it lasts."""
        if self.headline:
            return "Kafka does not answer"
        return re.sub("(?<!^)([A-Z])", r" \1", self.alert).capitalize()


class Occurrence(Struct, frozen=True):
    """A condition that applies, and the parts of the overview to which it applies."""

    diagnosis: Diagnosis
    parts: tuple[Any, ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """The producer groups that it is about."""
        return tuple(part.group for part in self.parts if isinstance(part, GroupOverview))
