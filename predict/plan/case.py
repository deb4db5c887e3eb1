"""One question about plans: where a program runs, what may be cut, and how long to search.

The fields are options of ``opcast plan`` and keyword arguments of ``opcast.plan``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...common.options import LoweringOpt, ModelOpt, Option, Ray, bytes_of, folder, seconds_of

#: Axes of a mesh in rank order, outermost first: what communicates most often is innermost, where
#: links are fastest.
AXES = ("data", "fsdp", "sequence", "expert", "tensor")
#: The axis of stages, outside of all others: what communicates least.
PIPELINE = "pipeline"


def _batch_dims(text: str) -> Mapping[str, int]:
    from .arguments import parse_batch_dims

    return parse_batch_dims(text)


def _axes(text: str) -> tuple[str, ...]:
    return tuple(axis.strip() for axis in text.split(","))


@dataclass(frozen=True)
class PlanCase:
    """What :func:`opcast.plan` is asked, beside the program.

    Attributes:
        cluster: Name (``opcast cluster --list``), path of a YAML file, or description.
        batch_dims: The batch dimension by name or number of an argument; by default the first one
            of arguments that are neither donated nor parameters.
        budget_s: Seconds of the whole search. What would not end in time, as far as plans before
            tell, is not begun; one plan is compiled in any case.
        memory: Bytes that a device may use; 0 for all that it has.
        axes: Axes of the mesh to use, of :data:`AXES` and ``pipeline``; by default all,
            ``pipeline`` where there are several boxes or nothing else may fit.
        compiles: Plans to compile, the best by our own reckoning. By default a dozen, which compile
            in minutes (engineering choice).
        remat: Layers of the forward pass that are computed again in the backward pass, the first
            ones; ``all``, or ``auto`` to search where the fastest plan may not fit. 0 forbids it.
        micro_batches: Parts of the batch whose gradients are added up before the optimiser;
            ``auto`` as above. 1 forbids it.
        model: Name or folder of the kernel model.
        lowering: Lowering of the partitioned programs.
        out: Folder of results, from which a search resumes; ``None`` to keep none.
        workers: Processes that compile.
        ray: Address of a Ray cluster instead.
    """

    cluster: Annotated[str, Option("Cluster name or file, such as dgx-h100-x64.")]
    batch_dims: Annotated[
        Mapping[str, int] | None,
        Option(
            "Batch dimensions, argument:dimension, as 3:0,4:0; default: found.", parse=_batch_dims
        ),
    ] = None
    budget_s: Annotated[
        float,
        Option(
            "Time of the search, such as 90s, 10m or 1h.",
            ("--budget",),
            parse=seconds_of,
            typed="10m",
        ),
    ] = 600.0
    memory: Annotated[
        float, Option("Memory that a device may use, such as 60GiB; default: all.", parse=bytes_of)
    ] = 0.0
    axes: Annotated[
        Sequence[str] | None,
        Option(
            "Axes of the mesh: pipeline,data,fsdp,sequence,expert,tensor; default: all, pipeline "
            "over several boxes or where nothing else fits.",
            parse=_axes,
        ),
    ] = None
    compiles: Annotated[int, Option("Most plans to compile.", least=1)] = 12
    remat: Annotated[
        str, Option("Layers to compute again in the backward pass: auto, all, a number.")
    ] = "auto"
    micro_batches: Annotated[
        str, Option("Parts of the batch whose gradients are added up: auto, a number.")
    ] = "auto"
    model: ModelOpt = "default"
    lowering: LoweringOpt = "auto"
    out: Annotated[
        Path | None, Option("Results folder; a search resumes from it.", check=folder)
    ] = Path("plan")
    workers: Annotated[int, Option("Processes that compile.", least=1)] = 1
    ray: Ray = ""

    def __post_init__(self) -> None:
        """Check the axes, and the numbers that may be words.

        Raises:
            PlanError: One is not understood.
        """
        from ...common.errors import PlanError

        unknown = [axis for axis in self.used_axes if axis not in (PIPELINE, *AXES)]
        if unknown or not self.used_axes:
            raise PlanError(
                f"{unknown[0] if unknown else ''!r} is no axis of a plan",
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
        """Whether to search pipelines; ``None`` to find out whether it is worth it."""
        return None if self.axes is None else PIPELINE in self.axes

    @property
    def layers(self) -> int | None:
        """Layers to rematerialise, -1 for all; ``None`` to search."""
        text = str(self.remat).strip()
        return None if text == "auto" else -1 if text == "all" else int(text)

    @property
    def parts(self) -> int | None:
        """Number of micro-batches; ``None`` to search."""
        text = str(self.micro_batches).strip()
        return None if text == "auto" else int(text)
