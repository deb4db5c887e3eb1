"""Named diffusers and transformers models from ``presets.yaml``.

A preset is a library class, its configuration and its inputs: nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from ....common.files import own_data
from ....common.types import typed

if TYPE_CHECKING:
    import torch

#: An input, or a list or mapping of inputs.
Inputs: TypeAlias = "torch.Tensor | list[Inputs] | dict[str, Inputs]"


@dataclass(frozen=True)
class Preset:
    """A preset of a library model.

    Attributes:
        builds: Class, with its package.
        inputs: Shapes by name, as in ``presets.yaml``.
        config: Fields of the configuration that differ from the library's defaults.
        method: Method that is called; empty for the module itself.
        samples: Passes per sample.
        size: Rows of an image; 0 if there is none.
        width: Columns of an image, if different.
    """

    builds: str
    inputs: dict[str, object]
    config: dict[str, object]
    method: str = ""
    samples: int = 1
    size: int = 0
    width: int = 0

    def made(self, batch: int, size: int) -> dict[str, Inputs]:
        """Create inputs by name, on PyTorch's default device.

        Args:
            batch: Samples.
            size: Pixels per side; 0 for the preset's default.
        """
        rows = size or self.size
        sizes = {"n": batch * self.samples, "h": rows, "w": size or self.width or rows}
        return {name: _inputs(spec, sizes) for name, spec in self.inputs.items()}


@cache
def presets() -> Mapping[str, Preset]:
    """Return the presets by name."""
    data = typed(
        dict[str, dict[str, object]], own_data("features/ir/torch/presets.yaml"), "presets"
    )
    return {name: typed(Preset, _whole(data, name), name) for name in data}


def _whole(data: Mapping[str, Mapping[str, object]], name: str) -> dict[str, object]:
    """Merge an entry with the one that it is ``like``."""
    own = data[name]
    base = _whole(data, str(own["like"])) if "like" in own else {}
    configs = [typed(dict[str, object], d.get("config", {}), name) for d in (base, own)]
    return {**base, **own, "config": {**configs[0], **configs[1]}}


def _inputs(spec: object, sizes: Mapping[str, int]) -> Inputs:
    import torch

    if isinstance(spec, Mapping):
        return {str(name): _inputs(one, sizes) for name, one in spec.items()}
    assert isinstance(spec, list), f"inputs that are a {type(spec).__name__}"
    if spec and all(isinstance(one, list) for one in spec):
        return [_inputs(one, sizes) for one in spec]
    whole = spec[:1] == ["int"]
    shape = [_dimension(str(one), sizes) for one in (spec[1:] if whole else spec)]
    return torch.zeros(shape, dtype=torch.int64 if whole else None)


def _dimension(spec: str, sizes: Mapping[str, int]) -> int:
    """Evaluate a number, or a product such as ``h/16*w/16`` with quotients rounded down."""

    def value(part: str) -> int:
        over, _, under = part.partition("/")
        return (sizes[over] if over in sizes else int(over)) // int(under or 1)

    return prod(map(value, spec.split("*")))
