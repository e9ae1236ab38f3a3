"""What goes on at the other proxies: whom they can ask, and who of them does not answer."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from tests.kit.http_api import running_api
from txbroker.checkers.leases import PeerIdentity, PeerSessions
from txbroker.proxy.cluster.peer_watcher import SILENT_LOOKS, PeerWatcher
from txbroker.proxy.cluster.peers import Peers

ME = "http://proxy-b:8470"


async def test_proxy_with_wrong_peer_secret_is_logged_once(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("the secret there")
    file.chmod(0o600)
    secret = "another"
    async with running_api(peer_secret_file=file) as api:
        others = [api.url]
        peers = Peers(PeerIdentity(lambda: ME, lambda: secret))
        roster = PeerWatcher(peers, PeerSessions(PeerIdentity(lambda: ME)), lambda: others)
        with capture_logs() as logs:
            for _ in range(SILENT_LOOKS - 1):
                await roster._look(api.url)
            assert logs == []
            for _ in range(SILENT_LOOKS):
                await roster._look(api.url)
            assert [line["event"] for line in logs] == ["proxy does not answer"]
            assert "it answered 403 not_a_peer" in logs[0]["why"]
            secret = "the secret there"
            for _ in range(2):
                await roster._look(api.url)
            assert [line["event"] for line in logs[1:]] == ["proxy answers again"]
        await peers.close()


async def test_removed_proxy_is_not_missed() -> None:
    others = ["http://127.0.0.1:1"]
    peers = Peers(PeerIdentity(lambda: ME))
    roster = PeerWatcher(peers, PeerSessions(PeerIdentity(lambda: ME)), lambda: others)
    with capture_logs() as logs:
        await roster._look("http://127.0.0.1:1")
        others.clear()
        roster.changed()
        for _ in range(SILENT_LOOKS):
            await roster._look("http://127.0.0.1:1")
    assert logs == []
    assert not roster._silent
    await peers.close()
