"""Adapt a kernel model to the local device within a time budget, by active measurement.

Candidates are single-op programs and small zoo programs; the targets are the kernels of the zoo,
weighted by their share of a program's time and by the model's uncertainty. Each round measures the
candidates with the largest expected reduction of the targets' variance per second, evaluates the
model on them, and then learns from them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common.errors import DeviceError, ProfileError
from ..features.devices.identity import anchors_of, speed_of
from .measured.calibration_samples import (
    Candidate,
    Round,
    Samples,
    candidate_of,
    check_unseen,
    mean_error,
    rounds_table,
    unseen_errors,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..datagen.profile.plan import Item
    from ..features.devices.device import DeviceSpec
    from ..features.kernels.kernel import Kernel
    from ..models.adapt.active import RemainingVariance
    from ..models.cost_model import CostModel
    from .settings import CalibrateSettings

logger = logging.getLogger(__name__)

#: Fraction of the remaining time for compiling candidates (docs/models.md, "A device at hand"); a
#: good choice needs many candidates. Engineering estimate.
COMPILING = 0.3
#: Single-op programs compiled per zoo program, which cost about as much. Engineering estimate.
OPS_PER_PROGRAM = 8
#: Programs per round, the last figure for all later rounds. Few at first, while each measurement
#: still changes which one is best next. Engineering estimate.
ROUNDS = (4, 4, 8, 8, 12)
#: Maximum fraction of the budget that is charged for the probe of the machine, and the overrun of
#: the budget from which the cause is printed. Engineering estimates.
PROBING, TOLERATED = 0.5, 0.1
#: Expected seconds to compile and to measure a program, by stream, before any have been observed;
#: each counts as one observation. Engineering estimates.
EXPECTED_COMPILE_S = {"op": 0.3, "zoo": 4.0}
EXPECTED_S = {"op": 0.5, "zoo": 4.0}


class Calibration:
    """A calibration of a model on the local device.

    Args:
        model: The model; its correction for the device is replaced after every round.
        device: The local device.
        settings: The budget and the candidates.
        spent_s: Seconds of the budget that have already been spent.
    """

    def __init__(
        self,
        model: CostModel,
        device: DeviceSpec,
        settings: CalibrateSettings,
        spent_s: float = 0.0,
    ) -> None:
        assert settings.budget_s is not None
        self.model, self.device = model, device
        self.samples = Samples()
        self.rounds: list[Round] = []
        self.failed: list[str] = []
        self.programs: dict[str, Mapping[str, float]] = {}
        self.disturbed = 0
        self._start = time.monotonic()
        # The probe must leave time to measure, even if the budget is short.
        own = max(settings.budget_s - spent_s, PROBING * settings.budget_s)
        self._settings, self._budget_s = settings, own
        self._seconds: dict[str, list[float]] = {}
        self._compiling: dict[str, list[float]] = {}
        self.longest = ("", 0.0)
        self._waiting = self._items()
        # A correction from an earlier calibration would hide the model's own error.
        model.corrections.pop(device.name, None)
        model.devices[device.name] = device

    def _end(self) -> float:
        return self._start + self._budget_s

    def _left(self) -> float:
        return self._end() - time.monotonic()

    def run(self, progress: bool = True) -> list[Round]:
        """Measure in rounds until the budget or the candidates are exhausted, or until Ctrl-C.

        Raises:
            ProfileError: Nothing could be measured within the budget.
        """
        from ..common.progress import Progress
        from ..datagen.profile.worker_client import Measurer

        # Memory 0 leaves the limit to the worker (a fraction of the free memory). No overlap,
        # because compiling would disturb the measurements.
        measurer = Measurer({"memory": 0, "overlap": False})
        try:
            with Progress(self._budget_s, "s", progress) as bar:
                candidates: list[Candidate] = []
                # At least one round, even if compiling exhausts a short budget.
                while self._left() > 0 or not self.rounds:
                    chosen = self._chosen(candidates) if candidates else []
                    if not chosen:
                        # No candidate fits into the remaining time; compile more if there is time.
                        ahead = _expected(EXPECTED_COMPILE_S, self._compiling, "zoo")
                        short = bool(self.rounds) and self._left() <= ahead
                        more = [] if short else self._compiled()
                        if not more:
                            break
                        candidates += more
                        continue
                    self._measure(measurer, [candidates[i] for i in chosen])
                    candidates = [c for i, c in enumerate(candidates) if i not in set(chosen)]
                    spent = self._budget_s - max(self._left(), 0.0)
                    measured = sum(len(r.programs) for r in self.rounds)
                    bar.update(spent, len(self.samples), measured, len(self.failed), "")
        except KeyboardInterrupt:
            logger.info("interrupted; the finished rounds are kept")
        finally:
            measurer.restart()
        if not self.rounds:
            reason = f": {self.failed[-1]}" if self.failed else ""
            raise ProfileError(
                f"nothing was measured within {self._budget_s:.0f} s{reason}",
                hint="give a longer --budget, such as 5m",
            )
        return self.rounds

    def _items(self) -> Iterator[Item]:
        """Yield single ops and zoo programs alternately, then the remaining single ops."""
        from ..datagen.profile.plan import Item, zoo_suite

        seed, suite = self._settings.seed, self._settings.suite
        zoo = np.random.default_rng(seed).permutation(len(zoo_suite(suite)))
        # Both kinds are needed whenever compiling stops: zoo programs as targets, and single ops as
        # cheap samples.
        ops = iter(range(self._settings.ops))
        for index in reversed(zoo):
            yield from (Item("op", i, seed) for i in islice(ops, OPS_PER_PROGRAM))
            yield Item("zoo", int(index), seed, suite=suite)
        yield from (Item("op", i, seed) for i in ops)

    def _compiled(self) -> list[Candidate]:
        """Compile candidates for a fraction of the remaining time."""
        end = time.monotonic() + COMPILING * max(self._left(), 0.0)
        candidates: list[Candidate] = []
        for item in self._waiting:
            begin = time.monotonic()
            found = self._candidate(item)
            self._took(f"compiling {item.key}", time.monotonic() - begin)
            self._compiling.setdefault(item.stream, []).append(time.monotonic() - begin)
            if found is not None:
                candidates.append(found)
            ahead = _expected(EXPECTED_COMPILE_S, self._compiling, "zoo")
            if candidates and time.monotonic() >= min(end, self._end() - ahead):
                break
        return candidates

    def _candidate(self, item: Item) -> Candidate | None:
        return candidate_of(item, self.model, self.device)

    def _chosen(self, candidates: Sequence[Candidate]) -> list[int]:
        """Choose the candidates of the next round, by index."""
        from ..models.adapt.active import choose_programs

        unique = {k.hash: k for c in candidates for k in c.kernels}
        place = {digest: i for i, digest in enumerate(unique)}
        blocks = [np.array([place[k.hash] for k in c.kernels]) for c in candidates]
        weight = np.zeros(len(unique))
        for candidate, block in zip(candidates, blocks, strict=True):
            if candidate.item.stream == "zoo":
                np.add.at(weight, block, candidate.share)
        # Without a zoo program among the candidates, all kernels have the same weight.
        choice = self._doubts(list(unique.values()), weight if weight.any() else weight + 1.0)
        seconds = [_expected(EXPECTED_S, self._seconds, c.item.stream) for c in candidates]
        most = ROUNDS[min(len(self.rounds), len(ROUNDS) - 1)]
        left = max(self._left(), 0.0 if self.rounds else min(seconds))
        return choose_programs(choice, blocks, seconds, left, most)

    def _doubts(self, kernels: Sequence[Kernel], share: np.ndarray) -> RemainingVariance:
        """Remaining variance of kernels, weighted by share of time and interval width."""
        from ..models.adapt.active import RemainingVariance
        from ..models.adapt.device_correction import half_width, kernel_sites, prior_params
        from ..models.core.kernel_table import kernel_table

        # The weight is the expected squared error: share of the time times squared half-width.
        half = half_width(self.model.predict_kernels(kernels, self.device))
        sites = kernel_sites(kernel_table(kernels, self.device), self.device)
        known = self.model.corrections.get(self.device.name)
        # Before the first samples, use the covariance of errors of library operators, scaled for
        # kernels of compiled programs.
        if known is None:
            return RemainingVariance.of(sites, prior_params(), share * half**2)
        own = known.correction
        return RemainingVariance.of(sites, own.params, share * half**2, own.sites)

    def _took(self, what: str, seconds: float) -> None:
        if seconds > self.longest[1]:
            self.longest = (what, seconds)

    def _measure(self, measurer: Any, chosen: Sequence[Candidate]) -> None:
        """Measure programs, evaluate the model on them, then learn from them."""
        learned = len(self.samples)
        new: list[str] = []
        names: list[str] = []
        for candidate in chosen:
            ahead = _expected(EXPECTED_S, self._seconds, candidate.item.stream)
            if self._left() <= ahead and (names or self.rounds):
                break
            begin = time.monotonic()
            # One at a time, to record the seconds of each.
            (reply,) = measurer.measure([candidate.item])
            took = time.monotonic() - begin
            self._seconds.setdefault(candidate.item.stream, []).append(took)
            self._took(f"measuring {candidate.item.key}", took)
            if "rows" in reply:
                new += self.samples.add(reply["rows"], len(self.rounds), candidate.factors)
                names.append(candidate.item.key)
                self.programs[candidate.item.key] = candidate.runs
                self.disturbed += bool(reply["disturbed"])
            else:
                logger.info("%s failed: %s", candidate.item.key, reply["failed"])
                self.failed.append(str(reply["failed"]))
        if not new:
            return
        kernels = [self.samples.kernels[h] for h in new]
        measured = np.array([self.samples.seconds[h] for h in new])
        # Before learning, so that neither the model nor its correction has seen these kernels.
        plain = self.model.estimator.predict(kernels, self.device).latency
        now = self.model.predict_kernels(kernels, self.device).latency
        self.rounds.append(
            Round(
                learned,
                len(new),
                tuple(names),
                _median_ape(plain, measured),
                _median_ape(now, measured),
                time.monotonic() - self._start,
            )
        )
        self._learn()

    def _learn(self) -> None:
        from ..models.adapt.device_correction import DeviceCorrection
        from ..models.core.kernel_table import kernel_table

        kernels = list(self.samples.kernels.values())
        measured = np.array([self.samples.seconds[k.hash] for k in kernels])
        table = kernel_table(kernels, self.device)
        plain = self.model.estimator.predict(kernels, self.device)
        # Fitted to all samples. The strength of the correction is chosen by cross-validation over
        # rounds, because the machine's speed may change from one round to the next.
        self.model.corrections[self.device.name] = DeviceCorrection.fit(
            table, self.device, plain, measured, np.array(list(self.samples.rounds.values()))
        )


def _expected(prior: Mapping[str, float], seen: Mapping[str, list[float]], stream: str) -> float:
    """Expected seconds of a program: mean of the observations and the prior."""
    return float(np.mean([prior[stream], *seen.get(stream, ())]))


def _median_ape(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.median(np.abs(predicted / measured - 1)))


def run_calibrate_budget(
    console: Console, settings: CalibrateSettings, *, table: bool = True
) -> list[Round]:
    """Adapt a kernel model to the local device by measuring, and print the error of each round.

    Args:
        console: Console to print to.
        settings: The device (``local`` or the local device's name), the model and the budget.
        table: Whether to print the rounds.

    Raises:
        DeviceError: The device is not this machine's.
        ProfileError: Nothing could be measured within the budget.
        WorseModelError: The adapted model is worse on held-out programs.
    """
    import jax

    from ..common.tables_text import print_frame
    from ..models.cost_model import CostModel
    from ..predict.locate import find_model
    from .calibrate_from_dataset import save_adapted

    started = time.monotonic()
    model = CostModel.load(find_model(settings.model, jax.default_backend()))
    spec = _remeasured(local_device(settings.device, model), model)
    probed = time.monotonic() - started
    run = Calibration(model, spec, settings, probed)
    rounds = run.run()
    title = f"{spec.name}: median error in % on the kernels of each round, before learning them"
    if table:
        print_frame(console, rounds_table(rounds), title)
    console.print(
        f"{len(run.samples)} kernels of {sum(len(r.programs) for r in rounds)} programs learned"
        + (f", {len(run.failed)} programs failed" if run.failed else "")
        + (f", {run.disturbed} measured on a disturbed machine" if run.disturbed else "")
    )
    before, after = unseen_errors(model, spec, run.samples, list(run.programs.values()))
    if len(before):
        what = f"{len(before)} measured programs"
        check_unseen(
            console, what, mean_error(before), mean_error(after), keep=settings.out is not None
        )
    save_adapted(console, model, settings)
    took, budget = time.monotonic() - started, settings.budget_s or 0.0
    if took > (1.0 + TOLERATED) * budget:
        what, seconds = run.longest
        console.print(
            f"took {took:.0f} s for a budget of {budget:.0f} s: {probed:.0f} s to probe the "
            f"machine, and {seconds:.0f} s for {what}, which cannot be interrupted"
        )
    return rounds


def local_device(device: str, model: CostModel) -> DeviceSpec:
    """Describe the local device, measuring it first if necessary.

    Raises:
        DeviceError: ``device`` is another device.
    """
    from ..features.devices.device import device_slug, local_device_name
    from ..features.devices.identity import base_name
    from ..predict.devices import resolve_device
    from .profile import local_now

    name = local_device_name()
    asked = None if device in ("local", name) else resolve_device(device, model.devices)
    if asked and name not in (base_name(asked.name), *map(device_slug, asked.aliases)):
        raise _not_at_hand(device, name)
    # Measured before anything else, because every feature depends on the peaks.
    spec = local_now(model.devices, logger.warning)
    if asked and asked.name not in (base_name(asked.name), spec.name):
        raise _not_at_hand(device, spec.name)
    return spec


def _not_at_hand(device: str, local: str) -> DeviceError:
    return DeviceError(
        f"{device} is not this machine's device, which is {local}",
        hint="run this on the device, or give samples of it with --data",
    )


def _remeasured(spec: DeviceSpec, model: CostModel) -> DeviceSpec:
    """Measure the local device again if its speed has changed since it was measured."""
    from ..predict.devices import resolve_device
    from .profile import measure_device

    # A virtual machine may have moved to another host, where the measured peaks no longer hold. A
    # measurement without anchors cannot be checked for this.
    speed = speed_of(spec)
    if anchors_of(spec) and not speed.ratios:
        return spec
    if speed.ratios:
        logger.warning("this machine runs at %s of when it was measured: measuring it again", speed)
    measure_device(save=True)
    return resolve_device("local", model.devices)
