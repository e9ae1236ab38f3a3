"""`txbroker databases`: create txbroker's tables in databases of services and consumers."""

import click

from txbroker.cli.main import SuggestingGroup
from txbroker.cli.run import usage_errors
from txbroker.databases.tables import statements
from txbroker.databases.urls import from_url


@click.group("databases", cls=SuggestingGroup)
def command() -> None:
    """Create txbroker's tables in your databases.

    They hold barriers, inboxes and the positions of consumers that store results exactly once.
    """


@command.command("create")
@click.argument("url", envvar="TXBROKER_DATABASE_URL")
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
        click.echo("".join(f"{sql};\n" for sql in statements(database.dialect)), nl=False)
        return
    database.create()
    database.prepare()
    click.echo(f"{database.name} has txbroker's tables.", err=True)
