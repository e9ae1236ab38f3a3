"""Logging in with the proxy's token, and out again."""

from aiohttp import web

from txbroker.errors import Unauthorized
from txbroker.proxy.console.filters import AuditNote, convert
from txbroker.proxy.console.site import HtmlPage, PageRequest, Redirect, Route
from txbroker.proxy.console.visitors import NAME_MAX
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)


async def show_login(ask: PageRequest) -> HtmlPage | Redirect:
    """Show the form, or go on where a login is there already, or none is needed."""
    onward = _local(ask.query.get("next", "/"))
    if ask.visitor.admitted:
        return Redirect(onward)
    return _form(onward, ask.visitor.name)


async def do_login(ask: PageRequest) -> HtmlPage | Redirect:
    """Begin a login."""
    onward = _local(ask.form.get("next", "/"))
    name = convert({"by": ask.form.get("name", "").strip()}, AuditNote).by[:NAME_MAX]
    principal = ask.visits.principal_of(ask.form.get("token", "").strip())
    if principal is None:
        log.warning("console login refused", name=name, remote=ask.request.remote or "")
        return _form(onward, name, "This token is not valid here.")
    if not principal.shared:
        name = principal.name  # a credential that says who it is leaves nothing to claim
    log.info("console login", by=principal.name, name=name, remote=ask.request.remote or "")

    def log_in(response: web.Response) -> None:
        ask.visits.log_in(response, principal, name, secure=ask.secure)

    return Redirect(onward, log_in)


def _form(onward: str, name: str, problem: str = "") -> HtmlPage:
    values = {"next": onward, "name": name, "problem": problem}
    return HtmlPage("login.html", values, Unauthorized.status if problem else 200)


async def do_logout(ask: PageRequest) -> HtmlPage | Redirect:
    """End a login."""
    return Redirect("/login", ask.visits.log_out)


def _local(path: str) -> str:
    """Return a path of ours, so that no link to the login leads elsewhere."""
    plain = path.startswith("/") and not path.startswith("//")
    return path if plain and path.isprintable() and "\\" not in path else "/"


ROUTES = (
    Route("GET", "/login", show_login, open=True),
    Route("POST", "/login", do_login, open=True),
    Route("POST", "/logout", do_logout, open=True),
)
