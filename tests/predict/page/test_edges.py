"""Pages of programs that are unusual: empty, optimised already, with loops, with collectives."""

import pytest

from opcast.features.lowering.options import LoweringOptions
from opcast.predict.page.report import ReportOptions, report_page

from ..pages import Watched, running_browser
from .test_report import SCHEDULE

EMPTY = """
module @m {
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    return %arg0 : tensor<4xf32>
  }
}
"""
LOOP = """
module @m {
  func.func public @main(%arg0: tensor<256x256xf32>) -> tensor<256x256xf32> {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %n = stablehlo.constant dense<7> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %0:2 = stablehlo.while(%i = %c, %x = %arg0) : tensor<i32>, tensor<256x256xf32>
      cond {
        %1 = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %1 : tensor<i1>
      } do {
        %2 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] :
          (tensor<256x256xf32>, tensor<256x256xf32>) -> tensor<256x256xf32>
        %3 = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %3, %2 : tensor<i32>, tensor<256x256xf32>
      }
    return %0#1 : tensor<256x256xf32>
  }
}
"""


@pytest.fixture(scope="module")
def browser():
    with running_browser() as found:
        yield found


@pytest.fixture
def show(browser, predictor, tmp_path):
    """Opens the page of a program; nothing may have gone wrong at the end."""
    opened = []

    def open_page(program, device="h100-sxm", lowering="auto", **options):
        path = tmp_path / "page.html"
        asked = ReportOptions(LoweringOptions(lowering, device), **options)
        path.write_text(report_page(predictor, program, asked))
        opened.append(Watched(browser, path))
        return opened[-1].tab

    yield open_page
    for watched in opened:
        watched.close()


def test_an_empty_program_has_a_page(show):
    tab = show(EMPTY, lowering="op", compare=("l4",))
    assert "No kernel matches" in tab.locator("#kernels tbody").inner_text()
    tab.locator("#timeline canvas").focus()
    tab.keyboard.press("+")
    assert "NaN" not in tab.locator("body").inner_text()
    assert "Infinity" not in tab.locator("body").inner_text()


def test_neighbours_of_a_model_that_keeps_them(show, step, device):
    tab = show(step, device, lowering="op", compare=())
    assert "worker 1" in tab.locator("#timeline canvas").get_attribute("aria-label")
    tab.locator("#kernels tbody tr", has_text="gemm").first.click()
    details = tab.locator("#details").inner_text()
    assert "Nearest measured kernels" in details and "learned factor" in details
    assert tab.locator("#details table tbody tr").count() == 3


def test_loops_count_their_runs(show):
    tab = show(LOOP, lowering="op", compare=())
    row = tab.locator("#kernels tbody tr", has_text="gemm")
    heads = tab.locator("#kernels th").all_inner_texts()
    cells = row.locator("td").all_inner_texts()
    assert cells[[h.split()[0] for h in heads].index("runs")] == "7"
    assert tab.locator("#devices").count() == 0


def test_an_optimised_program_is_compared_as_it_is(show):
    tab = show(SCHEDULE, compare=("h100-sxm", "l4"))
    says = tab.locator("#devices .says").inner_text()
    assert "as they are" in says and "fused" not in says
    assert tab.locator("#devices tbody tr").count() == 2
    assert "communication" in tab.locator("#kinds").inner_text()
