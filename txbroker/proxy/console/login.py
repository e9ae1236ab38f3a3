"""Log in with a token, and log out."""

from aiohttp import web

from txbroker.errors import Unauthorized
from txbroker.proxy.console.filters import AuditNote, convert
from txbroker.proxy.console.site import HtmlPage, PageRequest, Redirect, Route
from txbroker.proxy.console.visitors import NAME_MAX
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)


async def show_login(request: PageRequest) -> HtmlPage | Redirect:
    """Show the login form; redirect a visitor who is logged in or needs no login."""
    onward = _local(request.query.get("next", "/"))
    if request.visitor.admitted:
        return Redirect(onward)
    return _form(onward, request.visitor.name)


async def do_login(request: PageRequest) -> HtmlPage | Redirect:
    """Log in."""
    onward = _local(request.form.get("next", "/"))
    name = convert({"by": request.form.get("name", "").strip()}, AuditNote).by[:NAME_MAX]
    principal = request.cookies.principal_of(request.form.get("token", "").strip())
    if principal is None:
        log.warning("console login refused", name=name, remote=request.http.remote or "")
        return _form(onward, name, "This token is not valid at this proxy.")
    if not principal.shared:
        name = principal.name  # the credential names its owner: ignore the claimed name
    log.info("console login", by=principal.name, name=name, remote=request.http.remote or "")

    def log_in(response: web.Response) -> None:
        request.cookies.log_in(response, principal, name, secure=request.secure)

    return Redirect(onward, log_in)


def _form(onward: str, name: str, problem: str = "") -> HtmlPage:
    values = {"next": onward, "name": name, "problem": problem}
    return HtmlPage("login.html", values, Unauthorized.status if problem else 200)


async def do_logout(request: PageRequest) -> HtmlPage | Redirect:
    """Log out."""
    return Redirect("/login", request.cookies.log_out)


def _local(path: str) -> str:
    """Return a local path, so that a login link cannot redirect to another site."""
    plain = path.startswith("/") and not path.startswith("//")
    return path if plain and path.isprintable() and "\\" not in path else "/"


ROUTES = (
    Route("GET", "/login", show_login, open=True),
    Route("POST", "/login", do_login, open=True),
    Route("POST", "/logout", do_logout, open=True),
)
