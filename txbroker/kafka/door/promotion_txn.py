"""A written turn: waiting for its commit, and for the moment when readers see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from txbroker.core.records import Cause
from txbroker.door.commits import outcome
from txbroker.door.protocols import (
    Fenced,
    PromotionTxnHandle,
    PromotionTxnLost,
    PromotionTxnRefused,
)
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.producer import BatchRefused, BatchUnknown, ProducerFenced
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.protocol.codes import RETRIABLE, Code, describe
from txbroker.kafka.protocol.transactions import Partition


class KafkaPromotionTxn(PromotionTxnHandle):
    """A `txbroker.door.protocols.TurnHandle`: the turn is written, its commit goes on by itself."""

    def __init__(
        self,
        stable: StableEnds,
        offsets: Sequence[int],
        parked_offsets: Sequence[int],
        last: Mapping[Partition, int],
        commit: asyncio.Task[None],
        visible_timeout_s: float,
        seen: Callable[[Mapping[Partition, int]], None],
    ) -> None:
        self.offsets = offsets
        self.parked_offsets = parked_offsets
        self._stable = stable
        self._visible_timeout_s = visible_timeout_s
        self._last = last
        self._commit = commit
        self._seen = seen

    async def committed(self) -> None:
        """Wait until the turn's commit is acknowledged.

        Raises:
            Fenced, PromotionTxnLost: claim again; the progress shows whether it was committed.
        """
        await outcome(self._commit)

    async def visible(self) -> None:
        """Wait until every `read_committed` reader can see the turn.

        Raises:
            Fenced, PromotionTxnLost: it is not committed, as far as is known.
            NotVisible: it is not in time.
        """
        await self.committed()
        await self._stable.pass_by(self._last, self._visible_timeout_s)
        self._seen(self._last)


# The producer's state is lost, or the coordinator's; the record is not to blame.
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
        "does not take the message's timestamp: see message.timestamp.before.max.ms and "
        "message.timestamp.after.max.ms",
    ),
    Code.INVALID_RECORD: (
        "bad_record",
        "does not take the message, as a compacted topic takes none without a key",
    ),
}


def cause_of(error: BatchRefused) -> Cause:
    """Return why a target refused a batch, in a code and a sentence."""
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
    """Turn what a producer raises into what an owner acts on."""
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
        cause = Cause("no_answer", f"its leader is silent: {error}", topic, number, passing=True)
        raise PromotionTxnLost(str(error), cause) from None
    except KafkaUnavailable as error:
        raise PromotionTxnLost(str(error)) from None
