"""Whose instance id is whose: several proxies on one machine, and a proxy that was replaced."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cli.proxy_process import proxy_process
from tests.kit.cli import Dev
from txbroker.cli.proxy.instance import named
from txbroker.cli.run import CommandFailed
from txbroker.config.settings import load_settings
from txbroker.errors import ConfigurationError

FREE, ONE, OTHER = "127.0.0.1:0", "127.0.0.1:8470", "127.0.0.1:8471"


def begin(held: ExitStack, data_dir: Path, listen: str = ONE, instance: str = "") -> str:
    """Take an id as a proxy does that starts; return it."""
    options = {"data_dir": data_dir, "listen": listen, "instance": instance}
    return held.enter_context(named(load_settings(options, environ={}))).instance


def named_once(data_dir: Path, listen: str = ONE) -> str:
    with ExitStack() as held:
        return begin(held, data_dir, listen)


def test_each_address_keeps_its_id(tmp_path: Path) -> None:
    with ExitStack() as held:
        one, other = begin(held, tmp_path, ONE), begin(held, tmp_path, OTHER)
    assert one != other
    assert (named_once(tmp_path, OTHER), named_once(tmp_path, ONE)) == (other, one)
    assert named_once(tmp_path / "elsewhere") != one


def test_proxies_on_free_ports_keep_distinct_ids(tmp_path: Path) -> None:
    with ExitStack() as held:
        ids = [begin(held, tmp_path, FREE) for _ in range(3)]
    assert len(set(ids)) == 3
    with ExitStack() as held:
        assert [begin(held, tmp_path, FREE) for _ in range(3)] == ids


@pytest.mark.parametrize("given", ["", "shop-1", "odd/name é"], ids=["made", "given", "odd"])
def test_id_is_used_by_one_process_at_a_time(tmp_path: Path, given: str) -> None:
    with ExitStack() as held:
        name = begin(held, tmp_path, instance=given)
        with pytest.raises(ConfigurationError) as caught, ExitStack() as second:
            begin(second, tmp_path, instance=given)
        message = str(caught.value)
        assert f"process {os.getpid()} on " in message
        assert f"already runs as instance {name} in {tmp_path}" in message
        assert "--listen, --instance or --data-dir" in message
        begin(held, tmp_path, OTHER, "another")
        begin(held, tmp_path / "elsewhere", instance=given)
    with ExitStack() as held:
        assert begin(held, tmp_path, instance=given) == name


def test_first_proxy_keeps_the_older_versions_id(tmp_path: Path) -> None:
    (tmp_path / "instance").write_text("proxy-before\n")
    with ExitStack() as held:
        assert begin(held, tmp_path, ONE) == "proxy-before"
        assert begin(held, tmp_path, OTHER) != "proxy-before"
    # The id now belongs to the address.
    assert named_once(tmp_path, OTHER) != "proxy-before"
    assert named_once(tmp_path, ONE) == "proxy-before"


def test_older_versions_id_in_use_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "instance").write_text("proxy-before\n")
    with ExitStack() as held:
        begin(held, tmp_path, OTHER, "proxy-before")
        assert begin(held, tmp_path, ONE) != "proxy-before"


def test_a_given_id_needs_no_data_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with ExitStack() as held:
        assert begin(held, tmp_path / "file" / "below", instance="shop-1") == "shop-1"


@pytest.mark.parametrize("name", ["instance", "instances/127.0.0.1_8470.id"])
def test_damaged_id_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "instances").mkdir()
    (tmp_path / name).write_bytes(b"\xffproxy")
    with pytest.raises(CommandFailed) as caught:
        named_once(tmp_path)
    message = caught.value.message
    assert message.startswith(
        f"{tmp_path / name} should hold the proxy's name but is not UTF-8 text"
    )
    assert "delete it for a new name, or give the name as --instance" in message
    with ExitStack() as held:
        assert begin(held, tmp_path, instance="shop-1") == "shop-1"


def test_damaged_lock_file_still_locks(tmp_path: Path) -> None:
    with ExitStack() as held:
        name = begin(held, tmp_path)
        (tmp_path / "instances" / f"{name}.lock").write_bytes(b"\xff")
        with pytest.raises(ConfigurationError, match=f"runs as instance {name} in"):
            named_once(tmp_path)


def test_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(file: int, flags: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(CommandFailed) as caught:
        named_once(tmp_path)
    assert f"locked in {tmp_path}: No locks available" in caught.value.message
    assert "--data-dir, on a file system with locks, or the name" in caught.value.message
    with ExitStack() as held:
        assert begin(held, tmp_path, instance="shop-1") == "shop-1"


# --- whole processes -------------------------------------------------------------------------


async def test_two_proxies_with_default_settings_share_a_machine(dev: Dev, tmp_path: Path) -> None:
    words = ("--topic-prefix", "two", "--partitions", "2")
    async with (
        proxy_process(tmp_path, dev.kafka, *words) as first,
        proxy_process(tmp_path, dev.kafka, *words) as second,
    ):
        ids = [(await proxy.until("starting"))["instance"] for proxy in (first, second)]
        assert len(set(ids)) == 2
        assert len({await first.ready(), await second.ready()}) == 2
        again = ("--instance", ids[0])
        async with proxy_process(tmp_path, dev.kafka, *words, *again) as third:
            assert await third.ended() == 1
            assert f"Error: process {first.process.pid} on " in third.error
        first.process.kill()
        await first.ended()
        async with proxy_process(tmp_path, dev.kafka, *words, *again) as third:
            await third.ready()


async def problems_of(url: str) -> tuple[int, list[str]]:
    async with aiohttp.ClientSession() as client, client.get(f"{url}/readyz") as answer:
        found: dict[str, Any] = await answer.json()
        return answer.status, found.get("problems", [])


async def test_replaced_proxy_logs_its_successor(dev: Dev, tmp_path: Path) -> None:
    words = ("--topic-prefix", "replaced", "--partitions", "8", "--instance", "same")
    async with proxy_process(tmp_path / "first", dev.kafka, *words) as first:
        url = await first.ready()
        async with proxy_process(tmp_path / "second", dev.kafka, *words) as second:
            newer = await second.ready()
            message = await first.until("replaced")
            assert (message["level"], message["instance"]) == ("error", "same")
            assert (message["by"], message["host"]) == (newer, "127.0.0.1")
            status, problems = await problems_of(url)
            assert status == 503
            assert f"same is now the proxy at {newer}, from host 127.0.0.1" in problems[0]
            assert "stop one of them, or give it another --instance" in problems[0]
            second.process.terminate()
            assert await second.ended() == 0
        await first.until("ready")
        assert (await problems_of(url))[0] == 200
        assert len(first.events("replaced")) == 1
