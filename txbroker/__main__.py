"""The `txbroker` command, also as `python -m txbroker`."""

import sys

from txbroker.errors import MissingExtra, needs


def main() -> None:
    """Run the command; without the libraries that it needs, name the extra."""
    try:
        with needs("cli"):
            from txbroker.cli.main import main as run
    except MissingExtra as error:
        sys.exit(f"Error: {error}")
    run()


if __name__ == "__main__":
    main()
