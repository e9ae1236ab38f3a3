"""Follows the other proxies: whether they answer, and which sessions they have."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from txbroker.checkers.leases import PeerSessions
from txbroker.errors import RequestError
from txbroker.proxy.cluster.peers import Peers
from txbroker.proxy.observe.logging import get_logger

LOOK_EVERY_S = 1.0
"""Interval between polls of the other proxies' sessions, seconds: about as long the checks of a
group that connects to another proxy are delayed."""
SILENT_LOOKS = 3
"""Polls without an answer before a warning: a proxy that starts or stops misses one or two."""

log = get_logger(__name__)


class PeerWatcher:
    """Polls the other proxies of the group.

    Args:
        peers: calls them.
        sessions: receives the sessions that they have.
        others: returns the URLs of all other proxies.
        every_s: interval between polls, seconds.
    """

    def __init__(
        self,
        peers: Peers,
        sessions: PeerSessions,
        others: Callable[[], Sequence[str]],
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._peers = peers
        self._sessions = sessions
        self._others = others
        self._every_s = every_s
        self._silent: Counter[str] = Counter()
        """Consecutive polls that a proxy has not answered."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to poll."""
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def changed(self) -> None:
        """Forget proxies that have left the group."""
        others = self._others()
        self._peers.only(others)
        self._sessions.only(others)
        for url in self._silent.keys() - set(others):
            del self._silent[url]

    async def _follow(self) -> None:
        while True:
            await asyncio.gather(*[self._look(url) for url in self._others()])
            await asyncio.sleep(self._every_s)

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
