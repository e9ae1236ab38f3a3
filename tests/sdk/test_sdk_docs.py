"""The code of `docs/how-to/write-a-check.md` runs as it stands, against a fake proxy."""

import asyncio
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.sdk.fake_proxy import FakeCluster
from txbroker.contract.signing import secret_key, sign
from txbroker.core.records import Decision, Message
from txbroker.sdk import CheckRequest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-check.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORDERS_CHECK_SECRET", "whsec_c2VjcmV0")
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) == 4
    return "\n".join(blocks)


async def test_the_page_runs(
    page: str, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = await cluster.proxy()
    names: dict[str, Any] = {}
    exec(compile(page.replace("http://127.0.0.1:8470", proxy.url), str(PAGE), "exec"), names)

    await names["main"]()
    assert capsys.readouterr().out.split() == ["commit", "committed", "rollback"]

    await asyncio.to_thread(names["buy"], "order-3", 7)
    await asyncio.to_thread(names["producer"].drain)
    with sqlite3.connect("shop.db") as connection:
        placed = [row[0] for row in connection.execute("SELECT id FROM orders ORDER BY id")]
    assert placed == ["order-1", "order-3"]
    committed = [t for t in cluster.transactions.values() if t.decision is Decision.COMMIT]
    assert [t.messages[0].key for t in committed] == [b"order-1", b"order-3"]

    question = CheckRequest(
        committed[0].prepare.id, "orders", 1, 15, "due", 0.0, (Message("payments", b"k", b"draft"),)
    )
    answer = await names["check_order"](question)
    assert answer.messages == (Message("payments", b"k", b"final"),)
    await _ask_over_http(names, committed[0].prepare.id)


async def _ask_over_http(names: dict[str, Any], transaction_id: str) -> None:
    body = (
        b'{"id": "%s", "group": "orders", "attempt": 1, "attempts_max": 15, "reason": "due",'
        b' "prepared_at": "2024-01-01T00:00:00Z", "messages": []}' % transaction_id.encode()
    )
    now = int(time.time())
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(now),
        "webhook-signature": sign(secret_key(names["SECRET"]), "msg_1", now, body),
    }
    async with TestClient(TestServer(names["app"])) as client:
        good = await client.post("/txbroker/check", data=body, headers=headers)
        decided = {"id": transaction_id, "decision": "commit"}
        assert (good.status, await good.json()) == (200, decided)
        forged = await client.post("/txbroker/check", data=body + b" ", headers=headers)
        assert forged.status == 401
        unsigned = await client.post("/txbroker/check", data=body)
        assert unsigned.status == 401
