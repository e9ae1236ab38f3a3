"""The SDK must be light: a service that uses it gets no Kafka client and no Spark."""

import subprocess
import sys


def test_sdk_imports_neither_kafka_nor_spark() -> None:
    program = (
        "import sys, txbroker.sdk\n"
        "heavy = ('aiokafka', 'pyspark', 'kafka', 'txbroker.kafka', 'txbroker.proxy',"
        " 'txbroker.embedded', 'txbroker.checkers', 'txbroker.cli')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists() -> None:
    import txbroker.sdk

    missing = [name for name in txbroker.sdk.__all__ if not hasattr(txbroker.sdk, name)]
    assert missing == []
