"""Rows of tables of whole models, predicted so that each model is recorded once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np

from ...common.errors import DatasetError, OpcastError
from ...common.interval import LATENCY_KEYS
from ...common.tasks import run_tasks
from ...features.devices.device import DeviceSpec
from ...features.ir.torch.libraries import ModelCase, build
from ...features.ir.torch.program import TorchProgram
from ...features.ir.torch.record import Recording
from ...predict.cluster.case_table import FAULTS, Cells, reason_of
from ...predict.operator.aten_costs import cost_class, seconds_by_class
from ...predict.operator.torch_framework import TorchPredictor
from ...predict.operator.torch_memory import MEASURED
from ...predict.operator.torch_price import (
    TorchPrediction,
    computes_narrow,
    unlearned,
    works_of,
)

#: Bytes of units of memory, which columns end in.
UNITS = {"bytes": 1.0, "mib": 2.0**20, "gib": 2.0**30}
#: What is said of a row: values by column, or why nothing is.
Answer = Mapping[str, object] | str


@dataclass(frozen=True)
class ModelRow:
    """A row of a table of whole models.

    Attributes:
        id: Of the row.
        case: The model as it is run.
        device: Name of the chip.
        framework: ``torch-eager`` or ``torch-compiled``, with the release as ``@2.4`` if it is
            known.
        measured_s: Seconds of one step; NaN where nothing was measured.
        parts: The models that run one after the other, and how often each; the case once, if empty.
        memory_is: What was measured of peak memory, one of
            :data:`~opcast.predict.operator.torch_memory.MEASURED`.
        memory_bytes: Its bytes; NaN where nothing was measured.
        ran: Whether it ran or ran out of memory; ``None`` if that is not known.
    """

    id: str
    case: ModelCase
    device: str
    framework: str
    measured_s: float
    parts: tuple[tuple[ModelCase, int], ...] = ()
    memory_is: str = MEASURED[0]
    memory_bytes: float = float("nan")
    ran: bool | None = None

    @property
    def runs(self) -> tuple[tuple[ModelCase, int], ...]:
        """Models and how often each runs."""
        return self.parts or ((self.case, 1),)

    @property
    def recorded(self) -> tuple[ModelCase, ...]:
        """What is recorded of it."""
        return tuple(case.recorded for case, _ in self.runs)


def model_row(record: Mapping[str, object]) -> ModelRow:
    """Read a row of a table.

    Raises:
        DatasetError: It is for several devices, or a cell is no number.
        ProgramError: A word of it is not known.
    """
    cells = Cells(record)
    if cells.text("refused"):
        raise DatasetError(cells.text("refused"))
    if cells.count("devices", 1) > 1:
        raise DatasetError("several devices", hint="opcast simulate predicts models on clusters")
    for name in ("library", "model", "device"):
        if not cells.text(name):
            raise DatasetError(f"no {name}", where=cells.text("id"), hint="see docs/torch.md")
    parts = _parts(cells.text("model"))
    case = ModelCase(
        library=cells.text("library"),
        model=parts[-1][0],
        batch=cells.count("batch", 1),
        img_size=cells.count("img_size", 0),
        mode=cells.text("mode") or "infer",
        dtype=cells.text("dtype") or "fp32",
        layout=cells.text("layout") or "nchw",
        torch=cells.text("torch"),
        attention=cells.text("attention"),
        parameters_m=cells.number("param_m", 0.0),
        fast_norm=cells.flag("fast_norm", False),
    )
    measured = _seconds_of(cells, case.batch)
    framework = cells.text("framework") or "torch-eager"
    if re.match(r"\d", case.torch):
        framework = f"{framework}@{case.torch}"
    memory_is, memory = _memory_of(cells)
    known = np.isfinite(measured) or np.isfinite(memory)
    return ModelRow(
        cells.text("id"),
        case,
        cells.text("device"),
        framework,
        measured,
        parts=tuple((replace(case, model=name), count) for name, count in parts),
        memory_is=memory_is,
        memory_bytes=memory,
        ran=cells.flag("fits", True) if known or cells.text("fits") else None,
    )


def _parts(text: str) -> list[tuple[str, int]]:
    """Models and counts of a cell such as ``sd-1.5/text + 50*sd-1.5/unet + sd-1.5/vae``."""
    found = []
    for part in text.split(" + "):
        count, _, name = part.strip().rpartition("*")
        found.append((name, int(count or 1)))
    # What runs most often stands for the row.
    return sorted(found, key=lambda own: own[1])


def _seconds_of(cells: Cells, batch: int) -> float:
    """Measured seconds of a step; NaN where there are none."""
    rate = cells.number("throughput_samples_s")
    seconds = (cells.number("latency_ms") * 1e-3, cells.number("latency_s"), batch / rate)
    return next((own for own in seconds if np.isfinite(own)), float("nan"))


def _memory_of(cells: Cells) -> tuple[str, float]:
    """What was measured of peak memory and its bytes; NaN where there are none."""
    for what in MEASURED:
        for unit, size in UNITS.items():
            own = cells.number(f"{what}_{unit}")
            if np.isfinite(own):
                return what, own * size
    return MEASURED[0], float("nan")


@dataclass(frozen=True)
class Asking:
    """How rows are predicted.

    Attributes:
        model: Name or folder of the model of operators.
        ray: Address of a Ray cluster; empty for this process.
        kept: File of finished rows, read and written.
        identity: What besides a row decides its answer; answers of another one are not taken.
        work: Answers rows of one recording, given the model; predictions by default.
    """

    model: str
    ray: str
    kept: Path
    identity: str
    work: Callable[[str, Sequence[ModelRow]], list[Answer]] | None = None

    def predict(self, rows: Sequence[ModelRow], show: Callable[[int, int], None]) -> list[Answer]:
        """Predict rows; finished ones are kept, so that a stopped work goes on.

        Those without an answer are tried again: a package may be there by then.

        Args:
            rows: The rows.
            show: Told of progress.
        """
        found = self._read()
        left = [row for row in rows if row.id not in found]
        show(len(rows) - len(left), len(rows))
        # One recording for all devices, frameworks and releases that run the same.
        left.sort(key=lambda row: repr(row.recorded))
        groups = [list(own) for _, own in groupby(left, key=lambda row: row.recorded)]
        with self.kept.open("a", encoding="utf-8") as file:
            for place, answers in self._made(groups):
                for row, answer in zip(groups[place], answers, strict=True):
                    found[row.id] = answer
                    line = {"identity": self.identity, "id": row.id, "answer": answer}
                    if not isinstance(answer, str):
                        file.write(json.dumps(line) + "\n")
                file.flush()
                show(sum(row.id in found for row in rows), len(rows))
        return [found[row.id] for row in rows]

    def _made(self, groups: Sequence[list[ModelRow]]) -> Iterator[tuple[int, list[Answer]]]:
        work = self.work or answers_of
        if self.ray:
            yield from run_tasks(work, self.model, groups, self.ray)
            return
        for place, group in enumerate(groups):
            yield place, work(self.model, group)

    def _read(self) -> dict[str, Answer]:
        """Answers of an earlier run; the last line may have been cut off."""
        found: dict[str, Answer] = {}
        for line in self.kept.read_text("utf-8").splitlines() if self.kept.is_file() else ():
            try:
                own = json.loads(line)
            except ValueError:
                continue
            if own["identity"] == self.identity:
                found[own["id"]] = own["answer"]
        return found


def answers_of(model: str, rows: Sequence[ModelRow]) -> list[Answer]:
    """Predict rows of one recording.

    Args:
        model: Name or folder of the model of operators.
        rows: Rows whose cases are recorded alike.
    """
    return _asked(_answer, rows, _recorded(model, rows))


def seconds_of(model: str, rows: Sequence[ModelRow]) -> list[Answer]:
    """Seconds by class of cost of rows of one recording, without what whole models taught.

    Args:
        model: Name or folder of the model of operators.
        rows: Rows whose cases are recorded alike.
    """
    return _asked(_seconds, rows, _recorded(model, rows, times_alone=True))


@dataclass(frozen=True)
class _Recorded:
    """What was recorded of a row's models on its device."""

    predictor: TorchPredictor
    spec: DeviceSpec
    recordings: Sequence[Recording]


#: Reading the model of operators takes as long as recording a small model.
_predictor = cache(TorchPredictor)


def _recorded(
    model: str, rows: Sequence[ModelRow], *, times_alone: bool = False
) -> Iterator[_Recorded | str]:
    """Build and record once what rows have in common, or say why that cannot be."""
    programs: dict[ModelCase, TorchProgram] = {}
    recordings: dict[ModelCase, Recording] = {}
    for row in rows:
        try:
            predictor = _predictor(row.framework, model)
            spec = predictor.device(row.device)
            for case in row.recorded:
                if case not in programs:
                    programs[case] = build(case)
                before = recordings.get(case)
                recordings[case] = predictor.record(
                    programs[case], spec, before, times_alone=times_alone
                )
            yield _Recorded(predictor, spec, [recordings[case] for case in row.recorded])
        except (OpcastError, *FAULTS) as error:
            yield reason_of(error)


def _asked(
    ask: Callable[[ModelRow, _Recorded], Answer],
    rows: Sequence[ModelRow],
    recorded: Iterable[_Recorded | str],
) -> list[Answer]:
    """What is said of each row, or why nothing is."""
    answers: list[Answer] = []
    for row, own in zip(rows, recorded, strict=True):
        try:
            answers.append(own if isinstance(own, str) else ask(row, own))
        except (OpcastError, *FAULTS) as error:
            answers.append(reason_of(error))
    return answers


def _answer(row: ModelRow, own: _Recorded) -> Answer:
    said = [own.predictor.price(recording, own.spec) for recording in own.recordings]
    counts = [count for _, count in row.runs]
    # Errors of one model's runs are the same, of models alike: ends add up.
    times = {
        name: sum(n * float(getattr(part, name)) for n, part in zip(counts, said, strict=True))
        for name in LATENCY_KEYS
    }
    return {**times, **_memory(row, said)}


def _memory(row: ModelRow, said: Sequence[TorchPrediction]) -> dict[str, object]:
    """Peak memory while one model runs and the weights of the others are there."""
    weights = sum(part.parameter_bytes for part in said)
    known = [(part.memory, weights - part.parameter_bytes) for part in said if part.memory]
    if len(known) < len(said):
        return {}
    most, others = max(known, key=lambda own: own[0].allocated_bytes + own[1])
    ends = most.measured_as(row.memory_is)
    fits = all(m.needed_bytes + more <= m.device_bytes for m, more in known if m.device_bytes)
    names = ("memory_bytes", "memory_lo_bytes", "memory_hi_bytes")
    values = {name: end + others for name, end in zip(names, ends, strict=True)}
    return {**values, "fits": fits if most.device_bytes else None}


def _seconds(row: ModelRow, own: _Recorded) -> Answer:
    sums = {"host": 0.0}
    for recording, (_, count) in zip(own.recordings, row.runs, strict=True):
        found = works_of(recording, own.predictor.framework)
        # What was measured is 16 bits on GPUs, f32 on CPUs.
        if computes_narrow(found) == (own.spec.platform == "cpu"):
            return "another format of numbers than whole models were learned of"
        asked = own.predictor
        times, _, host = unlearned(
            found, own.spec, asked.framework, asked.bundle, recording.kept, asked.release
        )
        compiled = asked.framework == "torch-compiled"
        costs = [cost_class(work, compiled, own.spec.platform) for work in found]
        sums["host"] += count * host
        for cost, seconds in seconds_by_class(costs, times[:, 0]).items():
            sums[cost] = sums.get(cost, 0.0) + count * seconds
    return sums
