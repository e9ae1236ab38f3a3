"""`txbroker audit` on the command line: usage, errors and output. Without Spark."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import pytest

from tests.kit.cli import Call, Result
from tests.spark.audit_summaries import cut, summary
from txbroker.cli.audit.output import STATES, drift_in_words, show_run
from txbroker.cli.audit.run import arguments_again
from txbroker.cli.main import cli
from txbroker.cli.run import run
from txbroker.cli.setting_options import settings_from
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.spark import schema
from txbroker.spark.access import AuditError, TopicEnds
from txbroker.spark.journal import JOURNAL_FILE, Journal
from txbroker.spark.judge.kinds import ALL_KINDS
from txbroker.spark.schema import (
    Acknowledgement,
    BrokenRecord,
    CheckResult,
    Example,
    RunSummary,
    SnapshotBounds,
    TopicRead,
)
from txbroker.spark.session import BRIEF_MAX, SparkSettings
from txbroker.spark.storage.folder import data_folder
from txbroker.spark.tables.manifest import Manifest


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call the command line in this process, which has no settings."""
    for name in ("TXBROKER_OUT", "TXBROKER_MASTER", "TXBROKER_DATA_DIR", "TXBROKER_KAFKA"):
        monkeypatch.delenv(name, raising=False)

    def calling(*arguments: object) -> Result:
        capsys.readouterr()
        code = run(cli, ["audit", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Result(code, out, err)

    return calling


CLEAN = RunSummary(
    run="20260101T000000Z",
    mode="full",
    started_ms=1_767_225_600_000,
    took_s=61.4,
    cut=None,
    records={"half": 12, "op": 10, "visible": 9, "parked": 0},
    transactions=10,
    states={"settled": 9, "pending": 1},
    drift={},
)
DRIFTED = RunSummary(
    run="20260101T010000Z",
    mode="incremental",
    started_ms=1_767_229_200_000,
    took_s=5.0,
    cut=None,
    records={"half": 1, "op": 1, "visible": 0, "parked": 0},
    transactions=2,
    states={"settled": 1},
    drift={"late": 1, "lost": 1},
    quarantined=3,
    taken={"txbroker.half": 7},
    examples=(Example("0" * 26, ("lost",), "orders\x1b[31m", "decided 20 minutes ago"),),
)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    journal = Journal(tmp_path / JOURNAL_FILE)
    journal.add(CLEAN)
    journal.add(DRIFTED)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("run --conf driver.memory=1g", "expected a Spark setting, spark.NAME=VALUE"),
        ("run --conf spark.driver.memory", "expected a Spark setting, spark.NAME=VALUE"),
        ("run --deploy-mode cluster", "needs --master yarn or --master k8s://URL"),
        ("run --deploy-mode cluster --master spark://x:7077", "needs --master yarn or"),
        ("run --deploy-mode here", "'here' is not one of 'client', 'cluster'"),
        ("run --late-after-s 700", "--late-after-s 700 exceeds --lost-after-s 600"),
        ("run --late-after-s nan", "--late-after-s nan: expected more than 0, at most 1e9"),
        ("run --lost-after-s inf", "--lost-after-s inf: expected more than 0, at most 1e9"),
        ("run --late-after-s 0", "--late-after-s 0: expected more than 0, at most 1e9"),
        ("run --table orders", "--table needs --business"),
        ("run --group orders", "--group needs --business"),
        ("run --business mysql:x", "must be jdbc:URL or parquet:PATH"),
        ("run --business jdbc:sqlite:x --id-column id", "a table is missing"),
        ("run --business parquet:x", "a column is missing"),
        (
            "run --business parquet:x --id-column i --business-password-file /no/such",
            "--business-password-file /no/such: No such file or directory",
        ),
        ("run -o xml", "'xml' is not one of"),
        ("run --format orc", "'orc' is not"),
        ("run --kafka-sasl-username x", "need kafka_security_protocol"),
        ("stream --every-s -1", "--every-s -1: expected more than 0, at most 1e9"),
        ("show --limit 0", "0 is not in the range"),
        ("shw", "Did you mean 'show'?"),
    ],
)
def test_wrong_usage(call: Call, arguments: str, reason: str) -> None:
    result = call(*arguments.split())
    assert (result.code, result.out) == (2, "")
    assert reason in result.err


def test_help_and_show_need_no_spark(data_dir: Path) -> None:
    code = (
        "import sys; from txbroker.cli.main import cli; from txbroker.cli.run import run;"
        f"run(cli, ['audit', 'run', '--help']); run(cli, ['audit', 'show', '--data-dir',"
        f" {str(data_dir)!r}]); print([m for m in ('pyspark',) if m in sys.modules])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert "incremental" in done.stdout
    assert done.stdout.endswith("\n[]\n")


def test_the_runs_are_listed_newest_first(call: Call, data_dir: Path) -> None:
    listed = call("show", "--data-dir", data_dir)
    assert listed.code == 0
    title, newer, older = listed.out.splitlines()
    assert title.split()[:3] == ["RUN", "MODE", "STARTED"]
    assert newer.split()[:2] == [DRIFTED.run, "incremental"]
    assert newer.endswith("late, lost")
    assert older.split()[:2] == [CLEAN.run, "full"]
    rows = call("show", "--data-dir", data_dir, "--limit", 1, "-o", "json").json
    assert [row["run"] for row in rows] == [DRIFTED.run]


@pytest.mark.parametrize("name", [DRIFTED.run, "last"])
def test_one_run_is_shown_whole(call: Call, data_dir: Path, name: str) -> None:
    shown = call("show", name, "--data-dir", data_dir)
    assert shown.code == 0
    heading, _, *lines = shown.out.splitlines()
    assert heading.startswith("2026-01-01 ")
    assert f"Run {DRIFTED.run} (incremental): " in heading
    assert "2 transactions in 5s, 0 pending." in heading
    assert "Drift! Committed, not visible: lost: 1" in heading
    found = [line.split()[0] for line in lines[1:6]]
    assert found == ["settled", "lost", "late", "quarantined", "taken"]
    assert "0" * 26 in lines[-1]
    assert "\x1b" not in shown.out
    asked = call("show", name, "--data-dir", data_dir, "-o", "json").json
    assert asked["drift"] == {"late": 1, "lost": 1}
    assert asked["examples"][0]["grp"] == "orders\x1b[31m"


def test_targets_that_end_in_an_open_transaction_are_named() -> None:
    read = TopicRead("t", (0,), (0,), (5,))
    held = ("payments-0", *(f"mails-{n}" for n in range(9)))
    for some, words in (
        (
            held[:1],
            "1 partition of a target ends in an open transaction, of another producer or a ",
        ),
        (held[:2], "2 partitions end in an open transaction"),
        (held, "(payments-0, mails-0, mails-1, mails-2, mails-3, …)"),
    ):
        cut = SnapshotBounds(read, read, read, (), (5,), (5,), held=some)
        assert words in drift_in_words(msgspec.structs.replace(CLEAN, cut=cut))
    assert "open" not in drift_in_words(CLEAN)


def test_set_aside_and_missing_targets_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    others = (BrokenRecord("orders", 0, number, "no id") for number in range(19))
    found = msgspec.structs.replace(
        CLEAN,
        drift={"unreadable": 1, "target_missing": 2},
        quarantined=30,
        set_aside=(BrokenRecord("half", 2, 77, "its check policy is invalid", own=True), *others),
        missing_targets={"bills": 2},
    )
    show_run(found, "table")
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "half 2 77 yes its check policy is invalid" in printed
    assert "bills 2" in printed
    assert any(line.startswith("unreadable 1 yes ") for line in printed)
    assert any(line.startswith("target_missing 2 yes ") for line in printed)
    assert sum(line.endswith("no id") for line in printed) == 9
    output_text = drift_in_words(found)
    assert "30 records are unreadable and were set aside, 1 of them ours." in output_text
    assert "Targets that do not exist: bills." in output_text
    assert "Own record unreadable: 1, Target missing: 2" in output_text


def test_the_table_in_the_guide_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "audit.md").read_text()
    table = next(block for block in guide.split("```\n") if block.startswith("WHAT "))
    counts = {line.split()[0]: int(line.split()[1]) for line in table.splitlines()[1:]}
    drift = {"late": counts.pop("late")}
    show_run(msgspec.structs.replace(CLEAN, states=counts, drift=drift), "table")
    assert capsys.readouterr().out == table


def test_missing_topics_are_left_out(call: Call, tmp_path: Path, data_dir: Path) -> None:
    none = call("show", "--data-dir", tmp_path / "none")
    assert (none.code, none.out) == (0, "")
    assert "There is no run yet" in none.err
    unknown = call("show", "yesterday", "--data-dir", data_dir)
    assert (unknown.code, unknown.out) == (1, "")
    assert "there is no run yesterday" in unknown.err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / JOURNAL_FILE).write_text("no database, but long enough to be read as one")
    rubbish = call("show", "--data-dir", tmp_path / "other")
    assert (rubbish.code, rubbish.out) == (1, "")
    assert "Error: " in rubbish.err


def test_a_run_in_words() -> None:
    assert drift_in_words(CLEAN).endswith("10 transactions in 1m01s, 1 pending. No drift.")
    output_text = drift_in_words(DRIFTED)
    assert output_text.endswith(
        "Drift! Committed, not visible: lost: 1, Committed, not visible: late: 1."
    )
    assert "Retention removed up to 7 records" in output_text
    assert "3 records are unreadable" in output_text


# --- a run that is only played ---------------------------------------------------------------


class Played:
    """Runs without Spark and Kafka; their results are entered in the journal as usual.

    Attributes:
        finds: what the next run finds.
        half_end: the end of the half topic.
        brief: whether the last session of Spark was a brief one.
        fails: the error with which publishing fails, if any.
        steps: the steps taken, in order.
    """

    def __init__(self, call: Call, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.finds, self.steps = CLEAN, list[str]()
        self.half_end, self.brief = 0, False
        self.fails: Exception | None = None
        self.report_fails: Exception | None = None
        self._call, self._data_dir = call, data_dir
        monkeypatch.setattr("txbroker.cli.audit.batch.started", self._started)
        monkeypatch.setattr("txbroker.spark.run.run_audit", self._run)
        monkeypatch.setattr("txbroker.spark.access.AuditKafka.own_ends", self._own_ends)
        monkeypatch.setattr("txbroker.spark.access.publish", self._publish)
        monkeypatch.setattr("txbroker.cli.audit.publish.report_run", self._report)

    def audit(self, *options: object) -> Result:
        self.steps.clear()
        return self._call("run", "--data-dir", self._data_dir, *options)

    @contextmanager
    def _started(
        self, spark: SparkSettings, *_folders: str
    ) -> Iterator[tuple[None, SimpleNamespace]]:
        self.steps.append("spark")
        self.brief = spark.brief
        yield None, SimpleNamespace(stage=lambda _: None)

    def _own_ends(self, topic: str) -> TopicEnds:
        return TopicEnds(topic, (0,), (self.half_end,))

    def _run(self, *_: object) -> RunSummary:
        Journal(self._data_dir / JOURNAL_FILE).add(self.finds)
        return self.finds

    async def _publish(
        self, _: object, news: RunSummary, unpublished: Sequence[RunSummary] = ()
    ) -> None:
        if self.fails is not None:
            raise self.fails
        self.steps.append(" ".join(["published", *(run.run for run in (*unpublished, news))]))

    def _report(self, *_: object) -> None:
        self.steps.append("report")
        if self.report_fails is not None:
            raise self.report_fails


@pytest.fixture
def played(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(call, tmp_path, monkeypatch)


NEXT = msgspec.structs.replace(CLEAN, run="20260101T020000Z", mode="incremental")


@pytest.mark.parametrize("error", [ConfigurationError("a disk is full"), ValueError("of ours")])
def test_result_is_published_although_the_report_fails(
    played: Played, tmp_path: Path, error: Exception
) -> None:
    played.finds, played.report_fails = DRIFTED, error
    result = played.audit("--report", tmp_path / "r.html")
    assert played.steps == ["spark", f"published {DRIFTED.run}", "report"]
    assert result.code == 4
    assert str(error) in result.err
    assert "Drift! " in result.err
    assert "lost" in result.out


def test_second_audit_is_refused_before_spark_starts(played: Played, tmp_path: Path) -> None:
    with data_folder(tmp_path).alone():
        result = played.audit()
    assert (result.code, result.out, played.steps) == (1, "", [])
    assert f"another audit (process {os.getpid()}) is running on {tmp_path}" in result.err
    assert played.audit().code == 0


def test_refused_installation_does_not_stop_the_others(played: Played, tmp_path: Path) -> None:
    with data_folder(tmp_path / "shop").alone():
        result = played.audit("--installations", "shop", "--installations", "billing")
    assert (result.code, played.steps) == (1, ["spark", f"published {CLEAN.run}"])
    assert "installation shop: another audit" in result.err
    assert "Installation billing:" in result.err


@pytest.mark.parametrize(
    ("manifest", "options", "words"),
    [
        (
            Manifest("shop"),
            (),
            "belong to the installation shop, not txbroker: name a separate --out",
        ),
        (
            Manifest("txbroker", "delta"),
            ("--format", "parquet"),
            "have the format delta, not parquet",
        ),
    ],
)
def test_unfit_tables_are_refused_before_spark_starts(
    played: Played, tmp_path: Path, manifest: Manifest, options: tuple[str, ...], words: str
) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/tables.json").write_bytes(msgspec.json.encode(manifest))
    result = played.audit("--out", tmp_path / "tables", *options)
    assert (result.code, result.out, played.steps) == (1, "", [])
    assert words in result.err


def test_session_is_brief_where_little_is_to_be_read(played: Played) -> None:
    read = msgspec.structs.replace(cut(), half=TopicRead("half", (0,), (0,), (BRIEF_MAX,)))
    played.finds, played.half_end = msgspec.structs.replace(CLEAN, cut=read), BRIEF_MAX
    found = []
    for number, options in enumerate([(), (), ("--full",), ("--rejudge",)]):
        played.finds = msgspec.structs.replace(played.finds, run=f"2026010{number + 1}T000000Z")
        played.audit(*options)
        found.append(played.brief)
    assert found == [False, True, False, False]
    played.half_end += BRIEF_MAX
    played.audit()
    assert not played.brief


def test_missing_topics_are_reported_before_spark_starts(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: object, topic: str) -> TopicEnds:
        raise AuditError(f"topic {topic} does not exist: check --kafka and --topic-prefix")

    monkeypatch.setattr("txbroker.spark.access.AuditKafka.own_ends", missing)
    result = played.audit()
    assert (result.code, result.out, played.steps) == (1, "", [])
    assert "topic txbroker.half does not exist" in result.err


def test_unwritable_report_is_refused_before_the_run(played: Played, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = played.audit("--report", tmp_path / "file" / "r.html")
    assert (result.code, result.out, played.steps) == (1, "", [])
    assert "r.html cannot be written: " in result.err
    assert played.audit("--report", tmp_path / "new" / "r.html").code == 0
    assert list((tmp_path / "new").iterdir()) == []


def test_next_run_publishes_unpublished_findings(played: Played) -> None:
    played.finds = msgspec.structs.replace(DRIFTED, drift={"visible_twice": 1})
    played.fails = KafkaUnavailable("no leader")
    first = played.audit()
    assert first.code == 4
    assert "not published to the proxies; the next run will do it: no leader" in first.err
    played.finds, played.fails = NEXT, None
    second = played.audit()
    assert played.steps == ["spark", f"published {DRIFTED.run} {NEXT.run}"]
    assert second.code == 4  # the first may have died before it could end with it
    assert f"Run {DRIFTED.run} (incremental) had not been published to the proxies" in second.err
    third = played.audit()
    assert (third.code, played.steps) == (0, ["spark", f"published {NEXT.run}"])


def test_next_run_publishes_findings_that_could_not_be_read(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    played.finds = msgspec.structs.replace(DRIFTED, drift={"visible_twice": 1})
    played.fails = KafkaUnavailable("no leader")
    assert played.audit().code == 4

    def refuse(_: Journal) -> list[RunSummary]:
        raise ConfigurationError("the journal is locked")

    played.finds, played.fails = NEXT, None
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "unpublished", refuse)
        assert "the journal is locked" in played.audit().err
    played.finds = msgspec.structs.replace(NEXT, run="20260101T030000Z")
    assert played.audit().code == 4
    assert DRIFTED.run in played.steps[-1]


def test_unpublished_late_finding_expires_when_not_repeated(played: Played) -> None:
    played.finds = msgspec.structs.replace(DRIFTED, drift={"late": 3})
    played.fails = KafkaUnavailable("no leader")
    assert played.audit().code == 4
    played.finds, played.fails = NEXT, None
    assert played.audit().code == 0


def test_a_run_that_finds_nothing_fails_as_ever(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> RunSummary:
        raise ConfigurationError("no right to topic x")

    monkeypatch.setattr("txbroker.spark.run.run_audit", refuse)
    result = played.audit()
    assert (result.code, result.out, result.err) == (1, "", "Error: no right to topic x\n")
    assert played.steps == ["spark"]


# --- checks and acknowledgements -------------------------------------------------------------

FAILED = CheckResult("slow", "error", "visible_p99_s", 7.254, 5, False, "orders")
RESULTS = (
    FAILED,
    CheckResult("few", "warning", "volume_min", 0.9, 0.5, True),
    CheckResult("age", "critical", "audit_age_s", None, 90_000, None),
)


@pytest.mark.parametrize(
    ("changes", "options", "code"),
    [
        ({"checks": RESULTS}, (), 4),
        ({"checks": RESULTS}, ("--exit-from", "error"), 4),
        ({"checks": RESULTS}, ("--exit-from", "critical"), 0),
        ({"checks": RESULTS[1:]}, (), 0),
        ({"drift": {"late": 1}}, (), 4),
        ({"drift": {"late": 1}}, ("--exit-from", "error"), 0),
        ({"drift": {"lost": 1}}, ("--exit-from", "critical"), 4),
        ({"drift": {"lost": 2}, "acknowledged": {"lost": 2}}, (), 0),
        ({"drift": {"lost": 2}, "acknowledged": {"lost": 1}}, (), 4),
    ],
)
def test_severity_decides_the_exit_code(
    played: Played, changes: dict[str, Any], options: tuple[str, ...], code: int
) -> None:
    played.finds = msgspec.structs.replace(CLEAN, **changes)
    assert played.audit(*options).code == code


def test_the_file_of_checks_decides_the_exit_code(played: Played, tmp_path: Path) -> None:
    file = tmp_path / "checks.toml"
    file.write_text('exit_from = "error"\n')
    played.finds = msgspec.structs.replace(CLEAN, drift={"late": 1})
    assert played.audit("--checks", file).code == 0
    assert played.audit("--checks", file, "--exit-from", "warning").code == 4
    file.write_text("exit_form = 1\n")
    refused = played.audit("--checks", file)
    assert (refused.code, refused.out, played.steps) == (2, "", [])
    assert f"{file}: there is no key 'exit_form', did you mean 'exit_from'?" in refused.err


def test_unpublished_findings_that_are_acknowledged_stay_so(played: Played) -> None:
    known = {"drift": {"visible_twice": 1}, "acknowledged": {"visible_twice": 1}}
    played.finds, played.fails = msgspec.structs.replace(DRIFTED, **known), KafkaUnavailable("no")
    assert played.audit().code == 0
    played.finds, played.fails = NEXT, None
    assert (played.audit().code, played.steps) == (0, ["spark", f"published {NEXT.run}"])


def test_checks_and_acknowledgements_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    id = "0" * 26
    known = Acknowledgement(id, "", "lost", "ada", "an old outage", 0, CLEAN.started_ms)
    found = msgspec.structs.replace(
        DRIFTED, checks=RESULTS, drift={"lost": 3, "late": 1}, acknowledged={"lost": 1, "late": 1}
    )
    show_run(found, "table", [known, msgspec.structs.replace(known, id="1" * 26)])
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for expected in (
        "slow FAILED error 7.254 s at most 5 s orders",
        "few ok warning 0.9 at least 0.5 -",
        "age nothing to compare critical - at most 90,000 s -",
    ):
        assert expected in printed
    assert any(line.startswith("lost 3 2 ") for line in printed)
    assert any(line.startswith("late 1 acknowledged ") for line in printed)
    until = "lost until 2026-01-01 00:00:00.000Z by ada: an old outage"
    assert sum(until in line for line in printed) == 1
    words = drift_in_words(found)
    assert "Failed checks: slow (error), 7.254 s of orders, at most 5 s." in words
    assert "Acknowledged findings: Committed, not visible: lost: 1, Committed" in words
    assert words.endswith("Drift! Committed, not visible: lost: 2.")
    quiet = msgspec.structs.replace(found, drift={"late": 1}, acknowledged={"late": 1})
    assert drift_in_words(quiet).endswith("No other drift.")


ID, PLACE = "0" * 26, "txbroker.half-3@17"
TIMELY = ("--until", "2099-12-31", "--why", "known")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "name an ID and kinds of findings, or --group NAME and kinds"),
        (("x", "lost", *TIMELY), "'x' is no transaction id (a transaction id has 26 characters"),
        (("txbroker.half-3", "lost", *TIMELY), "nor a position TOPIC-PARTITION@OFFSET"),
        ((ID, "loost", *TIMELY), "there is no kind of finding 'loost': did you mean lost?"),
        (("--group", "g", ID, *TIMELY), "the kinds are rolled_back_visible, visible_without_com"),
        ((ID, *TIMELY), "name the kinds of findings, some of rolled_back_visible"),
        ((ID, "lost", "--why", "w"), "--until DATE and --why TEXT are needed"),
        ((ID, "lost", "--until", "2099-01-01", "--why", " "), "--until DATE and --why TEXT are"),
        ((ID, "lost", "--until", "2020-01-01", "--why", "w"), "--until 2020-01-01 is over"),
        ((ID, "lost", "--until", "2020-01-01T10:00+02:00", "--why", "w"), "is over"),
        ((ID, "lost", "--until", "soon", "--why", "w"), "'soon' is no date: give one such as"),
        ((ID, "lost", "--until", "2099-02-30", "--why", "w"), "'2099-02-30' is no date"),
        ((ID, "--remove", *TIMELY), "--remove takes no --until, no --why and no --by"),
        ((ID, "--list"), "--list takes no ID, no KIND and no other option"),
        (("--list", "--by", "x"), "--list takes no ID, no KIND and no other option"),
    ],
)
def test_wrong_acknowledgements_are_refused(
    call: Call, tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    result = call("ack", "--data-dir", tmp_path / "new", *arguments)
    assert (result.code, result.out) == (2, "")
    assert reason in " ".join(result.err.split())
    assert not (tmp_path / "new").exists()


def test_findings_are_acknowledged_listed_and_removed(call: Call, data_dir: Path) -> None:
    def listed() -> list[tuple[str, ...]]:
        rows = call("ack", "--list", "--data-dir", data_dir, "-o", "json").json
        return [tuple(row[name] for name in ("id", "grp", "kind", "by", "why")) for row in rows]

    there = ("--data-dir", data_dir)
    assert "There is no acknowledgement" in call("ack", "--list", *there).err
    first = call("ack", *there, ID, "lost", "late", *TIMELY, "--by", "ada")
    assert (first.code, first.out) == (0, "")
    assert f"Acknowledged for {ID} until 2100-01-01 00:00:00.000Z: lost, late." in first.err
    # An example of the journal shows that it is lost, and none that it is late.
    assert f"shows late of {ID}; the journal has a few examples" in first.err
    assert call("ack", *there, "--group", "orders", "overdue", *TIMELY, "--by", "bob").code == 0
    assert call("ack", *there, PLACE, "unreadable", *TIMELY, "--by", "bob").code == 0
    assert call("ack", *there, ID, "lost", "--until", "2098-01-01T00:00", "--why", "2nd").code == 0
    lost, overdue, late, unreadable = listed()
    assert (lost[:3], lost[4]) == ((ID, "", "lost"), "2nd")
    assert "@" in lost[3]  # user and machine
    assert overdue == ("", "orders", "overdue", "bob", "known")
    assert late == (ID, "", "late", "ada", "known")
    assert unreadable == (PLACE, "", "unreadable", "bob", "known")
    shown = call("show", "last", *there).out
    assert "lost until 2098-01-01 00:00:00.000Z by " in " ".join(shown.split())
    assert call("ack", *there, "--remove", ID, "late").code == 0
    assert call("ack", *there, "--remove", "--group", "orders").code == 0
    assert [row[2] for row in listed()] == ["lost", "unreadable"]
    again = call("ack", *there, "--remove", ID, "late")
    assert (again.code, again.out) == (1, "")
    assert f"{ID} has no such acknowledgement in" in again.err
    assert Journal(data_dir / JOURNAL_FILE).acknowledged(2**52) == []


def test_full_run_reports_earlier_retention() -> None:
    reason = " Retention had removed the beginning of 1 of 4 topics, which was not judged."
    assert reason in drift_in_words(summary(0))
    assert reason not in drift_in_words(summary(0, mode="incremental"))


@pytest.mark.parametrize("module", ["pyspark", "py4j", "pandas", "pyarrow", "google.protobuf"])
def test_a_package_is_missing(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == module else find(name, *a)
    )
    result = call("run", "--data-dir", tmp_path)
    assert (result.code, result.out) == (1, "")
    assert result.err == (
        f"Error: the Python package {module} is missing, run: pip install 'txbroker[spark]'\n"
    )


def test_a_cluster_is_given_what_this_machine_resolved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The driver runs elsewhere, where neither our environment nor our config file is."""
    config = tmp_path / "config.toml"
    config.write_text('topic_prefix = "shop"\n')
    monkeypatch.setenv("TXBROKER_KAFKA", "kafka:9092")
    monkeypatch.setenv("TXBROKER_OUT", "hdfs://x/audit")
    command = cli.get_command(click.Context(cli), "audit")
    assert isinstance(command, click.Group)
    given = ["--config", str(config), "--full", "--master", "yarn", "--deploy-mode", "cluster"]
    given += ["--conf", "spark.a=b", "--business", "parquet:p", "--group", "a", "--group", "b c"]
    context = command.commands["run"].make_context("run", given)
    names = ("kafka", "topic_prefix", "data_dir")
    settings = settings_from(config, {name: context.params[name] for name in names})
    again = arguments_again(settings, context)
    assert sorted(again) == [
        "--business=parquet:p", "--full", "--group=a", "--group=b c", "--kafka=kafka:9092",
        "--out=hdfs://x/audit", "--topic-prefix=shop",
    ]  # fmt: skip


def test_the_file_for_spark_submit() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "txbroker.cli.submit", "--where"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    script = Path(done.stdout.strip())
    shown = subprocess.run(
        [sys.executable, str(script), "show", "--help"], capture_output=True, text=True, check=True
    )
    assert json.dumps(shown.stdout).startswith('"Usage: txbroker audit show ')


# --- the pages about the audit -------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "audit-tables.md").read_text()
VERDICTS = (DOCS / "reference" / "verdicts.md").read_text()


def section(title: str) -> str:
    """Return what stands between a heading, or a table's name, and the next."""
    found = re.search(
        rf"(?:^## {title}$|^`{title}`, a row)(.*?)(?=^## |^`\w+`, a row|\Z)", PAGE, re.M | re.S
    )
    assert found is not None, title
    return found[1]


@pytest.mark.parametrize(
    ("title", "ddl"),
    [
        ("half", schema.HALF),
        ("op", schema.OP),
        ("visible", schema.VISIBLE),
        ("parked", schema.PARKED),
        ("broken", schema.BROKEN),
    ],
)
def test_every_column_is_described(title: str, ddl: str) -> None:
    flat = re.sub(r"struct<[^>]*>", "struct", ddl)
    columns = re.findall(r"(\w+) (?:string|int|bigint|boolean|date|array)", flat)
    assert len(columns) == len(flat.split(","))
    described = set(re.findall(r"`(\w+)`", section(title)))
    assert [column for column in columns if column not in described] == []


def test_the_page_of_verdicts_is_current_and_explains_every_kind() -> None:
    page = runpy.run_path(str(DOCS / "verdicts.py"))["verdicts_page"]()
    assert page == VERDICTS, "run make docs"
    explained = r"^- Found: \w[^…]+?^- Evidence: \w[^…]+?^- Closes: \w[^…]+?^- To do: [\w`]"
    assert len(re.findall(explained, page, re.M)) == len(ALL_KINDS)
    # Its order is that of gravity, by which a row's verdict is its first finding.
    assert re.findall(r"^### `(\w+)`\n\*(.+)\*, (\w+)\.$", page, re.M) == [
        (kind.name, kind.title, kind.severity) for kind in ALL_KINDS
    ]


def test_each_verdict_without_findings_has_a_meaning_in_the_cli() -> None:
    named = re.findall(r"^\| `(\w+)` \|", VERDICTS.partition("\n## ")[0], re.M)
    assert len(named) == 7
    assert [name for name in named if name not in STATES] == []


def test_the_journal_is_described(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "audit.db")
    journal.add(schema.RunSummary("r", "full", 0, 0.0, None, {}, 0, {}, {"late": 1}))
    with sqlite3.connect(journal.path) as db:
        columns = {
            column[1]
            for (table,) in db.execute("select name from sqlite_master where type = 'table'")
            for column in db.execute(f"pragma table_info({table})")
        }
    assert columns - set(re.findall(r"`(\w+)`", section("Journal"))) == set()
