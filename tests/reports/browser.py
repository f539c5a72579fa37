"""A real browser without a window, for tests of pages."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LOADING_SECONDS = 20.0
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1600,950",
)


class Browser:
    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, place: str = "") -> None:
        self.driver.get("about:blank")  # or only the place in the page would change
        self.driver.get(f"{page.as_uri()}#{place}")
        end = time.monotonic() + LOADING_SECONDS
        while self.ask("document.readyState") != "complete" and time.monotonic() < end:
            time.sleep(0.02)  # where the machine is busy, the driver does not wait for all of a page
        assert self.ask("document.documentElement.dataset.ready"), self.problems()

    def ask(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def texts(self, selector: str) -> list[str]:
        """Of what is there now; rows come and go as one scrolls."""
        return list(self.ask(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)"))

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def resize(self, width: int, height: int) -> None:
        """Of what the page sees. A window without a screen may refuse to be as narrow as a phone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def problems(self) -> list[str]:
        """What the console has said since the last time."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]


def browsers(folder: Path) -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install .[browser]")
    binary = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium with its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for switch in (*SWITCHES, f"--user-data-dir={folder}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(found)
    finally:
        found.quit()
