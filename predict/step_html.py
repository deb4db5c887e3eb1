"""A predicted step as one HTML page without anything from elsewhere: breakdown, timeline, memory.

Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

from html import escape

from ..simulate.step.trace import step_events
from .render import duration, size
from .render_step import breakdown
from .step import StepPrediction

#: Most spans that are drawn; what lies beyond is left out and said so.
MOST_SPANS = 6000
_WIDTH, _ROW = 1000, 22
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #66707c; --page: #ffffff; --line: #d9dee4;
  --forward: #3b7dd8; --backward: #2a9d6f; --weights: #8a63c9; --exposed: #d9534f;
  --update: #c9932b; --bubble: #c3cad2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa5b1; --page: #14171b;
  --line: #333a42; --forward: #5b9bee; --backward: #46bd8d; --weights: #a888e0; --exposed: #ee7672;
  --update: #e0b252; --bubble: #49525c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 1040px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem 1rem .2rem 0; text-align: left;
  border-bottom: 1px solid var(--line); } td.n { text-align: right; }
.soft { color: var(--soft); } svg { width: 100%; height: auto; } svg text { fill: var(--ink);
  font-size: 11px; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
"""
_COLOURS = {
    "forward": "forward", "backward": "backward", "weight gradients": "weights",
    "exposed": "exposed", "update": "update", "computation": "forward",
    "exposed communication": "exposed", "bubble": "bubble",
}  # fmt: skip


def step_html(found: StepPrediction) -> str:
    """The page."""
    s = found.step
    title = f"{found.workload.parameters / 1e9:.1f}B parameters on {found.cluster}"
    head = (
        f"<p><b>{duration(s.total * 1e6)}</b> a step (90 % interval {duration(found.lo * 1e6)} to "
        f"{duration(found.hi * 1e6)}), {found.flops_per_device / 1e12:.0f} TFLOP/s a device, "
        f"{found.flops_per_device / found.peak_flops:.1%} of its peak.</p>"
        f"<p class='soft'>plan {escape(found.plan.text())}; {found.plan.microbatches} "
        f"micro-batches; sequences of {found.workload.seq} tokens, {found.workload.batch} a step"
        "</p>"
    )
    notes = "".join(f"<p>Note: {escape(note)}</p>" for note in found.notes())
    parts = [
        f"<h1>{escape(title)}</h1>", head, notes,
        "<h2>Where the time goes</h2>", _bar(found),
        _rows(
            [(n, duration(v * 1e6), f"{v / s.total:.1%}") for n, v in breakdown(found)],
        ),
        "<h2>Timeline</h2>", _timeline(found),
        "<h2>Operators of the busiest stage</h2>", _operators(found),
        "<h2>Communication, hidden or not</h2>",
        _rows([(n, duration(v * 1e6), f"{v / s.total:.1%}") for n, v in s.communication.items()]),
        "<h2>Memory of the fullest device</h2>", _memory(found),
    ]  # fmt: skip
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"{''.join(parts)}</body></html>\n"
    )


def _bar(found: StepPrediction) -> str:
    x, shapes = 0.0, []
    for name, value in breakdown(found):
        width = value / found.step.total * _WIDTH
        shapes.append(_rect(x, 0, width, _ROW, _COLOURS[name], f"{name} {duration(value * 1e6)}"))
        x += width
    keys = "".join(_key(name) for name, _ in breakdown(found))
    return f"<svg viewBox='0 0 {_WIDTH} {_ROW}'>{''.join(shapes)}</svg><p>{keys}</p>"


def _timeline(found: StepPrediction) -> str:
    spans = step_events(found.step, found.plan)
    left = len(spans) - MOST_SPANS
    spans = spans[:MOST_SPANS]
    end = max((s["end"] for s in spans), default=1.0)
    stages = sorted({s["stage"] for s in spans})
    rows = {stage: i for i, stage in enumerate(stages)}
    wide = _WIDTH - 70
    shapes = [
        f"<text x='0' y='{rows[stage] * _ROW + 14}'>stage {stage}</text>"
        f"<rect x='70' y='{rows[stage] * _ROW + 2}' width='{wide}' height='{_ROW - 4}' "
        "fill='var(--bubble)' opacity='.35'/>"
        for stage in stages
    ]
    for s in spans:
        x, width = 70 + s["start"] / end * wide, (s["end"] - s["start"]) / end * wide
        text = f"{s['name']}, {s['track']}: {duration(s['end'] - s['start'])}"
        y = rows[s["stage"]] * _ROW + 2
        shapes.append(_rect(x, y, width, _ROW - 4, _COLOURS[s["kind"]], text))
    keys = "".join(
        _key(n) for n in ("forward", "backward", "weight gradients", "exposed", "update")
    )
    more = f"<p class='soft'>{left} later spans are left out.</p>" if left > 0 else ""
    height = len(stages) * _ROW
    return (
        f"<svg viewBox='0 0 {_WIDTH} {height}'>{''.join(shapes)}</svg>"
        f"<p class='soft'>0 to {duration(end)}{keys}</p>{more}"
    )


def _operators(found: StepPrediction) -> str:
    total = sum(found.operators.values()) or 1.0
    return _rows([
        (name, duration(value * 1e6), f"{value / total:.1%}")
        for name, value in found.operators.items()
    ])  # fmt: skip


def _memory(found: StepPrediction) -> str:
    rows = [
        (name, size(value), f"{value / found.fit.capacity:.1%}")
        for name, value in found.fit.worst.to_dict().items()
    ]
    return _rows([*rows, ("capacity", size(found.fit.capacity), "")])


def _rows(rows: list[tuple[str, str, str]]) -> str:
    cells = (
        f"<tr><td>{escape(a)}</td><td class='n'>{escape(b)}</td><td class='n'>{escape(c)}</td></tr>"
        for a, b, c in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _rect(x: float, y: float, width: float, height: float, colour: str, text: str) -> str:
    return (
        f"<rect x='{x:.2f}' y='{y}' width='{max(width, 0.05):.2f}' height='{height}' "
        f"fill='var(--{colour})'><title>{escape(text)}</title></rect>"
    )


def _key(name: str) -> str:
    return f"<span class='key' style='background:var(--{_COLOURS[name]})'></span>{escape(name)}"
