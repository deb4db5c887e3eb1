"""Versions of programs in a git repository of two commits, without a network."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from opcast.common.errors import OpcastError
from opcast.workflows.versions import revisions
from opcast.workflows.versions.diff import Allowed, read_budget
from opcast.workflows.versions.revisions import Versioned

from ...support.commands import opcast

LAYERS = """import jax, jax.numpy as jnp

def mlp(x, w):
    h = jax.nn.gelu(x @ w)
    return h * 2.0
"""
#: The same lines two further down, in more precision.
WIDER = """import jax, jax.numpy as jnp

# Stable in all cases.

def mlp(x, w):
    h = jax.nn.gelu((x @ w).astype(jnp.float32))
    return h * 2.0
"""
STEP = """import jax, jax.numpy as jnp
from layers import mlp

def step(x, w):
    return mlp(x, w)

S = jax.ShapeDtypeStruct
example_args = (S((4096, 2048), jnp.bfloat16), S((2048, 8192), jnp.bfloat16))
"""
BUDGET = """
- name: train step
  program: bench/step.py:step
  device: h100-sxm
  slower: 3%
- program: bench/step.py:step
  device: [a100-sxm-80gb]
  limit: 10ms
"""
FUSED = ("--lowering", "fused")


def git(folder: Path, *arguments: str) -> str:
    own = ("-c", "user.name=Test", "-c", "user.email=test@example.com")
    done = subprocess.run(
        ["git", *own, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q")
    (folder / "bench").mkdir()
    (folder / "bench" / "step.py").write_text(STEP)
    (folder / "bench" / "layers.py").write_text(LAYERS)
    (folder / "opcast-budget.yaml").write_text(BUDGET)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "Add a step")
    (folder / "bench" / "layers.py").write_text(WIDER)
    git(folder, "commit", "-qam", "Widen")
    return folder


@pytest.fixture(scope="module", autouse=True)
def kept_traces(tmp_path_factory):
    """What was traced once is not traced again: each time starts a process with JAX."""
    known, trace = {}, revisions._trace

    def kept(function, text, root, out, platforms):
        file, _, name = function.rpartition(":")
        sources = {path.name: path.read_bytes() for path in Path(file).parent.glob("*.py")}
        key = (*sorted(sources.items()), Path(file).name, name, *platforms)
        if key in known:
            shutil.copytree(known[key], out, dirs_exist_ok=True)
            return
        trace(function, text, root, out, platforms)
        known[key] = shutil.copytree(out, tmp_path_factory.mktemp("traced") / "files")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(revisions, "_trace", kept)
        yield


def test_a_function_is_compared_with_an_earlier_revision(repository):
    words = ("diff", "HEAD~1:bench/step.py:step", "bench/step.py:step", "--device", "h100-sxm")
    # As in a hook of git, whose index is not that of the other working tree.
    env = {"GIT_INDEX_FILE": str(repository / ".git" / "index")}
    done = opcast(*words, *FUSED, "--json", cwd=repository, env=env)
    assert done.returncode == 0, done.stderr
    # A line for each stage where no terminal shows one.
    old, new = words[1:3]
    assert done.stderr.splitlines() == [
        f"reading {new}", f"reading {old}", f"predicting {old} on h100-sxm",
        f"predicting {new} on h100-sxm",
    ]  # fmt: skip
    (one,) = json.loads(done.stdout)["results"]
    assert one["ratio"]["value"] > 1.05 and one["slower_probability"] > 0.8
    # Lines are those of the new version, although modules of one name were imported twice.
    assert {line for c in one["changes"] for line in c["lines"]} <= {"layers.py:6", "layers.py:7"}
    assert any("bf16 widened to f32" in r for c in one["changes"] for r in c["reasons"])
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not git(repository, "status", "--porcelain")
    # The other way round it is faster, and nothing fails.
    back = opcast(
        "diff", *words[2:0:-1], *words[3:], *FUSED, "--fail-above", "1", "--json", cwd=repository
    )
    assert back.returncode == 0 and json.loads(back.stdout)["results"][0]["ratio"]["value"] < 0.95


def test_limits_decide_the_status(repository):
    words = ("diff", "HEAD~1:bench/step.py:step", "HEAD:bench/step.py:step")
    given = (*words, "--device", "h100-sxm,a100-sxm-80gb", *FUSED, "--fail-above", "3")
    done = opcast(*given, cwd=repository)
    assert done.returncode == 1
    # On an A100 it is slower by less.
    assert done.stdout.count("over budget: slower by more than 3 % (") == 1
    assert opcast(*given, "--sure", "0.999", cwd=repository).returncode == 0


def test_a_budget_is_held_or_not_in_markdown(repository):
    budget = ("--budget", "opcast-budget.yaml", *FUSED)
    done = opcast("diff", "HEAD~1", *budget, "--markdown", cwd=repository)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("### opcast: 1 of 2 over budget\n\n| program | device |")
    assert (
        "| train step | h100-sxm |" in done.stdout
        and "| step.py:step | a100-sxm-80gb |" in done.stdout
    )
    assert "bf16 widened to f32" in done.stdout and done.stdout.count("<details open>") == 1
    done = opcast("diff", "HEAD", "HEAD", *budget, cwd=repository)
    assert done.returncode == 0 and done.stdout.count("no kernel differs") == 2


def test_a_program_that_is_new_is_held_to_its_limit_alone(repository, tmp_path):
    (repository / "bench" / "other.py").write_text(STEP)
    budget = tmp_path / "budget.yaml"
    entry = "- {program: bench/other.py:step, device: h100-sxm, slower: 0, limit: %s}\n"
    for limit, status in (("1s", 0), ("1us", 1)):
        budget.write_text(entry % limit)
        done = opcast("diff", "HEAD", "--budget", budget, *FUSED, cwd=repository)
        assert done.returncode == status
        assert "no HEAD:bench/other.py:step" in " ".join(done.stdout.split())
    (repository / "bench" / "other.py").unlink()


def test_what_cannot_be_predicted_hides_no_other_program(repository, tmp_path):
    step = repository / "bench" / "step.py"
    # A function that is new in a file that is not, as pull requests add them.
    step.write_text(STEP + "\n\ndef fresh(x, w):\n    return step(x, w)\n")
    budget = tmp_path / "budget.yaml"
    entries = "- {program: bench/step.py:fresh, device: h100-sxm, slower: 0, limit: %s}\n"
    last = "- {program: bench/step.py:step, device: h100-sxm, slower: 3%%}\n"
    words = ("diff", "HEAD", "--budget", budget, *FUSED)
    budget.write_text((entries + last) % "1us")
    done = opcast(*words, "--json", cwd=repository)
    assert done.returncode == 1, done.stderr
    fresh, other = json.loads(done.stdout)["results"]
    assert fresh["notes"][0].startswith("no HEAD:bench/step.py:fresh")
    assert fresh["excess"] and not other["excess"]
    missing = "- {program: bench/step.py:none, device: 'h100-sxm, h200-sxm', limit: 1s}\n"
    budget.write_text(missing + (entries + last) % "1s")
    done = opcast(*words, "--markdown", cwd=repository)
    assert done.returncode == 1 and done.stdout.startswith("### opcast: 2 of 4 not predicted\n")
    assert done.stdout.count("**error**: bench/step.py:none: step.py has no function 'none'") == 2
    assert "| step.py:step | h100-sxm |" in done.stdout and "no kernel differs" in done.stdout
    data = json.loads(opcast(*words, "--json", cwd=repository).stdout)
    assert not data["passes"] and "no function" in data["results"][0]["error"]
    assert not any(own["excess"] for own in data["results"][2:])
    step.write_text(STEP)


MESH = """import jax, jax.numpy as jnp
from functools import partial
from jax.sharding import AbstractMesh, PartitionSpec as P

mesh = AbstractMesh((8,), ("x",))

@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
def a(x):
    return jax.lax.psum(x * 2, "x") + x

example_args = (jax.ShapeDtypeStruct((1024, 64), jnp.float32),)
"""


def test_a_program_for_several_devices_is_refused_by_the_users_own_name(tmp_path):
    (tmp_path / "coll.py").write_text(MESH)
    done = opcast("diff", "coll.py:a", "coll.py:a", "--device", "h100-sxm", *FUSED, cwd=tmp_path)
    assert done.returncode == 1
    assert "error: coll.py:a: the program is for 8 devices" in done.stderr
    assert "opcast diff compares programs for one device" in done.stderr
    assert "opcast-diff-" not in done.stderr


@pytest.mark.exhaustive  # PyTorch in a process of its own
def test_modules_of_pytorch_are_said_to_be_priced_as_xla_runs_them(tmp_path):
    pytest.importorskip("torch")
    text = "import torch\nmodel = torch.nn.Linear(64, 64)\nexample_args = (torch.ones(8, 64),)\n"
    (tmp_path / "a.py").write_text(text)
    words = ("diff", "a.py:model", "a.py:model", "--device", "h100-sxm", *FUSED, "--json")
    done = opcast(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "as XLA would run it" in json.loads(done.stdout)["results"][0]["notes"][0]


def test_files_are_compared_and_read_at_revisions(tmp_path):
    git(tmp_path, "init", "-q")
    for name, seq in (("a", 64), ("b", 128)):
        done = opcast(
            "zoo", "export", "mlp", "--set", f"batch={seq}", "--out", tmp_path / f"{name}.mlir"
        )
        assert done.returncode == 0, done.stderr
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "Add programs")
    options = ("--device", "h100-sxm", *FUSED, "--json")
    done = opcast("diff", "a.mlir", "b.mlir", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["results"]
    assert one["program"][0].startswith("recompilation: argument ")
    (tmp_path / "a.mlir").unlink()
    again = json.loads(opcast("diff", "HEAD:a.mlir", "b.mlir", *options, cwd=tmp_path).stdout)
    assert again["results"][0]["ratio"] == one["ratio"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("x.mlir", "y.mlir", "--device", "h100-sxm"), "REV:PATH"),
        (
            ("nope:bench/step.py:step", "bench/step.py:step", "--device", "h100-sxm"),
            "no revision",
        ),
        (("HEAD:bench/none.py:step", "bench/step.py:step", "--device", "h100-sxm"), "no such file"),
        (
            ("HEAD:bench/step.py:none", "bench/step.py:step", "--device", "h100-sxm"),
            "has no function",
        ),
        (("x.mlir", "y.mlir"), "--device"),
        (("a", "b", "--device", "h100-sxm", "--sure", "0.9"), "--fail-above"),
        (
            ("a", "b", "--device", "h100-sxm", "--json", "--markdown"),
            "one of --markdown and --json",
        ),
        (("a", "b", "--device", "h100-sxm", "--json", "--top", "3"), "all changes"),
    ],
)
def test_what_cannot_be_compared_is_refused(repository, words, said):
    done = opcast("diff", *words, *FUSED, cwd=repository)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.replace("│", "").split())


def test_texts_are_taken_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    assert Versioned.parse("a.py") == Versioned("", "a.py", "")
    assert Versioned.parse("a.py:f") == Versioned("", "a.py", "f")
    assert Versioned.parse("v1:b/a.py:f") == Versioned("v1", "b/a.py", "f")
    assert Versioned.parse("v1:a.mlir") == Versioned("v1", "a.mlir", "")


def test_budgets_are_read(tmp_path):
    path = tmp_path / "budget.yaml"
    path.write_text(BUDGET)
    first, second = read_budget(path, "v1", "")
    program = "bench/step.py:step"
    assert first == Allowed("train step", f"v1:{program}", program, ("h100-sxm",), 0.03)
    assert second.devices == ("a100-sxm-80gb",) and second.limit_us == pytest.approx(1e4)
    assert read_budget(path, "v1", "v2")[0].new == f"v2:{program}"
    path.write_text("- {program: a, device: 'b, c, b', limit: 1ms}")
    assert read_budget(path, "v1", "")[0].devices == ("b", "c")
    for text, said in (
        ("{}", "list of programs"),
        ("- {program: a}", "program, device"),
        ("- {program: a, device: b}", "needs slower"),
        ("- {program: a, device: b, slower: x}", "not a percentage"),
        ("- {program: a, device: b, limit: x}", "not a duration"),
        # A gate that would never close: seconds where milliseconds were meant, or no device.
        ("- {program: a, device: b, limit: 12}", "no unit: write 12ms"),
        ("- {program: a, device: [], limit: 1ms}", "has no device"),
        ("- {program: a, device: 'b,', limit: 1ms}", "has no device"),
        ("- {program: [a], device: b, limit: 1ms}", "not a file"),
        ("- {program: a, device: b, slower: 1, most: 2}", "needs program and device"),
    ):
        path.write_text(text)
        with pytest.raises(OpcastError, match=said):
            read_budget(path, "v1", "")
