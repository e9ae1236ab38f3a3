"""Writes the reference page of the command line from its commands.

`python -m txbroker.cli.reference > docs/reference/cli.md`
"""

import inspect
from collections.abc import Iterator

import click

from txbroker.cli.main import cli

_HEAD = """\
<!-- Written by `python -m txbroker.cli.reference`; edit the code instead. -->
# Command line

Data goes to stdout, everything else to stderr. Commands that change data first show the change and
ask for confirmation; `--yes` skips the question. Options with `[env: NAME]` are also read from this
environment variable. Options of `proxy`, `dev` and `topics` are [settings](settings.md), and so
keys of the config file. `ls` is an alias of each `list`.

`--help` of a command explains the usual options and names the others; `--help-all` explains all.

| exit code | meaning |
| --- | --- |
| 0 | success |
| 1 | failure; stderr has the reason in a sentence. `txbroker --debug …` shows the traceback |
| 2 | wrong usage |
| 3 | partial success: some of several objects |
| 4 | an audit found drift |
| 130 | Ctrl-C |
"""


def commands(
    command: click.Command = cli, context: click.Context | None = None
) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield this command and all its subcommands."""
    if context is None:
        context = click.Context(command, info_name="txbroker", **command.context_settings)
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            below = click.Context(subcommand, parent=context, info_name=name)
            yield from commands(subcommand, below)


def page() -> str:
    parts = [_HEAD]
    for command, context in commands():
        if command is not cli:
            parts.append("\n".join(_section(command, context)) + "\n")
    return "\n".join(parts)


def _section(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"{'#' * len(context.command_path.split())} `{context.command_path}`"
    yield ""
    yield "\n\n".join(_paragraphs(command.help or ""))
    if isinstance(command, click.Group) and not command.invoke_without_command:
        return
    pieces = " ".join(command.collect_usage_pieces(context))
    yield ""
    yield f"```\n{context.command_path} {pieces}\n```"
    options = [param for param in command.params if isinstance(param, click.Option)]
    if options:
        yield ""
        yield "| option | effect |"
        yield "| --- | --- |"
    for option in options:
        record = option.get_help_record(context)
        if record is not None:
            names, text = (_cell(part) for part in record)
            yield f"| `{names}` | {text} |"


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs, each on one line except those that click does not rewrap."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield f"```text\n{paragraph[2:]}\n```"
        else:
            yield paragraph.replace("\n", " ")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    click.echo(page(), nl=False)
