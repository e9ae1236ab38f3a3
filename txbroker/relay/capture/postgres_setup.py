"""What a capture needs in PostgreSQL: a publication, a replication slot, and what they require."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.dialect import Fault
from txbroker.databases.postgres import Postgres
from txbroker.databases.sessions import AsyncSession
from txbroker.databases.steps import Query, run_async
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.changes import CaptureMapping
from txbroker.relay.capture.pg import facts as pgfacts
from txbroker.relay.capture.pg.facts import PgFacts
from txbroker.relay.capture.setup import Step, StepState, refusals

_UNLIMITED = "-1"
_OPEN = Query(
    "SELECT CASE WHEN pid IS NULL THEN 'a prepared transaction' "
    "ELSE concat('process ', pid, ' of user ', usename, ' (', application_name, ')') END "
    "FROM pg_locks LEFT JOIN pg_stat_activity USING (pid) WHERE locktype = 'transactionid' "
    "AND mode = 'ExclusiveLock' AND pid IS DISTINCT FROM pg_backend_pid() "
    "ORDER BY xact_start LIMIT 1"
)
"""One of the open transactions that write; prepared ones have no process."""


async def keys(
    mapping: CaptureMapping, database: Postgres
) -> Mapping[tuple[str, str], Sequence[str]]:
    """Return the columns of primary keys; see `CaptureSetup.keys`."""
    facts = await database.ask(pgfacts.read(mapping))
    return {place: table.primary for place, table in facts.tables.items()}


async def plan(mapping: CaptureMapping, database: Postgres) -> list[Step]:
    """Return what `apply` would do; see `CaptureSetup`."""
    facts = await database.ask(pgfacts.read(mapping))
    return list(_steps(mapping, facts))


async def apply(mapping: CaptureMapping, database: Postgres) -> list[Step]:
    """Create or alter the publication, then create the slot; see `CaptureSetup`."""
    return await _take(mapping, database, _steps)


async def remove(mapping: CaptureMapping, database: Postgres) -> list[Step]:
    """Drop the slot, then the publication; see `CaptureSetup`."""
    return await _take(mapping, database, _removal)


async def _take(
    mapping: CaptureMapping,
    database: Postgres,
    make: Callable[[CaptureMapping, PgFacts], Iterator[Step]],
) -> list[Step]:
    with database.explained():
        session = await database.open_async()
    try:
        with database.explained():
            facts = await run_async(pgfacts.read(mapping), session.execute)
        steps = list(make(mapping, facts))
        if refusals(steps):
            return steps
        return [await _execute_step(step, database, session) for step in steps]
    finally:
        await session.close()


async def _execute_step(step: Step, database: Postgres, session: AsyncSession) -> Step:
    if step.state is not StepState.TO_DO:
        return step
    try:
        await session.execute(Query(step.sql))
    except Exception as error:
        text = f"{database.name}: {step.text}: {' '.join(str(error).split())}"
        match database.dialect.fault(error):
            case Fault.BUSY:
                raise DatabaseUnavailable(
                    f"{text}: it waits for open transactions{await _example(session)}: end them, "
                    "or repeat the command later"
                ) from error
            case Fault.DENIED:
                raise ConfigurationError(
                    f"{text}: have an administrator run: {step.sql}"
                ) from error
        raise database.explain(error) from error
    return Step(StepState.DONE, step.text, step.sql)


async def _example(session: AsyncSession) -> str:
    """Return one of the open transactions, as a part of a sentence; "" if none is seen."""
    with suppress(Exception):  # the first error is the one to raise
        for (name,) in (await session.execute(_OPEN)).rows:
            return f", such as {name}"
    return ""


# --- to apply --------------------------------------------------------------------------------


def _steps(mapping: CaptureMapping, facts: PgFacts) -> Iterator[Step]:
    server = facts.server
    problems = list(pgfacts.server_problems(server))
    if server.standby:
        problems.append("the server is a standby: give the URL of its primary")
    for problem in problems:
        yield Step(StepState.REFUSED, problem)
    if not problems:
        yield Step(StepState.DONE, f"wal_level is logical, and {server.user} may replicate")
    for each in mapping.tables:
        problems = list(pgfacts.table_problems(each, facts, mapping))
        for problem in problems:
            yield Step(StepState.REFUSED, problem)
        if not problems:
            yield Step(StepState.DONE, f"table {each.schema}.{each.table} can be captured")
        for gap in pgfacts.gaps(each, facts, mapping):
            yield gap.step
    yield _publication(mapping, facts)
    yield _slot(mapping, facts)
    if server.wal_keep == _UNLIMITED:
        yield Step(
            StepState.ADVICE,
            "max_slot_wal_keep_size is unlimited: the WAL fills the disk if the capture stops for "
            "long; with a limit the capture ends instead, and loses changes",
            "ALTER SYSTEM SET max_slot_wal_keep_size = '20GB'",
        )


def _publication(mapping: CaptureMapping, facts: PgFacts) -> Step:
    name, publication = pgfacts.name_of(mapping), facts.publication
    wanted = {(each.schema, each.table) for each in mapping.tables}
    tables = ", ".join(f"ONLY {_quote(*place)}" for place in sorted(wanted))
    operations = [each for each in pgfacts.OPERATIONS if each in _operations(mapping)]
    generated = facts.server.version >= pgfacts.SENDS_GENERATED
    options = (
        f"(publish = '{', '.join(operations)}', publish_via_partition_root = true"
        f"{', publish_generated_columns = stored' if generated else ''})"
    )
    published = publication.tables if publication is not None else {}
    has = {place for place, each in published.items() if not each.partly}
    foreign = [
        f"{schema}.{table}"
        for schema, table in sorted(wanted - has)
        if (found := facts.tables.get((schema, table))) is not None and not found.owned
    ]
    text = f"publication {name} of {', '.join(operations)} on {tables or 'no table'}"
    if publication is None:
        of_tables = f" FOR TABLE {tables}" if tables else ""
        sql = f"CREATE PUBLICATION {name}{of_tables} WITH {options}"
        allowed = facts.server.may_create
    else:
        parts = []
        if not publication.all_tables and (has != wanted or has != set(published)):
            parts.append(f"SET TABLE {tables}" if tables else _drop(published))
        whole = publication.via_root and publication.generated
        if not whole or publication.operations != set(operations):
            parts.append(f"SET {options}")
        if not parts:
            return Step(StepState.DONE, text)
        sql = "; ".join(f"ALTER PUBLICATION {name} {part}" for part in parts)
        allowed = publication.owned
    if foreign or not allowed:
        lacks = f"does not own {', '.join(foreign)}" if foreign else "may not create or alter it"
        return Step(
            StepState.REFUSED,
            f"{text}: the user {facts.server.user} {lacks}: have an administrator run: {sql}",
            sql,
        )
    return Step(StepState.TO_DO, text, sql)


def _drop(tables: Iterable[tuple[str, str]]) -> str:
    return f"DROP TABLE {', '.join(f'ONLY {_quote(*place)}' for place in sorted(tables))}"


def _operations(mapping: CaptureMapping) -> frozenset[str]:
    """Return what the publication sends; without tables it cannot be nothing."""
    return pgfacts.wanted_operations(mapping) or frozenset({"insert"})


def _slot(mapping: CaptureMapping, facts: PgFacts) -> Step:
    name, server = pgfacts.name_of(mapping), facts.server
    text = f"replication slot {name}"
    for problem in pgfacts.slot_problems(facts, mapping):
        return Step(StepState.REFUSED, problem)
    if facts.slot is not None:
        return Step(StepState.DONE, text)
    if server.slots >= server.slots_max:
        return Step(
            StepState.REFUSED,
            f"{text}: all {server.slots_max} are in use: drop one, or set a larger "
            "max_replication_slots and restart the server",
        )
    sql = f"SELECT pg_create_logical_replication_slot('{name}', '{pgfacts.PLUGIN}')"
    return Step(StepState.TO_DO, text, sql)


# --- to remove -------------------------------------------------------------------------------


def _removal(mapping: CaptureMapping, facts: PgFacts) -> Iterator[Step]:
    name, slot, publication = pgfacts.name_of(mapping), facts.slot, facts.publication
    text = f"replication slot {name} is removed"
    if slot is None:
        yield Step(StepState.DONE, text)
    elif slot.plugin != pgfacts.PLUGIN or slot.database != facts.server.database:
        yield Step(StepState.DONE, f"replication slot {name} belongs to something else and stays")
    elif slot.active_pid:
        yield Step(
            StepState.REFUSED,
            f"replication slot {name} is in use by the server's process {slot.active_pid}: stop "
            "the capture first",
        )
    else:
        yield Step(StepState.TO_DO, text, f"SELECT pg_drop_replication_slot('{name}')")
    text = f"publication {name} is removed"
    if publication is None:
        yield Step(StepState.DONE, text)
    elif publication.owned:
        yield Step(StepState.TO_DO, text, f"DROP PUBLICATION {name}")
    else:
        sql = f"DROP PUBLICATION {name}"
        yield Step(StepState.REFUSED, f"{text}: its owner must run: {sql}", sql)


def _quote(schema: str, table: str) -> str:
    return ".".join('"' + name.replace('"', '""') + '"' for name in (schema, table))
