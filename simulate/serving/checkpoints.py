"""Models by name: what a name stands for, its sizes as they are served, and its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, cast

from ...common.errors import OpcastError
from ...common.files import own_data, parse_json
from ...common.types import JsonObject
from ..step.configs import read_config
from ..step.named_workloads import make_workload, read_by_model, read_workload
from ..step.presets import Recurrence, family_settings, find_preset
from ..step.settings import once
from ..step.workload import ALIASES
from .formats import Formats, format_in, in_formats
from .served import ServedModel


class Checkpoint(NamedTuple):
    """A published model.

    Attributes:
        name: With its owner.
        context: Tokens of a sequence that its ``config.json`` allows
            (``max_position_embeddings``), which engines take for the longest request; 0 if unknown.
        drafts: Whether it has modules of multi-token prediction; ``None`` if unknown.
    """

    name: str
    context: int = 0
    drafts: bool | None = False


#: Stands for a checkpoint that opcast cannot name.
UNKNOWN = Checkpoint("MODEL", drafts=None)
#: What names say of models.
_NAMES = "simulate/serving/names.yaml"


def served_models() -> dict[str, JsonObject]:
    """What serving knows of models by name, beside their presets (models.yaml)."""
    found: dict[str, JsonObject] = own_data("simulate/serving/models.yaml")
    return found


def plain_name(name: str) -> str:
    """A model's name as presets have it: without owner, tuning, format and date.

    ``meta-llama/Llama-3.1-70B-Instruct-FP8`` is ``llama-3.1-70b``.
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
    """What is not described of a model, by its name; empty for most."""
    words = re.split(r"[-_]", name.lower().rsplit("/", 1)[-1])
    return next((text for word, text in own_data(_NAMES)["left_out"].items() if word in words), "")


def _block(name: str) -> int:
    """Side of the blocks that a checkpoint has a scale for in fp8, by its name; 0 for none."""
    blocks = own_data(_NAMES)["blocks"].items()
    return next((own for pattern, own in blocks if re.fullmatch(pattern, name.lower())), 0)


def recurrence_of(known: str) -> Recurrence | None:
    """Sizes of the layers with a recurrent state of a model by its plain name, if known."""
    own = cast("list[int]", served_models().get(known, {}).get("recurrence", []))
    return Recurrence(*own) if own else None


def served_by_name(
    name: str, settings: Mapping[str, object], formats: Formats, *, files: bool = False
) -> ServedModel:
    """A model by its name, or by a file.

    Names are those of presets, of the data file, and of checkpoints (``Qwen/Qwen3-32B-FP8``),
    whose format counts where none is given, or else the one that a model is published in; so does
    the ``quantization_config`` of a ``config.json``.

    Args:
        name: Of a model; with ``files`` also a ``config.json``, or a YAML file of sizes.
        settings: Sizes that take precedence.
        formats: Of its numbers.
        files: Whether files are read.

    Raises:
        PlanError: The name or a format is unknown, a file cannot be read, or sizes do not fit.
    """
    given = once(settings.items(), ALIASES, "--set")
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
        # A name that is unknown either way is told as it was given.
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
        # Weights that are quantised as they are loaded have scales of another kind.
        block=0 if by_file or formats.weights else _block(name),
    )


def _plain(name: str) -> str:
    """A name without what its spellings differ in: ``qwen3-8b`` and ``Qwen_3-8B`` are one."""
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
    """The checkpoint that a model's name stands for in a command; :data:`UNKNOWN` if there is none.

    Args:
        name: Of a preset, a checkpoint with its owner, or a ``config.json``, whose folder it is in.
    """
    if name.endswith("config.json"):
        return _of_config(Path(name))
    known = _by_name().get(_plain(name.rpartition("/")[2]))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.endswith((".yaml", ".yml")):
        # Another owner's tuning may take fewer or more tokens, and leave modules out.
        return known if known and known.name == name else Checkpoint(name, drafts=None)
    return known or UNKNOWN


def _of_config(path: Path) -> Checkpoint:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, OpcastError):
        # Who reads its sizes says what is wrong with it.
        return Checkpoint(str(path.parent), drafts=None)
    own = {**data, **data.get("text_config", {})} if isinstance(data, dict) else {}
    context = own.get("max_position_embeddings")
    drafts = [own.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers")]
    # A configuration without either key may be of a model whose modules go by another name.
    said = None if all(one is None for one in drafts) else any(drafts)
    return Checkpoint(str(path.parent), context if isinstance(context, int) else 0, said)
