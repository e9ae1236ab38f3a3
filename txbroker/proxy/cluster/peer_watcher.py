"""What goes on at the other proxies: who is there, and whose sessions they have."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from txbroker.checkers.leases import PeerSessions
from txbroker.errors import RequestError
from txbroker.proxy.cluster.peers import Peers
from txbroker.proxy.observe.logging import get_logger

LOOK_EVERY_S = 1.0
"""How often the other proxies are asked for their sessions, seconds: about as long a group that
appears there waits for its checks."""
SILENT_LOOKS = 3
"""Looks without an answer before it is said: one that comes or goes misses one or two."""

log = get_logger(__name__)


class PeerWatcher:
    """Follows the proxies of the group.

    Args:
        peers: the way to them.
        sessions: is told of the sessions that they have.
        others: returns the URLs of all other proxies.
        every_s: how often they are asked, seconds.
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
        """How often in a row a proxy has not answered."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def changed(self) -> None:
        """Proxies came or went: let go of those that are not there any more."""
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
            found = await self._peers.sessions(url)
        except RequestError as error:
            self._sessions.forget(url)
            self._not_answered(url, error)
            return
        if self._silent.pop(url, 0) >= SILENT_LOOKS:
            log.info("proxy answers again", url=url)
        if url in self._others():
            self._sessions.saw(url, found)

    def _not_answered(self, url: str, error: RequestError) -> None:
        """Say it, once: calls for what that proxy owns fail, and nothing else here shows why."""
        if url in self._others():
            self._silent[url] += 1
            if self._silent[url] == SILENT_LOOKS:
                log.warning("proxy does not answer", url=url, why=str(error))
