"""Models by name: canonical names, served model sizes and formats, and published checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, cast

from ...common.errors import OpcastError, PlanError
from ...common.files import own_data, parse_json
from ...common.types import JsonObject
from ..step.configs import read_config
from ..step.named_workloads import make_workload, read_by_model, read_workload
from ..step.presets import Recurrence, family_settings, find_preset
from ..step.settings import once
from ..step.workload import ALIASES
from .served import Formats, ServedModel, format_in, in_formats

_WEIGHTS = "give the format of the weights, as in --weights fp8"
_ADAPTERS = "adapters that are merged into the weights cost nothing, others are not simulated"
#: Settings of training alone, and what to do instead of giving them.
_OF_TRAINING = {
    "dtype": _WEIGHTS,
    "products": _WEIGHTS,
    "lora_rank": _ADAPTERS,
    "lora_targets": _ADAPTERS,
}


class Checkpoint(NamedTuple):
    """A published checkpoint.

    Attributes:
        name: Name with owner.
        context: Maximum sequence length in ``config.json`` (``max_position_embeddings``), which
            engines use as the limit of a request; 0 if unknown.
        drafts: Whether it has multi-token-prediction modules; ``None`` if unknown.
    """

    name: str
    context: int = 0
    drafts: bool | None = False


#: Placeholder for an unknown checkpoint.
UNKNOWN = Checkpoint("MODEL", drafts=None)
#: Name patterns of models.
_NAMES = "simulate/serving/names.yaml"


def served_models() -> dict[str, JsonObject]:
    """Serving data of models by name, which complements their presets (models.yaml)."""
    found: dict[str, JsonObject] = own_data("simulate/serving/models.yaml")
    return found


def plain_name(name: str) -> str:
    """Name of a model as in the presets: without owner, tuning, format and date.

    ``meta-llama/Llama-3.1-70B-Instruct-FP8`` gives ``llama-3.1-70b``.
    """
    data = own_data(_NAMES)
    text = name.lower().rsplit("/", 1)[-1].replace("_", "-").removeprefix("meta-")
    text = re.sub(r"^qwen(\d[\d.]*)", r"qwen-\1", text)
    text = re.sub(rf"-({data['endings']})(?=-|$)", "", text)
    for pattern, plain in data["same_sizes"].items():
        if hit := re.fullmatch(pattern, text):
            return hit.expand(plain)
    return text


def _left_out(name: str) -> str:
    """Note on parts that are not modelled, by a model's name; empty for most."""
    words = re.split(r"[-_]", name.lower().rsplit("/", 1)[-1])
    return next((text for word, text in own_data(_NAMES)["left_out"].items() if word in words), "")


def _block(name: str) -> int:
    """Side of a checkpoint's fp8 scaling blocks, by its name; 0 for none."""
    blocks = own_data(_NAMES)["blocks"].items()
    return next((own for pattern, own in blocks if re.fullmatch(pattern, name.lower())), 0)


def recurrence_of(known: str) -> Recurrence | None:
    """Sizes of the recurrent layers of a model by its canonical name, if known."""
    own = cast("list[int]", served_models().get(known, {}).get("recurrence", []))
    return Recurrence(*own) if own else None


def served_by_name(
    name: str, settings: Mapping[str, object], formats: Formats, *, files: bool = False
) -> ServedModel:
    """The served model for a name or a file.

    Names are those of presets, of models.yaml, and of checkpoints (``Qwen/Qwen3-32B-FP8``). If
    no format is given, the one in the name applies, else the published one; for a ``config.json``
    that of its ``quantization_config``.

    Args:
        name: Model name; with ``files`` also a ``config.json`` or a YAML file of sizes.
        settings: Sizes that take precedence.
        formats: Number formats.
        files: Whether file names are accepted.

    Raises:
        PlanError: The name or a format is unknown, a file cannot be read, or sizes do not fit.
    """
    given = once(settings.items(), ALIASES, "--set")
    if idle := given.keys() & _OF_TRAINING.keys():
        raise PlanError(
            f"{min(idle)}={given[min(idle)]} changes nothing in serving",
            where="--set",
            hint=_OF_TRAINING[min(idle)],
        )
    known, own, recurrent, bare = plain_name(name), "", 0, 0
    entry, sizes = served_models().get(known, {}), recurrence_of(known)
    if files and name.lower().endswith(".json"):
        config = read_config(Path(name))
        recurrent, own = config.linear_layers, config.weights
        sizes, bare = config.recurrence, config.bare_layers
        work = make_workload("llama", {**config.settings, **given})
    elif files and name.lower().endswith((".yaml", ".yml")):
        work = read_workload(name, [f"{key}={value}" for key, value in given.items()])
    elif name in family_settings():
        work = make_workload(name, given)
    elif "sizes" in entry:
        recurrent, own = cast("int", entry.get("linear_layers", 0)), format_in(name)
        pass_of_one = {"mode": "forward", "seq": 1, "batch": 1}
        work = make_workload("llama", {**entry["sizes"], **pass_of_one, **given})
    else:
        # An unknown name is reported as it was given.
        work = make_workload(known if find_preset(known) else name, given)
        own = format_in(name)
    read_by_model(work, given)
    weights, linear = formats.weights or own, formats.linear_layers or recurrent
    found = in_formats(work, formats._replace(weights=weights, linear_layers=linear))
    drafts = find_checkpoint(name if name.endswith(".json") else known).drafts
    by_file = files and name.lower().endswith((".json", ".yaml", ".yml"))
    return replace(
        found,
        recurrence=sizes if linear else None,
        bare_layers=bare,
        mtp=drafts,
        left_out="" if by_file else _left_out(name),
        # Weights that are quantised at load time do not use the checkpoint's scaling blocks.
        block=0 if by_file or formats.weights else _block(name),
    )


def _plain(name: str) -> str:
    """Normalised name: ``qwen3-8b`` and ``Qwen_3-8B`` are equal."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


@lru_cache(maxsize=1)
def _by_name() -> dict[str, Checkpoint]:
    known: dict[str, Checkpoint] = {}
    for name, own in served_models().items():
        if "checkpoint" in own:
            found = Checkpoint(
                str(own["checkpoint"]),
                cast("int", own.get("context", 0)),
                cast("bool | None", own.get("drafts", False)),
            )
            known[_plain(name)] = known[_plain(found.name.rpartition("/")[2])] = found
    return known


def find_checkpoint(name: str) -> Checkpoint:
    """The checkpoint for a model name in a launch command; :data:`UNKNOWN` if there is none.

    Args:
        name: Preset, checkpoint with owner, or path of a ``config.json``, which gives its folder.
    """
    if name.endswith("config.json"):
        return _of_config(Path(name))
    known = _by_name().get(_plain(name.rpartition("/")[2]))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith((".yaml", ".yml")):
        # A fine-tune by another owner may differ in context length and draft modules.
        return known if known and known.name == name else Checkpoint(name, drafts=None)
    return known or UNKNOWN


def _of_config(path: Path) -> Checkpoint:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, OpcastError):
        # The caller that reads the sizes reports what is wrong with the file.
        return Checkpoint(str(path.parent), drafts=None)
    own = {**data, **data.get("text_config", {})} if isinstance(data, dict) else {}
    context = own.get("max_position_embeddings")
    drafts = [own.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers")]
    # Without either key, the model may have draft modules under another name.
    said = None if all(one is None for one in drafts) else any(drafts)
    return Checkpoint(str(path.parent), context if isinstance(context, int) else 0, said)
