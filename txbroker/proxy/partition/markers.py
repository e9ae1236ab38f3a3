"""Markers of one transaction, as checks, parking and operators write them."""

from txbroker.core.outcome import Outcome
from txbroker.core.records import Marker, MarkerKind, Source
from txbroker.core.runs import marker_row
from txbroker.core.transaction import Transaction
from txbroker.errors import RequestError
from txbroker.proxy.partition.appender import Appender
from txbroker.proxy.partition.context import PartitionContext


class Markers:
    """Appends markers to the operation topic, each for one transaction.

    Args:
        context: what all parts of the partition share.
        op: where they are written.
    """

    def __init__(self, context: PartitionContext, op: Appender) -> None:
        self._context = context
        self._op = op

    async def write(
        self,
        transaction: Transaction,
        kind: MarkerKind,
        *,
        source: Source,
        by: str = "",
        reason: str = "",
        number: int | None = None,
        endpoint: str = "",
        previous: str = "",
        later_s: float = 0.0,
    ) -> Outcome:
        """Append one marker of this transaction and return what it did.

        Raises:
            OwnerUnavailable: it may or may not be written.
        """
        marker = Marker(
            v=self._context.record_version(),
            kind=kind,
            id=transaction.id,
            half=transaction.offset,
            source=source,
            by=by,
            reason=reason,
            round=transaction.round,
            number=transaction.number if number is None else number,
            claim=self._context.claim.id,
            endpoint=endpoint,
            previous=previous,
            later_s=later_s,
        )
        [outcome] = await self._op.append((marker_row(marker),))
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome
