"""Rows of tables of whole models, predicted so that each model is recorded once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ...common.errors import DatasetError, OpcastError
from ...common.ray_tasks import run_tasks
from ...features.devices.device import DeviceSpec
from ...features.ir.torch.libraries import ModelCase, build
from ...features.ir.torch.program import TorchProgram
from ...features.ir.torch.record import Recording
from ...predict.cluster.case_table import FAULTS, Cells, reason_of
from ...predict.operator.aten_costs import cost_class
from ...predict.operator.torch_framework import TorchPredictor
from ...predict.operator.torch_price import (
    computes_narrow,
    seconds_by_class,
    unlearned,
    works_of,
)

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
    """

    id: str
    case: ModelCase
    device: str
    framework: str
    measured_s: float


def model_row(record: Mapping[str, object]) -> ModelRow:
    """Read a row of a table.

    Raises:
        DatasetError: It is for several devices, or a cell is no number.
        ProgramError: A word of it is not known.
    """
    cells = Cells(record)
    if cells.count("devices", 1) > 1:
        raise DatasetError("several devices", hint="opcast simulate predicts models on clusters")
    case = ModelCase(
        library=cells.text("library"),
        model=cells.text("model"),
        batch=cells.count("batch", 1),
        img_size=cells.count("img_size", 0),
        mode=cells.text("mode") or "infer",
        dtype=cells.text("dtype") or "fp32",
        layout=cells.text("layout") or "nchw",
        torch=cells.text("torch"),
        parameters_m=cells.number("param_m", 0.0),
    )
    measured = cells.number("latency_ms") * 1e-3
    framework = cells.text("framework") or "torch-eager"
    if case.torch:
        framework = f"{framework}@{case.torch}"
    return ModelRow(cells.text("id"), case, cells.text("device"), framework, measured)


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

        Args:
            rows: The rows.
            show: Told of progress.
        """
        found = self._read()
        left = [row for row in rows if row.id not in found]
        show(len(rows) - len(left), len(rows))
        # One recording for all devices, frameworks and releases that run the same.
        left.sort(key=lambda row: repr(row.case.recorded))
        groups = [list(own) for _, own in groupby(left, key=lambda row: row.case.recorded)]
        with self.kept.open("a", encoding="utf-8") as file:
            for place, answers in self._made(groups):
                for row, answer in zip(groups[place], answers, strict=True):
                    found[row.id] = answer
                    line = {"identity": self.identity, "id": row.id, "answer": answer}
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
    return [_answer(predictor, recorded) for predictor, recorded in _recorded(model, rows)]


def seconds_of(model: str, rows: Sequence[ModelRow]) -> list[Answer]:
    """Seconds by class of cost of rows of one recording, without what whole models taught.

    Args:
        model: Name or folder of the model of operators.
        rows: Rows whose cases are recorded alike.
    """
    return [_seconds(predictor, recorded) for predictor, recorded in _recorded(model, rows)]


#: A device with what was recorded for it, or why nothing was.
_Recorded = tuple[DeviceSpec, Recording] | str


def _recorded(
    model: str, rows: Sequence[ModelRow]
) -> Iterator[tuple[TorchPredictor | None, _Recorded]]:
    """Build and record once what rows have in common."""
    recording: Recording | None = None
    program: TorchProgram | None = None
    for row in rows:
        try:
            predictor = TorchPredictor(row.framework, model)
            spec = predictor.device(row.device)
            program = program or build(row.case)
            recording = predictor.record(program, spec, recording)
            yield predictor, (spec, recording)
        except (OpcastError, *FAULTS) as error:
            yield None, reason_of(error)


def _answer(predictor: TorchPredictor | None, recorded: _Recorded) -> Answer:
    if isinstance(recorded, str) or predictor is None:
        return str(recorded)
    spec, recording = recorded
    try:
        said = predictor.price(recording, spec)
    except (OpcastError, *FAULTS) as error:
        return reason_of(error)
    times = {"latency_us": said.latency_us, "lo_us": said.lo_us, "hi_us": said.hi_us}
    return {**times, "memory_bytes": said.peak_memory_bytes}


def _seconds(predictor: TorchPredictor | None, recorded: _Recorded) -> Answer:
    if isinstance(recorded, str) or predictor is None:
        return str(recorded)
    spec, recording = recorded
    found = works_of(recording, predictor.framework)
    # What was measured is 16 bits on GPUs, f32 on CPUs.
    if computes_narrow(found) == (spec.platform == "cpu"):
        return "another format of numbers than whole models were learned of"
    times, _, launch = unlearned(found, spec, predictor.bundle, recording.kept)
    compiled = predictor.framework == "torch-compiled"
    costs = [cost_class(work, compiled) for work in found]
    host = sum(work.launches for work in found) * launch
    return {"host": host, **seconds_by_class(costs, times[:, 0])}
