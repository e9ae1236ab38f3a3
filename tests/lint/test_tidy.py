"""Rules no linter has: imports between rooms, unfinished work, tools, links of the docs."""

import ast
import configparser
import re
import subprocess
import sys
from collections import Counter

import pytest
from mypy.modulefinder import FindModuleCache, SearchPaths

from tests.kit import database_servers
from tests.lint.package import (
    MODULES,
    PACKAGE,
    ROOT,
    committed,
    imports,
    name_of,
    nodes,
    reached,
    tree,
)

NO_CORE_IMPORT = frozenset(
    """aiohttp aiokafka asyncio click concurrent datetime http io logging multiprocessing os
    pathlib random requests secrets select selectors shutil signal socket sqlite3 ssl
    structlog subprocess sys tempfile threading time urllib uuid""".split()  # noqa: SIM905
)
# Put together here so that this file does not hold them.
FORBIDDEN = re.compile(
    r"\b(?:"
    + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, r"(?<!asked )for " + "now", "place" + "holder"])
    + r")\b"
)


CORE = [module for module in MODULES if module.startswith("txbroker.core")]


def test_core_does_no_io() -> None:
    impure = {
        f"{module}: {by} imports {name}"
        for module in CORE
        for name, by in reached(module).items()
        if is_impure(name)
    }
    assert impure == set()


def is_impure(name: str) -> bool:
    return name.partition(".")[0] in NO_CORE_IMPORT


def test_core_calls_no_builtin_that_does_io() -> None:
    calls = {
        f"{module}: {node.func.id}"
        for module in CORE
        for node in nodes(MODULES[module])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("open", "input", "exec", "eval", "__import__")
    }
    assert calls == set()


def test_only_the_door_imports_aiokafka() -> None:
    culprits = {
        module
        for module, path in MODULES.items()
        if not module.startswith("txbroker.kafka")
        if any(name.partition(".")[0] == "aiokafka" for name in imports(path))
    }
    assert culprits == set()


def test_picture_of_rooms_matches_imports() -> None:
    drawn: set[tuple[str, str]] = set()
    picture = (ROOT / "docs/design.md").read_text().partition("```mermaid")[2].partition("```")[0]
    for line in picture.splitlines():
        room, arrow, others = line.partition("-->")
        drawn |= {(room.strip(), other.strip()) for other in others.split("&") if arrow}
    found = {
        (module.split(".")[1], name.split(".")[1])
        for module, path in MODULES.items()
        for name in imports(path)
        if module.count(".") and name.startswith("txbroker.") and name in MODULES
    }
    everybodys = {"core", "errors"}
    assert {pair for pair in drawn if pair[1] not in everybodys} == {
        (room, other) for room, other in found if room != other and other not in everybodys
    }
    assert {other for room, other in found if room in everybodys} <= everybodys


def test_rooms_of_picture_are_described() -> None:
    section = (ROOT / "docs/design.md").read_text().partition("\n## The rooms\n")[2]
    table, _, rest = section.partition("```mermaid\n")
    lines = dict(re.findall(r"^\| `((?:txbroker/)?(\w+)(?:/|\.py))`", table, re.M))
    assert [path for path in lines if not (ROOT / path).exists()] == []
    rooms = set(re.findall(r"\w+", rest.partition("```")[0].partition("\n")[2]))
    assert rooms - set(lines.values()) == set()


# A dependency of pydantic-settings, and optional ones.
UNDECLARED = frozenset(
    {
        "pydantic",
        "opentelemetry",
        "psycopg",
        "psycopg2",
        "pymysql",
        "sqlalchemy",
        "django",
        "uvloop",
    }
)


@pytest.mark.parametrize("module", ["main", "demo.command", "demo.worker"])
def test_demo_imports_only_what_it_installs(module: str) -> None:
    """Above all neither Spark nor development tools: it is what a stranger tries first."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    makefile = (ROOT / "Makefile").read_text()
    extras = ["consumer", *makefile.partition("RUNTIME := ")[2].split()[0].split(",")]
    needed = [setup["options.extras_require"][extra] for extra in extras]
    packages = re.findall(
        r"^[\w-]+", "\n".join([setup["options"]["install_requires"], *needed]), re.M
    )
    installed = {package.replace("-", "_") for package in packages} | UNDECLARED
    imported = {name.partition(".")[0] for name in reached(f"txbroker.cli.{module}")}
    assert imported - installed - sys.stdlib_module_names <= {"txbroker"}


@pytest.mark.parametrize("module", ["txbroker.sdk", "txbroker.core.ledger", "txbroker.errors"])
def test_clients_load_neither_aiokafka_nor_pyspark(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('aiokafka', 'pyspark') if m in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True
    )
    assert loaded.stdout.strip() == "[]"


def test_no_unfinished_work_is_marked() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in committed("*.py", "*.md", "*.toml", "*.cfg", "*.yaml", "*.yml", "Makefile")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert found == []


def test_type_checker_sees_every_file() -> None:
    """The folders of the top level are linked into the package: a lost link would hide them."""
    search = FindModuleCache(SearchPaths((str(ROOT),), (), (), ()), None, None)
    seen = {source.module for source in search.find_modules_recursive("txbroker")}
    assert set(MODULES) - seen == set()


def test_coverage_sees_every_file() -> None:
    """Coverage silently skips folders that are not among its sources."""
    code = """
import coverage
measuring = coverage.Coverage(data_file=None)
measuring.start()
import txbroker
measuring.stop()
print(*measuring.get_data().measured_files(), sep="\\n")
"""
    measured = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True
    )
    assert set(measured.stdout.splitlines()) == {str(path.resolve()) for path in PACKAGE}


def test_make_installs_tools_of_tests() -> None:
    needed = {
        ast.literal_eval(node.args[0])
        for path in committed("tests/*.py")
        if "needs_tool(" in path.read_text()
        for node in nodes(path)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "needs_tool"
    }
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    found = re.search(r"^TOOLS := (.*)$", makefile, re.M)
    assert found is not None
    needed |= {*database_servers.PROGRAMS}
    installed = {word.partition("=")[0] for word in found[1].split()}
    assert needed == installed | {"helm"}


def test_links_of_docs_resolve() -> None:
    broken = [
        f"{name_of(page)}: {target}"
        for page in committed("*.md")
        for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", page.read_text())
        if not re.match(r"[a-z]+:|#", target)
        if not (page.parent / target.partition("#")[0]).exists()
    ]
    assert broken == []


def test_links_of_the_readme_work_outside_a_clone() -> None:
    """It is also the page of the package index; the address stands in setup.cfg alone."""
    text = (ROOT / "README.md").read_text()
    parts = configparser.ConfigParser()
    parts.read(ROOT / "setup.cfg")
    (source,) = re.findall(r"^Source = (\S+)$", parts["metadata"]["project_urls"], re.M)
    relative = re.findall(r"\]\((?!https:|#)([^)\s]+)\)", text)
    relative += re.findall(r"^\[[^\]]+\]: (?!https:)(\S+)$", text, re.M)
    assert relative == []
    linked = re.findall(rf"{re.escape(source)}/(?:blob|raw)/main/([^)#\s]+)", text)
    assert linked
    assert [path for path in linked if not (ROOT / path).exists()] == []


def test_modules_bind_each_constant_once() -> None:
    """The second value would also be that of functions above it."""
    faults = []
    for path in [*PACKAGE, *committed("benchmarks/*.py", "charts/*.py")]:
        body = tree(path).body
        targets = [t for node in body if isinstance(node, ast.Assign) for t in node.targets]
        targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
        names = Counter(target.id for target in targets if isinstance(target, ast.Name))
        faults += [(name_of(path), name) for name, count in names.items() if count > 1]
    assert faults == []
