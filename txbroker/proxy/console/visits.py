"""Who is there: the login, the cookie that remembers it, and the secret in each form.

Nothing is kept in the proxy. The cookie of a login is signed with a key made from the token, so
any proxy with the same token file takes it, and a new token ends every login.
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

from txbroker.errors import Forbidden
from txbroker.proxy.http.guards import Guard, Token

LOGIN_S = 12 * 3600
"""How long a login holds, seconds: a shift."""
NAME_MAX = 100
SESSION_COOKIE = "txbroker_session"
VISIT_COOKIE = "txbroker_visit"
NAME_COOKIE = "txbroker_name"
NAME_S = 90 * 86400
FORM_FIELD = "form_secret"
_SECRET_BYTES = 16
_SECRET = re.compile(f"[0-9a-f]{{{2 * _SECRET_BYTES}}}")


@dataclass(frozen=True)
class Visitor:
    """Whoever asks for a page.

    Attributes:
        admitted: False where a login is needed first.
        name: what the visitor said to be called, "" for nothing.
        secret: known to this visitor's browser alone.
        new: True where the browser has not been given the secret yet.
        logged_in: True where there is a login that can be ended.
    """

    admitted: bool
    name: str
    secret: str
    new: bool = False
    logged_in: bool = False

    @property
    def form_secret(self) -> str:
        """What each form carries. It tells nothing of the cookie that it is made from."""
        return hmac.digest(self.secret.encode(), b"form", hashlib.sha256).hex()

    def check_form(self, given: str) -> None:
        """Refuse a form that was not made for this visitor.

        Raises:
            Forbidden: says what to do.
        """
        if self.new or not hmac.compare_digest(given.encode(), self.form_secret.encode()):
            raise Forbidden(
                "this form was made for another visit, or cookies are off: "
                "open the page again and send it from there"
            )


class Visits:
    """Knows visitors by their cookies.

    Args:
        guard: knows the token, if there is one.
        now_s: the time, seconds since 1970.
    """

    def __init__(self, guard: Guard, now_s: Callable[[], float] = time.time) -> None:
        self._guard = guard
        self._now_s = now_s

    def visitor(self, request: web.BaseRequest) -> Visitor:
        """Return who asks."""
        token = self._guard.token
        if token is not None:
            found = self._logged_in(token, request.cookies.get(SESSION_COOKIE, ""))
            if found is not None:
                return found
        known = request.cookies.get(VISIT_COOKIE, "")
        new = _SECRET.fullmatch(known) is None
        secret = secrets.token_hex(_SECRET_BYTES) if new else known
        admitted = token is None or self._bears(token, request)
        return Visitor(admitted, _read_name(request.cookies.get(NAME_COOKIE, "")), secret, new)

    def _bears(self, token: Token, request: web.BaseRequest) -> bool:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and token.matches(given.strip())

    def _logged_in(self, token: Token, cookie: str) -> Visitor | None:
        """Return the visitor of a login's cookie, None where it is none of ours or over."""
        content, _, signature = cookie.rpartition(".")
        expected = _sign(token, content)
        if not hmac.compare_digest(signature.encode(errors="surrogateescape"), expected.encode()):
            return None
        until_s, secret, name = content.split(".")
        if int(until_s) <= self._now_s():
            return None
        return Visitor(True, _read_name(name), secret, logged_in=True)

    def is_token(self, given: str) -> bool:
        """Say whether this is the token of the token file."""
        token = self._guard.token
        return token is not None and token.matches(given)

    def remember(self, response: web.Response, visitor: Visitor, *, secure: bool) -> None:
        """Give a new visitor the secret."""
        if visitor.new:
            _set(response, VISIT_COOKIE, visitor.secret, secure=secure)

    def remember_name(self, response: web.Response, name: str, *, secure: bool) -> None:
        """Keep what a visitor without a login is called, to fill in the next form."""
        _set(response, NAME_COOKIE, _write_name(name), max_age=NAME_S, secure=secure)

    def log_in(self, response: web.Response, name: str, *, secure: bool) -> None:
        """Begin a login; the token was given and is right."""
        token = self._guard.token
        if token is None:
            return
        until_s = int(self._now_s()) + LOGIN_S
        content = f"{until_s}.{secrets.token_hex(_SECRET_BYTES)}.{_write_name(name)}"
        cookie = f"{content}.{_sign(token, content)}"
        _set(response, SESSION_COOKIE, cookie, max_age=LOGIN_S, secure=secure)

    def log_out(self, response: web.Response) -> None:
        """End a login."""
        response.del_cookie(SESSION_COOKIE, path="/", httponly=True, samesite="Strict")


def _sign(token: Token, content: str) -> str:
    key = hashlib.sha256(b"txbroker console\0" + token.text().encode()).digest()
    return hmac.digest(key, content.encode(errors="surrogateescape"), hashlib.sha256).hex()


def _set(
    response: web.Response, name: str, value: str, *, max_age: int | None = None, secure: bool
) -> None:
    response.set_cookie(
        name, value, path="/", max_age=max_age, httponly=True, samesite="Strict", secure=secure
    )


def _write_name(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _read_name(written: str) -> str:
    """Return a name as it was given; "" for what is none: that cookie is not signed."""
    try:
        raw = base64.urlsafe_b64decode(written[: 8 * NAME_MAX] + "==")
        name = raw.decode()
    except (binascii.Error, ValueError):
        return ""
    return name if name.isprintable() and len(name) <= NAME_MAX else ""
