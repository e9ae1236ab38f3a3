"""Chooses whom of a group to ask: a connected instance on any proxy, else the check URL."""

from collections.abc import Collection

from txbroker.checkers.base import Channel, Unreached
from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.leases import PeerSessions
from txbroker.checkers.sessions import SessionRegistry


class GroupFinder:
    """Finds an instance of a group to ask: on this proxy, on another one, or at the check URL.

    The order: the instance that prepared the transaction, on any proxy; another instance on this
    proxy, as that saves a hop; one on another proxy; the check URL. An instance without a check
    function is asked only about transactions that it prepared.
    """

    def __init__(
        self,
        sessions: SessionRegistry,
        groups: Groups,
        http: HttpChecks,
        peers: PeerSessions | None = None,
    ) -> None:
        self._sessions = sessions
        self._groups = groups
        self._http = http
        self._peers = peers

    def at_hand(self, group: str, prefer: str) -> Channel | None:
        """Return a channel to a session on this proxy; None if another proxy's comes first."""
        peers = self._peers
        session = self._sessions.acquire_instance(group, prefer) if prefer else None
        if session is not None or (prefer and peers is not None and peers.has(group, prefer)):
            return session
        return self._sessions.acquire(group, "")

    async def acquire(
        self, group: str, prefer: str, avoid: Collection[str] = ()
    ) -> Channel | Unreached:
        """Return a channel to a session, else to the check URL, else why there is none."""
        return await self._session(group, prefer, avoid) or await self._check_url(group)

    async def _session(self, group: str, prefer: str, avoid: Collection[str]) -> Channel | None:
        peers = self._peers
        if prefer and prefer not in avoid:
            session = self._sessions.acquire_instance(group, prefer)
            if session is not None:
                return session
            if peers is not None:
                lease = await peers.acquire(group, prefer, only=True)
                if not isinstance(lease, Unreached):
                    return lease
        session = self._sessions.acquire(group, prefer, avoid)
        if session is not None or peers is None:
            return session
        lease = await peers.acquire(group, prefer, avoid=avoid)
        return None if isinstance(lease, Unreached) else lease

    async def _check_url(self, group: str) -> Channel | Unreached:
        policy = self._groups.policies.get(group)
        if policy is None or policy.check_url is None:
            return Unreached(self._why_unreached(group))
        return await self._http.acquire_for(group, policy)

    def _why_unreached(self, group: str) -> str:
        why = f"no instance of group {group} is connected"
        if group in self._sessions.counts():
            why = (
                f"every connected instance of group {group} is draining, has the maximum of open "
                "checks or no check function"
            )
        problem = self._groups.problem(group)
        return f"{why} and {problem or 'no check URL is registered'}"
