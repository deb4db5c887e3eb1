"""A headless browser for the tests of pages, and what they all look at."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: Keeps Chromium from asking anybody anything.
QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def browser_path() -> str:
    """A browser; skips the test, with the reason, where there is none."""
    pytest.importorskip("playwright", reason="playwright is not installed: pip install '.[dev]'")
    named = os.environ.get("OPCAST_BROWSER")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip("no browser here: make browser, or set OPCAST_BROWSER")
    return found


@contextmanager
def running_browser() -> Iterator[object]:
    from playwright.sync_api import sync_playwright

    path = browser_path()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(QUIET))
        yield browser
        browser.close()


class Watched:
    """A page in the browser that remembers what went wrong."""

    def __init__(self, browser, path: Path, *, scheme="light", width=1280, height=900):
        self.tab = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.tab.set_default_timeout(15_000)
        self.trouble: list[str] = []
        self.tab.on("console", lambda m: self.trouble.append(f"console: {m.text}"))
        self.tab.on("pageerror", lambda e: self.trouble.append(f"error: {e}"))
        self.tab.on("request", self._asked)
        self.tab.goto(path.as_uri())
        self.tab.wait_for_selector("main section")
        self.settle()

    def _asked(self, request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.trouble.append(f"request: {request.url}")

    def settle(self) -> None:
        """Two frames, after which everything is drawn."""
        self.tab.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def pixels(self, selector: str | None = None) -> np.ndarray:
        """Red, green and blue of the page or an element, shape ``(height, width, 3)``."""
        from PIL import Image

        shot = self.tab.locator(selector).screenshot() if selector else self.tab.screenshot()
        return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB"), np.int64)

    def close(self) -> None:
        """End, after checking that nothing went wrong on the way."""
        self.tab.close()
        assert self.trouble == []


def colours(pixels: np.ndarray) -> int:
    """Number of distinct colours."""
    return len(np.unique(pixels.reshape(-1, 3) @ np.array([65536, 256, 1])))
