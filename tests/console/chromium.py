"""Debian's Chromium, driven through its own driver: nothing is downloaded."""

from __future__ import annotations

import base64
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

TOOLS = ("chromium", "chromedriver")
WAIT_S = 20.0
"""How long a condition may take to come true, on a busy machine."""


_FEWER_COLOURS = """
const [png, done] = arguments;
const picture = new Image();
picture.onload = () => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [picture.width, picture.height];
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const colourAt = (i) => (data[i] << 16) | (data[i + 1] << 8) | data[i + 2];
  const counts = new Map();
  for (let i = 0; i < data.length; i += 4) {
    const colour = colourAt(i);
    counts.set(colour, (counts.get(colour) || 0) + 1);
  }
  const part = (colour, shift) => (colour >> shift) & 255;
  const parts = (colour) => [16, 8, 0].map((shift) => part(colour, shift));
  // A little bright green counts more than much grey.
  const weight = ([colour, count]) =>
    count * (1 + Math.max(...parts(colour)) - Math.min(...parts(colour)));
  const palette = [...counts]
    .sort((a, b) => weight(b) - weight(a)).slice(0, 256).map(([colour]) => colour);
  const far = (a, b) => [16, 8, 0].reduce((sum, s) => sum + (part(a, s) - part(b, s)) ** 2, 0);
  const nearest = (colour) =>
    palette.reduce((best, c, n) => (far(c, colour) < far(palette[best], colour) ? n : best), 0);
  const number = new Map([...counts.keys()].map((colour) => [colour, nearest(colour)]));
  const pixels = new Uint8Array(data.length / 4);
  for (let i = 0; i < data.length; i += 4) pixels[i / 4] = number.get(colourAt(i));
  const reader = new FileReader();
  reader.onload = () => done({ width: canvas.width, palette, pixels: reader.result.split(",")[1] });
  reader.readAsDataURL(new Blob([pixels]));
};
picture.src = `data:image/png;base64,${png}`;
"""


def _png(width: int, palette: list[int], pixels: bytes) -> bytes:
    """Return a picture of few colours as a PNG, a byte for each pixel: a third of the size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    rows = [pixels[at : at + width] for at in range(0, len(pixels), width)]
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 3, 0, 0, 0)
    colours = b"".join(colour.to_bytes(3, "big") for colour in palette)
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    parts = ((b"IHDR", header), (b"PLTE", colours), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, content) for kind, content in parts)


class Browser:
    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, path: str) -> None:
        self.driver.get(self.url + path)

    @property
    def path(self) -> str:
        """Where the window is, without the console's address."""
        return self.driver.current_url.removeprefix(self.url)

    def find(self, selector: str) -> WebElement:
        """Return the first element that a CSS selector names, as soon as it is there."""
        return self.until(lambda: next(iter(self.all(selector)), None))

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str = "main") -> str:
        found = self.until(lambda: (self.find(selector).text,))
        return " ".join(found[0].split())

    def click(self, text: str) -> None:
        def clicked() -> tuple[bool]:
            for element in self.all("a, button"):
                if element.text.strip() == text:
                    element.click()
                    return (True,)
            return (False,)

        assert self.until(clicked)[0], f"nothing is called {text!r}: {self.text('body')}"

    def fill(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Ask again and again until the answer is true; return it.

        An element that a live page has exchanged meanwhile is looked for again.
        """
        waiting: WebDriverWait[Chrome] = WebDriverWait(
            self.driver, WAIT_S, 0.05, [StaleElementReferenceException]
        )
        return waiting.until(lambda _: condition())

    def run(self, script: str, *values: object) -> Any:
        return self.driver.execute_script(script, *values)

    def complaints(self) -> list[str]:
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    # --- how it is looked at ---------------------------------------------------------------

    def look(self, *, dark: bool = False, width: int = 1200, height: int = 800) -> None:
        """Take a scheme and a size of the window."""
        scheme = "dark" if dark else "light"
        self._command("Emulation.setEmulatedMedia", media="screen", features=[
            {"name": "prefers-color-scheme", "value": scheme}
        ])  # fmt: skip
        self._command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip

    def scripts(self, *, on: bool) -> None:
        self._command("Emulation.setScriptExecutionDisabled", value=not on)

    def picture(self, path: Path, height_max: int = 1400) -> None:
        size = self._command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0, "y": 0, "scale": 1,
            "width": size["width"], "height": min(size["height"], height_max),
        }  # fmt: skip
        taken = self._command(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        self.driver.get("about:blank")
        found = self.driver.execute_async_script(_FEWER_COLOURS, taken["data"])
        path.write_bytes(_png(found["width"], found["palette"], base64.b64decode(found["pixels"])))

    def _command(self, command: str, **values: object) -> dict[str, Any]:
        return dict(self.driver.execute_cdp_cmd(command, values))


@contextmanager
def browser(url: str = "") -> Iterator[Browser]:
    """Start a browser, with a fresh profile, until the block is left."""
    programs = [shutil.which(tool) for tool in TOOLS]
    assert all(programs), f"{' and '.join(TOOLS)} must be installed: run `make tools`"
    with TemporaryDirectory(prefix="txbroker-chromium-") as profile:
        options = ChromeOptions()
        options.binary_location = programs[0]
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        arguments = [
            "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", "--disable-background-networking", "--disable-sync",
            "--disable-component-update", "--force-color-profile=srgb", "--lang=en",
            f"--user-data-dir={profile}",
        ]  # fmt: skip
        if os.geteuid() == 0:
            # Chromium's sandbox does not work for root, as whom containers run tests.
            arguments.append("--no-sandbox")
        for argument in arguments:
            options.add_argument(argument)
        driver = Chrome(options, Service(programs[1]))
        try:
            yield Browser(driver, url)
        finally:
            driver.quit()
