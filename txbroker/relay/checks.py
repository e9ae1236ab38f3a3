"""Checks of undecided rows, by the runner of check-backs."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Collection, Sequence
from functools import partial
from threading import Semaphore

import structlog

from txbroker.checkers.base import (
    Answered,
    AttemptRequest,
    AttemptResult,
    Channel,
    CheckCall,
    CheckOwner,
    CheckResult,
    Unclear,
    Unreached,
    shortened,
)
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.runner import CheckRunner
from txbroker.checkers.url_guard import UrlGuard
from txbroker.config.addresses import parse_host_rules
from txbroker.contract import policy, signing
from txbroker.contract.checks import CheckFunction, CheckRequest, Commit, NotYet
from txbroker.core.records import CheckReason, Decision
from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.outbox.undecided import CHECKS_MAX, UndecidedRows
from txbroker.databases.sessions import in_thread
from txbroker.errors import BadRequest, ConfigurationError, TxbrokerError
from txbroker.relay.outbox_source import message_of
from txbroker.relay.sessions import DatabaseThread
from txbroker.relay.settings import RelaySettings

log = structlog.wrap_logger(logging.getLogger(__name__))

_DUE_MAX = 500
_CALLS_MAX = 16
"""Calls of a plain check function that have not returned."""
TIMEOUT_S = 10.0
"""How long an answer may take, seconds."""


class NoMetrics:
    """Counts nothing: rows and their states are counted in the table."""

    def checks_ended(self, group: str, outcome: str, durations_s: Sequence[float]) -> None:
        """See `CheckMetrics.checks_ended`."""


class OutboxChecks(CheckOwner):
    """Offers due rows to a check runner, and stores attempts and answers.

    Args:
        group: the relay's name.
        finder: whom to ask.
    """

    def __init__(
        self,
        group: str,
        rows: UndecidedRows,
        thread: DatabaseThread,
        finder: FunctionFinder | UrlFinder,
    ) -> None:
        self._group = group
        self._rows = rows
        self._thread = thread
        self._finder = finder
        self._runner = CheckRunner(finder, NoMetrics())

    async def offer(self) -> None:
        """Offer due rows."""
        for id in await self._thread.read(lambda: self._rows.due(_DUE_MAX)):
            self._runner.due(self, id, self._group, "", CheckReason.DUE)

    async def close(self) -> None:
        """End the checks in flight."""
        await self._runner.close()
        await self._finder.close()

    # --- for the runner --------------------------------------------------------------------------

    def in_memory(self, id: str) -> bool:
        """See `CheckOwner.in_memory`."""
        return False

    async def attempt(
        self, checks: Sequence[AttemptRequest]
    ) -> list[CheckCall | TxbrokerError | None]:
        """Store attempts; see `CheckOwner.attempt`."""
        return [await self._attempt(check.id) for check in checks]

    async def _attempt(self, id: str) -> CheckCall | None:
        attempt = await self._thread.transaction(lambda: self._rows.attempt(id))
        if attempt is None:
            return None
        try:
            messages = tuple(message_of(row) for row in attempt.rows)
        except (TypeError, ValueError, BadRequest) as error:
            why = f"the row holds no message: {error}"
            await self._thread.transaction(lambda: self._rows.undecided(id, attempt.number, why))
            return None
        return CheckCall(
            id,
            self._group,
            attempt.number,
            CHECKS_MAX,
            CheckReason.DUE,
            attempt.rows[0].created_at,
            messages,
            number=attempt.number,
            timeout_s=TIMEOUT_S,
        )

    def still_pending(self, id: str) -> bool:
        """See `CheckOwner.still_pending`: the table shows it with the next attempt or answer."""
        return True

    async def answered(self, run: Sequence[AttemptResult]) -> None:
        """Store answers; see `CheckOwner.answered`."""
        for each in run:
            try:
                await self._store(each)
            except TxbrokerError as error:  # it is asked again after the interval
                log.warning("check's answer not stored", id=each.call.id, error=str(error))

    async def _store(self, given: AttemptResult) -> None:
        id, number, result, rows = given.call.id, given.call.attempt, given.result, self._rows
        if isinstance(result, Answered) and result.decision is not Decision.UNKNOWN:
            cause = shortened(f"check {number}: {result.detail or result.decision}")
            why = await self._thread.transaction(
                lambda: rows.decide(id, result.decision, result.messages, cause)
            )
            if why:
                await self._thread.transaction(lambda: rows.undecided(id, number, why))
        elif isinstance(result, Unreached) or (
            isinstance(result, Answered) and result.ask_again_s is not None
        ):
            after_s = result.ask_again_s if isinstance(result, Answered) else None
            await self._thread.transaction(lambda: rows.give_back(id, after_s, result.detail))
        else:
            await self._thread.transaction(lambda: rows.undecided(id, number, result.detail))


def open_checks(settings: RelaySettings, group: str, thread: DatabaseThread) -> OutboxChecks:
    """Return the checks of a relay with `check` or `check_url`.

    Raises:
        ConfigurationError: the URL or the secret is malformed.
    """
    rows = UndecidedRows(thread.dialect, settings.check_after_s, settings.check_interval_s)
    if settings.check_url is None:
        return OutboxChecks(group, rows, thread, FunctionFinder(settings.check))
    finder = UrlFinder(settings.check_url, settings.check_secret)
    return OutboxChecks(group, rows, thread, finder)


# --- a function ------------------------------------------------------------------------------


class FunctionFinder:
    """Asks a check function: a coroutine function, or a plain one in a thread. It is each call's
    channel."""

    endpoint = "function"
    instance = ""

    def __init__(self, function: CheckFunction) -> None:
        self._function = function
        self._calls = Semaphore(_CALLS_MAX)

    def at_hand(self, group: str, prefer: str) -> Channel | None:
        """See `Finder.at_hand`."""
        return self

    async def acquire(
        self, group: str, prefer: str, avoid: Collection[str] = ()
    ) -> Channel | Unreached:
        """See `Finder.acquire`."""
        return self

    async def close(self) -> None:
        """See `OutboxChecks.close`."""

    def ask(self, call: CheckCall, timeout_s: float) -> asyncio.Future[CheckResult]:
        """See `Channel.ask`."""
        return asyncio.ensure_future(self._result(call, timeout_s))

    def release(self) -> None:
        """See `Channel.release`."""

    async def _result(self, call: CheckCall, timeout_s: float) -> CheckResult:
        request = CheckRequest(
            call.id,
            call.group,
            call.attempt,
            call.attempts_max,
            call.reason,
            call.prepared_at_ms / 1000,
            call.messages,
        )
        try:
            async with asyncio.timeout(timeout_s):
                return _result(await self._call(request))
        except TimeoutError:
            return Unclear(f"no answer within {timeout_s:g} s")
        except DatabaseUnavailable as error:
            return Unreached(shortened(str(error)), ask_again_s=0.0)
        except Exception as error:
            log.error("check function failed", id=call.id, error=f"{type(error).__name__}: {error}")
            return Unclear(shortened(f"{type(error).__name__}: {error}"))

    async def _call(self, request: CheckRequest) -> object:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(request)
        if not self._calls.acquire(blocking=False):
            raise RuntimeError(f"{_CALLS_MAX} earlier calls have not returned: give it a timeout")
        answer = await in_thread(partial(self._in_thread, request))
        return await answer if inspect.isawaitable(answer) else answer

    def _in_thread(self, request: CheckRequest) -> object:
        try:
            return self._function(request)
        finally:
            self._calls.release()


def _result(answer: object) -> CheckResult:
    match answer:
        case Decision():
            return Answered(answer, detail=f"{answer} by the check function")
        case NotYet(after_s):
            return Answered(Decision.UNKNOWN, after_s, detail="not yet, by the check function")
        case Commit(messages=messages):
            return Answered(Decision.COMMIT, None, messages, "commit by the check function")
    return Unclear(f"a check returns a Decision, Commit or NotYet, not {type(answer).__name__}")


# --- a URL -----------------------------------------------------------------------------------


class UrlFinder:
    """Asks a check URL: signed, with limits.

    Raises:
        ConfigurationError: the URL or the secret is malformed.
    """

    def __init__(self, url: str, secret: str | bytes | None) -> None:
        try:
            policy.split_check_url(url)
            host, _port = policy.host_and_port(url)
            self._secret = None if secret is None else signing.secret_key(secret)
        except ValueError as error:
            raise ConfigurationError(f"check_url: {error}") from None
        self._url = url
        # Who runs the relay gives the URL: any address is permitted.
        self._checks = HttpChecks(guard=UrlGuard(allow=parse_host_rules("check_url", (host,))))

    def at_hand(self, group: str, prefer: str) -> Channel | None:
        """See `Finder.at_hand`."""
        return None

    async def acquire(
        self, group: str, prefer: str, avoid: Collection[str] = ()
    ) -> Channel | Unreached:
        """See `Finder.acquire`."""
        return await self._checks.acquire(group, self._url, secret=self._secret)

    async def close(self) -> None:
        """Close all connections."""
        await self._checks.close()
