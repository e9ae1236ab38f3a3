"""The chart's README, with a table of its values.

`python charts/readme.py > charts/txbroker/README.md` renews it; a test asserts that it is current.
The texts are the comments of `values.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

CHART = Path(__file__).parent / "txbroker"
HEAD = """\
# txbroker

{description}. It runs several proxies on an existing Kafka.

```
helm install txbroker charts/txbroker -n txbroker \\
  --set image.repository=registry.example.org/txbroker \\
  --set peerSecret.existingSecret=txbroker-peers \\
  --set kafka.bootstrapServers='kafka-1:9092\\,kafka-2:9092'
helm test txbroker -n txbroker
```

Images, Secrets, TLS, upgrades: [run on Kubernetes]({home}/blob/main/docs/operate/kubernetes.md).
`helm test` runs `txbroker doctor` in a Pod.

## Values
Helm refuses values that are not listed, and those of a wrong type.

| value | default | |
| --- | --- | --- |
"""


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, default and comment of each value, of a block without default if it has one.

    A comment is about the values after it up to the next one or an empty line, so a value without
    one stands in the row after the one that explains it.
    """
    blocks: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if not stripped or stripped.startswith("# ---"):
            comment = []
        elif stripped.startswith("#"):
            words = stripped.removeprefix("# ")
            comment.append(f"`{words.strip()}`" if words.startswith("  ") else words)
        else:
            name, _, default = stripped.partition(":")
            blocks = [one for one in blocks if one[0] < indent]
            path = ".".join([*(one[1] for one in blocks), name])
            if not default:
                blocks.append((indent, name))
            if default or comment:
                yield path, default.strip(), " ".join(comment)
            comment = []


def text() -> str:
    """Return the page."""
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    found = HEAD.format_map(about)
    for name, default, comment in rows((CHART / "values.yaml").read_text()):
        cells = f"`{name}`", f"`{default}`" if default else "", re.sub(r"\|", r"\\|", comment)
        found += f"| {' | '.join(cells)} |\n"
    return found


if __name__ == "__main__":
    print(text(), end="")  # noqa: T201 - the file goes where the shell sends it
