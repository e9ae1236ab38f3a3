"""A request as a connection has read it: what of it guards and endpoints look at."""

import asyncio
from typing import TypeAlias

from aiohttp import web
from aiohttp.helpers import HeadersMixin
from multidict import CIMultiDict


class Posted(HeadersMixin):
    """The head of a call that needs no router; its body comes apart from it.

    Attributes:
        remote: the caller's address.
    """

    def __init__(
        self,
        method: str,
        path: str,
        headers: CIMultiDict[str],
        transport: asyncio.Transport,
        remote: str,
    ) -> None:
        self.method = method
        self.path = path
        self.headers = self._headers = headers
        self.transport = transport
        self.remote = remote


Received: TypeAlias = web.BaseRequest | Posted
"""A request, whichever way it came."""
