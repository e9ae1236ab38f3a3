"""Whom of a group to ask: a connected instance first, else the group's check URL."""

from txbroker.checkers.base import Channel, Unreached
from txbroker.checkers.groups import Groups, SecretUnavailable, read_secret
from txbroker.checkers.http import ANSWER_BYTES_DEFAULT, HttpChecks
from txbroker.checkers.sessions import SessionRegistry


class GroupFinder:
    """Finds somebody of a group to ask, on this proxy or at the group's check URL."""

    def __init__(self, sessions: SessionRegistry, groups: Groups, http: HttpChecks) -> None:
        self._sessions = sessions
        self._groups = groups
        self._http = http

    async def acquire(self, group: str, prefer: str) -> Channel | Unreached:
        """Return a channel to a session, else to the check URL, else why there is neither."""
        session = self._sessions.acquire(group, prefer)
        if session is not None:
            return session
        policy = self._groups.get(group)
        if policy is None or policy.check_url is None:
            return Unreached(self._nobody(group))
        secret: bytes | None = None
        if policy.secret_ref is not None:
            try:
                secret = await read_secret(policy.secret_ref)
            except SecretUnavailable as error:
                return Unreached(str(error))
        return await self._http.acquire(
            group,
            policy.check_url,
            secret=secret,
            answer_bytes_max=policy.answer_bytes_max or ANSWER_BYTES_DEFAULT,
        )

    def _nobody(self, group: str) -> str:
        who = f"nobody of group {group} is connected"
        if group in self._sessions.counts():
            who = f"every connected instance of group {group} is draining or has its fill of checks"
        problem = self._groups.problem(group)
        return f"{who} and {problem or 'no check URL is registered'}"
