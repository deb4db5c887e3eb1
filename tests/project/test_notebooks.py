"""The notebooks: each is run from top to bottom."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
#: Words that each notebook prints at its end and in between.
PRINTS = {
    "training": ("s a step, 90 % interval", "tp=8,dp=8", "costs"),
    "serving": ("ttft/p99", "in flight", "vllm serve"),
    "own-device": ("unseen", "calibrated", "times as long as before"),
}


def cells(name: str) -> list[dict[str, object]]:
    """Cells of a notebook."""
    data = json.loads((DOCS / "notebooks" / f"{name}.ipynb").read_text("utf-8"))
    assert (data["nbformat"], data["nbformat_minor"]) == (4, 5)
    found: list[dict[str, object]] = data["cells"]
    return found


def source(cell: dict[str, object]) -> str:
    """Text of a cell."""
    lines = cell["source"]
    assert isinstance(lines, list)
    return "".join(map(str, lines))


def test_all_notebooks_are_known_and_linked() -> None:
    assert {path.stem for path in (DOCS / "notebooks").glob("*.ipynb")} == set(PRINTS)
    index = (DOCS / "index.md").read_text("utf-8")
    assert all(f"(notebooks/{name}.ipynb)" in index for name in PRINTS)


@pytest.mark.parametrize("name", PRINTS)
def test_a_notebook_is_short_and_keeps_no_output(name: str) -> None:
    own = cells(name)
    assert own[0]["cell_type"] == "markdown" and source(own[0]).startswith("# ")
    assert len(own) <= 12 and len({cell["id"] for cell in own}) == len(own)
    assert all(not cell.get("outputs") for cell in own)


@pytest.mark.parametrize("name", PRINTS)
def test_a_notebook_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = [source(cell) for cell in cells(name) if cell["cell_type"] == "code"]
    script = tmp_path / f"{name.replace('-', '_')}_cells.py"
    script.write_text("\n\n".join(code), "utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    for words in PRINTS[name]:
        assert words in printed
