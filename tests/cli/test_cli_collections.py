"""How often Python looks for garbage while a proxy runs."""

from __future__ import annotations

import gc

from txbroker.cli.proxy.serving import rare_collections


def test_collections_are_rare_only_while_proxy_runs() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.isenabled()
        assert gc.get_threshold()[0] >= 20 * before[0]
        assert gc.get_threshold()[1:] == before[1:]
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
