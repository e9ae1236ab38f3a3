"""The frames of an SDK session: msgpack over one WebSocket at `/v1/session`.

A frame is an array of operations, each an array that begins with its name. New fields are only
added at the end, with defaults, so that old and new builds understand each other. Producers send
`FromProducer`, proxies send `FromProxy`; `call` numbers match answers to requests, each side
counting its own. The first frame of a producer is one `Hello`, answered by one `Welcome`, or by a
`Failure` with call 0 and the end of the session. A prepare, decision or request of which only the
call number can be decoded is answered by a `Failure`; any other undecodable frame ends the
session.
"""

from typing import Annotated, TypeAlias

import msgspec

from txbroker.core.records import CheckReason, Decision, Message, State

SESSION_VERSION = 1
CODE_HEADER = "Txb-Error"
"""The header with the error code in every HTTP answer to a failed call."""
FRAME_BYTES_MAX = 16 * 1024 * 1024
"""The largest frame; a larger one ends the session."""
FRAME_OPERATIONS_MAX = 256
"""The most operations that either side sends in a frame, so that the other one works on the first
while the rest is in flight. Fewer would make batches small, which costs more. More are accepted, as
earlier versions sent them."""


class _Operation(msgspec.Struct, frozen=True, array_like=True, tag_field="op"):
    pass


# --- from the producer -----------------------------------------------------------------------


class Hello(_Operation, frozen=True, tag="hello"):
    """Open a session.

    Attributes:
        instance: the name of this process in its group.
        checks: it has a check function. Without one it only answers for its own transactions.
    """

    version: int
    group: str
    instance: str
    checks: bool = True


class Prepare(_Operation, frozen=True, tag="prepare"):
    """Store a half message. `retry` is obsolete; proxies ignore it.

    With a `dedup_key` that an earlier transaction of the group holds nothing is stored; the answer
    is that transaction's status.
    """

    call: int
    id: str
    messages: tuple[Message, ...]
    order_key: str | None = None
    check_after_s: float | None = None
    check_interval_s: float | None = None
    retry: bool = False
    check_attempts_max: int | None = None
    check_timeout_s: float | None = None
    dedup_key: str | None = None


class Decide(_Operation, frozen=True, tag="decide"):
    """Commit or roll back; `messages` replace the prepared ones, `wait` waits for visibility."""

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
    """The answer to a `CheckQuestion`; `decision` None: this process is busy or draining, or, with
    `ask_again_s`, cannot find the answer out now. Other instances are asked first."""

    call: int
    decision: Decision | None
    ask_again_s: float | None = None
    messages: tuple[Message, ...] | None = None
    detail: str = ""


class Drain(_Operation, frozen=True, tag="drain"):
    """This process stops soon: send it no more checks."""


FromProducer: TypeAlias = Hello | Prepare | Decide | AskEarly | CheckAnswer | Drain


class UnreadableCall(msgspec.Struct, frozen=True):
    """A call of a producer of which only the number can be decoded, and why.

    It is refused alone; the others of its frame are not.
    """

    call: int
    why: str


Received: TypeAlias = FromProducer | UnreadableCall


class _CallHead(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of an operation; the fields that follow are skipped."""

    name: str
    call: int


_CALLS = frozenset(("prepare", "decide", "ask"))
_PARTS_MAX = 65_536
"""Operations of a frame that are decoded one by one, where a byte may take 72 bytes."""


# --- from the proxy --------------------------------------------------------------------------


class Welcome(_Operation, frozen=True, tag="welcome"):
    """The session is open.

    Attributes:
        now_ms: the proxy's clock; ids are made with it and the time passed since.
        partitions: how many half partitions there are.
        owners: the URL of each half partition's owner, "" without one.
        url: this proxy's own URL, as in `owners`.
        dedup_window_s: how long a prepare may be retried with its id.
        dedup_keys: the proxy knows `Prepare.dedup_key`; earlier versions ignore it.
    """

    version: int
    now_ms: int
    partitions: int
    owners: tuple[str, ...]
    url: str
    dedup_window_s: float
    transaction_bytes_max: int
    dedup_keys: bool = False


class Owners(_Operation, frozen=True, tag="owners"):
    """Half partitions moved: the new list, as in `Welcome`."""

    owners: tuple[str, ...]


class ClockUpdate(_Operation, frozen=True, tag="clock"):
    """The proxy's clock again, once a minute."""

    now_ms: int


class Status(_Operation, frozen=True, tag="standing"):
    """The answer to a call: the transaction's status."""

    call: int
    id: str
    state: State
    decision: Decision | None = None


class Failure(_Operation, frozen=True, tag="failure"):
    """A call failed; `code` as in the HTTP API, `details` its further fields."""

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
_decode_call = msgspec.msgpack.Decoder(_CallHead).decode


def decode_each(frame: bytes) -> list[Received]:
    """Return the operations of a frame that `decode_from_producer` cannot decode as a whole.

    Raises:
        msgspec.DecodeError, ValueError, RecursionError: the frame is no array, or too long a one;
            an operation is not a call with a number; more than `FRAME_OPERATIONS_MAX` are invalid.
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
