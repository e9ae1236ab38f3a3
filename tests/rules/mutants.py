"""Rules of the log protocol taken out one by one: the named test must fail each time.

Run all of them with `python -m tests.rules.mutants`, or those whose rule or file holds a word with
`python -m tests.rules.mutants WORD…`. `--without-kafka` leaves out those that start a real Kafka.
The package is copied first; nothing in the working tree changes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COPIED = ("txbroker", "checkers", "cli", "tests", "docs")
FILES = ("pyproject.toml", "setup.cfg")
TEST_TIMEOUT_S = 60
PASSED, FAILED = 0, 1


class Mutant(NamedTuple):
    """A rule taken out: in `file` each text, which is there once, is replaced."""

    rule: str
    what: str
    file: str
    edits: tuple[tuple[str, str], ...]
    test: str

    @property
    def real_kafka(self) -> bool:
        """Whether its test starts a Kafka."""
        return "[kafka" in self.test or "test_unanswered" in self.test


APPENDER = "txbroker/proxy/appender.py"
OWNER = "txbroker/proxy/owner.py"
LEDGER = "txbroker/core/ledger.py"
LIFE = "txbroker/core/transaction.py"
STATES = "txbroker/core/states.py"
PLAN = "txbroker/core/promotion.py"
RECOVERY = "txbroker/proxy/recovery.py"
PROMOTER = "txbroker/proxy/promoter.py"
CHECKBACK = "txbroker/proxy/checkback.py"
BROKER = "txbroker/proxy/broker.py"
TARGETS = "txbroker/proxy/targets.py"
CLOCK = "txbroker/proxy/clock.py"
APPLIER = "txbroker/proxy/applier.py"
TWIN = "txbroker/kafka/twin.py"
DOOR = "txbroker/kafka/partition.py"
READING = "tests/rules/test_rules_reading.py::"
TIMES = "tests/rules/test_rules_clock.py::"
CLAIMS = "tests/rules/test_rules_claims.py::"
TURNS = "tests/rules/test_rules_turns.py::"
CHECKS = "tests/rules/test_rules_checks.py::"


def _mutant(rule: str, what: str, file: str, text: str, new: str, test: str) -> Mutant:
    return Mutant(rule, what, file, ((text, new),), test)


MUTANTS = (
    _mutant(
        "1",
        "an append without an answer is an ack",
        APPENDER,
        '_fail(entry, OwnerUnavailable(f"Kafka did not answer: {error}"))',
        "entry.outcome.set_result(Outcome(Effect.APPLIED))",
        READING + "test_a_prepare_without_an_answer_is_no_ack_and_can_be_sent_again",
    ),
    _mutant(
        "2",
        "own marker applied across a gap",
        APPENDER,
        "if base_offset == position and timestamp_ms >= 0:",
        "if timestamp_ms >= 0:",
        READING + "test_a_gap_is_fetched_and_applied_before_our_own_marker",
    ),
    _mutant(
        "2",
        "an append without an offset is taken for contiguous",
        APPENDER,
        "if base_offset == position and timestamp_ms >= 0:",
        "if base_offset in (position, -1) and timestamp_ms >= 0:",
        READING + "test_without_an_offset_ours_is_not_taken_for_what_stood_before_it",
    ),
    _mutant(
        "2",
        "an append without a time is applied as it is",
        APPENDER,
        "if base_offset == position and timestamp_ms >= 0:",
        "if base_offset == position:",
        READING + "test_without_an_append_time_the_log_is_read_back",
    ),
    _mutant(
        "2",
        "an idle owner does not look at op",
        OWNER,
        "                await self._half.catch_up()\n                await self._op.catch_up()\n",
        "                await self._half.catch_up()\n",
        READING + "test_an_idle_owner_sees_what_others_wrote",
    ),
    _mutant(
        "2",
        "an idle owner looks once a minute",
        OWNER,
        "IDLE_S = 1.0\n",
        "IDLE_S = 60.0\n",
        READING + "test_an_idle_owner_looks_every_second",
    ),
    _mutant(
        "2",
        "the ledger takes records out of line",
        LEDGER,
        "if record.offset != self.op_position:",
        "if record.offset < 0:",
        "tests/core/test_replay.py::test_a_record_out_of_line_is_a_gap",
    ),
    _mutant(
        "3",
        "answered before it is read back",
        APPENDER,
        "outcomes = await self._read_back(records, base_offset)",
        "outcomes = [Outcome(Effect.APPLIED) for _ in records]",
        READING + "test_a_gap_is_fetched_and_applied_before_our_own_marker",
    ),
    _mutant(
        "3",
        "not found without having read half to its end",
        OWNER,
        "                await self._half.catch_up()\n            except KafkaUnavailable as error:\n"
        "                raise",
        "                pass\n            except KafkaUnavailable as error:\n                raise",
        READING + "test_not_found_only_after_half_was_read_to_an_end_asked_for_now",
    ),
    _mutant(
        "3",
        "a decided one is decided again in the log",
        OWNER,
        "        if transaction.decision is None:\n            outcome = await",
        "        if transaction is not None:\n            outcome = await",
        READING + "test_standing_decisions_come_from_the_ledger_and_write_nothing",
    ),
    _mutant(
        "4",
        "a second decision is no conflict",
        LEDGER,
        "if transaction.decision is not None:",
        "if transaction.decision is decision:",
        READING + "test_the_second_marker_loses_and_the_conflict_is_counted",
    ),
    _mutant(
        "4",
        "the last marker wins",
        STATES,
        "    State.COMMITTED: {\n",
        "    State.COMMITTED: {\n        Step.ROLLBACK: State.ROLLED_BACK,\n",
        "tests/core/test_states.py::test_no_step_leads_back_from_a_decision",
    ),
    _mutant(
        "4",
        "any group decides",
        LEDGER,
        "if marker.group and marker.group != transaction.half.group:",
        "if marker.group and not transaction.half.group:",
        READING + "test_an_illegal_marker_has_no_effect_and_is_counted",
    ),
    _mutant(
        "4",
        "attempts of any round and number are accepted",
        LIFE,
        "if marker.round != self.round or marker.number != self.number + 1:",
        "if marker.round < 0:",
        READING + "test_an_illegal_marker_has_no_effect_and_is_counted",
    ),
    _mutant(
        "4",
        "the owner appends before it checks",
        OWNER,
        "        self._may_decide(transaction, request)\n"
        "        if transaction.decision is None:\n",
        "        if transaction.decision is None:\n",
        READING + "test_the_owner_checks_before_it_appends",
    ),
    _mutant(
        "5",
        "a marker before its half is dropped",
        LEDGER,
        "self._waiting.setdefault(marker.id, []).append(entry)",
        "self._waiting.setdefault(marker.id, [])",
        READING + "test_a_marker_before_its_half_waits_for_it",
    ),
    _mutant(
        "5",
        "waiting markers are forgotten by op's log clock",
        LEDGER,
        "if self.half_clock_ms - parse_id(id).time_ms <= self.dedup_window_ms",
        "if self.op_clock_ms - parse_id(id).time_ms <= self.dedup_window_ms",
        "tests/core/test_replay.py::test_waiting_markers_are_forgotten_by_halfs_log_clock_only",
    ),
    _mutant(
        "5, 12",
        "a takeover asks for half's end first",
        RECOVERY,
        "    op_start, op_end = await door.op.bounds()\n"
        "    half_start, half_end = await door.half.bounds()\n",
        "    half_start, half_end = await door.half.bounds()\n"
        "    op_start, op_end = await door.op.bounds()\n",
        READING + "test_a_takeover_asks_for_the_end_of_op_before_that_of_half",
    ),
    _mutant(
        "6",
        "now is the wall clock",
        CLOCK,
        "return self._base_ms + int((time.monotonic() - self._base) * 1000)",
        "return int(time.time() * 1000)",
        TIMES + "test_the_wall_clock_plays_no_part",
    ),
    _mutant(
        "6",
        "now does not start at the claim's append time",
        RECOVERY,
        "clock = LogTime(claimed.timestamp_ms)",
        "clock = LogTime(0)",
        TIMES + "test_a_restart_knows_the_time_from_its_claim_not_from_old_records",
    ),
    _mutant(
        "6",
        "ids are forgotten by the wall clock",
        LEDGER,
        "if self.half_clock_ms - newest_ms <= self.dedup_window_ms:",
        'if __import__("time").time() * 1000 - newest_ms <= self.dedup_window_ms:',
        TIMES + "test_ids_are_forgotten_by_the_log_clock_only",
    ),
    _mutant(
        "6",
        "now runs ahead of what it was told",
        CLOCK,
        "            self._base = time.monotonic()\n\n    def now_ms",
        "\n    def now_ms",
        TIMES + "test_now_never_runs_ahead_of_what_it_was_told",
    ),
    _mutant(
        "7",
        "a half message counts however late it is appended",
        LEDGER,
        "if abs(self.half_clock_ms - parts.time_ms) > self.dedup_window_ms:",
        "if abs(parts.time_ms) < 0:",
        TIMES + "test_a_half_message_that_is_appended_too_late_is_void",
    ),
    _mutant(
        "7",
        "an expired id is written all the same",
        OWNER,
        "        age_ms = abs(self.now_ms() - parse_id(half.id).time_ms)\n",
        "        age_ms = 0\n",
        TIMES + "test_an_id_too_far_from_now_is_refused_before_it_is_written",
    ),
    _mutant(
        "7",
        "an id repeated with other content is taken for the same",
        LEDGER,
        "effect = Effect.REPEATED if standing.fingerprint == mark else Effect.CONFLICT",
        "effect = Effect.REPEATED",
        READING + "test_other_content_under_a_known_id_is_a_conflict_also_in_a_gap",
    ),
    _mutant(
        "7",
        "the appender does not compare a repeated prepare",
        OWNER,
        "if transaction.fingerprint != fingerprint(messages, group):",
        "if not transaction.fingerprint:",
        TIMES + "test_a_known_id_or_key_with_another_body_is_a_conflict",
    ),
    _mutant(
        "7",
        "a second half with the same key counts",
        LEDGER,
        "if earlier and self.half_clock_ms - earlier.prepared_at_ms <= self.dedup_window_ms:",
        "if earlier and self.half_clock_ms < 0:",
        TIMES + "test_of_two_prepares_with_one_key_at_once_one_counts",
    ),
    _mutant(
        "7",
        "a record that does not read stops the partition",
        LEDGER,
        "        except Malformed as error:\n            self._parts = []\n",
        "        except Malformed as error:\n            raise\n",
        TIMES + "test_records_that_do_not_read_are_set_aside",
    ),
    _mutant(
        "8",
        "one transactional id is taken alone",
        DOOR,
        'self._producer("b"))',
        'self._producer("b-" + claim.claim))',
        "tests/contract/test_door.py::"
        "test_a_later_claim_fences_both_producers_of_the_earlier[kafka-1]",
    ),
    Mutant(
        "8",
        "both ids in fixed order, without the claim record",
        DOOR,
        (
            (
                "stored = await self._write_claim(producers[0], claim, patience)",
                "stored = Stored(-1, -1)",
            ),
            ("if last_claim != claim.claim:", "if last_claim is None:"),
        ),
        "tests/kafka/test_unanswered.py::"
        "test_a_claim_that_is_overtaken_fails_and_leaves_one_owner[2]",
    ),
    _mutant(
        "8",
        "the kept copies are read before the claim",
        RECOVERY,
        "    claimed = await door.claim(claim)\n"
        "    clock = LogTime(claimed.timestamp_ms)\n"
        "    kept = await read_kept(door)\n",
        "    kept = await read_kept(door)\n"
        "    claimed = await door.claim(claim)\n"
        "    clock = LogTime(claimed.timestamp_ms)\n",
        CLAIMS + "test_an_owner_claims_before_it_reads_and_writes_nothing_before",
    ),
    _mutant(
        "8",
        "a lost claim is repeated though the partition moved",
        OWNER,
        "        await asyncio.sleep(pause_s * random.random())\n"
        "        if not await self._still_ours():\n",
        "        await asyncio.sleep(pause_s * random.random())\n        if pause_s < 0:\n",
        CLAIMS + "test_a_lost_claim_of_a_partition_that_moved_is_given_up",
    ),
    _mutant(
        "10",
        "progress is left out of the turn",
        TWIN,
        "by_partition[self._checkpoint] = [encode_progress(turn.progress)]",
        "by_partition.setdefault(self._parked, [Record(b'x/0', None)])",
        "tests/contract/test_door.py::test_a_claim_finds_the_newest_progress[kafka]",
    ),
    _mutant(
        "10",
        "progress does not say how far it is",
        PROMOTER,
        "            op=plan.op,\n",
        "            op=0,\n",
        CLAIMS + "test_every_turn_carries_the_progress",
    ),
    _mutant(
        "10",
        "done without its half below progress",
        LEDGER,
        "            and transaction.offset < progress.half\n",
        "",
        CLAIMS + "test_a_marker_below_progress_whose_half_came_later_is_not_done",
    ),
    _mutant(
        "10",
        "a log that ends before progress is taken",
        RECOVERY,
        "    if progress is not None and (\n",
        "    if progress is not None and False and (\n",
        CLAIMS + "test_a_log_that_ends_before_progress_is_refused",
    ),
    _mutant(
        "10",
        "only progress itself must be there, not what was read",
        RECOVERY,
        "max(position, anchor.offset + 1)",
        "position",
        CLAIMS + "test_a_log_that_ends_before_the_last_record_that_was_read_is_refused",
    ),
    _mutant(
        "10",
        "a recreated log is taken",
        RECOVERY,
        "return record.offset == anchor.offset and record.timestamp_ms != anchor.timestamp_ms",
        "return record.offset < 0",
        CLAIMS + "test_a_recreated_log_that_has_grown_past_progress_is_refused",
    ),
    _mutant(
        "10",
        "a stopped partition is not shown",
        BROKER,
        'self._status[partition] = f"stopped: {error}"',
        'self._status[partition] = "owned"',
        CLAIMS + "test_a_truncated_or_recreated_topic_stops_its_partition_and_no_other",
    ),
    _mutant(
        "10",
        "refused ones are forgotten by a restart",
        LEDGER,
        "elif copy.state is State.REFUSED:",
        "elif copy.state is State.PROMOTED:",
        CLAIMS + "test_refused_ones_and_their_cause_survive_a_restart",
    ),
    _mutant(
        "10",
        "revive does not wake a refused one",
        OWNER,
        "            self._promoter.retry_refused(id)\n",
        "            pass\n",
        CLAIMS + "test_a_revived_refused_one_is_tried_again_and_no_state_changes",
    ),
    _mutant(
        "10",
        "revive makes a refused one pending",
        STATES,
        "Step.REVIVE: State.REFUSED,",
        "Step.REVIVE: State.PENDING,",
        CLAIMS + "test_a_revived_refused_one_is_tried_again_and_no_state_changes",
    ),
    _mutant(
        "11, 12",
        '"below progress" is read as skip',
        RECOVERY,
        "    progress = claimed.progress\n",
        "    progress = claimed.progress\n"
        "    if progress is not None:\n"
        "        op_start, half_start = progress.op, progress.half\n",
        CLAIMS + "test_what_lies_below_progress_has_no_effect_again",
    ),
    _mutant(
        "12",
        "what lies below progress has its effects again",
        RECOVERY,
        "    ledger.reconcile(progress, kept)\n",
        "    ledger.reconcile(None, kept)\n",
        CLAIMS + "test_what_lies_below_progress_has_no_effect_again",
    ),
    _mutant(
        "13",
        "transactional ids are the same for two installations",
        DOOR,
        'f"{self._settings.half_topic}-{self.partition}-{side}"',
        'f"txbroker-{self.partition}-{side}"',
        TURNS + "test_transactional_ids_are_of_the_installation_and_times_are_short",
    ),
    _mutant(
        "13",
        "a transaction is not whole in its turn",
        PROMOTER,
        "promoted.extend(_targets(transaction))",
        "promoted.extend(list(_targets(transaction))[:1])",
        TURNS + "test_a_transaction_is_in_one_turn_whole",
    ),
    _mutant(
        "14",
        "n+1 is written beside n's writes",
        TWIN,
        "        if self._writing:\n",
        "        if not self._producers:\n",
        TURNS + "test_a_turn_is_written_after_the_writes_of_the_one_before",
    ),
    _mutant(
        "14",
        "n+1 is ended before n's commit is acknowledged",
        TWIN,
        "                await outcome(before)\n",
        "                pass\n",
        TURNS + "test_a_turn_ends_after_the_commit_of_the_one_before",
    ),
    _mutant(
        "14",
        "n+1 is ended after n's abort",
        TWIN,
        "                await outcome(before)\n",
        "                await asyncio.wait([before])\n",
        TURNS + "test_a_turn_behind_one_that_failed_is_never_committed",
    ),
    _mutant(
        "14",
        "a writer goes on after a turn that failed",
        TWIN,
        "            self._break(error)\n            await self._abort(producer, error)\n"
        "            raise\n        except",
        "            await self._abort(producer, error)\n            raise\n        except",
        TURNS + "test_a_turn_behind_one_that_is_aborted_is_never_committed",
    ),
    _mutant(
        "15",
        "ghost guard off: an EndTxn without an answer is sent again",
        "txbroker/kafka/producer.py",
        "            except Unanswered:\n                raise\n",
        "            except Unanswered:\n                return\n",
        "tests/kafka/test_unanswered.py::"
        "test_an_unanswered_commit_is_lost_and_its_ghost_ends_no_later_turn",
    ),
    _mutant(
        "16",
        "a fenced owner claims without asking whether it is still its",
        OWNER,
        "                if not await self._still_ours():\n                    raise Fenced",
        "                if pause_s < 0:\n                    raise Fenced",
        CLAIMS + "test_a_fenced_owner_whose_partition_moved_drops_it",
    ),
    _mutant(
        "16",
        "an owner in doubt goes on without a claim",
        PROMOTER,
        "        await self._reclaim()\n",
        "",
        CLAIMS + "test_an_owner_in_doubt_claims_again_and_goes_on",
    ),
    _mutant(
        "16",
        "what a lost turn did is not looked up",
        OWNER,
        "done = self.ledger.reconcile(claimed.progress, kept)",
        "done = self.ledger.reconcile(None, kept)",
        CLAIMS + "test_a_turn_of_unknown_outcome_is_promoted_exactly_once",
    ),
    _mutant(
        "17",
        "targets are found out by trying",
        PROMOTER,
        "return verdict(message, facts)",
        "return None if facts else verdict(message, facts)",
        TURNS + "test_targets_are_examined_before_a_turn_begins",
    ),
    _mutant(
        "17",
        "the size of a message is not examined",
        TARGETS,
        "if size > facts.message_bytes_max:",
        "if size < 0:",
        TURNS + "test_targets_are_examined_before_a_turn_begins",
    ),
    _mutant(
        "17",
        "a deferred one holds back nothing",
        PLAN,
        "            _block(transaction, cause, blocked)\n",
        "",
        TURNS + "test_without_a_leader_it_is_deferred_with_all_that_must_stay_behind_it",
    ),
    _mutant(
        "17",
        "deferred ids are left out of progress",
        PROMOTER,
        "deferred=tuple(plan.deferred),",
        "deferred=(),",
        TURNS + "test_deferred_ones_below_progress_are_promoted_by_the_next_owner_once",
    ),
    _mutant(
        "17",
        "the list of deferred ones has no end",
        PLAN,
        "if len(plan.deferred) >= limits.deferred_max:",
        "if len(plan.deferred) < 0:",
        TURNS + "test_a_full_list_stops_promotion_and_prepares_are_overloaded",
    ),
    _mutant(
        "17",
        "prepares go on while the list is full",
        OWNER,
        "        if self._promoter.full:\n",
        "        if self._promoter is None:\n",
        TURNS + "test_a_full_list_stops_promotion_and_prepares_are_overloaded",
    ),
    _mutant(
        "17",
        "not in the order of the decisions",
        PLAN,
        "key=lambda t: t.op_offset,",
        "key=lambda t: -t.op_offset,",
        TURNS + "test_without_a_leader_it_is_deferred_with_all_that_must_stay_behind_it",
    ),
    _mutant(
        "10, 17",
        "progress goes back",
        PLAN,
        "max(left[0].op_offset, progressed)",
        "left[0].op_offset",
        "tests/core/test_promotion.py::"
        "test_progress_does_not_go_back_when_deferred_ones_come_in_pieces",
    ),
    _mutant(
        "18",
        "a spoiled turn is repeated as it is",
        PROMOTER,
        "self._suspects_limit = max(1, len(transactions) // 2)",
        "self._suspects_limit = len(transactions)",
        TURNS + "test_a_poison_message_is_isolated_and_alone_refused",
    ),
    _mutant(
        "18",
        "the first of a spoiled turn is blamed",
        PROMOTER,
        "elif len(transactions) == 1:",
        "elif len(transactions) > 0:",
        TURNS + "test_a_poison_message_is_isolated_and_alone_refused",
    ),
    _mutant(
        "18",
        "refused ones are not isolated",
        PROMOTER,
        "return id in self._ledger.ready or (id in self._ledger.refused and id not in self._tried)",
        "return id in self._ledger.ready",
        TURNS + "test_one_poison_among_refused_ones_does_not_hold_back_the_others",
    ),
    _mutant(
        "18",
        "a refused batch is refused whole",
        APPENDER,
        "            for entry in entries:\n                await self._send([entry])\n",
        '            for entry in entries:\n                _fail(entry, TooLarge("all"))\n',
        TURNS + "test_a_refused_batch_is_split_per_transaction",
    ),
    _mutant(
        "18",
        "batches are not closed by the topic's limit",
        APPENDER,
        "if size + BATCH_OVERHEAD_BYTES > self._log.batch_bytes_max:",
        "if size < 0:",
        TURNS + "test_what_fits_no_batch_is_refused_before_it_is_sent",
    ),
    _mutant(
        "19",
        "promoted is said when the commit is acknowledged",
        PROMOTER,
        "        await self._visible(handle)\n",
        "",
        TURNS + "test_promoted_is_said_when_consumers_can_see_it",
    ),
    _mutant(
        "19",
        'wait="promoted" does not wait',
        OWNER,
        "if request.wait and transaction.state is State.COMMITTED:",
        "if request.wait and transaction.state is State.PENDING:",
        TURNS + "test_promoted_is_said_when_consumers_can_see_it",
    ),
    _mutant(
        "20",
        "promoted with the time of the prepare",
        PROMOTER,
        "transaction.decided_at_ms if stamp is None else stamp,",
        "transaction.prepared_at_ms if stamp is None else stamp,",
        TURNS + "test_promoted_records_carry_the_users_timestamp_or_the_markers",
    ),
    _mutant(
        "20",
        "the time of the decision is lost with the marker",
        RECOVERY,
        "        facts.decided_ms,\n",
        "",
        TURNS + "test_the_time_of_the_decision_outlives_half_message_and_marker",
    ),
    _mutant(
        "20",
        "any timestamp is taken",
        TARGETS,
        "if ahead_ms > TIMESTAMP_AHEAD_MAX_MS:",
        "if ahead_ms < -TIMESTAMP_AHEAD_MAX_MS * 1000:",
        TURNS + "test_a_timestamp_over_an_hour_ahead_is_refused",
    ),
    _mutant(
        "21",
        "called though the marker was not accepted",
        CHECKBACK,
        "        if outcome.effect is not Effect.APPLIED:\n            log.info(",
        "        if outcome.effect is Effect.VOID:\n            log.info(",
        CHECKS + "test_an_attempt_that_another_owner_made_first_is_not_asked",
    ),
    _mutant(
        "21",
        "called though it was decided in the same batch",
        CHECKBACK,
        "        if not self.still_pending(id) or (transaction.round,",
        "        if (transaction.round,",
        CHECKS + "test_an_attempt_that_is_decided_in_its_own_batch_is_not_asked",
    ),
    _mutant(
        "21",
        "the runner calls behind a decision",
        "checkers/runner.py",
        "if call is None or not item.wanted:",
        "if call is None:",
        "tests/checkers/test_runner.py::test_no_call_behind_a_decision",
    ),
    _mutant(
        "21",
        "something is awaited between the test and the question",
        "checkers/runner.py",
        "            asked_s = asyncio.get_running_loop().time()\n",
        "            await asyncio.sleep(0)\n"
        "            asked_s = asyncio.get_running_loop().time()\n",
        "tests/checkers/test_runner.py::test_nothing_is_awaited_between_the_test_and_the_question",
    ),
    _mutant(
        "21",
        "numbers are used again after a give-back",
        CHECKBACK,
        "turn, number = transaction.round, transaction.number + 1",
        "turn, number = transaction.round, len(transaction.counted_ms) + 1",
        CHECKS + "test_who_was_not_reached_does_not_count_and_the_number_is_not_used_again",
    ),
    _mutant(
        "9, 21",
        "an attempt before its time is accepted",
        LIFE,
        "elif at_ms < self.next_check_ms():",
        "elif at_ms < 0:",
        "tests/core/test_scenarios.py::test_scenario",
    ),
    _mutant(
        "22",
        "`returned` on a timeout",
        CHECKBACK,
        "if isinstance(result, Unreached):",
        "if not isinstance(result, Answered):",
        CHECKS + "test_what_is_unclear_counts",
    ),
    _mutant(
        "22",
        "a returned attempt counts",
        LIFE,
        "        self.counted_ms.pop()\n",
        "",
        CHECKS + "test_who_was_not_reached_does_not_count_and_the_number_is_not_used_again",
    ),
    _mutant(
        "22",
        "attempts without end",
        LIFE,
        "if made >= allowed:",
        "if made < 0:",
        "tests/core/test_scenarios.py::test_scenario",
    ),
    _mutant(
        "22",
        "parked while the last attempt may still be answered",
        LIFE,
        "return self.counted_ms[-1] + round(self.half.policy.timeout_s * 1000)",
        "return self.counted_ms[-1]",
        "tests/core/test_scenarios.py::test_scenario",
    ),
    _mutant(
        "22",
        "an answer of an old round is taken",
        CHECKBACK,
        "if transaction.state is not State.PENDING or transaction.round != call.round:",
        "if transaction.state is not State.PENDING:",
        CHECKS + "test_a_revived_one_gets_a_new_round_and_answers_of_the_old_are_ignored",
    ),
    _mutant(
        "22",
        "503 counts as an attempt",
        "checkers/answers.py",
        "frozenset({429, 502, 503})",
        "frozenset({429, 502})",
        "tests/checkers/test_http.py::test_not_handled_by_contract",
    ),
    _mutant(
        "23",
        "asked for without a second between",
        LIFE,
        "if at_ms < self.last_check_ms + ASK_SPACING_MS:",
        "if at_ms < self.last_check_ms:",
        CHECKS + "test_asked_for_it_comes_at_once_counts_and_keeps_a_second",
    ),
    _mutant(
        "23",
        "the last attempt is pulled forward",
        LIFE,
        "if made + 1 >= allowed:",
        "if made >= allowed + 1:",
        CHECKS + "test_the_last_attempt_of_a_round_is_never_pulled_forward",
    ),
    _mutant(
        "23",
        "a deliberate not yet is not kept to",
        LIFE,
        "self.not_before_ms = at_ms + round(delay_s * 1000)",
        "self.not_before_ms = at_ms",
        CHECKS + "test_not_yet_costs_nothing_and_is_kept_to",
    ),
    _mutant(
        "23",
        "a deliberate not yet without end",
        LIFE,
        "min(max(marker.later_s, 1.0), LATER_MAX_S)",
        "marker.later_s",
        CHECKS + "test_not_yet_costs_nothing_and_is_kept_to",
    ),
    _mutant(
        "24",
        "the check writes no row",
        "txbroker/sdk/barrier.py",
        "                    connection.cursor().execute(insert, (transaction_id, _ROLLBACK))\n",
        "",
        "tests/sdk/test_sdk_barrier.py::test_checked_before_the_local_transaction",
    ),
    _mutant(
        "24",
        "the check function is asked about a running block",
        "txbroker/sdk/local.py",
        "        self._open[transaction_id] = self._not_yet\n",
        "        self._open.pop(transaction_id, None)\n",
        "tests/sdk/test_sdk_checks.py::test_a_running_block_is_not_yet_without_asking",
    ),
    _mutant(
        "25",
        "bodies are not copied before retention",
        OWNER,
        "self._settings.half_retention_ms // 2",
        "self._settings.half_retention_ms",
        TURNS + "test_at_half_of_retention_a_pending_body_is_copied_and_stays_pending",
    ),
    _mutant(
        "25",
        "copies are not taken back",
        RECOVERY,
        "if copy.half_offset < half_start:",
        "if copy.half_offset < 0:",
        TURNS + "test_a_pending_one_outlives_its_half_message",
    ),
    _mutant(
        "25",
        "the copy of a rolled back one is left",
        LEDGER,
        "            if transaction.kept:\n"
        "                self.to_release[transaction.id] = transaction\n"
        "            self._settle(transaction)\n",
        "            self._settle(transaction)\n",
        TURNS + "test_a_copy_is_removed_when_its_transaction_is_rolled_back",
    ),
    _mutant(
        "25",
        "a copy of a lost turn is taken for written",
        LEDGER,
        "            transaction.kept = copy is not None\n",
        "            transaction.kept = transaction.kept or copy is not None\n",
        TURNS + "test_a_copy_of_a_lost_turn_is_written_again",
    ),
    _mutant(
        "26",
        "partitions are not sticky",
        "txbroker/kafka/member.py",
        "kept = sorted(owned[name] & free)[: quotas[name]]",
        "kept = sorted(free)[: quotas[name]]",
        "tests/kafka/test_member.py::test_shares_are_whole_even_and_sticky",
    ),
    _mutant(
        "26",
        "calls wait for an owner that has closed",
        APPENDER,
        "            self._ended = True\n",
        "            pass\n",
        CLAIMS + "test_a_call_to_an_owner_that_has_closed_fails_at_once",
    ),
    _mutant(
        "27",
        "a newer record is passed over",
        APPLIER,
        "elif outcome.effect is Effect.NEWER:",
        "elif outcome.effect is None:",
        CLAIMS + "test_a_newer_marker_stops_the_partition_and_no_other",
    ),
    _mutant(
        "27",
        "a newer record that a look-up meets is passed over",
        OWNER,
        "                self._stopped(error)\n                raise OwnerUnavailable",
        "                raise OwnerUnavailable",
        CLAIMS + "test_a_newer_half_message_stops_the_partition_whoever_reads_it",
    ),
    _mutant(
        "section 6",
        "append times are not verified",
        "txbroker/kafka/reader.py",
        "if self._append_time and batch.timestamp_type != _LOG_APPEND_TIME:",
        "if batch.timestamp_type == 2:",
        CLAIMS + "test_a_record_without_the_brokers_append_time_stops_the_partition",
    ),
    _mutant(
        "section 6",
        "the user's headers come first",
        "txbroker/core/codec.py",
        "return ours + message.headers",
        "return message.headers + ours",
        "tests/core/test_codec.py::test_promoted_headers_start_with_ours",
    ),
    _mutant(
        "section 8",
        "read_uncommitted reader",
        "txbroker/kafka/reader.py",
        "            elif not (batch.is_transactional and batch.producer_id in self._hidden):\n",
        "            else:\n",
        "tests/contract/test_door.py::test_a_refused_record_leaves_nothing_of_its_turn[kafka]",
    ),
)


def copy_of_the_tree(to: Path) -> None:
    """Copy what tests need."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".*_cache")
    for name in COPIED:
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, to / name)


def run(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests in a copy and return pytest's exit code and what it said."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--timeout", str(TEST_TIMEOUT_S), *tests]
    # Without bytecode: a changed file of the same size and second would be taken for the old.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def mutated(mutant: Mutant, source: str) -> str:
    """Return the source with the rule taken out.

    Raises:
        ValueError: a text is not there exactly once.
    """
    for text, replacement in mutant.edits:
        if source.count(text) != 1:
            raise ValueError(f"{mutant.file} holds {source.count(text)} times: {text!r}")
        source = source.replace(text, replacement)
    return source


def survives(tree: Path, mutant: Mutant) -> str:
    """Try one mutant; return why it was not caught, "" if it was."""
    path = tree / mutant.file
    source = path.read_text()
    path.write_text(mutated(mutant, source))
    try:
        code, said = run(tree, [mutant.test])
    finally:
        path.write_text(source)
    if code == FAILED:
        return ""
    return "its test passes" if code == PASSED else f"pytest ended with {code}:\n{said[-2000:]}"


def main() -> int:
    """Try the chosen mutants; return 1 if one is not caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants that hold one of these words")
    parser.add_argument("--without-kafka", action="store_true")
    given = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not (given.without_kafka and mutant.real_kafka)
        if not given.words or any(word in " ".join(map(str, mutant)) for word in given.words)
    ]
    left = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_of_the_tree(tree)
        code, said = run(tree, sorted({mutant.test for mutant in chosen}))
        if code != PASSED:
            print(f"without any mutant:\n{said[-4000:]}")
            return 1
        for mutant in chosen:
            why = survives(tree, mutant)
            left += bool(why)
            print(f"{'SURVIVES' if why else 'caught  '} {mutant.rule}: {mutant.what}", flush=True)
            if why:
                print(f"    {mutant.file}, {mutant.test}: {why}")
    print(f"{len(chosen) - left} of {len(chosen)} caught")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
