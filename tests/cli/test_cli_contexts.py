"""`txbroker context`: which proxy is called, and that no token ever goes to another one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.cli_stub import Asked, Stub
from tests.kit.cli import Call

HERE, THERE = "http://127.0.0.1:1", "http://127.0.0.1:2"
NO_FILES = dict.fromkeys(("token_file", "ca_file", "client_cert_file", "client_key_file"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The file of the contexts, which `call` has put into the test's own folder."""
    return tmp_path / "config" / "txbroker" / "contexts.json"


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, Path]:
    """Files with tokens, by token."""
    found = {}
    for word in ("own", "typed", "environ"):
        found[word] = tmp_path / word
        found[word].write_text(f"{word}\n")
    return found


def test_set_use_list_show_and_remove(call: Call, store: Path, tokens: dict[str, Path]) -> None:
    assert call("context", "list") == (
        0, "", "There is no context; `txbroker context set` creates one.\n",
    )  # fmt: skip
    made = call("context", "set", "prod", "--url", f"{HERE}/", "--token-file", tokens["own"])
    assert made == (0, "", "`txbroker context use prod` makes it the current one.\n")
    assert call("context", "set", "test", "--url", THERE, "--use").code == 0
    rows = call("context", "list", "-o", "json").json
    assert rows == [
        {
            "name": "prod",
            "url": HERE,
            **NO_FILES,
            "token_file": str(tokens["own"]),
            "current": False,
        },
        {"name": "test", "url": THERE, **NO_FILES, "current": True},
    ]
    assert call("context", "use", "prod").err == f"Commands now call {HERE}.\n"
    shown = call("context", "show", "-o", "json").json
    assert (shown["url"], shown["context"]) == (HERE, "prod")
    assert call("context", "show", "test").out.splitlines()[1].split() == ["test", THERE, "-"]
    removed = call("context", "remove", "prod", "prod")
    assert removed.err == "prod was the current context; now there is none.\n"
    assert call("context", "show", "-o", "json").json["source"] == "default"


def test_context_file_is_private_and_has_no_secret(
    call: Call, store: Path, tokens: dict[str, Path]
) -> None:
    os.umask(0)
    try:
        call("context", "set", "prod", "--url", HERE, "--token-file", tokens["own"])
    finally:
        os.umask(0o022)
    assert store.stat().st_mode & 0o777 == 0o600
    assert store.parent.stat().st_mode & 0o777 == 0o700
    assert json.loads(store.read_text()) == {
        "current": "",
        "contexts": {"prod": {"url": HERE, "token_file": str(tokens["own"])}},
    }
    assert [path.name for path in store.parent.iterdir()] == ["contexts.json"]


def test_relative_token_path_is_stored_absolute(
    call: Call, tmp_path: Path, tokens: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call("context", "set", "prod", "--url", HERE, "--token-file", "own")
    monkeypatch.chdir("/")
    assert call("context", "show", "prod", "-o", "json").json["token_file"] == str(tokens["own"])


def test_context_keeps_and_uses_certificates(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[str | Path] = []
    for name in ("ca", "client-cert", "client-key"):
        (tmp_path / name).write_text("PEM")
        words += [f"--{name}-file", tmp_path / name]
    assert call("context", "set", "prod", "--url", HERE, *words, "--use").code == 0
    monkeypatch.setenv("TXBROKER_CA_FILE", str(tmp_path / "of another installation"))
    chosen = call("context", "show", "-o", "json").json
    assert {name: chosen[name] for name in NO_FILES} == {
        "token_file": None,
        "ca_file": str(tmp_path / "ca"),
        "client_cert_file": str(tmp_path / "client-cert"),
        "client_key_file": str(tmp_path / "client-key"),
    }


def test_key_without_certificate_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("PEM")
    done = call("context", "set", "prod", "--url", HERE, "--client-key-file", tmp_path / "key")
    assert (done.code, "--client-key-file needs --client-cert-file" in done.err) == (2, True)


def test_new_url_drops_the_old_token(call: Call, tokens: dict[str, Path]) -> None:
    call("context", "set", "prod", "--url", HERE, "--token-file", tokens["own"])
    call("context", "set", "prod", "--url", THERE)
    assert call("context", "show", "prod", "-o", "json").json["token_file"] is None


@pytest.mark.parametrize(
    ("typed", "environ", "source", "token"),
    [
        (["--url"], ["URL", "CONTEXT", "TOKEN_FILE"], "--url", "environ"),
        (["--url"], ["CONTEXT"], "--url", ""),
        (["--url", "--token-file"], ["TOKEN_FILE"], "--url", "typed"),
        (["--context"], ["URL", "TOKEN_FILE"], "other", "own"),
        (["--context", "--token-file"], ["URL", "TOKEN_FILE"], "other", "typed"),
        ([], ["URL", "CONTEXT", "TOKEN_FILE"], "URL", "environ"),
        ([], ["URL"], "URL", ""),
        (["--token-file"], ["URL", "TOKEN_FILE"], "URL", "typed"),
        ([], ["CONTEXT", "TOKEN_FILE"], "other", "own"),
        (["--token-file"], ["CONTEXT"], "other", "typed"),
        ([], ["TOKEN_FILE"], "current", ""),
        (["--token-file"], [], "current", "typed"),
        ([], [], "current", ""),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_precedence_of_proxy_and_token(
    call: Call,
    stub: Stub,
    tokens: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    typed: list[str],
    environ: list[str],
    source: str,
    token: str,
) -> None:
    """Every address is the same server with a separate path, which identifies the call."""
    stub.answer = lambda asked: (200, {"transactions": [], "next_cursor": None})
    call("context", "set", "other", "--url", f"{stub.url}/other", "--token-file", tokens["own"])
    call("context", "set", "current", "--url", f"{stub.url}/current", "--use")
    for name, value in {
        "URL": f"{stub.url}/URL",
        "CONTEXT": "other",
        "TOKEN_FILE": str(tokens["environ"]),
    }.items():
        if name in environ:
            monkeypatch.setenv(f"TXBROKER_{name}", value)
    given = {
        "--url": f"{stub.url}/--url",
        "--context": "other",
        "--token-file": str(tokens["typed"]),
    }
    options = [part for name in typed for part in (name, given[name])]
    done = call("tx", "list", "-o", "json", *options)
    assert done.code == 0, done.err
    (asked,) = stub.calls
    assert asked.path == f"/{source}/v1/transactions"
    assert asked.authorization == (f"Bearer {token}" if token else "")


def test_default_is_the_local_proxy(
    call: Call, tokens: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXBROKER_TOKEN_FILE", str(tokens["environ"]))
    shown = call("context", "show", "-o", "json").json
    assert shown == {
        "url": "http://127.0.0.1:8470",
        **NO_FILES,
        "token_file": str(tokens["environ"]),
        "context": None,
        "source": "default",
    }


def test_question_names_the_installation(call: Call, stub: Stub, answer: object) -> None:
    assert callable(answer)
    stub.add(1)
    call("context", "set", "prod", "--url", stub.url, "--use")
    answer("n")
    asked = call("tx", "commit", "--group", "orders")
    assert f"Commit this transaction at {stub.url} (context prod)? [y/N]" in asked.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["set", "../x", "--url", HERE], "is no name of a context"),
        (["set", "-x", "--url", HERE], "No such option"),
        (["set", "", "--url", HERE], "is no name of a context"),
        (["set", "a b", "--url", HERE], "is no name of a context"),
        (["set", "x" * 65, "--url", HERE], "is no name of a context"),
        (["set", "x"], "Missing option '--url'"),
        (["set", "x", "--url", "nowhere"], "is no URL like"),
        (["set", "x", "--url", "http://me:secret@h"], "give the token's file by --token-file"),
        (["set", "x", "--url", "http://h/\x1b[2J"], "is no URL like"),
        (["set", "x", "--url", "http://h/?token=secret"], "is no URL like"),
        (["set", "x", "--url", HERE, "--token-file", "s3cr3t"], "does not exist"),
        (["use", "x"], "there is no context 'x': make one with `txbroker context set`"),
        (["remove", "x"], "there is no context 'x'"),
        (["show", "x"], "there is no context 'x'"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_wrong_usage_changes_nothing(
    call: Call, store: Path, arguments: list[str], message: str
) -> None:
    refused = call("context", *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert message in refused.err
    assert not store.exists()


def test_url_and_context_exclude_each_other(call: Call) -> None:
    refused = call("tx", "list", "--url", HERE, "--context", "x")
    assert (refused.code, "--url and --context exclude each other" in refused.err) == (2, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"contexts": []}',
        '{"current": "x", "contexts": {}}',
        '{"current": 1, "contexts": {}}',
        '{"contexts": {"a": null}}',
        '{"contexts": {"a": {"url": 1}}}',
        '{"contexts": {"\\u001b[2J": {"url": "http://h"}}}',
        '{"contexts": {"a": {"url": "http://h", "token_file": ["x"]}}}',
        "[" * 100_000,
        "\udcff",
    ],
    ids=range(13),
)
def test_damaged_file_is_named_only_where_needed(call: Call, store: Path, text: str) -> None:
    store.parent.mkdir(parents=True)
    store.write_bytes(text.encode(errors="surrogateescape"))
    refused = call("tx", "list")
    assert (refused.code, refused.out) == (2, "")
    assert f"{store} is not as `txbroker context` writes it" in refused.err
    assert call("context", "set", "x", "--url", HERE).code == 2
    assert store.read_bytes() == text.encode(errors="surrogateescape")
    assert "nothing listens" in call("tx", "list", "--url", "http://127.0.0.1:9").err


def test_file_writable_for_others_is_refused(call: Call, store: Path) -> None:
    call("context", "set", "prod", "--url", HERE, "--use")
    store.chmod(0o666)
    refused = call("tx", "list")
    assert (refused.code, refused.out) == (2, "")
    assert f"other users may write to {store}" in refused.err


def test_unwritable_folder_is_reported(call: Call, store: Path) -> None:
    store.parent.parent.mkdir(parents=True)
    store.parent.write_text("in the way")
    refused = call("context", "set", "prod", "--url", HERE)
    assert (refused.code, refused.out) in ((1, ""), (2, ""))
    assert str(store) in refused.err


def test_each_command_reads_the_token_file(call: Call, stub: Stub, tokens: dict[str, Path]) -> None:
    seen: list[Asked] = stub.calls
    stub.answer = lambda asked: (200, {"groups": []})
    call("context", "set", "prod", "--url", stub.url, "--token-file", tokens["own"], "--use")
    call("groups", "list")
    tokens["own"].write_text("newer")
    call("groups", "list")
    assert [asked.authorization for asked in seen] == ["Bearer own", "Bearer newer"]
