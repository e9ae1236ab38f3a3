"""Chooses the proxy for each call: sessions by URL, owners by partition, reconnects with back-off.

Every proxy sends its view of the owners. The newest view of an open session counts first. If that
owner does not take a call, the next attempts go to the owners in other views, so that one stale
proxy cannot mislead the producer for long. One session is always kept, for checks; further ones are
opened when a call needs them and closed when they have been unused for a while.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from txbroker.batching import Sticky
from txbroker.contract.frames import CheckQuestion, Drain
from txbroker.errors import OwnerUnavailable, RequestError
from txbroker.sdk.session import CannotConnect, CannotTrust, Session
from txbroker.sdk.types import Limits, ProducerClosed, Untrusted, backoff_s

_log = logging.getLogger("txbroker.sdk")

CLOSED = "the producer was closed before an answer came; the check-back will settle it"

Dial = Callable[[str], Awaitable[Session]]


class _View(NamedTuple):
    owners: tuple[str, ...]
    number: int
    """Newer views have greater numbers."""


class _Link:
    """The attempts to connect to one URL."""

    __slots__ = ("failures", "task")

    def __init__(self) -> None:
        self.failures = 0
        self.task: asyncio.Task[None] | None = None


class Router:
    """Keeps the sessions of one producer, and is the `Listener` of each."""

    def __init__(
        self,
        urls: Sequence[str],
        dial: Dial,
        check_arrived: Callable[[Session, CheckQuestion], None],
        limits: Limits,
    ) -> None:
        self.check_arrived = check_arrived
        self._seeds = list(urls)
        random.shuffle(self._seeds)  # spreads producers over the proxies
        self._connect = dial
        self._limits = limits
        self._sessions: dict[str, Session] = {}
        self._links: dict[str, _Link] = {}
        self._views: dict[str, _View] = {}
        self._views_seen = 0
        self._addresses: dict[str, str] = {}
        self._changed = asyncio.Event()
        # Derived from sessions and views; None: to be derived again.
        self._newest: list[_View] | None = None
        self._owners: list[Session | None] | None = None
        self._own: list[tuple[Session, int]] = []
        self._sticky: Sticky[tuple[Session, int]] = Sticky()
        self._keeper: asyncio.Task[None] | None = None
        self._tidier: asyncio.Task[None] | None = None
        self._retiring: dict[Session, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._refusal: RequestError | None = None
        self.last_trouble: OwnerUnavailable | None = None
        """Why there is no session, or why the last one ended."""

    # --- life ----------------------------------------------------------------------------

    async def start(self, timeout_s: float) -> None:
        """Open the first session.

        Raises:
            OwnerUnavailable: no proxy could be reached within `timeout_s`.
            Untrusted: no given URL can be reached, at least one because of TLS; raised at once.
            RequestError: a proxy refuses the producer.
        """
        self._keeper = asyncio.create_task(self._keep_one(), name="txbroker session keeper")
        self._tidier = asyncio.create_task(self._tidy(), name="txbroker session tidier")
        try:
            async with asyncio.timeout(timeout_s):
                while not self._sessions:
                    if self._refusal is not None and self._all_seeds_failed():
                        raise self._refusal
                    await self._changed.wait()
        except TimeoutError:
            trouble = self.last_trouble or OwnerUnavailable(
                f"{', '.join(self._seeds)}: no answer within {timeout_s:g} s; check the network"
            )
            raise type(trouble)(f"no proxy can be reached: {trouble}") from None

    def _all_seeds_failed(self) -> bool:
        return all(url in self._links and self._links[url].failures for url in self._seeds)

    async def close(self) -> None:
        """End all sessions; their queued operations are sent first."""
        self._closed = True
        self._invalidate()
        tasks = [link.task for link in self._links.values() if link.task is not None]
        tasks += [task for task in (self._keeper, self._tidier) if task is not None]
        retiring = list(self._retiring)
        tasks += self._retiring.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        sessions = [*self._sessions.values(), *retiring]
        await asyncio.gather(*(session.close() for session in sessions))
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._notify()

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The open sessions."""
        return tuple(self._sessions.values())

    # --- where to send -------------------------------------------------------------------

    def open_place(self, order: int | None) -> tuple[Session, int] | None:
        """Return the half partition of a new transaction, and a session with its owner; None if the
        caller must wait with `place`.

        `order` is the hash of the order key; None chooses any partition that a connected proxy
        owns.
        """
        owners = self._owners
        if owners is None:
            owners = self._look_up_owners()
        if not owners:
            return None
        if order is None:
            return self._sticky.choose(self._own) if self._own else None
        partition = order % len(owners)
        session = owners[partition]
        return None if session is None else (session, partition)

    def open_owner(self, partition: int) -> Session | None:
        """Return a session with the owner of a half partition, by the newest view that names one;
        None if the caller must wait with `owner`."""
        owners = self._owners
        if owners is None:
            owners = self._look_up_owners()
        return owners[partition] if partition < len(owners) else None

    async def place(self, order: int | None) -> tuple[Session, int]:
        """Wait for the result of `open_place`; raises as `owner`."""
        while not self._views:
            await self._wait_for_change()
        if (place := self.open_place(order)) is not None:
            return place
        if order is None:
            order = random.getrandbits(31)
        partition = order % len(self._newest_views()[0].owners)
        return await self.owner(partition, 0), partition

    async def owner(self, partition: int, choice: int) -> Session:
        """Return a session with the owner of a half partition; waits until there is one.

        `choice` is the index among the owners that the views name: where views differ, each attempt
        of a call takes the next one.

        Raises:
            ProducerClosed: the producer was closed.
            RequestError: the owner refuses the producer.
        """
        while True:
            url = self._owner_url(partition, choice)
            if url is None:
                await self._wait_for_change()
                continue
            session = self._sessions.get(url)
            if session is not None and not self._closed:
                return session
            if await self._dial_or_change(url):
                choice += 1

    def _look_up_owners(self) -> list[Session | None]:
        """Derive the open session with each partition's owner; none after `close`."""
        views = [] if self._closed else self._newest_views()
        partitions = range(len(views[0].owners) if views else 0)
        owners = [self._sessions.get(self._owner_url(p, 0) or "") for p in partitions]
        self._owners = owners
        self._own = [
            (session, partition)
            for session in self._sessions.values()
            for partition, url in enumerate(session.owners)
            if url == session.url
        ]
        return owners

    def _owner_url(self, partition: int, choice: int) -> str | None:
        urls: list[str] = []
        for view in self._newest_views():
            url = view.owners[partition] if partition < len(view.owners) else ""
            if url and url not in urls:
                urls.append(url)
        return urls[choice % len(urls)] if urls else None

    def _newest_views(self) -> list[_View]:
        newest = self._newest
        if newest is None:
            newest = sorted(self._views.values(), key=lambda view: -view.number)
            self._newest = newest
        return newest

    async def _wait_for_change(self) -> None:
        if self._closed:
            raise ProducerClosed(CLOSED)
        await self._changed.wait()

    async def _dial_or_change(self, url: str) -> bool:
        """Wait until a session with `url` opened or failed, or anything else changed; return True
        if it failed."""
        if self._closed:
            raise ProducerClosed(CLOSED)
        dialling = self._dial(url)
        change = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((dialling, change), return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
        if not dialling.done() or dialling.cancelled():
            return False
        error = dialling.exception()
        if isinstance(error, RequestError):
            raise error
        return error is not None

    # --- sessions ------------------------------------------------------------------------

    def owners_changed(self, session: Session, before: tuple[str, ...]) -> None:
        """Apply a session's new list of owners.

        Calls that wait at an earlier owner fail at once and are retried: at a hanging proxy they
        would otherwise wait until they time out.
        """
        if self._sessions.get(session.url) is not session:
            return
        self._learn(session)
        for partition, (old, new) in enumerate(zip(before, session.owners, strict=False)):
            earlier = self._sessions.get(old)
            if earlier is not None and earlier is not session and new not in ("", old):
                earlier.moved_away(partition)
        self._notify()

    def session_lost(self, session: Session, why: str) -> None:
        """Remove a session that ended."""
        closing = asyncio.create_task(session.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        if self._sessions.get(session.url) is not session:
            return
        del self._sessions[session.url]
        self.last_trouble = OwnerUnavailable(why)
        if self._sessions:
            self._views.pop(session.url, None)  # the last known view stays when all are lost
        link = self._links.setdefault(session.url, _Link())
        lived_s = asyncio.get_running_loop().time() - session.opened_at
        link.failures = 0 if lived_s > self._limits.backoff_max_s else link.failures + 1
        if not self._closed:
            _log.info("session lost: %s", why)
        self._notify()

    async def _keep_one(self) -> None:
        attempt = 0
        while True:
            if self._sessions:
                await self._changed.wait()
                continue
            known = self._known_urls()
            await asyncio.wait((self._dial(known[attempt % len(known)]),))
            attempt += 1

    async def _tidy(self) -> None:
        """Close sessions that have been unused for a while, except one."""
        unused_since: dict[Session, float] = {}
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._limits.session_idle_s / 4)
            owners = {url for view in self._views.values() for url in view.owners}
            unused = [s for s in self._sessions.values() if s.url not in owners and s.quiet]
            unused_since = {s: unused_since.get(s, loop.time()) for s in unused}
            for session, since in list(unused_since.items()):
                expired = loop.time() - since >= self._limits.session_idle_s
                if expired and len(self._sessions) > 1:
                    del unused_since[session]
                    self._retire(session)

    def _retire(self, session: Session) -> None:
        """Stop using a session, and close it once its proxy sends no check in it either."""
        del self._sessions[session.url]
        self._views.pop(session.url, None)
        self._invalidate()
        task = asyncio.create_task(self._close_quietly(session))
        self._retiring[session] = task
        task.add_done_callback(lambda _: self._retiring.pop(session, None))

    async def _close_quietly(self, session: Session) -> None:
        session.post(Drain())
        # A check that was in flight when the proxy read this is answered: otherwise it would count
        # as an attempt with an unclear result.
        while True:
            await asyncio.sleep(self._limits.answer_timeout_s)
            if session.quiet:
                break
        await session.close("its proxy owns nothing")

    def _known_urls(self) -> list[str]:
        urls = dict.fromkeys(self._seeds)
        for view in self._views.values():
            urls.update(dict.fromkeys(url for url in view.owners if url))
        return list(urls)

    def _dial(self, url: str) -> "asyncio.Task[None]":
        link = self._links.setdefault(url, _Link())
        if link.task is None or link.task.done():
            link.task = asyncio.create_task(self._open(url, link), name=f"txbroker dial {url}")
            link.task.add_done_callback(_retrieve_exception)
        return link.task

    async def _open(self, url: str, link: _Link) -> None:
        await asyncio.sleep(backoff_s(self._limits, link.failures))
        if url in self._sessions:
            return
        address = self._addresses.get(url, url)
        try:
            session = await self._connect(address)
        except (CannotConnect, RequestError) as error:
            link.failures += 1
            self._addresses.pop(url, None)
            self._remember(error)
            self._notify()
            raise
        except Exception as error:
            # Any other error must be logged, and retried only after a pause.
            link.failures += 1
            self.last_trouble = OwnerUnavailable(f"{url}: {type(error).__name__}")
            _log.exception("no session with %s", url)
            self._notify()
            raise CannotConnect(str(self.last_trouble)) from error
        await self._admit(session, address)
        if session.url != url and url not in self._seeds:
            link.failures += 1
            raise CannotConnect(f"{url} leads to {session.url}")

    def _remember(self, error: CannotConnect | RequestError) -> None:
        """Remember why a session could not be opened."""
        before = str(self.last_trouble)
        if isinstance(error, CannotTrust):
            self.last_trouble = self._refusal = Untrusted(str(error))
            if str(error) != before:
                _log.warning("no session: %s", error)
            return
        self.last_trouble = OwnerUnavailable(str(error))
        if isinstance(error, RequestError):
            self._refusal = error

    async def _admit(self, session: Session, address: str) -> None:
        if session.url in self._sessions or self._closed:
            await session.close()
            return
        self._sessions[session.url] = session
        self._addresses[session.url] = address
        self._refusal = None
        self._learn(session)
        self._notify()
        _log.info("session with %s opened", session.url)

    def _learn(self, session: Session) -> None:
        self._views_seen += 1
        self._views[session.url] = _View(session.owners, self._views_seen)
        for url in [url for url in self._views if url not in self._sessions]:
            del self._views[url]
        known = {*self._known_urls(), *self._sessions}
        for url, link in list(self._links.items()):
            if url not in known and (link.task is None or link.task.done()):
                del self._links[url]
                self._addresses.pop(url, None)

    def _invalidate(self) -> None:
        """Drop the values derived from sessions and views."""
        self._newest = self._owners = None

    def _notify(self) -> None:
        self._invalidate()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _retrieve_exception(task: "asyncio.Task[None]") -> None:
    """Retrieve an exception, as there may be no waiter left: asyncio would report it."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
