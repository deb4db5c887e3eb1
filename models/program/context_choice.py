"""Decides whether to correct kernels for their context, which must beat the plain sum.

The choice uses cross-validation over the training programs, holding out whole families. The
kernels' predictions come from cross-fitting; the correction is fitted to the programs of the other
families, without the kernels of the held-out programs; the program model is fitted to each
candidate in turn and evaluated on held-out families. A candidate is kept if its error is below the
plain sum's by more than 2 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..training_data.crossfit import CrossFit
from ..training_data.prepared import PreparedDataset, ProgramSample
from ..training_data.splits import balanced_folds
from .context import context_features, loop_factors
from .context_trees import ContextCorrection, ContextProgram, ContextTrees
from .program_model import GAIN, ProgramModel

SUM, TREES = "sum", "trees"
#: Fewest programs for learning a correction: twelve per fold. Engineering estimate; not fitted.
MIN_PROGRAMS = 60
#: Folds over families; each costs a training, and leaves four fifths of the families to learn from.
_FOLDS = 5
#: Draws of the folds, whose trees are averaged: another draw changes the trees' family error by
#: about 5 % (docs/models.md).
REPEATS = 2
#: Fewest programs with two or more kernels for a correlation. Engineering estimate; not fitted.
FEWEST_TO_CORRELATE = 20


@dataclass
class ContextChoice:
    """The chosen candidate, and the figures behind the choice.

    Attributes:
        correction: Fitted to all programs; ``None`` if the plain sum is kept.
        program_model: Fitted to the held-out predictions of the chosen candidate.
        figures: One record per candidate: ``model``, ``family_error`` (mean absolute log error on
            held-out families of equal weight), ``kernel_error`` (mean absolute log-ratio of kernels
            in programs), ``kernel_correlation`` (of the errors of two kernels of a program); empty
            if there were too few programs.
    """

    correction: ContextCorrection | None
    program_model: ProgramModel
    figures: list[dict[str, object]] = field(default_factory=list)

    @property
    def winner(self) -> str:
        """``sum`` or ``trees``."""
        return SUM if self.correction is None else TREES

    def to_dict(self) -> dict[str, object]:
        """Plain data for the manifest."""
        return {"winner": self.winner, "least_gain": GAIN, "cross_validated": self.figures}


def choose_context(
    data: PreparedDataset, crossed: CrossFit, *, seed: int = 0, n_jobs: int = 1
) -> ContextChoice:
    """Fit program models with and without the correction, and keep the better.

    Args:
        data: The prepared dataset.
        crossed: Held-out predictions of the training rows; only their labels are used.
        seed: Seed of the trees and the folds.
        n_jobs: Threads of the trees.
    """
    samples = [p for p in data.programs if p.row in crossed.program_kernels]
    programs = context_programs(data, crossed, samples)
    plain_model, before = context_figures(
        samples, programs, [np.zeros(len(p.predicted_s)) for p in programs]
    )
    # Without a fitted program model there is no family error to compare.
    enough = len(samples) >= MIN_PROGRAMS and plain_model.corrections
    if not enough or not any(p.labelled.any() for p in programs):
        return ContextChoice(None, plain_model)
    # Trees see neither the programs that they are tested on nor their kernels.
    drawn = [held_out_shifts(programs, seed + i, n_jobs) for i in range(REPEATS)]
    shifts = [np.mean(own, axis=0) for own in zip(*drawn, strict=True)]
    moved_model, after = context_figures(samples, programs, shifts)
    figures: list[dict[str, object]] = [{"model": SUM, **before}, {"model": TREES, **after}]
    # The correction costs time and a file in every model: its gain must exceed the noise of the
    # folds.
    if after["family_error"] >= before["family_error"] * (1 - GAIN):
        return ContextChoice(None, plain_model, figures)
    platforms = tuple(sorted({p.device.platform for p in samples}))
    seeds = range(seed, seed + REPEATS)
    trees = tuple(ContextTrees.fit(programs, seed=s, n_jobs=n_jobs) for s in seeds)
    return ContextChoice(ContextCorrection(trees, platforms), moved_model, figures)


def context_programs(
    data: PreparedDataset, crossed: CrossFit, samples: Sequence[ProgramSample]
) -> list[ContextProgram]:
    """Measured programs with features and the labels of the cross-fitted rows."""
    part = data.frame.iloc[crossed.rows]
    keys = zip(part["device"], part["program"], part["kernel_hash"], strict=True)
    # A kernel's label is its time in this program: its difference from other programs is what the
    # correction learns.
    labels = dict(zip(keys, data.latency_s[crossed.rows].tolist(), strict=True))
    programs = []
    for sample in samples:
        kernels, name = sample.lowered.kernels, sample.device.name
        predicted = crossed.program_kernels[sample.row] * loop_factors(kernels, sample.device)
        base_s = data.table.base_s[sample.entries]
        own = [labels.get((name, sample.name, k.hash), np.nan) for k in kernels]
        programs.append(
            ContextProgram(
                features=context_features(predicted, base_s, sample.lowered, sample.device),
                predicted_s=predicted,
                label_s=np.array(own, np.float64),
                executions=np.array([k.multiplicity * k.takes_time for k in kernels], np.float64),
                hashes=np.array([k.hash for k in kernels]),
                group=sample.group,
            )
        )
    return programs


def held_out_shifts(
    programs: Sequence[ContextProgram], seed: int = 0, n_jobs: int = 1
) -> list[np.ndarray]:
    """Corrections of every program by trees fitted without its family and its kernels.

    Args:
        programs: Measured programs, ``m`` of them.
        seed: Seed of the trees and the folds.
        n_jobs: Threads.

    Returns:
        For each program the logs of the factors for its kernels.
    """
    fold = balanced_folds(np.array([p.group for p in programs], object), _FOLDS, seed)
    shifts = [np.zeros(len(p.predicted_s)) for p in programs]
    for number in range(int(fold.max()) + 1):
        held = np.flatnonzero(fold == number).tolist()
        fitting = [programs[i] for i in np.flatnonzero(fold != number).tolist()]
        inside = frozenset(str(h) for i in held for h in programs[i].hashes)
        trees = ContextTrees.fit(fitting, without=inside, seed=seed, n_jobs=n_jobs)
        for i in held:
            shifts[i] = trees.shift(programs[i].features)
    return shifts


def context_figures(
    samples: Sequence[ProgramSample],
    programs: Sequence[ContextProgram],
    shifts: Sequence[np.ndarray],
) -> tuple[ProgramModel, dict[str, float]]:
    """The program model on top of held-out corrections, and its error figures.

    Args:
        samples: Measured programs.
        programs: The same, with features and labels.
        shifts: Logs of the factors for their kernels.

    Returns:
        The fitted model, and figures as in :class:`ContextChoice`; no ``family_error`` if there
        were too few programs for a model.
    """
    pairs = list(zip(programs, shifts, strict=True))
    left = [np.log(p.label_s / p.predicted_s) - shift for p, shift in pairs]
    # Equal kernels have equal labels and nearly equal predictions: keep one of each.
    first = [np.unique(p.hashes, return_index=True)[1] for p in programs]
    distinct = [
        own[places][p.labelled[places]]
        for own, p, places in zip(left, programs, first, strict=True)
    ]
    correlation = pair_correlation(distinct)
    model = ProgramModel().fit(
        [p.predicted_s * np.exp(shift) for p, shift in pairs],
        [s.lowered for s in samples],
        [s.device for s in samples],
        np.array([s.wall_s for s in samples]),
        [s.group for s in samples],
        correlation,
    )
    labelled = [own[p.labelled] for own, p in zip(left, programs, strict=True)]
    figures = {"kernel_correlation": correlation}
    if sum(map(len, labelled)):
        figures["kernel_error"] = float(np.abs(np.concatenate(labelled)).mean())
    if model.corrections:
        errors = [c.error["chosen"] for c in model.corrections.values()]
        figures["family_error"] = float(np.mean(errors))
    return model, figures


def pair_correlation(errors: Sequence[np.ndarray]) -> float:
    """Intraclass correlation of the errors of two different kernels of the same program.

    The mean product of the errors of all pairs within a program, averaged over programs, over the
    mean square, both about the overall mean (Fisher, Statistical Methods for Research Workers,
    1925, chapter 7). Every program has the same weight, however many kernels it has.

    Args:
        errors: For each program the log-ratios of its distinct kernels; programs with fewer than
            two are ignored.

    Returns:
        From 0 to 1; 1, the conservative value, with fewer than 20 programs.
    """
    several = [e for e in errors if len(e) > 1]
    if len(several) < FEWEST_TO_CORRELATE:
        return 1.0
    centre = float(np.mean(np.concatenate(several)))
    pairs, squares = [], []
    for own in several:
        left = own - centre
        square = float((left**2).sum())
        squares.append(square / len(left))
        # (Σe)² = Σe² + the products of all ordered pairs: the mean over pairs without a loop.
        pairs.append((float(left.sum()) ** 2 - square) / (len(left) * (len(left) - 1)))
    variance = float(np.mean(squares))
    return float(np.clip(np.mean(pairs) / variance, 0.0, 1.0)) if variance > 0 else 1.0
