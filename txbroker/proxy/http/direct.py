"""Calls that a connection knows by their path and answers without the web framework's layers.

The framework reads every request and keeps each connection's order; its router, middlewares and
responses take most of the time of a small call. A path that is written as declared, and nothing
else, is found here; any other spelling of it goes to the router, which ends at the same endpoint.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from aiohttp import hdrs, web
from aiohttp.http import RawRequestMessage
from aiohttp.web_request import BaseRequest

from txbroker.principals import Principal
from txbroker.proxy.forwarding import CALLER
from txbroker.proxy.http.guards import Guard
from txbroker.proxy.http.operations import Answered, Operation

Endpoint: TypeAlias = Callable[[web.BaseRequest, Mapping[str, str], Principal], Awaitable[Answered]]
"""Carries a call out whose caller is admitted; takes the request, its path's names and the caller.
"""
Refusal: TypeAlias = Callable[[web.BaseRequest, Exception], Answered]
"""Returns what goes back of a call that ended with an error."""

_NAME = re.compile(r"\{(\w+)\}")
_PLAIN = "([0-9A-Za-z]+)"


class DirectRequest(BaseRequest):
    """A request whose endpoint is known.

    Attributes:
        endpoint: of its operation.
        names: what its path names.
    """

    ATTRS = BaseRequest.ATTRS | frozenset(("endpoint", "names"))

    endpoint: Endpoint
    names: Mapping[str, str]


class DirectCalls:
    """The calls of one address that need no router.

    Args:
        guard: admits callers.
        endpoints: of its direct operations.
        refusal: makes the answer of an error.
    """

    def __init__(
        self, guard: Guard, endpoints: Sequence[tuple[Operation, Endpoint]], refusal: Refusal
    ) -> None:
        self._guard = guard
        self._refusal = refusal
        self._endpoints = {
            (each.method, each.name): (endpoint, tuple(_NAME.findall(each.path)))
            for each, endpoint in endpoints
        }
        self._path = re.compile(
            "|".join(f"(?P<{each.name}>{_NAME.sub(_PLAIN, each.path)})" for each, _ in endpoints)
        )

    def request(self, message: RawRequestMessage, *made_of: Any) -> DirectRequest | None:
        """Return the request of a call that is answered here, None for any other.

        Args:
            made_of: what a request is made of beside its head.
        """
        match = self._path.fullmatch(message.path)
        if match is None or match.lastgroup is None or match.lastindex is None:
            return None
        found = self._endpoints.get((message.method, match.lastgroup))
        # What asks the server for more than an answer is the framework's.
        if found is None or message.upgrade or hdrs.EXPECT in message.headers:
            return None
        request = DirectRequest(message, *made_of)
        request.endpoint, names = found
        first = match.lastindex
        request.names = {name: match[first + n] for n, name in enumerate(names, 1)}
        return request

    async def answer(self, request: DirectRequest) -> Answered:
        """Admit the caller and carry the call out."""
        try:
            principal = self._guard.admit(request)
            CALLER.set(principal.counted_as)
            return await request.endpoint(request, request.names, principal)
        except ConnectionError:
            raise
        except Exception as error:
            return self._refusal(request, error)
