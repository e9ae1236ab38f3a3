"""A promotion transaction that is written: wait for its commit and its visibility."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from txbroker.core.records import Cause
from txbroker.door.protocols import (
    Fenced,
    PromotionTxnHandle,
    PromotionTxnLost,
    PromotionTxnRefused,
    commit_outcome,
)
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.producer import BatchRefused, BatchUnknown, ProducerFenced
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.protocol.codes import RETRIABLE, Code, describe
from txbroker.kafka.protocol.transactions import Partition


class KafkaPromotionTxn(PromotionTxnHandle):
    """A `PromotionTxnHandle` on a real Kafka. The commit proceeds in its own task."""

    def __init__(
        self,
        stable: StableEnds,
        offsets: Sequence[int],
        parked_offsets: Sequence[int],
        last: Mapping[Partition, int],
        commit: asyncio.Task[None],
        visible_timeout_s: float,
        on_visible: Callable[[Mapping[Partition, int]], None],
    ) -> None:
        self.offsets = offsets
        self.parked_offsets = parked_offsets
        self._stable = stable
        self._visible_timeout_s = visible_timeout_s
        self._last = last
        self._commit = commit
        self._on_visible = on_visible

    async def committed(self) -> None:
        """Wait until the commit is acknowledged.

        Raises:
            Fenced, PromotionTxnLost: claim again; the progress shows whether it was committed.
        """
        await commit_outcome(self._commit)

    async def visible(self) -> None:
        """Wait until the transaction is visible to every `read_committed` reader.

        Raises:
            Fenced, PromotionTxnLost: it may not be committed.
            NotVisible: not in time.
        """
        await self.committed()
        await self._stable.pass_by(self._last, self._visible_timeout_s)
        self._on_visible(self._last)


# The state of producer or coordinator is lost; the record is valid.
_PRODUCER_LOST = frozenset(
    {
        Code.OUT_OF_ORDER_SEQUENCE,
        Code.UNKNOWN_PRODUCER_ID,
        Code.INVALID_TXN_STATE,
        Code.INVALID_PRODUCER_ID_MAPPING,
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        Code.COORDINATOR_LOADING,
        Code.COORDINATOR_NOT_AVAILABLE,
        Code.NOT_COORDINATOR,
        Code.CONCURRENT_TRANSACTIONS,
        Code.TRANSACTION_ABORTABLE,
        Code.UNSUPPORTED_VERSION,
    }
)
_CAUSES = {
    Code.MESSAGE_TOO_LARGE: ("too_large", "is larger than max.message.bytes: raise that setting"),
    Code.RECORD_LIST_TOO_LARGE: ("too_large", "is larger than a segment: raise segment.bytes"),
    Code.TOPIC_AUTHORIZATION_FAILED: (
        "not_authorized",
        "may not be written by this proxy: grant it Write on the topic, then revive",
    ),
    Code.UNKNOWN_TOPIC_OR_PARTITION: ("unknown_topic", "does not exist: create it"),
    Code.INVALID_TIMESTAMP: (
        "bad_timestamp",
        "rejects the message's timestamp: see message.timestamp.before.max.ms and "
        "message.timestamp.after.max.ms",
    ),
    Code.INVALID_RECORD: (
        "bad_record",
        "rejects the message: a compacted topic takes none without a key",
    ),
}


def cause_of(error: BatchRefused) -> Cause:
    """Return why a target refused a batch."""
    topic, number = error.partition
    name = f"{topic}-{number}"
    passing = error.code in RETRIABLE
    try:
        code, sentence = _CAUSES[Code(error.code)]
    except (ValueError, KeyError):
        return Cause("refused", f"{name} refused: {describe(error.code)}", topic, number, passing)
    return Cause(code, f"{name} {sentence}", topic, number, passing)


@contextmanager
def translated() -> Iterator[None]:
    """Translate a producer's errors into those of the door."""
    try:
        yield
    except ProducerFenced:
        raise Fenced from None
    except BatchRefused as error:
        if error.code in _PRODUCER_LOST:
            raise PromotionTxnLost(str(error)) from None
        raise PromotionTxnRefused(cause_of(error)) from None
    except BatchUnknown as error:
        topic, number = error.partition
        cause = Cause(
            "no_answer", f"its leader does not answer: {error}", topic, number, passing=True
        )
        raise PromotionTxnLost(str(error), cause) from None
    except KafkaUnavailable as error:
        raise PromotionTxnLost(str(error)) from None
