"""The network between processes: requests to brokers, messages to one another, and their fates."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

from aiokafka.errors import KafkaConnectionError, RequestTimedOutError
from msgspec import Struct

from tests.simulator.sim_kafka import FIRST_PORT, Cluster
from tests.simulator.sim_loop import PROCESS, Handle, Life, Process, SimLoop
from txbroker.kafka.protocol.schemas import FetchV11, ListOffsetsV3


class Weather(Struct):
    """How often the network does what to a message. All zero: everything arrives, and soon.

    Attributes:
        delay_s: how long a message takes at least and at most.
        slow: the share of messages that take up to `slow_s`.
        lost: the share of requests that never arrive.
        unanswered: the share of requests whose answer never arrives.
        late: the share of requests whose sender sees the connection close, and that
            arrive up to `late_s` later all the same.
        only: the kind of requests that these three shares are of, "" for all.
    """

    delay_s: tuple[float, float] = (0.0002, 0.002)
    slow: float = 0.0
    slow_s: float = 1.0
    lost: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0
    late_s: float = 8.0
    only: str = ""


class Network:
    """All of it. `cuts` holds (process name, broker) pairs that do not reach one another."""

    def __init__(self, loop: SimLoop, cluster: Cluster) -> None:
        self.loop = loop
        self.cluster = cluster
        self.weather = Weather()
        self.cuts: set[tuple[str, int]] = set()
        self.down: set[int] = set()
        self.prompt: frozenset[str] = frozenset()
        """Requests that never arrive late: they are lost instead."""
        self.ghosts: dict[str, tuple[Connection, Any]] = {}
        self.note: Callable[[str], None] = lambda _: None

    def delay_s(self, process: Process) -> float:
        """Return how long a message of a process takes."""
        random, weather = process.random, self.weather
        low, high = weather.delay_s
        delay_s = low + (high - low) * random.random()
        if weather.slow and random.random() < weather.slow:
            delay_s += random.random() * weather.slow_s
        return delay_s

    def reaches(self, process: Process, node: int) -> bool:
        """Return whether a process and a broker reach each other."""
        return node not in self.down and (process.name, node) not in self.cuts

    async def open(self, host: str, port: int, **settings: Any) -> Connection:
        """Open a connection to a broker, in the client library's place."""
        process = PROCESS.get()
        node = port - FIRST_PORT
        await asyncio.sleep(self.delay_s(process) * 2)
        if not self.reaches(process, node):
            # Refused at once, or nothing at all comes back.
            if process.random.random() < 0.5:
                await asyncio.sleep(settings["request_timeout_s"])
                raise TimeoutError
            raise ConnectionRefusedError(111, "connection refused")
        return Connection(self, process, node, settings["request_timeout_s"])

    async def pass_message(self) -> None:
        """Wait as long as a message of the process that runs takes to arrive somewhere."""
        await asyncio.sleep(self.delay_s(PROCESS.get()))


class Actor:
    """What runs in a process that can be started, killed at any step, and stopped for a while.

    Args:
        name: of it, which it keeps over restarts.
        seed: of the run.
    """

    def __init__(self, name: str, seed: str, network: Network) -> None:
        self.name = name
        self.lives = 0
        self.process: Process
        self._seed = seed
        self._network = network

    @property
    def up(self) -> bool:
        """Whether it runs, or is stopped and will go on."""
        return self.lives > 0 and self.process.life is not Life.DEAD

    def start(self, wall_ahead_s: float = 0.0) -> None:
        self.lives += 1
        self.process = Process(self.name, f"{self._seed}/{self.name}/{self.lives}")
        self.process.wall_ahead_s = wall_ahead_s
        self._network.note(f"{self.name}: starts, life {self.lives}")
        self._network.loop.create_task(self._run(), context=self.process.context)

    def kill(self) -> None:
        self._network.note(f"{self.name}: killed")
        self.process.life = Life.DEAD

    def pause(self) -> None:
        """Stop; it does not notice."""
        self._network.note(f"{self.name}: paused")
        self.process.life = Life.PAUSED

    def resume(self) -> None:
        self.wake(self.process)

    def wake(self, process: Process) -> None:
        """Let one of its processes go on, also one that was replaced."""
        if process.life is Life.PAUSED:
            self._network.note(f"{self.name}: goes on")
            self._network.loop.resume(process)

    def ending(self) -> Coroutine[Any, Any, None] | None:
        """Return what lets it end in order; None: it has not begun."""
        raise NotImplementedError

    async def _run(self) -> None:
        raise NotImplementedError


class Connection:
    """A connection of a process to a broker: requests arrive in order."""

    def __init__(self, network: Network, process: Process, node: int, timeout_s: float) -> None:
        self._network = network
        self._loop = network.loop
        self._process = process
        self._node = node
        self._timeout_s = timeout_s
        self._up = True
        self._free_s = 0.0
        self._waiting: dict[asyncio.Future[Any], Handle] = {}

    def connected(self) -> bool:
        """Whether it is up, as far as this side knows."""
        return self._up

    def send(self, request: Any, answer: Any = None) -> Any:
        """Send a request; the future that is returned, or `answer`, brings its answer.

        Raises:
            KafkaConnectionError: the connection is down.
        """
        if not self._up:
            raise KafkaConnectionError(f"no connection to broker {self._node}")
        process, random, weather = self._process, self._process.random, self._network.weather
        future: asyncio.Future[Any] = answer or self._loop.create_future()
        timer = self._loop.call_later(self._timeout_s, self._expire, future)
        self._waiting[future] = timer
        fate = random.random()
        if weather.only and weather.only != _word(request):
            fate = 1.0
        brokers = self._network.cluster.process.context
        if fate < weather.lost:
            self._network.note(f"{process.name}: {_word(request)} lost")
            return future
        if fate < weather.lost + weather.late:
            if _word(request) not in self._network.prompt:
                self._delay(request)
            self._loop.call_later(random.random() * 0.01, self._break)
            return future
        answered = fate >= weather.lost + weather.late + weather.unanswered
        at_s = max(self._free_s, self._loop.time() + self._network.delay_s(process))
        self._free_s = at_s
        self._loop.call_at(at_s, self._arrive, request, future, answered, context=brokers)
        return future

    def _delay(self, request: Any) -> None:
        """Let a request arrive long after its sender has given it up."""
        network, random = self._network, self._process.random
        network.note(f"{self._process.name}: {_word(request)} late")
        if _word(request) == "EndTxn" and random.random() < 0.7:
            # It does most harm in the middle of what the same producer writes next.
            network.ghosts[request.transactional_id] = (self, request)
            return
        later_s = random.random() * network.weather.late_s
        brokers = network.cluster.process.context
        self._loop.call_later(later_s, self._arrive, request, None, True, context=brokers)

    def _wake_ghost(self, request: Any) -> None:
        """Let an EndTxn that was held back arrive about when its producer writes again."""
        network, random = self._network, self._process.random
        ghost = network.ghosts.pop(request.transactional_id, None)
        if ghost is not None:
            network.note(f"the late EndTxn of {request.transactional_id} arrives")
            connection, late = ghost
            self._loop.call_later(random.random() * 0.002, connection._arrive, late, None, True)

    def _arrive(self, request: Any, future: asyncio.Future[Any] | None, answered: bool) -> None:
        process, network = self._process, self._network
        if not network.reaches(process, self._node):
            return
        if process.life is Life.DEAD and process.random.random() < 0.5:
            # It had not left the machine.
            return
        if not isinstance(request, FetchV11 | ListOffsetsV3):
            network.note(f"{process.name}: {_word(request)} is at broker {self._node}")
        if network.ghosts and _word(request) == "Produce":
            self._wake_ghost(request)
        answer = network.cluster.answer(self._node, request)
        if isinstance(answer, float):
            context = network.cluster.process.context
            self._loop.call_later(answer, self._arrive, request, future, answered, context=context)
            return
        if future is None:
            return
        if not answered:
            network.note(f"{process.name}: answer to {_word(request)} lost")
            if process.random.random() < 0.5:
                self._loop.call_later(network.delay_s(process), self._break)
            return
        self._loop.call_later(network.delay_s(process), self._answer, future, answer)

    def _answer(self, future: asyncio.Future[Any], answer: Any) -> None:
        timer = self._waiting.pop(future, None)
        if timer is not None and not future.done():
            timer.cancel()
            if self._network.reaches(self._process, self._node):
                future.set_result(answer)
            else:
                self._waiting[future] = self._loop.call_later(
                    max(0.0, timer.when() - self._loop.time()), self._expire, future
                )

    def _expire(self, future: asyncio.Future[Any]) -> None:
        if self._waiting.pop(future, None) is not None and not future.done():
            future.set_exception(RequestTimedOutError())

    def _break(self) -> None:
        """The other side, or something between, has closed it."""
        self._up = False
        waiting, self._waiting = self._waiting, {}
        for future, timer in waiting.items():
            timer.cancel()
            if not future.done():
                future.set_exception(KafkaConnectionError("connection reset"))
                # The waiting caller may be gone.
                future.exception()

    def close(self, error: object = None) -> asyncio.Future[None]:
        self._break()
        future: asyncio.Future[None] = self._loop.create_future()
        future.set_result(None)
        return future


def _word(request: Any) -> str:
    """Return Kafka's name of a request, without its version."""
    return re.sub(r"(Request|V\d+)$", "", type(request).__name__)
