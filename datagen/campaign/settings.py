"""Settings of a campaign, which are the options of its command too (``common/options.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ...common.options import Option, folder, seconds_of

#: Platforms that can be asked for; ``auto`` is the accelerator that a framework finds, else a CPU.
DEVICES = ("auto", "gpu", "tpu", "cpu")


@dataclass(frozen=True)
class CampaignSettings:
    """Settings of ``opcast campaign``."""

    out: Annotated[Path, Option("Folder to write; the same one again goes on.", check=folder)]
    budget_s: Annotated[
        float,
        Option("Time of all slices together.", ("--budget",), parse=seconds_of, typed="25m"),
    ] = 1500.0
    slice_s: Annotated[
        float | None,
        Option("Time of this call; by default all.", ("--slice",), parse=seconds_of),
    ] = None
    device: Annotated[str, Option("auto, gpu, tpu, or cpu for a rehearsal.")] = "auto"
    programs: Annotated[
        Path | None, Option("Folder of StableHLO or HLO programs to measure, too.")
    ] = None
    plan: Annotated[
        bool, Option("Tell what would be measured, and measure nothing.", ("--plan",))
    ] = False
