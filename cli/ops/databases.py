"""`txbroker databases`: create and migrate txbroker's tables in databases of services and
consumers."""

from collections.abc import Iterable

import click

from txbroker.cli.main import SuggestingGroup
from txbroker.cli.run import usage_errors
from txbroker.databases.tables import CONSUMING
from txbroker.databases.urls import from_url

url_argument = click.argument("url", envvar="TXBROKER_DATABASE_URL")


@click.group("databases", cls=SuggestingGroup)
def command() -> None:
    """Create and migrate txbroker's tables in your databases.

    They hold barriers, inboxes and the positions of consumers that store results exactly once.
    """


@command.command("create")
@url_argument
@click.option("--dry-run", is_flag=True, help="Print the SQL; do not connect.")
def create_command(url: str, dry_run: bool) -> None:
    """Create the tables that do not exist.

    URL is sqlite:///FILE, postgresql://USER:PASSWORD@HOST/DATABASE or
    mariadb://USER:PASSWORD@HOST/DATABASE. To keep a password out of the list of processes, set
    TXBROKER_DATABASE_URL instead.
    """
    with usage_errors():
        database = from_url(url)
    if dry_run:
        print_sql(CONSUMING.statements(database.dialect))
        return
    database.create()
    database.prepare()
    click.echo(f"{database.name} has txbroker's tables.", err=True)


@command.command("migrate")
@url_argument
@click.option("--dry-run", is_flag=True, help="Print the SQL; change nothing.")
def migrate_command(url: str, dry_run: bool) -> None:
    """Migrate the tables that an older txbroker created, those of an outbox included.

    URL is that of `txbroker databases create`. The login must own the tables; in MariaDB it needs
    CREATE, ALTER and INDEX. Stop what uses the tables first. A migration that was interrupted
    continues when you run the command again.
    """
    with usage_errors():
        database = from_url(url)
    executed = database.migrate(dry_run=dry_run)
    if dry_run:
        print_sql(executed)
    elif executed:
        click.echo(f"{database.name}: txbroker's tables are migrated.", err=True)
    if not executed:
        click.echo(f"{database.name} has no older txbroker tables.", err=True)


def print_sql(statements: Iterable[str]) -> None:
    """Print statements for a client of the database."""
    click.echo("".join(f"{sql};\n" for sql in statements), nl=False)
