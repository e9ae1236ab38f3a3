"""Calls between proxies: exact answers, typed errors, never a false ack."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.kit.http_answers import answering, response
from tests.kit.http_api import Api, running_api
from tests.kit.secret_files import secret_file
from tests.kit.until import until
from txbroker.checkers.leases import (
    CONTENT_TYPE,
    PEER_HEADER,
    PROXY_HEADER,
    PeerIdentity,
    PeerSessions,
)
from txbroker.contract.service import DecideRequest, ListRequest, PrepareRequest, SearchRequest
from txbroker.core.records import Decision, Message, Source, State
from txbroker.core.routing import make_id
from txbroker.errors import (
    KafkaDown,
    KafkaUnavailable,
    OwnerUnavailable,
    RequestError,
    TooLarge,
    request_errors,
)
from txbroker.proxy.cluster.forwarding import PREFIX, ById
from txbroker.proxy.cluster.peers import Peers, Unsent
from txbroker.proxy.cluster.watchers import SILENT_LOOKS, PeerWatcher

ME = "http://proxy-b:8470"
MESSAGE = Message("payments", b"\x00k", None, (("h", b"\xff"), ("h", None)), 3, 1_700_000_000_000)
PREPARE = PrepareRequest("orders", (MESSAGE,), check_after_s=9.5, instance="pod-1")
ID = make_id(0, 1_700_000_000_000, 7)


TOKEN = "the-token-of-producers"
SECRET = "the-secret-of-proxies"


def proved(folder: Path) -> dict[str, Path]:
    """Return the settings of a proxy that asks for a token, and of peers for their secret."""
    files = {"token_file": TOKEN, "peer_secret_file": SECRET}
    return {name: secret_file(folder / name, secret) for name, secret in files.items()}


@asynccontextmanager
async def peers(
    secret: Callable[[], str | None] = lambda: None, **options: Any
) -> AsyncIterator[Peers]:
    made = Peers(PeerIdentity(lambda: ME, secret), **options)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def peer() -> AsyncIterator[Peers]:
    async with peers() as made:
        yield made


async def post(
    api: Api, call: str, body: object, *, leave_out: str = "", **changes: str
) -> tuple[int, Any]:
    """Send a raw call; return status and answer, decoded if it is msgpack."""
    headers = {"content-type": CONTENT_TYPE, PROXY_HEADER: ME}
    headers.update({name.replace("_", "-"): value for name, value in changes.items()})
    headers.pop(leave_out, None)
    raw = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    async with api.client.post(
        f"{api.url}{PREFIX}/{call}", data=raw, headers=headers, skip_auto_headers=["content-type"]
    ) as answer:
        content = await answer.read()
        if answer.content_type == CONTENT_TYPE:
            return answer.status, msgspec.msgpack.decode(content)
        return answer.status, msgspec.json.decode(content)["error"]


# --- there and back --------------------------------------------------------------------------


async def test_forwarded_calls_arrive_unchanged(api: Api, peer: Peers) -> None:
    stored = await peer.prepare(api.url, PREPARE)
    assert (stored.state, stored.created) == (State.PENDING, True)
    again = await peer.prepare(api.url, msgspec.structs.replace(PREPARE, id=stored.id))
    assert (again.id, again.created) == (stored.id, False)
    decide = DecideRequest(
        stored.id, Decision.COMMIT, "orders", (MESSAGE,), "why", Source.OPERATOR, "http me", True
    )
    assert (await peer.decide(api.url, decide)).state is State.PROMOTED
    api.service.park(stored.id)
    await peer.revive(api.url, stored.id, by="me", reason="because")
    await peer.check(api.url, stored.id, by="you", reason="now", group="")
    view = await peer.find(api.url, ById(stored.id, bodies=True, brief=True))
    assert view == api.service.views[stored.id]
    assert view.messages[0].message == MESSAGE
    request = ListRequest(State.PENDING, "orders", "payments", 1.5, 10, None, (0, 2))
    page = await peer.list(api.url, request)
    assert page.transactions == (view,)
    search = SearchRequest("000", "orders", "payments", b"\xff", header=("a", b"b"), from_ms=1)
    assert (await peer.search(api.url, search)).transactions == (view,)
    assert api.service.requests[0] == PREPARE
    assert api.service.requests[2:] == [
        decide,
        ("revive", stored.id, "me", "because"),
        ("check", stored.id, "you", "now"),
        ("find", stored.id, True, True),
        request,
        search,
    ]


@pytest.mark.parametrize("kind", request_errors().values(), ids=lambda kind: str(kind.code))
async def test_errors_keep_their_type_between_proxies(
    api: Api, peer: Peers, kind: type[RequestError]
) -> None:
    api.service.failure = kind("in words", id=ID, state=State.PARKED, retry_after_s=3)
    with pytest.raises(RequestError) as error:
        await peer.find(api.url, ById(ID))
    assert type(error.value) is kind
    assert str(error.value) == "in words"
    assert error.value.details == {"id": ID, "state": "parked", "retry_after_s": 3}


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        (KafkaUnavailable("no broker"), KafkaDown, "no broker"),
        (ValueError("a detail"), RequestError, r"(?!.*detail)"),
    ],
    ids=["Kafka fails", "a fault, which is not disclosed"],
)
async def test_failure_of_other_proxy_is_reported(
    api: Api, peer: Peers, failure: Exception, kind: type[RequestError], words: str
) -> None:
    api.service.failure = failure
    with pytest.raises(RequestError, match=f"^{words}") as error:
        await peer.find(api.url, ById(ID))
    assert type(error.value) is kind


async def test_error_of_newer_build_is_a_failure(peer: Peers) -> None:
    failure = msgspec.msgpack.encode({"code": "brand_new", "message": "new", "more": 1})
    async with server(answering(packed(failure, "409 Conflict"), then_close=True)) as url:
        with pytest.raises(RequestError, match="new") as error:
            await peer.find(url, ById(ID))
    assert error.value.code == "failed"


# --- builds of different age -----------------------------------------------------------------


async def test_unknown_fields_are_ignored_and_missing_ones_defaulted(api: Api) -> None:
    body = {"group": "orders", "messages": [{"topic": "payments", "colour": 1}], "colour": "red"}
    status, answer = await post(api, "prepare", body)
    assert (status, answer["state"]) == (200, "pending")
    assert api.service.requests == [PrepareRequest("orders", (Message("payments"),))]
    status, _ = await post(api, "decide", {"id": answer["id"], "decision": "rollback", "new": [1]})
    assert status == 200
    assert api.service.requests[-1] == DecideRequest(answer["id"], Decision.ROLLBACK)
    status, found = await post(api, "find", {"id": answer["id"]})
    assert (status, found["id"]) == (200, answer["id"])


# --- who may call ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["prepare", "decide", "check", "revive", "find", "list", "leases"])
async def test_only_proxies_may_call(call: str, tmp_path: Path) -> None:
    right = {PEER_HEADER: SECRET}
    async with running_api(**proved(tmp_path)) as api:
        refusals: list[tuple[int, dict[str, str]]] = [
            (403, {}),
            (403, {"authorization": f"Bearer {TOKEN}"}),
            (403, {PEER_HEADER: TOKEN}),
            (403, {PEER_HEADER: ""}),
            (403, {**right, "origin": api.url}),
            (415, {**right, "content_type": "application/json"}),
        ]
        for expected, headers in refusals:
            assert (await post(api, call, {}, **headers))[0] == expected
        status, error = await post(api, call, {}, leave_out=PROXY_HEADER, **right)
        assert (status, PROXY_HEADER in error["message"]) == (400, True)
        assert api.service.requests == []
        assert (await post(api, call, b"\xc1", **right))[0] == 400
        assert api.service.requests == []


async def test_sessions_are_only_listed_for_proxies(tmp_path: Path) -> None:
    async with running_api(**proved(tmp_path)) as api:
        url = f"{api.url}{PREFIX}/sessions"
        right = {PEER_HEADER: SECRET, PROXY_HEADER: ME}
        for headers, expected in (
            ({}, 403),
            ({"authorization": f"Bearer {TOKEN}", PROXY_HEADER: ME}, 403),
            ({**right, "origin": api.url}, 403),
            ({PEER_HEADER: SECRET}, 400),
            (right, 200),
        ):
            async with api.client.get(url, headers=headers) as answer:
                assert answer.status == expected


async def test_proxy_of_another_group_is_refused(
    api: Api, peer: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        api.service, "knows", lambda url: url == "http://proxy-c:8470", raising=False
    )
    with pytest.raises(OwnerUnavailable, match="not known as one of this group"):
        await peer.prepare(api.url, PREPARE)
    monkeypatch.setattr(api.service, "knows", lambda url: url == ME)
    assert (await peer.prepare(api.url, PREPARE)).created


async def test_calls_have_the_current_peer_secret_and_no_token() -> None:
    seen: list[str | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert "authorization:" not in head
        lines = [line for line in head.splitlines() if line.startswith(PEER_HEADER)]
        seen.append(lines[0].partition(": ")[2] if lines else None)

    secrets: list[str | None] = [None, "one", "two"]
    async with server(answer) as url, peers(lambda: secrets[len(seen)]) as made:
        for _ in secrets:
            with pytest.raises(OwnerUnavailable):
                await made.find(url, ById(ID))
    assert seen == [None, "one", "two"]


async def test_wrong_peer_secret_is_not_the_callers_error(tmp_path: Path) -> None:
    async with running_api(**proved(tmp_path)) as api, peers(lambda: "another") as made:
        with pytest.raises(OwnerUnavailable, match="403 not_a_peer"):
            await made.find(api.url, ById(ID))


# --- bounds ----------------------------------------------------------------------------------


async def test_limits_hold_for_forwarded_calls() -> None:
    async with running_api(request_bytes_max=5000, message_bytes_max=1000) as api:
        async with peers() as made:
            for size in (2000, 20_000):
                large = PrepareRequest("orders", (Message("payments", value=bytes(size)),))
                with pytest.raises(TooLarge):
                    await made.prepare(api.url, large)
        assert api.service.requests == []


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("prepare", {"group": "", "messages": [{"topic": "t"}]}),
        ("prepare", {"group": "g", "messages": []}),
        ("prepare", {"group": "g", "messages": [{"topic": "t"}], "id": "x"}),
        ("prepare", {"messages": 7}),
        ("decide", {"id": "x", "decision": "commit"}),
        ("decide", {"id": ID, "decision": "maybe"}),
        ("check", {"id": "x"}),
        ("revive", {"id": ID, "reason": "x" * 5000}),
        ("find", {"id": "../../x"}),
        ("list", {}),
        ("list", {"partitions": [0], "limit": 0}),
        ("list", {"partitions": [0], "limit": 10**9}),
        ("list", {"partitions": [0] * 1_000_000}),
        ("list", {"partitions": [0], "older_than_s": float("nan")}),
        ("list", {"partitions": [0], "older_than_s": float("inf")}),
        ("decide", {"id": ID, "decision": "unknown"}),
        ("decide", {"id": ID, "decision": "commit", "by": "x" * 5000}),
        ("check", {"id": ID, "by": "x" * 5000}),
    ],
)
async def test_garbage_between_proxies_is_refused(api: Api, call: str, body: object) -> None:
    status, error = await post(api, call, body)
    assert (status, error["code"][:4]) == (400, "bad_")
    assert api.service.requests == []


# --- owners that do not answer ---------------------------------------------------------------

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[str]:
    """Serve connections by hand; each ends when `talk` does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


def packed(body: bytes, status: str = "200 OK") -> bytes:
    return response(body, status, f"content-type: {CONTENT_TYPE}\r\n")


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_invalid_proxy_name_counts_as_unreachable(peer: Peers, host: str) -> None:
    with pytest.raises(OwnerUnavailable):
        await peer.sessions(f"http://{host}:8470")


async def test_refused_connection_is_known_as_not_sent(peer: Peers) -> None:
    async with server(answering(b"", then_close=True)) as url:
        pass
    with pytest.raises(Unsent) as error:
        await peer.prepare(url, msgspec.structs.replace(PREPARE, id=ID))
    assert (error.value.code, error.value.details) == ("owner_unavailable", {"id": ID})


ODD_ANSWERS = {
    "none": b"",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-ty",
    "half a body": packed(b"\x83" * 50)[:-20],
    "no http": b"\x00\x01\x02\r\n\r\n",
    "an ack in json": response(
        b'{"id": "x", "state": "committed"}', extra="content-type: application/json\r\n"
    ),
    "an ack of nothing": packed(b""),
    "an ack without a state": packed(msgspec.msgpack.encode({"id": ID})),
    "an unknown state": packed(msgspec.msgpack.encode({"id": ID, "state": "levitating"})),
    "elsewhere": b"HTTP/1.1 307 Away\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    "an error that does not read": packed(b"\xc1", "500 Oh"),
}


@pytest.mark.rule(1)
@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS.keys())
async def test_malformed_answer_is_never_an_ack(peer: Peers, answer: bytes) -> None:
    async with server(answering(answer, then_close=True)) as url:
        with pytest.raises(OwnerUnavailable) as error:
            await peer.decide(url, DecideRequest(ID, Decision.COMMIT))
    assert not isinstance(error.value, Unsent)
    assert error.value.details == {"id": ID}


@pytest.mark.parametrize(
    ("status", "remedy"), [("404 Not Found", "another version"), ("403 No", "peer_secret_file")]
)
async def test_refused_call_names_the_next_step(peer: Peers, status: str, remedy: str) -> None:
    async with server(answering(response(b"", status), then_close=True)) as url:
        with pytest.raises(OwnerUnavailable, match=remedy):
            await peer.search(url, SearchRequest(id="0"))


async def test_a_call_is_sent_once(peer: Peers) -> None:
    calls: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(await reader.readuntil(b"\r\n"))

    async with server(talk) as url:
        with pytest.raises(OwnerUnavailable):
            await peer.decide(url, DecideRequest(ID, Decision.COMMIT))
    assert calls == [b"POST /internal/v1/decide HTTP/1.1\r\n"]


async def test_answer_of_other_proxy_times_out(api: Api) -> None:
    api.service.gate = asyncio.Event()
    async with peers(call_s=0.1, wait_s=60.0) as made:
        with pytest.raises(OwnerUnavailable) as error:
            await made.prepare(api.url, msgspec.structs.replace(PREPARE, id=ID))
        assert error.value.details == {"id": ID}
        waits = DecideRequest(ID, Decision.COMMIT, wait=True)
        waiting = asyncio.ensure_future(made.decide(api.url, waits))
        with pytest.raises(OwnerUnavailable):
            await made.find(api.url, ById(ID))
        assert not waiting.done()
        api.service.gate.set()
        assert (await waiting).state is State.PROMOTED


async def test_calls_to_a_removed_proxy_end(api: Api, peer: Peers) -> None:
    api.service.gate = asyncio.Event()
    waits = DecideRequest(ID, Decision.COMMIT, wait=True)
    waiting = asyncio.ensure_future(peer.decide(api.url, waits))
    await until(lambda: api.service.requests)
    peer.only([api.url])
    await asyncio.sleep(0)
    assert not waiting.done()
    peer.only(["http://proxy-c:8470"])
    with pytest.raises(OwnerUnavailable):
        await waiting
    api.service.gate.set()


# --- proxies that do not answer ----------------------------------------------------------------


async def test_proxy_with_wrong_peer_secret_is_logged_once(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "secret", "the secret there")
    secret = "another"
    async with running_api(peer_secret_file=file) as api:
        others = [api.url]
        peers = Peers(PeerIdentity(lambda: ME, lambda: secret))
        roster = PeerWatcher(peers, PeerSessions(PeerIdentity(lambda: ME)), lambda: others)
        with capture_logs() as logs:
            for _ in range(SILENT_LOOKS - 1):
                await roster._look(api.url)
            assert logs == []
            for _ in range(SILENT_LOOKS):
                await roster._look(api.url)
            assert [line["event"] for line in logs] == ["proxy does not answer"]
            assert "it answered 403 not_a_peer" in logs[0]["why"]
            secret = "the secret there"
            for _ in range(2):
                await roster._look(api.url)
            assert [line["event"] for line in logs[1:]] == ["proxy answers again"]
        await peers.close()


async def test_removed_proxy_is_not_missed() -> None:
    others = ["http://127.0.0.1:1"]
    peers = Peers(PeerIdentity(lambda: ME))
    roster = PeerWatcher(peers, PeerSessions(PeerIdentity(lambda: ME)), lambda: others)
    with capture_logs() as logs:
        await roster._look("http://127.0.0.1:1")
        others.clear()
        roster.changed()
        for _ in range(SILENT_LOOKS):
            await roster._look("http://127.0.0.1:1")
    assert logs == []
    assert not roster._silent
    await peers.close()
