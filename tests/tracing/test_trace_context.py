"""Reading and carrying the W3C trace context, and what it does not change."""

import pytest

from txbroker.core.records import Header, Message
from txbroker.core.transaction import fingerprint
from txbroker.tracing import TraceContext, carried_over, context_of, read_context, with_context

TRACE, STEP = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{STEP}-01"
CONTEXT = TraceContext(PARENT, "vendor=1")
OURS: tuple[Header, ...] = (("traceparent", PARENT.encode()), ("tracestate", b"vendor=1"))


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (PARENT, PARENT),
        (f" {PARENT}\t", PARENT),
        (f"00-{TRACE}-{STEP}-00", f"00-{TRACE}-{STEP}-00"),
        (f"cc-{TRACE}-{STEP}-01", PARENT),
        (f"cc-{TRACE}-{STEP}-01-what-comes-later", PARENT),
        (f"cc-{TRACE}-{STEP}-01.not-so", None),
        (f"00-{TRACE}-{STEP}-01-more", None),
        (f"ff-{TRACE}-{STEP}-01", None),
        (f"00-{'0' * 32}-{STEP}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (PARENT.upper(), None),
        (f"{PARENT}\r\nx-evil: 1", None),
        (f"{PARENT}\n", None),
        (PARENT[:-1], None),
        ("", None),
        ("é" * 55, None),
    ],
)
def test_a_traceparent_is_read_as_w3c_has_it(given: str, read: str | None) -> None:
    assert read_context(given) == (None if read is None else TraceContext(read))


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("vendor=1,other=2", "vendor=1,other=2"),
        ("a" * 512, "a" * 512),
        ("a" * 513, ""),
        ("a=1\r\nx-evil: 1", ""),
        ("a=\x00", ""),
        ("a=é", ""),
    ],
)
def test_a_tracestate_that_is_none_is_left_out(given: str, read: str) -> None:
    assert read_context(PARENT, given) == TraceContext(PARENT, read)


def test_the_parts_of_a_context() -> None:
    assert (CONTEXT.trace_id, CONTEXT.span_id) == (int(TRACE, 16), int(STEP, 16))
    assert CONTEXT.sampled
    assert not TraceContext(f"00-{TRACE}-{STEP}-02").sampled
    assert TraceContext(f"00-{TRACE}-{STEP}-03").sampled


def test_a_transaction_is_of_the_first_context_that_one_of_its_messages_has() -> None:
    second = (("traceparent", f"00-{TRACE}-{'1' * 16}-01".encode()),)
    messages = [
        Message("a"),
        Message("a", headers=(("traceparent", None),)),
        Message("b", headers=(("traceparent", b"\xff\xfe"), *OURS)),
        Message("c", headers=(("k", None), *OURS, *second)),
        Message("d", headers=second),
    ]
    assert context_of(messages) == CONTEXT
    assert context_of(messages[:3]) is None
    assert context_of([]) is None


def test_context_follows_the_messages_headers() -> None:
    own = Message("a", headers=(("traceparent", b"whatever it is"),))
    plain = Message("b", key=b"k", headers=(("h", b"1"), ("h", None)))
    assert with_context([own, plain], CONTEXT) == (
        own,
        Message("b", key=b"k", headers=(("h", b"1"), ("h", None), *OURS)),
    )
    assert with_context([plain], TraceContext(PARENT))[0].headers[2:] == OURS[:1]


def test_final_messages_get_those_of_what_they_replace() -> None:
    prepared = [
        Message("a", headers=(("h", b"1"), *OURS)),
        Message("b"),
        Message("c", headers=OURS),
    ]
    own = (("traceparent", b"mine"),)
    final = [Message("a", value=b"new"), Message("b"), Message("c", headers=own)]
    assert carried_over(prepared, final) == (
        Message("a", value=b"new", headers=OURS),
        Message("b"),
        Message("c", headers=own),
    )


def test_another_trace_is_no_other_content_but_any_other_header_is() -> None:
    plain = [Message("a", b"k", b"v", (("h", b"1"),))]
    traced = with_context(plain, CONTEXT)
    again = with_context(plain, TraceContext(f"00-{'1' * 32}-{STEP}-00"))
    assert len({fingerprint(each, "g") for each in (plain, traced, again)}) == 1
    others = [
        [Message("a", b"k", b"v", (("h", b"2"),))],
        [Message("a", b"k", b"v", (("h", b"1"), ("h", b"1")))],
        [Message("a", b"k", b"v", (("h", b"1"), ("Traceparent", b"x")))],
        [Message("a", b"k", b"v", (("h", b"1"), ("traceparent2", b"x")))],
        [Message("a", b"k", b"v")],
    ]
    assert len({fingerprint(each, "g") for each in (plain, *others)}) == 6
