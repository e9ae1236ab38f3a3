"""Format values for pages: ages, times, numbers, bytes, links."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from urllib.parse import quote, urlencode

from txbroker.contract.policy import QUERY_MASK, without_query
from txbroker.core.records import Header, Message, State

BODY_CHARS_MAX = 16_384
"""Maximum characters shown of a key, value or header."""
_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))

STATE_TEXT = {
    State.PENDING: "undecided: neither its producer nor a check has decided it",
    State.COMMITTED: "decided to commit, not yet visible to consumers",
    State.PROMOTED: "committed and visible to consumers",
    State.ROLLED_BACK: "rolled back: no consumer will ever see it",
    State.PARKED: "undecided after the last attempt: needs a manual decision",
    State.REFUSED: "committed, but refused by a target",
}
"""The meaning of each state."""


def age(seconds: float | None) -> str:
    """Return a duration in its two greatest units, such as `3 m 20 s`."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return "<\N{NO-BREAK SPACE}1\N{NO-BREAK SPACE}s"
    left = round(seconds)
    greatest = next(at for at, (_, size) in enumerate(_UNITS) if left >= size)
    parts: list[str] = []
    for unit, size in _UNITS[greatest : greatest + 2]:
        amount, left = divmod(left, size)
        if amount:
            parts.append(f"{amount}\N{NO-BREAK SPACE}{unit}")
    return "\N{NO-BREAK SPACE}".join(parts)


def number(value: float | None) -> str:
    """Return a whole number with thin spaces between thousands, a dash for None."""
    if value is None:
        return "–"
    return f"{round(value):,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def least(value: float | None, partial: bool, shown: Callable[[float], str] = number) -> str:
    """Return a number; with `partial`, when other parts of it are unknown, as a lower bound, and a
    dash instead of 0."""
    if value is None or (partial and not value):
        return "–"
    return f"at least {shown(value)}" if partial else shown(value)


def rate(value: float | None) -> str:
    """Return a rate, with a decimal if it is small, a dash for None."""
    if value is not None and 0 < value < 9.95:
        return f"{value:.1f}"
    return number(value)


def time_of(at_ms: int) -> str:
    """Return a time to the second, UTC."""
    return _at(at_ms).strftime("%Y-%m-%d %H:%M:%S")


def clock_of(at_ms: int) -> str:
    """Return the time of day to the second, UTC."""
    return _at(at_ms).strftime("%H:%M:%S")


def machine_time(at_ms: int) -> str:
    """Return a time in ISO 8601."""
    return _at(at_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _at(at_ms: int) -> datetime:
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0, UTC)


def count(value: int, one: str, several: str = "") -> str:
    """Return a number with its noun."""
    return f"{number(value)} {one if value == 1 else several or one + 's'}"


def link(path: str, **query: object) -> str:
    """Return a link to a page; empty fields are omitted from the query."""
    fields = {name: str(value) for name, value in query.items() if value not in (None, "")}
    return quote(path) + ("?" + urlencode(fields) if fields else "")


def text_of(raw: bytes | None) -> str:
    """Return bytes as text, or in hexadecimal if they are not UTF-8."""
    if raw is None:
        return ""
    # A character has at most four bytes.
    shown = raw[: 4 * BODY_CHARS_MAX]
    try:
        text = shown.decode()
    except UnicodeDecodeError as error:
        # Text that was cut within a character is still text.
        if len(raw) == len(shown) or error.start < len(shown) - 3:
            return shown[: BODY_CHARS_MAX // 3].hex(" ")
        text = shown[: error.start].decode()
    return text[:BODY_CHARS_MAX]


def kind_of(raw: bytes | None) -> str:
    """Describe bytes: size and kind."""
    if raw is None:
        return "null"
    try:
        raw.decode()
        kind = "text"
    except UnicodeDecodeError:
        kind = "bytes, in hexadecimal"
    size = count(len(raw), "byte")
    cut = ", its beginning" if len(text_of(raw)) >= BODY_CHARS_MAX - 3 else ""
    return f"{size}, {kind}{cut}" if raw else "empty"


def parts_of(message: Message) -> list[tuple[str, bytes | None]]:
    """Return key, value and each header of a message, named."""
    headers: tuple[Header, ...] = message.headers
    return [
        ("Key", message.key),
        ("Value", message.value),
        *((f"Header {name}", value) for name, value in headers),
    ]


def sentence(text: str) -> str:
    """Return text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


_FILTERS = (
    sentence, age, number, least, rate, time_of, clock_of, machine_time, text_of, kind_of, parts_of,
)  # fmt: skip
FILTERS: dict[str, Callable[..., object]] = {
    "without_query": partial(without_query, mask=QUERY_MASK),
    **{function.__name__: function for function in _FILTERS},
}
"""The filters of templates."""
