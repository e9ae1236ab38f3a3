"""Every line that a proxy logs: the events, their fields, what they mean and what to do.

A test holds the log calls against this table. `python -m txbroker.proxy.observe.log_events >
docs/reference/logs.md` writes the page.
"""

import sys
from typing import NamedTuple

from txbroker.proxy.observe.line_bounds import LINES_MAX, WINDOW_S


class LogEvent(NamedTuple):
    """One event.

    Attributes:
        level: the one that it is logged with.
        fields: every field that a line of it can have.
        what: what has happened.
        do: what to do about it, "" for nothing.
    """

    name: str
    level: str
    fields: str
    what: str
    do: str = ""


_BUG = "A fault of txbroker: please report the line. Everything else goes on."
_KAFKA = "See what Kafka's brokers say. It is tried again by itself."
_PASSES = "Nothing, while it passes; it is tried again by itself."

SECTIONS: dict[str, tuple[LogEvent, ...]] = {
    "The proxy": (
        LogEvent(
            "starting",
            "info",
            "version instance kafka topic_prefix listen",
            "The process has begun, and turns to Kafka.",
        ),
        LogEvent(
            "waiting for kafka",
            "warning",
            "kafka seconds why",
            "Kafka does not answer. The proxy tries again for `seconds` (`wait_for_kafka_s`) and "
            "exits then.",
            "Start Kafka, or correct `kafka` where `why` shows that it is not there.",
        ),
        LogEvent("kafka answers", "info", "seconds", "It was waited for, so long."),
        LogEvent(
            "listening", "info", "url advertise", "Calls are heard; `advertise` is told others."
        ),
        LogEvent("ready", "info", "owned", "Calls are taken: all that is its own is caught up."),
        LogEvent(
            "not ready",
            "warning",
            "problems count",
            "`/readyz` says no; the first problems are named.",
            "Normal for seconds after another proxy came or went. Else see the problems.",
        ),
        LogEvent(
            "replaced",
            "error",
            "instance by host",
            "Another process has joined with this proxy's instance id: the one at URL `by`, which "
            "connects to Kafka from `host`. This proxy takes no calls until that one has gone.",
            "Stop one of them, or give it another `instance`.",
        ),
        LogEvent(
            "worker ended",
            "error",
            "worker how seconds",
            "One of the proxies of `--workers` has ended by itself. It is started again after so "
            "many seconds.",
            "See its lines before this one; after `SIGKILL`, the kernel's: memory may be short.",
        ),
        LogEvent(
            "worker hangs",
            "error",
            "worker seconds",
            "The event loop of one of the proxies of `--workers` has hung for so many seconds. It "
            "is killed, and started again.",
            "The stacks of its threads follow on stderr: please report them. Where none do, the "
            "process was stopped (SIGSTOP), or waited for a disk.",
        ),
        LogEvent(
            "worker killed",
            "error",
            "worker seconds",
            "It was asked to stop, and had not ended after so many seconds.",
            _BUG,
        ),
        LogEvent("stopping", "info", "", "A signal came: everything is handed over."),
        LogEvent("stopped", "info", "", "The last line."),
        LogEvent(
            "calls given up",
            "warning",
            "calls",
            "Calls that were under way at the stop did not end in time. Their clients ask again.",
        ),
        LogEvent("file read again", "info", "setting path", "A file of secrets or principals."),
        LogEvent(
            "file not read",
            "warning",
            "setting path why",
            "The file changed and cannot be used; its last content stays in force.",
            "Correct the file. A start would fail.",
        ),
        LogEvent(
            "setting renamed",
            "warning",
            "setting by value",
            "A setting is given under its old name, which the next release refuses. `value` is "
            "what it stands for under the new one, `by`, if that is not given too.",
            "Set `by` instead.",
        ),
        LogEvent(
            "secret file open to others",
            "warning",
            "setting path",
            "Other users of this machine can read or change a file with a secret for Kafka. It is "
            "taken all the same.",
            "`chmod 600` the file; in Kubernetes mount it with `defaultMode: 0440` and an "
            "`fsGroup`.",
        ),
        LogEvent(
            "one token for all",
            "info",
            "role groups",
            "The callers share the token of `token_file`: none can be told from another.",
            "Give each its own credential with `principals_file`.",
        ),
        LogEvent(
            "no peer identity",
            "error",
            "others",
            "Another proxy has joined, and this one cannot prove to be one of the installation.",
            "Set `peer_secret_file` or `peer_names` on every proxy, then restart this one.",
        ),
        LogEvent("tls files read again", "info", "files", "They have changed."),
        LogEvent(
            "tls files not taken",
            "warning",
            "files why",
            "Certificate or key files changed and are not taken: `why` says what is wrong; the "
            "last ones still hold.",
            "Correct the files. A start would fail.",
        ),
        LogEvent(
            "lines left out",
            "warning",
            "of count seconds",
            "So many lines of one event, or of one library's logger, were left out.",
            "See what the lines before it, metrics and `txbroker tx list` say.",
        ),
    ),
    "Half partitions": (
        LogEvent(
            "owned",
            "info",
            "partition undecided seconds",
            "The partition is this proxy's and caught up, after so many seconds.",
        ),
        LogEvent(
            "handed over",
            "info",
            "partition",
            "Nothing more is done with it: it is another proxy's now, or this one stops.",
        ),
        LogEvent(
            "taken over by another proxy",
            "warning",
            "partition",
            "Another proxy has claimed it while this one still worked: that one is right.",
            "Nothing, once. Often: see why touch with the group is lost.",
        ),
        LogEvent(
            "out of the group",
            "warning",
            "instance why",
            "Kafka's group coordinator has not answered in time, or put this proxy out.",
            "If the instance name is taken: two proxies run with the same `instance`.",
        ),
        LogEvent(
            "out of touch with the group",
            "warning",
            "why",
            "Nobody knows whose the partitions are: nothing is written until that is known.",
            _KAFKA,
        ),
        LogEvent("membership failed", "error", "error where", "It is begun anew.", _BUG),
        LogEvent(
            "not known whose", "warning", "partition why", "The group cannot be asked.", _KAFKA
        ),
        LogEvent("partition not opened", "warning", "partition why", "Its claim failed.", _KAFKA),
        LogEvent("claim failed", "warning", "partition why", "After a lost turn.", _KAFKA),
        LogEvent(
            "claimed again",
            "info",
            "partition committed_meanwhile",
            "A lost turn's outcome is known; so many of its transactions are visible.",
        ),
        LogEvent(
            "partition begins anew",
            "warning",
            "partition why",
            "It could not go on, and is opened again by this proxy.",
            _KAFKA,
        ),
        LogEvent(
            "partition stopped",
            "error",
            "partition error where",
            "Something that must hold does not: it stands still, the others go on.",
            "See [the runbook](../runbooks/TxBrokerNotReady.md).",
        ),
        LogEvent(
            "stopped partition begins again",
            "info",
            "partition",
            "Something was written to its checkpoint topic since it stopped, as by "
            "`txbroker repair skip`.",
        ),
        LogEvent(
            "partition not closed cleanly",
            "error",
            "error where",
            "It is closed all the same.",
            _BUG,
        ),
        LogEvent(
            "stuck, leaving the group",
            "error",
            "seconds",
            "A claim or a turn has not come through for so long: another proxy may fare better.",
            "See whether this machine reaches all brokers.",
        ),
        LogEvent("not joined again", "error", "error where", "It is tried again.", _KAFKA),
        LogEvent(
            "topics changed",
            "error",
            "problems",
            "txbroker's own topics are not as they must be.",
            "`txbroker doctor` and `txbroker topics plan` say what to change.",
        ),
        LogEvent("topics well", "info", "", "They are as they must be again."),
        LogEvent(
            "batch of another client set aside",
            "warning",
            "topic partition offset reason",
            "A batch in one of txbroker's own topics does not decode. Logged once per topic.",
            "Take the client's rights away: see [repair](../operate/repair.md).",
        ),
        LogEvent("topics not looked at", "warning", "why", "Kafka did not answer.", _PASSES),
        LogEvent("log not read", "warning", "partition why", "Kafka did not answer.", _KAFKA),
        LogEvent(
            "snapshot written", "debug", "partition entries seconds", "Recovery begins there."
        ),
        LogEvent(
            "snapshot not written",
            "warning",
            "partition why",
            "The last one stands; a takeover reads more.",
            _KAFKA,
        ),
        LogEvent(
            "record set aside",
            "warning",
            "topic partition offset why",
            "Another client wrote it into one of txbroker's own topics. It stops nothing.",
            "Find the client and take its rights away: docs/operate/repair.md.",
        ),
        LogEvent("old snapshot not removed", "info", "partition why", "The next one does it."),
        LogEvent(
            "proxy does not answer",
            "warning",
            "url why",
            "Another proxy of this group.",
            "See that proxy, and its `advertise`.",
        ),
        LogEvent("proxy answers again", "info", "url", "It does."),
    ),
    "Transactions": (
        LogEvent(
            "parked",
            "warning",
            "id group",
            "Undecided after the last attempt: kept whole, to be decided by hand.",
            "See [resolving transactions](../how-to/resolve-transactions.md).",
        ),
        LogEvent("park failed", "warning", "id why", "It is tried again.", _KAFKA),
        LogEvent(
            "refused",
            "warning",
            "id cause why",
            "Committed, but a target does not take it: kept whole.",
            "Mend the target, then `txbroker tx revive`.",
        ),
        LogEvent(
            "turn refused",
            "warning",
            "partition why",
            "A broker refused a record of it.",
            "The transaction to blame is found and refused by itself.",
        ),
        LogEvent(
            "turn lost",
            "warning",
            "partition why",
            "The outcome of a Kafka transaction is unknown until the next claim.",
            _KAFKA,
        ),
        LogEvent("target unknown", "warning", "partition why", "Kafka was asked in vain.", _KAFKA),
        LogEvent(
            "target kept off",
            "warning",
            "partition why",
            "It is not known, or not so, that earlier turns have ended in a target partition.",
            "Where a turn was never ended there: docs/runbooks/TxBrokerPromotionStalled.md. Else "
            "nothing, while it passes; it is tried again by itself.",
        ),
        LogEvent(
            "messages not read", "warning", "partition why", "They were not in memory.", _KAFKA
        ),
        LogEvent(
            "committed, not visible",
            "error",
            "partition why",
            "Whether readers see a turn cannot be found out.",
            _KAFKA,
        ),
        LogEvent(
            "half retention near, bodies copied",
            "warning",
            "partition count",
            "So many transactions were undecided for half of half's retention.",
            "Nothing is at risk. Decide them, or see why nobody answers their checks.",
        ),
        LogEvent(
            "half message deleted, body copied",
            "error",
            "id",
            "Somebody deleted records of the half topic; this one was in memory still.",
            "See who deletes records, or changed the topic's retention.",
        ),
        LogEvent(
            "bodies lost",
            "error",
            "partition count ids why",
            "Messages are gone before their transactions were settled.",
            "See [the runbook](../runbooks/TxBrokerUndecidedLost.md).",
        ),
        LogEvent(
            "not checked, messages gone",
            "error",
            "id group",
            "Nobody is asked about what nobody can see.",
            "Decide it by hand: `txbroker tx show` and `commit` or `rollback`.",
        ),
    ),
    "Check-backs": (
        LogEvent("group registered", "info", "group by", "By a call to this proxy."),
        LogEvent("group removed", "info", "group by", "Likewise."),
        LogEvent(
            "group not usable",
            "warning",
            "group why",
            "What is registered of it does not read.",
            "Register it again: `txbroker groups register`.",
        ),
        LogEvent(
            "groups not read",
            "error",
            "topic error where",
            "What changes of groups is not heard of; it is tried again and again.",
            _BUG,
        ),
        LogEvent(
            "group unreachable",
            "warning",
            "group why",
            "Nobody of it can be asked; no attempts are used up.",
            "See [the runbook](../runbooks/TxBrokerGroupUnreachable.md).",
        ),
        LogEvent("group reachable again", "info", "group", "It is asked at once."),
        LogEvent(
            "check not made", "warning", "id group why", "Its marker was not written.", _KAFKA
        ),
        LogEvent(
            "check failed in the proxy",
            "error",
            "id group error where",
            "The attempt counts.",
            _BUG,
        ),
        LogEvent("check asked for", "debug", "id by reason", "Somebody pulled an attempt forward."),
        LogEvent("attempt not accepted", "debug", "id why", "Another marker was first."),
        LogEvent("answer not taken", "debug", "id endpoint why", "A decision was first."),
    ),
    "Clients": (
        LogEvent(
            "session cut off",
            "warning",
            "group instance why",
            "An SDK's session did not read, or held too much. It opens another one.",
            "See that process, if it is often the same.",
        ),
        LogEvent("connection dropped", "warning", "peer why", "Likewise, of HTTP."),
        LogEvent("call failed", "error", "method path error where", "Answered with 500.", _BUG),
        LogEvent("operation failed", "error", "group error where", "Of a session; likewise.", _BUG),
        LogEvent("call of another proxy failed", "error", "call error where", "Likewise.", _BUG),
        LogEvent("page failed", "error", "path error where", "Of the console; likewise.", _BUG),
        LogEvent(
            "console login", "info", "by name remote", "`by` is the principal; `name` is a claim."
        ),
        LogEvent(
            "console login refused",
            "warning",
            "name remote",
            "Without it.",
            "If there are many: somebody tries. See who reaches the console.",
        ),
        LogEvent(
            "console action",
            "info",
            "action done failed untried by reason of",
            "Somebody acted on transactions; the markers say so too.",
        ),
    ),
    "Audits": (
        LogEvent(
            "audit is newer",
            "warning",
            "key why",
            "A newer txbroker wrote it: audit metrics stay as they are.",
            "Upgrade the proxies.",
        ),
        LogEvent(
            "audit record not read",
            "warning",
            "key why",
            "Audit metrics stay as they are.",
            "See who else writes to the audit topic.",
        ),
    ),
}
"""By what they are about, in the order of the page."""

EVENTS: dict[str, LogEvent] = {
    event.name: event for events in SECTIONS.values() for event in events
}

SDK_LINES: tuple[tuple[str, str, str], ...] = (
    ("info", "session with %s opened", "A session with one proxy stands."),
    ("warning", "no session: %s", "No proxy takes a session; it is tried again."),
    (
        "exception",
        "no session with %s",
        "For a reason that nobody expected, which follows; it is tried again. Please report it.",
    ),
    (
        "warning",
        "spans are lost: the tracer provider fails with %s",
        "Said once, by a proxy too. Everything else goes on; see the provider's configuration.",
    ),
    ("info", "%s read again", "Certificate files have changed."),
    ("warning", "%s changed, but the last ones stay: %s", "The new ones do not read: mend them."),
    ("info", "session lost: %s", "It is opened again; calls under way are repeated."),
    ("warning", "%s", "A proxy broke the protocol; the session is opened again."),
    ("exception", "%s; it is opened again", "A fault of the SDK in a session."),
    ("info", "left to the check-back: %s", "Work in the background was not answered."),
    ("exception", "left to the check-back", "A fault of the SDK in the background."),
    (
        "error",
        "the check of %s failed: answered as unknown: %s",
        "The check function raised an exception, or returned something else than an answer.",
    ),
    ("debug", "where the check of %s failed", "The same, with its traceback."),
)
"""Level, text and meaning of what the SDK logs, with Python's `logging`, as `txbroker.sdk`."""

_HEAD = f"""\
<!-- Written by `python -m txbroker.proxy.observe.log_events`; edit the code instead. -->
# Log lines

A proxy writes one line on stderr for each event that matters, and none for a message or for a
transaction whose life is normal: [metrics](metrics.md) count those. `log_format` is `console` for
people, `json` for machines, `auto` (the default) looks whether stderr is a terminal; `log_level` is
the least important level shown.

```json
{{"partition": 3, "undecided": 17, "seconds": 0.412, "event": "owned", "level": "info", …}}
```

- **Bounded.** Of one event at most {LINES_MAX} lines are written within {WINDOW_S:g} s, or one for
  each half partition where there are more; of one library's logger likewise. The others are
  counted, and `lines left out` tells how many there were: a hundred thousand transactions that
  park at once write {LINES_MAX} lines and one.
- **No secrets, no messages.** A field whose name speaks of a secret is `***`. Of errors that nobody
  expected a line has the type and where they were raised, and the text only if txbroker or the
  operating system wrote it; tracebacks, of libraries say, have no values of variables.
- **One line is one line.** Names and reasons come from outside. In JSON they are escaped as JSON
  has it, for people whatever does not print (line ends, terminal sequences, marks that turn the
  writing round) is escaped as Python has it. Lines of a traceback for people begin with `|`.
- With `--workers` each line has the number of its proxy in `worker`.
- Times are UTC. `error` is the type of an exception, `where` the innermost places of its traceback,
  `why` a sentence.

What a transaction went through is not in the log but in its timeline: `txbroker tx show`.
"""

_SDK_HEAD = """
## The SDK
In your own process, with Python's `logging`; loggers `txbroker.sdk`, `txbroker.net.tls`,
`txbroker.tracing`.

| level | text | meaning |
| --- | --- | --- |
"""


def page() -> str:
    """Return the whole page as Markdown."""
    parts = [_HEAD]
    for title, events in SECTIONS.items():
        parts.append(f"\n## {title}\n| event | level | fields | meaning | what to do |\n")
        parts.append("| --- | --- | --- | --- | --- |\n")
        for event in events:
            fields = ", ".join(f"`{field}`" for field in event.fields.split())
            parts.append(
                f"| `{event.name}` | {event.level} | {fields} | {event.what} | {event.do} |\n"
            )
    parts.append(_SDK_HEAD)
    for level, text, meaning in SDK_LINES:
        shown = "error, with a traceback" if level == "exception" else level
        parts.append(f"| {shown} | `{text}` | {meaning} |\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
