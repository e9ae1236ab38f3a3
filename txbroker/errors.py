"""What can go wrong, by who must act. A class's docstring is its message where none is given."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


class TxbrokerError(Exception):
    """Something went wrong in txbroker."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or " ".join((type(self).__doc__ or "").split("\n\n")[0].split()))


class ConfigurationError(TxbrokerError):
    """The configuration contradicts itself or names something that does not exist."""


class MissingExtra(ConfigurationError, ImportError):
    """A library is missing; the message names the extra that installs it."""


class InvariantBroken(TxbrokerError):
    """Something that must always hold does not: the partition is stopped, the others go on."""


class NewerRecord(InvariantBroken):
    """A newer txbroker wrote what this one does not understand: the partition is stopped."""


class KafkaUnavailable(TxbrokerError):
    """Kafka does not answer; the operation may or may not have happened.

    Attributes:
        lasting: True where waiting does not help: Kafka answers, and refuses.
    """

    lasting = False


class RequestError(TxbrokerError):
    """A call failed: see the message, or the proxy's log.

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
    """The request is malformed: correct it and send it again."""

    code, status = "bad_request", 400


class BadId(RequestError):
    """The transaction id is malformed, or not of its order key's partition: use a new one."""

    code, status = "bad_id", 400


class Unauthorized(RequestError):
    """The call needs a valid credential: send a token as `authorization: Bearer TOKEN`."""

    code, status = "unauthorized", 401


class Forbidden(RequestError):
    """The call is cross-site or for an unknown host name: add the name to `allowed_hosts`."""

    code, status = "forbidden", 403


class CertificateRequired(RequestError):
    """The proxy requires a client certificate that it trusts: connect with one."""

    code, status = "certificate_required", 403


class NotPermitted(RequestError):
    """The caller's role, group or topic does not permit this: have an operator grant it."""

    code, status = "not_permitted", 403


class NotAPeer(RequestError):
    """Only proxies may make this call: set `peer_secret_file` or `peer_names` on every proxy."""

    code, status = "not_a_peer", 403


class AdminOnly(RequestError):
    """This is an operator's call: send it to the proxy's admin address."""

    code, status = "admin_only", 403


class WrongGroup(RequestError):
    """The transaction belongs to another producer group: decide it as that group."""

    code, status = "wrong_group", 403


class NotFound(RequestError):
    """There is no such transaction: check the id."""

    code, status = "not_found", 404


class UnknownGroup(RequestError):
    """The producer group is not registered: register it."""

    code, status = "unknown_group", 404


class MethodNotAllowed(RequestError):
    """The path exists, but not for this method: use one of the `Allow` header."""

    code, status = "method_not_allowed", 405


class TooSlow(RequestError):
    """The request did not arrive in time: send it again."""

    code, status, retryable = "too_slow", 408, True


class AlreadyDecided(RequestError):
    """The transaction was decided otherwise before; the first decision stands: do not retry."""

    code, status = "already_decided", 409


class IdConflict(RequestError):
    """The id or dedup_key was used before, for other content: use a new one."""

    code, status = "id_conflict", 409


class IdExpired(RequestError):
    """The id's time is too far from the log's: make a new id and prepare again."""

    code, status = "id_expired", 409


class NotPending(RequestError):
    """The transaction's state does not allow this: read its state first."""

    code, status = "not_pending", 409


class TooOld(RequestError):
    """The log no longer reaches back to this transaction: do not retry."""

    code, status = "too_old", 410


class BodyLost(RequestError):
    """The transaction's messages were deleted: commit with its messages, or roll it back.
    While it is undecided it can also be read (200, with the cause `body_lost`).
    """

    code, status = "body_lost", 410


class TooLarge(RequestError):
    """The message, transaction or request exceeds a limit: send a smaller one."""

    code, status = "too_large", 413


class UnsupportedMediaType(RequestError):
    """A call that changes state needs `content-type: application/json`: send JSON with it."""

    code, status = "unsupported_media_type", 415


class UnknownTopic(RequestError):
    """The target topic does not exist: create it, or correct the name."""

    code, status = "unknown_topic", 422


class BadTarget(RequestError):
    """The target topic refuses this message: correct partition or timestamp, or grant rights."""

    code, status = "bad_target", 422


class BadSchedule(RequestError):
    """The requested checks outlast the retention of half messages: shorten them."""

    code, status = "bad_schedule", 422


# --- waiting helps ---------------------------------------------------------------------------


class Overloaded(RequestError):
    """A limit is reached: retry later."""

    code, status, retryable = "overloaded", 429, True


class OwnerUnavailable(RequestError):
    """The transaction's partition has no owner that answers: retry."""

    code, status, retryable = "owner_unavailable", 503, True


class KafkaDown(RequestError):
    """Kafka does not answer; whether the call was done is unknown: retry the same call."""

    code, status, retryable = "kafka_unavailable", 503, True


class HttpVersionNotSupported(RequestError):
    """The proxy speaks HTTP/1.1 and HTTP/1.0: send the request in one of them."""

    code, status = "http_version", 505


def request_errors() -> dict[str, type[RequestError]]:
    """Return every kind of RequestError by its code."""
    kinds: list[type[RequestError]] = [RequestError, *RequestError.__subclasses__()]
    return {kind.code: kind for kind in kinds}


# --- missing libraries -----------------------------------------------------------------------

_EXTRAS = {
    "click": "cli",
    "rich": "cli",
    "pandas": "spark",
    "pyarrow": "spark",
    "pyspark": "spark",
    "sqlite_utils": "spark",
}
"""The extras of libraries that the command imports, other than `proxy`."""


def missing_extra(module: str, extra: str = "") -> MissingExtra:
    """Return the error for a module that is not installed; see `needs`."""
    extra = extra or _EXTRAS.get(module, "proxy")
    return MissingExtra(
        f"the Python package {module} is missing, run: pip install 'txbroker[{extra}]'"
    )


@contextmanager
def needs(extra: str = "") -> Iterator[None]:
    """Name `extra` if a library is missing that is imported here; by default the command's extra
    that has this library.

    Raises:
        MissingExtra: a library is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("txbroker"):
            raise
        raise missing_extra(error.name.partition(".")[0], extra) from None
