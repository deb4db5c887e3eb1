"""Checkpoints on huggingface.co by the names of models, and how many tokens they take."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, cast

from ...common.errors import OpcastError
from ...common.files import parse_json, parse_yaml
from ...common.types import JsonObject


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


@lru_cache(maxsize=1)
def served_models() -> dict[str, JsonObject]:
    """What serving knows of models by name, beside their presets (models.yaml)."""
    text = Path(__file__).with_name("models.yaml").read_text(encoding="utf-8")
    return cast("dict[str, JsonObject]", parse_yaml(text))


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
