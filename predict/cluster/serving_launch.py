"""Commands that launch a deployment under vLLM, SGLang and TensorRT-LLM."""

from __future__ import annotations

from pathlib import Path

from ...simulate.serving.policies import framework_defaults
from .deployment import Deployment
from .serving_table import Workers

#: Checkpoints on huggingface.co by the names of presets; of models whose weights come in several
#: tunings, the one that follows instructions.
_CHECKPOINTS = {
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.1",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    "glm-4.5": "zai-org/GLM-4.5",
    "glm-4.5-air": "zai-org/GLM-4.5-Air",
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "qwen-3-8b": "Qwen/Qwen3-8B",
    "qwen-3-14b": "Qwen/Qwen3-14B",
    "qwen-3-32b": "Qwen/Qwen3-32B",
    "qwen-3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen-3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen-3-coder-480b-a35b": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    "qwen-2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen-2.5-32b": "Qwen/Qwen2.5-32B-Instruct",
    "qwen-2.5-72b": "Qwen/Qwen2.5-72B-Instruct",
    "gemma-3-27b": "google/gemma-3-27b-it",
}
#: Stands for a checkpoint that opcast cannot name.
PLACEHOLDER = "MODEL"


def checkpoint_of(name: str) -> str:
    """The checkpoint that a model's name stands for in a command; :data:`PLACEHOLDER` if unknown.

    Args:
        name: Of a preset, or a ``config.json``, whose folder it is in.
    """
    if name.endswith("config.json"):
        return str(Path(name).parent)
    return _CHECKPOINTS.get(name.lower().replace("_", "-"), PLACEHOLDER)


def launch_commands(own: Deployment, model: str = PLACEHOLDER) -> dict[str, str]:
    """Commands that launch one worker of a deployment under vLLM, SGLang and TensorRT-LLM.

    Flags are those of their current documentation: ``vllm serve``, ``sglang.launch_server`` and
    ``trtllm-serve``. Workers that run prompts have a command of their own, by name ``… prefill``.
    """
    found = {}
    parts = (
        [("", own.engine)]
        if own.prefill is None
        else [(" prefill", own.prefill), (" decode", own.engine)]
    )
    for role, workers in parts:
        times = [f"x {workers.count}"] if workers.count > 1 else []
        for name, of in (("vLLM", _vllm), ("SGLang", _sglang), ("TensorRT-LLM", _trtllm)):
            command = of(own, workers, model, role.strip())
            narrow = _narrow(own)
            if narrow and _QUANTIZED not in command:
                # Their launchers take the format from the checkpoint's own configuration.
                remarks = [*times, f"{model} has to be a checkpoint in {narrow}"]
            else:
                remarks = times
            found[name + role] = command + (f"   # {', '.join(remarks)}" if remarks else "")
    return found


#: What vLLM and SGLang quantise 16-bit checkpoints by when they load them; a checkpoint in fp8 runs
#: under it as well.
_QUANTIZED = "--quantization fp8"


def _narrow(own: Deployment) -> str:
    """Formats of the weights below 16 bits; empty if there are none."""
    model = own.model
    formats = [model.weights, *([model.expert_weights] if model.workload.experts else [])]
    return " and ".join(dict.fromkeys(f for f in formats if f not in ("bf16", "f16", "f32")))


def _limits(own: Deployment, workers: Workers) -> tuple[int, int]:
    policy = framework_defaults(own.framework).policy
    batch = workers.batch // workers.plan.dp or own.max_batch or policy.max_batch
    return batch, own.token_budget or policy.token_budget


def _vllm(own: Deployment, workers: Workers, model: str, role: str) -> str:
    plan, (batch, budget) = workers.plan, _limits(own, workers)
    flags = [f"--tensor-parallel-size {plan.tp}"]
    if plan.pp > 1:
        flags.append(f"--pipeline-parallel-size {plan.pp}")
    if plan.dp > 1:
        flags.append(f"--data-parallel-size {plan.dp}")
    if plan.ep > 1:
        flags.append("--enable-expert-parallel")
    flags += [f"--max-num-seqs {batch}", f"--max-num-batched-tokens {budget}"]
    if _narrow(own) == "fp8":
        flags.append(_QUANTIZED)
    if own.model.cache == "fp8":
        flags.append("--kv-cache-dtype fp8")
    if own.options.memory:
        flags.append(f"--gpu-memory-utilization {own.options.memory:g}")
    if own.options.eager:
        flags.append("--enforce-eager")
    if role:
        kind = "kv_producer" if role == "prefill" else "kv_consumer"
        config = f'{{"kv_connector":"NixlConnector","kv_role":"{kind}"}}'
        flags.append(f"--kv-transfer-config '{config}'")
    return " ".join(["vllm serve", model, *flags])


def _sglang(own: Deployment, workers: Workers, model: str, role: str) -> str:
    plan, (batch, budget) = workers.plan, _limits(own, workers)
    flags = [f"--tp-size {plan.tp * plan.dp}"]
    if plan.pp > 1:
        flags.append(f"--pp-size {plan.pp}")
    if plan.dp > 1:
        flags.append(f"--dp-size {plan.dp} --enable-dp-attention")
    if plan.ep > 1:
        flags.append(f"--ep-size {plan.ep}")
    flags += [f"--max-running-requests {batch * plan.dp}", f"--chunked-prefill-size {budget}"]
    if _narrow(own) == "fp8":
        flags.append(_QUANTIZED)
    if own.model.cache == "fp8":
        flags.append("--kv-cache-dtype fp8_e4m3")
    if own.options.memory:
        flags.append(f"--mem-fraction-static {own.options.memory:g}")
    if own.options.eager:
        flags.append("--disable-cuda-graph")
    if role:
        flags.append(f"--disaggregation-mode {role}")
    return " ".join(["python -m sglang.launch_server --model-path", model, *flags])


def _trtllm(own: Deployment, workers: Workers, model: str, role: str) -> str:
    plan, (batch, budget) = workers.plan, _limits(own, workers)
    # TensorRT-LLM counts the ranks of a stage as tp; an option says that they attend apart.
    flags = [f"--tp_size {plan.ranks}"]
    if plan.pp > 1:
        flags.append(f"--pp_size {plan.pp}")
    if plan.ep > 1:
        flags.append(f"--ep_size {plan.ep}")
    flags += [f"--max_batch_size {batch}", f"--max_num_tokens {budget}"]
    if own.options.memory:
        flags.append(f"--kv_cache_free_gpu_memory_fraction {own.options.memory:g}")
    config = []
    if plan.dp > 1:
        config.append("enable_attention_dp: true")
    if own.model.cache == "fp8":
        config.append("kv_cache_config: {dtype: fp8}")
    if own.options.eager:
        config.append("cuda_graph_config: null")
    if role:
        config.append("cache_transceiver_config: {backend: default}")
    if config:
        flags.append("--extra_llm_api_options <(echo '" + "\\n".join(config) + "')")
    return " ".join(["trtllm-serve", model, *flags])
