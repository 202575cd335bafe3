"""A real browser without a screen: Chromium, driven by selenium, with what the page said and asked of the network."""

import base64
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@dataclass
class Browser:
    """A browser with a page open."""

    driver: Any

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Open a file on a screen `width` pixels wide, in the colours of a `light` or `dark` scheme."""
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.logs()
        self.driver.get(page.as_uri())

    def run(self, script: str) -> Any:
        """Return what a function's body in JavaScript returns."""
        return self.driver.execute_script(script)

    def logs(self) -> tuple[list[str], list[str]]:
        """Return what was said on the console, and what addresses were asked for, since the last call."""
        said = [entry["message"] for entry in self.driver.get_log("browser")]
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
        return said, asked

    def photograph(self, path: Path) -> None:
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium; skips the test where it is missing, or fails it where TWELLC_REQUIRE_BROWSER=1."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    reason = "" if program and driver else "there is no chromium with its chromedriver (apt install chromium-driver)"
    try:
        from selenium import webdriver
    except ImportError:
        reason = "selenium is not installed"
    if reason:
        if os.environ.get("TWELLC_REQUIRE_BROWSER") == "1":
            pytest.fail(f"TWELLC_REQUIRE_BROWSER=1, but {reason}")
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = str(program)
    for argument in (*_ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield Browser(running)
    running.quit()
