"""Error of the lowering ``fused`` against XLA's compilers, by class of op, both priced by opcast.

    python tests/bench/fused_error.py --hlo FOLDER [--platform tpu|cpu] [--kept] [--write]

Lowers every op and 500 random compositions (``tests/support/drawn_programs.py``) both ways for
absent GPUs, or a part of them for TPUs, whose compiler takes minutes for some, and CPUs; prints the
table of ``docs/fused.md``; ``--write`` puts it there, and the ends that widen the intervals of
``fused`` into ``models/pretrained/fused.json``, on TPUs also those of ``op``. Compiled modules are
kept in ``--hlo``, so that it resumes with what is missing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from math import exp, hypot, log
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from opcast.common.errors import UnknownCallError
from opcast.features.lowering.lower import lower
from opcast.models.program.fused_error import COUNTS, FILE, ends_of, fit, op_ends
from opcast.models.trust.calibrator import NORMAL_90, Ends
from opcast.predict.devices import resolve_device
from opcast.predict.program.predictor import load
from opcast.tests.support.drawn_programs import Case, cases, text_of
from opcast.tests.support.two_lowerings import Price, compiled, on_stream, path_of, priced, prices

DOCS = Path(__file__).parents[2] / "docs/fused.md"
#: Of each platform, one of each generation whose kernels the rules tell apart.
DEVICES = {
    "gpu": ("h100-sxm", "a100-sxm-80gb"),
    "tpu": ("tpu-v5e", "tpu-v5p", "tpu-v6e"),
    "cpu": ("cpu-amd-epyc-2c",),
}
#: JAX's name of a platform.
JAX_PLATFORMS = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}
#: Processes, and parts of the cases of a device that they take.
WORKERS, PARTS = 2, 8
_MARK = r"(<!-- fused_error {} begin -->\n).*?(<!-- fused_error {} end -->)"


class Row(NamedTuple):
    """A case on a device, priced both ways."""

    device: str
    case: Case
    fused: Price
    xla: Price
    op: Price

    @property
    def by_op(self) -> float:
        """Logarithm of the compiler's time over what is left of that op by op."""
        return log(self.xla.us / self.op.us / self.op.left)

    @property
    def score(self) -> float:
        """Logarithm of the compiler's time over ours."""
        return log(self.xla.us / self.fused.us)

    def differs(self, what: str) -> bool:
        """Whether a count is more than 10 % from the compiler's."""
        ours, theirs = getattr(self.fused, what), getattr(self.xla, what)
        return bool(abs(ours - theirs) > 0.1 * theirs + 1e3)

    def covered(self, ends: dict[str, Ends]) -> float:
        """Chance that the interval holds the truth: the compiler's price with its own error."""
        ours, (low, high) = self.fused, ends_of(self.fused.shares, ends)
        below, above = log(ours.us / ours.lo), log(ours.hi / ours.us)
        room = (hypot(below, low) + self.score, hypot(above, high) - self.score)
        chances = [
            ndtr(NORMAL_90 * r / max(end, 1e-3))
            for r, end in zip(room, (below, above), strict=True)
        ]
        return float(chances[0] + chances[1] - 1.0)

    def inside(self, ends: dict[str, Ends]) -> bool:
        """Whether the interval holds the compiler's price."""
        ours, (low, high) = self.fused, ends_of(self.fused.shares, ends)
        below = hypot(log(ours.us / ours.lo), low)
        return -below <= self.score <= hypot(log(ours.hi / ours.us), high)


def measured(chosen: Sequence[Case], platform: str, folder: Path, *, kept: bool) -> list[Row]:
    """Price the chosen cases on every device of a platform; only compiled ones if ``kept``."""
    parts = []
    for name in DEVICES[platform]:
        own = [c for c in chosen if not kept or path_of(c.name, folder / name).is_file()]
        parts += [(name, own[i::PARTS], folder / name) for i in range(PARTS)]
    context = multiprocessing.get_context("spawn")  # JAX has threads, which a fork would lose
    with ProcessPoolExecutor(WORKERS, context) as pool:
        return [row for rows in pool.map(_part, *zip(*parts, strict=True)) for row in rows]


def _part(name: str, chosen: Sequence[Case], folder: Path) -> list[Row]:
    """Price some cases on a device."""
    predictor = load()
    device = on_stream(resolve_device(name, predictor.devices))
    texts = {case.name: text_of(case.name, JAX_PLATFORMS[device.platform]) for case in chosen}
    found = compiled(texts, device, folder)
    rows = []
    for case in chosen:
        if case.name not in found:
            print(f"{case.name}: refused by the compiler of {name}")
            continue
        try:
            both = prices(predictor, texts[case.name], found[case.name], device)
            op = priced(predictor, lower(texts[case.name], "op", device=device), device)
        except UnknownCallError as error:
            # Routines of the TPU's compiler whose work nothing tells.
            print(f"{case.name}: {error.what}")
            continue
        rows.append(Row(name, case, *both, op))
    return rows


def chosen_cases(platform: str) -> list[Case]:
    """Cases of a platform: all, or for TPUs and CPUs one draw of each op and some compositions."""
    if platform == "gpu":
        return cases()
    by_kind: dict[bool, list[Case]] = {True: [], False: []}
    for case in cases():
        by_kind[case.kind == "compositions"].append(case)
    own = [c for c in by_kind[False] if c.kind != "element-wise" and not c.name.endswith("/1")]
    alike = [c for c in by_kind[False] if c.kind == "element-wise"]
    return [*own, *alike[::9], *by_kind[True][::6]]


def fitted(rows: Sequence[Row]) -> dict[str, Ends]:
    """Ends by group from the errors of rows."""
    return fit(
        [max(row.fused.shares, key=row.fused.shares.__getitem__) for row in rows],
        np.array([row.score for row in rows]),
        np.array([log(row.fused.us / row.fused.lo) for row in rows]),
        np.array([log(row.fused.hi / row.fused.us) for row in rows]),
    )


def counts_of(rows: Sequence[Row]) -> dict[str, Ends]:
    """The compiler's counts over ours where the answer says that they differ: 5 and 95 % ends."""
    found = {}
    for what in COUNTS:
        own = [r for r in rows if what in r.fused.uncertain and getattr(r.fused, what) > 0.0]
        ratios = [getattr(r.xla, what) / getattr(r.fused, what) for r in own]
        low, high = np.quantile(ratios, (0.05, 0.95))
        found[what] = (float(low), float(high))
    return found


def fitted_op(rows: Sequence[Row]) -> Ends:
    """5 and 95 % ends of the compiler's time over what is left of that op by op."""
    low, high = np.quantile([row.by_op for row in rows], (0.05, 0.95))
    return float(low), float(high)


def left_out(rows: Sequence[Row]) -> str:
    """How often the ends of ``op`` from the other tenths of the cases hold a case, and how wide."""
    names = [*dict.fromkeys(row.case.name for row in rows)]
    inside, widths = [], []
    for tenth in (set(names[i::10]) for i in range(10)):
        ends = fitted_op([row for row in rows if row.case.name not in tenth])
        for row in (row for row in rows if row.case.name in tenth):
            low, high = op_ends(row.op.left, ends)
            inside.append(low <= row.by_op + log(row.op.left) <= high)
            widths.append(high - low)
    return f"op: inside {np.mean(inside):.1%}, median hi / lo {exp(np.median(widths)):.1f}"


def table(rows: Sequence[Row]) -> str:
    """The table in Markdown; intervals are those from the other devices' errors, if there are."""
    names = dict.fromkeys(row.device for row in rows)
    others = {name: fitted([r for r in rows if r.device != name] or rows) for name in names}
    lines = [
        "| class of op | n | median | mean | bias | beyond 2× | inside | covered | bytes | FLOPs "
        "| silent | worst |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    kinds = [*dict.fromkeys(row.case.kind for row in rows), "all"]
    for kind in kinds:
        own = [row for row in rows if kind in (row.case.kind, "all")]
        lines.append(_line(kind, own, others))
    return "\n".join(lines)


def _line(kind: str, rows: Sequence[Row], ends: dict[str, dict[str, Ends]]) -> str:
    scores = np.array([row.score for row in rows])
    errors = np.abs(np.exp(-scores) - 1.0)
    worst = rows[int(np.abs(scores).argmax())]
    inside = np.mean([row.inside(ends[row.device]) for row in rows])
    covered = np.mean([row.covered(ends[row.device]) for row in rows])
    counts = [np.mean([row.differs(what) for row in rows]) for what in COUNTS]
    silent = np.mean([
        any(row.differs(what) and what not in row.fused.uncertain for what in COUNTS)
        for row in rows
    ])  # fmt: skip
    return (
        f"| {kind} | {len(rows)} | {np.median(errors):.1%} | {errors.mean():.1%} | "
        f"{np.expm1(-np.mean(scores)):+.1%} | {np.sum(np.abs(scores) > log(2.0))} | {inside:.0%} | "
        f"{covered:.0%} | {counts[0]:.0%} | {counts[1]:.0%} | "
        f"{silent:.0%} | {exp(-worst.score):.2f} (`{worst.case.name}`) |"
    )


def main() -> None:
    """Print the table, and the cases that are off most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hlo", type=Path, required=True, help="folder of compiled modules")
    parser.add_argument("--platform", choices=DEVICES, default="gpu")
    parser.add_argument("--only", help="part of the names of cases; several with commas")
    parser.add_argument("--kept", action="store_true", help="only what --hlo has already")
    parser.add_argument("--worst", type=int, default=20, help="how many cases to list")
    parser.add_argument("--write", action="store_true", help="write the table and the ends")
    given = parser.parse_args()
    parts = (given.only or "").split(",")
    chosen = [c for c in chosen_cases(given.platform) if any(part in c.name for part in parts)]
    rows = measured(chosen, given.platform, given.hlo, kept=given.kept)
    text = table(rows)
    print(text)
    ends = fitted(rows)
    for row in sorted(rows, key=lambda r: -abs(r.score))[: given.worst]:
        ours, theirs = row.fused, row.xla
        print(
            f"{row.case.name:24} {row.device:14} {exp(-row.score):5.2f}  fused {ours.us:.1f} us, "
            f"xla {theirs.us:.1f} us; kernels {ours.kernels:.0f}, {theirs.kernels:.0f}; MB "
            f"{ours.bytes / 1e6:.1f}, {theirs.bytes / 1e6:.1f}; GFLOP {ours.flops / 1e9:.2f}, "
            f"{theirs.flops / 1e9:.2f}; {'inside' if row.inside(ends) else 'OUTSIDE'}"
            + ("; noted" if ours.notes else "")
        )
    print(json.dumps(ends))
    print(left_out(rows), fitted_op(rows))
    if given.write:
        FILE.write_text(_shipped(ends, rows, given.platform))
        mark = re.compile(_MARK.format(given.platform, given.platform), re.DOTALL)
        DOCS.write_text(mark.sub(lambda m: f"{m[1]}\n{text}\n\n{m[2]}", DOCS.read_text()))


def _shipped(ends: dict[str, Ends], rows: Sequence[Row], platform: str) -> str:
    """The file of ends, with those of a platform anew."""
    data = json.loads(FILE.read_text())
    own: dict[str, object] = {
        "cases": len(rows),
        "ends": _rounded(ends),
        "counts": _rounded(counts_of(rows)),
    }
    if platform == "tpu":  # which runs no program op by op
        own["op"] = [round(end, 3) for end in fitted_op(rows)]
    data["platforms"][platform] = own
    return json.dumps(data, indent=1) + "\n"


def _rounded(ends: dict[str, Ends]) -> dict[str, list[float]]:
    return {group: [round(lo, 3) + 0.0, round(hi, 3)] for group, (lo, hi) in ends.items()}


if __name__ == "__main__":
    main()
