"""A headless Chromium, which logs its console and its requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")


@contextmanager
def open_browser() -> Iterator[Any]:
    """Skips the test where Selenium or Chromium is missing."""
    selenium = pytest.importorskip("selenium.webdriver", reason="Selenium is not installed")
    if not (CHROMIUM.exists() and DRIVER.exists()):
        pytest.skip("Chromium is missing: apt-get install chromium chromium-driver")
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1200,900",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()
