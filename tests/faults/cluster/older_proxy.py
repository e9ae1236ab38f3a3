"""A proxy limited to an older version of Kafka's transaction protocol, which no setting can do:
`older_proxy.py VERSION proxy`."""

from __future__ import annotations

import sys

from msgspec import structs

from txbroker.cli.main import main
from txbroker.config.settings import Settings
from txbroker.kafka.client.settings import KafkaSettings


def run(version: int, *arguments: str) -> None:
    from_configuration = KafkaSettings.from_configuration

    def older(settings: Settings) -> KafkaSettings:
        return structs.replace(from_configuration(settings), transactions=version)

    KafkaSettings.from_configuration = older  # type: ignore[method-assign, assignment]
    sys.argv = ["txbroker", *arguments]
    main()


if __name__ == "__main__":
    run(int(sys.argv[1]), *sys.argv[2:])
