"""A proxy that speaks at most an older version of Kafka's transaction protocol, which no setting
of the product says: `older_proxy.py VERSION proxy`."""

from __future__ import annotations

import functools
import sys

from txbroker.cli.main import main
from txbroker.kafka.client import wiring


def run(version: int, *arguments: str) -> None:
    """Be such a proxy."""
    made = functools.partial(wiring.KafkaSettings, transactions=version)
    wiring.KafkaSettings = made  # type: ignore[misc, assignment]
    sys.argv = ["txbroker", *arguments]
    main()


if __name__ == "__main__":
    run(int(sys.argv[1]), *sys.argv[2:])
