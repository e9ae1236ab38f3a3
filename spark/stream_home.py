"""What a stream keeps beside Spark's checkpoint: its name, and what it reads."""

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from txbroker.errors import ConfigurationError
from txbroker.spark.folders import read_bytes, write_bytes
from txbroker.spark.rows import ALWAYS, Horizon, kept_from_ms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILE = "txbroker-stream.json"
_VERSION = 1


class Taken(Struct, frozen=True):
    """A partition of which something was gone when the stream came to it.

    Attributes:
        topic, partition: which one.
        start: the first offset that was left.
        at_ms: when the stream came to it; `ALWAYS` where records may go at any time.
        kept_ms: so long retention had left a record by then; 0 where that is not known.
    """

    topic: str
    partition: int
    start: int
    at_ms: int
    kept_ms: int = 0


class Home(Struct, frozen=True, kw_only=True):
    """What stays for as long as the checkpoint does.

    Attributes:
        v: version of the file.
        name: of the stream.
        installation: the half topic; another installation's checkpoint is refused.
        started_ms: when the stream began.
        buckets, slot_ms: how transactions are kept; they cannot change later.
        targets: topics that half messages name, whether they exist or not.
        read: those of them that the checkpoint knows.
        taken: what of all topics was gone.
    """

    v: int = _VERSION
    name: str
    installation: str
    started_ms: int
    buckets: int
    slot_ms: int
    targets: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    taken: tuple[Taken, ...] = ()

    def horizon(self, half: str, op: str) -> Horizon:
        """Return what is judged with care: whatever may have been taken before the stream came."""
        halves = {each.partition: each for each in self.taken if each.topic == half}
        ops = {each.partition: each.at_ms for each in self.taken if each.topic == op}
        targets = [each for each in self.taken if each.topic not in (half, op)]
        at_any_time = {each.topic for each in targets if each.at_ms == ALWAYS}
        return Horizon(
            half_start={number: each.start for number, each in halves.items()},
            half_begin_ms={number: each.at_ms for number, each in halves.items()},
            op_begin_ms=ops,
            taken_ms={(each.topic, each.partition): each.at_ms for each in targets},
            kept_from_ms={
                each.topic: kept_from_ms(each.at_ms, each.kept_ms)
                for each in targets
                if each.kept_ms and each.topic not in at_any_time
            },
        )

    def with_taken(self, found: "list[Taken]") -> "Home":
        """Return this with more that was gone; what was noted before stays."""
        known = {(each.topic, each.partition): each for each in found}
        for each in self.taken:
            place = (each.topic, each.partition)
            if each.at_ms == ALWAYS or place not in known:
                known[place] = each
        return msgspec.structs.replace(self, taken=tuple(known.values()))


def read_home(spark: "SparkSession", checkpoint: str) -> Home | None:
    """Return what a checkpoint's stream keeps, None where none has begun there.

    Raises:
        ConfigurationError: it does not read, or the folder cannot be used.
    """
    content = read_bytes(spark, _path(checkpoint))
    if content is None:
        return None
    try:
        home = msgspec.json.decode(content, type=Home)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"{_path(checkpoint)} does not read ({error}): name another --checkpoint"
        ) from None
    if home.v > _VERSION:
        raise ConfigurationError(f"{_path(checkpoint)}: a newer version of txbroker wrote it")
    return home


def write_home(spark: "SparkSession", checkpoint: str, home: Home) -> None:
    """Keep it.

    Raises:
        ConfigurationError: the folder cannot be used.
    """
    write_bytes(spark, _path(checkpoint), msgspec.json.encode(home))


def _path(checkpoint: str) -> str:
    return f"{checkpoint.rstrip('/')}/{_FILE}"
