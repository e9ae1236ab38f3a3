"""The console: pages at `/` on which a person sees what is pending, why, and resolves it.

How it is made:

- The proxy renders whole pages (`templates/`, Jinja2 with autoescape) from the same `Service` that
  the HTTP API asks, so any proxy shows all of them. There is no build step and nothing from
  elsewhere; `static/` holds one style sheet, one script and one picture, cached for good under
  the hash of what is in them.
- Everything works with plain links and forms. The script makes it live: it fetches the page it is
  on once in a while and puts the sections marked `data-live` in place of the old ones.
- `concerns.py` says what is wrong, where, and what to do; the overview begins with it.
- What changes something is previewed first (`GET /actions/…`: how many, which, whose), then done
  (`POST`), with who and why in the markers. A bulk action covers what matched when it was
  previewed, never what came later.
- `visits.py` knows who is there: with a token file a login, kept in a signed cookie that any proxy
  with the same token takes. Every form carries a secret of its visitor, and the guard of the API
  refuses foreign pages and unknown host names here too.
"""

from collections.abc import Awaitable, Callable

from aiohttp import web

from txbroker.proxy.console import actions, login, pages
from txbroker.proxy.console.site import Console
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.guards import Guard

__all__ = ["console_pages"]


def console_pages(
    shell: ApiContext, guard: Guard
) -> list[tuple[str, str, Callable[[web.Request], Awaitable[web.Response]]]]:
    """Return method, path and handler of every page of the console.

    Args:
        shell: what calls share; its service answers for all proxies.
        guard: says who may call.
    """
    return Console(shell, guard, (*pages.ROUTES, *actions.ROUTES, *login.ROUTES)).routes()
