"""Proxies with TLS on a Kafka in memory, and calls by curl, an independent client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.kit.memory import MemoryHarness
from tests.kit.until import until
from tests.tls.tls_files import Authority, Pair
from txbroker.config.settings import load_settings
from txbroker.proxy.process import Proxy, run_proxy
from txbroker.sdk import TransactionalProducer

Json = dict[str, Any]
BODY = {"group": "orders", "messages": [{"topic": "payments", "value": "42"}]}


class Files(NamedTuple):
    """What the tests of a session share.

    Attributes:
        ours: has signed the certificates of `proxy` and `client`.
        others: an authority that no party here trusts.
    """

    folder: Path
    ours: Authority
    others: Authority
    proxy: Pair
    client: Pair
    stranger: Pair
    token: Path
    admin_token: Path


TOKEN, ADMIN_TOKEN = "planted-token-of-producers", "planted-token-of-operators"


class Curled(NamedTuple):
    """The result of curl: exit code, status and body of the answer, error."""

    code: int
    status: int
    body: str
    complaint: str
    headers: str

    @property
    def json(self) -> Json:
        return dict(json.loads(self.body))

    @property
    def error(self) -> str:
        return str(self.json["error"]["code"])


async def curl(url: str, *words: str | Path, body: Json | None = None) -> Curled:
    """Call by curl, which trusts as `words` configure."""
    sent: list[str] = []
    if body is not None:
        sent = ["-H", "content-type: application/json", "-d", json.dumps(body)]
    command = ["-sS", "--max-time", "20", "-D", "/dev/stderr", "-w", "\n%{http_code}", *sent]
    process = await asyncio.create_subprocess_exec(
        "curl", *command, *map(str, words), url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = (stream.decode() for stream in await process.communicate())
    answer, _, status = out.rpartition("\n")
    lines = errors.splitlines()
    complaint = "\n".join(line for line in lines if line.startswith("curl:"))
    return Curled(process.returncode or 0, int(status or 0), answer, complaint, errors)


class TlsHarness(MemoryHarness):
    """A Kafka in memory, proxies with TLS on it, and calls by curl."""

    def __init__(self, files: Files) -> None:
        super().__init__()
        self.files = files
        self.ours, self.others = files.ours, files.others
        self.client, self.stranger = files.client, files.stranger
        self.secured: Json = {
            "listen": "127.0.0.1:0",
            "tls_cert_file": files.proxy.cert,
            "tls_key_file": files.proxy.key,
            "peers_ca_file": files.ours.cert,
        }
        """Settings of a proxy with TLS."""
        self.apart: Json = {
            "token_file": files.token,
            "admin_token_file": files.admin_token,
            "admin_listen": "127.0.0.1:0",
        }
        """Settings of two addresses and two tokens."""

    @asynccontextmanager
    async def running(
        self, instance: str = "one", partitions: int = 2, **settings: Any
    ) -> AsyncIterator[Proxy]:
        """Run a proxy until the block is left; it can take calls."""
        door = self.closed_door(instance, half_partitions=partitions, facts_ttl_s=0.2)
        given = load_settings({"instance": instance, **settings}, environ={})
        async with run_proxy(door, given) as proxy:
            await until(lambda: proxy.broker.readiness().ready)
            yield proxy

    def proxy(self, instance: str = "one", **more: Any) -> AbstractAsyncContextManager[Proxy]:
        """Run a proxy with TLS."""
        return self.running(instance, **{**self.secured, **more})

    def mutual(self, instance: str = "one", **more: Any) -> AbstractAsyncContextManager[Proxy]:
        """Run a proxy that asks for client certificates."""
        return self.proxy(instance, **{"tls_client_ca_file": self.files.ours.cert, **more})

    def producer(
        self, url: str, *, shown: Pair | None = None, **options: Any
    ) -> TransactionalProducer:
        """Return a producer that trusts our authority by default."""
        given = {"ca_file": self.files.ours.cert, **options}
        if shown is not None:
            given |= {"client_cert_file": shown.cert, "client_key_file": shown.key}
        return TransactionalProducer(url, group="orders", **given)

    async def curl(
        self,
        url: str,
        *words: str | Path,
        shown: Pair | None = None,
        token: str = "",
        body: Json | None = None,
    ) -> Curled:
        """Call by curl, which trusts our authority."""
        given: list[str | Path] = ["--cacert", self.files.ours.cert, *words]
        if shown is not None:
            given += ["--cert", shown.cert, "--key", shown.key]
        if token:
            given += ["-H", f"authorization: Bearer {token}"]
        return await curl(url, *given, body=body)
