"""A user of PyTorch at the command line: a .pt2 file, and a module in a Python file."""

import json
import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

from ..support.commands import opcast  # noqa: E402

SOURCE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(256, 512), torch.nn.Linear(512, 10)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))

model = Net()
example_args = (torch.zeros(64, 256),)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch")
    (folder / "net.py").write_text(SOURCE)
    space = {}
    exec(compile(SOURCE, str(folder / "net.py"), "exec"), space)
    program = torch.export.export(space["model"], space["example_args"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, folder / "net.pt2")
    return folder


def predicted(*arguments):
    return json.loads(opcast("predict", *arguments, "--device", "h100-sxm", "--json").stdout)


def test_a_pt2_file_and_a_module_are_predicted_alike(folder):
    options = ("--lowering", "fused")
    file = predicted(str(folder / "net.pt2"), *options)
    module = predicted(f"{folder / 'net.py'}:model", *options)
    assert file["latency_us"] == pytest.approx(module["latency_us"])
    products = [k for k in file["kernels"] if k["kind"] == "gemm"]
    assert {k["source_line"] for k in products} == {f"{folder / 'net.py'}:10"}
    assert {k["module"] for k in products} == {"Net/first", "Net/last"}
    assert any("--framework torch-eager" in note for note in file["notes"])


def test_a_training_step_of_a_pt2_file(folder):
    path = str(folder / "net.pt2")
    forward = predicted(path, "--lowering", "fused")
    step = predicted(path, "--lowering", "fused", "--train", "adamw", "--loss", "cross_entropy")
    assert step["latency_us"] > 2 * forward["latency_us"]
    assert {k["phase"] for k in step["kernels"]} >= {"forward", "backward"}
    # The loss is of opcast's making: no line of what started the command stands for it.
    files = {k["source_line"].rpartition(":")[0] for k in step["kernels"]}
    assert str(folder / "net.py") in files
    assert not [f for f in files if "/typer/" in f or f.endswith("/opcast")]


@pytest.mark.exhaustive  # PyTorch in a process of its own
def test_no_line_of_the_command_stands_for_the_optimiser(folder):
    program = f"{folder / 'net.py'}:model"
    words = ("--device", "rtx4090", "--train", "adamw", "--loss", "sum", "--lowering", "fused")
    command = [sys.executable, "-m", "opcast", "predict", program, *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kernels = json.loads(done.stdout)["kernels"]
    files = {k["source_line"].rpartition(":")[0] for k in kernels}
    assert str(folder / "net.py") in files
    assert not any(file.endswith("__main__.py") for file in files)


def test_pytorchs_own_kernels(folder):
    path = str(folder / "net.pt2")
    text = opcast("predict", path, "--device", "a100-sxm-80gb", "--framework", "torch-eager").stdout
    assert "by torch-eager" in text and "addmm" in text and "net.py:10" in text
    assert "under XLA" in text
    compiled = predicted(path, "--framework", "torch-compiled")
    assert compiled["framework"] == "torch-compiled" and compiled["latency_us"] > 0


def test_pytorchs_kernels_by_line_with_cost_and_timeline(folder, tmp_path):
    path, trace = str(folder / "net.pt2"), tmp_path / "trace.json"
    words = ("--device", "h100-sxm", "--framework", "torch-eager", "--price", "3.6")
    told = opcast("predict", path, *words, "--by", "line", "--timeline", trace)
    assert told.returncode == 0, told.stderr
    # Both layers and the activation stand in one line of the model.
    assert "100.0%" in told.stdout and "net.py:10" in told.stdout and "addmm" in told.stdout
    found = predicted(path, *words[2:])
    assert found["cost"] == pytest.approx(found["latency_us"] * 1e-6 * 3.6 / 3600)
    # Three digits of some 37 billionths of a dollar.
    assert f"cost {found['cost'] * 1e6:.3g}  [" in told.stdout and "per million runs" in told.stdout
    spans = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in spans] == [o["name"] for o in found["operators"]]
    assert spans[-1]["ts"] + spans[-1]["dur"] == pytest.approx(found["latency_us"])
    modules = opcast("predict", path, *words, "--by", "module").stdout
    assert "first" in modules and "last" in modules


def test_strict_names_the_operator_that_nothing_was_learned_of(folder):
    words = ("--device", "gaudi2", "--framework", "torch-eager", "--strict")
    done = opcast("predict", str(folder / "net.pt2"), *words)
    assert done.returncode != 0
    assert "only a roofline estimate" in done.stderr and "net.py:10" in done.stderr


def test_tables_take_training_steps_and_frameworks(folder, tmp_path):
    path = str(folder / "net.pt2")
    step = ("--train", "adamw", "--loss", "cross_entropy")
    rows = {}
    for framework in ("xla", "torch-eager", "torch-compiled"):
        lowering = ("--lowering", "fused") if framework == "xla" else ()
        words = ("--device", "h100-sxm,a100-sxm-80gb,tpu-v5e", *step, "--framework", framework)
        done = opcast("predict", path, f"{folder / 'net.py'}:model", *words, *lowering, "--json")
        assert done.returncode == 0, done.stderr
        rows[framework] = json.loads(done.stdout)
        assert {row["framework"] for row in rows[framework][:2]} == {framework}
        single = predicted(path, *step, "--framework", framework, *lowering)
        assert rows[framework][0]["latency_us"] == pytest.approx(single["latency_us"])
        # A module and its file are the same program.
        assert rows[framework][3]["latency_us"] == pytest.approx(single["latency_us"])
    assert not [row["error"] for row in rows["xla"] if row["error"]]
    assert "supported on GPUs" in rows["torch-eager"][2]["error"]
    assert rows["torch-eager"][2]["latency_us"] is None
    forward = opcast(
        "predict", path, "--device", "h100-sxm,l4", "--framework", "torch-eager", "--json"
    )
    assert rows["torch-eager"][0]["latency_us"] > json.loads(forward.stdout)[0]["latency_us"]


def test_a_table_compares_frameworks(folder):
    path, names = str(folder / "net.pt2"), ["torch-eager", "torch-compiled"]
    words = ("--device", "l4,tpu-v5e", "--framework", ", ".join(names), "--json")
    rows = json.loads(opcast("predict", path, *words).stdout)
    assert [(row["device"], row["framework"]) for row in rows] == [
        (device, name) for device in ("l4", "tpu-v5e") for name in names
    ]
    assert [bool(row["error"]) for row in rows] == [False, False, True, True]
    words = ("--device", "l4", "--framework", "xla,torch-eager")
    done = opcast("predict", path, *words)
    assert done.returncode == 0, done.stderr
    assert "framework" in done.stdout and "xla" in done.stdout and "torch-eager" in done.stdout


def test_a_tied_weight_of_a_file_is_one(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = (
                torch.nn.Embedding(1000, 64),
                torch.nn.Linear(64, 1000, bias=False),
            )
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(self.first(x))

    program = torch.export.export(Tied(), (torch.zeros(4, 8, dtype=torch.long),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, tmp_path / "tied.pt2")
    found = predicted(str(tmp_path / "tied.pt2"), "--framework", "torch-eager")
    assert found["parameter_bytes"] == 4 * 1000 * 64


def test_tables_say_what_is_not_pytorchs(folder, tmp_path):
    other = tmp_path / "step.mlir"
    other.write_text(
        "module @f {func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {\n"
        " return %a : tensor<2xf32>\n}}\n"
    )
    words = ("--device", "h100-sxm", "--framework", "torch-eager", "--json")
    rows = json.loads(opcast("predict", str(folder / "net.pt2"), str(other), *words).stdout)
    assert not rows[0]["error"] and "for PyTorch programs" in rows[1]["error"]
    words = ("--device", "h100-sxm", "--train", "adamw", "--loss", "sum", "--lowering", "fused")
    rows = json.loads(
        opcast("predict", str(folder / "net.pt2"), str(other), *words, "--json").stdout
    )
    assert not rows[0]["error"] and "--train and --loss apply only to PyTorch" in rows[1]["error"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--framework", "torch-eager", "--trip-count", "3"), "--trip-count does not apply"),
        (("--framework", "torch-eager", "--fallback", "op"), "--fallback does not apply"),
        (("--framework", "torch-eager", "--model", "roofline,default"), "takes a single --model"),
        (("--framework", "torch-eager", "--by", "kind"), "kernel, line or module"),
        (("--train", "adamw"), "no loss to train by"),
        (("--train", "lion"), "no optimiser 'lion'"),
        (("--loss", "sum"), "without an optimiser"),
        (("--cluster", "dgx-h100-x16"), "for one device"),
        (("--framework", "torch-eager"), "supported on GPUs"),
        (("--framework", "torch-eager", "--device", "local"), "JAX finds no GPU on this machine"),
        (("--framework", "torch-eager", "--lowering", "fused"), "--lowering does not apply"),
        (("--framework", "jax"), "no PyTorch framework 'jax'"),
        (("--framework", "torch-eager@9.9"), "no PyTorch release 9.9 has"),
        (("--framework", "torch-eager,torch-compiled", "--plot", "p.png"), "--plot does not apply"),
    ],
)
def test_options_that_make_no_sense_are_refused(folder, arguments, said):
    device = () if "--cluster" in arguments else ("--device", "tpu-v5e")
    done = opcast("predict", str(folder / "net.pt2"), *device, *arguments)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.split())


def test_options_of_pytorch_are_refused_elsewhere(tmp_path):
    path = tmp_path / "step.mlir"
    path.write_text(
        "module @f {func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {\n"
        " return %a : tensor<2xf32>\n}}\n"
    )
    for options in (("--train", "sgd"), ("--framework", "torch-eager")):
        done = opcast("predict", str(path), "--device", "h100-sxm", *options)
        assert done.returncode != 0 and "PyTorch" in done.stderr


def test_a_damaged_export_says_so(tmp_path):
    import zipfile

    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/archive_format", "pt2")
    done = opcast("predict", str(path), "--device", "h100-sxm")
    assert done.returncode != 0 and "torch.export.load cannot read it" in done.stderr


def test_without_pytorch_a_file_of_it_says_what_to_install(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    done = opcast("predict", str(folder / "net.pt2"), "--device", "h100-sxm")
    assert done.returncode != 0
    assert "PyTorch is not installed" in done.stderr and "pip install" in done.stderr


def test_a_module_is_saved_as_stablehlo(folder, tmp_path):
    from opcast import read_program, save

    path = save(
        torch.nn.Linear(8, 4), torch.zeros(2, 8), path=tmp_path / "m.mlir", device="h100-sxm"
    )
    assert read_program(path).platforms == ("cuda",)


def test_what_pytorch_runs_is_explained_operator_by_operator(folder):
    path, words = str(folder / "net.pt2"), ("--device", "a100-sxm-80gb", "--framework")
    asked = ("explain", path, *words, "torch-eager", "--top", "2")
    found = json.loads(opcast(*asked, "--json").stdout)
    whole = json.loads(opcast("predict", path, *words, "torch-eager", "--json").stdout)
    assert found["latency_us"] == pytest.approx(whole["latency_us"])
    first, second = found["operators"]
    assert first["share"] >= second["share"] and first["name"] == "addmm"
    own = first["explanation"]
    assert own["family"] == "eager/linear"
    assert first["latency_us"] == pytest.approx(own["latency_us"] * first["factor"])
    parts = own["baseline"] + sum(c["log_ratio"] for c in own["contributions"])
    assert parts == pytest.approx(own["log_ratio"], abs=0.02)
    told = opcast(*asked).stdout
    assert "in this program, of the operator alone" in told and "net.py:10" in told
    refused = opcast(*asked, "--kernel", "addmm")
    assert refused.returncode == 2 and "--framework torch-eager" in refused.stderr
    # The same file under XLA, whose kernels it has otherwise.
    under = opcast("explain", path, "--device", "h100-sxm", "--lowering", "fused", "--top", "1")
    assert under.returncode == 0 and "lowering fused" in under.stdout
