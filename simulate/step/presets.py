"""Models by name as settings of a workload."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ...common.errors import PlanError
from ...common.files import own_data

#: What to do about a model that a workload cannot describe.
INSTEAD = "predict its program instead: opcast predict FILE --device NAME"


class Recurrence(NamedTuple):
    """Sizes of a layer with a recurrent state.

    Attributes:
        inner: Columns of its input projections.
        outer: Rows of its output projection.
        state: Elements that it keeps of a sequence; its short convolution's are left out, some
            two per cent as many bytes.
    """

    inner: int
    outer: int
    state: int


@dataclass(frozen=True)
class Preset:
    """A model as settings of a workload.

    Attributes:
        settings: By field of :class:`~.workload.Workload`.
        notes: What of the model is left out.
        step_notes: What steps leave out, but serving does not.
        published: Parameters that its source states; 0 where none is known.
        source: Where the sizes are from.
        linear_layers: Layers with a recurrent state instead of attention over a cache.
        recurrence: Sizes of these layers; ``None`` where none are known.
        bare_layers: Layers without a feed-forward.
        weights: Format that a checkpoint's weights are published in; empty for 16 bits.
        served_only: Why serving alone can describe it; empty if steps can as well.
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
    """Return a model of ``presets.yaml``; ``None`` if there is none of that name.

    Args:
        name: Such as ``llama-3-8b``; case and underscores do not matter.

    Raises:
        PlanError: The model is known, but no workload can describe it.
    """
    if why := unsupported(name):
        raise PlanError(f"{name} is {why}, which no workload has", hint=INSTEAD)
    return _read()[0].get(name.lower().replace("_", "-"))


def unsupported(name: str) -> str:
    """Why no workload can describe a model that is known; empty for others."""
    own = name.lower().replace("_", "-")
    families = _read()[1].items()
    return next((why for f, why in families if own == f or own.startswith(f + "-")), "")


def preset_names() -> list[str]:
    """Names of all models, in the order of the file."""
    return list(_read()[0])


def family_settings() -> dict[str, dict[str, object]]:
    """Settings of each family in which it differs from the defaults of ``Workload``."""
    return _read()[2]


def close_names(name: str) -> list[str]:
    """Names like one that is not known."""
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
