"""`txbroker outbox`: rows are listed, shown, decided, retried and purged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.databases.places import Place, place_of
from tests.relay.shops import emptied, message, rows, states
from txbroker.cli.main import cli
from txbroker.core.records import Message
from txbroker.relay.outbox import Outbox

REASON = ("--reason", "the bank confirms it", "--yes")


def call(*arguments: str, url: str = "", **options: Any) -> Result:
    env = {"TXBROKER_DATABASE_URL": url} if url else {}
    return CliRunner().invoke(cli, ["outbox", *arguments], env=env, **options)


def listed(url: str, *arguments: str) -> list[dict[str, Any]]:
    done = call("list", url, *arguments, "-o", "json")
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.fixture
def filled(kind: Place, outbox: Outbox) -> Place:
    """An outbox with a row in each state, named by its key."""
    with kind.transaction() as connection:
        outbox.add(connection, message("waiting"), Message("stock", "old", b"\xff\xfe"))
        outbox.add(connection, message("refused"), message("delivered"))
    outbox.prepare(message("asked1"), message("asked2"))
    outbox.prepare(message("given up"))
    change = "UPDATE txbroker_outbox SET "
    for key, values in {
        "refused": "state = 'MESSAGE_ERROR', cause = 'topic payments is missing', retries = 10, "
        "timeout_at = 5",
        "delivered": "state = 'GLOBAL_COMMIT', changed_at = 5",
        "old": "created_at = 5",
        "given up": "state = 'MESSAGE_ERROR', check_attempts = 15, cause = 'no answer'",
    }.items():
        hexed = key.encode().hex()
        literal = f"'\\x{hexed}'" if kind.dialect.name == "postgresql" else f"X'{hexed}'"
        kind.execute(f"{change}{values} WHERE message_key = {literal}")
    return kind


def id_of(place: Place, key: str) -> str:
    return next(row.id for row in rows(place) if row.key == key.encode())


def test_list_chooses_by_state_age_and_topic(filled: Place) -> None:
    def keys(*arguments: str) -> list[str]:
        return [row["key"] for row in listed(filled.url, *arguments)]

    assert keys() == ["given up", "asked2", "asked1", "delivered", "refused", "old", "waiting"]
    assert keys("--state", "UNKNOWN", "--state", "GLOBAL_COMMIT") == [
        "asked2",
        "asked1",
        "delivered",
    ]
    assert keys("--topic", "stock") == keys("--older-than", "1h") == ["old"]
    assert keys("--limit", "2") == ["given up", "asked2"]
    limited = call("list", filled.url, "--limit", "2")
    assert "There are more rows than 2" in limited.stderr
    table = call("list", url=filled.url).stdout.splitlines()
    assert table[0].split()[:5] == ["ID", "STATE", "TOPIC", "KEY", "AGE"]
    assert "topic payments is missing" in table[5]
    assert "PROBLEM" not in table[0]
    nothing = call("list", filled.url, "--state", "NONE")
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "no such rows" in nothing.stderr


def test_show_has_the_message(filled: Place) -> None:
    id = id_of(filled, "old")
    shown = json.loads(call("show", filled.url, id, "-o", "json").stdout)
    assert (shown["id"], shown["topic"], shown["key"]) == (id, "stock", "old")
    assert (shown["value_base64"], shown["problem"]) == ("//4=", "")
    lines = call("show", id, url=filled.url).stdout
    assert "state           LOCAL_COMMIT" in lines
    assert "created_at      1970-01-01 00:00:00.005Z" in lines
    missing = call("show", filled.url, "nowhere")
    assert (missing.exit_code, "there is no row nowhere" in missing.output) == (1, True)


@pytest.mark.parametrize(
    ("decision", "state"), [("commit", "LOCAL_COMMIT"), ("rollback", "LOCAL_ROLLBACK")]
)
def test_decide_takes_all_that_was_prepared_together(
    filled: Place, decision: str, state: str
) -> None:
    done = call("decide", filled.url, id_of(filled, "asked2"), decision, *REASON)
    assert (done.exit_code, "2 rows" in done.stderr) == (0, True), done.output
    done = call("decide", id_of(filled, "given up"), decision, *REASON, url=filled.url)
    assert (done.exit_code, "1 row " in done.stderr) == (0, True), done.output
    found = {row.key.decode(): row for row in rows(filled)}
    for key in ("asked1", "asked2", "given up"):
        assert found[key].state == state
        assert found[key].cause.endswith(": the bank confirms it")
    keys = [row.key for row in rows(filled)]
    assert keys.index(b"asked1") + 1 == keys.index(b"asked2")
    again = call("decide", filled.url, id_of(filled, "asked2"), decision, *REASON)
    assert (again.exit_code, "is not undecided" in again.output) == (1, True)


def test_retry_takes_rows_that_kafka_refused(filled: Place) -> None:
    for key, problem in {
        "given up": "is undecided: `txbroker outbox decide`",
        "waiting": "is not in the state MESSAGE_ERROR",
    }.items():
        refused = call("retry", filled.url, id_of(filled, key), *REASON)
        assert (refused.exit_code, problem in refused.output) == (1, True), refused.output
    place_before = [row.key for row in rows(filled)]
    done = call("retry", filled.url, id_of(filled, "refused"), *REASON)
    assert (done.exit_code, "1 row to be" in done.stderr) == (0, True), done.output
    row = next(row for row in rows(filled) if row.key == b"refused")
    assert (row.state, row.timeout_at) == ("LOCAL_COMMIT", None)
    assert "the bank confirms it" in row.cause
    assert [row.key for row in rows(filled)] == place_before
    filled.execute("UPDATE txbroker_outbox SET state = 'MESSAGE_ERROR', check_attempts = 0")
    done = call("retry", "--all", *REASON, url=filled.url)
    assert (done.exit_code, "7 rows to be" in done.stderr) == (0, True), done.output
    assert {state for state, _ in states(filled)} == {"LOCAL_COMMIT"}


def test_purge_deletes_finished_rows(filled: Place) -> None:
    done = call("purge", filled.url, "--older-than", "1d", "--yes")
    assert (done.exit_code, "1 row deleted" in done.stderr) == (0, True), done.output
    assert b"delivered" not in [row.key for row in rows(filled)]
    assert len(rows(filled)) == 6


USES = {
    "retry nothing": (("retry", *REASON), "give ids, or --all"),
    "retry both": (("retry", "a", "--all", *REASON), "give ids, or --all"),
    "decide what": (("decide", "a", "maybe", *REASON), "'maybe' is not one of"),
    "decide why": (("decide", "a", "commit", "--yes"), "--reason"),
    "no terminal": (("decide", "a", "commit", "--reason", "b"), "give --yes to go on"),
    "age": (("purge", "--older-than", "yesterday", "--yes"), "is no time: give an age"),
    "name": (("create", "--name", "a b"), "has at most 200 letters"),
}


@pytest.mark.parametrize("use", USES)
def test_wrong_use_is_explained(tmp_path: Any, use: str) -> None:
    arguments, problem = USES[use]
    done = call(*arguments, url=f"sqlite:///{tmp_path}/shop.db")
    assert (done.exit_code, problem in done.output) == (2, True), done.output
    assert list(tmp_path.iterdir()) == []


# --- impossible rows -------------------------------------------------------------------------

EDITS = {
    "state": ("state = 'DONE'", "state 'DONE' is none of UNKNOWN,"),
    "no state": ("state = NULL", "state None is none of UNKNOWN,"),
    "deliver_at": ("deliver_at = 5", "deliver_at is reserved: set it to NULL"),
    "shard": ("shard = 99", "shard 99 is not between 0 and 15"),
    "times": ("created_at = 'now'", "created_at 'now' is no whole number"),
    "topic": ("topic = 'a b'", "no message: a topic has 1 to 249"),
    "headers": ("headers = '[[1]]'", "no message: headers[0]: must be a pair"),
    "json": ("headers = 'x'", "no message: "),
    "partition": ("partition_id = 'x'", "no message: "),
    "text": ("message_value = 'text', message_key = 'k'", ""),
}


@pytest.mark.parametrize("edit", EDITS)
def test_impossible_row_is_shown_with_the_next_step(tmp_path: Any, edit: str) -> None:
    """Of a table whose constraints were dropped."""
    place = place_of(None, tmp_path, "sqlite")  # type: ignore[arg-type]
    change, problem = EDITS[edit]
    with emptied(place) as outbox, place.transaction() as connection:
        outbox.add(connection, message("a"))
    _drop_constraints(place)
    place.execute(f"UPDATE txbroker_outbox SET {change}")
    (id,) = place.select("SELECT id FROM txbroker_outbox")[0]
    shown = call("show", place.url, id, "-o", "json")
    assert problem in json.loads(shown.stdout)["problem"]
    assert call("show", place.url, id).exit_code == 0
    table = call("list", place.url)
    assert (table.exit_code, id in table.stdout) == (0, True), table.output
    if edit in ("state", "deliver_at"):
        assert "PROBLEM" in table.stdout


def _drop_constraints(place: Place) -> None:
    names = [row[1] for row in place.select("PRAGMA table_info(txbroker_outbox)")]
    kinds = {row[1]: row[2] for row in place.select("PRAGMA table_info(txbroker_outbox)")}
    columns = ", ".join(f"{name} {kinds[name]}" for name in names)
    place.execute("ALTER TABLE txbroker_outbox RENAME TO checked")
    place.execute(f"CREATE TABLE txbroker_outbox ({columns})")
    place.execute(f"INSERT INTO txbroker_outbox SELECT {', '.join(names)} FROM checked")
