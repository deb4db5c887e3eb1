"""The page at ``/`` in a headless browser: it asks the server, shows its answers and refusals."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from typer.testing import CliRunner

from opcast.cli.main import app
from opcast.common.parquet import read_table
from opcast.predict.sweep.run import pareto
from opcast.server import schemas

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

    def picture(self, name: str, last: str) -> None:
        """Draw a picture of the docs anew, if ``OPCAST_SCREENSHOTS`` names their folder.

        Args:
            name: Of the file.
            last: Selector of the last card in it.
        """
        if folder := os.environ.get("OPCAST_SCREENSHOTS"):
            self.page.mouse.move(0, 0)
            self.page.evaluate("scrollTo(0, 0)")
            box = self.page.locator(last).bounding_box()
            clip = {"x": 0, "y": 0, "width": 1280, "height": box["y"] + box["height"] + 16}
            self.page.screenshot(path=Path(folder, name), full_page=True, clip=clip)

    def close(self) -> None:
        """End, after checking that nothing went wrong, is cut off at the side or has no label."""
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert self.page.evaluate(wide) <= 0
        nameless = "(n) => !n.labels.length && !n.getAttribute('aria-label')"
        fields = "[...document.querySelectorAll('input, select, textarea')]"
        assert self.page.evaluate(f"{fields}.filter({nameless}).length") == 0
        self.page.close()
        assert self.trouble == []


def run(commands: str, folder: Path, files: Mapping[str, str], *more: str) -> Any:
    """What the last of the commands that a page shows prints as JSON, in a folder with files."""
    for name, content in files.items():
        (folder / name).write_text(content)
    with contextlib.chdir(folder):
        for line in commands.splitlines():
            own = more if line == commands.splitlines()[-1] else ()
            done = CliRunner().invoke(app, [*shlex.split(line)[1:], *own])
            assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_program_is_asked_for_each_device_and_its_report_is_shown(
    browser: Any, url: str, tmp_path: Path
) -> None:
    tab = Tab(browser, url, "")
    tab.page.check("input[value=tpu-v5e]")
    tab.page.click("button[type=submit]")
    devices = tab.text("#devices")
    assert "h100-sxm" in devices and "tpu-v5e" in devices and "µs" in devices
    printed = run(tab.text("#command"), tmp_path, {"program.mlir": schemas.PROGRAM}, "--json")
    assert [row["device"] for row in printed] == ["h100-sxm", "tpu-v5e"]
    assert all(f"{row['latency_us']:.3g}" in devices for row in printed)
    tab.page.click("#kernels button")
    report = tab.page.frame_locator("iframe").locator("#overview")
    report.wait_for()
    assert "µs" in report.inner_text()
    # A link reproduces the answer.
    more = "&model=default&trip_count=3"
    again = Tab(browser, url, tab.page.url.split("/")[-1] + more)
    assert again.text("#devices") == devices
    # What is chosen is in its Python, too.
    assert ', model="default", trip_counts=3)' in str(again.page.text_content("#python"))
    tab.close()
    again.close()


def test_sliders_say_at_once_what_the_command_prints(
    browser: Any, url: str, tmp_path: Path
) -> None:
    link = "#program?device=h100-sxm&workload=mlp&settings=batch=64,mode=train"
    tab = Tab(browser, url, link)
    tab.page.get_by_role("button", name="Show sliders").click()

    def slide(name: str, place: float) -> float:
        """Put a slider to a place; milliseconds that the answer takes."""
        node = f"document.querySelector('#change-{name}')"
        event = f"{node}.value = {place}; {node}.dispatchEvent(new Event('input'))"
        tab.page.wait_for_selector(f"#change-{name}:not([disabled])")
        timed = f"(() => {{ const t = performance.now(); {event}; return performance.now() - t; }})"
        return float(tab.page.evaluate(f"{timed}()"))

    def shown_and_printed() -> tuple[str, Any]:
        tab.page.wait_for_selector("#changed[data-by=server]")
        files = {}
        if tab.page.locator("#changed-file").count():
            files["what-if.yaml"] = tab.page.inner_text("#changed-file")
        printed = run(tab.page.inner_text("#changed-command"), tmp_path, files, "--json")
        return tab.page.inner_text("#change .figure"), printed

    # At a value that was asked for, and between two of them, where the page first interpolates.
    assert slide("boost_mhz", 0) < 300
    shown, printed = shown_and_printed()
    assert f"{printed['latency_us']:.3g}" in shown and printed["device"] == "what-if"
    assert slide("batch", 2.5) < 300
    about = tab.page.inner_text("#change .figure")
    assert tab.page.get_attribute("#changed", "data-by") == "interpolation"
    assert slide("power_cap_w", 3) < 300
    shown, printed = shown_and_printed()
    assert f"{printed['latency_us']:.3g}" in shown
    assert "--set batch=91,mode=train" in tab.text("#changed-command")
    assert float(about.split("µs")[0]) == pytest.approx(printed["latency_us"], rel=0.3)
    # A link reproduces what was changed.
    again = Tab(browser, url, tab.page.url.split("/")[-1])
    again.page.wait_for_selector("#changed[data-by=server]")
    assert again.page.inner_text("#change .figure") == shown
    tab.picture("explorer-program.png", "#change")
    tab.close()
    again.close()


@pytest.mark.parametrize("width", [360, 2560])
def test_a_step_is_what_the_command_beside_it_prints(
    browser: Any, url: str, width: int, tmp_path: Path
) -> None:
    tab = Tab(browser, url, TRAINING, width)
    shown = tab.text("#step")
    answer = run(tab.text("#command"), tmp_path, {}, "--json")
    seconds = answer["latency_us"] / 1e6
    assert f"{seconds:.3g}" in shown and f"{100 * answer['mfu']:.1f}" in shown
    trained = answer["run"]
    assert trained["days"] > 1e12 / answer["tokens_per_s"] / 86400
    assert f"{trained['days']:.3g} days" in shown
    with tab.page.expect_download() as saved:
        tab.page.get_by_role("button", name="JSON").click()
    (kept,) = json.loads(Path(saved.value.path()).read_text())
    assert kept["latency_us"] == pytest.approx(answer["latency_us"])
    tab.close()


CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 32000,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def test_plans_of_a_pasted_model_are_what_sweep_writes(
    browser: Any, url: str, tmp_path: Path
) -> None:
    config = json.dumps(CONFIG)
    query = {
        "config": config, "cluster": "dgx-h100-x16", "batch": 64, "price": 2, "tokens": 100,
        "grid": "tp=1/2,pp=1,recompute=none,split=1",
    }  # fmt: skip
    tab = Tab(browser, url, f"#plans?{urlencode(query)}")
    shown = tab.text("#plans")
    command = tab.text("#command")
    (tmp_path / "config.json").write_text(config)
    with contextlib.chdir(tmp_path):
        done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    front = pareto(read_table(tmp_path / "plans" / "sweep.parquet"))
    assert f"{len(front)} that no other beats" in shown
    best = front.iloc[0]
    assert best["plan"] in shown and f"{best['step_us'] / 1e3:.3g}\xa0ms" in shown
    days = 100e9 / best["tokens_per_s"] / 86400
    assert f"{days:.3g}" in shown and f"${days * 24 * 16 * 2:,.0f}" in shown
    with tab.page.expect_download() as saved:
        tab.page.locator("#plans").get_by_role("button", name="PNG").click()
    assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")
    tab.picture("explorer-plans.png", "#plans")
    # A plan is a link to its step.
    tab.page.get_by_role("link", name=best["plan"], exact=True).click()
    step = tab.text("#step")
    printed = run(tab.text("#command"), tmp_path, {}, "--json")
    assert f"{printed['latency_us'] / 1e3:.3g}" in step
    assert f"{printed['run']['days']:.3g} days" in step
    tab.close()


def test_deployments_are_what_plan_serving_prints(browser: Any, url: str, tmp_path: Path) -> None:
    query = {
        "workload": "llama-3.1-8b", "device": "h100-sxm", "gpus": 1, "framework": "vllm",
        "load": "concurrency=8,prompt=512,output=64,count=32", "slo": "tpot=30ms", "price": 2,
    }  # fmt: skip
    tab = Tab(browser, url, f"#deployments?{urlencode(query)}", width=360)
    shown, launched = tab.text("#best"), tab.text("#launch")
    printed = run(tab.text("#command"), tmp_path, {}, "--json")
    best = printed["best"]
    assert best["deployment"] in shown and f"{best['p90_tpot_ms']:.3g}" in shown
    assert f"{best['output_throughput_per_gpu']:.0f}" in shown
    assert f"${best['dollars_per_million_tokens']:.3g}" in shown
    assert all(command in launched for command in printed["commands"].values())
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
