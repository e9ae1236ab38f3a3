"""The console: pages at `/` that show pending transactions and resolve them.

- `site.py` renders whole pages (`templates/`, Jinja2 with autoescape) from the same `Service` as
  the HTTP API, so any proxy shows all proxies. There is no build step and no external resource;
  `static/` has one style sheet, one script and one icon, cached under the hash of their content.
- Everything works with plain links and forms. The script fetches the current page periodically and
  replaces the sections marked `data-live`.
- `concerns.py` shows the problems with which the overview begins, found by the table of diagnoses.
- `actions.py` previews an action (`GET /actions/…`), then does it (`POST`), with author and reason
  in the markers. A bulk action covers the matches of its preview, never later ones.
- `visitors.py` identifies visitors: with a token file by a login in a signed cookie, valid at every
  proxy with the same secret. Every form has a secret of its visitor, and the API's guard refuses
  cross-site calls and unknown host names here too.
"""

from collections.abc import Awaitable, Callable

from aiohttp import web

from txbroker.proxy.console import actions, group_pages, pages, search
from txbroker.proxy.console.site import Console
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.guards import Guard

__all__ = ["console_pages"]


def console_pages(
    context: ApiContext, guard: Guard
) -> list[tuple[str, str, Callable[[web.Request], Awaitable[web.Response]]]]:
    """Return method, path and handler of every page of the console."""
    routes = (*pages.ROUTES, *group_pages.ROUTES, *search.ROUTES, *actions.ROUTES)
    return Console(context, guard, routes).routes()
