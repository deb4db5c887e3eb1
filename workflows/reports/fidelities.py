"""Report on fidelities: rank correlations of estimators over zoo programs and their kernels."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ...common.errors import LoweringError
from ...common.files import own_data, write_text
from ...common.types import JsonObject

if TYPE_CHECKING:
    from rich.console import Console

    from ...features.devices.device import DeviceSpec
    from ...predict.program.predictor import Predictor
    from .settings import FidelitySettings

#: Version of the stored predictions, to be increased when their content changes.
VERSION = 1
#: Minimum number of programs or kernels for a rank correlation; with two it is always 1 or -1.
LEAST = 3
#: Maximum length of a program's name in the printed table.
_TITLE = 38


@dataclass
class FidelityReport:
    """Predictions by several estimators, and tables of them.

    Attributes:
        answers: Predictions of each program on each device, see :func:`_ask`.
        failures: Programs that could not be lowered, with the reason.
        seconds: Run time of the report.
    """

    answers: list[JsonObject] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def programs(self) -> pd.DataFrame:
        """Tabulate programs: ``device program kernels <model>_us <model>_covered``."""
        return pd.DataFrame(
            [
                {
                    "device": own["device"],
                    "program": own["program"],
                    "kernels": own["count"],
                    **{f"{name}_us": t["latency_us"] for name, t in own["totals"].items()},
                    **{f"{name}_covered": t["covered"] for name, t in own["totals"].items()},
                }
                for own in self.answers
            ]
        )

    def kernels(self) -> pd.DataFrame:
        """Tabulate distinct kernels: ``device hash kind``, and ``<model>`` in µs if modelled."""
        rows = [{"device": a["device"], **row} for a in self.answers for row in a["kernels"]]
        frame = pd.DataFrame(rows)
        return frame.drop_duplicates(["device", "hash"]).reset_index(drop=True)

    def correlations(self) -> pd.DataFrame:
        """Compute Spearman's ρ of all pairs of models, by device, over programs and kernels.

        Only kernels that both models estimate without fallback count; ``products`` are the matrix
        products and convolutions among them. ``ratio`` is the median over programs of the second
        model's time relative to the first one's.
        """
        if not self.answers:
            return pd.DataFrame()
        programs, kernels = self.programs(), self.kernels()
        names = list(self.answers[0]["totals"])
        rows = []
        for device in programs["device"].unique():
            own = programs[programs["device"] == device]
            single = kernels[kernels["device"] == device]
            # Simulators of systolic arrays model only matrix products and convolutions.
            product = single[single["kind"].isin(("gemm", "conv"))]
            for first, second in combinations(names, 2):
                times = own[[f"{first}_us", f"{second}_us"]]
                rows.append(
                    {
                        "device": device,
                        "models": f"{first} / {second}",
                        "programs": len(times),
                        "rho_programs": rank_correlation(times),
                        "kernels": _both(single, first, second),
                        "rho_kernels": rank_correlation(single[[first, second]]),
                        "products": _both(product, first, second),
                        "rho_products": rank_correlation(product[[first, second]]),
                        "ratio": float((times.iloc[:, 1] / times.iloc[:, 0]).median()),
                    }
                )
        return pd.DataFrame(rows)

    def to_dict(self) -> JsonObject:
        """Convert to the output of ``opcast fidelities --json``."""
        return {
            "correlations": json.loads(self.correlations().to_json(orient="records")),
            "programs": json.loads(self.programs().to_json(orient="records")),
            "failures": self.failures,
            "seconds": self.seconds,
        }


def rank_correlation(pairs: pd.DataFrame) -> float:
    """Compute Spearman's ρ of two columns over the rows with both; NaN if there are too few."""
    from ...models.training_data.metrics import spearman

    both = pairs.dropna()
    if len(both) < LEAST:
        return float("nan")
    return spearman(*(both.iloc[:, i].to_numpy(np.float64) for i in (0, 1)))


def _both(frame: pd.DataFrame, first: str, second: str) -> int:
    return int(frame[[first, second]].notna().all(axis=1).sum())


def run_fidelity_report(settings: FidelitySettings) -> FidelityReport:
    """Predict every program by every model, reusing earlier predictions from the folder.

    Args:
        settings: The devices, models and programs, and the folder of the predictions.

    Raises:
        OpcastError: A device or model is not usable.
    """
    from ...common.progress import tracked
    from ...predict.program.fidelities import device_for, load_fidelities

    start = time.monotonic()
    predictors = load_fidelities(settings.models)
    tasks = list(_tasks(settings))
    report = FidelityReport()
    settings.save(settings.out)
    for name in settings.devices:
        device = device_for(name, predictors)
        marks = _marks(predictors, device)
        title_of_bar = f"programs on {device.name}"
        for title, mlir in tracked(tasks, len(tasks), title_of_bar, settings.progress):
            key = _key(title, mlir, device, settings.lowering, marks)
            path = settings.out / f"{key}.json"
            if not path.is_file():
                answer = _ask(title, mlir, device, settings.lowering, predictors)
                write_text(path, json.dumps(answer))
            # Always read from the file, so that new and resumed reports have the same rounding.
            answer = json.loads(path.read_text())
            if "reason" in answer:
                report.failures.append(answer)
            else:
                report.answers.append(answer)
    report.seconds = time.monotonic() - start
    return report


def _tasks(settings: FidelitySettings) -> Iterator[tuple[str, str]]:
    """Yield titles and texts of the programs."""
    from ...datagen.zoo import build, parse_settings, suite, workload_name

    split = (line.split() for line in own_data("workflows/reports/reports.yaml")["fidelities"])
    own = [(family, parse_settings(family, sizes)) for family, *sizes in split]
    programs = suite(settings.suite) if settings.suite else own
    if settings.limit and settings.limit < len(programs):
        # Evenly spaced, so that most families are included.
        places = np.linspace(0, len(programs) - 1, settings.limit).round().astype(int)
        programs = [programs[i] for i in places.tolist()]
    for family, sizes in programs:
        # Without source locations, whose paths would change the key of equal programs.
        yield workload_name(family, sizes), build(family, **sizes).mlir(debug_info=False)


def _marks(predictors: Mapping[str, Predictor], device: DeviceSpec) -> list[str]:
    """Identify the models, parameters and versions that a prediction depends on."""
    from ...predict.locate import is_untrained, model_hash
    from ...predict.program.fidelities import LEARNED

    marks = []
    for name, predictor in predictors.items():
        estimator = predictor.model_for(device).estimator
        params = json.dumps(getattr(estimator, "params", {}), sort_keys=True, default=str)
        marks.append(f"{name} {getattr(estimator, 'version', '')} {params}")
        if not is_untrained(name):
            marks.append(model_hash("default" if name == LEARNED else name))
    return marks


def _key(title: str, mlir: str, device: DeviceSpec, lowering: str, marks: Sequence[str]) -> str:
    described = json.dumps(asdict(device), sort_keys=True, default=str)
    # Joined by NUL, which no part contains, so that the key is unambiguous.
    parts = (str(VERSION), title, mlir, described, lowering, *marks)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _ask(
    title: str, mlir: str, device: DeviceSpec, lowering: str, predictors: Mapping[str, Predictor]
) -> dict[str, object]:
    """Predict a program and its distinct kernels by all models."""
    from ...features.ir.reader import read_program
    from ...features.lowering.lower import lower
    from ...predict.program.fidelities import fidelity

    named = {"program": title, "device": device.name}
    try:
        lowered = lower(read_program(mlir), lowering, device=device)
    except LoweringError as error:
        return {**named, "reason": str(error)}
    predictions = [fidelity(name, own, lowered, device) for name, own in predictors.items()]
    # Reversed, so that the first of equal kernels is kept.
    first = {k.hash: i for i, k in reversed(list(enumerate(lowered.kernels))) if k.takes_time}
    kernels = [
        {
            "hash": digest,
            "kind": lowered.kernels[place].kind,
            **{
                f.name: f.prediction.kernels[place].latency_us if f.own[place] else None
                for f in predictions
            },
        }
        for digest, place in first.items()
    ]
    totals = {
        f.name: {"latency_us": f.prediction.latency_us, "covered": f.covered} for f in predictions
    }
    count = sum(kernel.takes_time for kernel in lowered.kernels)
    return {
        **named,
        "lowering": lowered.lowering,
        "count": count,
        "totals": totals,
        "kernels": kernels,
    }


def print_report(console: Console, report: FidelityReport) -> None:
    """Print the programs and the rank correlations."""
    from ...common.tables_text import print_frame

    if report.answers:
        title = "programs: µs per run, and share predicted without fallback"
        print_frame(console, _shown(report), title)
        correlations = report.correlations()
        for column in ("rho_programs", "rho_kernels", "rho_products", "ratio"):
            correlations[column] = [f"{v:.2f}" if v == v else "–" for v in correlations[column]]
        print_frame(console, correlations, "rank correlation (Spearman) of pairs of estimators")
    for failure in report.failures:
        console.print(f"{failure['program']} on {failure['device']}: {failure['reason']}")
    console.print(f"{report.seconds:.0f} s")


def _shown(report: FidelityReport) -> pd.DataFrame:
    """Tabulate the programs as text, with a column for each model."""
    return pd.DataFrame(
        [
            {
                "device": own["device"],
                "program": _short(own["program"]),
                "kernels": own["count"],
                **{
                    name: f"{total['latency_us']:.0f} {total['covered']:.0%}"
                    for name, total in own["totals"].items()
                },
            }
            for own in report.answers
        ]
    )


def _short(title: str) -> str:
    return title if len(title) <= _TITLE else title[: _TITLE - 1] + "…"
