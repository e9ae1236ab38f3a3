"""Statements of MariaDB's log: what they do to captured tables without the log's showing rows.

`docs/how-to/capture.md` lists the same. A statement that is not known to be harmless counts as one
that changes rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from msgspec import Struct

from txbroker.relay.capture.changes import CapturedTable, Operation, Unshown
from txbroker.relay.capture.setup import Gap

_ANSI_QUOTES, _NO_BACKSLASHES = 1 << 2, 1 << 20
"""Bits of `sql_mode`."""
_REMOVES: frozenset[Operation] = frozenset(("delete", "truncate"))
_MOVES: frozenset[Operation] = _REMOVES | {"insert"}
_FILL_IN = "fill in the difference from the table"
_HARMLESS = (
    *("BEGIN", "START", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE", "XA"),
    *("GRANT", "REVOKE", "FLUSH", "CHECK"),
)
"""First words of statements that change no rows."""
_CASCADES = re.compile(r"\bON (DELETE|UPDATE) (CASCADE|SET NULL|SET DEFAULT)\b")
_VERSIONED = re.compile(r"\b(?:ADD|WITH) SYSTEM VERSIONING\b")
_SHOWN = 60


class Statement(Struct, frozen=True):
    """What a statement does.

    Attributes:
        defined: whether it may change the definition of a captured table.
        gaps: what it changes unseen, at most one of a kind.
    """

    defined: bool = False
    truncated: Sequence[CapturedTable] = ()
    gaps: Sequence[Gap] = ()


class _Token(NamedTuple):
    """A part of a statement.

    Attributes:
        text: a word in capitals, or a sign; "" of quoted names and texts.
        name: of a word or a quoted name.
    """

    kind: Literal["name", "other"]
    text: str
    name: str = ""


@lru_cache(maxsize=4)
def _pattern(mode: int) -> re.Pattern[str]:
    escapes = not mode & _NO_BACKSLASHES
    text = _quoted_pattern("'", escapes)
    double = _quoted_pattern('"', escapes and not mode & _ANSI_QUOTES)
    return re.compile(
        # MariaDB takes the exclamation mark out of comments that it does not execute.
        r"/\*M?!(?:\d{5,6})?|/\*.*?\*/|\*/|\#[^\n]*|--(?=\s|\Z)[^\n]*"
        rf"|(?P<text>{text})|(?P<double>{double})|(?P<quoted>{_quoted_pattern('`', False)})"
        r"|(?P<word>[\w$]+)|(?P<sign>\S)",
        re.DOTALL,
    )


def _quoted_pattern(quote: str, escapes: bool) -> str:
    inside, escaped = (r"\\", r"|\\.") if escapes else ("", "")
    return f"{quote}(?:[^{quote}{inside}]|{quote}{quote}{escaped})*{quote}"


def _tokens(text: str, mode: int) -> Iterator[_Token]:
    for found in _pattern(mode & (_NO_BACKSLASHES | _ANSI_QUOTES)).finditer(text):
        kind, part = found.lastgroup, found[0]
        if kind == "word":
            yield _Token("name", part.upper(), part)
        elif kind == "quoted" or (kind == "double" and mode & _ANSI_QUOTES):
            yield _Token("name", "", part[1:-1].replace(part[0] * 2, part[0]))
        elif kind is not None:
            yield _Token("other", part if kind == "sign" else "")


def read_statement(
    text: str, schema: str, tables: Sequence[CapturedTable], mode: int = 0
) -> Statement:
    """Return what a statement does to captured tables.

    Args:
        schema: the database that it was executed in.
        mode: `sql_mode` of its session.
    """
    return _StatementReading(text, schema, tables, mode).result()


def definition_gaps(table: CapturedTable, text: str) -> list[Gap]:
    """Return the gaps of a table by what `SHOW CREATE TABLE` shows in the mode ''."""
    return list(_gaps_of(table, [each.text for each in _tokens(text, 0)]))


def statement_gap(tables: Sequence[CapturedTable], text: str) -> Gap:
    """Return the gap of a statement that may have changed rows of any table."""
    return _gap(
        tables,
        "statements",
        f"a transaction is in the binary log as the statement {_short(text)}, not as rows, and may "
        "have changed it",
        "let no session change binlog_format",
    )


def _gap(tables: Sequence[CapturedTable], kind: Unshown, problem: str, remedy: str) -> Gap:
    """Return one gap of several tables: that of one without consent, if there is any."""
    table = next((each for each in tables if kind not in each.accept), tables[0])
    return Gap(table, kind, problem, remedy)


def _short(text: str) -> str:
    one_line = " ".join(text.split())
    return repr(one_line if len(one_line) <= _SHOWN else f"{one_line[:_SHOWN]}…")


def _gaps_of(table: CapturedTable, words: Sequence[str]) -> Iterator[Gap]:
    """Yield the gaps that the definition of a table brings; `words` are its tokens."""
    definition = " ".join(words)
    if any(each in table.operations for each in _actions(definition)):
        yield Gap(
            table,
            "cascades",
            "a foreign key changes its rows with CASCADE, SET NULL or SET DEFAULT, and the binary "
            "log does not show that",
            "let programs or triggers change these rows, and give the key ON DELETE RESTRICT ON "
            "UPDATE RESTRICT",
        )
    if _VERSIONED.search(definition):
        yield Gap(
            table,
            "versions",
            "it has system versioning, so that the binary log shows a delete as an update, and the "
            "earlier row of an update as an insert",
            "ALTER TABLE … DROP SYSTEM VERSIONING",
        )


def _actions(definition: str) -> Iterator[Operation]:
    """Yield what foreign keys do to rows of their table."""
    for event, action in _CASCADES.findall(definition):
        yield "delete" if (event, action) == ("DELETE", "CASCADE") else "update"


class _StatementReading:
    """Reads one statement."""

    def __init__(self, text: str, schema: str, tables: Sequence[CapturedTable], mode: int) -> None:
        self._text = text
        self._schema = schema
        self._captured = tables
        self._tokens = list(_tokens(text, mode))
        self._at = 0
        self._defined = False
        self._truncated: list[CapturedTable] = []
        self._gaps: list[Gap] = []

    def result(self) -> Statement:
        """Return what the statement does."""
        if self._take("SET") and self._take("STATEMENT"):
            while self._at < len(self._tokens) and not self._take("FOR"):
                self._at += 1
        else:
            self._at = 0
        if self._at < len(self._tokens) and not self._is_known():
            self._gaps.append(statement_gap(self._captured, self._text))
        return Statement(self._defined, self._truncated, self._gaps)

    def _is_known(self) -> bool:
        """Return whether the log shows all rows that it changes, except those found here."""
        if self._take("TRUNCATE"):
            self._take("TABLE")
            self._truncated = self._table()
        elif self._take("RENAME"):
            self._rename()
        elif self._take("DROP"):
            self._drop()
        elif self._take("CREATE"):
            return self._create()
        elif self._take("ALTER"):
            self._alter()
        elif self._take("SET"):
            return self._take("PASSWORD", "ROLE", "DEFAULT")
        elif self._take("ANALYZE", "OPTIMIZE", "REPAIR"):
            self._take("LOCAL", "NO_WRITE_TO_BINLOG")
            return self._take("TABLE", "TABLES", "VIEW")
        else:
            return self._take(*_HARMLESS)
        return True

    # --- kinds of statements -----------------------------------------------------------------

    def _drop(self) -> None:
        if self._take("DATABASE", "SCHEMA"):
            self._if_exists()
            schema = self._name()
            self._note_moves([each for each in self._captured if each.schema == schema], _REMOVES)
        elif self._take("TABLE", "TABLES"):
            self._if_exists()
            dropped = self._table()
            while self._take(","):
                dropped += self._table()
            self._note_moves(dropped, _REMOVES)

    def _rename(self) -> None:
        if self._take("TABLE", "TABLES"):
            self._if_exists()
            renamed = self._table()
            while self._at < len(self._tokens):
                # A number of seconds to wait may stand before TO.
                self._at += 1
                if self._tokens[self._at - 1].text in ("TO", ","):
                    renamed += self._table()
            self._defined = bool(renamed)
            self._note_moves(renamed, _MOVES)

    def _create(self) -> bool:
        replaces = self._take("OR") and self._take("REPLACE")
        temporary = self._take("TEMPORARY")
        if not self._take("TABLE"):
            return True
        self._if_exists()
        created = self._table()
        words = self._words()
        if "SELECT" in words or ("VALUES", "(") in pairwise(words):
            return False
        if not temporary:
            self._define(created)
            self._note_moves(created if replaces else [], _REMOVES)
        return True

    def _alter(self) -> None:
        self._take("ONLINE")
        ignores = self._take("IGNORE")
        if not self._take("TABLE"):
            return
        self._if_exists()
        altered = self._table()
        self._define(altered)
        self._note_moves(altered if ignores else [], _REMOVES)
        while self._at < len(self._tokens):
            begin = self._at
            if self._take("TRUNCATE", "DROP") and self._take("PARTITION"):
                self._note_moves(altered, _REMOVES, "partitions")
            elif self._take("EXCHANGE", "CONVERT"):
                if self._take("PARTITION", "TABLE"):
                    self._note_moves(altered + self._of_partition(), _MOVES, "partitions")
            elif self._take("DISCARD", "IMPORT"):
                moves = self._take("TABLESPACE", "PARTITION")
                self._note_moves(altered if moves else [], _MOVES)
            elif self._take("RENAME") and not self._take("COLUMN", "INDEX", "KEY"):
                self._take("TO", "AS", "=")
                renamed = altered + self._table()
                self._defined = bool(renamed)
                self._note_moves(renamed, _MOVES)
            self._at = max(self._at, begin + 1)

    def _of_partition(self) -> list[CapturedTable]:
        """Return the table that becomes a partition, or that a partition becomes."""
        self._at -= 1
        while self._at < len(self._tokens) and not self._take("TABLE"):
            self._at += 1
        found = self._table()
        self._defined = self._defined or bool(found)
        return found

    def _define(self, tables: Sequence[CapturedTable]) -> None:
        """Note tables whose definition changes, and the gaps that the change brings."""
        self._defined = bool(tables)
        for table in tables:
            self._gaps += _gaps_of(table, self._words())

    def _note_moves(
        self,
        tables: Sequence[CapturedTable],
        operations: frozenset[Operation],
        kind: Unshown = "tables",
    ) -> None:
        """Note that rows of tables appear or disappear."""
        concerned = [each for each in tables if each.operations & operations]
        if concerned and all(each.kind != kind for each in self._gaps):
            does = (
                f"{_short(self._text)} adds or removes rows, and the binary log does not show them"
            )
            self._gaps.append(_gap(concerned, kind, does, _FILL_IN))

    # --- tokens ------------------------------------------------------------------------------

    def _words(self) -> list[str]:
        return [each.text for each in self._tokens[self._at :]]

    def _take(self, *texts: str) -> bool:
        """Pass a word or sign if it is one of some."""
        found = self._at < len(self._tokens) and self._tokens[self._at].text in texts
        self._at += found
        return found

    def _if_exists(self) -> None:
        if self._take("IF"):
            self._take("NOT")
            self._take("EXISTS")

    def _name(self) -> str:
        if self._at == len(self._tokens) or self._tokens[self._at].kind != "name":
            return ""
        self._at += 1
        return self._tokens[self._at - 1].name

    def _table(self) -> list[CapturedTable]:
        """Pass the name of a table; return the table if it is captured."""
        schema, table = self._schema, self._name()
        if self._take("."):
            schema, table = table, self._name()
        return [each for each in self._captured if (each.schema, each.table) == (schema, table)]
