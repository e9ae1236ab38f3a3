"""A whole txbroker in the test's own process, on a Kafka in memory: what the fixtures hand out."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any, Self, TypeVar

from txbroker.config.settings import DAY_S, Settings
from txbroker.contract.service import ListRequest, TransactionView
from txbroker.core.encoding import INSTALLATION_HEADER, SEQUENCE_HEADER
from txbroker.core.lifecycle import UNDECIDED
from txbroker.core.records import Message, Record, State
from txbroker.core.schedule import due_ms
from txbroker.errors import TxbrokerError
from txbroker.proxy.process import Proxy, run_proxy
from txbroker.testing.door import MemoryDoor
from txbroker.testing.memory import MESSAGE_BYTES_MAX, LostReply, MemoryKafka

SETTLED_TIMEOUT_S = 10.0
"""How long a test waits by default for what should take milliseconds."""
_POLL_S = 0.005

T = TypeVar("T")


class NotSettled(AssertionError):
    """Something is still undecided, or on its way, after the time that a test gave it."""


class PromotedMessage(Message, frozen=True, kw_only=True):
    """A message as a `read_committed` consumer sees it.

    `headers` are the user's own, without the first ones (`txb-installation`, `txb-id` and
    `txb-seq`).

    Attributes:
        offset: in its partition.
        transaction_id: of the transaction that it came with.
    """

    offset: int
    transaction_id: str


class InMemoryBroker:
    """A running txbroker: a real proxy with HTTP API and SDK sessions, on a Kafka in memory.

    It runs in a thread with an event loop of its own, so blocking and async code can use it alike.
    From async tests `await` the methods that wait, `async_advance` and
    `async_wait_until_settled`: a check may need the event loop that the blocking ones would hold.

    Args:
        settings: of `Settings`. Unless said otherwise targets are created when a
            message is prepared for them, as `txbroker dev` does, and time may be put forward by
            days.
    """

    def __init__(self, **settings: Any) -> None:
        chosen = {
            "listen": "127.0.0.1:0",
            "instance": "in-memory",
            "partitions": 1,
            "create_target_topics": True,
            # SDKs hear of the clock once a minute, so their ids come from before an advance.
            "dedup_window_s": 5 * DAY_S,
            "half_retention_s": 365 * DAY_S,
            **settings,
        }
        self._settings = Settings(**chosen)
        self._settings.validate_whole()
        self._kafka: MemoryKafka
        self._door: MemoryDoor
        self._proxy: Proxy
        self._stack = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="txbroker-testing", daemon=True)

    # --- life ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the proxy; `with` does it.

        Raises:
            ConfigurationError: the settings cannot work.
        """
        self._thread.start()
        try:
            self._run(self._begin())
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Stop everything and forget all messages."""
        try:
            self._run(self._stack.aclose())
        finally:
            self._end()

    def restart(self) -> None:
        """Stop the proxy and start another one at the same URL on the same Kafka, as after a
        crash: what is undecided stays so."""
        self._run(self._again())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where the HTTP API and the SDK's sessions are, such as `http://127.0.0.1:40123`."""
        return self._proxy.url

    # --- topics --------------------------------------------------------------------------

    def create_topic(
        self, topic: str, partitions: int = 1, *, message_bytes_max: int = MESSAGE_BYTES_MAX
    ) -> None:
        """Create a topic; one that exists stays as it is.

        Raises:
            ValueError: no topic can have that name.
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
        """Return what consumers see of a topic, partition by partition; nothing where there is
        no such topic (yet)."""
        return self._do(lambda: list(self._promoted(topic)))

    # --- transactions --------------------------------------------------------------------

    def pending(self) -> list[TransactionView]:
        """Return the transactions that are not decided: pending and parked ones."""
        return [each for each in self.transactions() if each.state in UNDECIDED]

    def transactions(self, state: State | None = None) -> list[TransactionView]:
        """Return the transactions in a state; None: all that are not promoted or rolled back."""
        return self._run(self._list(state))

    def transaction(self, id: str) -> TransactionView:
        """Return all that is known of a transaction.

        Raises:
            NotFound, BadId: there is none.
        """
        return self._run(self._proxy.broker.find(id, bodies=True))

    # --- time ----------------------------------------------------------------------------

    def wait_until_settled(self, timeout_s: float = SETTLED_TIMEOUT_S) -> None:
        """Wait until nothing is pending and everything committed is visible or refused.

        Raises:
            NotSettled: that took longer; names what is left.
        """
        self._run(self._settled(timeout_s))

    async def async_wait_until_settled(self, timeout_s: float = SETTLED_TIMEOUT_S) -> None:
        """The same for async tests."""
        await self._run_beside(self._settled(timeout_s))

    def advance(self, seconds: float) -> None:
        """Put the clock forward. Checks that come due on the way are made one after another, as
        if the time had passed, and are over when this returns.

        Raises:
            NotSettled: a check has no end.
        """
        self._run(self._advance(seconds))

    async def async_advance(self, seconds: float) -> None:
        """The same for async tests."""
        await self._run_beside(self._advance(seconds))

    # --- trouble -------------------------------------------------------------------------

    def kafka_down(self, *, stored: bool = False) -> None:
        """Let Kafka answer nothing any more. `stored`: what is written is stored all the same,
        only the answer is lost."""
        outcome = LostReply.DONE if stored else LostReply.NOT_DONE
        self._do(lambda: self._kafka.go_down(outcome))

    def kafka_up(self) -> None:
        """Let Kafka answer again."""
        self._do(lambda: self._kafka.come_up())

    # --- in the loop ---------------------------------------------------------------------

    async def _begin(self) -> None:
        self._kafka = MemoryKafka()
        await self._start_proxy()

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

    def _promoted(self, topic: str) -> Iterator[PromotedMessage]:
        found = self._kafka.topics.get(topic)
        for number in range(len(found.partitions) if found else 0):
            for record in self._kafka.visible(topic, number):
                yield _as_message(topic, number, record)

    async def _list(self, state: State | None) -> list[TransactionView]:
        page = await self._proxy.broker.list(ListRequest(state=state, limit=1_000_000))
        return list(page.transactions)

    async def _settled(self, timeout_s: float) -> None:
        def unsettled() -> list[str]:
            return [
                f"{transaction.id} of group {transaction.half.group!r} is {transaction.state}"
                for _, transaction in self._proxy.broker.unsettled()
                if transaction.state in (State.PENDING, State.COMMITTED)
            ]

        if not await _until(lambda: not unsettled(), timeout_s):
            raise NotSettled(f"after {timeout_s:g} s: {'; '.join(unsettled())}")

    async def _advance(self, seconds: float) -> None:
        clock = self._kafka.clock
        end_ms = clock.now_ms() + round(seconds * 1000)
        while True:
            await self._checks_over()
            now_ms = clock.now_ms()
            ahead_ms = [at for at in self._due_ms() if now_ms < at < end_ms]
            step_ms = min(ahead_ms, default=end_ms) - now_ms
            if step_ms <= 0:
                return
            clock.advance(step_ms / 1000)
            self._proxy.broker.clock_at_least(clock.now_ms())

    def _due_ms(self) -> list[int]:
        """Return when pending transactions need attention next, without those that nobody can be
        asked about."""
        away = self._proxy.checks.unreachable()
        return [
            at_ms
            for _, transaction in self._proxy.broker.unsettled()
            if (at_ms := due_ms(transaction)) is not None and transaction.half.group not in away
        ]

    async def _checks_over(self) -> None:
        """Wait until what is due has been dealt with and no answer is awaited."""

        def over() -> bool:
            now_ms = self._kafka.clock.now_ms()
            return not self._proxy.checks.running and all(at > now_ms for at in self._due_ms())

        if not await _until(over, SETTLED_TIMEOUT_S):
            raise NotSettled(
                "a check that was due is not over: its function does not answer, or it needs the "
                "event loop that waits here (await async_advance in async tests)"
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

    async def _run_beside(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a condition holds; False where it does not in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        if loop.time() > deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _as_message(topic: str, partition: int, record: Record) -> PromotedMessage:
    """Take our own headers, which come first, off a promoted record."""
    headers = tuple(record.headers)
    if headers[0][0] == INSTALLATION_HEADER:
        headers = headers[1:]
    ours = 2 if [name for name, _ in headers[1:2]] == [SEQUENCE_HEADER] else 1
    return PromotedMessage(
        topic,
        record.key,
        record.value,
        headers[ours:],
        partition,
        record.timestamp_ms,
        offset=record.offset,
        transaction_id=(headers[0][1] or b"").decode(),
    )
