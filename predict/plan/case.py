"""Settings of a plan search: where a program runs, what may be sharded, and how long to search.

The fields are options of ``opcast plan`` and keyword arguments of ``opcast.plan``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...common.options import Budget, LoweringOpt, ModelOpt, Option, Ray, bytes_of, folder

#: Mesh axes in rank order, outermost first: the axes that communicate most often are innermost,
#: where links are fastest.
AXES = ("data", "fsdp", "sequence", "expert", "tensor")
#: The axis of pipeline stages, outside all others since it communicates least.
PIPELINE = "pipeline"


def _batch_dims(text: str) -> Mapping[str, int]:
    from .arguments import parse_batch_dims

    return parse_batch_dims(text)


def _axes(text: str) -> tuple[str, ...]:
    return tuple(axis.strip() for axis in text.split(","))


@dataclass(frozen=True)
class PlanCase:
    """Arguments of :func:`opcast.plan` besides the program.

    Attributes:
        cluster: Name (``opcast cluster --list``), path of a YAML file, or description.
        batch_dims: Batch dimension by name or number of an argument; by default the first dimension
            of arguments that are neither donated nor parameters.
        budget_s: Time of the whole search in seconds. Compilations that would not finish in time,
            judging by earlier ones, are not started; one plan is compiled in any case.
        memory: Bytes that may be used per device; 0 for all.
        axes: Mesh axes to use, of :data:`AXES` and ``pipeline``; by default all, but ``pipeline``
            only with several nodes or if nothing else may fit.
        compiles: Maximum plans to compile, the best by the screening. By default a dozen, which
            compile in minutes (engineering choice).
        remat: Number of layers, from the first on, whose forward pass is recomputed in the backward
            pass; ``all``, or ``auto`` to search if the fastest plan may not fit. 0 disables it.
        micro_batches: Number of micro-batches whose gradients are accumulated; ``auto`` as above.
            1 disables it.
        model: Name or folder of the kernel model.
        lowering: Lowering of the partitioned programs.
        out: Results folder, from which a search resumes; ``None`` to keep no results.
        workers: Number of compiling processes.
        ray: Address of a Ray cluster to use instead.
    """

    cluster: Annotated[str, Option("Cluster name or file, such as dgx-h100-x64.")]
    batch_dims: Annotated[
        Mapping[str, int] | None,
        Option(
            "Batch dimensions, argument:dimension, as 3:0,4:0; default: detected.",
            parse=_batch_dims,
        ),
    ] = None
    budget_s: Budget = 600.0
    memory: Annotated[
        float, Option("Memory to use per device, such as 60GiB; default: all.", parse=bytes_of)
    ] = 0.0
    axes: Annotated[
        Sequence[str] | None,
        Option(
            "Axes of the mesh: pipeline,data,fsdp,sequence,expert,tensor; default: all, pipeline "
            "only over several nodes or if nothing else fits.",
            parse=_axes,
        ),
    ] = None
    compiles: Annotated[int, Option("Maximum plans to compile.", least=1)] = 12
    remat: Annotated[
        str, Option("Layers to recompute in the backward pass: auto, all, or a number.")
    ] = "auto"
    micro_batches: Annotated[
        str, Option("Micro-batches for gradient accumulation: auto, or a number.")
    ] = "auto"
    model: ModelOpt = "default"
    lowering: LoweringOpt = "auto"
    out: Annotated[
        Path | None, Option("Results folder; a search resumes from it.", check=folder)
    ] = Path("plan")
    workers: Annotated[int, Option("Number of compiling processes.", least=1)] = 1
    ray: Ray = ""

    def __post_init__(self) -> None:
        """Check the axes, and options that take a number or a word.

        Raises:
            PlanError: A value is invalid.
        """
        from ...common.errors import PlanError

        unknown = [axis for axis in self.used_axes if axis not in (PIPELINE, *AXES)]
        if unknown or not self.used_axes:
            raise PlanError(
                f"{unknown[0] if unknown else ''!r} is not an axis of a plan",
                where="--axes",
                hint=f"axes are {', '.join((PIPELINE, *AXES))}",
            )
        for option, given, least, words in (
            ("--remat", self.remat, 0, ("auto", "all")),
            ("--micro-batches", self.micro_batches, 1, ("auto",)),
        ):
            text = str(given).strip()
            if text not in words and not (text.isdecimal() and int(text) >= least):
                raise PlanError(
                    f"{text!r} is not understood",
                    where=option,
                    hint=f"{', '.join(words)} or a number from {least}",
                )

    @property
    def used_axes(self) -> tuple[str, ...]:
        """Axes to use; :data:`AXES` by default."""
        return AXES if self.axes is None else tuple(self.axes)

    @property
    def pipelines(self) -> bool | None:
        """Whether to search pipelines; ``None`` to decide during the search."""
        return None if self.axes is None else PIPELINE in self.axes

    @property
    def layers(self) -> int | None:
        """Layers to rematerialize, -1 for all; ``None`` to search."""
        text = str(self.remat).strip()
        return None if text == "auto" else -1 if text == "all" else int(text)

    @property
    def parts(self) -> int | None:
        """Number of micro-batches; ``None`` to search."""
        text = str(self.micro_batches).strip()
        return None if text == "auto" else int(text)
