"""Log lines on stderr: one for an event that matters, none for a message, never a secret."""

import logging
import sys
from typing import Any, Literal

import structlog

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
# Whatever a key with such a name holds, it is not for the log.
_SECRET_WORDS = ("password", "secret", "token", "authorization", "signature")


def hide_secrets(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Replace the values of keys that name a secret; files that hold one may be named."""
    for key in event:
        name = key.lower()
        if any(word in name for word in _SECRET_WORDS) and not name.endswith(("_file", "_ref")):
            event[key] = "***"
    return event


def configure_logging(
    style: Literal["auto", "console", "json"] = "auto", level: str = "info"
) -> None:
    """Send every log line of the process to stderr, structlog's and the libraries' alike.

    Args:
        style: `console` for people, `json` for machines; `auto` looks whether a person watches.
        level: the least important lines to show.
    """
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        hide_secrets,
    ]
    last: list[structlog.typing.Processor]
    if console:
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    else:
        last = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    # Libraries tell every retry at info; what matters of it we say ourselves.
    for name in ("aiohttp", "aiokafka", "asyncio"):
        logging.getLogger(name).setLevel(max(_LEVELS[level], logging.WARNING))


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module; its lines carry the module's name."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger
