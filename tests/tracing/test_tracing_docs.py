"""The example of docs/how-to/tracing.md, run unchanged in a separate process."""

import json
import re
import subprocess
import sys
from pathlib import Path

from txbroker.testing.broker import InMemoryBroker

PAGE = Path(__file__).parents[2] / "docs/how-to/tracing.md"


def spans_of(printed: str) -> list[dict[str, object]]:
    """Return the spans that a console exporter has printed one after another."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(printed.rstrip()):
        span, at = decoder.raw_decode(printed, at)
        at += len(printed[at:]) - len(printed[at:].lstrip())
        found.append(span)
    return found


def test_the_example_prints_one_trace() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with InMemoryBroker() as broker:
        done = subprocess.run(
            [sys.executable, "-c", example.replace("http://127.0.0.1:8470", broker.url)],
            capture_output=True,
            check=True,
            text=True,
            timeout=60,
        )
        broker.wait_until_settled()
        (message,) = broker.messages("payments")
    spans = spans_of(done.stdout)
    traces = {str(span["context"]["trace_id"]) for span in spans}  # type: ignore[index]
    ((name, value),) = message.headers

    assert [span["name"] for span in spans] == [
        "prepare payments",
        "commit payments",
        "place order",
    ]
    assert len(traces) == 1
    assert name == "traceparent"
    assert (value or b"").decode().split("-")[1] == traces.pop().removeprefix("0x")
