"""What the log tells of an error that nobody expected: never what it quotes of a message."""

import traceback

from txbroker.errors import TxbrokerError

_FRAMES_SHOWN = 4
_TEXT_MAX = 300


def safe_repr(error: BaseException) -> str:
    """Return an error's type, and its text where we or the operating system wrote it. Texts of
    other errors quote values, of messages and secrets too."""
    kind = type(error).__name__
    told = isinstance(error, TxbrokerError | OSError)
    return f"{kind}: {error}"[:_TEXT_MAX] if told else kind


def user_message(error: BaseException) -> str:
    """Return an error's own sentence where we wrote it, else what `safe_repr` says."""
    return str(error) if isinstance(error, TxbrokerError) else safe_repr(error)


def where_raised(error: BaseException) -> str:
    """Return the innermost places of a traceback in one line."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_SHOWN:]
    return " > ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames)
