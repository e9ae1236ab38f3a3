"""Shell completion: live values, harmless, silent without a proxy, and fast."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cli.cli_stub import Asked, Stub
from tests.kit.cli import TXBROKER, Call
from txbroker.cli.completion import WITHIN_S
from txbroker.cli.main import COMMANDS
from txbroker.cli.tx.command import STATES
from txbroker.testing.broker import InMemoryBroker

START_S = 4.0
"""What Python may take to start on a machine that does much else."""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment without configuration."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TXBROKER_", "_TXBROKER"))}
    found = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "XDG_CONFIG_HOME": str(tmp_path / "config"), "PATH": found}


def offered(environ: dict[str, str], line: str, shell: str = "fish") -> list[str]:
    """Return the completions of the last word of a line."""
    words = line.split(" ")
    asked = {
        "_TXBROKER_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": line if shell == "fish" else " ".join(words),
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1),
    }
    done = subprocess.run(
        [TXBROKER], env={**environ, **asked}, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    if shell == "fish":
        lines = [line for line in done.stdout.splitlines() if line]
        return [line.removeprefix("plain,").partition("\t")[0] for line in lines]
    return [line.removeprefix("plain,") for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_commands_are_offered(environ: dict[str, str], shell: str) -> None:
    assert offered(environ, "txbroker ", shell) == [command.name for command in COMMANDS]
    assert offered(environ, "txbroker to", shell) == ["topics", "top"]
    assert offered(environ, "txbroker tx re", shell) == ["revive"]
    assert offered(environ, "txbroker tx list --state p", shell) == [
        state for state in STATES if state.startswith("p")
    ]


def test_live_values(memory: InMemoryBroker, call: Call, environ: dict[str, str]) -> None:
    ids = []
    for group, topic in (("orders", "payments"), ("orders", "payments"), ("billing", "letters")):
        sent = call("send", topic, "v", "--group", group, "--decision", "none", "--url", memory.url)
        ids.append(sent.out.strip())
    call("groups", "register", "asked-by-url", "--yes", "--url", memory.url)
    environ["TXBROKER_URL"] = memory.url
    assert sorted(offered(environ, "txbroker tx list --group ")) == [
        "asked-by-url", "billing", "orders",
    ]  # fmt: skip
    assert offered(environ, "txbroker groups show asked") == ["asked-by-url"]
    assert offered(environ, "txbroker tx list --topic ") == ["letters", "payments"]
    assert sorted(offered(environ, "txbroker tx commit ")) == sorted(ids)
    assert sorted(offered(environ, f"txbroker tx check {ids[0]} ")) == sorted(ids[1:])
    assert offered(environ, f"txbroker tx show {ids[2][:20].lower()}") == [ids[2]]
    assert offered(environ, "txbroker tx revive ") == []


def test_completion_queries_the_proxy_of_the_line(
    call: Call, stub: Stub, environ: dict[str, str], tmp_path: Path
) -> None:
    stub.answer = lambda asked: (200, {"groups": [{"group": "here"}]})
    token = tmp_path / "token"
    token.write_text("s3cr3t")
    call("context", "set", "prod", "--url", f"{stub.url}/prod", "--token-file", token)
    line = "txbroker tx list --context prod --group "
    assert offered(environ, line) == ["here"]
    assert {asked.path.split("/")[1] for asked in stub.calls} == {"prod"}
    assert {asked.authorization for asked in stub.calls} == {"Bearer s3cr3t"}
    stub.calls.clear()
    assert offered(environ, f"txbroker tx list --url {stub.url} --group ") == ["here"]
    assert {asked.authorization for asked in stub.calls} == {""}
    assert offered(environ, "txbroker tx list --context ") == ["prod"]
    assert offered(environ, "txbroker context use p") == ["prod"]


HOSTILE = [
    "x; rm -rf ~",
    "$(touch pwned)",
    "`touch pwned`",
    "a\nplain,b",
    "\x1b[2J",
    "a b",
    "'",
    '"',
    "a|b",
    "a>b",
    "a&b",
    "*",
    "~",
    "!x",
    "a\\b",
    "--yes",
    "=ls",
    "",
]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_with_shell_syntax_are_not_offered(
    stub: Stub, environ: dict[str, str], shell: str
) -> None:
    def answer(asked: Asked) -> tuple[int, object]:
        if asked.path == "/v1/transactions":
            names = (*HOSTILE, "fine-topic")
            messages = [{"topic": name, "partition": 0} for name in names]
            row = next(iter(stub.rows.values())) | {"messages": messages}
            return 200, {"transactions": [row], "next_cursor": None}
        return 200, {"groups": [{"group": name} for name in (*HOSTILE, "fine.group", "größe")]}

    stub.add(1)
    stub.answer = answer
    environ["TXBROKER_URL"] = stub.url
    groups = offered(environ, "txbroker tx list --group ", shell)
    assert [line for line in groups if line not in ("plain", "_", "registered")] == [
        "fine.group", "größe",
    ]  # fmt: skip
    topics = offered(environ, "txbroker tx list --topic ", shell)
    assert [line for line in topics if line not in ("plain", "_")] == ["fine-topic"]


def test_help_of_a_value_cannot_pose_as_a_value(stub: Stub, environ: dict[str, str]) -> None:
    (id,) = stub.add(1)
    stub.rows[id]["group"] = "x\nplain\nrm\n_"
    environ["TXBROKER_URL"] = stub.url
    lines = offered(environ, "txbroker tx commit ", "zsh")
    assert (lines[:2], len(lines)) == (["plain", id], 3)


def test_without_a_proxy_nothing_is_offered(environ: dict[str, str]) -> None:
    environ["TXBROKER_URL"] = "http://127.0.0.1:9"
    started = time.monotonic()
    for line in ("tx list --group ", "tx commit ", "tx list --topic ", "groups show "):
        assert offered(environ, f"txbroker {line}") == []
    assert time.monotonic() - started < 4 * START_S


def test_completion_times_out_without_an_answer(environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environ["TXBROKER_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        assert offered(environ, "txbroker tx commit ") == []
        assert time.monotonic() - started < WITHIN_S + START_S


def test_completion_times_out_on_a_slow_answer(environ: dict[str, str]) -> None:
    """Each read is short of its timeout, all together are not."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as dripping:

        def drip() -> None:
            connection, _ = dripping.accept()
            with connection:
                for byte in b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b" " * 1000:
                    if over.wait(0.2):
                        return
                    try:
                        connection.send(bytes([byte]))
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        environ["TXBROKER_URL"] = f"http://127.0.0.1:{dripping.getsockname()[1]}"
        started = time.monotonic()
        assert offered(environ, "txbroker tx commit ") == []
        assert time.monotonic() - started < WITHIN_S + START_S
        over.set()
        thread.join()


def test_completion_prints_no_errors(environ: dict[str, str], stub: Stub, tmp_path: Path) -> None:
    for answer in ((500, {}), (200, []), (200, {"groups": None}), (200, {"groups": [{}]})):
        stub.answer = lambda asked, answer=answer: answer  # type: ignore[misc]
        assert offered(environ, f"txbroker tx list --url {stub.url} --group ") == []
        assert offered(environ, f"txbroker tx commit --url {stub.url} ") == []
    assert offered(environ, "txbroker tx list --url ftp://x --group ") == []
    assert offered(environ, "txbroker tx list --token-file /no/such --group ") == []
    assert offered(environ, "txbroker tx list --context none --group ") == []
    broken = tmp_path / "config" / "txbroker"
    broken.mkdir(parents=True)
    (broken / "contexts.json").write_text("{")
    assert offered(environ, "txbroker tx list --group ") == []
    assert offered(environ, "txbroker context use ") == []


def test_completion_imports_nothing_of_a_proxy(environ: dict[str, str]) -> None:
    code = (
        "import sys; from txbroker.cli.main import cli; from txbroker.cli.run import run\n"
        "try: run(cli, [])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('aiokafka', 'aiohttp', 'pydantic', 'asyncio') if m in sys.modules])"
    )
    asked = {"_TXBROKER_COMPLETE": "bash_complete", "COMP_CWORD": "1", "COMP_WORDS": "txbroker "}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**environ, **asked}, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("\n[]\n")
    assert "plain,demo" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script(call: Call, shell: str) -> None:
    made = call("completion", shell)
    assert (made.code, made.err) == (0, "")
    assert f"_TXBROKER_COMPLETE={shell}_complete" in made.out
    assert "_txbroker_completion" in made.out
    assert call("completion", "tcsh").code == 2


def test_in_a_real_bash(call: Call, stub: Stub, environ: dict[str, str], tmp_path: Path) -> None:
    stub.answer = lambda asked: (
        200,
        {"groups": [{"group": name} for name in ("orders", "order-letters", "$(touch pwned)")]},
    )
    script = f"""
{call("completion", "bash").out}
complete -p txbroker
COMP_WORDS=(txbroker tx list --group ord); COMP_CWORD=4
_txbroker_completion txbroker
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-eu"],
        input=script,
        env={**environ, "TXBROKER_URL": stub.url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    registered, *values = done.stdout.splitlines()
    assert "-F _txbroker_completion txbroker" in registered
    assert values == ["orders", "order-letters"]
    assert not (tmp_path / "pwned").exists()
