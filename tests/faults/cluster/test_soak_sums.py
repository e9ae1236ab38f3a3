"""The sums of the fault runs."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from tests.faults.cluster import runs_table
from tests.faults.cluster.nemesis import OVER
from tests.faults.cluster.services import WrittenDown, add, written
from tests.faults.cluster.soak_faults import Verdict, during, report, shared, spoken, with_deleted
from tests.faults.judge import Asked, Call, History, Note, Rec, Seen, Topics
from tests.kit.until import free_ports
from txbroker.errors import AlreadyDecided, OwnerUnavailable
from txbroker.sdk import Message

ROOT = Path(__file__).parents[3]
_MESSAGE = Message("topic", None, b"\xff", (("token", b"t"),))


def _record(offset: int, partition: int = 0) -> Rec:
    return Rec("topic", partition, offset, 1000, None, b"v", ())


def test_prepares_during_a_fault_are_counted() -> None:
    calls = [Call("prepare", str(at), at, result="ok") for at in (1.0, 2.0, 3.0, 4.0)]
    calls += [Call("prepare", "5", 2.5, result="unknown"), Call("commit", "1", 2.5, result="ok")]
    notes = [
        Note(1.5, "link cut", "a"),
        Note(2.5, "disk full", "b"),
        Note(3.5, OVER + "disk full", "b"),
        Note(3.5, OVER + "link cut", "a"),
        Note(3.8, "link cut", "b"),
        Note(4.5, OVER + "link cut", "b"),
        Note(4.6, "healed"),
    ]
    counted = during(History(calls=calls, notes=notes))
    assert counted == {"disk full": 1, "link cut": 3}


def test_deleted_records_come_from_the_concurrent_reader() -> None:
    read = Topics(targets=[_record(2), _record(3)])
    read.along = [Seen(_record(offset), 1.0) for offset in (0, 1, 2, 3, 4)]
    read.along.append(Seen(_record(0, partition=1), 1.0))
    with_deleted(read, {("topic", 0): 3})
    assert sorted(record.offset for record in read.targets) == [0, 1, 2, 3]
    assert all(record.partition == 0 for record in read.targets)


def test_records_read_twice_are_kept_once() -> None:
    read = Topics(targets=[_record(1)])
    seen = [Seen(_record(1), 1.0), Seen(_record(2), 2.0)]
    found = shared(seen, read)
    assert found == seen
    assert found[0].record is read.targets[0]


def test_violations_or_no_transactions_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    good = Verdict(1, 2.0, "4", 2, {"disk full": 2}, transactions=10, during={"disk full": 4})
    good.late_ends = {"late and reset": 1}
    bad = Verdict(2, 2.0, "4", 1, {"link cut": 1}, transactions=10, violations=["I1 x: lost"])
    bad.only, bad.late_ends = ["link cut"], {"late and reset": 7, "overtaken": 3}
    assert report(good, results)
    assert not report(bad, results)
    assert not report(Verdict(3, 2.0, "4", 2), results)
    assert not report(Verdict(4, 2.0, "4", 2, transactions=1, wrong=["broke off"]), results)
    assert "BROKEN: I1 x: lost" in capsys.readouterr().out
    runs = [json.loads(line) for line in results.read_text().splitlines()]
    assert [run["violations"] for run in runs] == [0, 1, 0, 0]
    runs[1]["note"] = "it was the machine"
    page = runs_table.page(runs)
    assert "\n\nSeed 2: it was the machine\n" in page
    assert "21 transactions in 4 runs of 8 minutes, 3 faults of 2 kinds, 1 violations" in page
    assert "| disk full | 2 | 1 | 4 | 0 |" in page
    assert "| **2 kinds** | 3 | 4 | 21 in all | 1 |" in page
    assert '| `--seed 2 --minutes 2 --kafka 4 --protocol 1 --only "link cut"` | 10 | 1 |' in page
    assert "| first | 0 | 7 | 0 | 3 |\n| second | 0 | 1 | 0 | 0 |" in page


def test_killed_producer_leaves_its_history(tmp_path: Path) -> None:
    file = tmp_path / "mortal.jsonl"
    recorder = WrittenDown(file)
    recorder.means("t", [_MESSAGE], business=True)
    with recorder.call("prepare", "t") as prepared:
        # Another call begins and ends meanwhile.
        with pytest.raises(AlreadyDecided), recorder.call("commit", "u", "U"):
            raise AlreadyDecided("no", decision="rollback")
        prepared.id = "T"
    with pytest.raises(OwnerUnavailable), recorder.call("commit", "t", "T"):
        raise OwnerUnavailable("away")
    pending = recorder.call("rollback", "v", "V")
    pending.__enter__()
    with file.open("a") as torn:
        torn.write('{"event": "inv')
    history = History(asked=[Asked("T", 1.0, "commit")])
    add(history, written([file, tmp_path / "of-a-life-that-did-nothing.jsonl"]))
    found = [(call.what, call.id, call.result, call.code) for call in history.calls]
    assert found == [
        ("prepare", "T", "ok", ""),
        ("commit", "U", "fail", "already_decided"),
        ("commit", "T", "unknown", "owner_unavailable"),
        ("rollback", "V", "invoke", ""),
    ]
    assert history.calls[1].decision == "rollback"
    assert history.sent["t"][0].value == b"\xff"
    assert history.business == {"t"}
    assert len(history.asked) == 1


def test_ports_are_unique_and_not_ephemeral() -> None:
    ports = list(itertools.chain.from_iterable(free_ports(7) for _ in range(20)))
    assert len(set(ports)) == len(ports)
    if sys.platform == "linux":
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert max(ports) < lowest


def test_old_brokers_get_protocol_version_1() -> None:
    assert [spoken(kafka, newest) for kafka in ("3.9.1", "4.3.1") for newest in (1, 2)] == [
        1,
        1,
        1,
        2,
    ]


def test_page_of_fault_runs_matches_results() -> None:
    results = ROOT / "docs/reference/fault-runs.jsonl"
    others = results.with_name("consumer-fault-runs.jsonl")
    runs, consumers = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (results, others)
    )
    page = runs_table.page(runs) + runs_table.consumers(consumers)
    assert results.with_suffix(".md").read_text() == page
    assert all(run.get("note") for run in (*runs, *consumers) if run["violations"] or run["wrong"])
