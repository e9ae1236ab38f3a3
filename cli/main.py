"""The `txbroker` command and the list of its subcommands."""

import sys

from txbroker.cli.lazy import Command, LazyGroup
from txbroker.cli.run import run

COMMANDS = (
    Command(
        "demo",
        "demo.command",
        "Watch an order service and Kafka agree despite kills.",
    ),
    Command("dev", "proxy.dev", "Run a proxy with an embedded Kafka, for development."),
    Command("proxy", "proxy.command", "Run a proxy on your Kafka."),
    Command("topics", "ops.topics", "Plan and create txbroker's own topics."),
    Command("repair", "ops.repair", "Find records that stop half partitions, and skip them."),
    Command("tx", "tx.command", "Show transactions and resolve them."),
    Command("groups", "ops.groups", "Show producer groups and register them."),
    Command("principals", "ops.principals", "Manage who may call a proxy, and for which groups."),
    Command("top", "ops.top", "Show the state of all proxies, refreshed."),
    Command("doctor", "doctor.command", "Diagnose an installation; name a remedy per problem."),
    Command("context", "context", "Name installations, and choose the one to call."),
    Command("completion", "completion", "Print a script for shell completion, with live values."),
    Command("send", "tx.send", "Send a whole transaction from the command line."),
    Command("bench", "bench.command", "Measure throughput and latency, and detect lost messages."),
    Command("audit", "audit.command", "Prove from Kafka's topics that all ended as decided."),
)

cli = LazyGroup(
    "txbroker",
    COMMANDS,
    help="Transactional messages for Apache Kafka.\n\n"
    "Data goes to stdout, everything else to stderr. Exit codes: 0 success, 1 failure, 2 wrong "
    "usage, 3 partial success, 4 an audit found drift. Every option is also an environment "
    "variable, TXBROKER_ and its name.",
)


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(cli, sys.argv[1:]))
