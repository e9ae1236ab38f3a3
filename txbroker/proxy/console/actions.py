"""A person's actions on transactions: previewed, then done, with author and reason on record."""

import asyncio
import base64
import binascii
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from enum import Enum

from aiohttp import web

from txbroker.contract.service import DecideRequest, TransactionView
from txbroker.core.records import Decision, Source, State
from txbroker.errors import BadRequest, KafkaUnavailable, RequestError
from txbroker.principals import ONLY_OPERATORS
from txbroker.proxy.console.filters import AuditNote, Filter, convert, read_listing
from txbroker.proxy.console.formatting import link
from txbroker.proxy.console.site import HtmlPage, PageRequest, Redirect, Route
from txbroker.proxy.http.context import within_groups
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

BULK_MAX = 10_000
"""Transactions of one action; the remaining ones need another action."""
BULK_S = 60.0
"""Maximum time of one action, seconds; browsers wait longer."""
PARALLEL = 64
"""Transactions acted on concurrently: full batches for Kafka."""
_PAGE = 1000
SAMPLE = 10
FAILED_SHOWN = 20
COVERED_FIELD = "covered"
_MARK_BYTES = 8
"""Bytes of each covered id's hash in a form: a third of the ids' length, without collisions
among `BULK_MAX`."""
_UNDECIDED = (State.PENDING, State.PARKED)


class Action(Enum):
    """An action, with the states in which it is possible."""

    COMMIT = ("commit", "Commit", "Committed", _UNDECIDED)
    ROLLBACK = ("rollback", "Roll back", "Rolled back", _UNDECIDED)
    CHECK = ("check", "Check now", "Asked for a check of", (State.PENDING,))
    REVIVE = ("revive", "Revive", "Revived", (State.PARKED, State.REFUSED))

    def __init__(self, word: str, title: str, done: str, states: tuple[State, ...]) -> None:
        self.word = word
        self.title = title
        self.done = done
        self.states = states

    @property
    def decides(self) -> bool:
        """True if it cannot be undone."""
        return self in (Action.COMMIT, Action.ROLLBACK)


_BY_WORD = {action.word: action for action in Action}


@dataclass
class Preview:
    """The transactions an action would cover."""

    total: int = 0
    more: bool = False
    """True if there are more than `BULK_MAX`."""
    by_group: Counter[str] = field(default_factory=Counter)
    by_state: Counter[str] = field(default_factory=Counter)
    sample: list[TransactionView] = field(default_factory=list)
    oldest_ms: int | None = None
    marks: bytearray = field(default_factory=bytearray)
    """One per transaction, so that the form does not cover later matches."""

    def add(self, view: TransactionView) -> None:
        """Add a transaction."""
        self.marks += _mark(view.id)
        self.total += 1
        self.by_group[view.group] += 1
        self.by_state[view.state] += 1
        if len(self.sample) < SAMPLE:
            self.sample.append(view)
        if self.oldest_ms is None or view.prepared_at_ms < self.oldest_ms:
            self.oldest_ms = view.prepared_at_ms


@dataclass
class ActionResult:
    """The result of an action."""

    done: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Ids with reasons, at most `FAILED_SHOWN`."""
    failures: int = 0
    untried: int = 0

    def fail(self, id: str, why: str) -> None:
        """Add a failed transaction."""
        self.failures += 1
        if len(self.failed) < FAILED_SHOWN:
            self.failed.append((id, why))


# --- selection -------------------------------------------------------------------------------


def _mark(id: str) -> bytes:
    return hashlib.sha256(id.encode()).digest()[:_MARK_BYTES]


def _narrowed(action: Action, chosen: Filter) -> Filter:
    """Return the filter of an action. A bulk decision without a state only covers parked
    transactions, as the producer of a pending one may be about to decide it."""
    if action.decides and not chosen.ids and chosen.state is None:
        return replace(chosen, state=State.PARKED)
    return chosen


async def _matching(
    request: PageRequest, action: Action, chosen: Filter
) -> AsyncIterator[TransactionView]:
    """Yield the matching transactions of the principal's groups in a state for the action."""
    service = request.context.service
    if chosen.ids:
        for id in chosen.ids:
            view = await service.find(id, brief=True)
            request.principal.check_own(view.group)
            if view.state in action.states:
                yield view
        return
    for state in action.states:
        if chosen.state not in (None, state):
            continue
        cursor = None
        while True:
            listed = chosen.request(limit=_PAGE, cursor=cursor, state=state)
            page = await service.list(within_groups(listed, request.principal))
            for view in page.transactions:
                if view.group in request.principal.groups:
                    yield view
            cursor = page.next_cursor
            if cursor is None:
                break


async def preview(request: PageRequest) -> HtmlPage | Redirect:
    """Show the transactions an action would cover, and a form for author and reason."""
    action = _action(request)
    given = read_listing(request.query).filter
    chosen = _narrowed(action, given)
    covered = Preview()
    async for view in _matching(request, action, chosen):
        if covered.total == BULK_MAX:
            covered.more = True
            break
        covered.add(view)
    values = {
        "action": action,
        "chosen": chosen,
        "preview": covered,
        "narrowed": chosen != given,
        "covered_field": COVERED_FIELD,
        "covered": base64.urlsafe_b64encode(covered.marks).decode(),
        "name": request.visitor.name,
        "back": _back(given),
    }
    return HtmlPage("preview.html", values)


def _back(chosen: Filter) -> str:
    if len(chosen.ids) == 1:
        return link(f"/transactions/{chosen.ids[0]}")
    return link("/transactions", **chosen.query())


# --- action ----------------------------------------------------------------------------------


async def act(request: PageRequest) -> HtmlPage | Redirect:
    """Act, and show the result."""
    action = _action(request)
    chosen = _narrowed(action, read_listing(request.form).filter)
    fields = {name: request.form.get(name, "").strip() for name in ("reason", "by")}
    note = convert(fields, AuditNote)
    if action.decides and not note.reason:
        raise BadRequest("the reason is missing: give one, kept with the decision", path="reason")
    ids, more = await _confirmed(request, action, chosen, _covered(request))
    claim = request.visitor.name if request.visitor.logged_in else note.by
    by = request.principal.by(f"console {request.http.remote or ''}", claim)
    result = await _act_on_all(request, action, ids, by, note.reason)
    log.info(
        "console action",
        action=action.word,
        done=result.done,
        failed=result.failures,
        untried=result.untried,
        by=by,
        reason=note.reason,
        of=chosen.query(),
    )

    def keep_name(response: web.Response) -> None:
        if not request.visitor.logged_in:
            request.cookies.remember_name(response, note.by, secure=request.secure)

    if len(chosen.ids) == 1 and result.done == 1:
        to = link(f"/transactions/{chosen.ids[0]}", done=action.word)
        return Redirect(to, keep_name)
    values = {
        "action": action,
        "chosen": chosen,
        "result": result,
        "more": more,
        "back": _back(chosen),
    }
    return HtmlPage("outcome.html", values, finish=keep_name)


def _action(request: PageRequest) -> Action:
    word = request.http.match_info["action"]
    action = _BY_WORD.get(word)
    if action is None:
        raise BadRequest(f"there is no action {word[:40]!r}: use one of {', '.join(_BY_WORD)}")
    return action


def _covered(request: PageRequest) -> set[bytes]:
    try:
        raw = base64.urlsafe_b64decode(request.form.get(COVERED_FIELD, ""))
    except (binascii.Error, ValueError):
        raw = b""
    if not raw or len(raw) % _MARK_BYTES:
        raise BadRequest(
            "the form does not list the transactions it covers: open the preview again"
        )
    return {raw[at : at + _MARK_BYTES] for at in range(0, len(raw), _MARK_BYTES)}


async def _confirmed(
    request: PageRequest, action: Action, chosen: Filter, covered: set[bytes]
) -> tuple[list[str], bool]:
    """Return the previewed transactions that still match, and whether others match too."""
    ids: list[str] = []
    more = False
    async for view in _matching(request, action, chosen):
        if _mark(view.id) in covered:
            ids.append(view.id)
        else:
            more = True
        if more and len(ids) == len(covered):
            break
    return ids, more


async def _act_on_all(
    page: PageRequest, action: Action, ids: list[str], by: str, reason: str
) -> ActionResult:
    """Act on each, `PARALLEL` at a time, until all are done or `BULK_S` has passed."""
    result = ActionResult()
    remaining = iter(ids)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + BULK_S

    async def work() -> None:
        while loop.time() < until_s:
            id = next(remaining, None)
            if id is None:
                return
            try:
                await _act_on(page, action, id, by, reason)
            except (RequestError, KafkaUnavailable) as error:
                result.fail(id, str(error))
            else:
                result.done += 1

    await asyncio.gather(*(work() for _ in range(min(PARALLEL, len(ids)))))
    result.untried = len(ids) - result.done - result.failures
    return result


async def _act_on(page: PageRequest, action: Action, id: str, by: str, reason: str) -> None:
    context = page.context
    if action is Action.CHECK:
        await context.service.check(id, by=by, reason=reason)
    elif action is Action.REVIVE:
        await context.service.revive(id, by=by, reason=reason)
    else:
        decision = Decision(action.word)
        request = DecideRequest(id, decision, reason=reason, source=Source.OPERATOR, by=by)
        await context.admission.submit(page.principal, request, lambda status: status)


ROUTES = (
    Route("GET", "/actions/{action}", preview, roles=ONLY_OPERATORS),
    Route("POST", "/actions/{action}", act, roles=ONLY_OPERATORS),
)
