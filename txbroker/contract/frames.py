"""The frames of an SDK session: msgpack over one WebSocket at `/v1/session`.

A frame is an array of operations, each an array that begins with its name. New fields are only
ever added at the end, with defaults, so that old and new builds understand each other. Producers
send `FromProducer`, proxies send `FromProxy`; `call` numbers tie answers to questions, each side
counting its own. The first frame of a producer is one `Hello`, answered by one `Welcome` or by a
`Failure` with call 0 and the end of the session. A prepare, decision or question of which only its
call reads is answered by a `Failure` of that call; any other frame that does not read ends the
session.
"""

from typing import Annotated, TypeAlias

import msgspec

from txbroker.core.records import CheckReason, Decision, Message, State

SESSION_VERSION = 1
CODE_HEADER = "Txb-Error"
"""Names the error in every answer to a call over HTTP that was not carried out."""
FRAME_BYTES_MAX = 16 * 1024 * 1024
"""A frame holds many operations but never more than this; larger ones end the session."""
FRAME_OPERATIONS_MAX = 256
"""Neither side sends more in a frame, so that the other one works on the first while the rest is on
its way. Fewer would make batches small, which costs more. More are taken, as earlier versions sent
them."""


class _Operation(msgspec.Struct, frozen=True, array_like=True, tag_field="op"):
    pass


# --- from the producer -----------------------------------------------------------------------


class Hello(_Operation, frozen=True, tag="hello"):
    """Open a session for `group`; `instance` names this process among the group's.

    `checks`: it has a check function. Without one it only answers for what it prepared itself.
    """

    version: int
    group: str
    instance: str
    checks: bool = True


class Prepare(_Operation, frozen=True, tag="prepare"):
    """Store a half message. `retry` says that the same id may have been sent before; proxies do
    not read it any more."""

    call: int
    id: str
    messages: tuple[Message, ...]
    order_key: str | None = None
    check_after_s: float | None = None
    check_interval_s: float | None = None
    retry: bool = False


class Decide(_Operation, frozen=True, tag="decide"):
    """Commit or roll back. `messages` replace the prepared ones; `wait` answers when visible."""

    call: int
    id: str
    decision: Decision
    messages: tuple[Message, ...] | None = None
    reason: str = ""
    wait: bool = False


class AskEarly(_Operation, frozen=True, tag="ask"):
    """The local transaction ended in doubt: pull the next check forward."""

    call: int
    id: str
    reason: str = ""


class CheckAnswer(_Operation, frozen=True, tag="answer"):
    """Answer a `CheckQuestion`. `decision` None: this process could not take the question (busy or
    draining), nobody was asked."""

    call: int
    decision: Decision | None
    ask_again_s: float | None = None
    messages: tuple[Message, ...] | None = None
    detail: str = ""


class Drain(_Operation, frozen=True, tag="drain"):
    """This process goes away soon: send it no more checks."""


FromProducer: TypeAlias = Hello | Prepare | Decide | AskEarly | CheckAnswer | Drain


class UnreadableCall(msgspec.Struct, frozen=True):
    """A call of a producer of which no more reads than its number, and why: that call is refused,
    the others of its frame are not."""

    call: int
    why: str


Received: TypeAlias = FromProducer | UnreadableCall


class _Call(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of an operation; the fields that follow are skipped."""

    name: str
    call: int


_CALLS = frozenset(("prepare", "decide", "ask"))
_PARTS_MAX = 65_536
"""Operations of a frame that are looked at one by one: a byte of it may take 72 bytes then."""


# --- from the proxy --------------------------------------------------------------------------


class Welcome(_Operation, frozen=True, tag="welcome"):
    """The session is open.

    Attributes:
        now_ms: the proxy's clock; ids are made with it and the time passed since.
        partitions: how many half partitions there are.
        owners: the URL of each half partition's owner, "" where there is none now.
        url: this proxy's own URL, as it stands in `owners`.
        dedup_window_s: for how long a prepare may be repeated with its id.
    """

    version: int
    now_ms: int
    partitions: int
    owners: tuple[str, ...]
    url: str
    dedup_window_s: float
    transaction_bytes_max: int


class Owners(_Operation, frozen=True, tag="owners"):
    """Half partitions moved: the new list, as in `Welcome`."""

    owners: tuple[str, ...]


class ClockUpdate(_Operation, frozen=True, tag="clock"):
    """The proxy's clock again, once a minute."""

    now_ms: int


class Status(_Operation, frozen=True, tag="standing"):
    """A call's answer: where the transaction stands now."""

    call: int
    id: str
    state: State
    decision: Decision | None = None


class Failure(_Operation, frozen=True, tag="failure"):
    """A call was not carried out; `code` as in the HTTP API, `details` its further fields."""

    call: int
    code: str
    message: str
    details: dict[str, str] = {}


class CheckQuestion(_Operation, frozen=True, tag="check"):
    """Check-back: what became of this transaction? Answered by `CheckAnswer`."""

    call: int
    id: str
    group: str
    attempt: int
    attempts_max: int
    reason: CheckReason
    prepared_at_ms: int
    messages: tuple[Message, ...]


FromProxy: TypeAlias = Welcome | Owners | ClockUpdate | Status | Failure | CheckQuestion

encode_frame = msgspec.msgpack.Encoder().encode
decode_from_producer = msgspec.msgpack.Decoder(list[FromProducer]).decode
_Parts: TypeAlias = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_PARTS_MAX)]
_decode_parts = msgspec.msgpack.Decoder(_Parts).decode
_decode_operation = msgspec.msgpack.Decoder(FromProducer).decode
_decode_call = msgspec.msgpack.Decoder(_Call).decode


def decode_each(frame: bytes) -> list[Received]:
    """Return the operations of a frame that `decode_from_producer` does not read as a whole.

    Raises:
        msgspec.DecodeError, ValueError, RecursionError: the frame is no array, or too long a one;
            an operation is no call with a number; more than `FRAME_OPERATIONS_MAX` do not read.
    """
    found: list[Received] = []
    refused = 0
    for part in _decode_parts(frame):
        try:
            found.append(_decode_operation(part))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            head, refused = _decode_call(part), refused + 1
            if head.name not in _CALLS or refused > FRAME_OPERATIONS_MAX:
                raise
            found.append(UnreadableCall(head.call, f"the {head.name} does not read: {error}"[:200]))
    return found


decode_from_proxy = msgspec.msgpack.Decoder(list[FromProxy]).decode
