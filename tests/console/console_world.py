"""A browser without scripts, as far as the console's pages need one, and calls of the API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.request import Request, urlopen

import aiohttp
from yarl import URL

from tests.kit.service import Service
from tests.kit.until import until
from txbroker.core.records import Message

TOKEN = "a-token-of-the-tests"
_VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}
)
_UNSEEN = frozenset({"script", "style", "title", "datalist", "template"})


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def all(self, tag: str = "", **attributes: str) -> list[Element]:
        """Return every element inside of this kind, in order."""
        found: list[Element] = []
        for child in self.children:
            if isinstance(child, Element):
                same = all(child.attributes.get(n) == v for n, v in attributes.items())
                if same and tag in ("", child.tag):
                    found.append(child)
                found.extend(child.all(tag, **attributes))
        return found

    def one(self, tag: str = "", **attributes: str) -> Element:
        (found,) = self.all(tag, **attributes)
        return found

    @property
    def text(self) -> str:
        if self.tag in _UNSEEN:
            return ""
        parts = [c if isinstance(c, str) else f" {c.text} " for c in self.children]
        return " ".join("".join(parts).split())

    @property
    def raw(self) -> str:
        return "".join(c if isinstance(c, str) else c.raw for c in self.children)


class _Parser(HTMLParser):
    """Builds the tree, and asserts that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice: {names}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        # An option needs no end where the next one begins.
        if tag not in _VOID and not (tag == "option" and self._open[-1].tag == "datalist"):
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)

    def parsed(self, text: str) -> Element:
        self.feed(text)
        self.close()
        assert self._open == [self.root], f"left open: {[e.tag for e in self._open[1:]]}"
        return self.root


@dataclass
class Seen:
    status: int
    url: URL
    headers: Any
    html: str
    root: Element

    @property
    def main(self) -> Element:
        """What the page is about, without its frame."""
        return self.root.one("main")

    @property
    def text(self) -> str:
        return self.main.text

    def links(self, text: str) -> list[str]:
        return [a.attributes["href"] for a in self.main.all("a") if a.text == text]

    def link(self, text: str) -> str:
        found = set(self.links(text))
        assert len(found) == 1, f"links called {text!r}: {found}"
        return found.pop()

    def form(self, action: str = "") -> dict[str, str]:
        """Return the fields of the form that leads there, as they are filled in."""
        forms = [f for f in self.root.all("form") if f.attributes["action"].startswith(action)]
        assert len(forms) == 1, f"forms to {action!r}: {len(forms)}"
        return {
            i.attributes["name"]: i.attributes.get("value", "")
            for i in forms[0].all("input")
            if "name" in i.attributes
        }

    def listed(self) -> list[str]:
        """Return the ids of the transactions that a table shows, in order."""
        return [a.text for a in self.main.all("a") if a.attributes.get("class") == "id"]


class Reader:
    """A browser that runs no scripts."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http

    async def open(self, path: str, *, follow: bool = True, **headers: str) -> Seen:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.get(path, headers=sent, allow_redirects=follow) as answer:
            return await _seen(answer)

    async def until(self, path: str, *texts: str) -> Seen:
        """Open a page until it shows all these texts."""

        async def shown() -> Seen | None:
            seen = await self.open(path)
            return seen if all(text in seen.text for text in texts) else None

        seen: Seen = await until(shown)
        return seen

    async def send(
        self, path: str, fields: dict[str, str], *, follow: bool = True, **headers: str
    ) -> Seen:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(
            path, data=fields, headers=sent, allow_redirects=follow
        ) as answer:
            return await _seen(answer)

    async def act(self, path: str, **fields: str) -> Seen:
        """Open a preview, fill it in and confirm."""
        asked = await self.open(path)
        assert asked.status == 200, asked.text
        form = asked.form("/actions/")
        return await self.send(str(asked.url.with_query(None).path), {**form, **fields})


async def _seen(answer: aiohttp.ClientResponse) -> Seen:
    html = await answer.text()
    page = answer.content_type == "text/html"
    root = _Parser().parsed(html) if page else Element("", {})
    return Seen(answer.status, answer.url, answer.headers, html, root)


@asynccontextmanager
async def reader_of(url: str, **headers: str) -> AsyncIterator[Reader]:
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(url, cookie_jar=jar, headers=headers) as http:
        yield Reader(http)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send JSON from a test without an event loop; return the answer."""
    headers = {"content-type": "application/json"}
    request = Request(url, json.dumps(body).encode(), headers)
    with urlopen(request, timeout=20) as answer:
        return dict(json.load(answer))


async def pending(service: Service, count: int = 1, **fields: Any) -> list[str]:
    """Prepare transactions, each with a message to the same new topic; return their ids."""
    message = Message(await service.topic(), b"k", b"v")
    return [await service.prepare(message, **fields) for _ in range(count)]


async def parked(
    service: Service, count: int = 1, answer: dict[str, Any] | int | None = None
) -> tuple[str, list[str]]:
    """Return a group whose only check brings no decision, and parked transactions of it."""
    group = await service.group(answer or {"decision": "unknown"}, attempts_max=1, timeout_s=0.1)
    ids = await pending(service, count, group=group)
    for id in ids:
        await service.reaches(id, "parked")
    return group, ids
