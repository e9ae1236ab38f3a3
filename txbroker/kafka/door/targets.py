"""What target topics take: asked, never found out by trying inside a turn."""

from __future__ import annotations

import asyncio

from txbroker.core.records import Cause
from txbroker.door.protocols import TargetFacts, Targets
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.admin import Admin, NewTopic
from txbroker.kafka.client.client import Client, KafkaRefused, TopicFacts, is_retriable
from txbroker.kafka.door.installations import Installations
from txbroker.kafka.protocol.codes import Code, describe

_DEFAULT_MESSAGE_BYTES = 1048588
"""Kafka's own default, for topics whose settings may not be read."""

_BATCH_BYTES_MAX = 4 << 20
"""Larger batches bring nothing, and brokers hold each whole in memory."""

_CAUSE_TTL_S = 1.0
"""Somebody may be creating the topic just now."""

_KNOWN_MAX = 1000
"""Topics remembered before those out of date are dropped."""

_BY_DEFAULT = -1
_ANY_PARTITION = -1


class KafkaTargets(Targets):
    """A `txbroker.door.protocols.Targets` on a real Kafka."""

    def __init__(self, client: Client, admin: Admin) -> None:
        self._admin = admin
        self._installations = Installations(client, admin)
        self._ttl_s = client.settings.facts_ttl_s
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, tuple[float, TargetFacts | Cause]] = {}
        self._asking: dict[tuple[str, bool], asyncio.Task[TargetFacts | Cause]] = {}
        # Outlives the facts: a turn may be written just after they have expired.
        self._bytes_max: dict[str, int] = {}

    def known(self, topic: str) -> TargetFacts | Cause | None:
        """Return facts from the cache, or why there are none, or None where it must be asked."""
        found = self._known.get(topic)
        if found is None:
            return None
        until, facts = found
        if self._loop.time() >= until:
            del self._known[topic]
            return None
        return facts

    def batch_bytes_max(self, topic: str) -> int:
        """Return the largest batch to write to a topic, as far as is known, bytes."""
        return min(self._bytes_max.get(topic, _DEFAULT_MESSAGE_BYTES), _BATCH_BYTES_MAX)

    async def examine(self, topic: str, *, create: bool = False) -> TargetFacts | Cause:
        """Ask Kafka about a topic (never creating it by accident), and remember the answer.

        With `create`, a missing topic is created through the admin API. Whoever comes while a
        topic is being asked about gets the same answer: else each of the prepares in flight would
        ask when facts expire.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        asking = self._asking.get((topic, create))
        if asking is None:
            asking = asyncio.create_task(self._examine(topic, create=create))
            self._asking[topic, create] = asking
            asking.add_done_callback(lambda task: self._answered((topic, create), task))
        return await asyncio.shield(asking)

    def _answered(self, key: tuple[str, bool], task: asyncio.Task[TargetFacts | Cause]) -> None:
        if self._asking.get(key) is task:
            del self._asking[key]
        if not task.cancelled():
            task.exception()  # all who waited may have given up

    async def _examine(self, topic: str, *, create: bool) -> TargetFacts | Cause:
        facts = await self._installations.refused(topic) or await self._ask(topic)
        if create and isinstance(facts, Cause) and facts.code == "unknown_topic":
            facts = await self._create(topic) or await self._ask(topic)
        if self._asking.get((topic, create)) is asyncio.current_task():
            self._remember(topic, facts)
        return facts

    def _remember(self, topic: str, facts: TargetFacts | Cause) -> None:
        if isinstance(facts, TargetFacts):
            self._bytes_max[topic] = facts.message_bytes_max
        ttl_s = min(self._ttl_s, _CAUSE_TTL_S) if isinstance(facts, Cause) else self._ttl_s
        now = self._loop.time()
        if len(self._known) >= _KNOWN_MAX:
            # Clients may name any topic, and what was never asked about again stayed here.
            self._known = {name: known for name, known in self._known.items() if known[0] > now}
        self._known[topic] = (now + ttl_s, facts)

    async def _ask(self, topic: str) -> TargetFacts | Cause:
        found = (await self._admin.topics([topic])).get(topic)
        code = Code.UNKNOWN_TOPIC_OR_PARTITION if found is None else found.error
        if code == Code.LEADER_NOT_AVAILABLE:
            code = Code.NONE
        if found is None or code != Code.NONE:
            return _cause(topic, code)
        configs = (await self._admin.configs([topic])).get(topic, {})
        return _facts(found, configs)

    async def _create(self, topic: str) -> Cause | None:
        try:
            await self._admin.create([NewTopic(topic, _BY_DEFAULT, _BY_DEFAULT, {})])
        except KafkaRefused as error:
            if is_retriable(error):
                raise
            return Cause("unknown_topic", str(error), topic, _ANY_PARTITION)
        return None

    def forget(self, topic: str) -> None:
        """Drop a topic from the cache, after an error that says that its facts have changed."""
        self._known.pop(topic, None)
        for create in (False, True):
            self._asking.pop((topic, create), None)  # asked before the change, perhaps

    def note(self, cause: Cause) -> None:
        """Learn from a refusal: facts that did not foresee it are out of date, but a missing right
        shows in no facts and is remembered for a while."""
        if cause.code == "not_authorized":
            self._remember(cause.topic, cause)
        else:
            self.forget(cause.topic)


def _facts(found: TopicFacts, configs: dict[str, str]) -> TargetFacts:
    return TargetFacts(
        partitions=len(found.partitions),
        message_bytes_max=int(configs.get("max.message.bytes", _DEFAULT_MESSAGE_BYTES)),
        log_append_time=configs.get("message.timestamp.type") == "LogAppendTime",
        leaderless=frozenset(p for p, fact in found.partitions.items() if fact.leader < 0),
    )


def _cause(topic: str, code: int) -> Cause:
    if code == Code.UNKNOWN_TOPIC_OR_PARTITION:
        # A target that was deleted by mistake is created again by hand.
        sentence = f"topic {topic} does not exist: create it, or set create_target_topics"
        return Cause("unknown_topic", sentence, topic, _ANY_PARTITION)
    if code == Code.TOPIC_AUTHORIZATION_FAILED:
        sentence = f"no right to topic {topic}: grant this proxy Describe and Write on it"
        return Cause("not_authorized", sentence, topic, _ANY_PARTITION)
    if code == Code.INVALID_TOPIC:
        sentence = f"{topic!r} is no name for a topic: use letters, digits, dot, _ and -"
        return Cause("unknown_topic", sentence, topic, _ANY_PARTITION)
    raise KafkaUnavailable(f"topic {topic}: {describe(code)}")
