"""Restores sessions of MariaDB."""

from __future__ import annotations

from typing import Any

from txbroker.databases.dialect import MARIADB
from txbroker.databases.restoring.base import Restorer
from txbroker.databases.steps import Query, Steps

_INIT_DB, _QUERY, _RESET = 0x02, 0x03, 0x1F
"""Commands of the protocol: COM_INIT_DB, COM_QUERY, COM_RESET_CONNECTION."""
_COMMIT = f"BEGIN NOT ATOMIC {MARIADB.release}; COMMIT; END"
# Two belong to the database.
_VARIABLES = Query(
    "SELECT variable_name, session_value, variable_type FROM information_schema.system_variables "
    "WHERE variable_scope = 'SESSION' AND read_only = 'NO' "
    "AND NOT (BINARY session_value <=> BINARY global_value) "
    "AND variable_name NOT IN ('CHARACTER_SET_DATABASE', 'COLLATION_DATABASE')"
)
_DATABASE = Query("SELECT DATABASE()")


class MariaRestorer(Restorer):
    """Restores a connection of PyMySQL by COM_RESET_CONNECTION, and then sets what its session had
    changed. The commands are sent at once, so they take one round trip."""

    _commands: tuple[tuple[int, str], ...] = ()

    def opened(self) -> Steps[None]:
        """See `Restorer.opened`; what `init_command` or a `connect` event set is restored."""
        variables = (yield _VARIABLES).rows
        ((database,),) = (yield _DATABASE).rows
        commands = [(_RESET, "")]
        if database:
            commands.append((_INIT_DB, database))
        if variables:
            values = [f"{name} = {_literal(value, kind)}" for name, value, kind in variables]
            commands.append((_QUERY, f"SET {', '.join(values)}"))
        self._commands = tuple(commands)

    def ended(self, sql: str) -> Steps[bool]:
        """See `Restorer.ended`."""
        yield from ()
        self._restore_attributes()
        first = ((_QUERY, _COMMIT if sql == "COMMIT" else sql),) if sql else ()
        results = self._execute(*first, *self._commands)
        if first and results[0] is not None:
            raise results[0]
        return not any(results)

    def _execute(self, *commands: tuple[int, str]) -> list[Exception | None]:
        """Send commands together; return their errors."""
        connection: Any = self._connection
        for command, text in commands:
            connection._execute_command(command, text)
        results: list[Exception | None] = []
        for _command in commands:
            connection._next_seq_id = 1  # each reply counts its packets from there
            try:
                connection._read_ok_packet()
            except Exception as error:
                results.append(error)
            else:
                results.append(None)
        return results


def _literal(value: str, kind: str) -> str:
    if "INT" in kind or kind == "DOUBLE":
        return value
    return f"_utf8mb4 X'{value.encode().hex()}'"
