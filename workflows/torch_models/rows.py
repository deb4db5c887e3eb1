"""Read and predict rows of tables of whole models, recording each model only once."""

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
from ...common.files import append_lines, read_lines
from ...common.interval import LATENCY_KEYS
from ...common.tasks import run_pieces
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

#: Bytes per unit of memory, by suffix of the column.
UNITS = {"bytes": 1.0, "mib": 2.0**20, "gib": 2.0**30}
#: Prediction of a row, by column, or the reason of a failure.
Answer = Mapping[str, object] | str


@dataclass(frozen=True)
class ModelRow:
    """A row of a table of whole models.

    Attributes:
        id: Id of the row.
        case: The model and how it is run.
        device: Name of the chip.
        framework: ``torch-eager`` or ``torch-compiled``, followed by ``@2.4`` if the release is
            known.
        measured_s: Measured seconds of a step, else NaN.
        parts: Models that run one after the other, and the number of runs of each; the case once if
            empty.
        memory_is: Definition of the measured peak memory, one of
            :data:`~opcast.predict.operator.torch_memory.MEASURED`.
        memory_bytes: Measured peak memory in bytes, else NaN.
        ran: Whether it ran rather than running out of memory; ``None`` if unknown.
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
        """Models with the number of runs of each."""
        return self.parts or ((self.case, 1),)

    @property
    def recorded(self) -> tuple[ModelCase, ...]:
        """Cases to record."""
        return tuple(case.recorded for case, _ in self.runs)


def model_row(record: Mapping[str, object]) -> ModelRow:
    """Read a row of a table.

    Raises:
        DatasetError: It is for several devices, or a cell is not a number.
        ProgramError: A value is unknown.
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
    """Parse models and counts of a cell such as ``sd-1.5/text + 50*sd-1.5/unet + sd-1.5/vae``."""
    found = []
    for part in text.split(" + "):
        count, _, name = part.strip().rpartition("*")
        found.append((name, int(count or 1)))
    # The last, which runs most often, represents the row.
    return sorted(found, key=lambda own: own[1])


def _seconds_of(cells: Cells, batch: int) -> float:
    """Measured seconds of a step, else NaN."""
    rate = cells.number("throughput_samples_s")
    seconds = (cells.number("latency_ms") * 1e-3, cells.number("latency_s"), batch / rate)
    return next((own for own in seconds if np.isfinite(own)), float("nan"))


def _memory_of(cells: Cells) -> tuple[str, float]:
    """Definition and bytes of the measured peak memory; NaN if it was not measured."""
    for what in MEASURED:
        for unit, size in UNITS.items():
            own = cells.number(f"{what}_{unit}")
            if np.isfinite(own):
                return what, own * size
    return MEASURED[0], float("nan")


@dataclass(frozen=True)
class Asking:
    """Settings of the prediction of rows.

    Attributes:
        model: Name or folder of the operator model.
        ray: Address of a Ray cluster; empty for this process.
        kept: File of finished rows, which is read and extended.
        identity: Identifies versions and models; finished rows with another identity are ignored.
        work: Function that predicts rows with the same recording, given the model.
    """

    model: str
    ray: str
    kept: Path
    identity: str
    work: Callable[[str, Sequence[ModelRow]], list[Answer]] | None = None

    def predict(self, rows: Sequence[ModelRow], show: Callable[[int, int], None]) -> list[Answer]:
        """Predict rows, storing finished ones, so that stopped work can be resumed.

        Failed rows are tried again, because a missing package may have been installed.

        Args:
            rows: The rows.
            show: Called with the progress.
        """
        found: dict[str, Answer] = {
            own["id"]: own["answer"]
            for own in read_lines(self.kept)
            if own["identity"] == self.identity
        }
        left = [row for row in rows if row.id not in found]
        show(len(rows) - len(left), len(rows))
        # Devices, frameworks and releases that run the same case share its recording.
        left.sort(key=lambda row: repr(row.recorded))
        groups = [list(own) for _, own in groupby(left, key=lambda row: row.recorded)]
        for place, answers in run_pieces(self.work or answers_of, self.model, groups, ray=self.ray):
            lines = ""
            for row, answer in zip(groups[place], answers, strict=True):
                found[row.id] = answer
                line = {"identity": self.identity, "id": row.id, "answer": answer}
                if not isinstance(answer, str):
                    lines += json.dumps(line) + "\n"
            append_lines(self.kept, lines)
            show(sum(row.id in found for row in rows), len(rows))
        return [found[row.id] for row in rows]


def answers_of(model: str, rows: Sequence[ModelRow]) -> list[Answer]:
    """Predict rows with the same recording.

    Args:
        model: Name or folder of the operator model.
        rows: The rows.
    """
    return _asked(_answer, rows, _recorded(model, rows))


def seconds_of(model: str, rows: Sequence[ModelRow]) -> list[Answer]:
    """Predict seconds by class of cost for rows with the same recording, without learned factors.

    Args:
        model: Name or folder of the operator model.
        rows: The rows.
    """
    return _asked(_seconds, rows, _recorded(model, rows, times_alone=True))


@dataclass(frozen=True)
class _Recorded:
    """Recordings of a row's models on its device."""

    predictor: TorchPredictor
    spec: DeviceSpec
    recordings: Sequence[Recording]


#: Cached, because loading the operator model takes as long as recording a small model.
_predictor = cache(TorchPredictor)


def _recorded(
    model: str, rows: Sequence[ModelRow], *, times_alone: bool = False
) -> Iterator[_Recorded | str]:
    """Build and record the models of rows, each only once; yield the reasons of failures."""
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
    """Apply a function to each row and its recordings; failures become reasons."""
    answers: list[Answer] = []
    for row, own in zip(rows, recorded, strict=True):
        try:
            answers.append(own if isinstance(own, str) else ask(row, own))
        except (OpcastError, *FAULTS) as error:
            answers.append(reason_of(error))
    return answers


def _answer(row: ModelRow, own: _Recorded) -> Answer:
    parts = [own.predictor.price(recording, own.spec) for recording in own.recordings]
    counts = [count for _, count in row.runs]
    # The bounds add up, because errors of runs of a model are equal and those of models correlated.
    times = {
        name: sum(n * float(getattr(part, name)) for n, part in zip(counts, parts, strict=True))
        for name in LATENCY_KEYS
    }
    return {**times, **_memory(row, parts)}


def _memory(row: ModelRow, parts: Sequence[TorchPrediction]) -> dict[str, object]:
    """Peak memory while one model runs and the weights of the others stay resident."""
    weights = sum(part.parameter_bytes for part in parts)
    known = [(part.memory, weights - part.parameter_bytes) for part in parts if part.memory]
    if len(known) < len(parts):
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
        found = works_of(recording, own.predictor.framework, own.spec)
        # Training data are 16-bit on GPUs and f32 on CPUs.
        if computes_narrow(found) == (own.spec.platform == "cpu"):
            return "a number format without training data"
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
