"""Check whether programs or training steps fit in the memory of devices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...common.files import is_description
from ...common.options import (
    HfOpt,
    LossOpt,
    LoweringOpt,
    Option,
    ProgramOrNone,
    TrainOpt,
    Trips,
    Workload,
)
from ...simulate.step.settings import SizesOpt

if TYPE_CHECKING:
    from ...predict.fit import MemoryFit
    from ...simulate.clusters.topology import Cluster


@dataclass(frozen=True)
class FitSettings:
    """Settings of ``opcast fit``: a program, or a training step under a plan."""

    program: ProgramOrNone = None
    device: Annotated[
        str, Option("Name (opcast device --list) or device file; several with commas.")
    ] = ""
    framework: Annotated[
        str,
        Option(
            "Framework of a PyTorch program: xla, torch-eager or torch-compiled. With --workload, "
            "framework of the step, such as nanotron."
        ),
    ] = ""
    train: TrainOpt = ""
    loss: LossOpt = ""
    lowering: LoweringOpt = "auto"
    trip_count: Trips = None
    workload: Workload = ""
    hf: HfOpt = None
    settings: SizesOpt = field(default_factory=dict)
    cluster: Annotated[
        str, Option("Cluster of a step, such as dgx-h100-x128, instead of --device.")
    ] = ""
    plan: Annotated[str, Option("Parallel plan such as tp=8,pp=2,dp=8, or a YAML file.")] = ""
    risk: Annotated[
        float,
        Option("Maximum probability of running out of memory.", least=0.01, most=0.99),
    ] = 0.5


def program_fits(settings: FitSettings, program: object) -> list[MemoryFit]:
    """Check on each device whether a program fits.

    Args:
        settings: The devices and options.
        program: The program.

    Raises:
        OpcastError: The program or a device is not usable.
    """
    from ...features.lowering.options import LoweringOptions
    from ...predict.devices import resolve_device
    from ...predict.fit import program_fit, torch_fit
    from ...predict.locate import trained_devices
    from ...predict.operator.torch_framework import TorchPredictor
    from ...predict.program.case import ProgramCase

    own = settings
    name = str(own.program).rpartition("/")[2]
    devices = own.device.split(",")
    if own.framework not in ("", "xla"):
        predictor = TorchPredictor(own.framework)
        return [torch_fit(predictor, program, predictor.device(d), own.risk, name) for d in devices]
    found, known = [], trained_devices()
    for device in devices:
        options = LoweringOptions(own.lowering, resolve_device(device, known), own.trip_count)
        found.append(program_fit(ProgramCase(program, options), own.risk, name))
    return found


def step_fits(settings: FitSettings, workload: str) -> list[MemoryFit]:
    """Check whether a training step fits, on a cluster or on a single device of each type.

    Args:
        settings: The cluster or devices, the plan and options.
        workload: Name or file of the model.

    Raises:
        OpcastError: The model, plan or a cluster is not usable.
    """
    from ...predict.cluster.step_case import PlannedStep
    from ...predict.fit import step_fit
    from ...simulate.step.named_workloads import read_workload

    own = settings
    work = read_workload(workload, own.settings)
    case = PlannedStep(cluster=own.cluster, plan=own.plan, framework=own.framework)
    places = [own.cluster] if own.cluster else map(_alone, own.device.split(","))
    # A name such as llama-3.1-405b has no suffix.
    file = is_description(workload)
    name = Path(workload).stem if file else workload
    return [step_fit(case, place, work, own.risk, name) for place in places]


def _alone(device: str) -> Cluster:
    """Make a cluster of a single device."""
    from ...predict.devices import resolve_device
    from ...simulate.clusters.catalogue import joined

    return replace(joined(resolve_device(device, {}), 1), device=device)
