"""Secrets of groups: how they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from txbroker.checkers.group_secrets import SECRET_BYTES_MAX, GroupSecrets, SecretUnavailable


async def test_secret_is_read_at_each_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORDERS_SECRET", "geheim ü")
    secrets = GroupSecrets(tmp_path, ["ORDERS_SECRET"])
    assert await secrets.read("orders", "env:ORDERS_SECRET") == "geheim ü".encode()
    path = tmp_path / "orders"
    for content, key in ((b"one\r\n", b"one"), (b"two", b"two"), (b"whsec_dHdv\n", b"two")):
        path.write_bytes(content)
        assert await secrets.read("orders", f"file:{path}") == key


async def test_missing_secret_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SECRET", raising=False)
    secrets = GroupSecrets(tmp_path, ["NO_SECRET"])
    with pytest.raises(SecretUnavailable, match="variable NO_SECRET is not set or empty"):
        await secrets.read("orders", "env:NO_SECRET")
    (tmp_path / "orders").mkdir()
    for name, content, words in (
        ("none", None, "cannot be read: No such file"),
        ("empty", b"\n", "not set or empty"),
        ("large", b"x" * (SECRET_BYTES_MAX + 1), "too large for a secret"),
        ("cut", b"whsec_dHd", "cut does not hold a secret: "),
        ("nothing", b"whsec_", "nothing does not hold a secret: "),
    ):
        if content is not None:
            (tmp_path / "orders" / name).write_bytes(content)
        with pytest.raises(SecretUnavailable, match=words):
            await secrets.read("orders", f"file:{tmp_path}/orders/{name}")


async def test_secret_in_kubernetes_mount_is_read(tmp_path: Path) -> None:
    """Keys are links to `..data`, which is a link to a folder that is replaced as a whole."""
    mount = tmp_path / "groups"
    (mount / "..2026_11_23").mkdir(parents=True)
    (mount / "..2026_11_23" / "orders").write_bytes(b"one")
    (mount / "..data").symlink_to("..2026_11_23")
    (mount / "orders").symlink_to("..data/orders")
    secrets = GroupSecrets(mount)
    assert await secrets.read("orders", f"file:{mount}/orders") == b"one"
    linked = tmp_path / "link"
    linked.symlink_to(mount)
    for spelled in (linked, mount):
        assert await GroupSecrets(linked).read("orders", f"file:{spelled}/orders") == b"one"
