"""`txbroker send`, and what a consumer of another make then reads."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kit.cli import Call, Dev


def kcat(dev: Dev, topic: str) -> list[dict[str, object]]:
    """Return what kcat reads of a topic, read_committed."""
    options = ["-e", "-q", "-J", "-o", "beginning", "-X", "isolation.level=read_committed"]
    done = subprocess.run(
        ["kcat", "-b", dev.kafka, "-C", "-t", topic, *options],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.needs_tool("kcat")
def test_kcat_reads_sent_messages(ask: Call, dev: Dev) -> None:
    sent = ask(
        *("send", "sent", "one", "zwei ✓", "--tombstone", "--key", "k", "-H", "a=1", "-H", "a=2"),
        "--wait",
    )
    assert (sent.code, sent.err) == (0, "3 for sent: promoted\n")
    ask("send", "sent", "never", "--decision", "rollback")
    ask("send", "sent", "not yet", "--decision", "none")
    id = sent.out.strip()
    read = kcat(dev, "sent")
    assert [(one["key"], one["payload"]) for one in read] == [
        ("k", "one"),
        ("k", "zwei ✓"),
        ("k", None),
    ]
    assert read[0]["headers"] == ["txb-id", id, "txb-seq", "0/3", "a", "1", "a", "2"]
    decided_ms = ask("tx", "show", id, "-o", "json").json["decided_at_ms"]
    assert {one["ts"] for one in read} == {decided_ms}


def test_from_files_and_stdin(ask: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary, text = tmp_path / "binary", tmp_path / "text"
    binary.write_bytes(b"\xff\x00")
    text.write_text("one\ntwo\n")
    sent = ask("send", "files", "--file", binary, "--decision", "none", "-o", "json").json
    shown = ask("tx", "show", sent["id"], "--bodies", "-o", "json").json
    assert shown["messages"][0]["value_base64"] == "/wA="
    lines = ask("send", "files", "--file", text, "--lines", "--decision", "none").out.strip()
    shown = ask("tx", "show", lines, "--bodies", "-o", "json").json
    assert [message["value"] for message in shown["messages"]] == ["one", "two"]
    stdin = SimpleNamespace(buffer=io.BytesIO(b"typed"), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)
    typed = ask("send", "files", "--decision", "none").out.strip()
    shown = ask("tx", "show", typed, "--bodies", "-o", "json").json
    assert [message["value"] for message in shown["messages"]] == ["typed"]


def test_same_dedup_key_sends_once(ask: Call) -> None:
    first = ask("send", "once", "v", "--dedup-key", "d1")
    second = ask("send", "once", "v", "--dedup-key", "d1")
    assert first.out == second.out
    other = ask("send", "once", "other", "--dedup-key", "d1")
    assert (other.code, "(id_conflict)" in other.err) == (1, True)


def test_refusal_of_the_proxy_is_shown(ask: Call) -> None:
    refused = ask("send", "bad topic!", "v")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith("Error: ")
    nowhere = ask("send", "once", "v", "--partition", "99")
    assert (nowhere.code, "(bad_target)" in nowhere.err) == (1, True)
