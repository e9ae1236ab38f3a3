"""The console in a real Chromium: live, by keyboard, narrow and dark, and against other sites."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from selenium.webdriver.common.keys import Keys

from tests.console.chromium import Browser, browser
from tests.console.console_world import TOKEN, post
from tests.kit.secret_files import secret_file
from tests.spark import audit_summaries
from txbroker.core.records import State
from txbroker.sdk import Decision
from txbroker.sdk.blocking import BlockingTransactionalProducer
from txbroker.testing.broker import InMemoryBroker

pytestmark = [pytest.mark.needs_tool("chromium"), pytest.mark.needs_tool("chromedriver")]

LONG = "a-group-with-a-name-that-is-far-too-long-for-a-narrow-window-" * 3
_RUN = "document.title='taken'"
HOSTILE = f'"><script>{_RUN}</script><img src="/x" onerror="{_RUN}">'


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    with InMemoryBroker(partitions=2) as running:
        running.create_topic("orders")
        yield running


@pytest.fixture
def window(chromium: Browser, broker: InMemoryBroker) -> Iterator[Browser]:
    """A window on its console; nothing in it may have been complained of by the browser."""
    chromium.url = broker.url
    chromium.driver.delete_all_cookies()
    chromium.scripts(on=True)
    chromium.look()
    chromium.complaints()
    yield chromium
    chromium.scripts(on=True)
    assert chromium.complaints() == []


def prepare(broker: InMemoryBroker, group: str = "orders", value: str = "v", count: int = 1) -> Any:
    for _ in range(count):
        body = {"group": group, "messages": [{"topic": "orders", "value": value}]}
        id = post(broker.url + "/v1/transactions", body)["id"]
    return id


@contextmanager
def parked(broker: InMemoryBroker) -> Iterator[str]:
    """Have a transaction whose group never knew."""
    with BlockingTransactionalProducer(
        broker.url, group="doubtful", instance="one", check=lambda _: Decision.UNKNOWN
    ):
        id = prepare(broker, "doubtful")
        broker.advance(600)
        assert broker.transaction(id).state is State.PARKED
        yield id


def test_parked_transaction_is_found_and_committed(broker: InMemoryBroker, window: Browser) -> None:
    with parked(broker) as id:
        window.open("/")
        assert "needs action" in window.text("h1")
        window.click("Show them")
        window.until(lambda: window.path == "/transactions?state=parked")
        window.click(id)
        window.until(lambda: window.path == f"/transactions/{id}")
        assert "attempt 1.15" in window.text("#timeline")
        window.click("Commit…")
        window.fill("#reason", "order 17 is in the database")
        window.fill("#by", "Ada")
        window.click("Commit 1 transaction")
        window.until(lambda: window.path.startswith(f"/transactions/{id}?done="))
        window.until(lambda: "promoted" in window.text("#head"))  # live
    view = broker.transaction(id)
    assert (view.reason, view.by) == ("order 17 is in the database", "Ada via console 127.0.0.1")


def test_console_works_without_scripts(broker: InMemoryBroker, window: Browser) -> None:
    prepare(broker, "orders", count=3)
    window.scripts(on=False)
    window.open("/transactions?state=pending&group=orders")
    assert not window.find("#live").is_displayed()
    window.click("Roll back…")
    window.fill("#reason", "a test")
    window.click("Roll back 3 transactions")
    window.until(lambda: "Rolled back 3 transactions" in window.text("h1"))
    assert broker.pending() == []


@pytest.mark.quick
def test_overview_refreshes_and_keeps_the_focus(broker: InMemoryBroker, window: Browser) -> None:
    prepare(broker)
    window.open("/")
    window.run("window.same = true; document.querySelector('#groups-first .more').focus()")
    assert window.text("#sums .tiles > div:first-child dd") == "1"
    prepare(broker, "others", count=2)
    window.until(lambda: window.text("#sums .tiles > div:first-child dd") == "3")
    assert "others" in window.text("#groups-first")
    assert window.run("return window.same") is True  # not reloaded
    assert window.run("return document.activeElement.textContent").startswith("all groups")


@pytest.mark.parametrize("width", [400, 1200])
def test_charts_are_drawn_without_scripts(
    broker: InMemoryBroker, window: Browser, width: int
) -> None:
    prepare(broker, "orders", count=2)
    window.look(width=width)
    window.scripts(on=False)

    def drawn() -> bool:
        window.open("/group?name=orders")
        return "pending 2" in window.text("#past")

    window.until(drawn)
    window.scripts(on=True)
    for line in window.all("#past svg[role=img] .line"):
        box = window.run("return arguments[0].getBoundingClientRect().toJSON()", line)
        assert box["left"] >= 0
        assert box["right"] <= width + 1
        colour = window.run("return getComputedStyle(arguments[0]).stroke", line)
        assert colour not in ("none", "rgb(0, 0, 0)")
    assert len(window.all("#past svg[role=img] .line")) >= 8
    assert len(window.all("#past .event.is-start")) >= 4


def test_refresh_can_be_stopped(broker: InMemoryBroker, window: Browser) -> None:
    window.open("/")
    # A refresh in flight when it is stopped, held until then.
    window.run("""
        const real = window.fetch;
        window.looks = 0;
        window.held = new Promise((go) => { window.release = go });
        window.fetch = async (...all) => {
          window.looks += 1;
          await window.held;
          return real(...all);
        };
    """)
    window.until(lambda: window.run("return window.looks") == 1)
    button = window.find("#live")
    button.click()
    prepare(broker)
    window.run("window.waited = false; setTimeout(() => { window.waited = true }, 3500)")
    window.run("window.release()")
    window.until(lambda: window.run("return window.waited"))
    assert window.run("return window.looks") == 1
    assert (button.text, button.get_attribute("aria-pressed")) == ("Stopped", "false")
    assert window.text("#sums .tiles > div:first-child dd") == "0"
    button.click()
    window.until(lambda: window.text("#sums .tiles > div:first-child dd") == "1")


def test_hostile_content_runs_nothing(broker: InMemoryBroker, window: Browser) -> None:
    id = prepare(broker, HOSTILE, HOSTILE)
    paths = ["/", "/groups", f"/group?name={quote(HOSTILE)}", "/audit", "/transactions",
             f"/transactions/{id}?bodies=1",
             f"/actions/commit?id={id}"]  # fmt: skip
    for path in paths:
        window.open(path)
        assert window.driver.title.endswith("· txbroker"), path
        assert window.run("return document.querySelectorAll('main img, main script').length") == 0
    # Nor does content injected into a page: its policy forbids it.
    window.run("document.body.insertAdjacentHTML('beforeend', arguments[0])", HOSTILE)
    # The missing image, and the script to run then, in either order.
    refused: list[str] = []
    kinds = ("Content Security Policy", "/x - Failed to load")

    def reported() -> bool:
        refused.extend(window.complaints())
        return all(any(kind in line for line in refused) for kind in kinds)

    window.until(reported)
    assert all(any(kind in line for kind in kinds) for line in refused), refused
    assert window.driver.title.endswith("· txbroker")


def test_console_works_by_keyboard(broker: InMemoryBroker, window: Browser) -> None:
    prepare(broker)
    window.open("/transactions")
    body = window.find("body")
    body.send_keys(Keys.TAB)
    focused = window.driver.switch_to.active_element
    assert focused.text == "Skip to content"
    focused.send_keys(Keys.ENTER)
    assert window.run("return document.activeElement.id") == "main"
    seen = []
    while "Roll back…" not in seen:
        window.driver.switch_to.active_element.send_keys(Keys.TAB)
        active = window.driver.switch_to.active_element
        outline = window.run("return getComputedStyle(arguments[0]).outlineStyle", active)
        assert outline != "none", active.text
        seen.append(active.text)
        assert len(seen) < 60, seen
    window.driver.switch_to.active_element.send_keys(Keys.ENTER)
    window.until(lambda: window.path.startswith("/actions/rollback"))


CONTRAST = """
const light = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const parts = (s) => s.match(/[\\d.]+/g).map(Number);
const shine = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
const shade = (e) => {
  for (; e; e = e.parentElement) {
    const c = parts(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] === 1) return c;
  }
  return [255, 255, 255];
};
const poor = [];
for (const e of document.body.querySelectorAll("*")) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!own || !e.checkVisibility()) continue;
  const [a, b] = [shine(parts(getComputedStyle(e).color)), shine(shade(e))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) poor.push(`${e.tagName}.${e.className} ${e.textContent.trim()} ${ratio}`);
}
return poor;
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_every_page_is_legible(
    broker: InMemoryBroker, window: Browser, dark: bool, width: int
) -> None:
    with parked(broker) as id:
        other = prepare(broker, LONG, "x" * 3000)
        window.look(dark=dark, width=width)
        paths = ["/", "/transactions", f"/transactions/{id}", f"/transactions/{other}?bodies=1",
                 "/groups", "/group?name=doubtful", f"/group?name={LONG}", "/audit",
                 f"/actions/commit?id={id}", "/actions/rollback",
                 "/transactions/nonsense"]  # fmt: skip
        for path in paths:
            window.open(path)
            assert window.run(CONTRAST) == [], path
            # Tables may be wider than the window, and scroll in themselves; pages never.
            assert window.run("return document.scrollingElement.scrollWidth") <= width, path
            back = window.run("return getComputedStyle(document.body).backgroundColor")
            assert (back == "rgb(18, 22, 28)") is dark
    # The browser reports the page that could not be shown.
    assert all("400 (Bad Request)" in line for line in window.complaints())


# --- other sites -----------------------------------------------------------------------------


@contextmanager
def site(html: str) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://localhost:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def guarded(tmp_path: Path, chromium: Browser) -> Iterator[InMemoryBroker]:
    """A proxy with a token, and the window on it."""
    token = secret_file(tmp_path / "token", TOKEN)
    with InMemoryBroker(token_file=token) as running:
        chromium.url = running.url
        chromium.look()
        chromium.scripts(on=True)
        yield running
        chromium.driver.delete_all_cookies()


def log_in(window: Browser) -> None:
    window.fill("#name", "Ada")
    window.fill("#token", TOKEN)
    window.click("Log in")
    window.until(lambda: window.all(".who"))


@pytest.mark.usefixtures("guarded")
def test_login_holds_for_links_on_other_sites(chromium: Browser) -> None:
    chromium.open("/groups")
    chromium.until(lambda: chromium.path.startswith("/login"))
    log_in(chromium)
    assert chromium.path == "/groups"
    with site(f'<a id="a" href="{chromium.url}/transactions?state=parked">look</a>') as there:
        chromium.driver.get(there)
        chromium.find("#a").click()
        chromium.until(lambda: chromium.path == "/transactions?state=parked")
        chromium.until(lambda: chromium.all(".who"))
    chromium.click("Log out")
    chromium.until(lambda: chromium.path == "/login")


@pytest.mark.usefixtures("guarded")
def test_form_on_another_site_does_nothing(chromium: Browser) -> None:
    chromium.open("/login")
    log_in(chromium)
    form = (
        f'<form id="f" method="post" action="{chromium.url}/actions/commit">'
        '<input name="reason" value="x"><input name="covered" value="AAAAAAAAAAA="></form>'
    )
    with site(form) as there:
        chromium.driver.get(there)
        chromium.run("document.getElementById('f').submit()")
        chromium.until(lambda: "Not possible" in chromium.text("body"))
        assert "cross-site calls" in chromium.text("body")
    with site(f'<iframe id="i" src="{chromium.url}/"></iframe>') as there:
        chromium.driver.get(there)
        framed = chromium.until(chromium.complaints)
        assert any("frame" in line for line in framed)


WIDTHS_OF_PLOTS = """return [...document.querySelectorAll(".bars, .pair > div")].map((place) => {
  const boxes = [...place.querySelectorAll("svg")].map((plot) => plot.getBoundingClientRect());
  const width = Math.max(...boxes.map((box) => box.right)) - place.getBoundingClientRect().left;
  const section = place.closest("section"), padding = getComputedStyle(section).paddingLeft;
  return width / (section.clientWidth - 2 * parseFloat(padding));
})"""
_WORDS = '[...document.querySelectorAll(".bars span, .plot span")]'
SMALLEST_WORDS_OF_PLOTS = f"""return Math.min(
  ...{_WORDS}.map((one) => parseFloat(getComputedStyle(one).fontSize)))"""
OVERLAPPING_WORDS_OF_PLOTS = f"""const boxes = {_WORDS}.map(
  (one) => [one.textContent, one.getBoundingClientRect()]);
return boxes.flatMap(([words, a], n) => boxes.slice(n + 1)
  .filter(([, b]) => a.left < b.right && b.left < a.right && a.top + 1 < b.bottom
    && b.top + 1 < a.bottom)
  .map(([other]) => `${{words}} and ${{other}}`))"""


@pytest.mark.parametrize("width", [400, 1200])
def test_a_report_reads_well_and_its_links_filter_the_findings(
    chromium: Browser, tmp_path: Path, width: int
) -> None:
    (tmp_path / "audit.html").write_text(audit_summaries.sample_pages()["audit-drift"])
    chromium.url = f"file://{tmp_path}"
    chromium.look(width=width)
    for name in ("", "lost", "warning", "acknowledged", "healed"):
        chromium.open(f"/audit.html#drift-{name}" if name else "/audit.html")
        rows = [
            (row.get_attribute("class") or "", row.is_displayed())
            for row in chromium.all("tr.finding")
        ]
        assert all(shown == (not name or f"is-{name}" in kind.split()) for kind, shown in rows)
        assert any(shown for _, shown in rows)
    assert chromium.run("return document.documentElement.scrollWidth") <= width
    # Plots are as wide as the page, and its words are large enough and apart.
    shares = chromium.run(WIDTHS_OF_PLOTS)
    assert len(shares) == 4
    assert min(shares) > 0.99
    assert chromium.run(SMALLEST_WORDS_OF_PLOTS) >= 12
    assert chromium.run(OVERLAPPING_WORDS_OF_PLOTS) == []
    assert chromium.complaints() == []
