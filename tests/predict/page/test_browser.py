"""Pages in a headless browser: they draw, they answer, they ask nobody, they can be read."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from opcast.features.devices.device import MemoryLevel
from opcast.features.ir.reader import read_program
from opcast.features.lowering.lower import lower
from opcast.features.lowering.options import LoweringOptions
from opcast.features.table.roofline import memory_seconds
from opcast.predict.devices import resolve_device
from opcast.predict.page import Page, assemble
from opcast.predict.page.assemble import STYLE, _static
from opcast.predict.page.report import SCRIPTS, ReportOptions, report_data, report_page

from ...support.cases import later
from ..pages import Watched, colours, running_browser
from .test_report import ATTACK, PLANTED

DEVICES = ("h100-sxm", "l4", "tpu-v4")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(2048, name="down")(
            nn.gelu(nn.Dense(8192, name="up")(nn.LayerNorm()(x)))
        )


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = Block()(x)
        return jnp.mean(x**2)


@pytest.fixture(scope="module")
def step():
    """A train step with modules, large enough that arithmetic and memory take its time."""
    net, x = Net(), jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16)
    weights = jax.eval_shape(net.init, jax.random.key(0), x)

    def train(weights, x):
        grads = jax.grad(net.apply)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    return jax.jit(train).lower(weights, x)


@pytest.fixture(scope="module")
def browser():
    with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def gpu(predictor):
    return resolve_device("h100-sxm", predictor.devices)


@pytest.fixture(scope="module")
def page_file(predictor, step, gpu, tmp_path_factory):
    options = ReportOptions(LoweringOptions("fused", gpu), compare=DEVICES, title="step")
    path = tmp_path_factory.mktemp("pages") / "step.html"
    path.write_text(report_page(predictor, step, options))
    return path


@pytest.fixture
def watched(browser, page_file):
    found = Watched(browser, page_file)
    yield found
    found.close()


def first_cells(tab, column):
    return tab.locator(f"#kernels tbody tr td:nth-child({column})").all_inner_texts()


def test_every_section_is_there_and_linked(watched):
    tab = watched.tab
    for link in tab.locator("nav.sections a").all():
        assert tab.locator(link.get_attribute("href")).count() == 1
    assert tab.title() == "step on h100-sxm"
    assert tab.locator(".total .figure").inner_text().endswith("ms")
    assert tab.locator("#devices tbody tr").count() == len(DEVICES)
    assert "fused" in tab.locator("#devices .says").inner_text()


def test_sorting_and_search(watched):
    tab = watched.tab
    times = first_cells(tab, 4)
    shares = [float(t.split()[0]) for t in times]
    assert shares == sorted(shares, reverse=True)
    search = tab.locator("#kernels input[type=search]")
    search.fill("gemm")
    head = tab.locator("#kernels th button", has_text="kernel")
    head.click()
    names = first_cells(tab, 1)
    assert tab.locator("#kernels th[aria-sort]").get_attribute("aria-sort") == "ascending"
    head.click()
    assert len(names) > 5 and first_cells(tab, 1) == names[::-1]
    assert {k.strip() for k in first_cells(tab, 2)} == {"gemm"}
    search.fill("gemm and-nothing-else")
    assert "No kernel matches" in tab.locator("#kernels tbody").inner_text()
    search.fill("")
    first = first_cells(tab, 1)
    tab.get_by_role("button", name="Next").click()
    assert not set(first) & set(first_cells(tab, 1))
    tab.get_by_label("Kind").select_option("reduce")
    assert {k.strip() for k in first_cells(tab, 2)} == {"reduce"}


def test_a_kernel_shows_its_reasons(watched):
    tab = watched.tab
    name = first_cells(tab, 1)[0]
    tab.locator("#kernels tbody tr button").first.focus()
    tab.keyboard.press("Enter")
    details = tab.locator("#details")
    assert name in details.inner_text()
    for word in ("90 % interval", "of the roofline", "floor", "module"):
        assert word in details.inner_text()
    assert tab.locator("#kernels tbody tr[aria-selected=true]").count() == 1
    details.get_by_role("button", name="Close").click()
    assert tab.locator("#details").count() == 0


def test_the_roofline_answers_to_keys_and_pointer(watched):
    tab = watched.tab
    canvas = tab.locator("#roofline canvas")
    canvas.focus()
    watched.settle()
    before = watched.pixels("#roofline canvas")
    tab.keyboard.press("ArrowRight")
    assert first_cells(tab, 1)[0] in tab.locator("#details").inner_text()
    watched.settle()
    # What has changed is the point that the key has chosen.
    rows, columns = np.nonzero((watched.pixels("#roofline canvas") != before).any(axis=2))
    canvas.hover(position={"x": int(np.median(columns)), "y": int(np.median(rows))})
    assert tab.locator("#tip").is_visible()
    assert "roofline" in tab.locator("#tip").inner_text()


def test_the_timeline_zooms_and_moves(watched):
    tab = watched.tab
    shown = tab.locator("#timeline .tools span")
    whole = shown.inner_text()
    canvas = tab.locator("#timeline canvas")
    before = watched.pixels("#timeline canvas")
    canvas.focus()
    for _ in range(4):
        tab.keyboard.press("+")
    zoomed = shown.inner_text()
    assert zoomed != whole
    watched.settle()
    assert (watched.pixels("#timeline canvas") != before).any()
    tab.get_by_role("button", name="All").click()
    assert shown.inner_text() == whole
    box = canvas.bounding_box()
    tab.mouse.move(box["x"] + 300, box["y"] + 12)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 420, box["y"] + 12, steps=3)
    tab.mouse.up()
    assert shown.inner_text() != whole


def test_modules_open_and_layers_split(watched):
    tab = watched.tab
    rows = tab.locator("#origin tbody tr")
    assert any("Block_*" in row for row in rows.all_inner_texts())
    tab.get_by_role("button", name="Each layer").click()
    assert {"Block_0", "Block_1", "Block_2"} <= {
        word for row in rows.all_inner_texts() for word in row.split()
    }
    twist = tab.get_by_role("button", name="Block_1: parts")
    opened = twist.get_attribute("aria-expanded")
    twist.focus()
    tab.keyboard.press("Enter")
    assert twist.get_attribute("aria-expanded") != opened
    assert twist.evaluate("node => node === document.activeElement")
    tab.get_by_role("button", name="Source lines").click()
    assert any(re.search(r"\.py:\d+", row) for row in rows.all_inner_texts())


@pytest.mark.parametrize("slider", ["bandwidth", "cores"])
def test_sliders_follow_the_roofline(watched, predictor, step, gpu, slider):
    """Twice the bandwidth, or twice the cores, as computed here from the same kernels."""
    tab = watched.tab
    lowered = lower(read_program(step), "fused", device=gpu)
    data = report_data(predictor, read_program(step), lowered, gpu)
    columns = {
        name: np.array(data["kernels"]["columns"][name], float)
        for name in ("busy", "bytes", "compute", "memory")
    }
    main = gpu.levels[-1]
    levels = (*gpu.levels[:-1], MemoryLevel(main.capacity, 2 * main.bandwidth))
    compute, memory = columns["compute"], columns["memory"]
    floor = gpu.floor * 1e6
    before = np.maximum(compute, memory) + floor
    if slider == "cores":
        compute = compute / 2
    else:
        memory = memory_seconds(columns["bytes"], replace(gpu, levels=levels)) * 1e6
    busy = columns["busy"] * (np.maximum(compute, memory) + floor) / before
    expected = data["total"]["us"] - columns["busy"].sum() + busy.sum()
    tab.locator(f"#slider-{slider}").fill("1")
    shown, unit = tab.locator("#whatif .figure").inner_text().split("\u00a0")
    assert unit == "ms"
    assert float(shown) == pytest.approx(expected / 1e3, rel=5e-3)
    assert "times as fast" in tab.locator("#whatif .verdict").inner_text()
    tab.get_by_role("button", name="Reset").click()
    assert "as predicted" in tab.locator("#whatif .verdict").inner_text()


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 390), ("dark", 1280), later("light", 1280), later("dark", 390)]
)
def test_both_modes_draw_at_any_width(browser, page_file, scheme, width):
    watched = Watched(browser, page_file, scheme=scheme, width=width)
    bright = watched.pixels().mean()
    assert bright > 200 if scheme == "light" else bright < 80
    for part in ("#overview", "#kinds table", "#timeline canvas", "#roofline canvas"):
        assert colours(watched.pixels(part)) > 8, part
    wide = watched.tab.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    watched.close()


def test_the_switch_changes_the_mode_and_drawings(watched):
    light = watched.pixels("#timeline canvas")
    watched.tab.get_by_role("button", name="Dark").click()
    watched.settle()
    assert watched.tab.evaluate("document.documentElement.dataset.theme") == "dark"
    dark = watched.pixels("#timeline canvas")
    assert dark.mean() < light.mean() - 60
    assert watched.pixels().mean() < 80
    watched.tab.get_by_role("button", name="Auto").click()
    watched.settle()
    assert watched.pixels().mean() > 200


def test_print_is_light_and_without_controls(browser, page_file):
    watched = Watched(browser, page_file, scheme="dark")
    watched.tab.emulate_media(media="print")
    watched.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    watched.settle()
    assert not watched.tab.locator("nav.sections").is_visible()
    assert not watched.tab.locator(".switch").first.is_visible()
    assert watched.pixels().mean() > 200
    watched.close()


def test_everything_has_a_name(watched):
    unnamed = watched.tab.evaluate("""
      [...document.querySelectorAll("button, input, select, canvas")].filter((node) =>
        !(node.getAttribute("aria-label") || node.textContent.trim() || node.labels?.length))
        .map((node) => node.outerHTML)""")
    assert unnamed == []
    assert watched.tab.evaluate("document.querySelectorAll('h1').length") == 1
    assert watched.tab.evaluate("document.documentElement.lang") == "en"


def test_planted_markup_is_shown_and_not_run(browser, predictor, tmp_path):
    program = tmp_path / "a<b onmouseover=window.planted=3>.mlir"
    program.write_text(ATTACK)
    page = tmp_path / "attack.html"
    page.write_text(
        report_page(predictor, program, ReportOptions(LoweringOptions("fused", "h100-sxm"), ()))
    )
    watched = Watched(browser, page)
    tab = watched.tab
    tab.locator("#kernels tbody tr").first.click()
    tab.locator("#timeline canvas").hover(position={"x": 300, "y": 50})
    tab.get_by_role("button", name="Source lines").click()
    watched.settle()
    assert tab.evaluate("window.planted") is None
    assert tab.locator("#page img, #page script").count() == 0
    assert PLANTED in tab.locator("#details").inner_text()
    watched.close()


@pytest.mark.slow
def test_twenty_thousand_kernels_stay_fluid(browser, page_file, predictor, step, gpu, tmp_path):
    lowered = lower(read_program(step), "fused", device=gpu)
    data = report_data(predictor, read_program(step), lowered, gpu)
    columns = data["kernels"]["columns"]
    times, length = 20_000 // len(columns["name"]), data["total"]["us"]
    for name, values in columns.items():
        moved = length if name in ("start", "end") else 0
        columns[name] = [
            v if isinstance(v, str) else v + moved * i for i in range(times) for v in values
        ]
    data["total"] = {key: value * times for key, value in data["total"].items()}
    data["program"] = "long"
    path = tmp_path / "long.html"
    path.write_text(assemble(Page("long", data, SCRIPTS)))
    long, short = Watched(browser, path), Watched(browser, page_file)
    # Both on the machine as it is now, whatever else it does; short ones first and last.
    times = [shortest_frame(own.tab) for own in (short, long, short)]
    assert times[1] < 4 * max(times[0], times[2])
    long.close()
    short.close()


def shortest_frame(tab):
    """Milliseconds from a key that zooms the timeline to the end of the next frame."""
    tab.bring_to_front()
    return tab.evaluate("""async () => {
      const node = document.querySelector("#timeline canvas");
      const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      const spans = [];
      node.focus();
      for (let i = 0; i < 16; i++) {
        const from = performance.now();
        node.dispatchEvent(new KeyboardEvent("keydown", { key: i % 2 ? "-" : "+", bubbles: true }));
        await frame();
        spans.push(performance.now() - from);
      }
      return Math.min(...spans);
    }""")


def test_colours_can_be_read():
    """Contrast of at least 4.5 to 1 (WCAG 2.2, 1.4.3) of all text on what it stands on."""
    style = _static(STYLE)
    for rule in (r":root \{(.*?)\n\}", r':root\[data-theme="dark"\] \{(.*?)\n\}'):
        block = re.search(rule, style, re.DOTALL)[1]
        shade = dict(re.findall(r"--([\w]+(?:-\w+)?): (#[0-9a-f]{6})", block))
        for text in ("ink", "soft", "faint"):
            for ground in ("bg", "panel", "sunk"):
                assert contrast(shade[text], shade[ground]) >= 4.5, (text, ground)
        assert contrast(shade["warn-ink"], shade["warn-bg"]) >= 4.5
        assert contrast(shade["accent"], shade["panel"]) >= 4.5
        assert contrast(shade["bad"], shade["panel"]) >= 4.5


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(shade):
    parts = [int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
