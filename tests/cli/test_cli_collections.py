"""How often Python looks for garbage while a proxy runs."""

from __future__ import annotations

import gc

from txbroker.cli.proxy.serving import rare_collections


def test_garbage_is_looked_for_rarely_while_a_proxy_runs_and_as_before_behind_it() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.isenabled()
        assert gc.get_threshold()[0] >= 20 * before[0]
        assert gc.get_threshold()[1:] == before[1:]
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
