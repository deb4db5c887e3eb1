"""Whether runs fit: parts and changes by hand, and the commands' status."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from math import log, sqrt

import pytest

from opcast.common.interval import Interval
from opcast.features.ir.reader import read_program
from opcast.predict.fit import MemoryFit, allowed, donatable, program_parts

from ..support.commands import opcast

#: 1 GiB in each array.
BIG = """HloModule m{alias}

ENTRY e {{
  x = f32[256,1048576] parameter(0)
  y = f32[256,1048576] parameter(1)
  a = f32[256,1048576] add(x, y)
  b = f32[256,1048576] multiply(a, y)
  ROOT t = (f32[256,1048576]) tuple(b)
}}
"""
GIB = 2.0**30
ALIAS = ", input_output_alias={ {0}: (0, {}, may-alias) }"


def test_the_interval_gives_the_probability_and_back():
    needed = Interval(10.0, 8.0, 12.5)
    assert needed.quantile(0.95) == pytest.approx(12.5)
    assert needed.quantile(0.05) == pytest.approx(8.0)
    assert needed.quantile(0.5) == pytest.approx(10.0)
    assert needed.chance_below(needed.quantile(0.8)) == pytest.approx(0.8)
    found = MemoryFit("a run", "a chip", needed, 12.5, {}, risk=0.05)
    assert found.out_of_memory == pytest.approx(0.05)
    # An estimate at the limit with an interval as wide has the risk that is accepted.
    limit = allowed(needed, 12.5, 0.2)
    moved = Interval(limit, limit * 0.8, limit * 1.25)
    assert 1.0 - moved.chance_below(12.5) == pytest.approx(0.2)


def test_parts_and_donation_are_those_of_the_arguments():
    program = read_program(BIG.format(alias="")).program
    parts = program_parts(program, 4.5 * GIB)
    assert parts == {"arguments": 2 * GIB, "results": GIB, "temporaries": 1.5 * GIB}
    assert donatable(program) == [(0, 0)]
    donated = read_program(BIG.format(alias=ALIAS)).program
    assert program_parts(donated, 3 * GIB) == {
        "arguments": 2 * GIB, "results": 0.0, "temporaries": GIB,
    }  # fmt: skip
    assert donatable(donated) == []


def fit_of(tmp_path, usable_gb: float, alias: str = "", *words: str) -> tuple[int, dict]:
    """Of the program on a GPU that leaves programs so much, of which JAX takes three quarters."""
    # The driver keeps 0.2 GiB and 0.8 % of the memory.
    memory_gb = (usable_gb + 0.2) / 0.992
    (tmp_path / "m.hlo").write_text(BIG.format(alias=alias))
    (tmp_path / "chip.yaml").write_text(
        f"name: chip\nplatform: gpu\nvendor: NVIDIA\nhbm_bandwidth_gbps: 1000\n"
        f"memory_gb: {memory_gb}\nvector_tflops: {{f32: 10}}\n"
    )
    done = opcast(
        "fit", "m.hlo", "--device", "chip.yaml", "--lowering", "op", "--json", *words, cwd=tmp_path
    )
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    (found,) = json.loads(done.stdout)["results"]
    return done.returncode, found


def test_a_program_fits_or_says_what_would(tmp_path):
    status, found = fit_of(tmp_path, 16.0)
    assert status == 0 and found["fits"] and not found["change_to_fit"]
    # Two arguments and the result of a GiB each, which the sum before it lies in.
    needed = found["needed_bytes"]
    assert needed == pytest.approx(3 * GIB, rel=0.01)
    assert found["capacity_bytes"] == pytest.approx(0.75 * 16 * GIB)
    gb = needed / GIB
    status, found = fit_of(tmp_path, gb / 0.895)
    assert status == 1 and found["out_of_memory"] > 0.5
    assert found["change_to_fit"].startswith("XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 ")
    # Without a GiB of the result it would fit.
    status, found = fit_of(tmp_path, 2.01 / 0.75)
    assert status == 1
    assert found["change_to_fit"].startswith("donated arguments (donate_argnums): results")
    assert fit_of(tmp_path, 2.01 / 0.75, ALIAS)[0] == 0
    # It would still be more than JAX takes of the memory.
    status, found = fit_of(tmp_path, gb - 0.8)
    named = "donated arguments (donate_argnums) and XLA_PYTHON_CLIENT_MEM_FRACTION=0.91 "
    assert status == 1 and found["change_to_fit"].startswith(named)
    status, found = fit_of(tmp_path, gb - 0.8, ALIAS)
    assert status == 1 and "donated" not in found["change_to_fit"]
    # Of 2 GiB that are left with donation, a device has room for 0.74.
    status, found = fit_of(tmp_path, 0.98)
    named = "donated arguments (donate_argnums) and sharding over 3 devices or more"
    assert status == 1 and found["change_to_fit"] == named


#: The peak is in the middle; the result, of an argument's type, is made after it.
LATE = """
import jax, jax.numpy as jnp

def step(w, x):
    scores = jnp.exp(x @ x.T)
    return w * (scores / scores.sum()).max()

def {name}(w, x):
    return step(w, x)

{name} = jax.jit({name}{donated})
{name}.example_args = (
    jax.ShapeDtypeStruct(({gib}, 512, 512, 1024), jnp.float32),
    jax.ShapeDtypeStruct(({rows}, 64), jnp.float32),
)
"""


def change_of(tmp_path, rows: int, donated: str = "") -> tuple[int, str]:
    """Status and change for scores of so many rows beside an argument of 8 GiB, on an L4."""
    text = LATE.format(name="late", donated=donated, gib=8, rows=rows)
    # A name of its own: Python takes a file of one size and second for the one that it compiled.
    file = f"late{rows}{'d' if donated else ''}.py"
    (tmp_path / file).write_text(text)
    words = ("--device", "l4", "--lowering", "fused", "--json")
    done = opcast("fit", f"{file}:late", *words, cwd=tmp_path)
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["results"][0]["change_to_fit"]


def test_what_a_program_is_told_to_change_is_enough(tmp_path):
    # 8 GiB each of the argument and the result, and 7 between them; JAX has 16.6 of an L4's 22.1.
    status, change = change_of(tmp_path, 21 * 2**11)
    assert status == 1
    assert change == "donated arguments (donate_argnums): results then take their place"
    assert change_of(tmp_path, 21 * 2**11, ", donate_argnums=0") == (0, "")
    # 16 between them.
    status, change = change_of(tmp_path, 2**16)
    found = re.fullmatch(
        r"donated arguments \(donate_argnums\) and (\d+)% of the temporaries "
        r"\(a smaller batch, jax.checkpoint\)",
        change,
    )
    assert status == 1 and found, change
    share = int(found[1]) / 100
    assert change_of(tmp_path, int(2**16 * sqrt(share)), ", donate_argnums=0") == (0, "")
    status, change = change_of(tmp_path, int(2**16 * sqrt(share + 0.01)), ", donate_argnums=0")
    assert status == 1 and change


def test_steps_fit_a_device_of_a_file(tmp_path):
    (tmp_path / "big.yaml").write_text("name: big\nbase: h100-sxm\nmemory_gb: 200\n")
    words = ("--workload", "llama-3-8b", "--set", "batch=1,seq=1024", "--json")
    done = opcast("fit", *words, "--device", "big.yaml,h100-sxm", cwd=tmp_path)
    big, usual = json.loads(done.stdout)["results"]
    assert done.returncode == 1 and big["fits"] and not usual["fits"]
    assert (big["device"], usual["device"]) == ("big", "h100-sxm")
    assert big["needed_bytes"] == usual["needed_bytes"]


def test_less_risk_needs_more_room(tmp_path):
    gb = fit_of(tmp_path, 100.0)[1]["needed_bytes"] / GIB
    near = gb / 0.75 * 1.01
    assert fit_of(tmp_path, near)[0] == 0
    status, found = fit_of(tmp_path, near, "", "--risk", "0.1")
    assert status == 1 and 0.1 < found["out_of_memory"] < 0.5
    # What it names is enough for that risk.
    share = float(found["change_to_fit"].split("=")[1].split(" ")[0])
    high = log(found["hi_bytes"] / found["needed_bytes"])
    assert log(share * near / gb) > 0.77 * high


def test_steps_fit_or_name_the_smallest_change():
    words = ("--workload", "llama-3.1-8b", "--set", "batch=16,seq=4096")
    cluster = ("--cluster", "dgx-h100-x16")
    done = opcast("fit", *words, *cluster, "--plan", "tp=8,dp=2", "--json")
    (found,) = json.loads(done.stdout)["results"]
    assert done.returncode == 0 and found["out_of_memory"] < 0.01
    assert found["subject"].startswith("llama-3.1-8b with dp=2,tp=8")
    assert sum(found["parts_bytes"].values()) == pytest.approx(found["needed_bytes"])
    done = opcast("fit", *words, *cluster, "--plan", "tp=2,dp=8")
    assert done.returncode == 1
    assert "does NOT fit" in done.stdout and "would fit with zero=1" in done.stdout
    # The same figures as those of the step.
    step = json.loads(opcast("simulate", *words, *cluster, "--plan", "tp=8,dp=2", "--json").stdout)
    assert step["memory_bytes_per_device"] == pytest.approx(found["needed_bytes"])
    done = opcast("fit", *words, "--device", "h100-sxm,b200", "--json")
    first, second = json.loads(done.stdout)["results"]
    assert done.returncode == 1 and not first["fits"] and second["fits"]


def test_programs_of_pytorch_fit_by_their_own_memory(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "m.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        for layer in self:\n"
        "            x = layer(x)\n"
        "        return x\n"
        "model = Net(*[torch.nn.Linear(4096, 4096) for _ in range(8)]).to('meta')\n"
        "example_args = (torch.zeros(131072, 4096, device='meta'),)\n"
    )
    words = ("m.py:model", "--framework", "torch-eager", "--train", "adamw", "--loss", "sum")
    done = opcast("fit", *words, "--device", "a100-sxm-80gb,t4", "--json", cwd=tmp_path)
    first, second = json.loads(done.stdout)["results"]
    assert done.returncode == 1 and first["fits"] and not second["fits"]
    assert first["parts_bytes"]["weights"] == pytest.approx(8 * 4 * (4096 * 4096 + 4096), rel=0.01)
    assert first["parts_bytes"]["optimizer"] == pytest.approx(
        2 * first["parts_bytes"]["weights"], rel=0.01
    )
    assert "a batch of " in second["change_to_fit"]
    assert second["holder"]["line"].endswith("m.py:5")
    told = opcast("fit", *words, "--device", "t4", cwd=tmp_path).stdout
    assert f"most at {second['holder']['line']} (" in told


def test_the_peak_is_what_predict_answers(tmp_path):
    pytest.importorskip("torch")
    # Buffers of other sizes one after the other: the allocator holds more than is needed.
    layers = ", ".join(
        f"torch.nn.Conv2d({a}, {b}, 3, padding=1)" for a, b in pairwise((8, 24, 40, 12, 64))
    )
    (tmp_path / "m.py").write_text(
        f"import torch\nmodel = torch.nn.Sequential({layers})\n"
        "model.to('meta')\nexample_args = (torch.zeros(64, 8, 96, 96, device='meta'),)\n"
    )
    words = ("m.py:model", "--framework", "torch-eager", "--train", "momentum", "--loss", "sum")
    words += ("--device", "a100-sxm-80gb", "--json")
    (fit,) = json.loads(opcast("fit", *words, cwd=tmp_path).stdout)["results"]
    answer = json.loads(opcast("predict", *words, cwd=tmp_path).stdout)
    own = answer["memory"]
    assert own["needed_bytes"] < own["peak_bytes"]
    assert [fit[k] for k in ("peak_memory_bytes", "lo_bytes", "hi_bytes", "needed_bytes")] == [
        own[k] for k in ("peak_bytes", "lo_bytes", "hi_bytes", "needed_bytes")
    ]
    assert fit["out_of_memory"] == own["out_of_memory"]
    assert sum(fit["parts_bytes"].values()) == pytest.approx(fit["peak_memory_bytes"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "either a PROGRAM, or a model"),
        (("a.mlir",), "one of --device and --cluster"),
        (("a.mlir", "--workload", "llama-3-8b", "--device", "a30"), "either a PROGRAM"),
        (("a.mlir", "--device", "a30", "--plan", "tp=2"), "--plan does not apply to a program"),
        (
            ("--workload", "llama-3-8b", "--device", "a30", "--train", "sgd"),
            "--train does not apply",
        ),
        (
            ("a.mlir", "--device", "a30", "--framework", "torch-eager", "--lowering", "op"),
            "--lowering does not apply",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(words, said):
    done = opcast("fit", *words)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", "").split())
