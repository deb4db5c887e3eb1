"""Finds, checks and builds the programs of the zoo, and writes them as StableHLO files.

Families with their parameters and sizes are read from ``families.yaml``, without JAX.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ...common import plugins
from ...common.errors import OpcastError
from ...common.files import own_data, write_bytes
from ...common.types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from .workload import Workload


# Separate from the models, so that listing families does not import JAX.
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
# Aliases from `opcast simulate`, which settings may use as well.
ALIASES = {"d_model": "dim", "d_ff": "hidden", "n_layers": "layers", "sequence": "seq"}
GROUP = "opcast.workloads"
"""Entry points of modules with a ``FAMILY`` and a ``model``, by the family's name."""
FORMATS = ("text", "bytecode", "portable", "jax-export")
"""Formats that ``export`` writes."""
BUDGETS = ("quick", "standard", "full")
"""Suites by growing cost: "full" is "standard" and the sizes of a large accelerator."""


@dataclass(frozen=True)
class Family:
    """A parametrised ML program.

    Attributes:
        name: Name by which it is built.
        summary: One-line description.
        module: Module of :mod:`.families` that contains it.
        defaults: Every parameter with its default; the default's type is the parameter's type.
        choices: Allowed values of parameters with a fixed set of values.
        variants: Sizes of the model by parameter and value, such as blocks by depth.
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
    variants: Mapping[str, Mapping[Setting, JsonMapping]] = field(default_factory=dict)

    def variant(self, settings: Mapping[str, Setting]) -> JsonObject:
        """Sizes that the values of parameters with variants stand for."""
        return {
            name: tuple(value) if isinstance(value, list) else value
            for key, sizes in self.variants.items()
            for name, value in sizes[settings[key]].items()
        }


@cache
def own_families() -> dict[str, Family]:
    """All families of opcast by name."""
    return {
        name: Family(
            name=name,
            summary=own["summary"],
            module=own["module"],
            defaults=COMMON | own["defaults"],
            # The choices of a parameter with variants are the names of the variants.
            choices=COMMON_CHOICES | _tuples(own.get("variants", {}) | own.get("choices", {})),
            headline=tuple(own["headline"]),
            sizes=_tuples(own["sizes"]),
            variants=own.get("variants", {}),
        )
        for name, own in own_data("datagen/zoo/families.yaml").items()
    }


def _tuples(lists: Mapping[str, Iterable[Any]]) -> dict[str, tuple[Any, ...]]:
    return {key: tuple(values) for key, values in lists.items()}


def all_families() -> dict[str, Family]:
    """All families by name, families of other packages after opcast's."""
    own = own_families()
    # A plug-in cannot replace a family: its name would refer to two programs in a dataset.
    return own | {name: family(name) for name in plugins.found(GROUP) if name not in own}


def family(name: str) -> Family:
    """The family called ``name``.

    Raises:
        OpcastError: There is none, or a plug-in declares none.
    """
    own = own_families()
    if name in own:
        return own[name]
    others = plugins.found(GROUP)
    if name not in others:
        known = ", ".join(sorted({*own, *others}))
        raise OpcastError(f"unknown program family {name!r}", hint="families: " + known)
    declared = getattr(plugins.load(others[name]), "FAMILY", None)
    if not isinstance(declared, Family):
        raise OpcastError(f"{name!r} names no FAMILY", where=f"{GROUP}: {others[name].value}")
    return declared


def parse_settings(name: str, pairs: Iterable[str]) -> dict[str, Setting]:
    """Parse settings from texts such as "batch=8", with the types of the family's defaults.

    Args:
        name: Name of the family.
        pairs: ``key=value`` texts, each with one or several comma-separated pairs.

    Raises:
        OpcastError: A text is not a pair, names no parameter or one twice, or has a bad value.
    """
    settings: dict[str, Setting] = {}
    for pair in filter(None, (part for text in pairs for part in text.split(","))):
        key, equals, value = (own.strip() for own in pair.partition("="))
        if not equals:
            raise OpcastError(f"setting {pair!r} is not of the form key=value", where=name)
        if key in settings:
            raise OpcastError(f"setting {key} is given twice", where=name, hint="give it once")
        settings[key] = value
    return _checked(family(name), settings)


def resolve(name: str, settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """All parameters of a family: the given settings, checked, and defaults."""
    chosen = family(name)
    return {**chosen.defaults, **_checked(chosen, settings)}


def workload_name(name: str, settings: Mapping[str, Setting]) -> str:
    """Short name for the settings, such as "resnet-depth=50-batch=8-train".

    Args:
        name: Name of the family.
        settings: Settings; defaults may be omitted.
    """
    chosen, full = family(name), resolve(name, settings)
    shown = [
        key
        for key in dict.fromkeys((*chosen.headline, *chosen.defaults))
        if key not in ("mode", "dtype")
        and (key in chosen.headline or full[key] != chosen.defaults[key])
    ]
    words = [name, *(f"{key}={_text(full[key])}" for key in shown)]
    if full["dtype"] != "f32":
        words.append(str(full["dtype"]))
    return "-".join([*words, str(full["mode"])])


def build(name: str, **settings: Setting) -> Workload:
    """Build a program of the zoo; nothing is allocated or compiled.

    Args:
        name: Name of the family.
        **settings: Parameters of the family; strings are converted to the type of the default.

    Raises:
        OpcastError: The family or a setting is unknown, or values do not match.
    """
    chosen, full = family(name), resolve(name, settings)
    module = _module(chosen)
    programs = import_module(".programs", __package__)
    # Families that share a module (llama, llama_decode) each have a separate maker.
    maker = getattr(module, "model_" + name, None) or module.model
    # The name contains only the given and headline settings, the workload has all of them.
    model = maker({**full, **chosen.variant(full)})
    built: Workload = programs.make_workload(workload_name(name, settings), name, full, model)
    return built


def export(
    name: str,
    settings: Mapping[str, Setting],
    path: str | Path,
    format: str = "text",
    platform: str | None = None,
) -> Path:
    """Write a program of the zoo as StableHLO.

    Args:
        name: Name of the family.
        settings: Settings of the family.
        path: File to write.
        format: "text" (MLIR with locations), "bytecode" (MLIR bytecode), "portable" (versioned
            StableHLO artifact) or "jax-export" (a serialized ``jax.export.Exported``).
        platform: Platform that JAX lowers for: "cpu", "cuda", "rocm" or "tpu"; by default JAX's
            own.

    Returns:
        The path written.

    Raises:
        OpcastError: The format or a setting is unknown.
    """
    if format not in FORMATS:
        raise OpcastError(f"unknown format {format!r}", hint="formats: " + ", ".join(FORMATS))
    target = Path(path)
    write_bytes(target, build(name, **settings).serialize(format, platform))
    return target


def size_grid(name: str, budget: str = "standard") -> list[dict[str, Setting]]:
    """Settings of a family that together span its sizes.

    Args:
        name: Name of the family.
        budget: "quick" (tiny, for a smoke test; empty for some families), "standard" (a small CPU
            machine) or "full" (standard, and more for a large accelerator).

    Raises:
        OpcastError: The family or the budget is unknown.
    """
    if budget not in BUDGETS:
        raise OpcastError(f"unknown suite {budget!r}", hint="suites: " + ", ".join(BUDGETS))
    sizes = family(name).sizes
    # "quick" is not part of the others: it is a smoke test.
    tiers = ("standard", "full") if budget == "full" else (budget,)
    return [parse_settings(name, size.split()) for tier in tiers for size in sizes.get(tier, ())]


def suite(name: str = "standard") -> list[tuple[str, dict[str, Setting]]]:
    """Programs of a suite as pairs of family and settings.

    Args:
        name: "quick", "standard" or "full" (see ``size_grid``).

    Raises:
        OpcastError: The suite is unknown.
    """
    return [(item, settings) for item in own_families() for settings in size_grid(item, name)]


def describe() -> str:
    """Markdown table of the families and their parameters."""
    lines = ["| family | what it is | parameters (default) |", "|---|---|---|"]
    common = "`batch`, `mode`, `dtype`, `optimizer`, `data_parallel`"
    for item in own_families().values():
        own = []
        for key, value in item.defaults.items():
            allowed = item.choices.get(key, ())
            listed = ": " + ", ".join(_text(choice) for choice in allowed) if allowed else ""
            if key in ("mode", "dtype", "data_parallel") and len(allowed) != 1:
                continue
            own.append(f"`{key}`={_text(value)}{'' if key == 'optimizer' else listed}")
        lines.append(f"| `{item.name}` | {item.summary} | {'; '.join(own)} |")
    return "\n".join([f"Every family accepts {common}.", "", *lines, ""])


def _module(chosen: Family) -> Any:
    """Import the module that creates a family's model."""
    if chosen.name in own_families():
        return import_module(f".families.{chosen.module}", __package__)
    return plugins.load(plugins.found(GROUP)[chosen.name])


def _checked(chosen: Family, settings: Mapping[str, Setting]) -> dict[str, Setting]:
    settings = {_own_name(chosen, key): value for key, value in settings.items()}
    unknown = [key for key in settings if key not in chosen.defaults]
    if unknown:
        raise OpcastError(
            f"{chosen.name} has no parameter {unknown[0]!r}",
            hint="parameters: " + ", ".join(chosen.defaults),
        )
    return {key: _value(chosen, key, value) for key, value in settings.items()}


def _own_name(chosen: Family, key: str) -> str:
    """A family's name for a parameter that ``opcast simulate`` may call differently."""
    other = ALIASES.get(key, key)
    return key if key in chosen.defaults or other not in chosen.defaults else other


def _value(chosen: Family, key: str, value: Setting) -> Setting:
    """Convert a setting to the type of the default and check that it is allowed."""
    default = chosen.defaults[key]
    where = f"{chosen.name}.{key}"
    if not isinstance(value, get_args(Setting)):
        raise OpcastError(f"{value!r} is not a setting", where=where)
    try:
        converted = _converted(value, default)
    except ValueError as error:
        raise OpcastError(
            f"{value!r} is not a {type(default).__name__}",
            where=where,
            hint="as in " + _pair(key, default),
        ) from error
    allowed = chosen.choices.get(key)
    if allowed is not None and converted not in allowed:
        listed = ", ".join(_text(choice) for choice in allowed)
        raise OpcastError(f"{value!r} is not allowed", where=where, hint="allowed: " + listed)
    # Counts start at 1 and fit int32, the type of indices in programs; shares may be 0.
    if isinstance(converted, int | float) and not isinstance(converted, bool):
        least = 0 if isinstance(default, float) else 1
        if not least <= converted < 2**31:
            hint = f"at least {least}, and below 2**31"
            raise OpcastError(f"{value!r} is out of range", where=where, hint=hint)
    return converted


def _converted(value: Setting, default: Setting) -> Setting:
    if isinstance(default, bool):
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        word = str(value).lower()
        if word not in words:
            raise ValueError(word)
        return words[word]
    if isinstance(default, int):
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError(value)
        return int(value)
    return type(default)(value)


def _pair(key: str, value: Setting) -> str:
    return f"{key}={_text(value)}"


def _text(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
