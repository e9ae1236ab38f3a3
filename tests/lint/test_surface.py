"""The public surface is that of `surface.txt`: commands, settings, HTTP, SDK, stored formats.

A difference is a change for users: add it to CHANGELOG.md with a migration line, then renew
the file with `make docs`.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from txbroker.cli.reference import commands
from txbroker.config.settings import Settings
from txbroker.consumer.statistics import METRICS
from txbroker.contract import frames, service
from txbroker.contract.signing import sign
from txbroker.core import encoding, records
from txbroker.core.ledger import Ledger, transaction_of
from txbroker.core.routing import make_id
from txbroker.core.snapshot import SnapshotCapture
from txbroker.errors import request_errors
from txbroker.proxy.cluster.views import LogNames, view_of
from txbroker.proxy.http.api import operations
from txbroker.proxy.http.operations import describe, encode_json
from txbroker.proxy.http.transactions import _view_body
from txbroker.proxy.observe.metrics import Metrics
from txbroker.proxy.partition.history import account_of
from txbroker.relay.metrics import METRICS as RELAY_METRICS

SURFACE = Path(__file__).with_name("surface.txt")
MODULES = (
    *("sdk", "consumer", "relay", "databases"),
    *("errors", "testing.broker", "testing.plugin"),
)
UNKNOWN = "(…)"
ID = "7ZZZ0000000000000000000000"


def lines() -> Iterator[str]:
    parts = command_line, settings, http, errors, metrics, python, stored, snapshots, framed
    for part in (*parts, exchanged):
        yield from (f"{part.__name__}: {line}" for line in part())


def command_line() -> Iterator[str]:
    """Yield the options and arguments of each command."""
    for command, context in commands():
        yield context.command_path
        for one in command.params:
            kind = one.type.to_info_dict()
            shape = kind.get("choices") or kind["name"]
            default = one.default if isinstance(one.default, str | int | float) else None
            more = [name for name in ("multiple", "required", "is_flag") if getattr(one, name, 0)]
            names = "/".join((*one.opts, *one.secondary_opts))
            if isinstance(one, click.Argument):
                names = one.human_readable_name
            yield f"{context.command_path} {names} {shape} default={default!r} {' '.join(more)}"


def settings() -> Iterator[str]:
    """Yield each setting with its type and default."""
    for name, field in sorted(Settings.model_fields.items()):
        yield _bare(f"{name}: {field.annotation} = {field.default!r}")


def http() -> Iterator[str]:
    """Yield each operation with the schemas of its request and answers."""
    page = describe(operations())
    schemas = page["components"]["schemas"]
    for path, methods in sorted(page["paths"].items()):
        for method, operation in sorted(methods.items()):
            described = _without_words(operation, schemas)
            yield f"{method.upper()} {path} {json.dumps(described, sort_keys=True)}"


def _without_words(value: Any, schemas: dict[str, Any]) -> Any:
    """Return a schema with its references resolved and nothing that is written for people."""
    if isinstance(value, list):
        return [_without_words(each, schemas) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _without_words(schemas[value["$ref"].rpartition("/")[2]], schemas)
    return {
        name: sorted(re.findall(r"`(\w+)`: ", each))
        if name == "description"
        else _without_words(each, schemas)
        for name, each in value.items()
        if name not in ("summary", "title") and not (name == "description" and "`" not in each)
    }


def errors() -> Iterator[str]:
    """Yield the code, status and retryability of each error of a call."""
    for error in request_errors().values():
        yield f"{error.code} {error.status} retryable={error.retryable}"


def metrics() -> Iterator[str]:
    """Yield each metric with its type and labels."""
    for one in (*Metrics().described(), *METRICS, *RELAY_METRICS):
        yield f"{one.name} {one.kind} {','.join(one.labels)}"


def python() -> Iterator[str]:
    """Yield the signatures of the public modules, with the fields of their values."""
    for module, names in PUBLIC_NAMES.items():
        for name, value in names.items():
            for line in _described(value):
                yield _bare(f"{module}.{name}{line}")


def _public_names(module: str) -> dict[str, Any]:
    loaded = importlib.import_module(f"txbroker.{module}")
    own = [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == loaded.__name__
    ]
    return {name: getattr(loaded, name) for name in sorted(getattr(loaded, "__all__", own))}


PUBLIC_NAMES = {module: _public_names(module) for module in MODULES}
PUBLIC = {
    value for names in PUBLIC_NAMES.values() for value in names.values() if isinstance(value, type)
}


def _described(value: Any) -> Iterator[str]:
    if isinstance(value, type) and issubclass(value, enum.Enum):
        yield f" = {[member.value for member in value]}"
    elif typing.is_typeddict(value):
        yield from _options(value)
    elif isinstance(value, type):
        signature = _signature(value)
        yield signature
        if named := re.search(r"\*\*options: '?Unpack\[(\w+)\]", signature):
            options = getattr(sys.modules[value.__module__], named[1])
            yield from () if options in PUBLIC else _options(options)
        for name, member in sorted(_members(value)):
            if isinstance(member, classmethod | staticmethod):
                member = member.__func__
            if isinstance(member, types.FunctionType):
                yield f".{name}{_signature(member)}"
            elif isinstance(member, property) or (
                isinstance(member, types.MemberDescriptorType)
                # Of what users do not construct, only documented fields are for them.
                and (signature != UNKNOWN or f" {name}: " in (value.__doc__ or ""))
            ):
                yield f".{name}"
    elif callable(value):
        yield _signature(value)
    else:
        yield f" = {value!r}"


def _options(value: Any) -> Iterator[str]:
    for name, kind in sorted(value.__annotations__.items()):
        yield f"[{name}]: {getattr(kind, '__forward_arg__', kind)}"


def _members(value: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members of a class, also those of bases that are not public."""
    found: dict[str, Any] = {}
    for base in reversed(value.__mro__):
        if base.__module__.startswith("txbroker.") and (base is value or base not in PUBLIC):
            found |= vars(base)
    yield from ((name, member) for name, member in found.items() if not name.startswith("_"))


def _signature(value: Any) -> str:
    try:
        found = inspect.signature(value)
    except (ValueError, NameError):  # it has none, or names types that only type checkers import
        return UNKNOWN
    return str(
        found.replace(
            parameters=[
                # Its class is enough, as that of tables, which hold SQL.
                each.replace(default=type(each.default))
                if isinstance(each.default, msgspec.Struct)
                else each
                for each in found.parameters.values()
            ]
        )
    )


def _bare(text: str) -> str:
    """Return a text without modules of names, quotes of annotations and addresses of objects."""
    return re.sub(r"(?:\b[a-z_]\w*\.)+(?=[A-Z])|'| at 0x\w+", "", text)


def stored() -> Iterator[str]:
    """Yield records as they are stored, in hexadecimal."""
    plain = records.Message("orders", None, None, (), 0)
    full = records.Message("pay", b"k", b"v", (("h", b"1"), ("n", None)), 3, 1_700_000_000_000)
    policy = records.CheckPolicy(5.0, 7.5, 3, 2.0)
    attributes = records.Attributes("order-1", "dedup-1")
    half = records.Half(ID, "shop", (plain, full), attributes, policy)
    yield from _shown("half", encoding.encode_half(half))
    yield from _shown("half alone", encoding.encode_half(records.Half(ID, "g", (plain,))))
    yield from _shown("contents", encoding.encode_contents(half, (full, plain)))
    for kind in records.MarkerKind:
        yield from _shown(kind, [encoding.encode_marker(records.Marker(1, kind, ID))])
    values = (1, records.MarkerKind.CHECK, ID, 7, records.Source.CHECK, "g", "by", "why", 2, 3)
    marker = records.Marker(*values, "claim", "endpoint", "previous", 1.5, 2)
    yield from _shown("marker", [encoding.encode_marker(marker)])
    yield from _shown("claim", [encoding.encode_claim(records.Claim(1, "c", "owner", "url"))])
    anchors = records.Anchor(5, 6), records.Anchor(7, 8)
    checkpoint = records.Checkpoint(1, "c", 9, 8, *anchors, ("d",), "s", True, 4)
    yield from _shown("checkpoint", [encoding.encode_progress(checkpoint)])
    attempt = records.Attempt(2, 3, 14, records.CheckReason.DUE, "endpoint", "unknown", False)
    checks = records.Checks(2, 12, 3, (13,), 14, 15, (attempt,))
    cause = records.Cause("refused", "too large", "pay", 3, True)
    kept = records.ParkedCopy(half, 11, 12, records.State.REFUSED, cause, 13, checks=checks)
    yield from _shown("kept", encoding.encode_kept(kept))
    yield from _shown("tombstones", encoding.kept_tombstones(ID, 2))
    yield f"signature {sign(b'secret', 'id', 1, b'body')}"


def _transactions() -> Iterator[records.Half]:
    """Yield half messages with every combination of optional fields."""
    message, policy = records.Message("pay", b"k", b"v", (), 3), records.CheckPolicy(5.0, 7.5, 3, 2)
    for number in range(4):
        half = records.Half(make_id(0, 1, number), "shop", (message,), policy=policy)
        order_key = "order-1" if number & 1 else None
        dedup_key = f"dedup-{number}" if number & 2 else None
        yield msgspec.structs.replace(half, attributes=records.Attributes(order_key, dedup_key))


def snapshots() -> Iterator[str]:
    """Yield the chunks of a snapshot."""
    ledger = Ledger(0, 60_000)
    for half in _transactions():
        for record in encoding.encode_half(half):
            placed = msgspec.structs.replace(record, offset=ledger.half_position, timestamp_ms=9)
            ledger.apply_half(placed)
    yield from _shown("snapshot", SnapshotCapture(ledger, "s", 0, records.LOG_VERSION).records())


def exchanged() -> Iterator[str]:
    """Yield requests and views as proxies exchange them, and views as JSON."""
    values = "shop", (records.Message("pay", b"k", b"v"),), ID, "dedup-1", "order-1", 1.0, 2.0
    request = service.PrepareRequest(*values, "pod-1", 3, 4.0)
    yield f"prepare {msgspec.msgpack.encode(request).hex()}"
    for half in _transactions():
        account = account_of(transaction_of(records.ParkedCopy(half, 7, 8, records.State.PENDING)))
        view = view_of(account, LogNames("half", "op"))
        yield f"view {msgspec.msgpack.encode(view).hex()}"
        yield f"view {encode_json(_view_body(view, bodies=False)).decode()}"


def _shown(name: str, made: Any) -> Iterator[str]:
    for record in made:
        key = record.key and record.key.hex()
        value = record.value and record.value.hex()
        yield f"{name} key={key} value={value} headers={[*record.headers]}"


def framed() -> Iterator[str]:
    """Yield each operation of a session with its fields in order, and a frame as bytes."""
    for union in (frames.FromProducer, frames.FromProxy):
        for kind in union.__args__:
            fields = msgspec.structs.fields(kind)
            shown = ", ".join(
                each.name if each.required else f"{each.name}={each.default!r}" for each in fields
            )
            yield _bare(f"{kind.__struct_config__.tag}({shown})")
    message = records.Message("orders", b"k", b"v", (("h", b"1"),))
    yield f"frame {frames.encode_frame([frames.Prepare(1, ID, (message,))]).hex()}"


def test_public_surface_is_unchanged() -> None:
    now, kept = [*lines()], SURFACE.read_text().splitlines()
    faults = [f"- {line}" for line in kept if line not in now]
    faults += [f"+ {line}" for line in now if line not in kept]
    do = (
        "name the change in CHANGELOG.md with a migration line, then renew surface.txt: `make docs`"
    )
    assert not faults, "\n".join([do, *faults])
    assert now == kept


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in lines()))
