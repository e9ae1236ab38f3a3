"""Visitors of the console: logins, their signed cookies, and the secret of each form.

The proxy stores no sessions. A login cookie is signed with a key derived from a secret that the
proxies share and the principal's tokens, so any proxy accepts it, and a new token ends every login.
"""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from txbroker.errors import Forbidden, Unauthorized
from txbroker.principals import Principal, digest_of
from txbroker.proxy.http.guards import Credential, Guard, credential_of

LOGIN_S = 12 * 3600
"""Validity of a login, seconds: a shift."""
NAME_MAX = 100
SESSION_COOKIE = "txbroker_session"
VISIT_COOKIE = "txbroker_visit"
NAME_COOKIE = "txbroker_name"
NAME_S = 90 * 86400
FORM_FIELD = "form_secret"
_SECRET_BYTES = 16
_COOKIE_PARTS = 4
_SECRET = re.compile(f"[0-9a-f]{{{2 * _SECRET_BYTES}}}")


@dataclass(frozen=True)
class Visitor:
    """A visitor of a page.

    Attributes:
        principal: None if a login is needed first.
        name: the name the visitor gave, or "".
        secret: known only to this visitor's browser.
        new: the browser does not have the secret yet.
        logged_in: there is a login to end.
    """

    principal: Principal | None
    name: str
    secret: str
    new: bool = False
    logged_in: bool = False

    @property
    def admitted(self) -> bool:
        """False if a login is needed first."""
        return self.principal is not None

    @property
    def form_secret(self) -> str:
        """The secret in each form; it does not reveal the cookie it is derived from."""
        return hmac.digest(self.secret.encode(), b"form", hashlib.sha256).hex()

    def check_form(self, given: str) -> None:
        """Refuse a form that was not rendered for this visitor."""
        if self.new or not hmac.compare_digest(given.encode(), self.form_secret.encode()):
            raise Forbidden(
                "this form belongs to another visit, or cookies are off: "
                "open the page again and send it from there"
            )


class VisitorCookies:
    """Identifies visitors by their cookies; `now_s` returns seconds since 1970."""

    def __init__(self, guard: Guard, now_s: Callable[[], float] = time.time) -> None:
        self._guard = guard
        self._now_s = now_s

    def visitor(self, request: web.BaseRequest) -> Visitor:
        """Return the visitor of a request."""
        visitor = self._logged_in(request.cookies.get(SESSION_COOKIE, ""))
        if visitor is not None:
            return visitor
        known = request.cookies.get(VISIT_COOKIE, "")
        new = _SECRET.fullmatch(known) is None
        secret = secrets.token_hex(_SECRET_BYTES) if new else known
        principal = self._known(credential_of(request))
        return Visitor(principal, _read_name(request.cookies.get(NAME_COOKIE, "")), secret, new)

    def _known(self, credential: Credential) -> Principal | None:
        try:
            return self._guard.known(credential)
        except Unauthorized:
            return None

    def _logged_in(self, cookie: str) -> Visitor | None:
        """Return the visitor of a login cookie, None if it is invalid or expired."""
        content, _, signature = cookie.rpartition(".")
        parts = content.split(".")
        if not self._guard.asks or len(parts) != _COOKIE_PARTS:
            return None
        until_s, secret, name, principal_name = parts
        principal = self._guard.named(_read_name(principal_name))
        if principal is None:
            return None
        expected = self._sign(principal, content)
        if not hmac.compare_digest(signature.encode(errors="surrogateescape"), expected.encode()):
            return None
        if int(until_s) <= self._now_s():
            return None
        return Visitor(principal, _read_name(name), secret, logged_in=True)

    def principal_of(self, token: str) -> Principal | None:
        """Return the principal of a token, None without one."""
        return self._known(Credential(digest_of(token), ())) if self._guard.asks else None

    def remember(self, response: web.Response, visitor: Visitor, *, secure: bool) -> None:
        """Set the secret's cookie for a new visitor."""
        if visitor.new:
            _set(response, VISIT_COOKIE, visitor.secret, secure=secure)

    def remember_name(self, response: web.Response, name: str, *, secure: bool) -> None:
        """Set a cookie with the name of a visitor without login, to prefill forms."""
        _set(response, NAME_COOKIE, _write_name(name), max_age=NAME_S, secure=secure)

    def log_in(
        self, response: web.Response, principal: Principal, name: str, *, secure: bool
    ) -> None:
        """Set the login cookie; the caller has verified the token."""
        until_s = int(self._now_s()) + LOGIN_S
        names = f"{_write_name(name)}.{_write_name(principal.name)}"
        content = f"{until_s}.{secrets.token_hex(_SECRET_BYTES)}.{names}"
        cookie = f"{content}.{self._sign(principal, content)}"
        _set(response, SESSION_COOKIE, cookie, max_age=LOGIN_S, secure=secure)

    def _sign(self, principal: Principal, content: str) -> str:
        key = self._guard.form_key(principal)
        return hmac.digest(key, content.encode(errors="surrogateescape"), hashlib.sha256).hex()

    def log_out(self, response: web.Response) -> None:
        """Delete the login cookie."""
        response.del_cookie(SESSION_COOKIE, path="/", httponly=True, samesite="Strict")


def _set(
    response: web.Response, name: str, value: str, *, max_age: int | None = None, secure: bool
) -> None:
    response.set_cookie(
        name, value, path="/", max_age=max_age, httponly=True, samesite="Strict", secure=secure
    )


def _write_name(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _read_name(written: str) -> str:
    """Return the name in an unsigned cookie, "" if it is malformed."""
    try:
        raw = base64.urlsafe_b64decode(written[: 8 * NAME_MAX] + "==")
        name = raw.decode()
    except (binascii.Error, ValueError):
        return ""
    return name if name.isprintable() and len(name) <= NAME_MAX else ""
