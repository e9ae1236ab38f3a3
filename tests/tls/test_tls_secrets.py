"""A token is nowhere to be read: planted ones are looked for in all that a proxy shows."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from tests.kit.memory import MemoryHarness
from tests.tls.tls_world import ADMIN_TOKEN, TOKEN, Files, curl, mutual, running, trusting
from txbroker.cli.doctor.bundle import known_secrets, settings_shown
from txbroker.config.settings import load_settings
from txbroker.proxy.http.guards import Guard, load_secret
from txbroker.proxy.observe.logging import configure_logging

pytestmark = [pytest.mark.needs_tool("openssl"), pytest.mark.needs_tool("curl")]


async def test_log_and_answers_have_no_token_or_key(
    world: MemoryHarness, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("json", "debug")
    logging.getLogger("aiohttp").setLevel(logging.DEBUG)
    settings = mutual(
        files,
        token_file=files.token,
        admin_token_file=files.admin_token,
        admin_listen="127.0.0.1:0",
    )
    shown = []
    async with running(world, **settings) as proxy:
        own = trusting(files, shown=files.client, token=ADMIN_TOKEN)
        for path in ("/metrics", "/v1/overview", "/readyz", "/v1/openapi.json", "/", "/nowhere"):
            shown.append((await curl(proxy.admin_url + path, *own)).body)
        swapped = trusting(files, shown=files.client, token=TOKEN)
        shown.append((await curl(f"{proxy.admin_url}/metrics", *swapped)).body)
        shown.append((await curl(f"{proxy.url}/v1/groups/orders", *own)).body)
        shown.append(repr(proxy))
        files.admin_token.write_text(f"{ADMIN_TOKEN}\n")
        shown.append((await curl(f"{proxy.admin_url}/metrics", *own)).body)
    output = capsys.readouterr()
    assert '"event": "ready"' in output.err  # the log was captured
    shown += [output.out, output.err]
    key_lines = files.proxy.key.read_text().splitlines()[1:-1]
    for secret in (TOKEN, ADMIN_TOKEN, *key_lines):
        assert not [text for text in shown if secret in text]


def test_repr_of_settings_and_guards_has_no_token(files: Files) -> None:
    settings = load_settings(
        mutual(
            files,
            token_file=files.token,
            admin_token_file=files.admin_token,
            admin_listen="127.0.0.1:0",
        ),
        environ={},
    )
    token = load_secret("admin_token_file", files.admin_token)
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
