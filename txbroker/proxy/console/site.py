"""The console in the web application: routes, admission, rendering, errors."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl

import jinja2
from aiohttp import web

from txbroker import __version__
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import (
    BadRequest,
    KafkaDown,
    KafkaUnavailable,
    NotFound,
    RequestError,
    TooLarge,
    UnsupportedMediaType,
)
from txbroker.principals import ANYBODY, READERS, Principal, Role
from txbroker.proxy.console import formatting
from txbroker.proxy.console.filters import Filter
from txbroker.proxy.console.visitors import FORM_FIELD, Visitor, VisitorCookies
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.endpoints import INTERNAL_ERROR
from txbroker.proxy.http.guards import Guard
from txbroker.proxy.http.reading import BodyReader
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

FORM_BYTES_MAX = 128 * 1024
"""The form of a bulk action has some 11 bytes per covered transaction."""
_FORM = "application/x-www-form-urlencoded"
_FIELDS_MAX = 50
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not `no-referrer`: browsers would then send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOR_GOOD = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class PageRequest:
    """A request for a page, or a form."""

    http: web.Request
    context: ApiContext
    visitor: Visitor
    cookies: VisitorCookies
    principal: Principal = ANYBODY
    form: Mapping[str, str] = field(default_factory=dict)

    @property
    def query(self) -> dict[str, str]:
        """The fields of the query, the first of repeated ones."""
        return {name: self.http.query.getall(name)[0] for name in self.http.query}

    @property
    def secure(self) -> bool:
        """True if the browser uses TLS, so that cookies are restricted to it."""
        return _is_secure(self.http)


Finish = Callable[[web.Response], None]


@dataclass(frozen=True)
class HtmlPage:
    """A page to render. `finish` is called with the response, to set cookies."""

    template: str
    values: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200
    finish: Finish | None = None


@dataclass(frozen=True)
class Redirect:
    """A redirect to another page."""

    to: str
    finish: Finish | None = None


Handler = Callable[[PageRequest], Awaitable[HtmlPage | Redirect]]


@dataclass(frozen=True)
class Route:
    """A page or form. `open`: no login needed."""

    method: str
    path: str
    run: Handler
    open: bool = False
    roles: tuple[Role, ...] = READERS


@dataclass(frozen=True)
class _Asset:
    name: str
    content: bytes
    media: str
    digest: str


def _assets() -> dict[str, _Asset]:
    assets = {}
    for file in (resources.files(__package__ or "") / "static").iterdir():
        media = _TYPES.get(file.name[file.name.rfind(".") :])
        if media is not None:
            content = file.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:16]
            assets[file.name] = _Asset(file.name, content, media, digest)
    return assets


class Console:
    """The pages of one proxy."""

    def __init__(self, context: ApiContext, guard: Guard, pages: Sequence[Route]) -> None:
        self._context = context
        self._pages = pages
        self._guard = guard
        self._cookies = VisitorCookies(guard)
        self._assets = _assets()
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader(__package__ or ""),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(formatting.FILTERS)
        self._templates.globals.update(
            asset=self._asset_link,
            count=formatting.count,
            link=formatting.link,
            query_of=Filter.query,
            state_text=formatting.STATE_TEXT,
            version=__version__,
        )

    def routes(self) -> list[tuple[str, str, Callable[[web.Request], Awaitable[web.Response]]]]:
        """Return method, path and handler of every page."""
        routes = [(route.method, route.path, self._handler(route)) for route in self._pages]
        routes += [("HEAD", path, run) for method, path, run in routes if method == "GET"]
        return [*routes, ("GET", "/static/{digest}/{name}", self._static)]

    # --- one page ----------------------------------------------------------------------------

    def _handler(self, route: Route) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            visitor = self._cookies.visitor(request)
            body = BodyReader(self._context.limits, prepare=False)
            try:
                self._guard.admit_page(request)
                if not (visitor.admitted or route.open):
                    return self._to_login(request, visitor)
                principal = visitor.principal or ANYBODY
                if not route.open:
                    principal.check_role(route.roles)
                form = {}
                if route.method == "POST":
                    form = await _read_form(request, body)
                    visitor.check_form(form.pop(FORM_FIELD, ""))
                reply = await route.run(
                    PageRequest(request, self._context, visitor, self._cookies, principal, form)
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
                    where=raised_at(error),
                )
                return self._failed(request, visitor, RequestError(INTERNAL_ERROR))
            finally:
                body.release()
            return self._answer(request, visitor, reply)

        return handle

    def _answer(
        self, request: web.Request, visitor: Visitor, reply: HtmlPage | Redirect
    ) -> web.Response:
        if isinstance(reply, Redirect):
            response = web.Response(status=303, headers={**_HEADERS, "Location": reply.to})
        else:
            response = self._rendered(request, visitor, reply)
        self._cookies.remember(response, visitor, secure=_is_secure(request))
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
                "now_ms": self._context.service.now_ms(),
                **page.values,
            }
        )
        return web.Response(
            status=page.status, text=text, content_type="text/html", headers=_HEADERS
        )

    def _failed(
        self, request: web.Request, visitor: Visitor, error: RequestError | KafkaUnavailable
    ) -> web.Response:
        if isinstance(error, KafkaUnavailable):
            error = KafkaDown(str(error))
        values = {"error": error, "retry": request.method == "GET" and error.retryable}
        response = self._answer(request, visitor, HtmlPage("error.html", values, error.status))
        if error.retryable:
            response.headers["Retry-After"] = "1"
        return response

    def _to_login(self, request: web.Request, visitor: Visitor) -> web.Response:
        here = request.path_qs if request.method in ("GET", "HEAD") else "/"
        if request.method == "GET" and request.headers.get("Sec-Fetch-Site") == "cross-site":
            # After a link on another site the browser withholds our cookie. A redirect page of ours
            # to the same path makes the browser send it.
            return self._answer(request, visitor, HtmlPage("again.html", {"here": here}))
        return self._answer(request, visitor, Redirect(formatting.link("/login", next=here)))

    # --- assets ------------------------------------------------------------------------------

    def _asset_link(self, name: str) -> str:
        return f"/static/{self._assets[name].digest}/{name}"

    async def _static(self, request: web.Request) -> web.Response:
        asset = self._assets.get(request.match_info["name"])
        if asset is None:
            raise NotFound("there is no such file: reload the page")
        # During an upgrade, a page of another build may request another version.
        current = request.match_info["digest"] == asset.digest
        headers = {
            "Cache-Control": _FOR_GOOD if current else "no-cache",
            "X-Content-Type-Options": "nosniff",
        }
        return web.Response(
            body=asset.content, content_type=asset.media, charset="utf-8", headers=headers
        )


def _is_secure(request: web.BaseRequest) -> bool:
    """Return True if the browser uses TLS, to this proxy or to a reverse proxy before it."""
    return request.secure or request.headers.get("X-Forwarded-Proto", "").lower() == "https"


async def _read_form(request: web.Request, body: BodyReader) -> dict[str, str]:
    if request.content_type != _FORM:
        raise UnsupportedMediaType("not a form: send the form from the console's own page")
    small = (request.content_length or 0) <= FORM_BYTES_MAX
    raw = await body.read(request) if small else b""
    if not small or len(raw) > FORM_BYTES_MAX:
        raise TooLarge(f"the form exceeds {FORM_BYTES_MAX} bytes: select fewer transactions")
    try:
        return dict(
            parse_qsl(
                raw.decode(), keep_blank_values=True, max_num_fields=_FIELDS_MAX, errors="strict"
            )
        )
    except ValueError:
        raise BadRequest("cannot decode the form: send it from the console's page") from None
