"""A complete txbroker in the test's process, on a Kafka in memory."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any, Self, TypeVar

from txbroker.contract.service import ListRequest, TransactionView
from txbroker.core.decoding import decode_promoted
from txbroker.core.index import due_ms
from txbroker.core.lifecycle import UNDECIDED
from txbroker.core.records import Message, Record, State
from txbroker.door.consuming import ConsumingDoor
from txbroker.errors import TxbrokerError, needs
from txbroker.testing.consuming import MemoryConsumingDoor
from txbroker.testing.door import MemoryDoor
from txbroker.testing.memory import MemoryKafka
from txbroker.testing.topics import MESSAGE_BYTES_MAX, LostReply

with needs("proxy"):
    from txbroker.config.settings import DAY_S, Settings
    from txbroker.proxy.process import Proxy, run_proxy

SETTLED_TIMEOUT_S = 10.0
"""The default timeout of waits that should take milliseconds."""
_POLL_S = 0.005

T = TypeVar("T")


class NotSettled(AssertionError):
    """A transaction is still undecided or not promoted after the timeout."""


class PromotedMessage(Message, frozen=True, kw_only=True):
    """A message as a `read_committed` consumer sees it.

    `headers` are the user's, without txbroker's (`txb-installation`, `txb-id` and `txb-seq`).

    Attributes:
        offset: in its partition.
        transaction_id: of its transaction; "" of what a consumer wrote, such as a dead letter.
    """

    offset: int
    transaction_id: str


class InMemoryBroker:
    """A running txbroker: a real proxy with HTTP API and SDK sessions, on a Kafka in memory.

    It runs in a thread with a separate event loop, so both blocking and async code can use it. In
    async tests `await` the methods `async_advance` and `async_wait_until_settled`: a check may need
    the event loop that the blocking ones would hold.

    Args:
        settings: of `Settings`. By default a target topic is created when a message is prepared for
            it, as by `txbroker dev`, and the clock may be advanced by days.
    """

    def __init__(self, **settings: Any) -> None:
        chosen = {
            "listen": "127.0.0.1:0",
            "instance": "in-memory",
            "partitions": 1,
            "create_target_topics": True,
            # SDKs get the clock once a minute, so their ids may date from before an advance.
            "dedup_window_s": 5 * DAY_S,
            "half_retention_s": 365 * DAY_S,
            **settings,
        }
        self._settings = Settings(**chosen)
        self._settings.validate_whole()
        self._kafka = MemoryKafka()
        self._door: MemoryDoor
        self._proxy: Proxy
        self._stack = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="txbroker-testing", daemon=True)

    # --- life ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the proxy; `with` does it.

        Raises:
            ConfigurationError: the settings are invalid.
        """
        self._thread.start()
        try:
            self._run(self._start_proxy())
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Stop the proxy and delete all messages."""
        try:
            self._run(self._stack.aclose())
        finally:
            self._end()

    def restart(self) -> None:
        """Stop the proxy and start another one at the same URL on the same Kafka, as after a
        crash: undecided transactions stay undecided."""
        self._run(self._again())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The URL of the HTTP API and of SDK sessions, such as `http://127.0.0.1:40123`."""
        return self._proxy.url

    # --- topics --------------------------------------------------------------------------

    def create_topic(
        self, topic: str, partitions: int = 1, *, message_bytes_max: int = MESSAGE_BYTES_MAX
    ) -> None:
        """Create a topic; one that exists stays as it is.

        Raises:
            ValueError: the name is invalid.
        """

        def create() -> None:
            self._kafka.create_topic(topic, partitions, message_bytes_max=message_bytes_max)
            self._door.targets.forget(topic)

        self._do(create)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its messages.

        Raises:
            KeyError: there is none.
        """

        def delete() -> None:
            self._kafka.delete_topic(topic)
            self._door.targets.forget(topic)

        self._do(delete)

    def messages(self, topic: str) -> list[PromotedMessage]:
        """Return the messages that consumers see, partition by partition; none if the topic does
        not exist (yet)."""
        return self._do(lambda: list(self._promoted_messages(topic)))

    # --- consumers -----------------------------------------------------------------------

    def consuming_door(self) -> ConsumingDoor:
        """Return a door to this Kafka for one consumer, for any event loop. Close the consumer
        before the broker."""
        return MemoryConsumingDoor(self._kafka, self._loop)

    # --- transactions --------------------------------------------------------------------

    def pending(self) -> list[TransactionView]:
        """Return the undecided transactions: pending and parked ones."""
        return [view for view in self.transactions() if view.state in UNDECIDED]

    def transactions(self, state: State | None = None) -> list[TransactionView]:
        """Return the transactions in a state; None: all that are not promoted or rolled back."""

        async def listed() -> list[TransactionView]:
            page = await self._proxy.broker.list(ListRequest(state=state, limit=1_000_000))
            return list(page.transactions)

        return self._run(listed())

    def transaction(self, id: str) -> TransactionView:
        """Return a transaction with its messages and history.

        Raises:
            NotFound, BadId: there is none.
        """
        return self._run(self._proxy.broker.find(id, bodies=True))

    # --- time ----------------------------------------------------------------------------

    def wait_until_settled(self, timeout_s: float = SETTLED_TIMEOUT_S) -> None:
        """Wait until nothing is pending and every committed transaction is visible or refused.

        Raises:
            NotSettled: after `timeout_s`; names the transactions left.
        """
        self._run(self._wait_settled(timeout_s))

    async def async_wait_until_settled(self, timeout_s: float = SETTLED_TIMEOUT_S) -> None:
        """The same for async tests."""
        await self._run_async(self._wait_settled(timeout_s))

    def advance(self, seconds: float) -> None:
        """Advance the clock. Checks that become due are made in order, as if the time had passed,
        and have ended when this returns.

        Raises:
            NotSettled: a check does not end.
        """
        self._run(self._advance(seconds))

    async def async_advance(self, seconds: float) -> None:
        """The same for async tests."""
        await self._run_async(self._advance(seconds))

    # --- faults --------------------------------------------------------------------------

    def kafka_down(self, *, stored: bool = False) -> None:
        """Stop Kafka from answering. `stored`: writes are stored all the same, only the answers are
        lost."""
        outcome = LostReply.DONE if stored else LostReply.NOT_DONE
        self._do(lambda: self._kafka.go_down(outcome))

    def kafka_up(self) -> None:
        """Let Kafka answer again."""
        self._do(lambda: self._kafka.come_up())

    # --- in the loop ---------------------------------------------------------------------

    async def _start_proxy(self) -> None:
        settings = self._settings
        self._door = MemoryDoor(
            self._kafka,
            instance=settings.instance,
            topic_prefix=settings.topic_prefix,
            half_partitions=settings.partitions,
        )
        self._proxy = await self._stack.enter_async_context(run_proxy(self._door, settings))
        await _until(lambda: self._proxy.broker.readiness().ready, SETTLED_TIMEOUT_S)

    async def _again(self) -> None:
        url = self._proxy.url
        await self._stack.aclose()
        listen = url.removeprefix("http://")
        self._settings = self._settings.model_copy(update={"listen": listen})
        await self._start_proxy()

    def _promoted_messages(self, topic: str) -> Iterator[PromotedMessage]:
        known = self._kafka.topics.get(topic)
        for number in range(len(known.partitions) if known else 0):
            for record in self._kafka.visible(topic, number):
                yield _as_message(topic, number, record)

    async def _wait_settled(self, timeout_s: float) -> None:
        def unsettled() -> list[str]:
            return [
                f"{transaction.id} of group {transaction.half.group!r} is {transaction.state}"
                for owner in self._proxy.broker.partitions.open().values()
                for transaction in owner.ledger.index.transactions.values()
                if transaction.state in (State.PENDING, State.COMMITTED)
            ]

        if not await _until(lambda: not unsettled(), timeout_s):
            raise NotSettled(f"after {timeout_s:g} s: {'; '.join(unsettled())}")

    async def _advance(self, seconds: float) -> None:
        clock = self._kafka.clock
        end_ms = clock.now_ms() + round(seconds * 1000)
        while True:
            await self._wait_for_checks()
            now_ms = clock.now_ms()
            ahead_ms = [at for at in self._due_ms() if now_ms < at < end_ms]
            step_ms = min(ahead_ms, default=end_ms) - now_ms
            if step_ms <= 0:
                return
            clock.advance(step_ms / 1000)
            for owner in self._proxy.broker.partitions.open().values():
                owner.clock.at_least(clock.now_ms())
                owner.id_clock.at_least(clock.now_ms())
                owner.checks.look_again()

    def _due_ms(self) -> list[int]:
        """Return the due times of pending transactions, except those of unreachable groups."""
        unreachable = self._proxy.checks.unreachable()
        return [
            at_ms
            for owner in self._proxy.broker.partitions.open().values()
            for transaction in owner.ledger.index.transactions.values()
            if (at_ms := due_ms(transaction)) is not None
            and transaction.half.group not in unreachable
        ]

    async def _wait_for_checks(self) -> None:
        """Wait until due checks have been made and answered."""

        def ended() -> bool:
            now_ms = self._kafka.clock.now_ms()
            return not self._proxy.checks.running and all(at > now_ms for at in self._due_ms())

        if not await _until(ended, SETTLED_TIMEOUT_S):
            raise NotSettled(
                "a due check does not end: its function does not return, or it needs the event "
                "loop that waits here (await async_advance in async tests)"
            )

    # --- the thread ----------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _do(self, work: Callable[[], T]) -> T:
        """Call a function in the broker's loop."""

        async def call() -> T:
            return work()

        return self._run(call())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise TxbrokerError("the in-memory broker is not running: use `with`, or start it")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _run_async(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a condition holds; return False after the timeout."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        if loop.time() > deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _as_message(topic: str, partition: int, record: Record) -> PromotedMessage:
    """Return a record as a message, without txbroker's headers, which come first if it was
    promoted."""
    promoted = decode_promoted(record)
    return PromotedMessage(
        topic,
        record.key,
        record.value,
        tuple(record.headers) if promoted is None else promoted.headers,
        partition,
        record.timestamp_ms,
        offset=record.offset,
        transaction_id="" if promoted is None else promoted.id,
    )
