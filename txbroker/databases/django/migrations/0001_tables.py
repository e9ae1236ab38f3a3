"""The tables of consumers, as `txbroker databases create` makes them; those of an outbox are only
migrated.

A later migration of Django calls `upgrade` again: the version in the database counts.
"""

from typing import Any, ClassVar

from django.db import migrations

from txbroker.databases.database import TABLE_SETS
from txbroker.databases.dialect import dialect_named
from txbroker.databases.sessions import execute
from txbroker.databases.steps import Steps, run
from txbroker.databases.tables import CONSUMING, NAMES, create, migrate, stored_versions


def upgrade(_apps: Any, schema_editor: Any) -> None:
    """Create the tables that do not exist, and migrate those that do."""
    connection = schema_editor.connection
    dialect, name = dialect_named(connection.vendor), f"Django's database {connection.alias!r}"

    def steps() -> Steps[None]:
        if not (yield from stored_versions(dialect, CONSUMING)):
            yield from create(dialect, name)
        yield from migrate(dialect, name, TABLE_SETS)

    run(steps(), lambda query: execute(connection, query, "format"))


def drop(_apps: Any, schema_editor: Any) -> None:
    """Drop the tables."""
    for name in NAMES:
        schema_editor.execute(f"DROP TABLE IF EXISTS {name}", params=None)


class Migration(migrations.Migration):  # type: ignore[misc]
    """Create the tables."""

    initial = True
    operations: ClassVar = [migrations.RunPython(upgrade, drop, atomic=False)]
