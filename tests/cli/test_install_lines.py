"""Each documented install line, alone in a clean environment, runs what its page runs."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit.alone import ROOT, run_alone, site_of

LINE = re.compile(r"txbroker\[[a-z,]+\]|pip install txbroker\b")
COMMAND = re.compile(r"txbroker ((?:[a-z][a-z-]*(?: |\b)){1,2})")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
PAGES = {
    page: {each.removeprefix("pip install ") for each in LINE.findall(page.read_text())}
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/how-to/*.md"))
}
LINES = sorted(set().union(*PAGES.values()))
EMBEDDED = "txbroker[cli,proxy,embedded]"
"""What `dev` and `demo` need, on whichever page they are named."""
CALLS_A_PROXY = [["tx", "list"], ["groups", "list"], ["top"], ["send"], ["context", "list"]]

HELP = """
import json, click
from txbroker.cli import main as m
for words in json.loads(sys.argv[1]):
    command, context = m.cli, click.Context(m.cli)
    for word in words:
        if isinstance(command, click.Group):
            command = command.get_command(context, word) or command
    command.get_help(click.Context(command))
"""
RUN = "from txbroker.__main__ import main; main()"


def commands_of(page: Path) -> list[list[str]]:
    """Return the words of the commands that a page names."""
    from txbroker.cli.main import COMMANDS

    known = {each.name for each in COMMANDS}
    found = {tuple(each.split()) for each in COMMAND.findall(page.read_text())}
    return sorted([*words] for words in found if words[0] in known)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of packages by install line, each made once."""

    class Sites(dict[str, Path]):
        def __missing__(self, line: str) -> Path:
            self[line] = site_of(line, tmp_path_factory.mktemp("alone") / "site")
            return self[line]

    return Sites()


def succeed(site: Path, code: str, argument: str, folder: Path) -> None:
    done = run_alone(site, code, argument, cwd=folder)
    assert done.returncode == 0, done.stderr


def imports_of(page: Path) -> str:
    """Return the imports of txbroker in a page's Python examples."""
    found: list[ast.stmt] = []
    for block in PYTHON.findall(page.read_text()):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("txbroker"):
                found.append(node)
    return "\n".join(map(ast.unparse, found))


def wanted(line: str) -> tuple[list[list[str]], list[str]]:
    """Return the commands and the imports that pages with an install line show for it.

    A page with one line for programs and another for commands means each for its own.
    """
    commands: list[list[str]] = []
    imports = []
    for page, lines in PAGES.items():
        started = [each for each in commands_of(page) if each[0] in ("dev", "demo")]
        if line == EMBEDDED:
            commands += started
        elif line in lines:
            if has_command(line) and line != "txbroker[cli]":
                commands += [each for each in commands_of(page) if each not in started]
            if not (has_command(line) and any(not has_command(each) for each in lines)):
                imports.append(imports_of(page))
    return commands, imports


def has_command(line: str) -> bool:
    return "cli" in line or "spark" in line


@pytest.mark.parametrize("line", LINES)
def test_pages_run_with_their_line(line: str, sites: dict[str, Path], tmp_path: Path) -> None:
    commands, imports = wanted(line)
    if line == "txbroker[cli]":
        commands = CALLS_A_PROXY
    assert commands or imports
    code = "\n".join(["sys.argv[1:] = [sys.argv[1]]", *imports, HELP if commands else ""])
    done = run_alone(sites[line], code, json.dumps(commands), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


MAPPING = """
name = "shop"
database = "sqlite:///shop.db"
[[tables]]
table = "orders"
topic = "orders"
"""
NO_KAFKA = "Kafka .*127.0.0.1:1"


@pytest.mark.parametrize(
    ("line", "commands"),
    [
        (
            "txbroker[cli,relay]",
            [
                ("capture apply shop.toml --yes", 0, ""),
                ("outbox list sqlite:///shop.db", 0, ""),
                ("outbox relay sqlite:///shop.db --kafka 127.0.0.1:1", 1, NO_KAFKA),
                ("capture run shop.toml --kafka 127.0.0.1:1", 1, NO_KAFKA),
            ],
        ),
        ("txbroker[cli,consumer]", [("consume orders --kafka 127.0.0.1:1", 1, NO_KAFKA)]),
        ("txbroker[cli,proxy]", [("topics plan --kafka 127.0.0.1:1", 1, NO_KAFKA)]),
    ],
)
def test_commands_run_with_their_line(
    line: str, commands: Sequence[tuple[str, int, str]], sites: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "shop.toml").write_text(MAPPING)
    succeed(
        sites[line],
        "import sqlite3; sqlite3.connect('shop.db').execute(sys.argv[1])",
        "CREATE TABLE orders (id INTEGER PRIMARY KEY)",
        tmp_path,
    )
    for command, code, sentence in commands:
        done = run_alone(sites[line], RUN, *command.split(), cwd=tmp_path, HOME=str(tmp_path))
        assert done.returncode == code, (command, done.stderr)
        assert re.search(sentence, done.stderr), (command, done.stderr)


def test_sqlalchemy_needs_no_greenlet(sites: dict[str, Path], tmp_path: Path) -> None:
    """`pip install sqlalchemy` does not bring it."""
    code = (
        "sys.path.insert(0, sys.argv[1]); from sqlalchemy import create_engine;"
        "from txbroker.databases import from_sqlalchemy;"
        "print(from_sqlalchemy(create_engine('sqlite:///a.db')).name)"
    )
    sqlalchemy = site_of("sqlalchemy", tmp_path / "sqlalchemy")
    assert not (sqlalchemy / "greenlet").exists()
    done = run_alone(sites["txbroker"], code, str(sqlalchemy), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "sqlite:///a.db\n"), done.stderr
