"""The `txbroker` command, whose subcommands are imported only when they are called."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from txbroker import __version__
from txbroker.cli.options import SectionedCommand
from txbroker.cli.run import run


class Command(NamedTuple):
    """A command: its name, the module below `txbroker.cli` that defines it, a one-line summary."""

    name: str
    module: str
    summary: str


class SuggestingGroup(click.Group):
    """A group that suggests the likely command for a mistyped one; `ls` is its `list`."""

    command_class = SectionedCommand

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name or alias."""
        return super().get_command(ctx, "list" if cmd_name == "ls" else cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command at the head of the arguments."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            known = self.list_commands(ctx)
            likely = self.elsewhere(ctx, name) or near(name, known)
            hint = f"There are {', '.join(known)}."
            if likely:
                hint = f"Did you mean {' or '.join(map(repr, likely))}?"
            ctx.fail(f"There is no command {name!r}. {hint}")
        return super().resolve_command(ctx, args)

    def elsewhere(self, ctx: click.Context, name: str) -> list[str]:
        """Return the commands with this name in subgroups."""
        return []


def near(name: str, known: Sequence[str]) -> list[str]:
    """Return the known name most similar to a mistyped one, if any is similar."""
    return difflib.get_close_matches(name, known, 1, cutoff=0.5)


class LazyGroup(SuggestingGroup):
    """The top level: commands by name, imported when they are called."""

    def __init__(self, name: str, commands: Sequence[Command], **options: Any) -> None:
        super().__init__(
            name,
            params=[
                click.Option(
                    ["--debug"],
                    is_flag=True,
                    envvar="TXBROKER_DEBUG",
                    help="Show the traceback of an unexpected error. [env: TXBROKER_DEBUG]",
                )
            ],
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
            **options,
        )
        click.version_option(__version__, prog_name="txbroker")(self)
        self._lazy = {command.name: command for command in commands}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        command = self._lazy.get(cmd_name)
        if command is None:
            return None
        imported = importlib.import_module(f"txbroker.cli.{command.module}").command
        assert isinstance(imported, click.Command)
        return imported

    def elsewhere(self, ctx: click.Context, name: str) -> list[str]:
        """Return the commands with this name in subgroups."""
        found = []
        for group_name in self._lazy:
            with suppress(ImportError):  # its extra is not installed
                group = self.get_command(ctx, group_name)
                if isinstance(group, click.Group) and group.get_command(ctx, name) is not None:
                    found.append(f"{group_name} {name}")
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return matching options, and matching commands without importing them."""
        commands = [
            CompletionItem(command.name, help=command.summary)
            for command in self._lazy.values()
            if command.name.startswith(incomplete)
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(command.name, command.summary) for command in self._lazy.values()])


COMMANDS = (
    Command("demo", "demo.command", "Watch an order service and Kafka agree despite kills."),
    Command("dev", "proxy.dev", "Run a proxy with an embedded Kafka, for development."),
    Command("proxy", "proxy.command", "Run a proxy on your Kafka."),
    Command("topics", "ops.topics", "Plan and create txbroker's own topics."),
    Command("repair", "ops.repair", "Find records that stop half partitions, and skip them."),
    Command("tx", "tx.command", "Show transactions and resolve them."),
    Command("groups", "ops.groups", "Show producer groups and register them."),
    Command(
        "consumers", "ops.consumers", "Show groups of consumers; release keys, retry messages."
    ),
    Command("principals", "ops.principals", "Manage who may call a proxy, and for which groups."),
    Command("top", "ops.top", "Show the state of all proxies, refreshed."),
    Command(
        "databases", "ops.databases", "Create and migrate txbroker's tables in your databases."
    ),
    Command("capture", "relay.capture", "Capture changes of rows in databases as messages."),
    Command("outbox", "relay.outbox", "Create outbox tables, deliver their rows, resolve them."),
    Command("doctor", "doctor.command", "Diagnose an installation; name a remedy per problem."),
    Command("context", "contexts", "Name installations, and choose the one to call."),
    Command("completion", "completion", "Print a script for shell completion, with live values."),
    Command("consume", "ops.consume", "Show the messages of a topic as they become visible."),
    Command("send", "tx.send", "Send a whole transaction from the command line."),
    Command("bench", "bench.command", "Measure throughput and latency, and detect lost messages."),
    Command("audit", "audit.command", "Prove from Kafka's topics that all ended as decided."),
)

cli = LazyGroup(
    "txbroker",
    COMMANDS,
    help="Transactional messages for Apache Kafka.\n\n"
    "Data goes to stdout, everything else to stderr. Exit codes: 0 success, 1 failure, 2 wrong "
    "usage, 3 partial success, 4 an audit found drift. Options with `[env: NAME]` in their help "
    "are also read from this environment variable.",
)


def main() -> None:
    sys.exit(run(cli, sys.argv[1:]))
