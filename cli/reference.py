"""Writes the reference of the command line, from the commands themselves.

`python -m txbroker.cli.reference > docs/reference/cli.md`
"""

import inspect
from collections.abc import Iterator

import click

from txbroker.cli.main import cli

_HEAD = """\
<!-- Written by `python -m txbroker.cli.reference`; edit the code instead. -->
# Command line

Data goes to stdout, everything else to stderr. What changes data shows first what it is about and
asks; `--yes` does it without. Options of a command are also environment variables, `TXBROKER_` and
the name; those of `proxy`, `dev` and `topics` are [settings](settings.md) too, and so keys of the
config file.

| exit code | means |
| --- | --- |
| 0 | done |
| 1 | failed; stderr says why in a sentence. `txbroker --debug …` shows where |
| 2 | wrong usage |
| 3 | partly done: of several, some |
| 4 | an audit found drift |
| 130 | Ctrl-C |
"""


def commands(
    command: click.Command = cli, context: click.Context | None = None
) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield every command below, and including, this one."""
    if context is None:
        context = click.Context(command, info_name="txbroker", **command.context_settings)
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, click.Context(below, parent=context, info_name=name))


def page() -> str:
    """Return the whole page as Markdown."""
    parts = [_HEAD]
    for command, context in commands():
        if command is not cli:
            parts.append("\n".join(_section(command, context)) + "\n")
    return "\n".join(parts)


def _section(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"{'#' * len(context.command_path.split())} `{context.command_path}`"
    yield ""
    yield "\n\n".join(_paragraphs(command.help or ""))
    if isinstance(command, click.Group):
        return
    pieces = " ".join(command.collect_usage_pieces(context))
    yield ""
    yield f"```\n{context.command_path} {pieces}\n```"
    options = [one for one in command.params if isinstance(one, click.Option)]
    if options:
        yield ""
        yield "| option | what |"
        yield "| --- | --- |"
    for option in options:
        record = option.get_help_record(context)
        if record is not None:
            names, text = (_cell(part) for part in record)
            yield f"| `{names}` | {text} |"


def _paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs, each on one line, but those that click leaves as they are."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield f"```text\n{paragraph[2:]}\n```"
        else:
            yield paragraph.replace("\n", " ")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    click.echo(page(), nl=False)
