"""The parts of transaction ids, as Spark SQL expressions; see `txbroker.core.routing`.

Whatever the text is, none of them raises an error: Spark's ANSI mode would end the run with it.
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

from txbroker.core.routing import ALPHABET, TIME_MAX_MS

_ID = r"\A[0-7][0-9A-HJKMNP-TV-Z]{25}\z"  # 128 bits: the first character has but three
_DIGITS32 = "0123456789ABCDEFGHIJKLMNOPQRSTUV"


def is_id(text: Column) -> Column:
    """Say whether a text is a transaction id; null for null."""
    return text.rlike(_ID)


def id_partition(id: Column) -> Column:
    """Return the half partition that is in a transaction id; null where it is not an id."""
    # The first 4 characters are 20 bits: 2 that are always zero, 16, and 2 of the time.
    return F.shiftright(_base32(id, 1, 4), 2).cast("int")


def id_time_ms(id: Column) -> Column:
    """Return the time that is in a transaction id, ms since 1970; null where it is not an id."""
    # Bits 60 to 114 in 11 characters; the time's are 64 to 111.
    return F.shiftright(_base32(id, 4, 11), 4).bitwiseAND(F.lit(TIME_MAX_MS))


def _base32(id: Column, first: int, length: int) -> Column:
    digits = F.translate(F.substring(id, first, length), ALPHABET, _DIGITS32)
    return F.when(is_id(id), F.conv(digits, 32, 10)).try_cast("bigint")
