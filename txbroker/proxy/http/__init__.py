"""The HTTP API and the SDK's sessions: two thin shells round a `Service`."""

from txbroker.proxy.http.api import make_admin_app, make_app, make_peer_app
from txbroker.proxy.http.server import serve

__all__ = ["make_admin_app", "make_app", "make_peer_app", "serve"]
