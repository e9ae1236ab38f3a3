"""Polls of a running proxy: its readiness, and whether the other proxies answer."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

from txbroker.checkers.leases import PeerSessions
from txbroker.contract.service import HalfPartitionState, Readiness
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import RequestError
from txbroker.proxy.cluster.peers import Peers
from txbroker.proxy.observe.logging import get_logger

LOOK_EVERY_S = 1.0
"""Interval between polls, seconds: about as long the checks of a group that connects to another
proxy are delayed."""
SILENT_LOOKS = 3
"""Polls without an answer before a warning: a proxy that starts or stops misses one or two."""
PROBLEMS_SHOWN = 5
"""Problems that a line lists: those of many partitions are alike."""

log = get_logger(__name__)


class Poller(ABC):
    """Polls until it is closed."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._poll()
            await asyncio.sleep(LOOK_EVERY_S)

    @abstractmethod
    async def _poll(self) -> None: ...


class PeerWatcher(Poller):
    """Polls the other proxies of the group, at `others()`, and passes their sessions on."""

    def __init__(
        self, peers: Peers, sessions: PeerSessions, others: Callable[[], Sequence[str]]
    ) -> None:
        self._peers = peers
        self._sessions = sessions
        self._others = others
        self._silent: Counter[str] = Counter()
        """Consecutive polls that a proxy has not answered."""

    def changed(self) -> None:
        """Forget proxies that have left the group."""
        others = self._others()
        self._peers.only(others)
        self._sessions.only(others)
        for url in self._silent.keys() - set(others):
            del self._silent[url]

    async def _poll(self) -> None:
        await asyncio.gather(*[self._look(url) for url in self._others()])

    async def _look(self, url: str) -> None:
        try:
            sessions = await self._peers.sessions(url)
        except RequestError as error:
            self._sessions.forget(url)
            self._not_answered(url, error)
            return
        if self._silent.pop(url, 0) >= SILENT_LOOKS:
            log.info("proxy answers again", url=url)
        if url in self._others():
            self._sessions.saw(url, sessions)

    def _not_answered(self, url: str, error: RequestError) -> None:
        """Warn once: calls for that proxy's partitions fail, and no other line shows why."""
        if url in self._others():
            self._silent[url] += 1
            if self._silent[url] == SILENT_LOOKS:
                log.warning("proxy does not answer", url=url, why=str(error))


class Sampler(Poller):
    """Calls a function once a second; a fault in it ends nothing."""

    def __init__(self, sample: Callable[[], None]) -> None:
        self._sample = sample
        self._failed = False

    async def _poll(self) -> None:
        try:
            self._sample()
        except Exception as error:
            if not self._failed:
                log.error("history not sampled", error=safe_repr(error), where=raised_at(error))
            self._failed = True
        else:
            self._failed = False


class ReadinessLog(Poller):
    """Logs when the proxy becomes ready to take calls, and when it stops being ready."""

    def __init__(self, readiness: Callable[[], Readiness]) -> None:
        self._readiness = readiness
        self._ready = False
        self._closed = False

    async def close(self) -> None:
        """Log nothing more: a proxy that stops on purpose is not ready."""
        self._closed = True
        await super().close()

    def look(self) -> None:
        """Log the readiness if it has changed. A proxy starts as not ready."""
        current = self._readiness()
        if self._closed or current.ready == self._ready:
            return
        self._ready = current.ready
        if current.ready:
            states = current.partitions.values()
            log.info("ready", owned=sum(state == HalfPartitionState.OWNED for state in states))
        else:
            shown = list(current.problems[:PROBLEMS_SHOWN])
            log.warning("not ready", problems=shown, count=len(current.problems))

    async def _poll(self) -> None:
        self.look()
