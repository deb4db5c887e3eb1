"""Checkpoints on huggingface.co by the names of models, and how many tokens they take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ...common.errors import OpcastError
from ...common.files import parse_json


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
#: By the names of presets, and of models that serving alone describes; of models whose weights come
#: in several tunings, the one that follows instructions. Contexts and modules of multi-token
#: prediction (``num_nextn_predict_layers``) are those of their ``config.json`` on huggingface.co.
_CHECKPOINTS = {
    "llama-2-7b": Checkpoint("meta-llama/Llama-2-7b-chat-hf", 4096),
    "llama-2-13b": Checkpoint("meta-llama/Llama-2-13b-chat-hf", 4096),
    "llama-2-70b": Checkpoint("meta-llama/Llama-2-70b-chat-hf", 4096),
    "llama-3-8b": Checkpoint("meta-llama/Meta-Llama-3-8B-Instruct", 8192),
    "llama-3-70b": Checkpoint("meta-llama/Meta-Llama-3-70B-Instruct", 8192),
    "llama-3.1-8b": Checkpoint("meta-llama/Llama-3.1-8B-Instruct", 131072),
    "llama-3.1-70b": Checkpoint("meta-llama/Llama-3.1-70B-Instruct", 131072),
    "llama-3.1-405b": Checkpoint("meta-llama/Llama-3.1-405B-Instruct", 131072),
    "llama-3.2-1b": Checkpoint("meta-llama/Llama-3.2-1B-Instruct", 131072),
    "llama-3.2-3b": Checkpoint("meta-llama/Llama-3.2-3B-Instruct", 131072),
    "llama-3.3-70b": Checkpoint("meta-llama/Llama-3.3-70B-Instruct", 131072),
    "llama-4-scout": Checkpoint("meta-llama/Llama-4-Scout-17B-16E-Instruct", 10485760),
    "llama-4-maverick": Checkpoint("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 1048576),
    "mistral-7b": Checkpoint("mistralai/Mistral-7B-Instruct-v0.1", 32768),
    "mixtral-8x7b": Checkpoint("mistralai/Mixtral-8x7B-Instruct-v0.1", 32768),
    "mixtral-8x22b": Checkpoint("mistralai/Mixtral-8x22B-Instruct-v0.1", 65536),
    "deepseek-v3": Checkpoint("deepseek-ai/DeepSeek-V3", 163840, drafts=True),
    "deepseek-r1": Checkpoint("deepseek-ai/DeepSeek-R1", 163840, drafts=True),
    "deepseek-v3.2": Checkpoint("deepseek-ai/DeepSeek-V3.2", 163840, drafts=True),
    "kimi-k2": Checkpoint("moonshotai/Kimi-K2-Instruct", 131072),
    "glm-4.5": Checkpoint("zai-org/GLM-4.5", 131072, drafts=True),
    "glm-4.5-air": Checkpoint("zai-org/GLM-4.5-Air", 131072, drafts=True),
    "glm-5": Checkpoint("zai-org/GLM-5", drafts=True),
    "minimax-m2": Checkpoint("MiniMaxAI/MiniMax-M2", 196608, drafts=None),
    "step-3.5-flash": Checkpoint("stepfun-ai/Step-3.5-Flash", drafts=True),
    "gpt-oss-20b": Checkpoint("openai/gpt-oss-20b", 131072),
    "gpt-oss-120b": Checkpoint("openai/gpt-oss-120b", 131072),
    "qwen-3-8b": Checkpoint("Qwen/Qwen3-8B", 40960),
    "qwen-3-14b": Checkpoint("Qwen/Qwen3-14B", 40960),
    "qwen-3-32b": Checkpoint("Qwen/Qwen3-32B", 40960),
    "qwen-3-30b-a3b": Checkpoint("Qwen/Qwen3-30B-A3B", 40960),
    "qwen-3-235b-a22b": Checkpoint("Qwen/Qwen3-235B-A22B", 40960),
    "qwen-3-coder-480b-a35b": Checkpoint("Qwen/Qwen3-Coder-480B-A35B-Instruct", 262144),
    "qwen-3-next-80b-a3b": Checkpoint("Qwen/Qwen3-Next-80B-A3B-Instruct", 262144, drafts=True),
    "qwen-3.5-397b-a17b": Checkpoint("Qwen/Qwen3.5-397B-A17B", 262144, drafts=True),
    "qwen-2.5-7b": Checkpoint("Qwen/Qwen2.5-7B-Instruct", 32768),
    "qwen-2.5-32b": Checkpoint("Qwen/Qwen2.5-32B-Instruct", 32768),
    "qwen-2.5-72b": Checkpoint("Qwen/Qwen2.5-72B-Instruct", 32768),
    "gemma-3-27b": Checkpoint("google/gemma-3-27b-it", 131072),
}


def _plain(name: str) -> str:
    """A name without what its spellings differ in: ``qwen3-8b`` and ``Qwen_3-8B`` are one."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


_BY_NAME = {_plain(name): own for name, own in _CHECKPOINTS.items()}
_BY_NAME |= {_plain(own.name.rpartition("/")[2]): own for own in _CHECKPOINTS.values()}


def find_checkpoint(name: str) -> Checkpoint:
    """The checkpoint that a model's name stands for in a command; :data:`UNKNOWN` if there is none.

    Args:
        name: Of a preset, a checkpoint with its owner, or a ``config.json``, whose folder it is in.
    """
    if name.endswith("config.json"):
        return _of_config(Path(name))
    known = _BY_NAME.get(_plain(name.rpartition("/")[2]))
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
