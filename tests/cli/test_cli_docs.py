"""The README and the tutorial, as they stand."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import pytest

from tests.cli.terminals import on_terminal
from tests.console import order_4711
from tests.kit.cli import Call, Dev
from tests.kit.pages import ID, ROOT, block, session
from tests.kit.until import free_ports
from txbroker.cli.main import cli


@pytest.mark.needs_tool("curl")
def test_the_curl_commands(dev: Dev) -> None:
    script = block("README.md", "bash").replace("http://127.0.0.1:8470", dev.url)
    done = subprocess.run(["bash", "-eu"], input=script, capture_output=True, text=True, check=True)
    answers = [json.loads(part) for part in re.split(r"(?<=\})(?=\{\")", done.stdout.strip())]
    prepared, committed, again, refused, life = answers
    assert prepared["state"] == "pending"
    assert committed == again == {"id": prepared["id"], "state": "promoted", "decision": "commit"}
    assert refused["error"]["code"] == "already_decided"
    assert [event["event"] for event in life["timeline"]] == ["prepared", "commit", "promoted"]


def asks(line: str) -> bool:
    """Return whether a command reads a confirmation, and would take the next line for it."""
    found = re.match(r"(?:[A-Z_]+=\S+ )*txbroker (.*)", line)
    words = shlex.split(found[1], comments=True) if found else []
    command: click.Command = cli
    for word in words:
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(command), word) or command
    has_yes = any(parameter.name == "yes" for parameter in command.params)
    return has_yes and not {"--yes", "--dry-run"} & {*words}


PLACEHOLDER = re.compile(r"\b(ID|GROUP|KEY|KAFKA|PARTITION)\b")
"""In a list of commands of which a reader takes one."""


def test_pasted_blocks_are_not_eaten_by_a_question() -> None:
    eaten = [
        (page.relative_to(ROOT).as_posix(), line)
        for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.M | re.S)
        if not PLACEHOLDER.search(block)
        for line in block.replace("\\\n", " ").splitlines()[:-1]
        if asks(line)
    ]
    assert eaten == []


def test_the_answer_that_commits_everything_has_a_group_of_its_own() -> None:
    """It would decide for instances of a recipe's group that died."""
    start = (ROOT / "docs/start.md").read_text()
    (group,) = re.findall(r"groups register (\S+) --check-url", start)
    assert f"groups remove {group} --yes" in start
    used = re.compile(rf"group[= ]['\"]?{group}\b|register {group}\b")
    pages = (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    assert [page.name for page in pages if used.search(page.read_text())] == ["start.md"]


def masked(text: str) -> list[str]:
    """Return lines without ids, times, numbers and widths, which differ from run to run."""
    for pattern, name in (
        (r"[0-9A-Z]{26}", "ID"),
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z", "TIME"),
        (r"operator, \S+ via", "operator, WHO via"),
        (r"\b(\d+[dhms])+\b", "AGE"),
        (r"\d+", "N"),
        (r"[ \t]+", " "),
    ):
        text = re.sub(pattern, name, text)
    return [line.strip() for line in text.strip().splitlines()]


@contextmanager
def dev_alone() -> Iterator[str]:
    """A proxy without traces of other tests."""
    with TemporaryDirectory() as folder:
        made = Dev(Path(folder) / "dev")
        try:
            made.start()
            yield made.url
        finally:
            made.end()


@pytest.mark.parametrize(
    ("page", "proxy", "count"),
    [("README.md", dev_alone, 10), (order_4711.PAGE, order_4711.night, 4)],
    ids=["the ten commands", "order 4711"],
)
def test_sessions_in_pages(
    call: Call, page: str, proxy: Callable[[], AbstractContextManager[str]], count: int
) -> None:
    commands, id = session(page), ""
    assert len(commands) == count
    with proxy() as url:
        for command, output in commands:
            done = call(*shlex.split(ID.sub(id, command), comments=True), "--url", url)
            assert done.code == 0, (command, done.err)
            found = ID.search(done.out)
            id = id or (found[0] if found else "")
            shown = masked(done.out)
            # `…` stands for lines that are left out.
            for lines in output.split("…\n"):
                wanted = masked(lines)
                starts = range(len(shown) - len(wanted) + 1)
                same = (shown[at : at + len(wanted)] == wanted for at in starts)
                assert any(same), (command, shown)


def test_the_python_example(dev: Dev, ask: Call, tmp_path: Path) -> None:
    script = block("README.md", "python").replace("http://127.0.0.1:8470", dev.url)
    script += "\nprint(tx.id)\n"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    shown = ask("tx", "show", done.stdout.strip(), "-o", "json").json
    assert (shown["decision"], shown["source"]) == ("commit", "producer")


def test_the_tutorial(tmp_path: Path) -> None:
    port = str(free_ports(1)[0])
    page = (ROOT / "docs/start.md").read_text().replace("8471", port)
    script, output = tmp_path / "answer.py", tmp_path / "output"
    script.write_text(block("docs/start.md", "python").replace("8471", port))
    watch, *commands = re.findall(r"^txbroker (.+)$", page, re.MULTILINE)
    assert len(commands) == 8
    ids: list[str] = []
    with dev_alone() as url, on_terminal(tmp_path) as run, output.open("w") as out:
        environ = {"TXBROKER_URL": url}
        answering = subprocess.Popen([sys.executable, "-u", script], stdout=out, stderr=out)
        try:
            consumer = run(*shlex.split(watch), environ=environ)
            consumer.until("there is no topic payments")
            for command in commands:
                if command.startswith("groups remove"):
                    consumer.until(ids[1])
                arguments = shlex.split(re.sub(r"\bID$", "".join(ids[-1:]), command))
                terminal = run(*arguments, environ=environ)
                if command.startswith("tx commit"):
                    terminal.until("[y/N]")
                    terminal.type("y\n")
                assert terminal.end() == 0, terminal.text
                if command.startswith("send"):
                    ids += ID.findall(terminal.text)
                if command.startswith("tx commit"):
                    consumer.until(ids[0])
            consumer.type("\x03")
            consumer.end()
        finally:
            answering.kill()
            answering.wait()
    assert f"'id': '{ids[1]}'" in output.read_text()
