"""The settled window: what is remembered of transactions that came to their end.

The newest are remembered whole, for show. Of older ones only what answers need is kept, packed:
there may be hundreds of thousands within the dedup window.
"""

from collections import deque
from collections.abc import Iterator
from struct import Struct as Packing

from msgspec import Struct

from txbroker.core.ids import parse_id
from txbroker.core.records import Decision, Half, State
from txbroker.core.transaction import Place, Transaction, Verdict, bare_of

SHOWN_MAX = 1000
"""Settled transactions that are remembered whole."""
_PACKING = Packing(">16s16sqqqq")
_NONE = bytes(16)
_DECISIONS = {State.PROMOTED: Decision.COMMIT, State.ROLLED_BACK: Decision.ROLLBACK}


class Brief(Struct, frozen=True, gc=False):
    """What is remembered of a settled transaction beside its id.

    `facts`: fingerprints of the prepared and of the replacing messages, the offsets of the half
    message and of the marker, the times of preparation and decision, packed.
    """

    group: str
    state: State
    facts: bytes
    places: tuple[Place, ...]
    dedup_key: str | None = None


def brief(transaction: Transaction) -> Brief:
    """Return what is remembered of a settled transaction."""
    half, verdict = transaction.half, transaction.verdict
    assert verdict is not None
    facts = _PACKING.pack(
        transaction.fingerprint,
        verdict.contents_fingerprint or _NONE,
        transaction.offset,
        verdict.op_offset,
        transaction.prepared_at_ms,
        verdict.at_ms,
    )
    return Brief(half.group, transaction.state, facts, transaction.places, half.dedup_key)


def prepared_ms(brief: Brief) -> int:
    """Return when a transaction was prepared, ms."""
    return int(_PACKING.unpack(brief.facts)[4])


def offset_of(brief: Brief) -> int:
    """Return where the half message was."""
    return int(_PACKING.unpack(brief.facts)[2])


def whole(id: str, brief: Brief) -> Transaction:
    """Return a settled transaction as far as it is remembered: neither its attempts nor who
    decided it."""
    mark, contents_mark, offset, op_offset, prepared, decided = _PACKING.unpack(brief.facts)
    verdict = Verdict(
        _DECISIONS[brief.state],
        op_offset,
        decided,
        contents_fingerprint=b"" if contents_mark == _NONE else contents_mark,
    )
    messages = bare_of(brief.places)
    half = Half(id, brief.group, messages, dedup_key=brief.dedup_key)
    return Transaction(
        half, offset, prepared, mark, brief.places, None, brief.state, False, verdict=verdict
    )


class SettledWindow:
    """Settled transactions by id, in the order in which they were settled."""

    def __init__(self) -> None:
        self.shown: dict[str, Transaction] = {}
        """The newest, whole."""
        self._briefs: dict[str, Brief] = {}
        self._order: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Transaction]:
        for id in self._order:
            found = self.get(id)
            assert found is not None
            yield found

    def __contains__(self, id: str) -> bool:
        return id in self.shown or id in self._briefs

    def add(self, transaction: Transaction) -> None:
        """Remember one that was settled just now."""
        self._order.append(transaction.id)
        self.shown[transaction.id] = transaction
        if len(self.shown) > SHOWN_MAX:
            # A batch at a time: taking the first key of a dict over and over gets slower.
            for id in list(self.shown)[: SHOWN_MAX // 2]:
                self._briefs[id] = brief(self.shown.pop(id))

    def add_brief(self, id: str, brief: Brief) -> None:
        """Remember one that was settled long ago."""
        self._order.append(id)
        self._briefs[id] = brief

    def get(self, id: str) -> Transaction | None:
        """Return a transaction as far as it is remembered."""
        found = self.shown.get(id)
        if found is None:
            packed = self._briefs.get(id)
            return None if packed is None else whole(id, packed)
        return found

    def is_brief(self, id: str) -> bool:
        """Say whether only what answers need is remembered of a transaction."""
        return id in self._briefs

    @property
    def oldest(self) -> str | None:
        """The id of the one that was settled first."""
        return self._order[0] if self._order else None

    def oldest_ms(self) -> int:
        """Return the later of the id's time and the append time of the one that was settled
        first; 0 without any."""
        if not self._order:
            return 0
        id = self._order[0]
        at_ms = self.shown[id].prepared_at_ms if id in self.shown else prepared_ms(self._briefs[id])
        return max(parse_id(id).time_ms, at_ms)

    def forget_oldest(self) -> tuple[str, str, str | None]:
        """Forget the one that was settled first; return its id, group and `dedup_key`."""
        id = self._order.popleft()
        transaction = self.shown.pop(id, None)
        if transaction is not None:
            return id, transaction.half.group, transaction.half.dedup_key
        packed = self._briefs.pop(id)
        return id, packed.group, packed.dedup_key

    def ids(self) -> Iterator[str]:
        """Yield the ids of all, the one first that was settled first."""
        return iter(self._order)

    def brief_of(self, id: str) -> Brief:
        """Return what is remembered of one that is."""
        return self._briefs.get(id) or brief(self.shown[id])
