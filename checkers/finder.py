"""Whom of a group to ask: a connected instance, on whichever proxy, else the check URL."""

from collections.abc import Collection

from txbroker.checkers.base import Channel, Unreached
from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.leases import PeerSessions
from txbroker.checkers.sessions import SessionRegistry


class GroupFinder:
    """Finds somebody of a group to ask: on this proxy, on another one, or at the check URL.

    The instance that prepared the transaction is asked first, wherever it is; then anybody of its
    group here, because that is one hop less; then anybody elsewhere. One without a check function
    is asked only first.
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
        """Return a channel to a session here, None where others are to be looked for first."""
        peers = self._peers
        session = self._sessions.acquire_instance(group, prefer) if prefer else None
        if session is not None or (prefer and peers is not None and peers.has(group, prefer)):
            return session
        return self._sessions.acquire(group, "")

    async def acquire(
        self, group: str, prefer: str, avoid: Collection[str] = ()
    ) -> Channel | Unreached:
        """Return a channel to a session, else to the check URL, else why there is neither."""
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
            return Unreached(self._nobody(group))
        return await self._http.acquire_for(group, policy)

    def _nobody(self, group: str) -> str:
        who = f"nobody of group {group} is connected"
        if group in self._sessions.counts():
            who = (
                f"every connected instance of group {group} is draining, has its fill of checks or "
                "no check function"
            )
        problem = self._groups.problem(group)
        return f"{who} and {problem or 'no check URL is registered'}"
