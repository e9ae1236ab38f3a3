"""The application file for `spark-submit`: `txbroker audit` with the same arguments.

spark-submit --packages … "$(python -m txbroker.cli.submit --where)" run --kafka …
"""

import sys

import click

from txbroker.cli.main import cli
from txbroker.cli.run import run


def main(arguments: list[str]) -> int:
    """Run `txbroker audit`; return its exit code."""
    if arguments == ["--where"]:
        click.echo(__file__)
        return 0
    return run(cli, ["audit", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
