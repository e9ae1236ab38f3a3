"""The files of the repository and the imports of the package, each parsed once."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def committed(*patterns: str) -> list[Path]:
    """Return the files of these patterns that git knows, or would after `git add`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def name_of(path: Path) -> str:
    """Return a path as the tests' output shows it."""
    return str(path.relative_to(ROOT))


PYTHON = committed("*.py")
PACKAGE = committed("txbroker/*.py", "checkers/*.py", "cli/*.py", "spark/*.py")


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree."""
    return tuple(ast.walk(tree(path)))


@cache
def statements(path: Path) -> tuple[ast.stmt, ...]:
    """Return all statements of a file, which are a tenth of its nodes."""
    return tuple(_statements(tree(path)))


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        for inner in getattr(node, name, ()):
            if isinstance(inner, ast.stmt):
                yield inner
            yield from _statements(inner)


def module_of(path: Path) -> str:
    """Return the module name of a file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "txbroker" else ("txbroker", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PACKAGE}


def imported(path: Path) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yield the module of each import of a file at any depth, the names from it, and the line."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, (), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name(f"{'.' * node.level}{node.module or ''}", package)
            yield base, tuple(alias.name for alias in node.names), node.lineno


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, at any depth; `from a import b` as `a.b` too."""
    return frozenset(
        name
        for base, names, _ in imported(path)
        for name in (base, *(f"{base}.{n}" for n in names))
    )


@cache
def own_imports(module: str) -> dict[str, int]:
    """Return the modules of the package that a module imports, also for types and in functions,
    with the lines. `from a import b` is an import of the module `a.b`, if there is one."""
    found: dict[str, int] = {}
    for base, names, line in imported(MODULES[module]):
        for name in names or ("",):
            inner = f"{base}.{name}"
            other = inner if inner in MODULES else base
            if other in MODULES and other != module:
                found.setdefault(other, line)
    return found


def reached(start: str) -> dict[str, str]:
    """Return every module that importing `start` brings in, with the module that names it."""
    found: dict[str, str] = {}
    todo = deque([start])
    while todo:
        module = todo.popleft()
        for name in imports(MODULES[module]):
            if name not in found:
                found[name] = module
                if name in MODULES:
                    todo.append(name)
    return found


def reached_own(*starts: str) -> dict[str, str]:
    """Return the modules of the package that these are or import, directly or through others, each
    with the file and line that import it; "": it is one of these."""
    found = dict.fromkeys(starts, "")
    todo = deque(starts)
    while todo:
        module = todo.popleft()
        for name, line in own_imports(module).items():
            if name not in found:
                found[name] = f"{name_of(MODULES[module])}:{line}"
                todo.append(name)
    return found
