"""The tables of version 1, as `txbroker databases create` makes them."""

from typing import Any, ClassVar

from django.db import migrations

from txbroker.databases.dialect import dialect_named
from txbroker.databases.tables import NAMES, statements


def create(_apps: Any, schema_editor: Any) -> None:
    """Create the tables that do not exist."""
    for sql in statements(dialect_named(schema_editor.connection.vendor)):
        schema_editor.execute(sql, params=None)


def drop(_apps: Any, schema_editor: Any) -> None:
    """Drop the tables."""
    for name in NAMES:
        schema_editor.execute(f"DROP TABLE IF EXISTS {name}", params=None)


class Migration(migrations.Migration):  # type: ignore[misc]
    """Create the tables."""

    initial = True
    atomic = False  # MariaDB commits each statement
    operations: ClassVar = [migrations.RunPython(create, drop)]
