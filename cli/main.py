"""The `txbroker` command: which commands there are, and how every one of them ends."""

import sys

from txbroker.cli.lazy import Command, LazyGroup
from txbroker.cli.run import run

COMMANDS = (
    Command("demo", "demo.command", "Watch an order service and Kafka agree, whatever is killed."),
    Command("dev", "proxy.dev", "Run a proxy with a real Kafka of its own, for development."),
    Command("proxy", "proxy.command", "Run a proxy on your Kafka."),
    Command("topics", "ops.topics", "Plan and make txbroker's own topics."),
    Command("repair", "ops.repair", "Find records that stop half partitions, and pass them over."),
    Command("tx", "tx.command", "Look at transactions and resolve them."),
    Command("groups", "ops.groups", "Look at producer groups and register them."),
    Command("principals", "ops.principals", "Say who may call a proxy, and for which groups."),
    Command("top", "ops.top", "Show how all stands, again and again."),
    Command("doctor", "doctor.command", "Find what is not well, and what to do about it."),
    Command("context", "context", "Name several installations, and say which one to call."),
    Command("completion", "completion", "Let your shell complete commands and live values."),
    Command("send", "tx.send", "Send a whole transaction from the command line."),
    Command("bench", "bench.command", "Measure transactions a second, and find loss and doubles."),
    Command("audit", "audit.command", "Check from Kafka's topics that all ended as decided."),
)

cli = LazyGroup(
    "txbroker",
    COMMANDS,
    help="Transactional messages for Apache Kafka.\n\n"
    "Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, "
    "3 partly done, 4 an audit found drift. Every option is also an environment variable, "
    "TXBROKER_ and its name.",
)


def main() -> None:
    """Run the command that the command line names, and end the process."""
    sys.exit(run(cli, sys.argv[1:]))
