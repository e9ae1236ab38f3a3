"""A token is nowhere to be read: planted ones are looked for in all that a proxy shows."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from tests.tls.tls_world import ADMIN_TOKEN, TOKEN, TlsHarness
from txbroker.cli.doctor.bundle import known_secrets, settings_shown
from txbroker.config.settings import load_settings
from txbroker.proxy.http.guards import Guard, load_secret
from txbroker.proxy.observe.logging import configure_logging

pytestmark = [pytest.mark.needs_tool("openssl"), pytest.mark.needs_tool("curl")]


async def test_log_and_answers_have_no_token_or_key(
    world: TlsHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("json", "debug")
    logging.getLogger("aiohttp").setLevel(logging.DEBUG)
    shown = []
    async with world.mutual(**world.apart) as proxy:

        async def show(url: str, token: str = ADMIN_TOKEN) -> None:
            shown.append((await world.curl(url, shown=world.client, token=token)).body)

        for path in ("/metrics", "/v1/overview", "/readyz", "/v1/openapi.json", "/", "/nowhere"):
            await show(proxy.admin_url + path)
        await show(f"{proxy.admin_url}/metrics", TOKEN)
        await show(f"{proxy.url}/v1/groups/orders")
        shown.append(repr(proxy))
        world.files.admin_token.write_text(f"{ADMIN_TOKEN}\n")
        await show(f"{proxy.admin_url}/metrics")
    output = capsys.readouterr()
    assert '"event": "ready"' in output.err  # the log was captured
    shown += [output.out, output.err]
    key_lines = world.files.proxy.key.read_text().splitlines()[1:-1]
    for secret in (TOKEN, ADMIN_TOKEN, *key_lines):
        assert not [text for text in shown if secret in text]


async def test_repr_of_settings_and_guards_has_no_token(world: TlsHarness) -> None:
    settings = load_settings({**world.secured, **world.apart}, environ={})
    token = load_secret("admin_token_file", world.files.admin_token)
    texts = [repr(settings), str(settings), settings.model_dump_json(), repr(token)]
    texts += [repr(vars(Guard(settings, admin=True)))]
    texts += [msgspec.json.encode(settings_shown(settings)).decode()]
    for secret in (TOKEN, ADMIN_TOKEN):
        assert not [text for text in texts if secret in text]
    # The doctor removes both from its bundle.
    assert {TOKEN, ADMIN_TOKEN} <= set(known_secrets(settings, ""))


def test_unreadable_token_is_reported_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xff\xfe planted")
    path.chmod(0o600)
    with pytest.raises(Exception, match=r"admin_token_file .* is not text") as caught:
        load_secret("admin_token_file", path)
    assert "planted" not in str(caught.value)
