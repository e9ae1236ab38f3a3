"""The producer that users hold in their hands."""

import asyncio
import contextlib
import contextvars
import inspect
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, cast
from urllib.parse import urlsplit

import aiohttp

from txbroker.contract.frames import SESSION_VERSION, CheckQuestion, Decide, Drain, Hello
from txbroker.core.records import Decision, Message
from txbroker.errors import ConfigurationError
from txbroker.net.tls import ClientTls, TlsFiles
from txbroker.sdk.calls import Calls, Draft
from txbroker.sdk.checks import CheckAnswerer, is_coroutine_function
from txbroker.sdk.limits import Limits
from txbroker.sdk.local import LocalTransactions
from txbroker.sdk.messages import checked, checked_seconds, checked_text
from txbroker.sdk.router import Router
from txbroker.sdk.session import Session, open_session
from txbroker.sdk.transaction import (
    Transaction,
    TransactionBlock,
    checked_decision,
    checked_wait,
    decided,
    outcome_of,
    prepared,
)
from txbroker.sdk.types import CheckFunction, Outcome, ProducerClosed, Rollback, Wait

START_TIMEOUT_S = 15.0
"""How long the first session may take by default."""
DRAIN_TIMEOUT_S = 30.0
"""How long leaving the producer waits by default for transactions and checks that still run."""

LocalFunction: TypeAlias = Callable[[Transaction], "Decision | Awaitable[Decision | None] | None"]
"""A local transaction: a coroutine function, or a plain one (which is called in a thread)."""


class TransactionalProducer:
    """Publishes messages to Kafka exactly when local transactions commit.

    Example:
        async with TransactionalProducer(url, group="orders", check=check_order) as producer:
            async with producer.transaction(Message("payments", key=b"42", value=body)) as tx:
                await place_order(database, tx.id)

    Leaving the block commits; `raise Rollback` rolls back. Any other exception leaves the
    transaction unknown and asks for an early check, because an exception does not prove that the
    local transaction failed.

    Args:
        urls: one or several proxies, such as "http://127.0.0.1:8470"; the others are learnt.
        group: the producer group. Any instance of it may be asked about any transaction of it.
        check: says what became of a transaction; a coroutine function or a plain one. Without
            it this instance answers only for the blocks that run in it; for all else, other
            instances of the group are asked, then its check URL.
        instance: names this process among the group's; made up where not given.
        token: sent to the proxy as `authorization: Bearer TOKEN`.
        ca_file: with https URLs, certificates of the authorities that may sign the proxies' (PEM);
            None: the system's. They are always checked.
        client_cert_file: the certificate that this process shows where a proxy asks for one (PEM).
        client_key_file: its private key, without a passphrase; None where it is in the same file.
            The three files are read again when they change.
        limits: bounds and times, see `Limits`.

    Raises:
        ConfigurationError: a URL, limit or file is wrong, or `check` is no function.
        BadRequest: group or instance is no proper text.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        group: str,
        check: CheckFunction | None = None,
        instance: str | None = None,
        token: str | None = None,
        ca_file: str | Path | None = None,
        client_cert_file: str | Path | None = None,
        client_key_file: str | Path | None = None,
        limits: Limits | None = None,
    ) -> None:
        if check is not None and not callable(check):
            raise ConfigurationError(f"check is a function or None, not {check!r}")
        self._urls = _checked_urls(urls)
        self.group = checked_text("group", group)
        self.instance = checked_text("instance", instance or _made_up_instance())
        self._token = token
        self._tls = ClientTls(
            TlsFiles(_path(ca_file), _path(client_cert_file), _path(client_key_file))
        )
        self._limits = (limits or Limits()).validate()
        self._book = LocalTransactions(self._limits.running_again_s)
        self._desk = CheckAnswerer(check, self._book, self._limits)
        self._router = Router(self._urls, self._open_session, self._limits)
        self._calls = Calls(self._router, self._book, self._limits)
        self._http: aiohttp.ClientSession | None = None
        self._draining = False

    # --- life ----------------------------------------------------------------------------

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Open the first session; `async with` does it.

        Raises:
            OwnerUnavailable: no proxy can be reached within `timeout_s`.
            Untrusted: nor will it be, as a certificate is not trusted, for example; this is said
                at once, when all URLs have been tried.
            RequestError: the proxy refuses us, `unauthorized` for example.
        """
        if self._http is not None or self._book.closed:
            raise ProducerClosed("a producer can be started only once")
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        self._http = aiohttp.ClientSession(headers=headers)
        self._book.started = True
        try:
            await self._router.start(timeout_s)
        except BaseException:
            await self.aclose()
            raise

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Go away in an orderly way: begin no transaction any more, take no checks, wait for
        what still runs, close. Return False where `timeout_s` passed before all was done."""
        self._book.closed = True
        self._draining = self._desk.draining = True
        for session in self._router.sessions:
            session.post(Drain())
        finished = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._book.no_blocks()
                await self._calls.settle()
                await self._desk.settle()
                finished = True
        await self.aclose()
        return finished

    async def aclose(self) -> None:
        """Close at once. What is undecided then is left to the check-back."""
        self._book.closed = True
        await self._calls.close()
        await self._desk.close()
        await self._router.close()
        if self._http is not None:
            await self._http.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.drain(DRAIN_TIMEOUT_S)

    # --- transactions --------------------------------------------------------------------

    def transaction(
        self,
        *messages: Message,
        order_key: str | None = None,
        check_after_s: float | None = None,
        check_interval_s: float | None = None,
    ) -> TransactionBlock:
        """Return a block for a local transaction: `async with producer.transaction(m) as tx`.

        Args:
            messages: what a commit publishes, all or none.
            order_key: commits of one order key become visible in the order in which they were
                acknowledged; by default topic and key of the first message.
            check_after_s: when to ask for the first time, instead of the group's setting.
            check_interval_s: how long to wait between two checks, likewise.

        Raises:
            BadRequest: a message or option is malformed.
            On entry: ProducerClosed; Overloaded, OwnerUnavailable: the block does not run, nothing
            will be published; other RequestErrors: it was refused.
            On leaving: as `Transaction.commit`.
        """
        if order_key is not None:
            order_key = checked_text("order_key", order_key)
        if check_after_s is not None:
            check_after_s = checked_seconds("check_after_s", check_after_s)
        if check_interval_s is not None:
            check_interval_s = checked_seconds("check_interval_s", check_interval_s)
        draft = Draft(checked(messages), order_key, check_after_s, check_interval_s)
        return TransactionBlock(draft, self._calls, self._book)

    async def send_in_transaction(
        self,
        messages: Message | Iterable[Message],
        function: LocalFunction,
        *,
        order_key: str | None = None,
        check_after_s: float | None = None,
        check_interval_s: float | None = None,
        wait: Wait = "decided",
    ) -> Outcome:
        """Prepare, call `function` with the transaction, decide as it says.

        A Decision is what is decided, None stands for commit, `raise Rollback` rolls back. UNKNOWN,
        like any other exception, leaves it to the check. Options and errors as in `transaction`.
        """
        promoted = checked_wait(wait)
        several = (messages,) if isinstance(messages, Message) else messages
        block = self.transaction(
            *several,
            order_key=order_key,
            check_after_s=check_after_s,
            check_interval_s=check_interval_s,
        )
        transaction = await block.__aenter__()
        try:
            decision = await _run_local(block, transaction, function)
            if decision is Decision.ROLLBACK:
                raise Rollback("the function said so")
            if decision is Decision.UNKNOWN:
                transaction.leave_in_doubt(None)
            elif promoted and transaction.outcome.decision is not Decision.ROLLBACK:
                await transaction.commit("promoted")
        except _StillRunning as error:
            raise error.cancellation from None
        except BaseException as error:
            if not await block.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            if decision is Decision.UNKNOWN:
                self._book.block_closed()
            else:
                await block.__aexit__(None, None, None)
        return transaction.outcome

    # --- step by step --------------------------------------------------------------------

    async def prepare(
        self,
        *messages: Message,
        order_key: str | None = None,
        check_after_s: float | None = None,
        check_interval_s: float | None = None,
    ) -> str:
        """Store messages as a half message and return its id, to be decided by `commit` or
        `rollback`, here or in another process. Checks go to the check function from the start.

        Errors as on entry of `transaction`.
        """
        block = self.transaction(
            *messages,
            order_key=order_key,
            check_after_s=check_after_s,
            check_interval_s=check_interval_s,
        )
        self._book.require_open()
        standing = await prepared(self._calls, block.draft)
        self._book.settled(standing.id)
        return standing.id

    async def commit(
        self,
        transaction_id: str,
        messages: Iterable[Message] | None = None,
        *,
        wait: Wait = "decided",
        reason: str = "",
    ) -> Outcome:
        """Commit a prepared transaction, where given with final `messages`.

        Raises: as `Transaction.commit`; BadId, NotFound, WrongGroup, TooOld; BodyLost: the half
        message was deleted, so only a commit with `messages` can be taken.
        """
        self._book.require_started()
        final = None if messages is None else checked(messages)
        promoted = checked_wait(wait)
        operation = Decide(
            self._calls.number(), transaction_id, Decision.COMMIT, final, reason, promoted
        )
        return outcome_of(await decided(self._calls, operation))

    async def rollback(self, transaction_id: str, *, reason: str = "") -> Outcome:
        """Roll a prepared transaction back.

        Raises: as `commit`.
        """
        self._book.require_started()
        operation = Decide(self._calls.number(), transaction_id, Decision.ROLLBACK, reason=reason)
        return outcome_of(await decided(self._calls, operation))

    # --- sessions ------------------------------------------------------------------------

    async def _open_session(self, address: str) -> Session:
        assert self._http is not None
        hello = Hello(SESSION_VERSION, self.group, self.instance, self._desk.has_function)
        session = await open_session(self._http, address, hello, self, self._limits, self._tls)
        if self._draining:
            session.post(Drain())
        return session

    def owners_changed(self, session: Session, before: tuple[str, ...]) -> None:
        """See `txbroker.sdk.session.Listener`."""
        self._router.owners_changed(session, before)

    def check_arrived(self, session: Session, check: CheckQuestion) -> None:
        """See `txbroker.sdk.session.Listener`."""
        self._desk.arrived(session, check)

    def session_lost(self, session: Session, why: str) -> None:
        """See `txbroker.sdk.session.Listener`."""
        self._router.session_lost(session, why)


class _StillRunning(Exception):
    """The task was cancelled, but the local transaction goes on in its thread."""

    def __init__(self, cancellation: asyncio.CancelledError) -> None:
        super().__init__()
        self.cancellation = cancellation


async def _run_local(
    block: TransactionBlock, transaction: Transaction, function: LocalFunction
) -> Decision | None:
    if is_coroutine_function(function):
        result: object = function(transaction)
    else:
        loop = asyncio.get_running_loop()
        here = contextvars.copy_context()
        running = loop.run_in_executor(None, here.run, function, transaction)
        try:
            result = await asyncio.shield(running)
        except asyncio.CancelledError as error:
            if running.done():
                raise
            block.leave_running(cast("asyncio.Future[object]", running), error)
            raise _StillRunning(error) from None
    return checked_decision(await result if inspect.isawaitable(result) else result)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _checked_urls(urls: str | Sequence[str]) -> list[str]:
    several = [urls] if isinstance(urls, str) else list(urls)
    if not several:
        raise ConfigurationError("a producer needs the URL of at least one proxy")
    for url in several:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"a proxy's URL begins with http:// or https://, not {url!r}")
    return list(dict.fromkeys(url.rstrip("/") for url in several))


def _made_up_instance() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
