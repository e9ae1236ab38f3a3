"""Calls of the API from a test that has no event loop."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send JSON; return the answer."""
    headers = {"content-type": "application/json"}
    request = Request(url, json.dumps(body).encode(), headers)
    with urlopen(request, timeout=20) as answer:
        return dict(json.load(answer))
