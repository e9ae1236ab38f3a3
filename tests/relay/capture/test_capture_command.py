"""`txbroker capture` from the mapping file to records that consumers see."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.kit.cli import Call, Result, running
from tests.kit.database_servers import MariaServer
from tests.kit.topic_reader import create_topic, read_topics
from tests.kit.until import DEADLINE_S, unique, until
from tests.relay.capture.maria_world import MariaWorld
from txbroker.cli.main import cli
from txbroker.cli.run import run
from txbroker.embedded import EmbeddedKafka

pytestmark = pytest.mark.full


class Shop(NamedTuple):
    """A database with table `orders (id, item)` and its mapping file."""

    file: Path
    topic: str
    execute: Callable[..., Any]


@pytest.fixture(params=["mariadb", "sqlite"])
def shop(request: pytest.FixtureRequest, kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[Shop]:
    """A database of each kind that this page captures."""
    topic = create_topic(kafka.bootstrap, unique("orders"))
    entry = f'[[tables]]\ntable = "orders"\ntopic = "{topic}"\n'
    top = f'kafka = "{kafka.bootstrap}"\ntopic_prefix = "{unique("capture")}"\n'
    if request.param == "mariadb":
        world = MariaWorld(request.getfixturevalue("server"), tmp_path, f"{top}{entry}")
        yield Shop(world.file, topic, world.execute)
        return
    file, database = tmp_path / "capture.toml", tmp_path / "shop.db"
    file.write_text(f'name = "shop"\ndatabase = "sqlite:///{database}"\n{top}{entry}')
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:

        def execute(*statements: str) -> None:
            for statement in statements:
                connection.execute(statement)

        execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item)")
        yield Shop(file, topic, execute)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call `txbroker capture` in this process."""
    for name in list(os.environ):
        if name.startswith("TXBROKER_"):
            monkeypatch.delenv(name)

    def calling(*arguments: object) -> Result:
        capsys.readouterr()
        code = run(cli, ["capture", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Result(code, out, err)

    return calling


def items(kafka: EmbeddedKafka, shop: Shop) -> list[tuple[str, str | None]]:
    """Return operation and item of what consumers see."""
    values = [
        msgspec.json.decode(each.value or b"")
        for each in read_topics(kafka.bootstrap, [shop.topic])
    ]
    return [(each["operation"], (each["after"] or {}).get("item")) for each in values]


def test_changes_are_visible_once_from_apply_to_remove(
    call: Call, kafka: EmbeddedKafka, shop: Shop
) -> None:
    refused = call("run", shop.file, "--until-drained")
    assert refused.code == 1
    assert "run `txbroker capture apply FILE`" in refused.err
    assert "to do" in call("plan", shop.file).out
    assert call("apply", shop.file).code == 2  # no terminal to confirm
    assert call("apply", shop.file, "--yes").code == 0
    assert "There is nothing to do." in call("apply", shop.file, "--yes").err
    shop.execute(
        "INSERT INTO orders VALUES (1, 'a')",
        "BEGIN",
        "INSERT INTO orders VALUES (2, 'never')",
        "ROLLBACK",
        "BEGIN",
        "UPDATE orders SET item = 'b'",
        "INSERT INTO orders VALUES (3, 'c')",
        "COMMIT",
    )
    drained = call("run", shop.file, "--until-drained")
    assert drained.code == 0, drained.err
    assert items(kafka, shop) == [("insert", "a"), ("update", "b"), ("insert", "c")]
    removed = call("remove", shop.file, "--yes")
    assert removed.code == 0
    assert "What stays: the" in removed.err
    assert "to do" in call("plan", shop.file).out


def test_takeover_and_kill_repeat_nothing(
    call: Call, kafka: EmbeddedKafka, server: MariaServer, tmp_path: Path
) -> None:
    topic = create_topic(kafka.bootstrap, unique("orders"))
    world = MariaWorld(
        server,
        tmp_path,
        f'kafka = "{kafka.bootstrap}"\n[[tables]]\ntable = "orders"\ntopic = "{topic}"\n',
    )
    assert call("apply", world.file, "--yes").code == 0
    with running("capture", "run", world.file) as first:
        world.execute("INSERT INTO orders VALUES (1, 'a')")
        asyncio.run(until(lambda: read_topics(kafka.bootstrap, [topic])))
        drained = call("run", world.file, "--until-drained")
        assert drained.code == 0, drained.err
        world.execute("INSERT INTO orders VALUES (2, 'b')")
        _, err = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 1
    assert "another process has taken over capture" in err
    with running("capture", "run", world.file):  # killed with changes in flight
        world.execute(*(f"INSERT INTO orders VALUES ({n}, 'c')" for n in range(3, 9)))
    assert call("run", world.file, "--until-drained").code == 0
    keys = [each.key for each in read_topics(kafka.bootstrap, [topic])]
    assert keys == [f'{{"id":{n}}}'.encode() for n in range(1, 9)]


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        ("name = 'shop'\nnames = 'x'\n", 2, "there is no key 'names': did you mean 'name'?"),
        ("name = 'shop'\ndatabase = 'oracle://h/d'\nemitted = true\n", 2, "one of the forms"),
        ("name = 'shop'\ndatabase = 'mariadb://u@127.0.0.1:1/d'\nemitted = true\n", 1, "MariaDB d"),
    ],
)
def test_faults_are_sentences(
    call: Call, tmp_path: Path, text: str, code: int, sentence: str
) -> None:
    file = tmp_path / "capture.toml"
    file.write_text(text)
    done = call("plan", file)
    assert (done.code, sentence in done.err) == (code, True), done.err
