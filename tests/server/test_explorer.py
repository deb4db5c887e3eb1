"""The page at ``/`` in a headless browser: it asks the server, shows its answers and refusals."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from opcast.cli.main import app

from ..predict.pages import running_browser

TRAINING = (
    "#training?workload=llama-3-8b&cluster=dgx-h100-x16&plan=tp=8,dp=2&batch=64&tokens=1000&price=2"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as found:
        yield found


class Tab:
    """A page of the server that remembers what went wrong, and whom it asked."""

    def __init__(self, browser: Any, url: str, link: str, width: int = 1280) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.page.set_default_timeout(60_000)
        self.trouble: list[str] = []
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", lambda r: self._asked(r.url, url))
        self.page.goto(f"{url}/{link}")

    def _asked(self, target: str, url: str) -> None:
        if not target.startswith((url, "data:", "blob:")):
            self.trouble.append(target)

    def text(self, selector: str) -> str:
        """What an element says, once it is there."""
        self.page.wait_for_selector(selector)
        return str(self.page.inner_text(selector))

    def close(self) -> None:
        """End, after checking that nothing went wrong and nothing is cut off at the side."""
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert self.page.evaluate(wide) <= 0
        self.page.close()
        assert self.trouble == []


def test_a_program_is_asked_for_each_device_and_its_report_is_shown(browser: Any, url: str) -> None:
    tab = Tab(browser, url, "")
    tab.page.check("input[value=tpu-v5e]")
    tab.page.click("button[type=submit]")
    devices = tab.text("#devices")
    assert "h100-sxm" in devices and "tpu-v5e" in devices and "µs" in devices
    assert "--device h100-sxm --device tpu-v5e" in tab.text("#command")
    tab.page.click("#kernels button")
    report = tab.page.frame_locator("iframe").locator("#overview")
    report.wait_for()
    assert "µs" in report.inner_text()
    # A link reproduces the answer.
    again = Tab(browser, url, tab.page.url.split("/")[-1])
    assert again.text("#devices") == devices
    tab.close()
    again.close()


@pytest.mark.parametrize("width", [360, 2560])
def test_a_step_is_what_the_command_beside_it_prints(browser: Any, url: str, width: int) -> None:
    tab = Tab(browser, url, TRAINING, width)
    shown = tab.text("#step")
    command = shlex.split(tab.text("#command"))
    done = CliRunner().invoke(app, [*command[1:], "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    seconds = answer["latency_us"] / 1e6
    assert f"{seconds:.3g}" in shown and f"{100 * answer['mfu']:.1f}" in shown
    days = 1e12 / answer["tokens_per_s"] / 86400
    assert f"{days:.3g} days" in shown
    with tab.page.expect_download() as saved:
        tab.page.get_by_role("button", name="JSON").click()
    (kept,) = json.loads(Path(saved.value.path()).read_text())
    assert kept["latency_us"] == pytest.approx(answer["latency_us"])
    tab.close()


def test_questions_are_compared_and_refusals_are_the_servers_words(browser: Any, url: str) -> None:
    tab = Tab(browser, url, TRAINING)
    tab.text("#elsewhere")
    tab.page.get_by_role("button", name="Compare").click()
    assert "one training step" in tab.text("#compared")
    tab.page.get_by_role("link", name="Serving", exact=True).click()
    tab.page.fill("input[name=workload]", "no-such-model")
    tab.page.click("button[type=submit]")
    body = {"workload": "no-such-model", "device": "h100-sxm", "framework": "vllm", "rate": 4}
    said = httpx.post(f"{url}/v1/simulate-serving", json=body | {"count": 200}, timeout=60).json()
    assert said["what"] in tab.text("[role=alert]")
    # What was compared is still there by its link.
    tab.page.go_back()
    assert "--workload llama-3-8b" in tab.text("#compared")
    tab.close()
