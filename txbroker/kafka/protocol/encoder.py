"""Encodes Kafka requests and decodes their answers, by tables of their fields.

A schema lists fields as `name:type`, arrays as `name[type]` or `name[fields]`. The types are those
of Kafka's protocol guide (https://kafka.apache.org/protocol), shortened: i8 to i64, bool, str,
bytes, uuid; `text` is a str that hardly repeats, so that its encoding is not cached. `name:type=-1`
is a constant: requests are given no value for it. In flexible versions strings and arrays are
compact, and every struct ends in tagged fields: requests send none, and answers' are skipped,
except for the outermost ones (`tags`).

Each schema becomes two functions as they would be written by hand: adjacent fields of fixed size
are packed at once, and only arrays take a loop. A proxy sends hundreds of requests a second; the
client library takes a hundred calls and more for each.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, ClassVar, TypeAlias

import msgspec
from aiokafka.errors import IncompatibleBrokerVersion

Versions: TypeAlias = dict[int, tuple[int, int]]
"""First and last version of each API key that a broker supports."""
Field: TypeAlias = tuple[str, Any, str]
"""Name, type and constant of a field. The type is a name, or a list: of fields, or of one type."""

_FRONT = struct.Struct(">ihhih")
"""Bytes after this field, API key, version, correlation id, bytes of the client id."""
_SIZE_BYTES = 4
_CORRELATION_ID_BYTES = 4
_NO_TAGS = b"\0"
_NAMES_MAX = 4096
_VARINT_BYTES_MAX = 10
_CODES = {"i8": "b", "i16": "h", "i32": "i", "i64": "q", "bool": "?", "uuid": "16s"}
_TOKEN = re.compile(r"(\w+):(\w+)(?:=(-?\w+))?|(\w+)\[(\w+)\]|(\w+)\[|(\])")


class Request:
    """A request in one version. The values of its fields are its attributes.

    Args:
        values: of the fields that are no constants, in order.

    Attributes:
        FLEXIBLE: whether the version is flexible.
        HEADER_TAGS: whether the answer's header has tagged fields, too.
        REQUEST, RESPONSE: the fields, see the module's docstring.
        read: returns the fields of an answer, given its bytes from the correlation id on, as
            attributes, `tags` among them; structs are tuples, and a null array is an empty one.
            Raises ValueError, IndexError or struct.error: the bytes are no answer to this request.
    """

    API_KEY: ClassVar[int]
    API_VERSION: ClassVar[int]
    FLEXIBLE: ClassVar[bool] = True
    HEADER_TAGS: ClassVar[bool] = True
    REQUEST: ClassVar[str]
    RESPONSE: ClassVar[str]
    _names: ClassVar[tuple[str, ...]]
    _pack: ClassVar[Any]
    read: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        asked, answered = _parsed(cls.REQUEST), _parsed(cls.RESPONSE)
        cls._names = tuple(name for name, _, constant in asked if not constant)
        cls._pack = staticmethod(_packer(asked, cls.FLEXIBLE))
        cls.read = staticmethod(_reader(cls.__name__, answered, cls.FLEXIBLE, cls.HEADER_TAGS))

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(name)
        return self.values[self._names.index(name)]

    def frame(self, versions: Versions, correlation_id: int, client: bytes) -> bytes:
        """Return all bytes of the request.

        Raises:
            IncompatibleBrokerVersion: the broker does not support this API.
            NotImplementedError: the broker does not support this version of it.
        """
        key, version = self.API_KEY, self.API_VERSION
        if key not in versions:
            raise IncompatibleBrokerVersion(f"the broker does not support {type(self).__name__}")
        first, last = versions[key]
        if not first <= version <= last:
            raise NotImplementedError(
                f"{type(self).__name__}: the broker supports versions {first} to {last}"
            )
        parts = [b"", client]
        self._pack(parts, self.values)
        size = _FRONT.size - _SIZE_BYTES + sum(map(len, parts))
        parts[0] = _FRONT.pack(size, key, version, correlation_id, len(client))
        return b"".join(parts)


# --- schemas ---------------------------------------------------------------------------------


def _parsed(text: str) -> list[Field]:
    return _fields(_TOKEN.finditer(text))


def _fields(tokens: Iterator[re.Match[str]]) -> list[Field]:
    fields: list[Field] = []
    for token in tokens:
        name, type_, constant, list_name, list_type, struct_name, end = token.groups()
        if end:
            break
        if name:
            fields.append((name, type_, constant or ""))
        elif list_name:
            fields.append((list_name, [list_type], ""))
        else:
            fields.append((struct_name, _fields(tokens), ""))
    return fields


# --- functions from schemas ------------------------------------------------------------------


class _EncodedNames(dict[str | None, bytes]):
    """A bounded cache of encoded names; None is null."""

    def __init__(self, encode: Callable[[bytes], bytes], null: bytes) -> None:
        self._encode = encode
        self._null = null

    def __missing__(self, name: str | None) -> bytes:
        if name is None:
            return self._null
        if len(self) >= _NAMES_MAX:
            self.clear()
        self[name] = encoded = self._encode(name.encode())
        return encoded


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_BYTE_VARINTS = [bytes([number]) for number in range(0x80)]
_PLAIN_NAMES = _EncodedNames(lambda name: struct.pack(">h", len(name)) + name, b"\xff\xff")
_COMPACT_NAMES = _EncodedNames(lambda name: _varint(len(name) + 1) + name, b"\0")


class _Source:
    """Python source of a function, with the values that it names."""

    def __init__(self, flexible: bool, **names: Any) -> None:
        self.flexible = flexible
        self.names = names
        self._lines: list[str] = []
        self._indent = "    "
        self._numbers = count()

    def add(self, line: str) -> None:
        self._lines.append(self._indent + line)

    @contextmanager
    def block(self, line: str) -> Iterator[None]:
        """Add a line, and indent the lines that are added within."""
        self.add(line)
        outside, self._indent = self._indent, f"{self._indent}    "
        yield
        self._indent = outside

    def new(self, prefix: str) -> str:
        """Return an unused name."""
        return f"{prefix}{next(self._numbers)}"

    def named(self, value: Any) -> str:
        """Return a name for a value."""
        name = self.new("k")
        self.names[name] = value
        return name

    def function(self, signature: str) -> Any:
        """Return the function that the source defines."""
        exec("\n".join([f"def function({signature}):", *self._lines]), self.names)
        return self.names["function"]


# --- encoding --------------------------------------------------------------------------------


def _packer(fields: list[Field], flexible: bool) -> Any:
    source = _RequestSource(
        flexible,
        names=_COMPACT_NAMES if flexible else _PLAIN_NAMES,
        no_tags=_NO_TAGS,
        varint=_varint,
        small=_BYTE_VARINTS,
        pack=struct.pack,
    )
    if flexible:
        source.part("no_tags")
    source.struct(fields, "values")
    source.flush()
    source.add("return")
    return source.function("parts, values")


class _RequestSource(_Source):
    """Source that appends the parts of a request's body to a list."""

    _codes = ""

    def __init__(self, flexible: bool, **names: Any) -> None:
        super().__init__(flexible, **names)
        self._values: list[str] = []
        self._parts: list[str] = []

    def fixed(self, code: str, value: str) -> None:
        """Add a value of fixed size to those that are packed at once."""
        self._codes += code
        self._values.append(value)

    def part(self, value: str) -> None:
        """Add bytes."""
        self._pack_fixed()
        self._parts.append(value)

    def _pack_fixed(self) -> None:
        if self._codes:
            pack = self.named(struct.Struct(f">{self._codes}").pack)
            self._parts.append(f"{pack}({', '.join(self._values)})")
            self._codes, self._values = "", []

    def flush(self) -> None:
        """Write the parts so far, before a loop or the end."""
        self._pack_fixed()
        if self._parts:
            self.add(f"parts += ({', '.join(self._parts)},)")
            self._parts = []

    def size(self, code: str, value: str) -> None:
        """Add the length of a nullable value."""
        if not self.flexible:
            self.fixed(code, f"-1 if {value} is None else len({value})")
            return
        number = self.new("n")
        size = f"({number} := 0 if {value} is None else len({value}) + 1)"
        self.part(f"small[{number}] if {size} < 128 else varint({number})")

    def struct(self, fields: list[Field], value: str) -> None:
        """Add a struct, which is a tuple of its fields."""
        given = [self.new("v") for _, _, constant in fields if not constant]
        if given:
            self.add(f"{', '.join(given)}, = {value}")
        names = iter(given)
        for _, type_, constant in fields:
            self.value(type_, constant or next(names))
        if self.flexible:
            self.part("no_tags")

    def value(self, type_: Any, value: str) -> None:
        """Add one value."""
        if isinstance(type_, list):
            self._array(type_, value)
        elif type_ in _CODES:
            self.fixed(_CODES[type_], value)
        elif type_ == "str":
            self.part(f"names[{value}]")
        else:
            if type_ == "text":
                self.flush()
                self.add(f"{value} = {value} and {value}.encode()")
            self.size("h" if type_ == "text" else "i", value)
            self.part(f"{value} or b''")

    def _array(self, type_: list[Any], value: str) -> None:
        self.size("i", value)
        if type_[0] in _CODES:
            code = _CODES[type_[0]]
            self.part(f"pack(f'>{{len({value} or ())}}{code}', *{value} or ())")
            return
        self.flush()
        item = self.new("i")
        with self.block(f"for {item} in {value} or ():"):
            if isinstance(type_[0], str):
                self.value(type_[0], item)
            else:
                self.struct(type_, item)
            self.flush()


# --- decoding --------------------------------------------------------------------------------


def _reader(name: str, fields: list[Field], flexible: bool, header_tags: bool) -> Any:
    names = [name for name, _, _ in fields]
    source = _AnswerSource(
        flexible,
        answer=msgspec.defstruct(f"{name}Answer", [*names, "tags"], frozen=True),
        cut=_cut,
        read_varint=_read_varint,
        read_tags=_read_tags,
        unpack_from=struct.unpack_from,
    )
    source.add(f"at = {_CORRELATION_ID_BYTES}")
    if flexible and header_tags:
        source.skip_tags()
    values = source.struct(fields, tags=False)
    if not flexible:
        # Slices are shorter than announced without an error.
        source.add("if at > len(frame): cut()")
    source.add(f"tags = {'read_tags(frame, at)[0] if frame[at] else ' * flexible}{{}}")
    source.add(f"return answer({', '.join([*values, 'tags'])})")
    return source.function("frame")


class _AnswerSource(_Source):
    """Source that reads an answer from `frame` at `at`."""

    def skip_tags(self) -> None:
        self.add("at = read_tags(frame, at)[1] if frame[at] else at + 1")

    def struct(self, fields: list[Field], *, tags: bool = True) -> list[str]:
        """Read a struct; return the names of its values."""
        values = [self.new("v") for _ in fields]
        codes, run = "", []
        for (_, type_, _), value in zip(fields, values, strict=True):
            if isinstance(type_, str) and type_ in _CODES:
                codes += _CODES[type_]
                run.append(value)
                continue
            size = self.new("n")
            if not self.flexible:  # the length is read with the fields before it
                codes += "h" if type_ in ("str", "text") else "i"
                run.append(size)
            self._unpack(codes, run)
            codes, run = "", []
            if self.flexible:
                self.add(f"{size} = frame[at]")
                self.add("at += 1")
                self.add(f"if {size} > 127: {size}, at = read_varint(frame, at - 1)")
                self.add(f"{size} -= 1")
            self._sized(type_, value, size)
        self._unpack(codes, run)
        if self.flexible and tags:
            self.skip_tags()
        return values

    def _unpack(self, codes: str, names: list[str]) -> None:
        if codes:
            packed = struct.Struct(f">{codes}")
            self.add(f"{', '.join(names)}, = {self.named(packed.unpack_from)}(frame, at)")
            self.add(f"at += {packed.size}")

    def _sized(self, type_: Any, value: str, size: str) -> None:
        self.add(f"if {size} < 0: {value} = {None if isinstance(type_, str) else []}")
        with self.block("else:"):
            if isinstance(type_, str):
                self.add(
                    f"{value} = frame[at : at + {size}]{'' if type_ == 'bytes' else '.decode()'}"
                )
                self.add(f"at += {size}")
            elif type_[0] in _CODES:
                code = _CODES[type_[0]]
                self.add(f"{value} = list(unpack_from(f'>{{{size}}}{code}', frame, at))")
                self.add(f"at += {size} * {struct.calcsize(f'>{code}')}")
            elif (codes := _fixed(type_)) is not None:
                self._structs(codes, type_, value, size)
            else:
                self._loop(type_, value, size)

    def _structs(self, codes: list[str], type_: list[Any], value: str, size: str) -> None:
        """Read structs of fixed size at once: a partition can have ten thousand producers, which
        would block the event loop one by one. Tagged fields are an empty byte, if there are none.
        """
        packed = struct.Struct(f">{''.join(codes)}{'x' if self.flexible else ''}")
        part = self.new("p")
        self.add(f"{part} = frame[at : at + {size} * {packed.size}]")
        tags = f"any({part}[{packed.size - 1} :: {packed.size}])" if self.flexible else "False"
        with self.block(f"if {tags}:"):
            self._loop(type_, value, size)
        with self.block("else:"):
            self.add(f"{value} = list({self.named(packed.iter_unpack)}({part}))")
            self.add(f"at += {size} * {packed.size}")

    def _loop(self, type_: list[Any], value: str, size: str) -> None:
        self.add(f"{value} = []")
        with self.block(f"for _ in range({size}):"):
            alone = isinstance(type_[0], str)
            values = self.struct([("", type_[0], "")] if alone else type_, tags=not alone)
            self.add(f"{value}.append({values[0] if alone else '(' + ', '.join(values) + ',)'})")


def _fixed(type_: list[Any]) -> list[str] | None:
    """Return the codes of a struct whose fields all have a fixed size."""
    if isinstance(type_[0], str):
        return None
    codes = [_CODES.get(each) if isinstance(each, str) else None for _, each, _ in type_]
    return None if None in codes else [code for code in codes if code]


def _cut() -> None:
    raise ValueError("the answer is truncated")


def _read_varint(frame: bytes, at: int) -> tuple[int, int]:
    number = 0
    for end in range(at, at + _VARINT_BYTES_MAX):
        byte = frame[end]
        number |= (byte & 0x7F) << 7 * (end - at)
        if byte <= 0x7F:
            return number, end + 1
    raise ValueError("a varint is too long")


def _read_tags(frame: bytes, at: int) -> tuple[dict[int, bytes], int]:
    """Return tagged fields by their tags, and the position after them."""
    tags = {}
    count, at = _read_varint(frame, at)
    for _ in range(count):
        tag, at = _read_varint(frame, at)
        size, at = _read_varint(frame, at)
        tags[tag] = frame[at : at + size]
        at += size
    if at > len(frame):
        _cut()
    return tags, at


def decoder(schema: str) -> Callable[[bytes], Any]:
    """Return a function that decodes an array of structs in a tagged field of an answer."""
    (array,) = _parsed(schema)
    read = _reader("Tagged", [array], True, False)
    return lambda data: getattr(read(bytes(_CORRELATION_ID_BYTES) + data + _NO_TAGS), array[0])
