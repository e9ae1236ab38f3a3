"""Check-backs over HTTP: signatures and the question."""

import base64
import email.message
import json
from types import MappingProxyType
from typing import Any

import pytest
from multidict import CIMultiDict

from txbroker.checkers.answers import read_answer
from txbroker.checkers.base import Answered
from txbroker.contract.signing import TEST_HEADER, flaw, secret_key, sign
from txbroker.core.records import CheckReason, Message
from txbroker.errors import BadRequest, ConfigurationError
from txbroker.sdk import (
    Answer,
    BadSignature,
    CheckRequest,
    Commit,
    Decision,
    NotYet,
    check_answer,
    is_test_call,
    parse_check,
    verify_webhook,
)

BODY = b'{"decision"'
NOW = 1_700_000_000
ENCODED = "whsec_" + base64.b64encode(b"s3cret").decode()


def headers(secret: bytes = b"s3cret", **changes: str) -> dict[str, str]:
    given = {
        "Webhook-Id": "msg_1",
        "Webhook-Timestamp": str(NOW),
        "Webhook-Signature": sign(secret, "msg_1", NOW, BODY),
    }
    return {**given, **{name.replace("_", "-").title(): v for name, v in changes.items()}}


def test_standard_webhooks_example_passes() -> None:
    # From the test vectors of the Standard Webhooks libraries.
    key = secret_key("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signature = sign(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize("secret", ["s3cret", b"s3cret", ENCODED])
def test_valid_signature_passes(secret: str | bytes) -> None:
    assert passes(secret, headers(), NOW + 299)
    assert passes(secret, headers(), NOW - 299)
    several = f"v1,AAAA v2,x {sign(b's3cret', 'msg_1', NOW, BODY)}"
    assert passes(secret, headers(webhook_signature=several), NOW)
    assert not passes("another", headers(), NOW)


def passes(secret: str | bytes, given: dict[str, str], now: float) -> bool:
    try:
        verify_webhook(secret, given, BODY, now=now)
    except BadSignature:
        return False
    return True


@pytest.mark.parametrize(
    "changes",
    [
        {"webhook_id": "msg_2"},
        {"webhook_id": ""},
        {"webhook_id": "\ud800"},
        {"webhook_timestamp": str(NOW + 1)},
        {"webhook_timestamp": "soon"},
        {"webhook_timestamp": "²"},
        {"webhook_timestamp": "9" * 5000},
        {"webhook_signature": ""},
        {"webhook_signature": "v1,"},
        {"webhook_signature": "v1,ünsinn \ud800"},
        {"webhook_signature": sign(b"other", "msg_1", NOW, BODY)},
        {"webhook_signature": sign(b"s3cret", "msg_1", NOW, BODY)[3:]},
        {"webhook_signature": " ".join(["v1,x"] * 99 + [sign(b"s3cret", "msg_1", NOW, BODY)])},
    ],
)
def test_invalid_signature_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(BadSignature):
        verify_webhook("s3cret", headers(**changes), BODY, now=NOW)


def test_changed_body_time_or_secret_is_refused() -> None:
    for body, now in ((BODY + b" ", NOW), (BODY, NOW + 301), (BODY, NOW - 301)):
        with pytest.raises(BadSignature):
            verify_webhook("s3cret", headers(), body, now=now)
    with pytest.raises(BadSignature):
        verify_webhook("s3cret", {}, BODY, now=NOW)
    with pytest.raises(BadSignature):
        verify_webhook("s3cret", headers(), BODY)  # the clock of today
    for wrong in ("", "whsec_", "whsec_?"):
        with pytest.raises(ConfigurationError):
            verify_webhook(wrong, headers(), BODY, now=NOW)


QUESTION = {
    "id": "0" * 26,
    "group": "g",
    "attempt": 2,
    "attempts_max": 15,
    "reason": "asked",
    "prepared_at": "2023-11-14T22:13:20.500Z",
    "messages": [{"topic": "t", "key": "k", "value_base64": "/w==", "headers": [["h", None]]}],
}


@pytest.mark.parametrize("at", ["2023-11-14T22:13:20.500Z", 1_700_000_000.5])
def test_check_body_is_parsed(at: object) -> None:
    body = json.dumps({**QUESTION, "prepared_at": at, "of_tomorrow": 1}).encode()
    message = Message("t", b"k", b"\xff", (("h", None),))
    assert parse_check(body) == CheckRequest(
        "0" * 26, "g", 2, 15, CheckReason.ASKED, 1_700_000_000.5, (message,)
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        json.dumps({**QUESTION, "messages": [{"topic": 5}]}).encode(),
        json.dumps({**QUESTION, "attempt": "2"}).encode(),
        json.dumps({**QUESTION, "id": None}).encode(),
    ],
)
def test_malformed_check_body_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="not a check-back"):
        parse_check(body)


def test_headers_of_any_framework_pass() -> None:
    message = email.message.Message()  # http.server
    for name, value in headers().items():
        message[name] = value
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers().items()]
    for given in (
        CIMultiDict(headers()),
        MappingProxyType({name.upper(): value for name, value in headers().items()}),
        message,
        pairs,  # ASGI
    ):
        verify_webhook("s3cret", given, BODY, now=NOW)
    assert is_test_call([(TEST_HEADER.encode(), b"1")])
    assert not is_test_call({TEST_HEADER: "0"})


@pytest.mark.parametrize("wrong", [None, 5, "text", ["text"], {"webhook-id": 5}, [b"ab", b"c"]])
def test_what_is_no_headers_is_named(wrong: Any) -> None:
    with pytest.raises(TypeError, match="headers are a mapping of text, or pairs"):
        verify_webhook("s3cret", wrong, BODY, now=NOW)
    with pytest.raises(TypeError, match="body is the request's body as bytes, not str"):
        verify_webhook("s3cret", headers(), BODY.decode(), now=NOW)  # type: ignore[arg-type]


# --- the answer ------------------------------------------------------------------------------

ASKED = CheckRequest("an-id", "orders", 1, 15, CheckReason.DUE, 0.0, (Message("t"),))


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (Decision.COMMIT, Answered(Decision.COMMIT, detail="commit")),
        (Decision.ROLLBACK, Answered(Decision.ROLLBACK, detail="rollback")),
        (Decision.UNKNOWN, Answered(Decision.UNKNOWN, detail="unknown")),
        (NotYet(5), Answered(Decision.UNKNOWN, 5.0, detail="not yet, again in 5 s")),
        (Commit(), Answered(Decision.COMMIT, detail="commit")),
        (
            Commit([Message("t", b"k", b"\xff", (("h", None),))]),
            Answered(
                Decision.COMMIT, None, (Message("t", b"k", b"\xff", (("h", None),)),), "commit"
            ),
        ),
    ],
)
def test_answers_are_as_the_proxy_reads_them(answer: Answer, result: Answered) -> None:
    body, answered = check_answer(ASKED, answer)
    assert read_answer(body, ASKED.id) == result
    assert answered == {"content-type": "application/json"}


@pytest.mark.parametrize("secret", ["s3cret", ENCODED])
def test_answer_is_signed_with_the_calls_id(secret: str) -> None:
    body, answered = check_answer(ASKED, Decision.COMMIT, secret=secret, headers=headers(), now=NOW)
    assert answered["webhook-id"] == "msg_1"
    assert flaw(b"s3cret", answered, body, now_s=NOW) == ""
    with pytest.raises(BadRequest, match="webhook-id"):
        check_answer(ASKED, Decision.COMMIT, secret=secret)
    with pytest.raises(ConfigurationError):
        check_answer(ASKED, Decision.COMMIT, secret="", headers=headers())
    with pytest.raises(TypeError):
        check_answer(ASKED, "commit")  # type: ignore[arg-type]
