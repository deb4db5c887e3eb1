"""Commands that launch a deployment under vLLM, SGLang and TensorRT-LLM."""

from __future__ import annotations

from ...simulate.serving.policies import framework_defaults
from .deployment import Deployment
from .serving_table import Workers


def launch_commands(own: Deployment, model: str = "MODEL") -> dict[str, str]:
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
