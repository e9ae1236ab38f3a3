"""Names the extra of the package that a missing library belongs to."""

from collections.abc import Iterator
from contextlib import contextmanager

from txbroker.errors import ConfigurationError

_EXTRAS = {
    "click": "cli",
    "rich": "cli",
    "pandas": "spark",
    "pyarrow": "spark",
    "pyspark": "spark",
    "sqlite_utils": "spark",
}
"""The extras of libraries that the command imports, other than `proxy`."""


class MissingExtra(ConfigurationError, ImportError):
    """A library is missing; the message names the extra that installs it."""


def missing_extra(module: str, extra: str = "") -> MissingExtra:
    """Return the error for a module that is not installed; see `needs`."""
    extra = extra or _EXTRAS.get(module.partition(".")[0], "proxy")
    return MissingExtra(
        f"the Python package {module} is missing, run: pip install 'txbroker[{extra}]'"
    )


@contextmanager
def needs(extra: str = "") -> Iterator[None]:
    """Name `extra` if a library is missing that is imported here; by default the command's extra
    that has this library.

    Raises:
        MissingExtra: a library is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("txbroker"):
            raise
        raise missing_extra(error.name, extra) from None
