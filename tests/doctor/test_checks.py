"""Each check sees the trouble that it is there for, names it, and nothing else."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec import structs

from tests.kit.doctor import ALL, NOW_MS, NOW_S, ONE, TWO, World
from txbroker.cli.doctor import checks_kafka
from txbroker.cli.doctor.findings import CheckLevel
from txbroker.cli.doctor.subject import ReadyAnswer, Unavailable
from txbroker.contract.audit import AuditNews, CheckNews, encode_news
from txbroker.contract.drift import Severity
from txbroker.contract.groups import GroupAnswer, TestedBody
from txbroker.contract.service import CheckCounts, CheckReport, GroupChecks, GroupOverview
from txbroker.core.records import Record
from txbroker.door.own_topics import Stop
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.door.repair import StoppingRecord
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.tools.examination import BrokerFacts, OpenTransaction, PartitionCopies

OK, WARNING, UNKNOWN, FAILS = (
    CheckLevel.OK,
    CheckLevel.WARNING,
    CheckLevel.UNKNOWN,
    CheckLevel.FAILS,
)


def news(**changes: object) -> bytes:
    """Return an audit's record, a minute old and without drift."""
    record = AuditNews(
        run="r1",
        mode="full",
        started_ms=NOW_MS - 100_000,
        ended_ms=NOW_MS - 60_000,
        transactions=7,
        states={},
        drift={"lost": 0},
    )
    return encode_news(structs.replace(record, **changes))


async def test_all_is_well(world: World) -> None:
    world.kafka.news = {"batch": news()}
    report = await world.examine()
    assert {one.level for one in report.outcomes} == {OK}, report
    assert report.healthy
    assert not any(one.hint for one in report.outcomes)
    # Of the targets that the proxies have met, and of ours, but not of a label.
    assert "payments" in world.kafka.asked[0]
    assert "other" not in world.kafka.asked[0]


# --- Kafka -----------------------------------------------------------------------------------


async def test_without_kafka_only_its_dependents_are_unknown(world: World) -> None:
    world.kafka.failure = KafkaUnavailable("no connection to Kafka at x")
    report = await world.examine()
    by_name = {one.name: one for one in report.outcomes}
    assert [name for name, one in by_name.items() if one.level is FAILS] == ["kafka-reachable"]
    assert by_name["kafka-reachable"].found == "no connection to Kafka at x"
    assert "--kafka" in by_name["kafka-reachable"].hint
    assert by_name["topics-there"].level is UNKNOWN
    assert "see kafka-reachable" in by_name["topics-there"].found
    assert by_name["proxies-ready"].level is by_name["parked"].level is OK
    assert not report.healthy


async def test_unreachable_broker_fails(world: World) -> None:
    world.kafka.nodes[1] = BrokerFacts(2, "kafka-2:9092", why="no route")
    assert await world.seen("kafka-brokers") == (FAILS, ("broker 2 at kafka-2:9092: no route",))
    assert (await world.outcome("kafka-version")).level is OK


async def test_old_broker_fails(world: World) -> None:
    world.kafka.nodes[2] = BrokerFacts(3, "kafka-3:9092", 16)
    assert await world.seen("kafka-version") == (FAILS, ("broker 3 at kafka-3:9092",))


async def test_missing_rights_are_named(world: World) -> None:
    world.kafka.see("half", rights=ALL - {"Write"})
    world.kafka.see("op", error=Code.TOPIC_AUTHORIZATION_FAILED, rights=None)
    world.kafka.see("parked", rights=None)  # the broker does not return rights
    world.kafka.group_code = Code.GROUP_AUTHORIZATION_FAILED
    world.kafka.id_code = Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    found = await world.outcome("kafka-rights")
    assert found.level is FAILS
    assert found.details == (
        "topic txbroker.half: Write",
        "topic txbroker.op: Describe, DescribeConfigs, Read, Write (topic authorization failed)",
        "group txbroker: Describe, Read",
        "transactional ids that begin with txbroker.half-: Describe, Write",
    )


@pytest.mark.parametrize(
    ("ahead_ms", "level"), [(900, OK), (1001, FAILS), (-60_000, OK), (86_400_000, FAILS)]
)
async def test_broker_clock_ahead_fails(world: World, ahead_ms: int, level: CheckLevel) -> None:
    world.kafka.newest = {("txbroker.half", 1): NOW_MS + ahead_ms}
    found = await world.outcome("kafka-clocks")
    assert found.level is level
    assert (level is OK) or "broker 2 at kafka-2:9092" in found.details[0]


@pytest.mark.parametrize(
    ("second_ms", "third_ms", "lines"),
    [
        (-900, 0, []),
        (-1100, 0, ["broker 2 at kafka-2:9092 is 1.1 s behind this machine"]),
        (1100, 0, ["broker 2 at kafka-2:9092 is 1.1 s ahead of this machine"]),
        (-900, 900, ["broker 3 is 1.8 s ahead of broker 2"]),
        (-400, 500, []),
    ],
)
async def test_records_appended_meanwhile_bound_clocks(
    world: World, second_ms: int, third_ms: int, lines: list[str]
) -> None:
    """Earlier records may be old; those appended between two reads are current."""
    world.kafka.newest = {("txbroker.half", n): NOW_MS - 60_000 for n in range(4)}
    world.kafka.later = {
        ("txbroker.half", 1): NOW_MS + second_ms,
        ("txbroker.half", 2): NOW_MS + third_ms,
    }
    found = await world.outcome("kafka-clocks")
    assert (found.level, list(found.details)) == (FAILS if lines else OK, lines)


@pytest.mark.parametrize(
    ("ahead_ms", "words"), [(-5000, "5.0 s behind"), (5000, "5.0 s ahead"), (900, ""), (-900, "")]
)
async def test_clock_reported_by_proxies_is_compared(
    world: World, ahead_ms: int, words: str
) -> None:
    world.proxies.proxy(TWO, now_ms=NOW_MS + ahead_ms)
    found = await world.outcome("kafka-clocks")
    assert found.level is (FAILS if words else OK)
    assert not words or (len(found.details) == 1 and words in found.details[0])


async def test_unknown_clocks_are_a_warning(world: World) -> None:
    world.kafka.newest = {}
    world.proxies.gone()
    assert (await world.outcome("kafka-clocks")).level is WARNING


# --- topics ----------------------------------------------------------------------------------


async def test_missing_topic_fails(world: World) -> None:
    world.kafka.remove("parked")
    found = await world.outcome("topics-there")
    assert (found.level, found.details) == (FAILS, ("txbroker.parked",))
    assert "topics apply" in found.hint
    settings = await world.outcome("topics-settings")
    assert (settings.level, "missing: txbroker.parked" in settings.details[0]) == (FAILS, True)


async def test_missing_audit_topics_are_a_warning(world: World) -> None:
    world.kafka.remove("audit.drift")
    assert await world.seen("topics-there") == (WARNING, ("txbroker.audit.drift",))


@pytest.mark.parametrize(
    ("topic", "changes", "words"),
    [
        ("half", {"retention_ms": "600000"}, "the checks take"),
        ("half", {"cleanup_policy": "compact"}, "needs cleanup.policy=delete"),
        ("half", {"retention_bytes": "1000000"}, "retention.bytes=-1"),
        ("half", {"message_timestamp_type": "CreateTime"}, "LogAppendTime"),
        ("op", {"retention_ms": "1000"}, "needs retention.ms"),
        ("op", {"max_message_bytes": "1000"}, "max.message.bytes"),
        ("checkpoint", {"min_insync_replicas": "4"}, "no write could succeed"),
        ("parked", {"unclean_leader_election_enable": "true"}, "can be lost"),
    ],
)
async def test_unsafe_topic_settings_fail(
    world: World, topic: str, changes: dict[str, str], words: str
) -> None:
    world.kafka.configure(topic, **changes)
    found = await world.outcome("topics-settings")
    assert found.level is FAILS
    assert f"txbroker.{topic}" in " ".join(found.details)
    assert words in " ".join(found.details)


async def test_unplanned_topic_settings_are_a_warning(world: World) -> None:
    world.kafka.configure("checkpoint", segment_bytes="1073741824")
    found = await world.outcome("topics-settings")
    assert found.level is WARNING
    assert found.details == ("txbroker.checkpoint: segment.bytes is 1073741824, not 16777216",)


@pytest.mark.parametrize("check", ["topics-settings", "topics-copies", "topics-in-sync"])
async def test_unreadable_topic_settings_are_unknown(world: World, check: str) -> None:
    topic = world.kafka.topics["txbroker.op"]
    world.kafka.topics["txbroker.op"] = structs.replace(topic, configs={})
    found = await world.outcome(check)
    assert (found.level, found.details[0].partition(":")[0]) == (UNKNOWN, "txbroker.op")


async def test_too_few_replicas_are_a_warning(world: World) -> None:
    topic = world.kafka.topics["txbroker.op"]
    world.kafka.topics["txbroker.op"] = structs.replace(topic, replication=2)
    world.kafka.configure("half", min_insync_replicas="3")
    world.kafka.configure("parked", min_insync_replicas="1")
    found = await world.outcome("topics-copies")
    assert found.level is WARNING
    assert found.details == (
        "txbroker.half has min.insync.replicas=3: no broker may fail",
        "txbroker.op has 2 of 3 replicas",
        "txbroker.op has min.insync.replicas=2: no broker may fail",
        "txbroker.parked has min.insync.replicas=1: one replica acknowledges alone",
    )


async def test_replica_out_of_sync_is_a_warning(world: World) -> None:
    world.kafka.copies("op", 1, PartitionCopies(1, (1, 2, 3), (1, 3)))
    assert await world.seen("topics-in-sync") == (
        WARNING,
        ("txbroker.op-1 is not in sync on broker 2",),
    )


async def test_unavailable_partitions_fail(world: World) -> None:
    world.kafka.copies("op", 1, PartitionCopies(-1, (1, 2), (), (1, 2)))
    world.kafka.copies("half", 0, PartitionCopies(1, (1, 2, 3), (1,)))
    found = await world.outcome("topics-in-sync")
    assert found.level is FAILS
    assert found.details == (
        "txbroker.half-0 accepts no writes: 1 in sync, min.insync.replicas is 2",
        "txbroker.op-1 has no leader (replicas on brokers 1, 2)",
    )


async def test_records_of_other_clients_are_a_warning(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stop("parked", Record(b"k", b"v", offset=7), "set_aside", "junk", "nothing")
    world.kafka.foreign = [StoppingRecord("txbroker.parked", 2, stop)]
    assert await world.seen("topics-foreign") == (WARNING, ("txbroker.parked/2@7: junk",))
    monkeypatch.setattr(checks_kafka, "SCAN_S", 0.0)
    monkeypatch.setattr(world.kafka, "set_aside", asyncio.Event().wait)
    found = await world.outcome("topics-foreign")
    assert (found.level, "not read within 0 s" in found.found) == (UNKNOWN, True)


async def test_topic_without_rights_is_named(world: World) -> None:
    world.kafka.failure = ConfigurationError("no right to see topic x")
    assert (await world.outcome("kafka-reachable")).found == "no right to see topic x"


# --- proxies ---------------------------------------------------------------------------------


async def test_without_proxies_their_checks_fail(world: World) -> None:
    world.proxies.gone()
    report = await world.examine()
    by_name = {one.name: one for one in report.outcomes}
    assert by_name["proxies-ready"].details == (f"nothing listens at {ONE}",)
    failing = {name for name, one in by_name.items() if one.level is FAILS}
    assert failing == {"proxies-ready"}
    assert by_name["proxies-owners"].level is by_name["parked"].level is UNKNOWN
    assert by_name["hanging-transactions"].level is UNKNOWN


async def test_problems_of_ready_proxies_are_a_warning(world: World) -> None:
    world.proxies.proxy(TWO, problems=("principals_file cannot be used",))
    found = await world.outcome("proxies-ready")
    assert found.level is WARNING
    assert found.details == (f"{TWO}: principals_file cannot be used",)


async def test_unready_proxy_has_its_reason(world: World) -> None:
    world.proxies.readiness[ONE] = ReadyAnswer(False, {"0": "owned", "1": "hanging: x"}, ["y"])
    found = await world.outcome("proxies-ready")
    assert found.level is FAILS
    assert found.details == (f"{ONE} is not ready: y; partition 1 is hanging: x",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reached": False, "why": "connection refused"}, "does not answer: connection refused"),
        ({"ready": False, "problems": ("topics are gone",)}, "not ready: topics are gone"),
        ({"ready": False}, "not ready: it has not caught up"),
    ],
)
async def test_problem_of_a_peer_proxy_fails(
    world: World, changes: dict[str, object], words: str
) -> None:
    world.proxies.proxy(TWO, **changes)
    found = await world.outcome("proxies-ready")
    assert (found.level, len(found.details)) == (FAILS, 1)
    assert f"{TWO}" in found.details[0]
    assert words in found.details[0]


async def test_named_proxy_without_answer_fails(world: World) -> None:
    world.proxies.named = (ONE, "http://three:8470")
    world.proxies.readiness["http://three:8470"] = Unavailable("nothing listens at three")
    assert await world.seen("proxies-ready") == (FAILS, ("nothing listens at three",))


async def test_partition_with_no_or_two_owners_fails(world: World) -> None:
    world.proxies.partition(3, state="none", owner="")
    world.proxies.partition(1, state="hanging", why="open since noon")
    world.proxies.proxy(TWO, partitions=(0, 2))
    found = await world.outcome("proxies-owners")
    assert found.level is FAILS
    assert found.details == (
        f"partition 0 is claimed by {ONE} and {TWO}",
        f"partition 1 is hanging (open since noon), owner {ONE}",
        "partition 3 is none, owner none",
    )


async def test_no_reported_partition_fails(world: World) -> None:
    world.proxies.view = structs.replace(world.proxies.seen, partitions=())
    assert (await world.outcome("proxies-owners")).level is FAILS


async def test_more_proxies_than_partitions_is_a_warning(world: World) -> None:
    world.proxies.proxy(TWO, partitions=())
    assert (await world.outcome("proxies-partitions")).level is OK
    view = world.proxies.seen
    world.proxies.view = structs.replace(view, partitions=view.partitions[:1])
    assert await world.seen("proxies-partitions") == (WARNING, (f"{TWO} owns none",))


async def test_two_versions_are_a_warning(world: World) -> None:
    world.proxies.proxy(TWO, version="0.9")
    assert await world.seen("proxies-version") == (WARNING, (f"0.9: {TWO}", f"1.0: {ONE}"))


# --- groups ----------------------------------------------------------------------------------


async def test_unreachable_group_fails(world: World) -> None:
    world.proxies.tests["web"] = TestedBody(
        group="web", answered=False, endpoint="http://web/check", status=None, why="refused"
    )
    assert await world.seen("groups-reachable") == (FAILS, ("web: http://web/check: refused",))


@pytest.mark.parametrize("status", [401, 403, 404, 405])
async def test_endpoint_that_refuses_checks_fails(world: World, status: int) -> None:
    world.proxies.tests["web"] = TestedBody(
        group="web", answered=False, endpoint="http://web/check", status=status, why="no"
    )
    assert (await world.outcome("groups-reachable")).level is FAILS


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_endpoint_without_test_calls_is_reachable(world: World, status: int) -> None:
    world.proxies.tests["web"] = TestedBody(
        group="web", answered=False, endpoint="http://web/check", status=status, why="reached"
    )
    assert (await world.outcome("groups-reachable")).level is WARNING


async def test_dead_url_of_connected_group_is_a_warning(world: World) -> None:
    world.proxies.tests["web"] = TestedBody(
        group="web", answered=False, endpoint="http://web/check", status=None, why="refused"
    )
    world.proxies.group("web", sessions=1)
    assert (await world.outcome("groups-reachable")).level is WARNING


async def test_group_without_session_and_url_is_reported(world: World) -> None:
    since_ms = NOW_MS - 120_000
    world.proxies.group("orders", sessions=0, unreachable_since_ms=since_ms)
    found = await world.outcome("groups-reachable")
    assert found.level is FAILS
    assert found.details == (
        "orders: no instance with a check function is connected and no check URL is registered, "
        "for 2m00s",
    )
    world.proxies.group("orders", pending=0)
    assert (await world.outcome("groups-reachable")).level is WARNING


async def test_unreachable_group_that_is_connected_has_a_reason(world: World) -> None:
    world.proxies.group("orders", unreachable_since_ms=NOW_MS - 120_000)
    line = "orders: unreachable, for 2m00s: no connection"
    assert await world.seen("groups-reachable") == (WARNING, (line,))


async def test_test_calls_use_the_groups_timeout(world: World) -> None:
    world.proxies.registered = [
        GroupAnswer(group="web", sessions=0, check_url="http://web/check", timeout_s=9.0),
        GroupAnswer(group="shop", sessions=0, check_url="http://shop/check"),
    ]
    world.proxies.tests["shop"] = Unavailable("the proxy went away")
    found = await world.outcome("groups-reachable")
    assert world.proxies.times_s == {"web": 9.0, "shop": world.settings.check_timeout_s}
    line = "shop: its check URL was not tested: the proxy went away"
    assert (found.level, found.details) == (UNKNOWN, (line,))


# --- transactions ----------------------------------------------------------------------------


@pytest.mark.parametrize(("age_s", "level"), [(900.0, OK), (901.0, WARNING)])
async def test_old_pending_transaction_is_a_warning(
    world: World, age_s: float, level: CheckLevel
) -> None:
    world.proxies.partition(2, oldest_pending_age_s=age_s)
    world.proxies.group("orders", oldest_pending_age_s=age_s)
    found = await world.outcome("pending-age")
    lines = () if level is OK else ("group orders: 20 pending, the oldest for 15m01s",)
    assert (found.level, found.details) == (level, lines)


@pytest.mark.parametrize(
    "check",
    [
        "pending-age",
        "promotion",
        "parked",
        "refused",
        "groups-deciding",
        "undecided-lost",
        "retention-headroom",
    ],
)
async def test_partitions_that_are_not_reported_are_unknown(world: World, check: str) -> None:
    world.proxies.view = structs.replace(world.proxies.seen, complete=False)
    world.proxies.partition(2, pending=None, oldest_pending_age_s=None)
    assert (await world.outcome(check)).level is UNKNOWN


async def test_old_invisible_commit_fails(world: World) -> None:
    world.proxies.partition(2, committed=8, oldest_committed_age_s=61.0)
    assert await world.seen("promotion") == (
        FAILS,
        (f"partition 2 ({TWO}): 8 waiting, the oldest for 1m01s",),
    )


@pytest.mark.parametrize("parked", [3, None])
async def test_parked_transactions_are_a_warning(world: World, parked: int | None) -> None:
    world.proxies.partition(2, parked=parked)
    groups = (*world.proxies.seen.groups, GroupOverview("shop", parked=3))
    world.proxies.view = structs.replace(world.proxies.seen, groups=groups)
    found = await world.outcome("parked")
    assert (found.level, found.details) == (WARNING, ("group shop: 3",))
    assert found.found == "3 are parked, whole and decidable"
    assert "tx list --state parked" in found.hint


async def test_slow_prepares_are_a_warning(world: World) -> None:
    world.proxies.proxy(TWO, prepare_p99_s=1.0)
    assert (await world.outcome("proxies-latency")).level is OK
    world.proxies.proxy(TWO, prepare_p99_s=1.1)
    assert await world.seen("proxies-latency") == (
        WARNING,
        (f"{TWO}: 1 % take longer than 1.1 s",),
    )


async def test_checks_without_a_decision_are_a_warning(world: World) -> None:
    last = CheckReport("id", 1, "http://e/check", "unclear", "answered 500")
    world.proxies.group("orders", checks=GroupChecks(CheckCounts(commit=2, unclear=2), last))
    assert (await world.outcome("groups-answering")).level is OK
    world.proxies.group("orders", checks=GroupChecks(CheckCounts(commit=2, unclear=3), last))
    assert await world.seen("groups-answering") == (
        WARNING,
        ("orders: 3 in 15 minutes, the last: answered 500",),
    )


async def test_growing_group_is_a_warning(world: World) -> None:
    world.proxies.group("orders", pending=1000, pending_growth_per_s=9.0)
    assert (await world.outcome("groups-deciding")).level is OK
    world.proxies.group("orders", pending=1001, pending_growth_per_s=0.6)
    assert await world.seen("groups-deciding") == (
        WARNING,
        ("orders: 1001 pending, 0.6 more a second",),
    )


async def test_refused_transactions_fail(world: World) -> None:
    world.proxies.partition(2, refused=3)
    world.proxies.view = structs.replace(world.proxies.seen, refused_topics={"payments": 3})
    assert await world.seen("refused") == (FAILS, ("topic payments: 3",))


async def test_a_hanging_transaction(world: World) -> None:
    started = NOW_MS - 61_000
    world.kafka.open = [
        OpenTransaction("payments", 1, 7, 12, "billing-1", "Ongoing", started),
        OpenTransaction("payments", 2, 8, 1, "billing-2", "Ongoing", NOW_MS - 500),
    ]
    assert await world.seen("hanging-transactions") == (
        FAILS,
        ("payments-1: transactional id billing-1, for 1m01s, hides 12 offsets",),
    )


async def test_young_transaction_with_lost_end_fails(world: World) -> None:
    last_ms = NOW_MS - 1_000
    world.kafka.open = [
        OpenTransaction(
            "payments", 1, 7, 12, "txbroker.half-0-a", "Empty", None, last_ms, first=684, lost=True
        )
    ]
    found = await world.outcome("hanging-transactions")
    assert found.level is FAILS
    assert "the end of 1 of them lost" in found.found
    (line,) = found.details
    assert "transactional id txbroker.half-0-a" in line
    assert line.endswith("open from offset 684 on")


@pytest.mark.parametrize(("age_s", "level"), [(1, UNKNOWN), (90, FAILS)])
async def test_transaction_unknown_to_coordinators_is_reported(
    world: World, age_s: int, level: CheckLevel
) -> None:
    last_ms = NOW_MS - age_s * 1000
    world.kafka.open = [OpenTransaction("payments", 1, 7, 12, last_write_ms=last_ms)]
    found = await world.outcome("hanging-transactions")
    assert found.level is level
    assert "producer 7, which no readable coordinator knows" in found.details[0]


@pytest.mark.parametrize(("left_s", "level"), [(401.0, OK), (399.0, FAILS)])
async def test_retention_headroom(world: World, left_s: float, level: CheckLevel) -> None:
    world.proxies.proxy(TWO, half_retention_s=1000.0, half_retention_headroom_s=left_s)
    assert (await world.outcome("retention-headroom")).level is level


async def test_lost_transactions_fail(world: World) -> None:
    world.proxies.proxy(TWO, lost_last_hour=2)
    assert await world.seen("undecided-lost") == (FAILS, (f"{TWO}: 2 in the last hour",))


@pytest.mark.parametrize("missing", [[TWO], [ONE, TWO]])
async def test_missing_metrics_are_unknown(world: World, missing: list[str]) -> None:
    """As where the name in `advertise` does not resolve."""
    for url in missing:
        world.proxies.pages[url] = Unavailable(f"no route to {url}")
    found = await world.outcome("hanging-transactions")
    assert found.level is UNKNOWN
    assert f"no route to {missing[0]}" in f"{found.found} {found.details}"
    assert not found.hint


async def test_malformed_metrics_are_reported(world: World) -> None:
    world.proxies.pages = {ONE: "<html>", TWO: "a{ 1"}
    assert (await world.outcome("hanging-transactions")).level is UNKNOWN


# --- audit -----------------------------------------------------------------------------------


async def test_missing_audit_is_a_warning(world: World) -> None:
    assert (await world.outcome("audit-fresh")).level is WARNING
    assert (await world.outcome("audit-drift")).level is OK


@pytest.mark.parametrize(("age_s", "level"), [(2 * 86400 - 1, OK), (2 * 86400 + 1, WARNING)])
async def test_old_audit_is_a_warning(world: World, age_s: int, level: CheckLevel) -> None:
    world.kafka.news = {"batch": news(ended_ms=round((NOW_S - age_s) * 1000))}
    assert (await world.outcome("audit-fresh")).level is level


async def test_recent_stream_does_not_hide_old_batch(world: World) -> None:
    world.kafka.news = {
        "batch": news(ended_ms=round((NOW_S - 3 * 86400) * 1000)),
        "stream": news(mode="stream"),
    }
    found = await world.outcome("audit-fresh")
    assert (found.level, found.details) == (WARNING, ("stream r1 is newer",))
    assert "the newest (full, r1) ended 3d" in found.found


@pytest.mark.parametrize(("lag_s", "level"), [(300, OK), (301, WARNING)])
async def test_lagging_stream_is_a_warning(world: World, lag_s: int, level: CheckLevel) -> None:
    world.kafka.news = {"batch": news()}
    assert (await world.outcome("audit-stream")).found == "there is none"
    world.kafka.news["stream"] = news(mode="stream", ended_ms=NOW_MS - lag_s * 1000)
    assert (await world.outcome("audit-stream")).level is level


async def test_drift_of_any_audit_fails(world: World) -> None:
    world.kafka.news = {"batch": news(), "stream": news(mode="stream", drift={"doubled": 4})}
    assert await world.seen("audit-drift") == (FAILS, ("doubled: 4, by stream r1",))


@pytest.mark.parametrize(("severity", "level"), [("critical", FAILS), ("error", WARNING)])
async def test_failed_check_of_an_audit_is_reported(
    world: World, severity: Severity, level: CheckLevel
) -> None:
    assert (await world.outcome("audit-checks")).found == "the audits have no checks"
    checks = [CheckNews("slow", severity, False), CheckNews("few", "critical", True)]
    world.kafka.news = {"batch": news(checks=checks[1:])}
    assert (await world.outcome("audit-checks")).found == "1 checks hold"
    world.kafka.news = {"batch": news(checks=checks)}
    assert await world.seen("audit-checks") == (level, (f"slow ({severity})",))


async def test_audit_record_of_newer_version_is_reported(world: World) -> None:
    world.kafka.news = {"batch": msgspec.json.encode({"v": 99})}
    found = await world.outcome("audit-drift")
    assert (found.level, "version 99" in found.found) == (UNKNOWN, True)
