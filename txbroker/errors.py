"""What can go wrong, by who must act. A class's docstring is its message where none is given."""

import traceback
from typing import Any, ClassVar


class TxbrokerError(Exception):
    """Something went wrong in txbroker."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip().splitlines()[0])


class ConfigurationError(TxbrokerError):
    """The configuration contradicts itself or names something that does not exist."""


class InvariantBroken(TxbrokerError):
    """Something that must always hold does not: the partition is stopped, the others go on."""


class NewerRecord(InvariantBroken):
    """A newer txbroker wrote what this one does not understand: the partition is stopped."""


class KafkaUnavailable(TxbrokerError):
    """Kafka does not answer; what was asked may or may not have happened.

    Attributes:
        lasting: True where waiting does not help: Kafka answers, and refuses.
    """

    lasting = False


class RequestError(TxbrokerError):
    """A call was not carried out.

    Attributes:
        code: the word that names the error in HTTP answers and session frames.
        status: the HTTP status that goes with it.
        retryable: True where the same call, repeated as it is, can succeed.
        details: more fields of the answer, such as the transaction's `id` and `state`.
    """

    code: ClassVar[str] = "failed"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.details = {name: value for name, value in details.items() if value is not None}


# --- the caller must act ---------------------------------------------------------------------


class BadRequest(RequestError):
    """The request is malformed."""

    code, status = "bad_request", 400


class BadId(RequestError):
    """The transaction id is malformed, or names another partition than its order key."""

    code, status = "bad_id", 400


class Unauthorized(RequestError):
    """The call needs a valid credential: send a token as `authorization: Bearer TOKEN`."""

    code, status = "unauthorized", 401


class Forbidden(RequestError):
    """The call came from a foreign page or for an unknown host name."""

    code, status = "forbidden", 403


class CertificateRequired(RequestError):
    """The proxy takes calls only with a client certificate that it trusts."""

    code, status = "certificate_required", 403


class NotPermitted(RequestError):
    """The caller's principal does not allow this: role, producer group or topic."""

    code, status = "not_permitted", 403


class NotAPeer(RequestError):
    """The call is one that proxies make of one another, and the caller has not proved to be one."""

    code, status = "not_a_peer", 403


class AdminOnly(RequestError):
    """The call is one of operators', which this proxy takes at its admin address."""

    code, status = "admin_only", 403


class WrongGroup(RequestError):
    """The transaction belongs to another producer group."""

    code, status = "wrong_group", 403


class NotFound(RequestError):
    """There is no such transaction."""

    code, status = "not_found", 404


class UnknownGroup(RequestError):
    """The producer group is not registered."""

    code, status = "unknown_group", 404


class MethodNotAllowed(RequestError):
    """The path exists, but not for this method."""

    code, status = "method_not_allowed", 405


class TooSlow(RequestError):
    """The request did not arrive whole in time."""

    code, status, retryable = "too_slow", 408, True


class AlreadyDecided(RequestError):
    """The transaction was decided otherwise before; the first decision stands."""

    code, status = "already_decided", 409


class IdConflict(RequestError):
    """The id or dedup_key was used before, for other content."""

    code, status = "id_conflict", 409


class IdExpired(RequestError):
    """The id's time is too far from the log's: make a new id and prepare again."""

    code, status = "id_expired", 409


class NotPending(RequestError):
    """The transaction is not in a state in which this can be done."""

    code, status = "not_pending", 409


class TooOld(RequestError):
    """The log does not reach back to this transaction any more."""

    code, status = "too_old", 410


class BodyLost(RequestError):
    """The transaction's messages were deleted from txbroker's topics: nothing can be promoted.
    While it is undecided it can be read (200, with the cause `body_lost`), rolled back, and
    committed with its messages.
    """

    code, status = "body_lost", 410


class TooLarge(RequestError):
    """The message, transaction or request is larger than is taken."""

    code, status = "too_large", 413


class UnsupportedMediaType(RequestError):
    """What changes state needs `content-type: application/json`."""

    code, status = "unsupported_media_type", 415


class UnknownTopic(RequestError):
    """The target topic does not exist."""

    code, status = "unknown_topic", 422


class BadTarget(RequestError):
    """The target topic does not take this message: partition, timestamp or rights."""

    code, status = "bad_target", 422


class BadSchedule(RequestError):
    """The checks asked for do not fit the time that half messages are kept."""

    code, status = "bad_schedule", 422


# --- waiting helps ---------------------------------------------------------------------------


class Overloaded(RequestError):
    """A limit is reached: wait a little and send the same again."""

    code, status, retryable = "overloaded", 429, True


class OwnerUnavailable(RequestError):
    """The transaction's partition has no owner that answers: send the same again."""

    code, status, retryable = "owner_unavailable", 503, True


class KafkaDown(RequestError):
    """Kafka does not answer; whether this was done is unknown: send the same again."""

    code, status, retryable = "kafka_unavailable", 503, True


def request_errors() -> dict[str, type[RequestError]]:
    """Return every kind of RequestError by its code."""
    kinds: list[type[RequestError]] = [RequestError, *RequestError.__subclasses__()]
    return {kind.code: kind for kind in kinds}


# --- showing errors --------------------------------------------------------------------------

_FRAMES_SHOWN = 4
_TEXT_MAX = 300


def safe_repr(error: BaseException) -> str:
    """Return an error's type, and its text if txbroker or the operating system wrote it.

    Texts of other errors can quote messages and secrets.
    """
    kind = type(error).__name__
    safe = isinstance(error, TxbrokerError | OSError)
    return f"{kind}: {error}"[:_TEXT_MAX] if safe else kind


def user_message(error: BaseException) -> str:
    """Return a txbroker error's text, for any other error its `safe_repr`."""
    return str(error) if isinstance(error, TxbrokerError) else safe_repr(error)


def raised_at(error: BaseException) -> str:
    """Return the innermost lines of a traceback as `file:line > file:line`."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_SHOWN:]
    return " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames)
