"""The console as part of the web application: routes, admission, rendering, errors."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl

import jinja2
from aiohttp import web

from txbroker import __version__
from txbroker.core.telling import safe_repr, where_raised
from txbroker.errors import (
    BadRequest,
    KafkaDown,
    KafkaUnavailable,
    NotFound,
    RequestError,
    TooLarge,
    UnsupportedMediaType,
)
from txbroker.principals import ANYBODY, Principal, Role
from txbroker.proxy.console import formatting as shown
from txbroker.proxy.console.filters import Filter
from txbroker.proxy.console.visitors import FORM_FIELD, Visitor, VisitorCookies
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.guards import Guard
from txbroker.proxy.http.operations import WHO_LOOKS
from txbroker.proxy.http.reading import BodyReader
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

FORM_BYTES_MAX = 128 * 1024
"""The form of a bulk action carries some 11 bytes of each transaction that it covers."""
_FORM = "application/x-www-form-urlencoded"
_FIELDS_MAX = 50
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not `no-referrer`: with it browsers send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOR_GOOD = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class PageRequest:
    """Somebody asks for a page, or sends a form."""

    request: web.Request
    shell: ApiContext
    visitor: Visitor
    visits: VisitorCookies
    principal: Principal = ANYBODY
    form: Mapping[str, str] = field(default_factory=dict)

    @property
    def query(self) -> dict[str, str]:
        """What the link says; of a field that is given twice the first."""
        return {name: self.request.query.getall(name)[0] for name in self.request.query}

    @property
    def secure(self) -> bool:
        """True where the page came over TLS, so that cookies are kept to it."""
        return _is_secure(self.request)


Finish = Callable[[web.Response], None]


@dataclass(frozen=True)
class HtmlPage:
    """A page to render. `finish` is given the response, for cookies."""

    template: str
    values: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    finish: Finish | None = None


@dataclass(frozen=True)
class Redirect:
    """Another page to go to."""

    to: str
    finish: Finish | None = None


Handler = Callable[[PageRequest], Awaitable[HtmlPage | Redirect]]


@dataclass(frozen=True)
class Route:
    """A page or form, for these roles. `open`: without a login."""

    method: str
    path: str
    run: Handler
    open: bool = False
    roles: tuple[Role, ...] = WHO_LOOKS


@dataclass(frozen=True)
class _Asset:
    name: str
    content: bytes
    media: str
    mark: str


def _assets() -> dict[str, _Asset]:
    found = {}
    for file in (resources.files(__package__ or "") / "static").iterdir():
        media = _TYPES.get(file.name[file.name.rfind(".") :])
        if media is not None:
            content = file.read_bytes()
            mark = hashlib.sha256(content).hexdigest()[:16]
            found[file.name] = _Asset(file.name, content, media, mark)
    return found


class Console:
    """The pages of one proxy.

    Args:
        shell: what calls share; its service answers for all proxies.
        guard: says who may call.
        declared: the pages.
    """

    def __init__(self, shell: ApiContext, guard: Guard, declared: Sequence[Route]) -> None:
        self._shell = shell
        self._declared = declared
        self._guard = guard
        self._visits = VisitorCookies(guard)
        self._assets = _assets()
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader(__package__ or ""),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(shown.FILTERS)
        self._templates.globals.update(
            asset=self._asset_link,
            count=shown.count,
            link=shown.link,
            query_of=Filter.query,
            state_text=shown.STATE_TEXT,
            version=__version__,
        )

    def routes(self) -> list[tuple[str, str, Callable[[web.Request], Awaitable[web.Response]]]]:
        """Return method, path and handler of every page."""
        routes = [(route.method, route.path, self._handler(route)) for route in self._declared]
        routes += [("HEAD", path, run) for method, path, run in routes if method == "GET"]
        return [*routes, ("GET", "/static/{mark}/{name}", self._static)]

    # --- one page ----------------------------------------------------------------------------

    def _handler(self, route: Route) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            visitor = self._visits.visitor(request)
            content = BodyReader(self._shell, prepare=False)
            try:
                self._guard.admit_page(request)
                if not (visitor.admitted or route.open):
                    return self._to_login(request, visitor)
                principal = visitor.principal or ANYBODY
                if not route.open:
                    principal.check_role(route.roles)
                form = {}
                if route.method == "POST":
                    form = await _read_form(request, content)
                    visitor.check_form(form.pop(FORM_FIELD, ""))
                reply = await route.run(
                    PageRequest(request, self._shell, visitor, self._visits, principal, form)
                )
            except (RequestError, KafkaUnavailable) as error:
                return self._failed(request, visitor, error)
            except ConnectionError:
                raise
            except Exception as error:
                log.error(
                    "page failed",
                    path=request.path[:100],
                    error=safe_repr(error),
                    where=where_raised(error),
                )
                broken = RequestError("something went wrong inside the proxy; its log says what")
                return self._failed(request, visitor, broken)
            finally:
                content.let_go()
            return self._answer(request, visitor, reply)

        return handle

    def _answer(
        self, request: web.Request, visitor: Visitor, reply: HtmlPage | Redirect
    ) -> web.Response:
        if isinstance(reply, Redirect):
            response = web.Response(status=303, headers={**_HEADERS, "Location": reply.to})
        else:
            response = self._rendered(request, visitor, reply)
        self._visits.remember(response, visitor, secure=_is_secure(request))
        if reply.finish is not None:
            reply.finish(response)
        return response

    def _rendered(self, request: web.Request, visitor: Visitor, page: HtmlPage) -> web.Response:
        text = self._templates.get_template(page.template).render(
            {
                "visitor": visitor,
                "form_field": FORM_FIELD,
                "path": request.path,
                "has_login": self._guard.asks,
                "now_ms": self._shell.service.now_ms(),
                **page.values,
            }
        )
        return web.Response(
            status=page.status, text=text, content_type="text/html", headers=_HEADERS
        )

    def _failed(
        self, request: web.Request, visitor: Visitor, error: RequestError | KafkaUnavailable
    ) -> web.Response:
        """Return the page that says what went wrong."""
        if isinstance(error, KafkaUnavailable):
            error = KafkaDown(str(error))
        values = {"error": error, "retry": request.method == "GET" and error.retryable}
        response = self._answer(request, visitor, HtmlPage("error.html", values, error.status))
        if error.retryable:
            response.headers["Retry-After"] = "1"
        return response

    def _to_login(self, request: web.Request, visitor: Visitor) -> web.Response:
        """Return the way to the login."""
        here = request.path_qs if request.method in ("GET", "HEAD") else "/"
        if request.method == "GET" and request.headers.get("Sec-Fetch-Site") == "cross-site":
            # A link on another site was followed, so the browser kept its cookie back. A page of
            # ours that leads to the same place has it sent.
            return self._answer(request, visitor, HtmlPage("again.html", {"here": here}))
        return self._answer(request, visitor, Redirect(shown.link("/login", next=here)))

    # --- assets ------------------------------------------------------------------------------

    def _asset_link(self, name: str) -> str:
        return f"/static/{self._assets[name].mark}/{name}"

    async def _static(self, request: web.Request) -> web.Response:
        found = self._assets.get(request.match_info["name"])
        if found is None:
            raise NotFound("there is no such file")
        # While proxies are upgraded, a page of another build may ask for what this one has not.
        current = request.match_info["mark"] == found.mark
        headers = {
            "Cache-Control": _FOR_GOOD if current else "no-cache",
            "X-Content-Type-Options": "nosniff",
        }
        return web.Response(
            body=found.content, content_type=found.media, charset="utf-8", headers=headers
        )


def _is_secure(request: web.BaseRequest) -> bool:
    """Say whether the browser came over TLS, maybe to somebody who passes its calls on to us."""
    return request.secure or request.headers.get("X-Forwarded-Proto", "").lower() == "https"


async def _read_form(request: web.Request, content: BodyReader) -> dict[str, str]:
    """Return the fields of a form.

    Raises:
        RequestError: it is none, or too large, or does not arrive.
    """
    if request.content_type != _FORM:
        raise UnsupportedMediaType("the console takes forms of its own pages")
    if (request.content_length or 0) > FORM_BYTES_MAX:
        raise TooLarge("this form is too large")
    raw = await content.read(request)
    if len(raw) > FORM_BYTES_MAX:
        raise TooLarge("this form is too large")
    try:
        return dict(
            parse_qsl(
                raw.decode(), keep_blank_values=True, max_num_fields=_FIELDS_MAX, errors="strict"
            )
        )
    except ValueError:
        raise BadRequest("this form does not read") from None
