"""What happens on the partitions, as metrics: events are counted, gauges are read at a scrape."""

from collections import Counter
from collections.abc import Callable, Sized

from txbroker.core.ledger import Effect, Outcome
from txbroker.core.records import State
from txbroker.core.transaction import Transaction
from txbroker.proxy.broker import Broker
from txbroker.proxy.metrics import Gauges, Metrics


class Observer:
    """Told by owners (`OwnerEvents`).

    Args:
        metrics: where everything is counted.
        unreachable: which groups cannot be asked now.
    """

    def __init__(self, metrics: Metrics, unreachable: Callable[[], Sized]) -> None:
        self._metrics = metrics
        self._unreachable = unreachable

    def watch(self, broker: Broker) -> None:
        """Show what the owners of `broker` hold."""
        self._metrics.watch(lambda: self._gauges(broker))

    # --- from owners -----------------------------------------------------------------------

    def outcome(self, outcome: Outcome) -> None:
        """A record changed nothing."""
        if outcome.effect is Effect.CONFLICT:
            self._metrics.conflict()

    def prepared(self, transaction: Transaction) -> None:
        """A half message was stored."""
        for message in transaction.messages:
            self._metrics.prepared(message.topic)

    def decided(self, transaction: Transaction) -> None:
        """A deciding marker took effect."""
        self._metrics.decided(str(transaction.decision), str(transaction.source))

    def promoted(self, transactions: list[Transaction]) -> None:
        """These are visible."""
        topics = Counter(m.topic for t in transactions for m in t.messages)
        for topic, count in topics.items():
            self._metrics.promoted(topic, count)
        for transaction in transactions:
            if transaction.promoted_at_ms:
                took_ms = transaction.promoted_at_ms - transaction.decided_at_ms
                self._metrics.promotion_took(max(0, took_ms) / 1000)

    def refused(self, transactions: list[Transaction]) -> None:
        """These were set aside; the gauge shows them."""

    def recovered(self, seconds: float) -> None:
        """A partition was gained and caught up on."""
        self._metrics.recovery_took(seconds)

    def fenced(self) -> None:
        """Another owner has taken a partition."""
        self._metrics.fenced()

    def kafka_failed(self, operation: str) -> None:
        """Kafka did not do what was asked."""
        self._metrics.kafka_error(operation)

    # --- at a scrape -----------------------------------------------------------------------

    def _gauges(self, broker: Broker) -> Gauges:
        pending: Counter[str] = Counter()
        parked: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        oldest_s: dict[str, float] = {}
        lag = 0
        for owner, transaction in broker.unsettled():
            group = transaction.half.group
            if transaction.state is State.PENDING:
                pending[group] += 1
                age_s = (owner.now_ms() - transaction.prepared_at_ms) / 1000
                oldest_s[group] = max(oldest_s.get(group, 0.0), age_s)
            elif transaction.state is State.PARKED:
                parked[group] += 1
            elif transaction.state is State.REFUSED and transaction.cause is not None:
                refused[transaction.cause.topic] += 1
            else:
                lag += 1
        return Gauges(
            pending=pending,
            pending_oldest_age_seconds=oldest_s,
            parked=parked,
            refused=refused,
            unreachable_groups=len(self._unreachable()),
            promotion_lag_markers=lag,
            owned_partitions=broker.owned,
            half_retention_headroom_seconds=broker.retention_headroom_s(),
        )
