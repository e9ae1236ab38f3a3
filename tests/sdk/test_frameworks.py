"""The recipes of `docs/how-to/use-with-frameworks.md` run, and survive a crash."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from txbroker.testing.broker import InMemoryBroker

PAGE = Path(__file__).parents[2] / "docs/how-to/use-with-frameworks.md"
CHECKS_S = 60.0
END_S = 60.0
CRASHED = 9
CALLS = {
    "fastapi": """
from fastapi.testclient import TestClient
from recipe import app
with TestClient(app) as client:
    run(lambda number, amount: client.post(f"/orders/{number}/{amount}").status_code)
""",
    "flask": """
from recipe import app, producer
producer.start()
client = app.test_client()
run(lambda number, amount: client.post(f"/orders/{number}/{amount}").status_code)
""",
    "django": """
import django
from django.conf import settings
from django.core.management import call_command
settings.configure(
    ALLOWED_HOSTS=["*"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db",
                           "ATOMIC_REQUESTS": True}},
    INSTALLED_APPS=["txbroker.databases.django"],
    ROOT_URLCONF="recipe",
)
django.setup()
call_command("migrate", verbosity=0)
from django.db import connection
from django.test import Client
connection.cursor().execute("CREATE TABLE IF NOT EXISTS orders (number PRIMARY KEY, amount)")
from recipe import producer
producer.start()
run(lambda number, amount: Client().post(f"/orders/{number}/{amount}").status_code)
""",
    "celery": """
from celery.contrib.testing.worker import start_worker
from recipe import app, order
app.conf.broker_transport_options = {"polling_interval": 0.05}
statuses = {"commit": 201, "rollback": 422}
with start_worker(app, pool="solo", perform_ping_check=False):
    run(lambda number, amount: statuses[order.delay(number, amount).get(timeout=30)])
""",
}
DRIVER = """
import os, sys
from txbroker.sdk.calls import Calls

def run(place):
    phase = sys.argv[1]
    if phase == "orders":
        print(place("1", 10), place("2", 5000), flush=True)
    if phase == "crash":
        Calls.decide = lambda *_, **__: os._exit({crashed})
        place("3", 30)
    if phase == "check":
        print("connected", flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as running:
        yield running


@contextmanager
def process(folder: Path, phase: str, url: str) -> Iterator[subprocess.Popen[str]]:
    """Run the recipe until the block ends."""
    environment = {"TXBROKER_URL": url, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    environment |= {"CELERY_BROKER": "memory://", "CELERY_BACKEND": "cache+memory://"}
    command = [sys.executable, "driver.py", phase]
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, **environment}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as running:  # fmt: skip
        try:
            yield running
            running.communicate(timeout=END_S)  # ends its stdin
        finally:
            running.kill()


def visible(broker: InMemoryBroker) -> list[tuple[bytes | None, bytes | None]]:
    broker.wait_until_settled()
    return [(each.key, each.value) for each in broker.messages("payments")]


@pytest.mark.parametrize("framework", CALLS)
def test_recipe_settles_every_order(framework: str, broker: InMemoryBroker, tmp_path: Path) -> None:
    text = PAGE.read_text()
    shop, *recipes = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (recipe,) = (code for code in recipes if f"\nfrom {framework}" in code)
    (tmp_path / "shop.py").write_text(shop)
    (tmp_path / "recipe.py").write_text(recipe)
    driver = DRIVER.format(crashed=CRASHED) + CALLS[framework]
    (tmp_path / "driver.py").write_text(driver)

    with process(tmp_path, "orders", broker.url) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "201 422\n"
    assert running.returncode == 0
    assert visible(broker) == [(b"1", b"10")]

    with process(tmp_path, "crash", broker.url) as running:
        assert running.wait(END_S) == CRASHED
    assert len(broker.pending()) == 1
    with process(tmp_path, "check", broker.url) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "connected\n"
        broker.advance(CHECKS_S)
        assert visible(broker) == [(b"1", b"10"), (b"3", b"30")]
    assert running.returncode == 0
