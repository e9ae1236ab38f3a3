"""How every command ends: its exit code, and one sentence in place of a traceback."""

import difflib
import os
import sys
import traceback
from collections.abc import Coroutine, Sequence
from typing import TypeVar

import click

T = TypeVar("T")

FAILED, USAGE, PARTLY, DRIFT = 1, 2, 3, 4
INTERRUPTED = 130
"""What shells expect of a command that Ctrl-C ended."""


class CommandFailed(click.ClickException):
    """The command could not do what it was asked; the sentence says what to do."""

    exit_code = FAILED


class PartlyDone(click.ClickException):
    """Some of what was asked is done, some is not."""

    exit_code = PARTLY


def run(cli: click.Command, arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; never raises."""
    debug = "--debug" in arguments or bool(os.environ.get("TXBROKER_DEBUG"))
    try:
        code = cli.main(args=list(arguments), prog_name="txbroker", standalone_mode=False)
        sys.stdout.flush()
        if isinstance(code, int):  # of `Context.exit`, which click does not let out
            return code
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        _say(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped.", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; the interpreter's own flush must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return _failed(error, debug)
    return 0


def run_async(main: Coroutine[None, None, T]) -> T:
    """Run `main` to its end, on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.run(main)
    return uvloop.run(main)


def _say(error: click.ClickException) -> None:
    """Show an error of ours or of click's, in at most a few lines."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return
    if isinstance(error, click.UsageError) and error.ctx is not None:
        click.echo(f"Try '{error.ctx.command_path} --help'.", err=True)
    click.echo(f"Error: {_sentence(error)}", err=True)


def _sentence(error: click.ClickException) -> str:
    """Return what an error says; of an option that is not there, with the one most like it."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return error.format_message()
    command = error.ctx.command
    known = [name for one in command.params for name in (*one.opts, *one.secondary_opts)]
    likely = difflib.get_close_matches(error.option_name, known, 1, cutoff=0.6)
    if likely:
        hint = f" Did you mean {likely[0]!r}?"
    else:
        hint = " Options come behind their command." if isinstance(command, click.Group) else ""
    return f"No such option {error.option_name!r}.{hint}"


def _failed(error: Exception, debug: bool) -> int:
    from txbroker.embedded.errors import EmbeddedKafkaError
    from txbroker.errors import TxbrokerError

    if debug:
        click.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    if isinstance(error, TxbrokerError | EmbeddedKafkaError):
        click.echo(f"Error: {error}", err=True)
    elif not debug:
        what = str(error).partition("\n")[0] or type(error).__name__
        click.echo(
            f"Error: {what} ({type(error).__name__}); "
            "`txbroker --debug ...` shows where it came up",
            err=True,
        )
    return FAILED
