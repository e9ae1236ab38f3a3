"""The table of conditions: how each is detected, how it is named, and its next step."""

from collections.abc import Iterator

from msgspec import structs

from txbroker.contract import service
from txbroker.contract.audit import STREAM_KEY
from txbroker.diagnosis import overview as find
from txbroker.diagnosis.limits import LIMITS, percent, span
from txbroker.diagnosis.rows import Diagnosis, Occurrence, Wording

_OF = "cluster, namespace, job"
"""Labels of one installation: its series are joined, as the head of the alert rules explains."""

_DOCTOR = "Run txbroker doctor: it tests what a proxy needs and names the fix."

# --- proxies ---------------------------------------------------------------------------------

KAFKA_SILENT = Diagnosis(
    alert="NotReady",
    find=find.proxies(lambda one: one.kafka_silent_since_ms is not None),
    critical=True,
    of_proxy=True,
    headline=True,
    title=Wording("Kafka has not answered {whom} since {time} UTC"),
    todo="Check that Kafka's brokers run and that the proxy can reach them. Nothing is lost: the "
    "proxy continues as soon as they answer. Numbers are of the time beside them.",
)
PROXY_SILENT = Diagnosis(
    alert="NotReady",
    find=find.proxies(lambda one: not one.reached),
    manual=True,
    of_proxy=True,
    title=Wording("The proxy at {url} does not answer"),
    todo="Check that it runs and that this proxy can reach it.",
)
PROXY_NOT_READY = Diagnosis(
    alert="NotReady",
    section="proxies",
    expr="txbroker_ready == 0",
    after="5m",
    scope="proxy",
    fires="a proxy is not caught up with its partitions",
    summary="The proxy {{ $labels.instance }} is not ready",
    description="For minutes the proxy {{ $labels.instance }} has not been caught up on its "
    "partitions. Its /readyz has the reason.",
    find=find.proxies(lambda one: find.hindered(one) and not one.ready),
    manual=True,
    of_proxy=True,
    title=Wording("The proxy at {url} is not ready"),
    todo=_DOCTOR,
)
NO_PROXY = Diagnosis(
    alert="NotReady",
    section="proxies",
    expr="absent(txbroker_build_info)",
    after="5m",
    critical=True,
    scope="installation",
    fires="Prometheus has no metrics of any proxy",
    summary="No txbroker proxy is there",
    description="Prometheus has no metrics of any txbroker proxy: none runs, or none can be "
    "scraped.",
    show="txbroker top",
)
PROXY_TROUBLED = Diagnosis(
    alert="NotReady",
    find=find.proxies(lambda one: find.hindered(one) and one.ready),
    manual=True,
    of_proxy=True,
    title=Wording("The proxy at {url} reports problems"),
    todo=_DOCTOR,
)
FILE_NOT_READ = Diagnosis(
    alert="FileNotRead",
    section="proxies",
    expr=f"max by ({_OF}, instance, setting) (txbroker_files_not_read) > 0",
    after="5m",
    fires="a file of credentials cannot be used, so its last content stays in force",
    summary="The proxy {{ $labels.instance }} cannot use its {{ $labels.setting }}",
    description="The file of {{ $labels.setting }} cannot be used as it is now, so its last "
    "content stays in force: credentials that were taken out of it still count. The log of {{ "
    "$labels.instance }} has the reason (`file not read`).",
    find=find.proxies(find.file_problems),
    of_proxy=True,
    title=Wording(
        "The proxy at {url} cannot use a file", "The proxy at {url} cannot use {count} files"
    ),
    todo="Correct the file: it is read again when it changes. Until then credentials that were "
    "taken out of it still count.",
)

# --- half partitions -------------------------------------------------------------------------


def _in_state(state: str, todo: str, one: str, several: str, *, critical: bool = True) -> Diagnosis:
    known = {*service.HalfPartitionState, service.UNREACHABLE}
    return Diagnosis(
        alert="NotReady",
        find=find.partitions(lambda part: (part.state if part.state in known else "") == state),
        critical=critical,
        of_proxy=True,
        title=Wording(f"{{partitions}} {one}", f"{{partitions}} {several}"),
        todo=todo,
    )


STATES = (
    _in_state(
        service.UNREACHABLE,
        "Their proxy does not answer. Another one takes over within seconds; if not, look at that "
        "proxy and its network.",
        "is unreachable",
        "are unreachable",
    ),
    structs.replace(
        _in_state(
            service.HalfPartitionState.NONE,
            "Calls for them wait. A change of owner takes seconds; if it lasts, check that proxies "
            "run and reach Kafka.",
            "has no owner",
            "have no owner",
        ),
        section="proxies",
        expr=f"""\
max by ({_OF}) (
  sum by ({_OF}, instance) (txbroker_partitions)
)
-
sum by ({_OF}) (txbroker_owned_partitions)
> 0""",
        after="2m",
        scope="partitions",
        fires="half partitions have no owner",
        summary="Half partitions have no owner",
        description="{{ $value | humanize }} half partitions are served by no proxy that is "
        "scraped. Their transactions are neither decided nor promoted nor checked.",
    ),
    _in_state(
        service.HalfPartitionState.CLAIMING,
        "A claim takes seconds. If it lasts, see the owner's log: Kafka may not answer.",
        "is being claimed",
        "are being claimed",
        critical=False,
    ),
    _in_state(
        service.HalfPartitionState.REPLAYING,
        "Calls for them wait until the replay is done.",
        "is being replayed by its new owner",
        "are being replayed by their new owner",
        critical=False,
    ),
    _in_state(
        service.HalfPartitionState.SUSPENDED,
        "Their proxy has lost contact with the group coordinator. It resumes, or another proxy "
        "takes over, within seconds.",
        "is suspended",
        "are suspended",
        critical=False,
    ),
    _in_state(
        service.HalfPartitionState.HANGING,
        "Run txbroker doctor: it names the transaction and the command that ends it.",
        "waits for a hanging Kafka transaction",
        "wait for a hanging Kafka transaction",
    ),
    _in_state(
        service.HalfPartitionState.TRUNCATED,
        "Nothing is promoted, so that no message is lost or duplicated. See the owner's log, and "
        "restore the topics.",
        "is stopped: its topics were truncated or recreated",
        "are stopped: their topics were truncated or recreated",
    ),
    _in_state(
        service.HalfPartitionState.NEWER,
        "Upgrade the proxies; no message was dropped.",
        "is stopped: a newer txbroker wrote to it",
        "are stopped: a newer txbroker wrote to them",
    ),
    _in_state(
        service.HalfPartitionState.STOPPED,
        "An invariant is broken. See the owner's log, and keep the topics.",
        "is stopped",
        "are stopped",
    ),
    _in_state(
        "",
        "See the owner's log, and upgrade this proxy.",
        "is in the state {state}, which this proxy does not know",
        "are in states that this proxy does not know, such as {state}",
    ),
)
"""A condition for each state of half partitions but `owned`."""
PROMOTION_STALLED = Diagnosis(
    alert="PromotionStalled",
    section="promotion",
    expr=f"max by ({_OF}, instance) (txbroker_promotion_oldest_age_seconds) "
    f"> {LIMITS.promotion_s:g}",
    after="1m",
    critical=True,
    fires=f"messages committed {span(LIMITS.promotion_s)} ago are not visible",
    description="A transaction that was committed {{ $value | humanizeDuration }} ago is not "
    "promoted yet by the proxy {{ $labels.instance }}. Its consumers wait.",
    find=find.partitions(lambda one: (one.oldest_committed_age_s or 0.0) > LIMITS.promotion_s),
    title=Wording("Committed messages do not become visible"),
    todo="A target topic may have no leader, or an open Kafka transaction hides the messages. "
    "Check the oldest committed ones, Kafka, and the owner's log.",
    show="txbroker tx list --state committed",
    holds="committed messages become visible",
)
REFUSING = Diagnosis(
    alert="Refusing",
    section="promotion",
    expr=f"sum by ({_OF}, topic) (txbroker_refused) > 0",
    after="1m",
    critical=True,
    fires="a target topic rejects committed messages",
    summary="Topic {{ $labels.topic }} does not take committed messages",
    description="{{ $value | humanize }} committed transactions are kept back because topic {{ "
    "$labels.topic }} does not take them. Their consumers miss them until the topic is corrected.",
    find=find.partitions(lambda one: one.refused),
    title=Wording(
        "{count} committed transaction is refused by a target",
        "{count} committed transactions are refused by a target",
    ),
    todo="Fix the topic (create it, raise its max.message.bytes, grant the right); the "
    "transactions are then retried automatically, or at once when they are revived.",
    show="txbroker tx list --state refused",
    holds="every target topic accepts committed messages",
)
UNDECIDED_LOST = Diagnosis(
    alert="UndecidedLost",
    section="transactions",
    expr=f"""\
sum by ({_OF}) (increase(txbroker_lost_undecided_total[1h])) > 0
or
sum by ({_OF}) (
  txbroker_lost_undecided_total unless txbroker_lost_undecided_total offset 1h
) > 0""",
    critical=True,
    fires="messages of unsettled transactions were deleted from Kafka",
    summary="Messages of transactions that are not settled are gone from Kafka",
    description="In the last hour about {{ $value | humanize }} transactions were found whose half "
    "messages vanished from the half topic before they were settled and of which there is no copy. "
    "Their messages cannot be promoted any more.",
    remark="A proxy that finds them while it starts shows no increase: its first sample counts.",
    find=find.proxies(lambda one: one.lost_last_hour),
    of_proxy=True,
    title=Wording(
        "The messages of {count} transaction that is not settled are gone",
        "The messages of {count} transactions that are not settled are gone",
    ),
    todo="Find out what deletes records of the half topic before their retention, and prepare the "
    "transactions again. The log has their ids (`bodies lost`).",
    holds="no undecided transaction was lost",
)
HALF_RETENTION_AT_RISK = Diagnosis(
    alert="HalfRetentionAtRisk",
    section="proxies",
    expr=f"""\
min by ({_OF}) (txbroker_half_retention_headroom_seconds)
< {LIMITS.headroom_share:g} *
min by ({_OF}) (txbroker_half_retention_seconds)""",
    after="5m",
    critical=True,
    fires="retention is about to delete messages of unsettled transactions: less than "
    f"{percent(LIMITS.headroom_share)} of it is left",
    description="In {{ $value | humanizeDuration }} retention reaches a half message that is "
    "neither settled nor copied. Copies should have been made when half of the retention was over.",
    find=find.proxies(
        lambda one: (
            one.half_retention_headroom_s is not None
            and one.half_retention_s is not None
            and one.half_retention_headroom_s < LIMITS.headroom_share * one.half_retention_s
        )
    ),
    title=Wording("Kafka will delete messages of transactions that are not settled"),
    todo="Raise retention.ms of the half topic and of the operation topic now, or decide the "
    "oldest transactions; then see the owner's log: copies should have been made when half of the "
    "retention was over.",
    show="txbroker tx list",
    holds="retention removes no undecided transaction",
)

# --- audits ----------------------------------------------------------------------------------

AUDIT_DRIFT = Diagnosis(
    alert="AuditDrift",
    section="audit",
    expr=f"max by ({_OF}, kind) (txbroker_audit_drift) > 0",
    after="1m",
    critical=True,
    fires="the audit found transactions that did not end as decided",
    description="The newest batch audit, or a stream since it began, found {{ $value | humanize }} "
    "transactions of kind {{ $labels.kind }}.",
    find=find.audits(lambda one, _: any(one.drift.values())),
    title=Wording("The audit found transactions that did not end as they were decided"),
    todo="Run txbroker audit show last, then txbroker tx show for the transactions that it names. "
    "Only late ones may disappear without action.",
    holds="the audits found no drift",
)
CRITICAL_CHECK_FAILED = Diagnosis(
    alert="AuditCheckFailed",
    section="audit",
    expr=f'max by ({_OF}, check) (txbroker_audit_check_failed{{severity="critical"}}) > 0',
    after="1m",
    critical=True,
    fires="a critical check of the newest batch audit failed",
    summary="A check of the audit failed",
    description="The newest batch audit found check {{ $labels.check }} outside of its limit.",
    remark="Of `txbroker audit run --checks`.",
    find=find.audits(lambda one, _: "critical" in one.failed_checks.values()),
    title=Wording("Checks of the audit failed"),
    todo="Run txbroker audit show last: it has the values and their limits.",
    holds="the checks of the audits hold",
)
CHECK_FAILED = structs.replace(
    CRITICAL_CHECK_FAILED,
    expr=f'max by ({_OF}, check) (txbroker_audit_check_failed{{severity!="critical"}}) > 0',
    critical=False,
    fires="another check of it failed",
    remark="",
    find=find.audits(lambda one, _: {*one.failed_checks.values()} - {"critical"}),
)

# --- groups ----------------------------------------------------------------------------------

PARKING = Diagnosis(
    alert="Parking",
    section="transactions",
    expr=f"sum by ({_OF}, group) (txbroker_parked) > 0",
    after="1m",
    fires="transactions wait for an operator's decision",
    summary="Transactions of group {{ $labels.group }} wait for an operator's decision",
    description="{{ $value | humanize }} transactions of group {{ $labels.group }} are parked: "
    "every check of theirs ended without a decision. They are kept whole until an operator decides "
    "or revives them.",
    # The groups too, to name them: an overview may not list all.
    find=lambda overview: [
        *(one for one in overview.partitions if one.parked),
        *(one for one in overview.groups if one.parked),
    ],
    manual=True,
    title=Wording(
        "{count} parked transaction needs a manual decision",
        "{count} parked transactions need a manual decision",
    ),
    todo="Look up in the group's database whether the local transaction was committed, then commit "
    "or roll back; or revive it if the group can answer again.",
    show="txbroker tx list --state parked",
    holds="no transaction waits for an operator's decision",
)
CHECKS_FAILING = Diagnosis(
    alert="ChecksFailing",
    section="checks",
    expr=f"""\
sum by ({_OF}, group) (
  rate(txbroker_checks_total{{outcome=~"unknown|unclear"}}[15m])
)
/
sum by ({_OF}, group) (
  rate(txbroker_checks_total{{outcome=~"commit|rollback|unknown|unclear"}}[15m])
)
> {service.CHECKS_FAILING_SHARE:g}
and
sum by ({_OF}, group) (
  increase(txbroker_checks_total{{outcome=~"unknown|unclear"}}[15m])
) >= {service.CHECKS_FAILING_MIN}""",
    after="5m",
    fires=f"more than {percent(service.CHECKS_FAILING_SHARE)} of a group's checks, and at least "
    f"{service.CHECKS_FAILING_MIN}, return no decision",
    description="{{ $value | humanizePercentage }} of the checks that reached group {{ "
    "$labels.group }} in the last 15 minutes were answered with unknown, with an error or not in "
    "time. Each uses up an attempt; after the last one the transaction is parked.",
    find=find.groups(lambda one: one.checks.counts.failing),
    title=Wording("Checks of group {group} bring no decision"),
    todo="Fix the group's check: each answer like this uses up an attempt, and after the last one "
    "the transaction is parked.",
    show="txbroker groups show NAME",
    holds="the checks of every group bring decisions",
)
GROUP_UNREACHABLE = Diagnosis(
    alert="GroupUnreachable",
    section="checks",
    expr=f"""\
(
  sum by ({_OF}, group) (
    rate(txbroker_checks_total{{outcome=~"unreachable|returned"}}[5m])
  ) > 0
  unless
  sum by ({_OF}, group) (
    rate(txbroker_checks_total{{outcome!~"unreachable|returned"}}[5m])
  ) > 0
)
and on ({_OF})
sum by ({_OF}) (txbroker_unreachable_groups) > 0""",
    after="5m",
    fires="no instance of a group is reachable",
    summary="No instance of group {{ $labels.group }} can be reached for checks",
    description="Transactions of group {{ $labels.group }} are due for a check, and for minutes no "
    "instance was reachable. No attempt is used up, so nothing is parked, but nothing is decided "
    "either.",
    find=find.groups(lambda one: one.unreachable_since_ms is not None),
    title=Wording("Group {group} is unreachable", "{count} groups are unreachable"),
    todo="Start an instance of the service with a check function, or fix its check URL: address, "
    "certificate, secret. Checks resume automatically.",
    show="txbroker groups show NAME",
    holds="every producer group can be checked",
)
PENDING_TOO_OLD = Diagnosis(
    alert="PendingTooOld",
    section="transactions",
    expr=f"max by ({_OF}, group) (txbroker_pending_oldest_age_seconds) > {LIMITS.pending_age_s:g}",
    after="1m",
    fires=f"a transaction has been undecided for {span(LIMITS.pending_age_s)}",
    summary="A transaction of group {{ $labels.group }} is undecided for too long",
    description="The oldest pending transaction of group {{ $labels.group }} was prepared {{ "
    "$value | humanizeDuration }} ago. Neither its producer nor a check has decided it.",
    remark="All attempts of the default policy are over after 7 minutes.",
    find=find.groups(lambda one: (one.oldest_pending_age_s or 0.0) > LIMITS.pending_age_s),
    title=Wording("Transactions are undecided for up to {age}"),
    todo="See the answers of the group's checks: they may repeat “not yet”.",
    show="txbroker tx list --state pending",
    holds="no transaction is undecided for too long",
)
PENDING_GROWING = Diagnosis(
    alert="PendingGrowing",
    section="transactions",
    expr=f"""\
sum by ({_OF}, group) (txbroker_pending) > {LIMITS.pending}
and
deriv((sum by ({_OF}, group) (txbroker_pending))[15m:1m]) > {LIMITS.growth_per_s:g}""",
    after="15m",
    fires=f"a group with more than {LIMITS.pending:,} undecided transactions prepares "
    "faster than it decides",
    description="{{ $value | humanize }} transactions of group {{ $labels.group }} are undecided, "
    "and their number has been growing for a quarter of an hour. At pending_group_max further "
    "prepares are refused as overloaded.",
    find=find.groups(
        lambda one: (
            one.pending > LIMITS.pending and (one.pending_growth_per_s or 0.0) > LIMITS.growth_per_s
        )
    ),
    title=Wording("Group {group} prepares more than is decided"),
    todo="See whether the service still decides, and whether its checks are answered. At "
    "pending_group_max further prepares are refused.",
    show="txbroker groups show NAME",
    holds="every group decides as fast as it prepares",
)
PREPARE_SLOW = Diagnosis(
    alert="PrepareSlow",
    section="transactions",
    expr=f"""\
histogram_quantile(
  0.99,
  sum by ({_OF}, le) (
    rate(txbroker_prepare_latency_seconds_bucket[5m])
  )
) > {LIMITS.prepare_s:g}""",
    after="10m",
    fires=f"1 % of the prepares take longer than {span(LIMITS.prepare_s)}",
    summary=f"Prepares take more than {span(LIMITS.prepare_s)}",
    description="For minutes 1 % of the prepares were answered after {{ $value | humanizeDuration "
    "}} or later. Producers wait for as long before they begin their local transactions.",
    remark="An idle proxy takes milliseconds.",
    find=find.proxies(lambda one: (one.prepare_p99_s or 0.0) > LIMITS.prepare_s),
    of_proxy=True,
    title=Wording("Prepares take up to {age}"),
    todo="Check the latency of Kafka's disks and network, and the load of the proxy; see the "
    "runbook.",
    holds="prepares are answered in time",
)
AUDIT_STALE = Diagnosis(
    alert="AuditStale",
    section="audit",
    expr=f"""\
time()
-
max by ({_OF}, mode) (txbroker_audit_last_success_timestamp_seconds)
> {LIMITS.audit_s:g}""",
    after="10m",
    fires=f"no batch audit has ended, or a stream has judged nothing, for {span(LIMITS.audit_s)}",
    description="The newest {{ $labels.mode }} audit ended {{ $value | humanizeDuration }} ago.",
    remark="Silent where no audit of that mode, batch or stream, has ever run.",
    find=find.audits(lambda _, age_s: age_s > LIMITS.audit_s),
    title=Wording("The {mode} audit does not run any more"),
    todo="See the log of its job. Run txbroker audit run every night, or keep txbroker audit "
    "stream running. The runbook has how to remove one that is no longer needed.",
    holds="an audit has run recently",
)
STREAM_LAGGING = Diagnosis(
    alert="AuditStreamLagging",
    section="audit",
    expr=f"""\
time()
-
max by ({_OF}) (
  txbroker_audit_last_success_timestamp_seconds{{mode="stream"}}
)
> {LIMITS.stream_s:g}""",
    after="5m",
    fires=f"a streaming audit has judged nothing of the last {span(LIMITS.stream_s)}",
    description="It has judged what happened until {{ $value | humanizeDuration }} ago.",
    remark="A stopped stream lags, too. Silent where none has ever run.",
    find=find.audits(lambda one, age_s: one.mode == STREAM_KEY and age_s > LIMITS.stream_s),
    title=Wording("The streaming audit does not keep up"),
    todo="See whether it runs, then its log and the records that it has not read.",
    holds="the streaming audit keeps up",
)

# --- consumers, relays -----------------------------------------------------------------------

CONSUMER_STUCK = Diagnosis(
    alert="ConsumerStuck",
    section="consumers",
    expr=f"max by ({_OF}, group) (txbroker_consumer_oldest_unfinished_seconds) "
    f"> {LIMITS.consumer_s:g}",
    after="5m",
    fires=f"a message of a group of consumers has not been done for {span(LIMITS.consumer_s)}",
    summary="A message of consumer group {{ $labels.group }} is not done for too long",
    description="The oldest message that group {{ $labels.group }} has not done is {{ $value | "
    "humanizeDuration }} old. Its key or partition waits for it.",
    remark="Longer than all local attempts. Messages that wait for their step of the retry topic "
    "do not count.",
    show="txbroker consumers show GROUP",
)
CONSUMER_SET_ASIDE = Diagnosis(
    alert="ConsumerSetAside",
    section="consumers",
    expr=f"sum by ({_OF}, group) (txbroker_consumer_aside_keys) > 0",
    after="5m",
    scope="keys",
    fires="keys of a group of consumers are set aside",
    summary="Keys of consumer group {{ $labels.group }} wait for an operator",
    description="{{ $value | humanize }} keys of group {{ $labels.group }} are set aside: their "
    "messages are kept in order until an operator releases them.",
    remark="Only an operator ends either. Dead letters stop nothing and are often meant "
    "(`Reject`), so they have a metric and no alert.",
    show="txbroker consumers aside GROUP",
)
ASIDE_FULL = Diagnosis(
    alert="ConsumerSetAside",
    section="consumers",
    expr=f"""\
sum by ({_OF}, group) (
  increase(txbroker_consumer_messages_total{{result="aside_full"}}[5m])
) > 0""",
    after="1m",
    critical=True,
    scope="limit",
    fires="a partition has as many set-aside keys as it may have, and waits",
    summary="Consumer group {{ $labels.group }} waits, with 1,000 set-aside keys",
    description="A partition of group {{ $labels.group }} has 1,000 set-aside keys, the most that "
    "it may have. The next message that fails is repeated until an operator releases keys.",
    show="txbroker consumers aside GROUP",
)
RELAY_STALLED = Diagnosis(
    alert="RelayStalled",
    section="relays",
    expr=f"""\
max by ({_OF}, relay) (
  txbroker_relay_oldest_seconds{{state="LOCAL_COMMIT"}}
) > {LIMITS.relay_s:g}""",
    after="2m",
    critical=True,
    fires=f"a committed row of an outbox has not been delivered for {span(LIMITS.relay_s)}",
    summary="Relay {{ $labels.relay }} does not deliver a committed message",
    description="The oldest row that relay {{ $labels.relay }} has to deliver is {{ $value | "
    "humanizeDuration }} old. Consumers do not see its message.",
    remark="Without a relay there is no series: alert on the absence of its process, too.",
    todo="Correct what the causes name; without one, read the relay's log.",
    show="txbroker outbox list URL --state LOCAL_COMMIT",
    holds="committed rows are delivered",
)
RELAY_ERRORS = Diagnosis(
    alert="RelayErrors",
    section="relays",
    expr=f'max by ({_OF}, relay) (txbroker_relay_rows{{state="MESSAGE_ERROR"}}) > 0',
    after="1m",
    fires="rows of an outbox are given up",
    summary="Messages of relay {{ $labels.relay }} are given up",
    description="{{ $value | humanize }} rows of relay {{ $labels.relay }} are in the state "
    "MESSAGE_ERROR: they are kept whole until an operator retries, decides or deletes them.",
    todo="Correct what the causes name, then run `txbroker outbox retry`.",
    show="txbroker outbox list URL --state MESSAGE_ERROR",
    holds="no row is given up",
)
SLOT_HOLDING_LOG = Diagnosis(
    alert="SlotHoldingLog",
    section="relays",
    expr=f"max by ({_OF}, relay) (txbroker_relay_lag_bytes) > {LIMITS.lag_bytes}",
    after="5m",
    fires=f"a capture lags its database by {LIMITS.lag_bytes >> 30} GiB",
    summary="Capture {{ $labels.relay }} lags its database",
    description="{{ $value | humanize1024 }}B of the database's log follow the position of capture "
    "{{ $labels.relay }}. PostgreSQL keeps them for its slot, and can fill the disk; MariaDB "
    "deletes binlogs that are too old, and then the capture cannot go on.",
    show="txbroker capture plan FILE",
)

DIAGNOSES = (
    KAFKA_SILENT, PROXY_SILENT, PROXY_NOT_READY, NO_PROXY, PROXY_TROUBLED, FILE_NOT_READ, *STATES,
    PROMOTION_STALLED, REFUSING, UNDECIDED_LOST, HALF_RETENTION_AT_RISK, AUDIT_DRIFT,
    CRITICAL_CHECK_FAILED, CHECK_FAILED, PARKING, CHECKS_FAILING, GROUP_UNREACHABLE,
    PENDING_TOO_OLD, PENDING_GROWING, PREPARE_SLOW, AUDIT_STALE, STREAM_LAGGING, CONSUMER_STUCK,
    CONSUMER_SET_ASIDE, ASIDE_FULL, RELAY_STALLED, RELAY_ERRORS, SLOT_HOLDING_LOG,
)  # fmt: skip
"""All conditions, in the order in which an overview shows them."""
PROXY_WORDS = frozenset(one.words for one in DIAGNOSES if one.of_proxy)
"""The names of conditions that stay with a proxy."""


def occurrences(overview: service.Overview) -> Iterator[Occurrence]:
    """Yield the conditions that apply to an overview."""
    for one in DIAGNOSES:
        if parts := one.parts(overview):
            yield Occurrence(one, parts)


def problems_of(overview: service.Overview) -> Iterator[tuple[str, str]]:
    """Yield the name of each condition that applies and the group that it is about, "" for none."""
    for found in occurrences(overview):
        for group in found.groups or ("",):
            yield found.diagnosis.words, group
