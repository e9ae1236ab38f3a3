"""The producer for code that blocks: Django, Flask, Celery, scripts.

A `TransactionalProducer` runs in the event loop of a separate thread; every call here waits for one
there. A forked process does not use its parent's producer: its first call starts another
thread with new sessions.
"""

import asyncio
import atexit
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from txbroker.contract.checks import Rollback
from txbroker.core.records import Decision, Message
from txbroker.errors import TxbrokerError
from txbroker.sdk.producer import DRAIN_TIMEOUT_S, START_TIMEOUT_S, TransactionalProducer
from txbroker.sdk.transaction import (
    Transaction,
    TransactionBlock,
    checked_decision,
    checked_wait,
)
from txbroker.sdk.types import Outcome, ProducerClosed, TransactionOptions, Wait

P = ParamSpec("P")
T = TypeVar("T")

EXIT_TIMEOUT_S = 5.0
"""How long the end of the program waits for a producer that was not closed."""


class ForkedTransaction(TxbrokerError):
    """This transaction was begun in the parent process: only that one may decide it."""


# Signatures, types and docstrings of these methods come from their async twins.


def _in_transaction(
    method: Callable[Concatenate[Transaction, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["BlockingTransaction", P], T]:
    @functools.wraps(method)
    def call(self: "BlockingTransaction", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._engine.run(method(self._transaction, *args, **kwargs))

    return call


def _in_producer(
    method: Callable[Concatenate[TransactionalProducer, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["BlockingTransactionalProducer", P], T]:
    @functools.wraps(method)
    def call(self: "BlockingTransactionalProducer", /, *args: P.args, **kwargs: P.kwargs) -> T:
        engine = self._started()
        return engine.run(method(engine.producer, *args, **kwargs))

    return call


def _with_arguments(
    init: Callable[Concatenate[TransactionalProducer, P], None],
) -> Callable[
    [Callable[..., None]], Callable[Concatenate["BlockingTransactionalProducer", P], None]
]:
    return functools.wraps(init)


class BlockingTransaction:
    """A prepared transaction in a block of the blocking producer; see `Transaction`.

    A process that was forked inside the block gets `ForkedTransaction` from `commit` and
    `rollback`.
    """

    def __init__(self, engine: "_Engine", transaction: Transaction) -> None:
        self._engine = engine
        self._transaction = transaction

    @property
    def id(self) -> str:
        """Identifies it everywhere; the barrier's row carries it."""
        return self._transaction.id

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that a commit would publish."""
        return self._transaction.messages

    @property
    def outcome(self) -> Outcome:
        """The status of the transaction, as known here."""
        return self._transaction.outcome

    @property
    def rolled_back(self) -> bool:
        """As `Transaction.rolled_back`."""
        return self._transaction.rolled_back

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.outcome.state}>"

    def replace(self, *messages: Message) -> None:
        """As `Transaction.replace`."""
        self._transaction.replace(*messages)

    commit = _in_transaction(Transaction.commit)
    rollback = _in_transaction(Transaction.rollback)


class BlockingTransactionBlock:
    """`with producer.transaction(…) as tx`: prepares on entry, decides on leaving."""

    def __init__(self, engine: "_Engine", block: TransactionBlock) -> None:
        self._engine = engine
        self._block = block

    def __enter__(self) -> BlockingTransaction:
        transaction = self._engine.run(self._block.__aenter__())
        return BlockingTransaction(self._engine, transaction)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is not None and self._engine.foreign:
            return False  # a child process that ends inside its parent's block decides nothing
        return self._engine.run(self._block.__aexit__(kind, error, trace))


BlockingLocalFunction = Callable[[BlockingTransaction], Decision | None]
"""A local transaction; it is called in the caller's thread."""


class BlockingTransactionalProducer:
    """`TransactionalProducer` with the same names, for code without an event loop.

    Starts at its first use, or with `with`; may be used from many threads at once, and in
    processes forked later. Check functions are called in separate threads.

    Example:
        producer = BlockingTransactionalProducer(url, group="orders", check=check_order)
        with producer.transaction(Message("payments", key=b"42", value=body)) as tx:
            place_order(tx.id)

    Args and errors: as `TransactionalProducer`.
    """

    @_with_arguments(TransactionalProducer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._make = functools.partial(TransactionalProducer, *args, **kwargs)
        # Made so that wrong arguments are refused here, not at the first use.
        made = self._make()
        self.group = made.group
        self._described = repr(made).partition(" ")[2].removesuffix(" not started>")
        self._lock = threading.Lock()
        self._engine: _Engine | None = None
        self._closed = False
        _producers.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "started" if self._engine else "not started"
        return f"<{type(self).__name__} {self._described} {state}>"

    # --- life ----------------------------------------------------------------------------

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Open the first session; otherwise the first call does it.

        Raises: as `TransactionalProducer.start`.
        """
        self._started(timeout_s)

    def drain(self, timeout_s: float | None = None) -> bool:
        """As `TransactionalProducer.drain`."""
        engine = self._take_engine()
        return engine is None or engine.end(engine.producer.drain(timeout_s))

    def close(self) -> None:
        """Close at once; the check-back settles undecided transactions."""
        engine = self._take_engine()
        if engine is not None:
            engine.end(engine.producer.aclose())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drain(DRAIN_TIMEOUT_S)

    # --- transactions --------------------------------------------------------------------

    def transaction(
        self,
        *messages: Message,
        **options: Unpack[TransactionOptions],
    ) -> BlockingTransactionBlock:
        """As `TransactionalProducer.transaction`: `with producer.transaction(m) as tx`."""
        engine = self._started()
        block = engine.producer.transaction(*messages, **options)
        return BlockingTransactionBlock(engine, block)

    prepare = _in_producer(TransactionalProducer.prepare)
    commit = _in_producer(TransactionalProducer.commit)
    rollback = _in_producer(TransactionalProducer.rollback)

    def send_in_transaction(
        self,
        messages: Message | Iterable[Message],
        function: BlockingLocalFunction,
        *,
        wait: Wait = "decided",
        **options: Unpack[TransactionOptions],
    ) -> Outcome:
        """As `TransactionalProducer.send_in_transaction`; `function` runs in this thread."""
        promoted = checked_wait(wait)
        block = self.transaction(
            *((messages,) if isinstance(messages, Message) else messages), **options
        )
        with contextlib.suppress(_Unknown), block as transaction:
            decision = checked_decision(function(transaction))
            if decision is Decision.ROLLBACK:
                raise Rollback("the function returned rollback")
            if decision is Decision.UNKNOWN:
                raise _Unknown("the function returned unknown")
            if promoted and transaction.outcome.decision is not Decision.ROLLBACK:
                transaction.commit("promoted")
        return transaction.outcome

    # --- the thread ----------------------------------------------------------------------

    def _started(self, timeout_s: float = START_TIMEOUT_S) -> "_Engine":
        with self._lock:
            if self._closed:
                raise ProducerClosed("the producer is closed: no new transactions")
            if self._engine is None:
                engine = _Engine(self._make)
                try:
                    engine.run(engine.producer.start(timeout_s))
                except BaseException:
                    engine.end(engine.producer.aclose())
                    raise
                self._engine = engine
            return self._engine

    def _take_engine(self) -> "_Engine | None":
        with self._lock:
            engine, self._engine, self._closed = self._engine, None, True
            return engine

    def _after_fork_in_child(self) -> None:
        # A thread that does not exist here may have held the lock.
        self._lock = threading.Lock()
        if self._engine is not None:
            # Kept for ever: closing it would take sockets out of the parent's selector, which
            # the child shares.
            _inherited.append(self._engine)
            self._engine = None


class _Unknown(Exception):
    """Leaves a block undecided."""


class _Engine:
    """An event loop in a daemon thread, and the producer that lives in it."""

    def __init__(self, make: Callable[[], TransactionalProducer]) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="txbroker-producer", daemon=True)
        self._thread.start()
        self.producer = self.run(_made(make))

    @property
    def foreign(self) -> bool:
        """True in a process that was forked since."""
        return os.getpid() != self._pid

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and return its result; an interruption cancels it there."""
        if self.foreign:
            work.close()
            raise ForkedTransaction
        if threading.current_thread() is self._thread:
            work.close()
            raise TxbrokerError("the blocking producer cannot be used inside its own event loop")
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise ProducerClosed("the producer is closed") from None
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def end(self, farewell: Coroutine[Any, Any, T]) -> T:
        """Run `farewell` and end the thread."""
        try:
            return self.run(farewell)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())


async def _made(make: Callable[[], TransactionalProducer]) -> TransactionalProducer:
    return make()


_producers: "weakref.WeakSet[BlockingTransactionalProducer]" = weakref.WeakSet()
_inherited: list[_Engine] = []


def _forget_parents_engines() -> None:
    for producer in list(_producers):
        producer._after_fork_in_child()


def _close_at_exit() -> None:
    for producer in list(_producers):
        with contextlib.suppress(TxbrokerError):
            producer.drain(EXIT_TIMEOUT_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents_engines)
atexit.register(_close_at_exit)
