"""Commands and the doctor over TLS, in separate processes as for users."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.kit.cli import TXBROKER, Result
from tests.tls.tls_world import ADMIN_TOKEN, TlsHarness
from txbroker.cli.doctor.subject import HttpProxies, Unavailable
from txbroker.net.tls import ClientTls, TlsFiles

pytestmark = [pytest.mark.needs_tool("openssl")]


async def command(*words: str | Path, home: Path, **environ: str | Path) -> Result:
    variables = {f"TXBROKER_{name.upper()}": str(value) for name, value in environ.items()}
    process = await asyncio.create_subprocess_exec(
        TXBROKER, *map(str, words),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
    )  # fmt: skip
    out, err = await process.communicate()
    return Result(process.returncode or 0, out.decode(), " ".join(err.decode().split()))


async def test_commands_find_certificates_in_each_source(world: TlsHarness, tmp_path: Path) -> None:
    own: dict[str, str | Path] = {
        "ca_file": world.ours.cert,
        "client_cert_file": world.client.cert,
        "client_key_file": world.client.key,
        "token_file": world.files.admin_token,
    }
    options: list[str | Path] = []
    for name, value in own.items():
        options += [f"--{name.replace('_', '-')}", value]
    async with world.mutual(**world.apart) as proxy:
        where = ("--url", proxy.admin_url)
        listing = ("tx", "list", "-o", "json")
        by_option, by_variable, made = await asyncio.gather(
            command(*listing, *where, *options, home=tmp_path),
            command(*listing, *where, home=tmp_path, **own),
            command("context", "set", "x", *where, *options, "--use", home=tmp_path),
        )
        assert (by_option.code, by_option.out.strip()) == (0, "[]"), by_option
        assert by_variable == by_option
        assert made.code == 0
        assert (await command(*listing, home=tmp_path)).out.strip() == "[]"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "its authority's with --ca-file"),
        ({"ca_file": "others"}, "its certificate is not trusted"),
        ({"ca_file": "ours"}, "Name one by --client-cert-file"),
        ({"ca_file": "missing"}, "--ca-file /nowhere/ca.crt: No such file or directory"),
    ],
    ids=["none", "other", "no certificate", "missing"],
)
async def test_command_reports_reason_and_next_step(
    world: TlsHarness, tmp_path: Path, own: dict[str, str], expected: str
) -> None:
    named = {
        "others": world.others.cert,
        "ours": world.ours.cert,
        "missing": Path("/nowhere/ca.crt"),
    }
    async with world.mutual() as proxy:
        done = await command(
            "tx", "list", home=tmp_path, url=proxy.url,
            **{name: named[value] for name, value in own.items()},
        )  # fmt: skip
        assert done.code != 0
        assert expected in done.err
        assert "Traceback" not in done.err


async def test_command_at_main_address_names_the_admin_address(
    world: TlsHarness, tmp_path: Path
) -> None:
    async with world.proxy(admin_listen="127.0.0.1:0") as proxy:
        done = await command("tx", "list", home=tmp_path, url=proxy.url, ca_file=world.ours.cert)
        assert done.code == 1
        assert "(admin_only). Name the admin address by --url" in done.err


async def test_doctor_uses_every_admin_address(world: TlsHarness) -> None:
    async with world.mutual(**world.apart) as proxy:
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        tls = ClientTls(TlsFiles(world.ours.cert, *world.client))
        seen = HttpProxies([proxy.admin_url], headers, tls)
        blind = HttpProxies([proxy.admin_url], headers)
        try:
            overview, _ = await seen.overview()
            (shown,) = overview.proxies
            assert (await seen.ready(shown.admin_url)).ready
            assert "txbroker_" in await seen.metrics(shown.admin_url)
            with pytest.raises(Unavailable, match="--ca-file"):
                await blind.overview()
        finally:
            seen.close()
            blind.close()
