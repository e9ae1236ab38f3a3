"""Reads the options that a run compares transactions with: rows of the business, and limits."""

from pathlib import Path
from typing import Any

import click
import msgspec

from txbroker.cli.run import usage_errors
from txbroker.config.addresses import read_secret
from txbroker.spark.business import BusinessTable
from txbroker.spark.checks import read_thresholds
from txbroker.spark.schema import Thresholds

_BUSINESS_OPTIONS = ("table", "id_column", "group", "business_user", "business_password_file")


def business_table(options: dict[str, Any]) -> BusinessTable | None:
    """Remove the options of --business from `options`; return the table, if one is given."""
    source = options.pop("business")
    given = {name: options.pop(name) for name in _BUSINESS_OPTIONS}
    if source is None:
        for name, value in given.items():
            if value:
                raise click.UsageError(f"--{name.replace('_', '-')} needs --business")
        return None
    password_file = given["business_password_file"]
    with usage_errors():
        business = BusinessTable(
            source,
            given["table"] or "",
            given["id_column"] or "",
            given["business_user"] or "",
            read_secret("--business-password-file", password_file) if password_file else "",
            tuple(given["group"]),
        )
        business.validate()
    return business


def read_limits(path: Path | None, exit_from: Any) -> Thresholds:
    """Return the checks of a file, none without one. `exit_from`: replaces that of the file."""
    with usage_errors():
        found = Thresholds() if path is None else read_thresholds(path)
    return msgspec.structs.replace(found, exit_from=exit_from or found.exit_from)
