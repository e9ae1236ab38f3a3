"""Test calls: can a group be reached at its check URL, asked without any transaction?"""

from msgspec import Struct

from txbroker.checkers.base import Unclear, Unreached
from txbroker.checkers.http import HttpChecks
from txbroker.contract.policy import GroupPolicy, without_query

_REMARKS = {
    401: "it does not take the signature: is the secret the same on both sides?",
    403: "it does not let the proxy in",
    404: "nothing is at that path",
    405: "it takes no POST",
}
_UNDERSTOOD_NOT = "answered {status}: reached, but it does not answer test calls"


class TestCallResult(Struct, frozen=True):
    """What became of a test call.

    Attributes:
        endpoint: the check URL without its query; "" where it was not even tried.
        status: of the answer; None where there was none.
        why: what is wrong, "" for an answer with a status of 2xx. Never what the answer said.
    """

    endpoint: str = ""
    status: int | None = None
    why: str = ""

    @property
    def answered(self) -> bool:
        """Whether it was answered as documented."""
        return not self.why


async def try_group(
    checks: HttpChecks, group: str, policy: GroupPolicy, timeout_s: float
) -> TestCallResult:
    """Send a test call to a group's check URL, once. Uses up no attempt of any transaction.

    Args:
        timeout_s: for the answer, where the policy does not say.
    """
    if policy.check_url is None:
        return TestCallResult(why="no check URL is registered")
    endpoint = without_query(policy.check_url)
    channel = await checks.acquire_for(group, policy)
    if isinstance(channel, Unreached):
        return TestCallResult(endpoint, why=channel.detail)
    try:
        status = await channel.test(group, policy.timeout_s or timeout_s)
    finally:
        channel.release()
    if isinstance(status, Unreached | Unclear):
        return TestCallResult(endpoint, why=status.detail)
    return TestCallResult(endpoint, status, _why(status))


def _why(status: int) -> str:
    if 200 <= status < 300:
        return ""
    remark = _REMARKS.get(status)
    return _UNDERSTOOD_NOT.format(status=status) if remark is None else f"{status}: {remark}"
