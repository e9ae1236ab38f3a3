"""Debian's Chromium, driven through its own driver: nothing is downloaded."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

TOOLS = ("chromium", "chromedriver")
WAIT_S = 20.0
"""How long a condition may take to come true, on a busy machine."""


class Browser:
    """One window.

    Args:
        driver: the browser, started.
        url: where the console is.
    """

    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, path: str) -> None:
        """Go to a page of the console."""
        self.driver.get(self.url + path)

    @property
    def path(self) -> str:
        """Where the window is, without the console's address."""
        return self.driver.current_url.removeprefix(self.url)

    def find(self, selector: str) -> WebElement:
        """Return the first element that a CSS selector names, as soon as it is there."""
        return self.until(lambda: next(iter(self.all(selector)), None))

    def all(self, selector: str) -> list[WebElement]:
        """Return all that are there now."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str = "main") -> str:
        """Return what is read there now, blanks as one."""
        return " ".join(self.find(selector).text.split())

    def click(self, text: str) -> None:
        """Follow the first link, or press the first button, with this text."""
        for element in self.all("a, button"):
            if element.text.strip() == text:
                element.click()
                return
        raise AssertionError(f"nothing is called {text!r}: {self.text('body')}")

    def fill(self, selector: str, text: str) -> None:
        """Put text into a field."""
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Ask again and again until the answer is true; return it."""
        waiting: WebDriverWait[Chrome] = WebDriverWait(self.driver, WAIT_S, 0.05)
        return waiting.until(lambda _: condition())

    def run(self, script: str, *values: object) -> Any:
        """Run a script in the page, as somebody with the developer's tools could."""
        return self.driver.execute_script(script, *values)

    def complaints(self) -> list[str]:
        """Return what the browser has complained of since the last call."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    # --- how it is looked at ---------------------------------------------------------------

    def look(self, *, dark: bool = False, width: int = 1200, height: int = 800) -> None:
        """Take a scheme and a size of the window."""
        scheme = "dark" if dark else "light"
        self._tell("Emulation.setEmulatedMedia", media="screen", features=[
            {"name": "prefers-color-scheme", "value": scheme}
        ])  # fmt: skip
        self._tell(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip

    def scripts(self, *, on: bool) -> None:
        """Let pages run scripts, or not."""
        self._tell("Emulation.setScriptExecutionDisabled", value=not on)

    def picture(self, path: Path, height_max: int = 1400) -> None:
        """Take a picture of the page, from its top."""
        size = self._tell("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0, "y": 0, "scale": 1,
            "width": size["width"], "height": min(size["height"], height_max),
        }  # fmt: skip
        taken = self._tell(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        path.write_bytes(base64.b64decode(taken["data"]))

    def _tell(self, command: str, **values: object) -> dict[str, Any]:
        return dict(self.driver.execute_cdp_cmd(command, values))


@contextmanager
def browser(url: str = "") -> Iterator[Browser]:
    """Start a browser, with a profile of its own, until the block is left."""
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
