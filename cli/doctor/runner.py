"""Runs checks in parallel, each with a timeout; one that breaks hides no other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from txbroker.cli.doctor.findings import CheckLevel, CheckResult, DoctorCheck, Finding
from txbroker.cli.doctor.proxies import NotAllowed
from txbroker.cli.doctor.subject import Subject, Unavailable
from txbroker.errors import TxbrokerError

TIMEOUT_S = 15.0
"""Timeout of a check, and about that of all, because they run in parallel."""


class DoctorReport(Struct, frozen=True):
    """The results of all checks.

    Attributes:
        at_s: time of the run, seconds since 1970.
    """

    at_s: float
    outcomes: tuple[CheckResult, ...]

    @property
    def healthy(self) -> bool:
        """True if no check fails or is unknown."""
        return not any(one.level in (CheckLevel.FAILS, CheckLevel.UNKNOWN) for one in self.outcomes)

    def count(self, level: CheckLevel) -> int:
        """Return the number of checks at this level."""
        return sum(one.level is level for one in self.outcomes)


async def examine(
    subject: Subject, checks: Sequence[DoctorCheck], timeout_s: float = TIMEOUT_S
) -> DoctorReport:
    """Run checks and return their results in order. Never raises."""
    at_s = time.time()
    ran = await asyncio.gather(*(_run(check, subject, timeout_s) for check in checks))
    by_name = {outcome.name: outcome for outcome, _looked in ran}
    return DoctorReport(
        at_s,
        tuple(
            outcome if looked else _unknown_if_needs_fail(outcome, check, by_name)
            for check, (outcome, looked) in zip(checks, ran, strict=True)
        ),
    )


async def _run(check: DoctorCheck, subject: Subject, timeout_s: float) -> tuple[CheckResult, bool]:
    """Return a check's result, and True if it could read its facts."""
    began = time.monotonic()
    looked = False
    try:
        async with asyncio.timeout(timeout_s):
            finding = await check.look(subject)
        looked = True
    except NotAllowed as error:
        # Neither a failure nor a success is known.
        looked = True
        finding = Finding(CheckLevel.UNKNOWN, f"not known: {error}")
    except TimeoutError:
        finding = Finding(CheckLevel.FAILS, f"not known within {timeout_s:g} s")
    except (TxbrokerError, Unavailable) as error:
        finding = Finding(CheckLevel.FAILS, str(error))
    except Exception as error:
        # A bug in one check must not hide the results of others.
        finding = Finding(
            CheckLevel.FAILS, f"this check is broken: {type(error).__name__}: {error}"
        )
    return _outcome(check, finding, time.monotonic() - began), looked


def _outcome(check: DoctorCheck, finding: Finding, seconds: float) -> CheckResult:
    return CheckResult(
        name=check.name,
        section=check.section,
        title=check.title,
        level=finding.level,
        found=finding.found,
        details=finding.details,
        hint="" if finding.level in (CheckLevel.OK, CheckLevel.UNKNOWN) else check.hint,
        doc=check.doc,
        seconds=seconds,
    )


def _unknown_if_needs_fail(
    outcome: CheckResult, check: DoctorCheck, by_name: Mapping[str, CheckResult]
) -> CheckResult:
    """Return the result as unknown if a check that it depends on fails."""
    failing = _failing(check.needs, by_name)
    if not failing:
        return outcome
    finding = Finding(CheckLevel.UNKNOWN, f"could not be checked, see {failing[0]}")
    return _outcome(check, finding, outcome.seconds)


def _failing(needs: Iterable[str], by_name: Mapping[str, CheckResult]) -> list[str]:
    return [name for name in needs if name in by_name and by_name[name].level is CheckLevel.FAILS]
