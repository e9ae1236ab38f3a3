"""Running a command line: exit codes, and one-sentence errors in place of tracebacks."""

import codecs
import difflib
import io
import os
import sys
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO, TypeVar

import click

from txbroker.errors import needs

if TYPE_CHECKING:
    from asyncio.subprocess import Process

T = TypeVar("T")

FAILED, USAGE, PARTLY, DRIFT = 1, 2, 3, 4
INTERRUPTED = 130
"""The shells' exit code of a command that Ctrl-C ended."""


class CommandFailed(click.ClickException):
    """The command failed; the message names the next step."""

    exit_code = FAILED


class PartlyDone(click.ClickException):
    """The command succeeded for some of its objects only."""

    exit_code = PARTLY


_TYPOGRAPHIC = str.maketrans({"…": "...", "–": "-", "→": "->", "✓": "+", "✗": "x"})
_C_LOCALES = ("", "C", "POSIX")
_ASCII = "txbroker_ascii"


def is_utf8(stream: TextIO) -> bool:
    """Return whether a stream can represent every character."""
    return (stream.encoding or "utf-8").lower().replace("-", "").startswith("utf")


def in_ascii(text: str) -> str:
    """Return text in ASCII: our own signs replaced by similar ones, other characters escaped."""
    return text.translate(_TYPOGRAPHIC).encode("ascii", "backslashreplace").decode()


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace what an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return in_ascii(error.object[error.start : error.end]), error.end


def _ascii_codec(name: str) -> codecs.CodecInfo | None:
    """Return ASCII by another name: click writes UTF-8 to a stream whose encoding is ASCII."""
    if name != _ASCII:
        return None
    plain = codecs.lookup("ascii")
    return codecs.CodecInfo(*plain, plain.incrementalencoder, plain.incrementaldecoder, name)


def _suit_terminal() -> None:
    """Write only what stdout and stderr can show.

    In the C locale Python writes UTF-8, and sets LC_CTYPE accordingly; a terminal shows ASCII.
    """
    codecs.register_error("txbroker.plain", _replaced)
    codecs.register(_ascii_codec)
    environ = os.environ.get
    ctype = environ("LC_CTYPE", "").replace("C.UTF-8", "")
    ascii_only = (environ("LC_ALL") or ctype or environ("LANG") or "") in _C_LOCALES
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if (ascii_only and stream.isatty()) or codecs.lookup(stream.encoding).name == "ascii":
            stream.reconfigure(encoding=_ASCII, errors="txbroker.plain")
        elif not is_utf8(stream):
            stream.reconfigure(errors="txbroker.plain")


def run(cli: click.Command, arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; never raises."""
    _suit_terminal()
    debug = "--debug" in arguments or bool(os.environ.get("TXBROKER_DEBUG"))
    try:
        with needs():
            code = cli.main(args=list(arguments), prog_name="txbroker", standalone_mode=False)
        sys.stdout.flush()
        if isinstance(code, int):  # from `Context.exit`, which click catches
            return code
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        _report(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped.", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe. The interpreter's final flush must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return _report_unexpected(error, debug)
    return 0


def run_async(main: Coroutine[None, None, T]) -> T:
    """Run a coroutine, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.run(main)
    return uvloop.run(main)


async def piped_module(module: str, *arguments: str) -> "Process":
    """Start a Python module with pipes as stdin and stdout; Ctrl-C reaches only its caller."""
    import asyncio

    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@contextmanager
def usage_errors() -> Iterator[None]:
    """Report a wrong configuration as wrong usage."""
    from txbroker.errors import ConfigurationError

    try:
        yield
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None


def _report(error: click.ClickException) -> None:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return
    if isinstance(error, click.UsageError) and error.ctx is not None:
        click.echo(f"Try '{error.ctx.command_path} --help'.", err=True)
    click.echo(f"Error: {_sentence(error)}", err=True)


def _sentence(error: click.ClickException) -> str:
    """Return an error's message; for an unknown option with the most similar one."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return error.format_message()
    command = error.ctx.command
    known = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
    likely = difflib.get_close_matches(error.option_name, known, 1, cutoff=0.6)
    if likely:
        hint = f" Did you mean {likely[0]!r}?"
    elif isinstance(command, click.Group):
        hint = " Options follow their command."
    else:
        hint = ""
    return f"No such option {error.option_name!r}.{hint}"


def _report_unexpected(error: Exception, debug: bool) -> int:
    from txbroker.errors import TxbrokerError

    if debug:
        click.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    if isinstance(error, TxbrokerError):
        click.echo(f"Error: {error}", err=True)
    elif not debug:
        message = str(error).partition("\n")[0] or type(error).__name__
        click.echo(
            f"Error: {message} ({type(error).__name__}); "
            "`txbroker --debug ...` shows the traceback",
            err=True,
        )
    return FAILED
