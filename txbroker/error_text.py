"""Errors as text that is safe to log: it quotes neither messages nor secrets."""

import traceback

from txbroker.errors import TxbrokerError

_FRAMES_SHOWN = 4
_TEXT_MAX = 300


def safe_repr(error: BaseException) -> str:
    """Return an error's type, and its text if txbroker or the operating system wrote it.

    Texts of other errors can quote messages and secrets.
    """
    kind = type(error).__name__
    safe = isinstance(error, TxbrokerError | OSError)
    return f"{kind}: {error}"[:_TEXT_MAX] if safe else kind


def user_message(error: BaseException) -> str:
    """Return a txbroker error's text, for any other error its `safe_repr`."""
    return str(error) if isinstance(error, TxbrokerError) else safe_repr(error)


def raised_at(error: BaseException) -> str:
    """Return the innermost lines of a traceback as `file:line > file:line`."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_SHOWN:]
    return " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames)
