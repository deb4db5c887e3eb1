"""The families with their parameters and sizes, read without JAX from ``families.yaml``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ...common.files import parse_yaml

# Kept apart from the models, so that listing families does not import JAX.
Setting = int | float | str | bool
"""A value of a parameter of a family."""

# Parameters of every family; families override the defaults.
COMMON: dict[str, Setting] = {
    "batch": 8,
    "mode": "forward",
    "dtype": "f32",
    "optimizer": "adam",
    "data_parallel": 1,
}
COMMON_CHOICES: dict[str, tuple[Setting, ...]] = {
    "mode": ("forward", "train"),
    "dtype": ("f32", "bf16"),
    "optimizer": ("adam", "sgd"),
}
# Names of `opcast simulate` for the same thing, which settings may use as well.
ALIASES = {"d_model": "dim", "d_ff": "hidden", "n_layers": "layers", "sequence": "seq"}
_FILE = Path(__file__).with_name("families.yaml")


@dataclass(frozen=True)
class Family:
    """A parametrised ML program.

    Attributes:
        name: Name by which it is built.
        summary: One-line description.
        module: Module of :mod:`.families` that holds it.
        defaults: Every parameter with its default; the default's type is the parameter's type.
        choices: Allowed values of parameters that take only some.
        variants: Sizes of the model by parameter and its value, such as blocks by depth.
        headline: Parameters that always appear in a workload's name.
        sizes: Settings of the programs of each suite, as texts such as "batch=8 mode=train".
    """

    name: str
    summary: str
    module: str
    defaults: Mapping[str, Setting]
    choices: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)
    headline: tuple[str, ...] = ("batch",)
    sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variants: Mapping[str, Mapping[Setting, Mapping[str, Any]]] = field(default_factory=dict)

    def variant(self, settings: Mapping[str, Setting]) -> dict[str, Any]:
        """The sizes that stand for a value of a parameter."""
        return {
            name: tuple(value) if isinstance(value, list) else value
            for key, sizes in self.variants.items()
            for name, value in sizes[settings[key]].items()
        }


@cache
def own_families() -> dict[str, Family]:
    """Every family of opcast by name."""
    data: Any = parse_yaml(_FILE.read_text(encoding="utf-8"))
    return {
        name: Family(
            name=name,
            summary=own["summary"],
            module=own["module"],
            defaults=COMMON | own["defaults"],
            # A parameter with variants has their names for choices.
            choices=COMMON_CHOICES | _tuples(own.get("variants", {}) | own.get("choices", {})),
            headline=tuple(own["headline"]),
            sizes=_tuples(own["sizes"]),
            variants=own.get("variants", {}),
        )
        for name, own in data.items()
    }


def _tuples(lists: Mapping[str, Iterable[Any]]) -> dict[str, tuple[Any, ...]]:
    return {key: tuple(values) for key, values in lists.items()}
