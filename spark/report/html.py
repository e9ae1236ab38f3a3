"""HTML and SVG that cannot be broken by what stands in them: every text is escaped when it is put
in, as groups, topics and ids come from users."""

from collections.abc import Sequence
from html import escape

_EMPTY = frozenset({"meta", "rect", "line"})
"""Elements that hold nothing."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = Html | str | int | None


def text(value: object) -> Html:
    """Return any value as harmless HTML. What cannot be seen, or turns the writing direction, is
    shown as its code: a name must not look like another one."""
    shown = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in str(value))
    return Html(escape(shown, quote=True))


def join(*children: Child) -> Html:
    """Return children one after the other; strings are escaped, None is left out."""
    return Html(
        "".join(
            child if isinstance(child, Html) else text(child)
            for child in children
            if child is not None
        )
    )


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """Return an element. A trailing `_` of an attribute's name is dropped, others become `-`;
    an attribute that is None is left out."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY:
        return Html(f"<{name}{shown}/>")
    return Html(f"<{name}{shown}>{join(*children)}</{name}>")


def table(
    heads: Sequence[str],
    rows: Sequence[Html],
    numbers: Sequence[int] = (),
    class_: str | None = None,
) -> Html:
    """Return a table, which scrolls where it is too wide.

    Args:
        heads: the names of the columns.
        rows: `tr` elements.
        numbers: the columns that hold numbers, counted from 0.
        class_: of the table; `stack` where a narrow page shows a row as a block.
    """
    head = (
        tag("th", name, scope="col", class_="n" if place in numbers else None)
        for place, name in enumerate(heads)
    )
    return tag(
        "div",
        tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), class_=class_),
        class_="scroll",
    )
