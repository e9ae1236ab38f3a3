"""A request as a connection has read it: what of it guards and endpoints look at."""

import asyncio
from typing import TypeAlias

from aiohttp import web
from msgspec import Struct
from multidict import CIMultiDict


class DirectRequest(Struct, frozen=True):
    """The head of a call that needs no router; its body comes apart from it.

    Attributes:
        remote: the caller's address.
    """

    method: str
    path: str
    headers: CIMultiDict[str]
    transport: asyncio.Transport
    remote: str


AnyRequest: TypeAlias = web.BaseRequest | DirectRequest
"""A request, whichever way it came."""
