"""Adapt a kernel model to the local device within a time budget, by active measurement.

Candidates are single-op programs and the zoo's smallest programs; the targets are the zoo's
kernels, weighted by their share of a program's time and by the model's uncertainty. Each round
measures the candidates that are expected to reduce the targets' variance most for their time,
evaluates the model on them before it learns them, and then learns them.
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

#: Share of the budget for compiling candidates (docs/models.md, "A device at hand"). Engineering
#: estimate: without many candidates there is little to choose from, and compiling is no
#: measurement.
COMPILING = 0.3
#: Single ops compiled for each program of the zoo; of like order in cost. Engineering estimate.
OPS_PER_PROGRAM = 8
#: Programs of each round, the last figure for all later ones: few at first, while each one still
#: changes what is worth measuring next. Engineering estimate.
ROUNDS = (4, 4, 8, 8, 12)
#: Share of a budget that a probe of the machine may take of it, and the share by which a run may
#: exceed the budget without a word on what took the time. Engineering estimates.
PROBING, TOLERATED = 0.5, 0.1
#: Seconds that compiling a program is expected to take before any was, as EXPECTED_S. Engineering
#: estimate.
EXPECTED_COMPILE_S = {"op": 0.3, "zoo": 4.0}
#: Seconds that measuring a program is expected to take, by stream, before any was measured.
#: Engineering estimate; the mean with what was seen soon replaces it.
EXPECTED_S = {"op": 0.5, "zoo": 4.0}


class Calibration:
    """One calibration of a model on the local device.

    Args:
        model: The model; its correction of the device is replaced as samples come.
        device: The local device.
        settings: The budget, and the candidates to measure.
        spent_s: Seconds of the budget that were spent before.
    """

    def __init__(
        self,
        model: CostModel,
        device: DeviceSpec,
        settings: CalibrateSettings,
        spent_s: float = 0.0,
    ) -> None:
        # The command refuses --data together with --budget; this is for the type checker.
        assert settings.budget_s is not None
        self.model, self.device = model, device
        self.samples = Samples()
        self.rounds: list[Round] = []
        self.failed: list[str] = []
        self.programs: dict[str, Mapping[str, float]] = {}
        self.disturbed = 0
        self._start = time.monotonic()
        # A probe must not leave a short budget without anything measured.
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
        """Measure in rounds until the budget ends or there is nothing left; Ctrl-C ends it, too.

        Raises:
            ProfileError: Nothing could be measured within the budget.
        """
        from ..common.progress import Progress
        from ..datagen.profile.worker_client import Measurer

        # Zero leaves the memory limit to the worker (a share of what is free); compiling must not
        # run beside measurements, which it would disturb.
        measurer = Measurer({"memory": 0, "overlap": False})
        try:
            with Progress(self._budget_s, "s", progress) as bar:
                candidates: list[Candidate] = []
                # On a loaded machine compiling may take the whole of a short budget: something is
                # measured all the same.
                while self._left() > 0 or not self.rounds:
                    chosen = self._chosen(candidates) if candidates else []
                    if not chosen:
                        # All that fits into the time is measured: what is left is for more, if it
                        # suffices to compile it.
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
        # Learned after every round, so an interrupted calibration is a shorter one.
        except KeyboardInterrupt:
            logger.info("interrupted; what was measured is learned")
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
        """Single ops and programs of the zoo in turn, and ops alone when these are through."""
        from ..datagen.profile.plan import Item, zoo_suite

        seed, suite = self._settings.seed, self._settings.suite
        zoo = np.random.default_rng(seed).permutation(len(zoo_suite(suite)))
        # Compiling may stop at any time, and both are needed, the zoo as targets and single ops as
        # cheap samples.
        ops = iter(range(self._settings.ops))
        for index in reversed(zoo):
            yield from (Item("op", i, seed) for i in islice(ops, OPS_PER_PROGRAM))
            yield Item("zoo", int(index), seed, suite=suite)
        yield from (Item("op", i, seed) for i in ops)

    def _compiled(self) -> list[Candidate]:
        """Compile the next candidates, as many as a share of the time that is left allows."""
        end = time.monotonic() + COMPILING * max(self._left(), 0.0)
        candidates: list[Candidate] = []
        for item in self._waiting:
            begin = time.monotonic()
            found = self._candidate(item)
            self._took(f"compiling {item.key}", time.monotonic() - begin)
            self._compiling.setdefault(item.stream, []).append(time.monotonic() - begin)
            if found is not None:
                candidates.append(found)
            # The first round takes what there is, the later ones nothing beyond the budget.
            ahead = _expected(EXPECTED_COMPILE_S, self._compiling, "zoo")
            if candidates and time.monotonic() >= min(end, self._end() - ahead):
                break
        return candidates

    def _candidate(self, item: Item) -> Candidate | None:
        return candidate_of(item, self.model, self.device)

    def _chosen(self, candidates: Sequence[Candidate]) -> list[int]:
        """Positions of the candidates of the next round."""
        from ..models.adapt.active import choose_programs

        unique = {k.hash: k for c in candidates for k in c.kernels}
        place = {digest: i for i, digest in enumerate(unique)}
        blocks = [np.array([place[k.hash] for k in c.kernels]) for c in candidates]
        weight = np.zeros(len(unique))
        for candidate, block in zip(candidates, blocks, strict=True):
            if candidate.item.stream == "zoo":
                np.add.at(weight, block, candidate.share)
        # Until a program of the zoo has been compiled, all kernels count the same.
        choice = self._doubts(list(unique.values()), weight if weight.any() else weight + 1.0)
        seconds = [_expected(EXPECTED_S, self._seconds, c.item.stream) for c in candidates]
        # Rounds beyond the table are as large as its last one.
        most = ROUNDS[min(len(self.rounds), len(ROUNDS) - 1)]
        left = max(self._left(), 0.0 if self.rounds else min(seconds))
        return choose_programs(choice, blocks, seconds, left, most)

    def _doubts(self, kernels: Sequence[Kernel], share: np.ndarray) -> RemainingVariance:
        """Remaining variance of kernels, weighted by share of the time and the model's interval."""
        from ..models.adapt.active import RemainingVariance
        from ..models.adapt.device_correction import half_width, kernel_sites, prior_params
        from ..models.core.kernel_table import kernel_table

        # Expected squared error: the target's weight is its share of the time and the square of its
        # interval's half-width.
        half = half_width(self.model.predict_kernels(kernels, self.device))
        sites = kernel_sites(kernel_table(kernels, self.device), self.device)
        known = self.model.corrections.get(self.device.name)
        # Before the first samples: the covariance made for errors of library operators, scaled for
        # kernels of compiled programs.
        if known is None:
            return RemainingVariance.of(sites, prior_params(), share * half**2)
        own = known.correction
        return RemainingVariance.of(sites, own.params, share * half**2, own.sites)

    def _took(self, what: str, seconds: float) -> None:
        if seconds > self.longest[1]:
            self.longest = (what, seconds)

    def _measure(self, measurer: Any, chosen: Sequence[Candidate]) -> None:
        """Measure programs, evaluate the model on them, then learn them."""
        learned = len(self.samples)
        new: list[str] = []
        names: list[str] = []
        for candidate in chosen:
            # A program may have taken longer than expected, and the next one may.
            ahead = _expected(EXPECTED_S, self._seconds, candidate.item.stream)
            if self._left() <= ahead and (names or self.rounds):
                break
            begin = time.monotonic()
            # One at a time: each one's seconds inform the choice of the next round.
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
        # A round without new kernels teaches nothing; its programs are not candidates any more.
        if not new:
            return
        kernels = [self.samples.kernels[h] for h in new]
        measured = np.array([self.samples.seconds[h] for h in new])
        # Before learning: errors are of kernels that neither the model nor its correction has seen,
        # and of those it was least sure of.
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
        # Fitted anew to all samples in each round: the strength of the correction is chosen by
        # predicting each round's samples from those of the others. A round's kernels met the
        # machine at one speed, so that what they share need not hold for the next.
        self.model.corrections[self.device.name] = DeviceCorrection.fit(
            table, self.device, plain, measured, np.array(list(self.samples.rounds.values()))
        )


def _expected(prior: Mapping[str, float], seen: Mapping[str, list[float]], stream: str) -> float:
    """Expected seconds of a program, from those seen so far; the prior counts as one of them."""
    return float(np.mean([prior[stream], *seen.get(stream, ())]))


def _median_ape(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.median(np.abs(predicted / measured - 1)))


def run_calibrate_budget(
    console: Console, settings: CalibrateSettings, *, table: bool = True
) -> list[Round]:
    """Adapt a kernel model to the local device by measuring there, and print how its error falls.

    Args:
        console: Console to print to.
        settings: The device (``local`` or the local device's name), the model and the budget.
        table: Whether to print the rounds.

    Raises:
        DeviceError: The device is not the one at hand.
        ProfileError: Nothing could be measured within the budget.
        WorseModelError: The adapted model is worse on programs that it did not learn from.
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
    title = f"{spec.name}: median error in % on each round's kernels, before they were learned"
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
            f"machine, {seconds:.0f} s for {what}, which is not cut short"
        )
    return rounds


def local_device(device: str, model: CostModel) -> DeviceSpec:
    """Describe the local device, measuring it first if necessary.

    Raises:
        DeviceError: ``device`` names another one.
    """
    from ..features.devices.device import device_slug, local_device_name
    from ..features.devices.identity import base_name
    from ..predict.devices import resolve_device
    from .profile import local_now

    name = local_device_name()
    asked = None if device in ("local", name) else resolve_device(device, model.devices)
    if asked and name not in (base_name(asked.name), *map(device_slug, asked.aliases)):
        raise _not_at_hand(device, name)
    # Ceilings come first: every feature depends on them.
    spec = local_now(model.devices, logger.warning)
    if asked and asked.name not in (base_name(asked.name), spec.name):
        raise _not_at_hand(device, spec.name)
    return spec


def _not_at_hand(device: str, local: str) -> DeviceError:
    return DeviceError(
        f"{device} is not the device at hand, which is {local}",
        hint="run this on the device, or give samples of it with --data",
    )


def _remeasured(spec: DeviceSpec, model: CostModel) -> DeviceSpec:
    """The local device as measured, or measured again if it runs at another speed by now."""
    from ..predict.devices import resolve_device
    from .profile import measure_device

    # A virtual machine may have moved to another host since it was measured; samples would then be
    # explained by ceilings that no longer hold. A probe without anchors cannot tell.
    speed = speed_of(spec)
    if anchors_of(spec) and not speed.ratios:
        return spec
    if speed.ratios:
        logger.warning("this machine runs at %s of when it was measured: measuring it again", speed)
    measure_device(save=True)
    return resolve_device("local", model.devices)
