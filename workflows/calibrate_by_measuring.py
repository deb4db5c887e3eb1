"""Adapts a kernel model to the device at hand within a time budget, measuring what says most.

Candidates are programs of one op and the zoo's smallest programs; the targets are the zoo's
kernels, weighted by their share of a program's time and by how unsure the model is of them. Each
round measures the candidates that are expected to say most about the targets for the time that
they take, judges the model on them before it learns them, and learns them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common.errors import DeviceError, ProfileError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from ..datagen.profile.plan import Item
    from ..features.devices.device import DeviceSpec
    from ..features.kernels.kernel import Kernel
    from ..models.adapt.next_program import RemainingVariance
    from ..models.cost_model import CostModel
    from .settings import CalibrateSettings

logger = logging.getLogger(__name__)

#: Part of the budget for compiling candidates.
COMPILING = 0.3
#: Programs of a round: few at first, when each says much.
ROUNDS = (4, 4, 8, 8, 12)
#: Kernels of one program that are looked at, those that take most time.
MAX_KERNELS = 40
#: Seconds that a program is expected to take, by stream, before any was measured.
EXPECTED_S = {"op": 0.5, "zoo": 4.0}


@dataclass(frozen=True)
class Candidate:
    """A program that may be measured.

    Attributes:
        item: What the profiler measures.
        kernels: Its kernels that take time, the costliest ones.
        share: Share of each in the program's predicted time, shape ``(n,)``.
    """

    item: Item
    kernels: tuple[Kernel, ...]
    share: np.ndarray


@dataclass(frozen=True)
class Round:
    """What a round measured, and how the model stood before it learned that.

    Attributes:
        learned: Kernels that the model had learned before the round.
        kernels: Kernels measured in the round.
        programs: Programs of the round.
        before: Median error of the model without correction on them, a share.
        error: The same of the model as it was at the start of the round.
        seconds: Since the start.
    """

    learned: int
    kernels: int
    programs: tuple[str, ...]
    before: float
    error: float
    seconds: float


@dataclass
class Samples:
    """Measured kernels, each once; a later measurement replaces an earlier one."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)

    def add(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Take over the kernel rows of a measurement; returns the hashes of new kernels."""
        from ..features.kernels.extract import kernels_from_irs

        own = [r for r in rows if r["level"] != "program" and r["latency_us_p50"] > 0]
        new = [r for r in own if r["kernel_hash"] not in self.kernels]
        read = kernels_from_irs([r["kernel_ir"] for r in new])
        self.kernels |= {r["kernel_hash"]: k for r, k in zip(new, read, strict=True)}
        self.programs |= {r["kernel_hash"]: r["program"] for r in new}
        self.seconds |= {r["kernel_hash"]: r["latency_us_p50"] * 1e-6 for r in own}
        return list(dict.fromkeys(r["kernel_hash"] for r in new))

    def __len__(self) -> int:
        """Number of kernels."""
        return len(self.kernels)


class Calibration:
    """One calibration of a model on the local device.

    Args:
        model: The model; its correction of the device is replaced as samples come.
        device: The local device.
        settings: The budget, and the candidates to measure.
    """

    def __init__(self, model: CostModel, device: DeviceSpec, settings: CalibrateSettings) -> None:
        assert settings.budget_s is not None
        self.model, self.device = model, device
        self.samples = Samples()
        self.rounds: list[Round] = []
        self.failed: list[str] = []
        self.disturbed = 0
        self._start = time.monotonic()
        self._settings, self._budget_s = settings, settings.budget_s
        self._seconds: dict[str, list[float]] = {}
        model.corrections.pop(device.name, None)
        model.devices[device.name] = device

    def _left(self) -> float:
        return self._budget_s - (time.monotonic() - self._start)

    def run(self, progress: bool = True) -> list[Round]:
        """Measure in rounds until the budget ends or there is nothing left; Ctrl-C ends it, too.

        Raises:
            ProfileError: Nothing could be measured within the budget.
        """
        from ..common.progress import Progress
        from ..datagen.profile.worker_client import Measurer

        measurer = Measurer({"memory": 0, "overlap": False})
        try:
            with Progress(self._budget_s, "s", progress) as bar:
                candidates = self._candidates()
                while candidates and self._left() > 0:
                    chosen = self._chosen(candidates)
                    if not chosen:
                        break
                    self._measure(measurer, [candidates[i] for i in chosen])
                    candidates = [c for i, c in enumerate(candidates) if i not in set(chosen)]
                    spent = self._budget_s - max(self._left(), 0.0)
                    measured = sum(len(r.programs) for r in self.rounds)
                    bar.update(spent, len(self.samples), measured, len(self.failed), "")
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

    def _candidates(self) -> list[Candidate]:
        """Programs of one op and of the zoo in turn, as many as compile in their time."""
        from ..datagen.profile.plan import Item, zoo_suite

        seed, suite = self._settings.seed, self._settings.suite
        order = np.random.default_rng(seed).permutation(len(zoo_suite(suite)))
        zoo = [Item("zoo", int(i), seed, suite=suite) for i in order]
        ops = [Item("op", i, seed) for i in range(self._settings.ops)]
        each = max(len(ops) // max(len(zoo), 1), 1)
        candidates = []
        while (zoo or ops) and time.monotonic() - self._start < COMPILING * self._budget_s:
            batch, ops = ops[:each], ops[each:]
            if zoo:
                batch.append(zoo.pop())
            candidates += [c for c in map(self._candidate, batch) if c is not None]
        return candidates

    def _candidate(self, item: Item) -> Candidate | None:
        from ..common.errors import OpcastError
        from ..datagen.profile.plan import load_item
        from ..features.ir.reader import read_program
        from ..features.lowering.lower import lower

        try:
            lowered = lower(read_program(load_item(item).mlir))
        except OpcastError as error:
            logger.info("%s: %s", item.key, error)
            return None
        own = {k.hash: k for k in lowered.kernels if k.takes_time}
        if not own:
            return None
        runs = dict.fromkeys(own, 0.0)
        for kernel in lowered.kernels:
            if kernel.hash in runs:
                runs[kernel.hash] += kernel.multiplicity
        kernels = list(own.values())
        latency = self.model.predict_kernels(kernels, self.device).latency
        total = latency * np.array(list(runs.values()))
        costly = np.argsort(-total)[:MAX_KERNELS]
        share = total[costly] / max(float(total.sum()), 1e-12)
        return Candidate(item, tuple(kernels[i] for i in costly), share)

    def _chosen(self, candidates: Sequence[Candidate]) -> list[int]:
        """Positions of the candidates of the next round."""
        from ..models.adapt.next_program import choose_programs

        unique = {k.hash: k for c in candidates for k in c.kernels}
        place = {digest: i for i, digest in enumerate(unique)}
        blocks = [np.array([place[k.hash] for k in c.kernels]) for c in candidates]
        weight = np.zeros(len(unique))
        for candidate, block in zip(candidates, blocks, strict=True):
            if candidate.item.stream == "zoo":
                np.add.at(weight, block, candidate.share)
        choice = self._doubts(list(unique.values()), weight if weight.any() else weight + 1.0)
        seconds = [self._expected(c.item.stream) for c in candidates]
        most = ROUNDS[min(len(self.rounds), len(ROUNDS) - 1)]
        return choose_programs(choice, blocks, seconds, max(self._left(), 0.0), most)

    def _doubts(self, kernels: Sequence[Kernel], share: np.ndarray) -> RemainingVariance:
        """What is uncertain of kernels; they weigh by their share and the model's interval."""
        from ..models.adapt.device_correction import half_width, kernel_sites, prior_params
        from ..models.adapt.next_program import RemainingVariance
        from ..models.core.kernel_table import kernel_table

        half = half_width(self.model.predict_kernels(kernels, self.device))
        sites = kernel_sites(kernel_table(kernels, self.device), self.device)
        known = self.model.corrections.get(self.device.name)
        if known is None:
            return RemainingVariance.of(sites, prior_params(), share * half**2)
        own = known.correction
        return RemainingVariance.of(sites, own.params, share * half**2, own.sites)

    def _expected(self, stream: str) -> float:
        """Seconds that measuring a program takes, as seen so far."""
        seen = self._seconds.get(stream, [])
        return float(np.mean([EXPECTED_S[stream], *seen]))

    def _measure(self, measurer: Any, chosen: Sequence[Candidate]) -> None:
        """Measure programs, judge the model on them, then learn them."""
        rows: list[dict[str, Any]] = []
        names = []
        for candidate in chosen:
            if self._left() <= 0:
                break
            begin = time.monotonic()
            (reply,) = measurer.measure([candidate.item])
            took = time.monotonic() - begin
            self._seconds.setdefault(candidate.item.stream, []).append(took)
            if "rows" in reply:
                rows += reply["rows"]
                names.append(candidate.item.key)
                self.disturbed += bool(reply["disturbed"])
            else:
                logger.info("%s failed: %s", candidate.item.key, reply["failed"])
                self.failed.append(str(reply["failed"]))
        learned = len(self.samples)
        new = self.samples.add(rows)
        if not new:
            return
        kernels = [self.samples.kernels[h] for h in new]
        measured = np.array([self.samples.seconds[h] for h in new])
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
        self.model.corrections[self.device.name] = DeviceCorrection.fit(
            table, self.device, plain, measured, np.array(list(self.samples.programs.values()))
        )


def _median_ape(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.median(np.abs(predicted / measured - 1)))


def run_calibrate_budget(console: Console, settings: CalibrateSettings) -> list[Round]:
    """Adapt a kernel model to the local device by measuring there, and print how its error falls.

    Args:
        console: Where to print.
        settings: The device (``local`` or the local device's name), the model and the budget.

    Raises:
        DeviceError: The device is not the one at hand.
        ProfileError: Nothing could be measured within the budget.
    """
    from ..common.tables_text import print_frame
    from ..models.cost_model import CostModel
    from ..predict.locate import find_model
    from .calibrate_from_dataset import save_adapted

    model = CostModel.load(find_model(settings.model))
    spec = _remeasured(local_device(settings.device, model), model)
    run = Calibration(model, spec, settings)
    rounds = run.run()
    title = f"{spec.name}: median error in % on each round's kernels, before they were learned"
    print_frame(console, rounds_table(rounds), title)
    console.print(
        f"{len(run.samples)} kernels of {sum(len(r.programs) for r in rounds)} programs learned"
        + (f", {len(run.failed)} programs failed" if run.failed else "")
        + (f", {run.disturbed} measured on a disturbed machine" if run.disturbed else ""),
        highlight=False,
    )
    save_adapted(console, model, settings)
    return rounds


def local_device(device: str, model: CostModel) -> DeviceSpec:
    """Description of the device at hand, measured first if need be.

    Raises:
        DeviceError: ``device`` names another one.
    """
    from ..features.devices.device import device_slug, local_device_name
    from ..features.devices.identity import base_name
    from ..predict.devices import is_known, resolve_device
    from .device import measure_device

    name = local_device_name()
    asked = None if device in ("local", name) else resolve_device(device, model.devices)
    if asked and name not in (base_name(asked.name), *map(device_slug, asked.aliases)):
        raise _not_at_hand(device, name)
    if not is_known("local", model.devices):
        measure_device(save=True)
    spec = resolve_device("local", model.devices)
    if asked and asked.name not in (base_name(asked.name), spec.name):
        raise _not_at_hand(device, spec.name)
    return spec


def _not_at_hand(device: str, local: str) -> DeviceError:
    return DeviceError(
        f"{device} is not the device at hand, which is {local}",
        hint="run this on the device, or give samples of it with --data",
    )


def _remeasured(spec: DeviceSpec, model: CostModel) -> DeviceSpec:
    """The local device as it was measured, or measured anew if it no longer runs like that."""
    from ..datagen.profile.device_probe import probe_ceilings
    from ..features.devices.identity import compare_ceilings
    from ..predict.devices import resolve_device
    from .device import measure_device

    speed = compare_ceilings(probe_ceilings(), spec)
    if speed.same:
        return spec
    logger.warning(
        "this machine now runs at %s of when %s was measured: measuring it again", speed, spec.name
    )
    measure_device(save=True)
    return resolve_device("local", model.devices)


def rounds_table(rounds: Sequence[Round]) -> pd.DataFrame:
    """One row a round."""
    import pandas as pd

    return pd.DataFrame(
        {
            "learned": [r.learned for r in rounds],
            "new kernels": [r.kernels for r in rounds],
            "programs": [len(r.programs) for r in rounds],
            "model as it was": [round(100 * r.before, 1) for r in rounds],
            "calibrated": [round(100 * r.error, 1) for r in rounds],
            "seconds": [round(r.seconds) for r in rounds],
        }
    )
