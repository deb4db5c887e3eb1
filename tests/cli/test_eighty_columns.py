"""On a terminal of 80 columns no figure, device or plan is cut, whatever the names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from opcast.cli import app

DEVICE = "example-accelerator-generation-7-liquid-cooled-192gb-oam"
FILE = f"""
name: {DEVICE}
base: h100-sxm
"""
CLUSTER = """
name: a-cluster-of-eight-boxes-with-long-names-and-rails
device: chip.yaml
devices_per_node: 8
dimensions:
  - {name: link, kind: switch, size: 8, bandwidth_gbps: 450, latency_us: 0.9}
"""
PROGRAM = """
import jax, jax.numpy as jnp

def step(x, w):
    for i in range(3):
        with jax.named_scope(f"transformer_decoder_layer_with_a_long_name_{i}"):
            with jax.named_scope("multi_head_self_attention_projection"):
                h = jax.nn.softmax(x @ w)
            with jax.named_scope("feed_forward_network_up_projection"):
                x = x + jax.nn.gelu(h @ w)
    return x.sum()

step.example_args = (jnp.zeros((256, 256)), jnp.zeros((256, 256)))

def step16(x, w):
    return step(x.astype(jnp.bfloat16), w)

step16.example_args = step.example_args
"""
OP = ("--op", "linear m=4096 n=4096 k=4096 dtype=bf16", "--device", "chip.yaml")
PREDICT = ("predict", "a_program_with_a_long_file_name_of_its_own.py:step", "--lowering", "fused")
STEP = ("--workload", "llama", "--set", "layers=4,d_model=1024,heads=8,seq=1024,batch=16",
        "--cluster", "boxes.yaml", "--model", "roofline")  # fmt: skip
SERVED = ("--workload", "llama", "--set", "layers=2,d_model=512,heads=8")
COMMANDS = {
    "predict": (*PREDICT, "--device", "chip.yaml"),
    "module": (*PREDICT, "--device", "chip.yaml", "--by", "module"),
    "line": (*PREDICT, "--device", "chip.yaml", "--by", "line"),
    "several": (*PREDICT, "--device", "chip.yaml,h100-sxm"),
    "explain": ("explain", *PREDICT[1:], "--device", "chip.yaml", "--top", "1"),
    "diff": ("diff", PREDICT[1], PREDICT[1].replace("step", "step16"), "--device", "chip.yaml",
             "--lowering", "fused"),
    "operator": ("predict", *OP),
    "explain-operator": ("explain", *OP),
    "simulate": ("simulate", *STEP, "--plan", "tp=2,dp=4"),
    "terms": ("simulate", *STEP, "--plan", "tp=2,dp=4", "--explain"),
    "sweep": ("sweep", *STEP, "--grid", "tp=1/2,pp=1/2,recompute=none/full", "--out", "plans"),
    "serving": ("simulate-serving", *SERVED, "--device", "chip.yaml", "--model", "roofline",
                "--concurrency", "4", "--count", "20", "--prompt", "64", "--output", "8"),
    "planning": ("plan-serving", *SERVED, "--device", "chip.yaml", "--gpus", "2", "--operators",
                 "roofline", "--load", "concurrency=4,prompt=64,output=8,count=12"),
    "cluster": ("cluster", "boxes.yaml"),
    "device": ("device", "chip.yaml"),
    "devices": ("device", "--list"),
    "models": ("models",),
    "card": ("models", "gpu-operators"),
}  # fmt: skip
#: Lines that are to be copied into a shell, which a break would spoil.
COPIED = re.compile(r"^(vLLM|SGLang|TensorRT-LLM|LMDeploy|fastest): ")
#: A cell of a figure that was cut: ``1.2…`` or nothing but the mark.
CUT = re.compile(r"(?:^|\s)(?:[\d.,]+ ?\w?)?…(?:\s|$)")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_fits_and_cuts_no_figure(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chip.yaml").write_text(FILE)
    (tmp_path / "boxes.yaml").write_text(CLUSTER)
    (tmp_path / "a_program_with_a_long_file_name_of_its_own.py").write_text(PROGRAM)
    done = CliRunner().invoke(app, COMMANDS[name])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stdout.splitlines() if not COPIED.match(line)]
    assert len(lines) > 2 and not [line for line in lines if cell_len(line) > 80]
    assert not [line for line in lines if CUT.search(line)]
    # A search is of the one device that was asked for, which its answer does not repeat.
    if "chip.yaml" in COMMANDS[name] and name != "planning":
        assert DEVICE in re.sub(r"\s+", "", done.stdout)
