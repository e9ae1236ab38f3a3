"""What the page on securing the listener shows, done as it is written there."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kit.command_lines import parsed
from tests.kit.secret_files import secret_file
from tests.kit.until import until
from tests.tls.tls_world import TlsHarness, curl
from txbroker.config.settings import Settings
from txbroker.proxy.http.api import operations

PAGE = Path(__file__).parents[2] / "docs/how-to/secure-the-listener.md"
pytestmark = [pytest.mark.needs_tool("openssl"), pytest.mark.needs_tool("curl")]


def blocks(kind: str) -> list[str]:
    """Return the page's fenced blocks of a kind."""
    found = re.findall(r"^```([a-z]*)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return [text for name, text in found if name == kind]


def settings_of(block: str) -> dict[str, Any]:
    """Return the settings with which a block starts a proxy."""
    line = block.replace("\\\n", " ").splitlines()[0]
    _, context = parsed(shlex.split(line)[1:])
    found = {
        name: value
        for name, value in context.params.items()
        if name in Settings.model_fields and value not in (None, ())
    }
    context.close()
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which all that the page makes by openssl is there."""
    monkeypatch.chdir(tmp_path)
    for block in blocks("bash"):
        subprocess.run(["bash", "-ec", block], check=True, capture_output=True, timeout=60)
    secret_file(tmp_path / "admin-token", "of-operators-alone\n")
    secret_file(tmp_path / "peer-secret", "of-proxies-alone\n")
    return tmp_path


async def test_page_commands_complete_a_transaction(world: TlsHarness, folder: Path) -> None:
    world.kafka.create_topic("payments", 1)
    token = (folder / "token").read_text().strip()
    program: dict[str, Any] = {}
    exec("\n".join(blocks("python")), program)
    proxies = [block for block in blocks("") if block.startswith("txbroker proxy ")]
    assert len(proxies) == 2
    for number, block in enumerate(proxies):
        given = settings_of(block)
        assert given.pop("advertise").startswith("https://")
        given.pop("kafka")
        given["listen"] = "127.0.0.1:0"
        if given.pop("admin_listen", None):
            given["admin_listen"] = "127.0.0.1:0"
        async with world.running(f"docs-{number}", **given) as proxy:
            await program["send"](proxy.url, token)
            bearer = "of-operators-alone" if proxy.admin_url else token
            words = ["--cacert", "ca.crt", "-H", f"authorization: Bearer {bearer}"]
            listed = await curl(f"{proxy.admin_url or proxy.url}/v1/transactions", *words)
            assert listed.status == 200
    await until(lambda: len(world.kafka.visible("payments", 0)) == len(proxies))


def test_table_of_addresses_matches_operations() -> None:
    text = PAGE.read_text()
    rows = re.findall(r"^\| (.*?) ?\| (.*?) \|$", text.partition("## Operators apart")[2], re.M)
    paths = {path for own, _ in rows for path in re.findall(r"`(/[a-z0-9/.]+)`", own)}
    admin = {path for _, other in rows for path in re.findall(r"`(/[a-z0-9/.]+)`", other)}
    at = {one.path: one.admin for one in operations()}
    assert {at[path] for path in paths} == {False}
    assert {at[path] for path in admin} == {True}
