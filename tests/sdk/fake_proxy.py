"""A proxy that speaks session frames over real sockets and keeps its transactions in memory.

Why a second fake beside the broker of `txbroker.testing`: these tests need a proxy that breaks the
protocol (drops a connection before or after an operation, hangs, sends invalid frames, holds a
stale view of the owners), and clusters of such proxies. The in-memory broker runs the real proxy,
which cannot do that, and has no other proxies.

Several fakes of one `FakeCluster` share the transactions and own half partitions. A test sets
`rules`: the first rule that returns an action for an operation decides. The fake makes no checks,
expires no ids and promotes nothing; tests do.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import WSMsgType, web

from txbroker.contract.frames import (
    AskEarly,
    CheckAnswer,
    CheckQuestion,
    Decide,
    Drain,
    Failure,
    FromProducer,
    Hello,
    Owners,
    Prepare,
    Status,
    Welcome,
    decode_from_producer,
    encode_frame,
)
from txbroker.core.records import CheckReason, Decision, Message, State
from txbroker.core.routing import parse_id
from txbroker.sdk import Answer, CheckRequest, Limits

QUICK = Limits(
    retry_s=5.0,
    connect_timeout_s=1.0,
    answer_timeout_s=0.4,
    backoff_first_s=0.002,
    backoff_max_s=0.02,
)
"""Limits with short times."""


@dataclass(frozen=True)
class Refuse:
    """Answer with a failure; nothing is done."""

    code: str
    message: str = "refused by the test"


@dataclass(frozen=True)
class DropBefore:
    """Cut the connection; the operation is not carried out."""


@dataclass(frozen=True)
class DropAfter:
    """Carry the operation out, cut the connection instead of answering."""


@dataclass(frozen=True)
class Ignore:
    """Carry the operation out where `done`, never answer it."""

    done: bool = True


@dataclass(frozen=True)
class AnswerAfter:
    """Carry the operation out at once, answer when `gate` is set."""

    gate: asyncio.Event


@dataclass(frozen=True)
class SendRaw:
    """Send these bytes instead of an answer."""

    frame: bytes


class GatedCheck:
    """A check function that answers when `go` is set."""

    def __init__(self, answer: Answer = Decision.COMMIT) -> None:
        self._answer = answer
        self.asked: list[CheckRequest] = []
        self.go = asyncio.Event()

    async def __call__(self, request: CheckRequest) -> Answer:
        self.asked.append(request)
        await self.go.wait()
        return self._answer

    async def asked_times(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.asked) < count:
                await asyncio.sleep(0)


Action = Refuse | DropBefore | DropAfter | Ignore | AnswerAfter | SendRaw
Rule = Callable[[FromProducer], Action | None]


@dataclass
class Stored:
    prepare: Prepare
    group: str
    decision: Decision | None = None
    state: State = State.PENDING
    final: tuple[Message, ...] | None = None
    decisions: list[Decision] = field(default_factory=list)
    asked_early: list[str] = field(default_factory=list)

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.final or self.prepare.messages


class FakeSession:
    def __init__(self, proxy: "FakeProxy", socket: web.WebSocketResponse) -> None:
        self.proxy = proxy
        self.socket = socket
        self.hello: Hello | None = None
        self.drained = False
        self.frames: list[list[FromProducer]] = []
        self.answers: dict[int, asyncio.Future[CheckAnswer]] = {}

    async def send(self, *operations: object) -> None:
        if not self.socket.closed:
            await self.socket.send_bytes(encode_frame(list(operations)))

    async def drop(self) -> None:
        transport = self.socket._req.transport if self.socket._req else None
        if transport is not None:
            transport.abort()

    async def check(
        self, transaction_id: str, *, attempt: int = 1, messages: tuple[Message, ...] | None = None
    ) -> CheckAnswer:
        stored = self.proxy.cluster.transactions.get(transaction_id)
        if messages is None:
            messages = stored.messages if stored else (Message("t", value=b"v"),)
        number = self.proxy.cluster.next_number()
        answer: asyncio.Future[CheckAnswer] = asyncio.get_running_loop().create_future()
        self.answers[number] = answer
        group = self.hello.group if self.hello else ""
        question = CheckQuestion(
            number, transaction_id, group, attempt, 15, CheckReason.DUE, 1_700_000_000_500, messages
        )
        await self.send(question)
        return await asyncio.wait_for(answer, 10)


class FakeCluster:
    """What proxies share: the transactions, and who owns which half partition."""

    def __init__(self, partitions: int = 4) -> None:
        self.partitions = partitions
        self.transactions: dict[str, Stored] = {}
        self.prepares: list[Prepare] = []
        self.proxies: list[FakeProxy] = []
        self.owners: list[str] = [""] * partitions
        self.changed = asyncio.Event()
        self._number = 0

    def next_number(self) -> int:
        self._number += 1
        return self._number

    async def proxy(self, **options: object) -> "FakeProxy":
        """Start one more proxy; the first one owns everything."""
        proxy = FakeProxy(self, **options)  # type: ignore[arg-type]
        await proxy.start()
        self.proxies.append(proxy)
        if len(self.proxies) == 1:
            self.owners = [proxy.url] * self.partitions
        return proxy

    async def own(self, *owners: "FakeProxy | None", notify: bool = True) -> None:
        """Give the partitions new owners, round robin, and notify the sessions."""
        urls = [proxy.url if proxy else "" for proxy in owners]
        self.owners = [urls[p % len(urls)] for p in range(self.partitions)]
        if notify:
            for proxy in self.proxies:
                for session in list(proxy.sessions) if proxy.awake.is_set() else ():
                    with contextlib.suppress(ConnectionError):
                        await session.send(Owners(tuple(self.owners)))

    async def until(self, condition: Callable[[], object], timeout_s: float = 10) -> None:
        """Wait until a condition on what the proxies saw holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                changed = self.changed
                await changed.wait()

    def notify(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def close(self) -> None:
        for proxy in self.proxies:
            await proxy.stop()

    # --- what operations do ---------------------------------------------------------------

    def prepare(self, operation: Prepare, group: str) -> Status | Failure:
        stored = self.transactions.get(operation.id)
        if stored is None:
            stored = self.transactions[operation.id] = Stored(operation, group)
        elif stored.prepare.messages != operation.messages:
            return Failure(operation.call, "id_conflict", "other content")
        return Status(operation.call, operation.id, stored.state, stored.decision)

    def decide(self, operation: Decide, group: str) -> Status | Failure:
        stored = self.transactions.get(operation.id)
        if stored is None:
            return Failure(operation.call, "not_found", "no such transaction")
        if stored.group != group:
            return Failure(operation.call, "wrong_group", "another group's")
        stored.decisions.append(operation.decision)
        if stored.decision is None:
            stored.decision = operation.decision
            committed = operation.decision is Decision.COMMIT
            stored.state = State.COMMITTED if committed else State.ROLLED_BACK
            stored.final = operation.messages
        elif stored.decision is not operation.decision:
            return Failure(operation.call, "already_decided", f"it is {stored.decision}")
        if operation.wait:
            stored.state = State.PROMOTED
        return Status(operation.call, operation.id, stored.state, stored.decision)


class FakeProxy:
    """One proxy; it keeps its port when it is stopped and started."""

    def __init__(
        self,
        cluster: FakeCluster,
        *,
        token: str | None = None,
        advertise: str | None = None,
        dedup_window_s: float = 120.0,
        clock_ahead_ms: int = 0,
        greeting: bytes | None = None,
    ) -> None:
        self.cluster = cluster
        self.token = token
        self.advertise = advertise
        self.dedup_window_s = dedup_window_s
        self.clock_ahead_ms = clock_ahead_ms
        self.greeting = greeting
        self.sessions: list[FakeSession] = []
        self.opened = 0
        self.rules: list[Rule] = []
        self.awake = asyncio.Event()
        """Cleared: the process is stopped, as by SIGSTOP: connections stay, nothing is done."""
        self.awake.set()
        self.port = 0
        self.welcomed_at_ms = 0
        self._runner: web.AppRunner | None = None
        self._late: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return self.advertise or self.address

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/session", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        for session in list(self.sessions):
            await session.drop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        for task in self._late:
            task.cancel()

    def once(self, kind: type, action: Action, times: int = 1) -> None:
        """Do `action` with the next `times` operations of a kind."""
        left = [times]

        def rule(operation: FromProducer) -> Action | None:
            if isinstance(operation, kind) and left[0] > 0:
                left[0] -= 1
                return action
            return None

        self.rules.append(rule)

    # --- a session ------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return web.json_response({"error": {"code": "unauthorized"}}, status=401)
        socket = web.WebSocketResponse(max_msg_size=17 * 1024 * 1024)
        await socket.prepare(request)
        session = FakeSession(self, socket)
        self.opened += 1
        try:
            async for message in socket:
                if message.type is not WSMsgType.BINARY:
                    break
                await self.awake.wait()
                operations = decode_from_producer(message.data)
                session.frames.append(operations)
                for operation in operations:
                    await self._handle(session, operation)
                self.cluster.notify()
        finally:
            if session in self.sessions:
                self.sessions.remove(session)
            self.cluster.notify()
        return socket

    async def _handle(self, session: FakeSession, operation: FromProducer) -> None:
        match operation:
            case Hello():
                session.hello = operation
                if self.greeting is not None:
                    await session.socket.send_bytes(self.greeting)
                    return
                self.sessions.append(session)
                await session.send(self._welcome())
            case CheckAnswer():
                answer = session.answers.get(operation.call)
                if answer is not None and not answer.done():
                    answer.set_result(operation)
            case Drain():
                session.drained = True
            case _:
                await self._carry_out(session, operation)

    def _welcome(self) -> Welcome:
        self.welcomed_at_ms = int(time.time() * 1000) + self.clock_ahead_ms
        return Welcome(
            1,
            self.welcomed_at_ms,
            self.cluster.partitions,
            tuple(self.cluster.owners),
            self.url,
            self.dedup_window_s,
            8 * 1024 * 1024,
        )

    async def _carry_out(
        self, session: FakeSession, operation: Prepare | Decide | AskEarly
    ) -> None:
        if isinstance(operation, Prepare):
            self.cluster.prepares.append(operation)
        action = next((a for a in (rule(operation) for rule in self.rules) if a is not None), None)
        match action:
            case Refuse(code, text):
                await session.send(Failure(operation.call, code, text))
                return
            case DropBefore():
                await session.drop()
                return
            case SendRaw(frame):
                await session.socket.send_bytes(frame)
                return
            case Ignore(done=False):
                return
        answer = self._do(session, operation)
        match action:
            case DropAfter():
                await session.drop()
            case Ignore():
                pass
            case AnswerAfter(gate):
                task = asyncio.ensure_future(self._answer_late(session, answer, gate))
                self._late.add(task)
                task.add_done_callback(self._late.discard)
            case _:
                await session.send(answer)

    async def _answer_late(
        self, session: FakeSession, answer: Status | Failure, gate: asyncio.Event
    ) -> None:
        await gate.wait()
        await session.send(answer)

    def _do(self, session: FakeSession, operation: Prepare | Decide | AskEarly) -> Status | Failure:
        group = session.hello.group if session.hello else ""
        if self.cluster.owners[parse_id(operation.id).partition] != self.url:
            return Failure(operation.call, "owner_unavailable", "another proxy owns it")
        if isinstance(operation, Prepare):
            return self.cluster.prepare(operation, group)
        if isinstance(operation, Decide):
            return self.cluster.decide(operation, group)
        stored = self.cluster.transactions.get(operation.id)
        if stored is None:
            return Failure(operation.call, "not_found", "no such transaction")
        stored.asked_early.append(operation.reason)
        return Status(operation.call, operation.id, stored.state, stored.decision)
