"""What a person does to transactions: looked at first, then done, with who and why on record."""

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
from txbroker.proxy.console.filters import AuditNote, Filter, convert, read_listing
from txbroker.proxy.console.formatting import link
from txbroker.proxy.console.site import HtmlPage, PageRequest, Redirect, Route
from txbroker.proxy.http.context import ApiContext, within_groups
from txbroker.proxy.http.operations import ONLY_OPERATORS
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

BULK_MAX = 10_000
"""Transactions that one action covers: what is left over takes another one."""
BULK_S = 60.0
"""How long one action goes on, seconds; browsers wait for longer."""
PARALLEL = 64
"""Transactions that are worked on at the same time: whole batches for Kafka."""
_PAGE = 1000
SAMPLE = 10
FAILED_SHOWN = 20
COVERED_FIELD = "covered"
_MARK_BYTES = 8
"""What a form carries of each id that it covers: all of them would be three times as long, and
no two of `BULK_MAX` ids have the same."""
_UNDECIDED = (State.PENDING, State.PARKED)


class Action(Enum):
    """What can be done; each with the states in which it can be."""

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
        """True where it cannot be taken back."""
        return self in (Action.COMMIT, Action.ROLLBACK)


_BY_WORD = {action.word: action for action in Action}


def allowed(action: Action, state: State | None) -> bool:
    """Say whether an action can do something with transactions of a state, None for any."""
    return state is None or state in action.states


@dataclass
class Preview:
    """What an action would cover."""

    total: int = 0
    more: bool = False
    """True where there are further ones, beyond `BULK_MAX`."""
    by_group: Counter[str] = field(default_factory=Counter)
    by_state: Counter[State] = field(default_factory=Counter)
    sample: list[TransactionView] = field(default_factory=list)
    oldest_ms: int | None = None
    marks: bytearray = field(default_factory=bytearray)
    """Of each one, so that what comes to match later is not taken for agreed to."""

    def add(self, view: TransactionView) -> None:
        """Count one."""
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
    """What an action did."""

    done: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Ids, each with why."""
    failures: int = 0
    untried: int = 0

    def fail(self, id: str, why: str) -> None:
        """Count one that was not done."""
        self.failures += 1
        if len(self.failed) < FAILED_SHOWN:
            self.failed.append((id, why))


# --- which -----------------------------------------------------------------------------------


def _mark(id: str) -> bytes:
    return hashlib.sha256(id.encode()).digest()[:_MARK_BYTES]


def _meant(action: Action, chosen: Filter) -> Filter:
    """Return what is meant by a filter: a decision for many is one of parked ones, unless another
    state is said, as a pending one may be about to be decided by its own producer."""
    if action.decides and not chosen.ids and chosen.state is None:
        return replace(chosen, state=State.PARKED)
    return chosen


async def _matching(
    ask: PageRequest, action: Action, chosen: Filter
) -> AsyncIterator[TransactionView]:
    """Yield what an action can do something with, of the principal's groups.

    Raises:
        RequestError: an owner does not answer, or an id is none or another group's.
    """
    shell = ask.shell
    if chosen.ids:
        for id in chosen.ids:
            view = await shell.service.find(id)
            ask.principal.check_own(view.group)
            if view.state in action.states:
                yield view
        return
    for state in action.states:
        if chosen.state not in (None, state):
            continue
        cursor = None
        while True:
            request = chosen.request(limit=_PAGE, cursor=cursor, state=state)
            page = await shell.service.list(within_groups(request, ask.principal))
            for view in page.transactions:
                if view.group in ask.principal.groups:
                    yield view
            cursor = page.next_cursor
            if cursor is None:
                break


async def preview(ask: PageRequest) -> HtmlPage | Redirect:
    """Show what an action would cover, and ask for who and why."""
    action = _action(ask)
    given = read_listing(ask.query).filter
    chosen = _meant(action, given)
    found = Preview()
    async for view in _matching(ask, action, chosen):
        if found.total == BULK_MAX:
            found.more = True
            break
        found.add(view)
    values = {
        "action": action,
        "chosen": chosen,
        "found": found,
        "narrowed": chosen != given,
        "covered_field": COVERED_FIELD,
        "covered": base64.urlsafe_b64encode(found.marks).decode(),
        "name": ask.visitor.name,
        "back": _back(given),
    }
    return HtmlPage("preview.html", values)


def _back(chosen: Filter) -> str:
    if len(chosen.ids) == 1:
        return link(f"/transactions/{chosen.ids[0]}")
    return link("/transactions", **chosen.query())


# --- done ------------------------------------------------------------------------------------


async def act(ask: PageRequest) -> HtmlPage | Redirect:
    """Do it, and show what came of it."""
    action = _action(ask)
    chosen = _meant(action, read_listing(ask.form).filter)
    said = {name: ask.form.get(name, "").strip() for name in ("reason", "by")}
    record = convert(said, AuditNote)
    if action.decides and not record.reason:
        raise BadRequest("say why: the reason is kept with the decision", path="reason")
    ids, more = await _agreed(ask, action, chosen, _covered(ask))
    claim = ask.visitor.name if ask.visitor.logged_in else record.by
    by = ask.principal.by(f"console {ask.request.remote or ''}", claim)
    outcome = await _do_all(ask.shell, action, ids, by, record.reason)
    log.info(
        "console action",
        action=action.word,
        done=outcome.done,
        failed=outcome.failures,
        untried=outcome.untried,
        by=by,
        reason=record.reason,
        of=chosen.query(),
    )

    def keep_name(response: web.Response) -> None:
        if not ask.visitor.logged_in:
            ask.visits.remember_name(response, record.by, secure=ask.secure)

    if len(chosen.ids) == 1 and outcome.done == 1:
        to = link(f"/transactions/{chosen.ids[0]}", done=action.word)
        return Redirect(to, keep_name)
    values = {
        "action": action,
        "chosen": chosen,
        "outcome": outcome,
        "more": more,
        "back": _back(chosen),
    }
    return HtmlPage("outcome.html", values, finish=keep_name)


def _action(ask: PageRequest) -> Action:
    word = ask.request.match_info["action"]
    action = _BY_WORD.get(word)
    if action is None:
        raise BadRequest(f"there is no action {word[:40]!r}; known are {', '.join(_BY_WORD)}")
    return action


def _covered(ask: PageRequest) -> set[bytes]:
    """Return the marks of what the preview covered."""
    try:
        raw = base64.urlsafe_b64decode(ask.form.get(COVERED_FIELD, ""))
    except (binascii.Error, ValueError):
        raw = b""
    if not raw or len(raw) % _MARK_BYTES:
        raise BadRequest("this form does not say what it covered: begin with the preview again")
    return {raw[at : at + _MARK_BYTES] for at in range(0, len(raw), _MARK_BYTES)}


async def _agreed(
    ask: PageRequest, action: Action, chosen: Filter, covered: set[bytes]
) -> tuple[list[str], bool]:
    """Return what still matches of what was looked at, and whether others match, too."""
    ids: list[str] = []
    more = False
    async for view in _matching(ask, action, chosen):
        if _mark(view.id) in covered:
            ids.append(view.id)
        else:
            more = True
        if more and len(ids) == len(covered):
            break
    return ids, more


async def _do_all(
    shell: ApiContext, action: Action, ids: list[str], by: str, reason: str
) -> ActionResult:
    """Do it to each, several at a time, until all are through or the time is over."""
    outcome = ActionResult()
    left = iter(ids)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + BULK_S

    async def work() -> None:
        while loop.time() < until_s:
            id = next(left, None)
            if id is None:
                return
            try:
                await _do(shell, action, id, by, reason)
            except (RequestError, KafkaUnavailable) as error:
                outcome.fail(id, str(error))
            else:
                outcome.done += 1

    await asyncio.gather(*(work() for _ in range(min(PARALLEL, len(ids)))))
    outcome.untried = len(ids) - outcome.done - outcome.failures
    return outcome


async def _do(shell: ApiContext, action: Action, id: str, by: str, reason: str) -> None:
    if action is Action.CHECK:
        await shell.service.check(id, by=by, reason=reason)
    elif action is Action.REVIVE:
        await shell.service.revive(id, by=by, reason=reason)
    else:
        request = DecideRequest(
            id, Decision(action.word), reason=reason, source=Source.OPERATOR, by=by
        )
        shell.check_decide(request)
        await shell.service.decide(request)


ROUTES = (
    Route("GET", "/actions/{action}", preview, roles=ONLY_OPERATORS),
    Route("POST", "/actions/{action}", act, roles=ONLY_OPERATORS),
)
