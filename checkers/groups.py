"""The registered producer groups, as this proxy knows them."""

import logging
from collections.abc import Callable, Iterator

import structlog

from txbroker.contract.policy import (
    GroupPolicy,
    PolicyError,
    check_group_name,
    decode_policy,
    encode_policy,
)
from txbroker.door.protocols import GroupStore

log = structlog.wrap_logger(logging.getLogger(__name__))


class Groups:
    """The registered groups; follows the changes of the store.

    Args:
        unusable: returns why this proxy cannot use a group's policy, for the log, or None.

    Attributes:
        policies: by group; other components only read it.
    """

    def __init__(
        self,
        store: GroupStore,
        unusable: Callable[[str, GroupPolicy], str | None] = lambda _, __: None,
    ) -> None:
        self._store = store
        self._unusable = unusable
        self.policies: dict[str, GroupPolicy] = {}
        self._problems: dict[str, str] = {}
        self._listeners: list[Callable[[str], None]] = []

    async def load(self) -> None:
        """Read all groups and start following them.

        Raises:
            KafkaUnavailable: Kafka does not answer; retry.
        """
        await self._store.load(self._changed)

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of each group that any proxy puts or removes."""
        self._listeners.append(listener)

    def problem(self, group: str) -> str | None:
        """Return why a group's stored policy cannot be used; None if it can or is missing."""
        return self._problems.get(group)

    def __contains__(self, group: str) -> bool:
        return group in self.policies or group in self._problems

    def names(self) -> Iterator[str]:
        """Yield the names of all registered groups, with usable policies or not."""
        yield from self.policies
        yield from self._problems.keys() - self.policies.keys()

    def with_url(self) -> frozenset[str]:
        """Return the groups with a check URL."""
        return frozenset(name for name, policy in self.policies.items() if policy.check_url)

    def list(self) -> list[tuple[str, GroupPolicy]]:
        """Return all groups with usable policies, by name."""
        return sorted(self.policies.items())

    async def put(self, group: str, policy: GroupPolicy) -> None:
        """Register a group or replace its policy; returns once it is stored.

        Raises:
            PolicyError: the name or the policy cannot work.
            KafkaUnavailable: it may or may not be stored.
        """
        check_group_name(group)
        policy.validate()
        await self._store.put(group, encode_policy(policy))

    async def remove(self, group: str) -> bool:
        """Remove a group; return False if there was none.

        Raises:
            KafkaUnavailable: it may or may not be removed.
        """
        known = group in self
        if known:
            await self._store.put(group, None)
        return known

    def _changed(self, group: str, stored: bytes | None) -> None:
        self._problems.pop(group, None)
        self.policies.pop(group, None)
        if stored is not None:
            try:
                policy = self.policies[group] = decode_policy(stored)
                why = self._unusable(group, policy)
            except PolicyError as error:
                why = self._problems[group] = str(error)
            if why is not None:
                log.warning("group not usable", group=group, why=why)
        for listener in self._listeners:
            listener(group)
