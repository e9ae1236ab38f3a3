"""A fresh build holds exactly the package, and its command runs."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from txbroker import __version__

ROOT = Path(__file__).parents[2]
FOLDERS = {"checkers": "txbroker/checkers", "cli": "txbroker/cli", "spark": "txbroker/spark"}
DATA = (".lock", "py.typed", ".html", ".css", ".js", ".svg")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from what git knows."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if name and (path.is_symlink() or path.is_file()):
            copy = source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                copy.symlink_to(path.readlink())
            else:
                copy.write_bytes(path.read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", target, source], check=True, capture_output=True)
    (found,) = target.glob("*.whl")
    return found


def test_wheel_has_every_module_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    code = sorted(name for name in names if ".dist-info/" not in name)
    wanted = set()
    for path in [
        *ROOT.glob("txbroker/**/*"),
        *(p for f in FOLDERS for p in ROOT.glob(f"{f}/**/*")),
    ]:
        inside = path.relative_to(ROOT)
        top = FOLDERS.get(inside.parts[0], inside.parts[0])
        linked = len(inside.parts) > 1 and (ROOT / inside.parts[0] / inside.parts[1]).is_symlink()
        if path.name.endswith((".py", *DATA)) and not linked:
            wanted.add("/".join((top, *inside.parts[1:])))
    assert code == sorted(wanted)


def test_the_installed_command_runs(wheel: Path, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path]
    subprocess.run([*install, wheel], check=True, capture_output=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import txbroker.__main__ as m;"
        "print(m.__file__); m.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, "--version"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        str(tmp_path / "txbroker/__main__.py"),
        f"txbroker, version {__version__}",
    ]


# --- the SDK alone ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdk(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of `pip install txbroker`, in an environment without others."""
    folder = tmp_path_factory.mktemp("sdk")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", packages]
    subprocess.run(
        [*install, "-c", ROOT / "constraints.txt", wheel], check=True, capture_output=True
    )
    return packages


def python_of(packages: Path) -> Path:
    return packages.parents[2] / "bin/python"


def alone(sdk: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages of the SDK, and no others."""
    command = [python_of(sdk), "-I", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_sdk_is_small(sdk: Path) -> None:
    packages = {path.name.partition("-")[0] for path in sdk.glob("*.dist-info")}
    assert packages == {"txbroker", "msgspec", "websockets"}
    assert sum(path.stat().st_size for path in sdk.rglob("*") if path.is_file()) <= 15_000_000


def test_the_sdk_imports_neither_proxy_nor_web_server(sdk: Path) -> None:
    done = alone(sdk, "-c", "import txbroker.sdk, sys; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    modules = done.stdout.split()
    assert {name.partition(".")[0] for name in modules} & {
        "aiohttp", "aiokafka", "pydantic", "structlog", "prometheus_client", "click", "rich"
    } == set()  # fmt: skip
    rooms = {".".join(name.split(".")[:2]) for name in modules if name.startswith("txbroker.")}
    assert not rooms & {f"txbroker.{room}" for room in ("proxy", "kafka", "consumer", "cli")}


def test_the_sdk_is_imported_in_150_ms(sdk: Path) -> None:
    """By the processor's time: other tests on the machine do not count."""
    code = (
        "import time; began = time.process_time(); import txbroker.sdk;"
        "print(time.process_time() - began)"
    )
    assert min(float(alone(sdk, "-c", code).stdout) for _ in range(5)) <= 0.15


@pytest.mark.parametrize(
    ("code", "extra"),
    [("import txbroker.consumer", "consumer"), ("import txbroker.testing.broker", "proxy")],
)
def test_missing_extra_is_named_on_import(sdk: Path, code: str, extra: str) -> None:
    done = alone(sdk, "-c", code)
    assert done.returncode == 1
    sentence = rf"the Python package \w+ is missing, run: pip install 'txbroker\[{extra}\]'"
    assert re.search(f"MissingExtra: {sentence}$", done.stderr.strip())


def without(missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where a package is missing."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from txbroker.__main__ import main; main()"
    )
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("click", ["--help"], "cli"),
        ("rich", ["demo"], "cli"),
        ("pydantic", ["proxy"], "proxy"),
        ("aiohttp", ["dev"], "proxy"),
        ("aiokafka", ["topics", "plan"], "proxy"),
        ("pyspark", ["audit", "run"], "spark"),
    ],
)
def test_command_names_the_missing_extra(missing: str, arguments: list[str], extra: str) -> None:
    done = without(missing, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"Error: the Python package {missing} is missing, run: pip install 'txbroker[{extra}]'\n"
    )


@pytest.mark.parametrize("missing", ["aiokafka", "structlog", "pydantic"])
def test_mistyped_command_is_named_without_the_extras(missing: str) -> None:
    done = without(missing, "shwo")
    assert done.returncode == 2
    assert "There is no command 'shwo'" in done.stderr


def test_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "txbroker", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"txbroker, version {__version__}\n"


# --- a user's project -------------------------------------------------------------------------

PROJECT = """
from collections.abc import Mapping
from datetime import date

from txbroker.sdk import (
    BlockingTransaction,
    BlockingTransactionalProducer,
    CheckRequest,
    Decision,
    Limits,
    Message,
    Outcome,
    Rollback,
    SqliteBarrier,
    Transaction,
    TransactionalProducer,
    TransactionOptions,
    parse_check,
    verify_webhook,
)

OPTIONS: TransactionOptions = {"check_attempts_max": 3, "check_timeout_s": 1.5}
MESSAGES = [
    Message("payments", key="42", value="10 EUR", headers={"source": "shop"}),
    Message("payments", b"42", b"10 EUR", [("source", b"shop"), ("empty", None)], 0, 1),
    Message.json("orders", {"number": 42, "day": date(2026, 1, 1)}, key="42"),
]


async def check(request: CheckRequest) -> Decision:
    return Decision.COMMIT if request.messages[0].key else Decision.UNKNOWN


async def place() -> Outcome:
    producer = TransactionalProducer("http://127.0.0.1:8470", group="orders", check=check)
    async with producer, producer.transaction(*MESSAGES, **OPTIONS) as tx:
        raise Rollback("sold out")
    seen: Transaction = tx
    return seen.outcome if tx.rolled_back else await producer.send_in_transaction(MESSAGES, local)


async def local(tx: Transaction) -> Decision:
    return Decision.COMMIT


def place_blocking(barrier: SqliteBarrier) -> str:
    producer = BlockingTransactionalProducer(
        ["http://127.0.0.1:8470"], group="orders", check=barrier.check, limits=Limits(retry_s=5)
    )
    with producer.transaction(MESSAGES[0]) as tx:
        seen: BlockingTransaction = tx
        return seen.id
    return producer.prepare(MESSAGES[0], check_after_s=60)


def endpoint(headers: Mapping[str, str], pairs: list[tuple[bytes, bytes]], body: bytes) -> str:
    verify_webhook("s3cret", headers, body)
    verify_webhook("s3cret", pairs, body)
    return parse_check(body).id
"""
MISTAKES = {
    'Message("t", key=5)': "arg-type",
    'Message("t", headers={"a": 1})': "arg-type",
    "Message.json(5, {})": "arg-type",
    'BlockingTransactionalProducer("u", group="g").transaction(M, check_attempt_max=3)': "call-arg",
    'BlockingTransactionalProducer("u", group="g").prepare(M, check_timeout_s="1")': "arg-type",
    'BlockingTransactionalProducer("u", group=b"g")': "arg-type",
    'BlockingTransactionalProducer("u", group="g").commit("id", wait="soon")': "arg-type",
}


def test_types_help_in_a_strict_project(sdk: Path, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(PROJECT)
    lines = ["from txbroker.sdk import BlockingTransactionalProducer, Message", 'M = Message("t")']
    (tmp_path / "mistakes.py").write_text("\n".join([*lines, *MISTAKES]) + "\n")
    done = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir",
            tmp_path / "cache", "--python-executable", python_of(sdk), "shop.py", "mistakes.py",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.findall(r"^(\S+):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.M)
    wanted = [
        ("mistakes.py", str(number), code) for number, code in enumerate(MISTAKES.values(), 3)
    ]
    assert found == wanted, done.stdout + done.stderr
