"""Bulk actions change exactly the shown transactions, once."""

from __future__ import annotations

import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.cli_stub import Asked, Reply, Stub, error, partition_of
from tests.kit.cli import Call
from txbroker.cli import client
from txbroker.cli.client import ApiClient, ApiConnection, ApiError, who
from txbroker.cli.tx import bulk
from txbroker.contract.service import PrepareRequest, execute
from txbroker.core.records import Message
from txbroker.testing.broker import InMemoryBroker

Answer = Callable[..., None]


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "PAUSES_S", (0.01, 0.02, 0.05))


def prepare(memory: InMemoryBroker, count: int, **fields: Any) -> list[str]:
    """Prepare transactions with the values 0, 1, 2…; return their ids in that order."""
    calling = ApiClient(memory.url)
    topic = fields.pop("topic", "t")
    ids = []
    for number in range(count):
        body = {"group": "orders", "messages": [{"topic": topic, "value": str(number)}], **fields}
        ids.append(calling.change("POST", "transactions", body=body)["id"])
    calling.close()
    return ids


def states(memory: InMemoryBroker, ids: list[str]) -> list[str]:
    """Return where transactions stand."""
    return [str(memory.transaction(id).state) for id in ids]


# --- which ones, and the question -------------------------------------------------------------


def test_2500_are_committed_once_and_in_order(
    there: Call, memory: InMemoryBroker, answer: Answer
) -> None:
    async def prepare_all() -> None:
        for number in range(2500):
            message = Message("many", None, str(number).encode())
            request = PrepareRequest("orders", (message,), order_key="one key")
            await execute(memory._proxy.broker, request)

    memory._run(prepare_all())
    answer("2500")
    done = there("tx", "commit", "--state", "pending", "--topic", "many", "--reason", "audited")
    assert (done.code, done.out) == (0, "")
    assert re.search(r"2,500 committed, now (committed|promoted) ", done.err)
    memory.wait_until_settled()
    assert [message.value for message in memory.messages("many")] == [
        str(number).encode() for number in range(2500)
    ]


def test_selection_is_shown_before_the_change(
    there: Call, memory: InMemoryBroker, answer: Answer
) -> None:
    ids = prepare(memory, 9, group="billing") + prepare(memory, 3, topic="u")
    for typed in ("", "y", "yes", "1", "120", "-12"):
        answer(typed)
        shown = there("tx", "rollback", "--state", "pending", "--older-than-s", "0")
        assert (shown.code, shown.out) == (1, ""), typed
        assert shown.err.endswith("Error: nothing was changed: you did not confirm\n")
    lines = shown.err.splitlines()
    assert lines[:3] == [
        "12 transactions",
        "  by group  billing 9, orders 3",
        "  by state  pending 12",
    ]
    assert re.match(r"  oldest    \d+s, prepared \d{4}-", lines[3])
    assert {line.split()[0] for line in lines[6:16]} < set(ids)
    assert lines[16] == "… and 2 more"
    assert f"Roll back these 12 transactions at {memory.url}?" in lines
    assert set(states(memory, ids)) == {"pending"}


def test_few_transactions_need_only_yes(
    there: Call, memory: InMemoryBroker, answer: Answer
) -> None:
    ids = prepare(memory, 10)
    answer("n")
    assert there("tx", "rollback", "--state", "pending", "--group", "orders").code == 1
    assert set(states(memory, ids)) == {"pending"}
    answer("y")
    done = there("tx", "rollback", "--state", "pending", "--group", "orders")
    assert (done.code, len(done.out.splitlines())) == (0, 11)
    assert set(states(memory, ids)) == {"rolled_back"}


def test_author_and_reason_are_recorded(there: Call, memory: InMemoryBroker) -> None:
    which = ("--state", "pending", "--group", "orders")
    for verb in ("commit", "rollback"):
        ids = prepare(memory, 3)
        assert there("tx", verb, *which, "--yes", "--reason", f"{verb} seen").code == 0
        for view in map(memory.transaction, ids):
            assert (view.source, view.reason) == ("operator", f"{verb} seen")
            assert view.by == f"{who()} via http 127.0.0.1"


def test_all_filters_have_to_match(there: Call, memory: InMemoryBroker) -> None:
    wanted = prepare(memory, 3, group="a", topic="x")
    others = prepare(memory, 2, group="a", topic="y") + prepare(memory, 2, group="b", topic="x")
    memory.advance(100)
    others += prepare(memory, 2, group="a", topic="x")
    which = ("--state", "pending", "--group", "a", "--topic", "x", "--older-than-s", "50")
    done = there("tx", "rollback", *which, "--yes", "-o", "json")
    assert sorted(row["id"] for row in done.json) == sorted(wanted)
    assert set(states(memory, others)) == {"pending"}


def test_limit_selects_the_oldest(there: Call, memory: InMemoryBroker) -> None:
    ids = []
    for _ in range(7):  # of those of one millisecond, none is older
        ids += prepare(memory, 1, order_key="one half partition")
        memory.advance(0.002)
    which = ("--state", "pending", "--group", "orders", "--limit", "3", "--yes", "-o", "json")
    assert [row["id"] for row in there("tx", "rollback", *which).json] == ids[:3]
    assert [row["id"] for row in there("tx", "rollback", *which).json] == ids[3:6]


def test_limit_covers_all_states_together(stub: Stub, call: Call) -> None:
    ids = stub.add(3) + stub.add(3, state="refused")
    which = ("--group", "orders", "--limit", "4", "--yes", "-o", "json")
    done = call("tx", "revive", *which, "--url", stub.url)
    assert [row["id"] for row in done.json] == ids[:4]
    assert len(stub.posts()) == 4


def test_default_selects_only_parked_transactions(stub: Stub, call: Call) -> None:
    parked = stub.add(2)
    stub.add(2, state="pending")
    done = call("tx", "commit", "--group", "orders", "--yes", "-o", "json", "--url", stub.url)
    assert [row["id"] for row in done.json] == parked
    assert sorted(row["state"] for row in stub.rows.values()) == ["pending"] * 2 + ["promoted"] * 2


def test_empty_selection_changes_nothing(there: Call) -> None:
    empty = there("tx", "commit", "--group", "missing", "--yes")
    assert empty == (0, "", "There are no such transactions.\n")
    assert there("tx", "revive", "--group", "missing", "--yes", "-o", "json").json == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["commit"], "select transactions: IDs, or filters"),
        (["commit", "--limit", "3"], "select transactions: IDs, or filters"),
        (["revive"], "select transactions: IDs, or filters"),
        (["rollback", "ID", "--state", "parked"], "give IDs or filters such as --group, not both"),
        (["rollback", "ID", "--limit", "3"], "give IDs or filters such as --group, not both"),
        (["check", "ID", "--group", "g"], "give IDs or filters such as --group, not both"),
        (["commit", "--state", "refused"], "'refused' is not one of 'parked', 'pending'"),
        (["check", "--state", "parked"], "'parked' is not 'pending'"),
        (["commit", "--group", "g"], "stdin is no terminal, so you cannot confirm"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_selection_is_refused(
    call: Call, stub: Stub, arguments: list[str], message: str
) -> None:
    yes = [] if arguments[-1] == "g" and "ID" not in arguments else ["--yes"]
    refused = call("tx", *arguments, *yes, "--url", stub.url)
    assert (refused.code, refused.out, stub.calls) == (2, "", [])
    assert message in refused.err


def test_many_ids_need_their_number_typed(
    there: Call, memory: InMemoryBroker, answer: Answer
) -> None:
    ids = prepare(memory, 12)
    answer("12")
    done = there("tx", "rollback", *ids, "0" * 26, "-o", "json")
    assert done.code == 1
    assert "12 transactions\n  by group  orders 12\n" in done.err
    assert "Roll back these 13 transactions" in done.err
    assert set(states(memory, ids)) == {"pending"}
    answer("13")
    assert there("tx", "rollback", *ids, "0" * 26).code == 3
    assert set(states(memory, ids)) == {"rolled_back"}


# --- while it is done ---------------------------------------------------------------------------


def test_changed_transactions_are_not_touched(
    there: Call, memory: InMemoryBroker, answer: Answer, stub: Stub
) -> None:
    ids = prepare(memory, 6)
    calling = ApiClient(memory.url)

    def meanwhile() -> None:
        calling.change("POST", "transactions", ids[0], "commit", body={"group": "orders"})
        calling.change("POST", "transactions", ids[1], "rollback", body={"group": "orders"})
        prepare(memory, 1)

    answer("y", meanwhile)
    partly = there("tx", "rollback", "--state", "pending", "--group", "orders")
    assert partly.code == 3
    assert partly.err.endswith("Error: 5 of 6 rolled back\n")
    failed = next(line for line in partly.err.splitlines() if "moved_on" in line)
    assert re.match(rf"{ids[0]}  moved_on  its state changed from pending to \w+", failed)
    assert memory.transaction(ids[1]).source == "producer"
    assert states(memory, ids[1:]) == ["rolled_back"] * 5
    assert [str(view.state) for view in memory.pending()] == ["pending"]


def test_meanwhile_revived_transaction_is_not_decided(
    stub: Stub, call: Call, answer: Answer
) -> None:
    ids = stub.add(3)
    answer("y", lambda: stub.rows[ids[1]].update(state="pending"))
    partly = call("tx", "commit", "--group", "orders", "-o", "json", "--url", stub.url)
    assert partly.code == 3
    assert [row.get("state") for row in partly.json] == ["promoted", None, "promoted"]
    assert partly.json[1]["error"] == {
        "code": "moved_on",
        "message": "its state changed from parked to pending: not touched",
    }
    assert stub.rows[ids[1]]["state"] == "pending"


def test_transaction_already_in_result_state_counts_as_done(
    stub: Stub, call: Call, answer: Answer
) -> None:
    ids = stub.add(2)
    answer("y", lambda: stub.rows[ids[0]].update(state="promoted", decision="commit"))
    done = call("tx", "commit", "--group", "orders", "-o", "json", "--url", stub.url)
    assert (done.code, [row["state"] for row in done.json]) == (0, ["promoted", "promoted"])
    assert [asked.path.split("/")[3] for asked in stub.posts()] == [ids[1]]


def test_revive_retries_refused_transactions(there: Call, memory: InMemoryBroker) -> None:
    ids = prepare(memory, 4, topic="gone")
    memory.delete_topic("gone")
    assert there("tx", "commit", *ids, "--yes").code == 0
    memory.wait_until_settled()
    assert set(states(memory, ids)) == {"refused"}
    memory.create_topic("gone")
    done = there("tx", "revive", "--topic", "gone", "--yes", "-o", "json")
    assert (done.code, sorted(row["id"] for row in done.json)) == (0, sorted(ids))
    listing = ("tx", "list", "--state", "promoted", "--topic", "gone", "-o", "json")
    while len(there(*listing).json) < 4:
        assert there("tx", "revive", "--topic", "gone", "--yes").code == 0
    assert sorted(message.value or b"" for message in memory.messages("gone")) == [
        b"0", b"1", b"2", b"3",
    ]  # fmt: skip


def test_hostile_ids_are_refused(there: Call, memory: InMemoryBroker) -> None:
    (id,) = prepare(memory, 1)
    hostile = [
        "../groups",
        "",
        "a b",
        "\x1b[2J",
        "a\nb",
        "Ａ" * 26,
        "8" * 26,
        f"{id}/commit",
        "%00",
    ]
    partly = there("tx", "rollback", id, *hostile, id.lower(), "--yes")
    assert partly.code == 3
    assert partly.err.endswith(f"Error: 1 of {len(hostile) + 1} rolled back\n")
    assert partly.out.split()[-3:] == [id, "rolled_back", "rollback"]
    table = partly.err.splitlines()[1:-1]
    assert len(table) == len(hostile)
    assert "\x1b" not in partly.err
    rows = there("tx", "rollback", *hostile, "--yes", "-o", "json").json
    assert {row["error"]["code"] for row in rows} <= {"bad_id", "not_found", "method_not_allowed"}
    assert len(rows) == len(hostile)


def test_calls_in_flight_are_bounded(stub: Stub, call: Call) -> None:
    stub.add(40)
    full, in_flight, most = threading.Event(), [0], [0]
    lock = threading.Lock()

    def slow(asked: Asked) -> Reply | None:
        if asked.method != "POST":
            return None
        with lock:
            in_flight[0] += 1
            most[0] = max(most[0], in_flight[0])
        if in_flight[0] >= bulk.PARALLEL:
            full.set()
        full.wait(10)
        with lock:
            in_flight[0] -= 1
        return None

    stub.answer = slow
    assert call("tx", "revive", "--group", "orders", "--yes", "--url", stub.url).code == 0
    assert most[0] == bulk.PARALLEL


def test_commits_of_a_half_partition_are_sequential(stub: Stub, call: Call) -> None:
    ids = stub.add(30, partitions=3)
    assert call("tx", "commit", "--group", "orders", "--yes", "--url", stub.url).code == 0
    sent = [asked.path.split("/")[3] for asked in stub.posts()]
    for partition in range(3):
        mine = [id for id in ids if stub.rows[id]["partition"] == partition]
        assert [id for id in sent if id in mine] == mine


# --- trouble -------------------------------------------------------------------------------------


def test_overloaded_proxy_is_called_again(stub: Stub, call: Call) -> None:
    ids, refused = stub.add(5), set[str]()

    def busy(asked: Asked) -> Reply | None:
        if asked.method == "POST" and asked.path not in refused:
            refused.add(asked.path)
            return error(429, "overloaded")
        return None

    stub.answer = busy
    done = call("tx", "rollback", "--group", "orders", "--yes", "-o", "json", "--url", stub.url)
    assert (done.code, [row["id"] for row in done.json]) == (0, ids)
    assert len(stub.posts()) == 10


def test_partition_without_owner_blocks_no_other(stub: Stub, call: Call) -> None:
    ids = stub.add(60, partitions=2)
    stub.answer = lambda asked: (
        error(503, "owner_unavailable")
        if asked.method == "POST" and partition_of(asked) == 1
        else None
    )
    partly = call("tx", "rollback", "--group", "orders", "--yes", "-o", "json", "--url", stub.url)
    assert partly.code == 3
    assert [row["id"] for row in partly.json] == ids
    done = [row["id"] for row in partly.json if "error" not in row]
    assert done == [id for id in ids if stub.rows[id]["partition"] == 0]
    codes = Counter(row["error"]["code"] for row in partly.json if "error" in row)
    assert set(codes) == {"owner_unavailable", "not_tried"}
    # Tried transactions are not reported as untried.
    tried = {asked.path for asked in stub.posts() if partition_of(asked) == 1}
    assert codes["owner_unavailable"] == len(tried)
    # Each call in flight is tried four times, and no other transaction.
    assert sum(partition_of(asked) == 1 for asked in stub.posts()) <= bulk.PARALLEL * 4


def test_bulk_commit_resumes_after_proxy_death(
    call: Call, memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prepare(memory, 200, topic="died")
    real, taken = ApiConnection.exchange, [0]

    def dying(self: ApiConnection, method: str, *call: Any) -> tuple[int, bytes]:
        if method == "POST":
            taken[0] += 1
        if taken[0] > 50:
            self._address = ("127.0.0.1", 9)
            self.close()
        return real(self, method, *call)

    which = ("tx", "commit", "--state", "pending", "--group", "orders", "--yes")
    monkeypatch.setattr(ApiConnection, "exchange", dying)
    partly = call(*which, "--url", memory.url)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    assert partly.code == 3
    done = int(re.search(r"(\d+) committed, now", partly.err)[1])  # type: ignore[index]
    assert 0 < done <= 50
    assert re.search(rf"{200 - done} failed: not_tried \d+, no_answer \d", partly.err)
    assert "… and" in partly.err
    assert "-o json lists all." in partly.err
    assert partly.err.endswith(f"Error: {done} of 200 committed\n")
    again = call(*which, "-o", "json", "--url", memory.url)
    assert (again.code, len(again.json)) == (0, 200 - done)
    memory.wait_until_settled()
    visible = [message.transaction_id for message in memory.messages("died")]
    assert sorted(visible) == sorted(ids)


@pytest.mark.parametrize("verb", ["commit", "revive"])
def test_call_with_lost_answer_is_retried(
    stub: Stub, call: Call, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    ids = stub.add(6, partitions=2)
    real, lost = ApiConnection.exchange, set[str]()

    def losing(self: ApiConnection, method: str, target: str, *call: Any) -> tuple[int, bytes]:
        answer = real(self, method, target, *call)
        if method == "POST" and target not in lost:
            lost.add(target)
            raise ApiError("no answer", reached=False)
        return answer

    monkeypatch.setattr(ApiConnection, "exchange", losing)
    done = call("tx", verb, "--group", "orders", "--yes", "-o", "json", "--url", stub.url)
    assert (done.code, sorted(row["id"] for row in done.json)) == (0, sorted(ids))
    # The result of the lost answer is seen, and the action not repeated.
    assert len(stub.posts()) == 6


def test_check_with_unknown_result_is_not_repeated(stub: Stub, call: Call) -> None:
    ids = stub.add(3, state="pending")
    stub.answer = lambda asked: (0, None) if asked.method == "POST" else None
    failed = call("tx", "check", *ids, "--yes", "-o", "json", "--url", stub.url)
    assert failed.code == 1
    assert {row["error"]["code"] for row in failed.json} <= {"no_answer", "not_tried"}
    assert len({asked.path for asked in stub.posts()}) == len(stub.posts())


def test_ctrl_c_reports_results_so_far(stub: Stub, call: Call) -> None:
    stub.add(300)
    gate = threading.Event()

    def interrupting(asked: Asked) -> Reply | None:
        if asked.method == "POST" and len(stub.posts()) > 30 and not gate.is_set():
            gate.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return None

    stub.answer = interrupting
    stopped = call("tx", "revive", "--group", "orders", "--yes", "-o", "json", "--url", stub.url)
    assert stopped.code == 130
    done = [row["id"] for row in stopped.json if "error" not in row]
    left = [row["error"]["message"] for row in stopped.json if "error" in row]
    assert len(done) + len(left) == 300
    assert set(left) == {"stopped by Ctrl-C"}
    assert sorted(done) == sorted(asked.path.split("/")[3] for asked in stub.posts())
    assert stopped.err.strip() == "Stopped."


def test_slow_confirmation_outlives_the_connection(
    stub: Stub, call: Call, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (id,) = stub.add(1)
    stub.hangs_up = True
    answer("y", lambda: monkeypatch.setattr(client, "_IDLE_S", -1.0))
    done = call("tx", "commit", id, "--url", stub.url)
    assert (done.code, stub.rows[id]["state"]) == (0, "promoted")


@pytest.mark.parametrize("error_kind", [OSError, KeyError, ImportError])
def test_unknown_system_user_gets_a_name(
    monkeypatch: pytest.MonkeyPatch, error_kind: type[Exception]
) -> None:
    def unknown() -> str:
        raise error_kind

    monkeypatch.setattr("getpass.getuser", unknown)
    monkeypatch.setattr("platform.node", lambda: "bo\nx\udcff\x1b")
    assert who() == "somebody@box"
    monkeypatch.setattr("platform.node", lambda: "x" * 500)
    assert len(who()) == 200


@pytest.mark.parametrize("count", [1, 3])
def test_proxy_text_cannot_control_the_terminal(stub: Stub, call: Call, count: int) -> None:
    ids = stub.add(count)
    evil = {"error": {"code": "\x1b[2J", "message": "a\x1b[2Jb\rc"}}
    stub.answer = lambda asked: (409, evil)
    for verb in ("commit", "revive"):
        failed = call("tx", verb, *ids, "--yes", "--url", stub.url)
        assert (failed.code, failed.out) == (1, "")
        assert "a\ufffd[2Jb\ufffdc" in failed.err
        assert not {"\x1b", "\r"} & set(failed.err)
    assert "\x1b" not in call("tx", "show", *ids, "\x1b[2J", "--url", stub.url).err


def test_invalid_answer_is_one_sentence(stub: Stub, call: Call) -> None:
    stub.add(30)
    stub.answer = lambda asked: (200, {}) if asked.method == "POST" else None
    failed = call("tx", "revive", "--group", "orders", "--yes", "--url", stub.url)
    assert failed.code == 1
    assert failed.err.splitlines()[-1].startswith("Error: ")


@pytest.mark.parametrize("count", [1, 3])
def test_names_of_a_newer_proxy_are_shown(stub: Stub, call: Call, count: int) -> None:
    ids = stub.add(count)
    for row in stub.rows.values():
        row |= {"source": "robot", "decision": "later"}

    def newer(asked: Asked) -> Reply | None:
        if asked.path.endswith("/commit"):
            return 200, {"id": asked.path.split("/")[3], "state": "frozen", "decision": "later"}
        if asked.method == "POST":
            return 201, {"id": ids[0], "state": "thawed"}
        if asked.path.endswith("/search"):
            # As of an older proxy, without `unread`.
            rows = [*stub.rows.values()]
            return 200, {"transactions": rows, "next_cursor": None, "done": 1.0, "records": 3}
        return None

    stub.answer = newer
    for selected in (ids, ["--state", "parked"]):
        done = call("tx", "commit", *selected, "--yes", "--url", stub.url)
        assert (done.code, done.out.count("frozen")) == (0, count), done
    sent = call("send", "t", "v", "--url", stub.url)
    assert (sent.code, sent.out, sent.err) == (0, f"{ids[0]}\n", "1 for t: frozen\n")
    for row in stub.rows.values():
        row["state"] = "frozen"
    for listing in (["list"], ["find", ids[0][:6]], ["show", *ids]):
        shown = call("tx", *listing, "--url", stub.url)
        assert (shown.code, shown.out.count("frozen")) == (0, count), shown


def test_unreadable_decision_of_a_sent_transaction_names_its_id(stub: Stub, call: Call) -> None:
    (id,) = stub.add(1)
    stub.answer = lambda asked: (
        200, {} if asked.path.endswith("/commit") else {"id": id, "state": "pending"},
    )  # fmt: skip
    sent = call("send", "t", "v", "--url", stub.url)
    assert (sent.code, sent.out) == (3, f"{id}\n")
    assert f"txbroker tx commit {id}" in sent.err
