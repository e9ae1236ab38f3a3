"""`txbroker tx` and `send`: questions, reasons, exit codes, and messages for another consumer."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.cli_stub import Stub
from tests.kit.cli import Call, Dev
from tests.kit.until import until

Answer = Callable[..., None]
ID = re.compile(r"[0-9A-Z]{26}")
STRANGER = "00000000000000000000000000"


@pytest.fixture
def prepared(ask: Call) -> str:
    """A pending transaction of the group `cli`."""
    sent = ask("send", "tx", "v", "--key", "k", "-H", "a=1", "--decision", "none")
    assert sent.code == 0
    return sent.out.strip()


def test_list(ask: Call, prepared: str) -> None:
    table = ask("tx", "list", "--state", "pending", "--topic", "tx", "--all")
    header, *rows = table.out.splitlines()
    assert header.split() == ["ID", "GROUP", "STATE", "AGE", "MESSAGES", "TOPICS", "ATTEMPTS"]
    row = next(row for row in rows if row.startswith(prepared))
    assert row.split()[1:3] + row.split()[4:] == ["cli", "pending", "1", "tx", "0/15"]
    wide = ask("tx", "list", "-o", "wide", "--all")
    assert "NEXT CHECK" in wide.out
    assert prepared in [row["id"] for row in ask("tx", "list", "-o", "json", "--all").json]
    assert f"id: {prepared}" in ask("tx", "list", "-o", "yaml", "--all").out.replace('"', "")


def test_empty_list_is_reported(ask: Call) -> None:
    empty = ask("tx", "list", "--group", "missing")
    assert (empty.code, empty.out) == (0, "")
    assert empty.err.startswith("There are no such transactions.\n")
    assert ask("tx", "list", "--group", "missing", "-o", "json").json == []
    assert ask("tx", "list", "--group", "missing", "-o", "yaml").out == "[]\n"


def test_lists_name_what_they_leave_out(call: Call, stub: Stub) -> None:
    ids = stub.add(3)
    cut = call("tx", "list", "--limit", "2", "-o", "json", "--url", stub.url)
    assert [row["id"] for row in cut.json] == ids[:2]
    assert cut.err == "Only the oldest 2 are listed; --limit N or --all lists more.\n"
    table = call("tx", "list", "--limit", "2", "--url", stub.url)
    assert table.err.splitlines() == [
        "Only the oldest 2 of 3 are listed; --limit N or --all lists more.",
        "7 settled ones, promoted or rolled back, are not listed: --state settled or all.",
    ]
    filtered = call("tx", "list", "--group", "orders", "--url", stub.url).err
    assert filtered.startswith("Settled ones, promoted or rolled back, are not listed")


def test_settled_ones_are_listed_newest_first(there: Call) -> None:
    ids = []
    for decision in ("commit", "rollback", "none", "commit"):
        sent = there("send", "order", "v", "--group", "s", "--decision", decision, "--wait")
        ids.append(sent.out.strip())

    def listed(*options: str) -> list[str]:
        shown = there("tx", "list", "--group", "s", "-o", "json", *options)
        return [row["id"] for row in shown.json]

    assert listed() == [ids[2]]
    assert listed("--state", "settled") == [ids[3], ids[1], ids[0]]
    assert listed("--state", "all") == ids[::-1]
    assert listed("--state", "all", "--limit", "2") == ids[:1:-1]
    assert "do not remember are not listed" in there("tx", "ls", "--state", "all").err


def test_show(ask: Call, prepared: str) -> None:
    story = ask("tx", "show", prepared, "--bodies").out
    assert story.startswith(f"{prepared}  pending\n")
    assert "key='k'  value='v'  headers=[['a', '1']]" in story
    assert "prepared  by group cli" in story
    both = ask("tx", "show", prepared, STRANGER, "-o", "json")
    assert (both.code, [row["id"] for row in both.json]) == (3, [prepared])
    assert f"{STRANGER}: " in both.err
    assert "(not_found)" in both.err
    assert ask("tx", "show", prepared, "-o", "json").json["group"] == "cli"
    assert ask("tx", "show", "rubbish").code == 1
    assert ask("tx", "show", "../groups").err.endswith("(bad_id)\n")


def test_commit_and_its_reason(ask: Call, prepared: str) -> None:
    done = ask("tx", "commit", prepared, "--yes", "--reason", "seen by hand", "--wait")
    assert (done.code, done.err) == (0, "")
    assert done.out.split()[-3:] == [prepared, "promoted", "commit"]
    found = ask("tx", "show", prepared, "-o", "json").json
    assert (found["source"], found["reason"]) == ("operator", "seen by hand")
    again = ask("tx", "commit", prepared, "--yes", "-o", "json")
    assert (again.code, again.json[0]["decision"]) == (0, "commit")
    contrary = ask("tx", "rollback", prepared, "--yes")
    assert (contrary.code, contrary.out) == (1, "")
    assert "(already_decided). Nothing was changed" in contrary.err


def test_decision_for_another_group_is_refused(ask: Call, prepared: str) -> None:
    refused = ask("tx", "commit", prepared, "--yes", "--group", "thieves")
    assert (refused.code, "(wrong_group)" in refused.err) == (1, True)
    assert ask("tx", "show", prepared, "-o", "json").json["state"] == "pending"


def test_partial_failure_exits_with_3(ask: Call, prepared: str) -> None:
    partly = ask("tx", "rollback", prepared, STRANGER, prepared, "--yes", "-o", "json")
    done, failed = partly.json
    assert (partly.code, done["id"], done["state"]) == (3, prepared, "rolled_back")
    assert (failed["id"], failed["error"]["code"]) == (STRANGER, "not_found")
    assert partly.err == "Error: 1 of 2 rolled back\n"
    none = ask("tx", "rollback", STRANGER, "rubbish", "--yes")
    assert (none.code, none.out) == (1, "")
    assert [line.split()[:2] for line in none.err.splitlines()[1:3]] == [
        [STRANGER, "not_found"],
        ["rubbish", "bad_id"],
    ]
    assert none.err.endswith("Error: none of 2 rolled back\n")


def test_answer_no_changes_nothing(ask: Call, prepared: str, answer: Callable[..., None]) -> None:
    answer("n")
    refused = ask("tx", "commit", prepared)
    assert (refused.code, refused.out) == (1, "")
    assert f"{prepared}  pending" in refused.err
    assert "nothing was changed" in refused.err
    assert ask("tx", "show", prepared, "-o", "json").json["state"] == "pending"


def test_answer_yes_commits(ask: Call, prepared: str, answer: Callable[..., None]) -> None:
    answer("y")
    done = ask("tx", "rollback", prepared, "-o", "json")
    assert (done.code, done.json[0]["state"]) == (0, "rolled_back")


def test_check_and_revive_report_reasons(ask: Call, prepared: str) -> None:
    assert ask("tx", "check", prepared, "--yes", "-o", "json").json[0]["state"] == "pending"
    pending = ask("tx", "revive", prepared, "--yes")
    assert (pending.code, "(not_pending)" in pending.err) == (1, True)
    ask("tx", "rollback", prepared, "--yes")
    settled = ask("tx", "check", prepared, "--yes")
    assert (settled.code, "(not_pending)" in settled.err) == (1, True)


async def test_unknown_transaction_is_parked_listed_and_revived(ask: Call, stub: Stub) -> None:
    stub.answer = lambda asked: (200, {"decision": "unknown"})
    policy = ("--attempts-max", 2, "--check-after-s", 0.1, "--check-interval-s", 0.1)
    ask("groups", "register", "unsure", "--check-url", stub.url, *policy, "--timeout-s", 0.2, "-y")
    id = ask("send", "tx", "v", "--group", "unsure", "--decision", "none").out.strip()
    listing = ("tx", "list", "--state", "parked", "--group", "unsure", "-o", "json")
    parked = await until(lambda: ask(*listing).json)
    assert [(row["id"], row["attempts"]) for row in parked] == [(id, 2)]
    assert "undecided after the last attempt" in ask("tx", "show", id).out
    revived = ask("tx", "revive", id, "--yes", "--reason", "asked the shop", "-o", "json").json
    assert [row["state"] for row in revived] == ["pending"]
    assert ask("tx", "show", id, "-o", "json").json["round"] == 2
    ask("groups", "remove", "unsure", "--yes")


def test_transaction_text_cannot_control_the_terminal(ask: Call) -> None:
    evil = "\x1b[2J"
    sent = ask("send", "tx", evil, "--key", evil, "--order-key", evil, "--decision", "none")
    shown = ask("tx", "show", sent.out.strip(), "--bodies").out
    assert "\x1b" not in shown
    assert "2J" in shown


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
