"""Calls of the HTTP API, as every harness of a proxy makes them."""

from __future__ import annotations

from typing import Any

from tests.kit.until import until
from txbroker.errors import RequestError, request_errors

Json = dict[str, Any]


class HttpCalls:
    """Calls about single transactions."""

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, Json]:
        """Return status and answer, of errors too."""
        raise NotImplementedError

    async def checked(self, method: str, path: str, body: Any = None) -> tuple[int, Json]:
        """Return status and answer of a call that succeeds.

        Raises:
            RequestError: the error of the answer, with its fields as `details`.
        """
        status, answer = await self.request(method, path, body)
        if "error" in answer:
            raise error_of(status, answer)
        return status, answer

    async def act(self, id: str, what: str, **fields: Any) -> Json:
        """POST `commit`, `rollback`, `check` or `revive`; return the answer."""
        return (await self.checked("POST", f"/v1/transactions/{id}/{what}", fields))[1]

    async def show(self, id: str, *, bodies: bool = False) -> Json:
        """Return the view of a transaction."""
        path = f"/v1/transactions/{id}" + ("?bodies=true" if bodies else "")
        return (await self.checked("GET", path))[1]

    async def reaches(self, id: str, state: str) -> Json:
        """Wait until a transaction is in a state; return its view."""

        async def there() -> Json | None:
            shown = await self.show(id)
            return shown if shown["state"] == state else None

        return dict(await until(there))


def error_of(status: int, answer: Json) -> RequestError:
    """Return the error that an answer names; it must be a known one with its own status."""
    fields = dict(answer["error"])
    error = request_errors()[fields.pop("code")](fields.pop("message"), **fields)
    assert status == error.status
    return error
