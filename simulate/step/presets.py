"""Workload settings of models by name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ...common.errors import PlanError
from ...common.files import own_data

#: Hint for a model that a workload cannot describe.
INSTEAD = "predict its program instead: opcast predict FILE --device NAME"


class Recurrence(NamedTuple):
    """Sizes of a recurrent layer.

    Attributes:
        inner: Columns of its input projections.
        outer: Rows of its output projection.
        state: Elements of its state per sequence, without that of the short convolution, which is
            about 2 % as large.
    """

    inner: int
    outer: int
    state: int


@dataclass(frozen=True)
class Preset:
    """A model as workload settings.

    Attributes:
        settings: Values by field of :class:`~.workload.Workload`.
        notes: Parts of the model that are left out.
        step_notes: Parts that steps leave out but serving does not.
        published: Number of parameters stated by the source; 0 if unknown.
        source: Source of the sizes.
        linear_layers: Number of recurrent layers, which have no KV cache.
        recurrence: Sizes of these layers; ``None`` if unknown.
        bare_layers: Number of layers without a feed-forward.
        weights: Format of the published weights; empty for 16 bits.
        served_only: Why only serving can describe it; empty if steps can as well.
    """

    settings: dict[str, object]
    notes: tuple[str, ...] = ()
    step_notes: tuple[str, ...] = ()
    published: float = 0.0
    source: str = ""
    linear_layers: int = 0
    recurrence: Recurrence | None = None
    bare_layers: int = 0
    weights: str = ""
    served_only: str = ""


def find_preset(name: str) -> Preset | None:
    """A model of ``presets.yaml``; ``None`` if the name is unknown.

    Args:
        name: Such as ``llama-3-8b``; case and underscores do not matter.

    Raises:
        PlanError: The model is known, but no workload can describe it.
    """
    if why := unsupported(name):
        raise PlanError(f"{name} is {why}, which no workload has", hint=INSTEAD)
    return _read()[0].get(name.lower().replace("_", "-"))


def unsupported(name: str) -> str:
    """Why no workload can describe a known model; empty for others."""
    own = name.lower().replace("_", "-")
    families = _read()[1].items()
    return next((why for f, why in families if own == f or own.startswith(f + "-")), "")


def preset_names() -> list[str]:
    """Names of all models, in the order of the file."""
    return list(_read()[0])


def family_settings() -> dict[str, dict[str, object]]:
    """Settings of each family that differ from the defaults of ``Workload``."""
    return _read()[2]


def close_names(name: str) -> list[str]:
    """Names that resemble an unknown one."""
    return difflib.get_close_matches(name.lower(), preset_names(), 4, 0.5)


@cache
def _read() -> tuple[dict[str, Preset], dict[str, str], dict[str, dict[str, object]]]:
    data = own_data("simulate/step/presets.yaml")
    presets = {}
    for family in data["families"].values():
        for name, own in family["models"].items():
            settings = {**family["common"], **own}
            notes = (*family.get("notes", ()), *settings.pop("notes", ()))
            of_steps = (*family.get("step_notes", ()), *settings.pop("step_notes", ()))
            published = float(settings.pop("published")) * 1e9
            presets[name] = Preset(settings, notes, of_steps, published, family["source"])
    return presets, data["unsupported"], data["workloads"]
