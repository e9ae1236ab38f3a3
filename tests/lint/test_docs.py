"""The docs name existing commands, metrics, settings and functions, and name all of them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import click
import pytest

from tests.kit.command_lines import parsed
from tests.lint.package import ROOT, committed, name_of, nodes, tree
from txbroker.cli.main import cli
from txbroker.config.settings import Settings
from txbroker.consumer.statistics import METRICS
from txbroker.contract.service import HalfPartitionState
from txbroker.kafka.protocol.copies import _CAUSES as CAUSES
from txbroker.proxy.observe.metrics import Metrics
from txbroker.relay.metrics import METRICS as RELAY_METRICS

DOCS = ROOT / "docs"
PACKAGE = ROOT / "txbroker"
ROOM = "txbroker.proxy.partition."
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# Synopses, with `OPTIONS` and the like: test_cli_usage holds it against the commands.
WRITTEN = [page for page in PAGES if page != DOCS / "reference/cli.md"]
# What stands for something of the reader's own.
STANDS_FOR = {"KAFKA": "kafka:9092", "PROXY": "http://proxy:8470", "ID": "0" * 26, "$n": "1"}
# In the walks, beside functions.
CONSTANTS = {"HAND_OUT_MAX"}
# Left out of a call: shell syntax, and an ellipsis.
AFTER_CALL = {"|", "||", "&", "&&", ";", ">", ">>", "<", "…", "..."}


# --- commands --------------------------------------------------------------------------------


def blocks(text: str) -> Iterator[str]:
    for block in re.findall(r"^ *```[a-z]*\n(.*?)^ *```$", text, re.M | re.S):
        yield re.sub(r"\\\n\s*", "", str(block))


def calls_in(text: str) -> list[str]:
    """Return the calls of txbroker in a page, those in blocks and those within sentences.

    Where a block shows a session, only text after a prompt was typed.
    """
    found = []
    for block in blocks(text):
        session = re.search(r"^\s*\$ ", block, re.M) is not None
        prompt = r"\$ " if session else ""
        found += re.findall(rf"^\s*{prompt}(txbroker [^\n]*)$", block, re.M)
    sentences = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    return found + re.findall(r"`(txbroker [a-z][^`]*)`", " ".join(sentences.split()))


def words_of(call: str) -> list[str]:
    """Return the words of a call after `txbroker`, without shell syntax."""
    lexer = shlex.shlex(call, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = []
    for word in lexer:
        if word in AFTER_CALL:
            break
        words.append(STANDS_FOR.get(word, word))
    return words[1:]


CALLS = [(name_of(page), call) for page in WRITTEN for call in calls_in(page.read_text())]


def test_finder_sees_every_form_of_command() -> None:
    page = """Say `txbroker tx list
--all`, then:
```
txbroker proxy --kafka a:1 \\
  --instance one | tee log
```
   ```
   $ txbroker top --once
   txbroker at http://a
   ```
"""
    assert calls_in(page) == [
        "txbroker proxy --kafka a:1 --instance one | tee log",
        "txbroker top --once",
        "txbroker tx list --all",
    ]
    assert words_of("txbroker tx show ID -o json > 'a b'") == ["tx", "show", "0" * 26, "-o", "json"]


def is_name(words: list[str]) -> bool:
    """Return whether these words only name a command or a group of commands."""
    command: click.Command = cli
    for word in words:
        child = command.get_command(click.Context(command), word) if is_group(command) else None
        if child is None:
            return False
        command = child
    return True


def is_group(command: click.Command) -> TypeGuard[click.Group]:
    return isinstance(command, click.Group)


def test_commands_in_pages_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    faults = []
    for page, call in CALLS:
        words = [word.replace("~/", f"{tmp_path}/") for word in words_of(call)]
        if is_name(words):
            continue
        for word in words:
            # Any word may be a file that the command requires.
            if re.fullmatch(rf"({re.escape(str(tmp_path))}/)?[\w.-][\w./-]*", word):
                file = tmp_path / word
                if not file.is_dir() and not any(parent.is_file() for parent in file.parents):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.touch()
        try:
            path, context = parsed(words)
        except click.UsageError as error:
            faults.append(f"{page}: {call}: {error.format_message()}")
            continue
        with context:
            if not " ".join(words).startswith(path):
                faults.append(f"{page}: {call}: is {path}")
    assert faults == []


def test_commands_named_in_text_exist() -> None:
    """`tx commit` and the like, without the program's name."""
    wrong = [
        f"{name_of(page)}: {group} {name}"
        for page in WRITTEN
        if page.name != "logs.md"  # events are called so too
        for group, name in re.findall(
            r"`(tx|topics|groups|audit|context) ([a-z]+)\b[^`]*`", page.read_text()
        )
        if not is_name([group, name])
    ]
    assert wrong == []


def test_make_targets_and_scripts_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    wrong = []
    for page in PAGES:
        text = page.read_text()
        called = re.findall(r"`make ([a-z-]+)[^`]*`", text)
        for block in blocks(text):
            called += re.findall(r"^\s*(?:\$ )?make ([a-z-]+)", block, re.M)
        wrong += [f"{name_of(page)}: make {name}" for name in called if name not in targets]
        scripts = re.findall(r"python ((?:benchmarks|charts|tests)/[\w/]+\.py)", text)
        wrong += [f"{name_of(page)}: {one}" for one in scripts if not (ROOT / one).exists()]
    assert wrong == []


# --- names -----------------------------------------------------------------------------------


def test_metrics_in_pages_exist() -> None:
    shown = {one.name for one in (*Metrics().described(), *METRICS, *RELAY_METRICS)}
    # Those of the doctor, and other things that are called so: fixtures, a table.
    for path in committed("cli/**/*.py", "txbroker/**/*.py"):
        shown |= set(re.findall(r"\btxbroker_[a-z_]+", path.read_text()))
    wrong = {
        f"{name_of(page)}: {name}"
        for page in WRITTEN
        for name in re.findall(r"\btxbroker_[a-z_]+(?=[`{\[])", page.read_text())
        if re.sub(r"_(bucket|sum|count)$", "", name) not in shown and name not in shown
    }
    assert wrong == set()


def test_environment_variables_in_pages_exist() -> None:
    text = "".join(path.read_text() for path in committed("cli/*.py", "txbroker/**/*.py"))
    known = {f"TXBROKER_{name.upper()}" for name in Settings.model_fields}
    known |= set(re.findall(r"\bTXBROKER_[A-Z][A-Z_]*[A-Z]\b", text))
    reference = (DOCS / "reference/cli.md").read_text()
    known |= set(re.findall(r"\bTXBROKER_[A-Z_]+\b", reference))
    named = {
        (name_of(page), name)
        for page in WRITTEN
        for name in re.findall(r"\bTXBROKER_[A-Z][A-Z_]*[A-Z]\b", page.read_text())
    }
    assert sorted(one for one in named if one[1] not in known) == []


def test_partition_states_are_explained() -> None:
    page = (DOCS / "how-to/run-several-proxies.md").read_text()
    runbook = (DOCS / "runbooks/TxBrokerNotReady.md").read_text()
    assert [state for state in HalfPartitionState if f"`{state}`" not in page] == []
    well = {HalfPartitionState.OWNED, HalfPartitionState.ELSEWHERE}
    assert [
        each for each in HalfPartitionState if f"`{each}`" not in runbook and each not in well
    ] == []


def codes_of_causes() -> set[str]:
    """Return the codes of all causes that the code makes."""
    found: set[str] = set()
    for path in committed("txbroker/**/*.py", "checkers/*.py"):
        if "testing" in path.parts:
            continue
        constants = {
            target.id: node.value.value
            for node in tree(path).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in nodes(path):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Cause" and node.args:
                code = node.args[0]
                if isinstance(code, ast.Constant):
                    found.add(str(code.value))
                elif isinstance(code, ast.Name) and code.id in constants:
                    found.add(str(constants[code.id]))
    return found | {code for code, _ in CAUSES.values()}


def test_causes_of_refusal_and_delay_have_advice() -> None:
    codes = codes_of_causes()
    assert {"unknown_topic", "too_large", "body_lost", "no_leader"} <= codes
    # They last for moments only, from one promotion transaction to the next.
    codes -= {"unexamined", "turn_full"}
    text = "".join(
        (DOCS / "runbooks" / f"{name}.md").read_text()
        for name in ("TxBrokerRefusing", "TxBrokerPromotionStalled")
    )
    assert sorted(code for code in codes if f"`{code}`" not in text) == []


def test_rocketmq_comparison_names_its_tests() -> None:
    page = (DOCS / "design/rocketmq.md").read_text()
    _, _, *rows = [line for line in page.splitlines() if line.startswith("|")]
    named = [re.findall(r"`(test_\w+)`", row.rpartition(" | ")[2]) for row in rows]
    assert [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    better = tree(ROOT / "tests/e2e/test_better.py")
    functions = [one.name for one in better.body if isinstance(one, ast.AsyncFunctionDef)]
    there = [name for name in functions if name.startswith("test_")]
    assert sorted(name for tests in named for name in tests) == sorted(there)
    assert rows


def names_in(*patterns: str) -> set[str]:
    """Return the functions, classes and `Class.method`s that files define."""
    found = set()
    for path in committed(*patterns):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.ClassDef):
                found |= {node.name}
                found |= {f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name")}
    return found


def test_walks_name_functions_of_the_code() -> None:
    page = (DOCS / "design.md").read_text()
    walks = re.findall(r"^## A [a-z-]+, step by step\n(.*?)(?=^## )", page, re.M | re.S)
    assert len(walks) == 4
    names = names_in("txbroker/*.py", "txbroker/**/*.py", "checkers/*.py")
    for walk in walks:
        cells = "".join(line.split("|", 2)[2] for line in walk.splitlines() if line[:1] == "|")
        named = set(re.findall(r"`([A-Z][A-Za-z]+(?:\.[a-z_]+)?|_?[a-z]+_[a-z_]+)`", cells))
        assert len(named) > 5
        assert sorted(named - names - CONSTANTS) == []


def test_files_named_in_design_exist() -> None:
    pages = [DOCS / "design.md", *sorted((DOCS / "design").glob("*.md"))]
    missing = [
        f"{name_of(page)}: {path}"
        for page in pages
        for path in re.findall(r"`([a-z_]+/[\w./]+)`", page.read_text())
        if not any((at / path).exists() for at in (ROOT, PACKAGE))
    ]
    assert missing == []


def test_drawing_of_owner_shows_its_parts() -> None:
    owner = ROOT / "txbroker/proxy/partition/owner.py"
    text = ast.get_docstring(tree(owner)) or ""
    drawing = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    drawn = set(re.findall(r"\b[A-Z][A-Za-z]+(?:\._?[a-z]+)?\b", drawing))
    assert sorted(drawn - names_in("txbroker/**/*.py", "checkers/*.py")) == []
    # Shared by the parts, and their clocks.
    shared = ("clock", "context", "pace", "visible")
    imported = {
        name.name
        for node in tree(owner).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ROOM)
        for name in node.names
        if (node.module or "").removeprefix(ROOM) not in shared
    }
    called = {getattr(one.func, "id", "") for one in nodes(owner) if isinstance(one, ast.Call)}
    parts = {name for name in imported & called if name[0].isupper()}
    assert len(parts) > 7
    assert sorted(part for part in parts if not re.search(rf"\b{part}\b", text)) == []


# --- values ----------------------------------------------------------------------------------

UNITS = {"": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "s": 1.0, "ms": 0.001}
# All that these files name is about batching.
ABOUT_BATCHING = (
    "txbroker/proxy/partition/appender.py",
    "txbroker/kafka/client/shared_writes.py",
    "txbroker/batching.py",
)


def batching_rows() -> list[tuple[str, str, str, str]]:
    """Return name, file, value and measurement of each row of the page on batching."""
    page = (DOCS / "reference/batching.md").read_text()
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return [
        (name.strip().strip("`"), path.strip("`"), value, measured.strip())
        for name, path, value, _, measured in rows
    ]


def default_of(name: str, path: str) -> float:
    """Return a constant, or with `Class.field` the field's default, in the unit of its name."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    owner, _, attribute = name.rpartition(".")
    if not owner:
        return float(getattr(module, name))
    kind = getattr(module, owner)
    if kind is Settings:
        return float(Settings.model_fields[attribute].default)
    return float(inspect.signature(kind).parameters[attribute].default)


def test_batching_constants_match_page() -> None:
    faults = []
    for name, path, value, measured in batching_rows():
        number, _, unit = value.partition(" ")
        shown, actual = float(number.replace(",", "")) * UNITS[unit], default_of(name, path)
        if shown != pytest.approx(actual) or not measured:
            faults.append(f"{path} {name}: {actual}, {value} on the page, {measured!r}")
    assert faults == []


def test_batching_page_lists_all_constants() -> None:
    listed = {(name, path) for name, path, _, _ in batching_rows()}
    there = {
        (target.id, path)
        for path in ABOUT_BATCHING
        for node in tree(ROOT / path).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z][A-Z_]+", target.id)
    }
    assert there - listed == set()
    assert len(listed) > len(there) > len(ABOUT_BATCHING)


# --- pages -----------------------------------------------------------------------------------


def links(page: Path) -> set[Path]:
    """Return the pages of the docs that a page links to."""
    targets = re.findall(r"\[[^\]]*\]\(([^)\s#]+)", page.read_text())
    return {(page.parent / one).resolve() for one in targets if not re.match(r"[a-z]+:", one)}


def test_pages_are_linked_from_index() -> None:
    seen: set[Path] = set()
    ahead = {DOCS / "README.md"}
    while ahead:
        page = ahead.pop()
        seen.add(page)
        further = {one for one in links(page) if one.suffix == ".md" and one.exists()}
        ahead |= {one for one in further if one.is_relative_to(DOCS)} - seen
    assert {name_of(page) for page in committed("docs/*.md")} - {
        name_of(page) for page in seen
    } == set()


def test_linked_sections_exist() -> None:
    broken = []
    for page in PAGES:
        for target, section in re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", page.read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            other = page if not target else page.parent / target
            if other.suffix == ".md" and section not in anchors(other.read_text()):
                broken.append(f"{name_of(page)}: {target}#{section}")
    assert broken == []


def anchors(text: str) -> set[str]:
    """Return the names by which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    named = re.findall(r'<a id="([^"]+)"', text)
    return {heading.replace(" ", "-") for heading in plain} | set(named)


def test_threat_table_names_existing_tests() -> None:
    page = (DOCS / "operate/security.md").read_text()
    section = page.partition("\n## Mechanism against each threat\n")[2].partition("\n## ")[0]
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    named = [re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row.rpartition(" | ")[2]) for row in rows]
    assert [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    for path, name in {one for tests in named for one in tests}:
        there = {
            one.name
            for one in tree(ROOT / "tests" / path).body
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            and one.name.startswith("test_")
        }
        assert there, path
        assert not name or name in there, f"{path}::{name}"
    assert rows
