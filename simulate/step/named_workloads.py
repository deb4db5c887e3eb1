"""Workloads by name of a family or model, or from a file or configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...common.errors import PlanError
from ...common.files import is_yaml
from ...features.cost.formats import format_name
from .configs import read_config
from .presets import Preset, close_names, family_settings, find_preset, unsupported
from .settings import build, once, read_pairs, sizes_of
from .workload import ALIASES, Workload, trained_in

#: Sizes that have an effect only if another one is given.
_NEEDS = {
    "shared_experts": "experts",
    "expert_boxes": "experts",
    "dense_layers": "experts",
    "dense_ff": "dense_layers",
    "window_share": "window",
    "q_lora": "kv_lora",
    "rope_dim": "kv_lora",
    "v_dim": "kv_lora",
    "lora_targets": "lora_rank",
}


def make_workload(family: str, settings: Mapping[str, object]) -> Workload:
    """A workload from a family or a model of ``presets.yaml``, and settings.

    Raises:
        PlanError: The family or a key is unknown, or the sizes do not fit.
    """
    families = family_settings()
    known = families[family] if family in families else _named(family).settings
    values = _in_formats(once(settings.items(), ALIASES, "--set"))
    return build(Workload, values, f"workload {family}", **known)


def _in_formats(values: Mapping[str, object]) -> dict[str, object]:
    """Settings with the types of parameters and products by the names of a workload.

    Raises:
        PlanError: A narrow ``dtype`` contradicts ``products``.
    """
    found = dict(values)
    if products := format_name(str(values.get("products", ""))):
        found["products"] = products
    if "dtype" not in values:
        return found
    named = trained_in(str(values["dtype"]))
    if named["products"] and products not in ("", named["products"]):
        raise PlanError(
            f"dtype={values['dtype']} quantises products, which products={products} does as well",
            where="workload",
            hint="give products alone: parameters and activations are in bf16",
        )
    return {**found, **{key: value for key, value in named.items() if value}}


def read_by_model(workload: Workload, given: Mapping[str, object]) -> Workload:
    """Check that all given sizes have an effect, and return the workload.

    Args:
        workload: Model.
        given: Settings from the user, by name.

    Raises:
        PlanError: A size has no effect without another one.
    """
    for name, needs in _NEEDS.items():
        if name not in given or getattr(workload, needs):
            continue
        if getattr(workload, name) != getattr(Workload, name):
            raise PlanError(
                f"{name}={getattr(workload, name)} has no effect without {needs}",
                where="workload",
                hint=f"leave {name} out, or give {needs}",
            )
    return workload


def _named(name: str) -> Preset:
    preset = find_preset(name)
    if preset is None:
        close = close_names(name)
        nearby = f"close to it: {', '.join(close)}; " if close else ""
        raise PlanError(
            f"no workload {name!r} is known",
            hint=f"{nearby}families: {', '.join(family_settings())}; models: docs/simulate.md; "
            "or a config.json (--hf)",
        )
    return preset


def read_workload(text: str, settings: Sequence[str] | Mapping[str, object] = ()) -> Workload:
    """Read a workload from a name or a file; settings take precedence.

    Args:
        text: A family, a model of ``presets.yaml``, a YAML file with ``family`` and sizes, or a
            model's ``config.json``.
        settings: Texts such as ``layers=32,d_model=4096``, or sizes by name.

    Raises:
        PlanError: The file cannot be read, the family or a key is unknown, or sizes do not fit.
    """
    values: dict[str, object] = {}
    family = text
    if is_yaml(text):
        values = read_pairs(text, "workload")
        family = str(values.pop("family", "llama"))
        values = once(values.items(), ALIASES, text)
    elif text.lower().endswith(".json"):
        config = read_config(Path(text))
        if config.served_only:
            raise PlanError(
                f"it is {config.served_only}, which no step has",
                where=text,
                hint="opcast simulate-serving describes it",
            )
        values, family = dict(config.settings), "llama"
    sizes = settings if isinstance(settings, Mapping) else sizes_of(settings)
    given = once(sizes.items(), ALIASES, "--set")
    return read_by_model(make_workload(family, {**values, **given}), given)


def workload_notes(text: str, served: bool = False) -> tuple[str, ...]:
    """Notes on parts of a model that its workload leaves out.

    Args:
        text: Name or file, as in :func:`read_workload`.
        served: Whether the model is served, which leaves out less.
    """
    if text.lower().endswith(".json"):
        found: Preset | None = read_config(Path(text))
    elif served and unsupported(text):
        # Serving supports some models that no step can describe.
        found = None
    else:
        found = None if text in family_settings() else find_preset(text)
    if found is None:
        return ()
    return found.notes if served else (*found.notes, *found.step_notes)
