"""Ask other projects' models for published rows, and print their errors beside opcast's.

``python tests/clients/peers.py --rows serving.csv.gz --left-out left.parquet``, where the second
table is what ``opcast train --serving ... --left-out`` wrote: predictions of rows that taught
opcast nothing. The peer comes from PyPI at the version below, into a virtual environment that is
thrown away; it sees no measured value, and is asked with its defaults where a row says nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from math import ceil
from pathlib import Path

import numpy as np
import pandas as pd
from run import installed

from opcast.common.tables_text import markdown_table

#: The peer: NVIDIA's model of serving, with the times of operators that it was measured with.
PEER = "aiconfigurator"
REQUIREMENT = f"{PEER}==0.12.0"
#: What was left out of opcast's training.
WAYS = ("row", "source")
#: Columns by which errors are shown; the origin is the source, which is a way of leaving out too.
GROUPS = ("origin", "load", "framework", "device")
#: Arguments of the peer for a row.
Case = dict[str, object]
#: Device and engine: names of opcast and of the peer.
_DEVICES = {
    "a100-sxm-80gb": "a100_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "h100-sxm": "h100_sxm",
    "h200-sxm": "h200_sxm",
}
_ENGINES = {"TensorRT-LLM": "trtllm", "vLLM": "vllm", "SGLang": "sglang"}
_16, _FP8, _NVFP4 = ("bf16", "fp16", "fp16/bf16"), ("fp8", "fp8-block"), ("nvfp4",)
#: Configurations of aiconfigurator for models that are not dense, by model and weights' dtype.
_MODELS = {
    ("deepseek-r1", _FP8): "deepseek-ai/DeepSeek-R1",
    ("deepseek-r1", _NVFP4): "nvidia/DeepSeek-V3.1-NVFP4",
    ("glm-5", _FP8): "zai-org/GLM-5-FP8",
    ("glm-5", _NVFP4): "nvidia/GLM-5-NVFP4",
    ("gpt-oss-120b", ("mxfp4",)): "openai/gpt-oss-120b",
    ("gpt-oss-20b", ("mxfp4",)): "openai/gpt-oss-20b",
    ("kimi-k2", _FP8): "moonshotai/Kimi-K2-Instruct",
    ("kimi-k2", _NVFP4): "nvidia/Kimi-K2.5-NVFP4",
    ("minimax-m2", _FP8): "MiniMaxAI/MiniMax-M2.5",
    ("mixtral-8x7b", _16): "mistralai/Mixtral-8x7B-v0.1",
    ("qwen3-235b-a22b", _FP8): "Qwen/Qwen3-235B-A22B-FP8",
    ("qwen3-30b-a3b", _16): "Qwen/Qwen3-30B-A3B",
    ("qwen3-30b-a3b", _FP8): "Qwen/Qwen3-30B-A3B-FP8",
    ("qwen3.5-397b-a17b", _16): "Qwen/Qwen3.5-397B-A17B",
    ("qwen3.5-397b-a17b", _NVFP4): "nvidia/Qwen3.5-397B-A17B-NVFP4",
}
#: Modes of products in dense models; those of the models above follow from their configurations.
_MODES = dict.fromkeys(_16, "bfloat16") | {"fp8": "fp8", "fp8-block": "fp8_block", "nvfp4": "nvfp4"}

#: Asks the peer for each case; answers in seconds, throughput as that of a token.
ASK = """
import json, logging, sys, warnings
from functools import cache
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
from aiconfigurator.cli.api import cli_estimate
from aiconfigurator_core.sdk.perf_database import get_latest_database_version
latest = cache(get_latest_database_version)  # it reads hundreds of files each time
for line in sys.stdin:
    case = json.loads(line)
    name, own = case.pop("id"), case
    try:
        own["backend_version"] = latest(system=own["system_name"], backend=own["backend_name"])
        said = cli_estimate(**own)
        answer = {"ttft": said.ttft / 1e3, "tpot": said.tpot / 1e3}
        answer["per_token"] = 1 / said.raw["tokens/s/gpu"]  # of a device
        answer = {key: float(value) for key, value in answer.items()}
    except Exception as error:
        answer = {"reason": (str(error).splitlines() or [type(error).__name__])[0]}
    print(json.dumps({"id": name, **answer}), flush=True)
"""


def case_of(row: Mapping[str, object], folder: Path) -> Case | str:
    """Arguments of ``cli_estimate`` for a row of measured serving, or why there are none."""
    device, engine = _DEVICES.get(str(row["device"])), _ENGINES.get(str(row["framework"]))
    if device is None or engine is None:
        return "device or engine without a database"
    if row["load"] not in ("closed", "static-batch") or _number(row["n_prefill_gpus"]):
        return "load or workers apart"
    if str(row["spec_decode"]) not in ("no", "unstated", "no (by comparison with the CSV exports)"):
        return "speculative decoding"
    tp, pp, dp, ep = (int(_number(row[name]) or 1) for name in ("tp", "pp", "dp", "ep"))
    gpus = int(_number(row["n_gpus"]) or tp * pp * dp)
    if tp * pp * dp != gpus:
        return "plan that does not add up"
    weights, static = str(row["weight_dtype"]), row["load"] == "static-batch"
    own: Case = {
        "id": row["id"],
        "system_name": device,
        "backend_name": engine,
        "mode": "static" if static else "agg",
        "isl": round(_number(row["isl_mean"]) or _number(row["isl"])),
        "osl": round(_number(row["osl_mean"]) or _number(row["osl"])),
        "batch_size": ceil(_number(row["concurrency"]) / dp),
        "tp_size": tp,
        "pp_size": pp,
    }
    if str(row["kv_dtype"]) == "fp8":
        own["kvcache_quant_mode"] = "fp8"
    if row["arch"] == "llama":
        if weights not in _MODES:
            return "dtype"
        return own | {"model_path": _dense(row, folder), "gemm_quant_mode": _MODES[weights]}
    named = (path for (model, dtypes), path in _MODELS.items()
             if model == row["model"] and weights in dtypes)  # fmt: skip
    path = next(named, None)
    if path is None:
        return "model or dtype"
    moe_tp = int(_number(row["moe_tp"]) or tp * dp // ep)
    if moe_tp * ep != tp * dp:
        return "plan that does not add up"
    return own | {
        "model_path": path,
        "attention_dp_size": dp,
        "moe_tp_size": moe_tp,
        "moe_ep_size": ep,
    }


def _number(cell: object) -> float:
    """A cell's number, 0 for none."""
    value = float(str(cell or 0))
    return 0.0 if np.isnan(value) else value


def _dense(row: Mapping[str, object], folder: Path) -> str:
    """Folder with the configuration of a dense model by the sizes that its row gives."""
    names = ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab")
    sizes = [int(_number(row[name])) for name in names]
    layers, d_model, heads, kv_heads, head_dim, d_ff, vocab = sizes
    here = folder / "-".join(map(str, sizes))
    here.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": d_model,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "head_dim": head_dim or d_model // heads,
        "intermediate_size": d_ff,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    (here / "config.json").write_text(json.dumps(config))
    return str(here)


def asked(cases: list[Case], folder: Path) -> pd.DataFrame:
    """What the peer answers: ``id``, seconds by metric, and a reason where it does not."""
    python = installed(folder / "venv", REQUIREMENT) / "python"
    said = subprocess.run(
        [str(python), "-c", ASK],
        input="\n".join(map(json.dumps, cases)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return pd.DataFrame(map(json.loads, said.stdout.splitlines()))


def joined(rows: pd.DataFrame, answers: pd.DataFrame, left: pd.DataFrame) -> pd.DataFrame:
    """Answers measured, and predicted by both: a row for each, with the relative errors.

    Args:
        rows: The published table.
        answers: Of the peer.
        left: What opcast said of rows that were left out.
    """
    peer = answers.melt("id", ["ttft", "tpot", "per_token"], "metric", "peer").dropna()
    peer = peer.merge(rows[["id", "n_gpus", *GROUPS]], on="id")
    whole = peer["n_gpus"].where(peer["metric"] == "per_token", 1.0)
    peer["peer"] /= whole
    own = left[left["left_out"].isin(WAYS)]
    wide = own.pivot(index=["id", "metric", "measured"], columns="left_out", values="predicted")
    both = peer.merge(wide.dropna().reset_index(), on=["id", "metric"])
    for name in ("peer", *WAYS):
        both[name] = (both[name] / both["measured"] - 1.0).abs()
    return both


def figures(both: pd.DataFrame) -> list[list[str]]:
    """Mean and median error in per cent of each group and metric."""
    lines = []
    for by in ("all", *GROUPS):
        keys = ["metric"] if by == "all" else [by, "metric"]
        for key, part in both.groupby(keys):
            value, metric = ("all", *key)[-2:]
            errors = [
                f"{100 * part[name].mean():.1f} ({100 * part[name].median():.1f})"
                for name in ("peer", *WAYS)
            ]
            lines.append([str(value), str(metric), str(len(part)), *errors])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--left-out", type=Path, required=True)
    options = parser.parse_args()
    rows, left = pd.read_csv(options.rows, low_memory=False), pd.read_parquet(options.left_out)
    rows["origin"] = rows["source"]
    rows["id"], left["id"] = rows["id"].astype(str), left["id"].astype(str)
    known = rows[rows["id"].isin(left["id"])]
    with tempfile.TemporaryDirectory(prefix="opcast-peer-") as name:
        folder = Path(name)
        cases = [case_of(row, folder) for row in known.to_dict("records")]
        answers = asked([case for case in cases if not isinstance(case, str)], folder)
    reasons = Counter(case for case in cases if isinstance(case, str))
    if "reason" in answers:
        reasons.update(answers["reason"].dropna().str.partition(":")[0])
    for reason, count in reasons.most_common():
        print(f"{count} rows not answered: {reason}")
    columns = ["rows", "metric", "n", REQUIREMENT, *(f"opcast, left out: {way}" for way in WAYS)]
    print("\n".join(markdown_table(columns, figures(joined(known, answers, left)))))


if __name__ == "__main__":
    main()
