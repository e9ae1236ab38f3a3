"""What happened to order 4711: a proxy after that night, and a recording of who asks it."""

from __future__ import annotations

import asyncio
import io
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import click
from rich.console import Console
from rich.text import Text

from tests.cli.terminals import on_terminal
from tests.kit.pages import ID, session
from txbroker.sdk import Decision, Message
from txbroker.sdk.blocking import BlockingTransactionalProducer
from txbroker.testing.broker import InMemoryBroker

PAGE = "docs/how-to/resolve-transactions.md"
HOUR_S = 3600
WIDTH = 100
TYPED_S, LINE_S, READ_S = 0.8, 0.06, 1.5
NAME = "order-4711"
# As rich's own, without its font from the network, and with words for who cannot see it.
FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>What happened to order 4711?</title>
<desc>A session of the txbroker command in a terminal; the page that shows it has it as text.</desc>
<style>
.{unique_id}-matrix {{
  font: {char_height}px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace }}
.{unique_id}-title {{ font: bold 18px system-ui, sans-serif }}
{styles}
/* delays */
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def _order(number: int) -> list[Message]:
    order = {"order": number, "cents": 100 + number}
    return [Message.json(topic, order, key=str(number)) for topic in ("orders", "payments")]


def _unanswered(_: object) -> Decision:
    raise TimeoutError("database")


async def _commit(url: str, id: str) -> None:
    decided = {"reason": "order is paid", "by": "ann@host"}
    async with (
        aiohttp.ClientSession(url) as http,
        http.post(f"/v1/transactions/{id}/commit", json=decided) as answer,
    ):
        assert answer.status == 200, await answer.text()


@contextmanager
def night() -> Iterator[str]:
    """Yield the URL of a proxy after a night in which an instance of a shop died between its
    database's commit and that of the transactions, and the other one could not reach the database.

    Kafka's clock begins at 23:12 before, and is advanced to the present.
    """
    now = datetime.now(UTC)
    begin = (now - timedelta(hours=32)).replace(hour=23, minute=12, second=4)
    if begin + timedelta(hours=32) < now:
        begin += timedelta(days=1)
    passed_s = (now - begin).total_seconds()
    times = {"check_after_s": 30, "check_interval_s": 300, "check_attempts_max": 3}
    broker = InMemoryBroker(partitions=2, **times)
    # The command counts ages from its own clock, so at the end the present must be the present.
    broker._kafka.clock.advance(-passed_s)
    with broker:
        for topic in ("orders", "payments"):
            broker.create_topic(topic, 3)
        with BlockingTransactionalProducer(broker.url, group="shop", instance="shop-1") as dies:
            for number in range(4701, 4711):
                with dies.transaction(*_order(number)):
                    pass
            broker.wait_until_settled()
            id = dies.prepare(*_order(4711))
            for number in (4712, 4714):
                broker.advance(5)
                dies.prepare(*_order(number))
        other = {"group": "shop", "instance": "shop-2", "check": _unanswered}
        with BlockingTransactionalProducer(broker.url, **other):
            broker.advance(6.5 * HOUR_S)
            asyncio.run(_commit(broker.url, id))
            broker.wait_until_settled()
            broker.advance(passed_s - 6.5 * HOUR_S - 10)
            yield broker.url


def _typed(url: str) -> Iterator[tuple[float, Text]]:
    """Run the page's session on a terminal; yield its lines, each with the time of its coming."""
    at_s, id = 0.0, ""
    with TemporaryDirectory() as config, on_terminal(Path(config)) as run:
        for command, _ in session(PAGE):
            command = ID.sub(id, command)
            call, _, question = command.partition("  # ")
            prompt = Text.assemble(("$ ", "green"), (f"txbroker {call}", "bold"))
            yield at_s, prompt.append(f"  # {question}", "cyan")
            at_s += TYPED_S
            terminal = run(*shlex.split(call), width=WIDTH, environ={"TXBROKER_URL": url})
            assert terminal.end() == 0, terminal.text
            found = ID.search(click.unstyle(terminal.text))
            id = id or (found[0] if found else "")
            for line in "\n".join(terminal.screen).rstrip().split("\n"):
                yield at_s, Text.from_ansi(line)
                at_s += LINE_S
            at_s += READ_S
            yield at_s, Text()
        yield at_s, Text("$ ", "green")


def record(path: Path) -> None:
    """Write the page's session as a picture, whose lines appear one after the other."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    delays = []
    with night() as url:
        for number, (at_s, line) in enumerate(_typed(url)):
            assert line.cell_len <= WIDTH, line.plain
            console.print(line)
            place = f'[clip-path="url(#{NAME}-line-{number})"]'
            delays.append(f"{place} {{ animation: {NAME} 1ms {at_s:.2f}s backwards }}")
    appear = f"@keyframes {NAME} {{ from {{ opacity: 0 }} }}"
    rules = "\n".join(["@media (prefers-reduced-motion: no-preference) {", appear, *delays, "}"])
    picture = console.export_svg(title="txbroker", code_format=FRAME, unique_id=NAME)
    path.write_text(picture.replace("/* delays */", rules))
