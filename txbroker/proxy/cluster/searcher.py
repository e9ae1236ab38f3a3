"""Searches: a page in one half partition, and the transaction of any record."""

import asyncio
from collections.abc import Awaitable, Callable

from txbroker.contract.service import SearchPage, SearchRequest, TransactionView
from txbroker.core.decoding import Malformed, NewerVersion, decode_log, decode_promoted
from txbroker.core.records import Cause, Record
from txbroker.core.terms import RecordPlace, parse_place
from txbroker.door.protocols import Door, LogTruncated, Targets
from txbroker.errors import (
    BadRequest,
    InvariantBroken,
    KafkaUnavailable,
    NotFound,
    OwnerUnavailable,
    TooOld,
)
from txbroker.proxy.cluster.forwarding import search_place
from txbroker.proxy.cluster.partition_manager import PartitionManager
from txbroker.proxy.cluster.views import LogNames, groups_of, summary

RECORD_S = 5.0
"""Maximum time to read one record, seconds."""


class Searcher:
    """Searches the half partitions of one proxy, and the topics that its transactions are in."""

    def __init__(
        self, door: Door, partitions: PartitionManager, logs: LogNames, targets: Targets
    ) -> None:
        self._door = door
        self._targets = targets
        self._partitions = partitions
        self._logs = logs

    async def page(self, request: SearchRequest) -> SearchPage:
        """Return a page of a search in the half partition that the cursor names.

        Raises:
            OwnerUnavailable: this proxy does not own it, or Kafka does not answer.
        """
        place = search_place(request, self._door.partitions)
        if place is None:
            return SearchPage(())
        layer, partition = place.steps[place.number]
        owner = self._partitions.owner(partition)
        found = await owner.scanner.page(layer, request, place.cursor, groups_of(request))
        if self._partitions.owner(partition) is not owner:
            raise OwnerUnavailable(f"half partition {partition} moved: retry")
        self._partitions.check_in_touch()
        cursor, done = place.after(found.next)
        views = tuple(map(summary, found.transactions))
        return SearchPage(views, cursor, done, found.records, found.unread)

    async def record_page(
        self, record: str, request: SearchRequest, find: Callable[[str], Awaitable[TransactionView]]
    ) -> SearchPage:
        """Return a page with the transaction of a record in a target, half or operation topic.

        Args:
            record: its place, as `topic/partition@offset`.
            find: returns a transaction by its id.

        Raises:
            BadRequest: this is no place of a record, or the record is not txbroker's.
            NotFound: the topic has no such record; of a caller who may not see all groups also the
                other cases, so that offsets and topics of others stay hidden.
            OwnerUnavailable: Kafka does not answer.
        """
        place = parse_place(record)
        if place is None:
            raise BadRequest(
                f"{record[:80]!r} is no place of a record: give topic/partition@offset",
                path="record",
            )
        restricted = request.groups_allowed is not None
        try:
            view = await find(await self._transaction_of(place, record))
            if view.group in groups_of(request):
                return SearchPage((view,))
        except OwnerUnavailable:
            if restricted:
                raise OwnerUnavailable(f"cannot read {record} now: retry") from None
            raise
        except (BadRequest, NotFound, TooOld):
            if not restricted:
                raise
        raise NotFound(f"there is no record {record} of a transaction of your groups")

    async def _transaction_of(self, place: RecordPlace, record: str) -> str:
        if place.topic not in self._logs:
            facts = await self._targets.examine(place.topic)
            if isinstance(facts, Cause):
                raise NotFound(facts.message)
        try:
            return await asyncio.wait_for(self._read(place), RECORD_S)
        except TimeoutError:
            raise OwnerUnavailable(f"cannot read {record} within {RECORD_S:g} s: retry") from None
        except LogTruncated as error:
            raise NotFound(f"there is no record {record}: {error}") from None
        except (KafkaUnavailable, InvariantBroken) as error:
            raise OwnerUnavailable(f"cannot read {record}: {error}") from None

    async def _read(self, place: RecordPlace) -> str:
        topic, partition, offset = place
        async for records in self._targets.records(topic, partition, start=offset):
            for stored in records:
                if stored.offset >= offset:
                    return _transaction_of(stored, place, self._logs)
        raise NotFound(f"there is no record {topic}/{partition}@{offset}, nor any after it")


def _transaction_of(record: Record, place: RecordPlace, logs: LogNames) -> str:
    where = f"{place.topic}/{place.partition}@{place.offset}"
    if record.offset != place.offset:
        raise NotFound(
            f"there is no record {where}: compaction or retention has deleted it, or the offset "
            f"belongs to Kafka's own marker; the next record is at {record.offset}"
        )
    if place.topic in logs:
        try:
            return decode_log("half" if place.topic == logs.half else "op", record).id
        except (Malformed, NewerVersion) as error:
            raise BadRequest(f"the record {where} names no transaction: {error}") from None
    promoted = decode_promoted(record)
    if promoted is None:
        raise BadRequest(f"the record {where} has no txb-id header: txbroker did not promote it")
    return promoted.id
